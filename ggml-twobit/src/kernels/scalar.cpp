// scalar.cpp: the specification. Every other set gives these results, bit for bit (a NaN equals a NaN).

#include "base.h"
#include "f16.h"
#include "formats.h"
#include "kernels.h"
#include "packing.h"

#include <math.h>

// Rounds 32 values to int8: scale = max|x| / 127. sums16: those of 16 rounded values each.
static void quantize_group(const float * x, int8_t * q, int64_t stride, float * scale, int16_t * sums16) {
    uint32_t max_bits = 0; // of |x|: as integers NaN > Inf > everything else
    for (int k = 0; k < TB_ACT_GROUP; k++) {
        const uint32_t bits = tb_f32_to_bits(x[k]) & 0x7fffffff;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = tb_bits_to_f32(max_bits);
    const bool finite = max_bits < 0x7f800000;
    const bool tiny   = max < TB_TINY;
    const float inverse = !finite || tiny ? 0.0f : 127.0f / max;
    *scale = !finite ? NAN : tiny ? 0.0f : max / 127.0f;

    memset(sums16, 0, 2 * sizeof(*sums16));
    for (int k = 0; k < TB_ACT_GROUP; k++) {
        const int8_t v = finite ? (int8_t) lrintf(x[k] * inverse) : 0;
        q[k / 4 * stride + k % 4] = v;
        sums16[k / 16] += v;
    }
}

static void quantize(const struct tb_acts * acts, const float * const * x, int64_t group0, int64_t group1) {
    const int64_t groups = acts->cols / TB_ACT_GROUP;
    for (int64_t token = 0; token < acts->n_tokens; token++) {
        const int64_t first = token / TB_TOKENS * TB_TOKENS; // of the token's tile
        const int64_t width = tb_tile_width(acts, first);
        for (int64_t a = group0 * TB_GROUP / TB_ACT_GROUP; a < group1 * TB_GROUP / TB_ACT_GROUP; a++) {
            const int64_t i = first * groups + a * width + (token - first);
            int8_t * q = acts->q + first * acts->cols + (a * TB_ACT_GROUP / 4 * width + (token - first)) * 4;
            int16_t * sums16 = acts->sums16 + 2 * i;
            quantize_group(x[token] + a * TB_ACT_GROUP, q, 4 * width, &acts->scales[i], sums16);
            acts->sums[i] = -(sums16[0] + sums16[1]);
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
            for (int row = 0; row < TB_TILE_ROWS; row++) {
                uint16_t super;
                memcpy(&super, block + TB_SUPER_OFFSET + 2 * row, 2);
                const int8_t code_s = (int8_t) block[g % 4 * TB_TILE_ROWS + row];
                for (int half = 0; half < 2; half++) {
                    const int64_t a = 2 * g + half, i = first * 2 * groups + a * width + t;
                    const int8_t * q = acts->q + first * acts->cols + (a * TB_ACT_GROUP / 4 * width + t) * 4;
                    int32_t c = tb_offset(m->bits) * acts->sums[i];
                    for (int k = 0; k < TB_ACT_GROUP; k++) {
                        c += codes[row][half * TB_ACT_GROUP + k] * q[k / 4 * 4 * width + k % 4];
                    }
                    acc[t][row] = fmaf((float) c * acts->scales[i], tb_f16_to_f32(super) * code_s, acc[t][row]);
                }
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

// ---- bases (base.h) -------------------------------------------------------------------------------------------------

static float half_at(const uint8_t * halves, int row) {
    uint16_t half;
    memcpy(&half, halves + 2 * row, sizeof(half));
    return tb_f16_to_f32(half);
}

// the 2-bit code of a row and column among a group's codes
static int base_code(const uint8_t * codes, int row, int col) {
    const int step = col / 4;
    return codes[(step / 4 * 2 + row / 16) * 64 + row % 16 * 4 + col % 4] >> (step % 4 * 2) & 3;
}

// what half a group, 32 columns, adds to acc. block: the block's first byte; g: the group within it
static float add_half(const struct tb_base * b, const uint8_t * block, int n_groups, int g, int half, int row, const int8_t * q, int64_t width,
                      float s, float acc) {
    const int col = half * TB_ACT_GROUP;
    int32_t sum = 0, mins = 0;
    if (b->type == TB_BASE_Q2_0) {
        const uint8_t * codes = block + tb_q2_0_format::header(n_groups) + g * tb_q2_0_format::CODES;
        for (int k = 0; k < TB_ACT_GROUP; k++) {
            sum += (base_code(codes, row, col + k) - 1) * q[k / 4 * 4 * width + k % 4];
        }
        return fmaf((float) sum * s, half_at(block + g * 2 * TB_TILE_ROWS, row), acc);
    }
    const uint8_t * scales = block + tb_q2_k_format::SCALES + g * tb_q2_k_format::GROUP_SCALES + 4 * row;
    const uint8_t * codes = block + tb_q2_k_format::header(n_groups) + g * tb_q2_k_format::CODES;
    for (int k = 0; k < TB_ACT_GROUP; k++) {
        const int x = q[k / 4 * 4 * width + k % 4], scale = scales[(col + k) / 16];
        sum += (scale & 15) * base_code(codes, row, col + k) * x;
        mins += (scale >> 4) * x;
    }
    acc = fmaf((float) sum * s, half_at(block, row), acc);
    return fmaf(-((float) mins * s), half_at(block + 2 * TB_TILE_ROWS, row), acc);
}

static void mul_base(const struct tb_base * b, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    const int64_t groups = b->cols / TB_GROUP, tile_nbytes = tb_base_nbytes(b->type, 1, b->cols);
    const int64_t block_nbytes = b->type == TB_BASE_Q2_K ? tb_format_block_nbytes<tb_q2_k_format>(4) : tb_format_block_nbytes<tb_q2_0_format>(4);
    for (int64_t row = tile0 * TB_TILE_ROWS; row < b->rows && row < tile1 * TB_TILE_ROWS; row++) {
        for (int64_t t = 0; t < acts->n_tokens; t++) {
            const int64_t first = t / TB_TOKENS * TB_TOKENS, width = tb_tile_width(acts, first);
            float acc = 0.0f;
            for (int64_t g = 0; g < groups; g++) {
                const uint8_t * block = b->data + row / TB_TILE_ROWS * tile_nbytes + g / 4 * block_nbytes;
                const int n_groups = groups - g / 4 * 4 < 4 ? (int) (groups % 4) : 4;
                for (int half = 0; half < 2; half++) {
                    const int64_t a = 2 * g + half;
                    const int8_t * q = acts->q + first * acts->cols + (a * TB_ACT_GROUP / 4 * width + (t - first)) * 4;
                    const float s = acts->scales[first * 2 * groups + a * width + (t - first)];
                    acc = add_half(b, block, n_groups, g % 4, half, row % TB_TILE_ROWS, q, width, s, acc);
                }
            }
            y[t][row] = acc;
        }
    }
}

static void mul_pair(const struct tb_base * b, const struct tb_matrix * m, const struct tb_acts * acts, float * const * y,
                     int64_t tile0, int64_t tile1) {
    mul_base(b, acts, y, tile0, tile1);
    mul_add(m, acts, y, tile0, tile1);
}

extern const struct tb_kernels tb_kernels_scalar;
const struct tb_kernels tb_kernels_scalar = {
    /* .name     = */ "scalar",
    /* .quantize = */ quantize,
    /* .mul_add  = */ mul_add,
    /* .mul_base = */ mul_base,
    /* .mul_pair = */ mul_pair,
};
