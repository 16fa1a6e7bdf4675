// scalar.cpp: the specification. Every other set gives these results, bit for bit (a NaN equals a NaN).

#include "f16.h"
#include "kernels.h"
#include "packing.h"

#include <math.h>

// Rounds 64 values to int8: scale = max|x| / 127. Returns the sum of the rounded values.
static int32_t quantize_group(const float * x, int8_t * q, int64_t stride, float * scale) {
    uint32_t max_bits = 0; // of |x|: as integers NaN > Inf > everything else
    for (int k = 0; k < TB_GROUP; k++) {
        const uint32_t bits = tb_f32_to_bits(x[k]) & 0x7fffffff;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = tb_bits_to_f32(max_bits);
    const bool finite = max_bits < 0x7f800000;
    const bool tiny   = max < TB_TINY;
    const float inverse = !finite || tiny ? 0.0f : 127.0f / max;
    *scale = !finite ? NAN : tiny ? 0.0f : max / 127.0f;

    int32_t sum = 0;
    for (int k = 0; k < TB_GROUP; k++) {
        const int8_t v = finite ? (int8_t) lrintf(x[k] * inverse) : 0;
        q[k / 4 * stride + k % 4] = v;
        sum += v;
    }
    return sum;
}

static void quantize(const struct tb_acts * acts, const float * const * x, int64_t group0, int64_t group1) {
    const int64_t groups = acts->cols / TB_GROUP;
    for (int64_t token = 0; token < acts->n_tokens; token++) {
        const int64_t first = token / TB_TOKENS * TB_TOKENS; // of the token's tile
        const int64_t width = tb_tile_width(acts, first);
        for (int64_t g = group0; g < group1; g++) {
            const int64_t i = first * groups + g * width + (token - first);
            int8_t * q = acts->q + first * acts->cols + (g * TB_GROUP / 4 * width + (token - first)) * 4;
            acts->sums[i] = quantize_group(x[token] + g * TB_GROUP, q, 4 * width, &acts->scales[i]);
        }
    }
}

// acc[token][row] = the chain of docs/format.md over one super-tile, for one tile of tokens
static void tile_product(const struct tb_matrix * m, const uint8_t * data, const struct tb_acts * acts, int64_t first,
                         float (*acc)[TB_TILE_ROWS]) {
    const int64_t groups = m->cols / TB_GROUP;
    const int64_t width  = tb_tile_width(acts, first);
    uint8_t codes[TB_TILE_ROWS][TB_GROUP];
    const uint8_t * block  = data;
    const uint8_t * packed = data + TB_BLOCK_SCALES;
    for (int64_t g = 0; g < groups; g++, packed += tb_group_nbytes(m->bits)) {
        if (g > 0 && g % 4 == 0) {
            block  = packed;
            packed = block + TB_BLOCK_SCALES;
        }
        tb_unpack_group(m->bits, packed, codes[0]);
        for (int64_t t = 0; t < width; t++) {
            const int64_t i = first * groups + g * width + t;
            const int8_t * q = acts->q + first * acts->cols + (g * TB_GROUP / 4 * width + t) * 4;
            for (int row = 0; row < TB_TILE_ROWS; row++) {
                int32_t c = -tb_offset(m->bits) * acts->sums[i];
                for (int k = 0; k < TB_GROUP; k++) {
                    c += codes[row][k] * q[k / 4 * 4 * width + k % 4];
                }
                uint16_t super;
                memcpy(&super, block + TB_SUPER_OFFSET + 2 * row, 2);
                const int8_t code_s = (int8_t) block[g % 4 * TB_TILE_ROWS + row];
                acc[t][row] = fmaf((float) c * acts->scales[i], tb_f16_to_f32(super) * code_s, acc[t][row]);
            }
        }
    }
}

static void mul_add(const struct tb_matrix * m, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    for (int64_t tile = tile0; tile < tile1; tile++) {
        const uint8_t * data = m->data + tile * tb_tile_nbytes(m->bits, m->cols);
        for (int64_t first = 0; first < acts->n_tokens; first += TB_TOKENS) {
            float acc[TB_TOKENS][TB_TILE_ROWS] = {};
            tile_product(m, data, acts, first, acc);
            for (int64_t t = 0; t < tb_tile_width(acts, first); t++) {
                for (int64_t row = tile * TB_TILE_ROWS; row < m->rows && row < (tile + 1) * TB_TILE_ROWS; row++) {
                    float * out = y[first + t] + row;
                    *out = fmaf(m->factor, acc[t][row % TB_TILE_ROWS], *out);
                }
            }
        }
    }
}

extern const struct tb_kernels tb_kernels_scalar;
const struct tb_kernels tb_kernels_scalar = {
    /* .name     = */ "scalar",
    /* .quantize = */ quantize,
    /* .mul_add  = */ mul_add,
};
