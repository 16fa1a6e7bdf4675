// scalar.cpp: the specification. Every other set gives these results, bit for bit (a NaN equals a NaN).

#include "acts.h"
#include "base.h"
#include "f16.h"
#include "formats.h"
#include "kernels.h"
#include "packing.h"

#include <math.h>

#include <vector>

// Rounds 32 values to int8: scale = max|x| / 127. sums: those of 16 rounded values each.
static void round32(const float * x, int8_t * q, float * scale, int16_t * sums) {
    uint32_t max_bits = 0; // of |x|: as integers NaN > Inf > everything else
    for (int k = 0; k < TB_RUN; k++) {
        const uint32_t bits = tb_f32_to_bits(x[k]) & 0x7fffffff;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float max = tb_bits_to_f32(max_bits);
    const bool finite = max_bits < 0x7f800000;
    const bool tiny   = max < TB_TINY;
    const float inverse = !finite || tiny ? 0.0f : 127.0f / max;
    *scale = !finite ? NAN : tiny ? 0.0f : max / 127.0f;

    memset(sums, 0, 2 * sizeof(*sums));
    for (int k = 0; k < TB_RUN; k++) {
        q[k] = finite ? (int8_t) lrintf(x[k] * inverse) : 0;
        sums[k / 16] += q[k];
    }
}

static void quantize(const struct tb_acts * acts, const float * const * x, int64_t block0, int64_t block1) {
    tb_quantize_with(acts, x, block0, block1, round32);
}

// what a token has in struct tb_acts
struct token {
    const struct tb_acts * acts;
    int64_t first, width, t; // its tile's first token and number of tokens, its place there

    token(const struct tb_acts * a, int64_t i) : acts(a), first(i / TB_TOKENS * TB_TOKENS), width(tb_tile_width(a, first)), t(i - first) {}

    const struct tb_run & run(int64_t i) const { return acts->runs[first * (acts->cols / TB_RUN) + i * width + t]; }
    const struct tb_sums & sums(int64_t block) const { return acts->sums[first * (acts->cols / TB_BLOCK_COLS) + block * width + t]; }
};

// ---- residuals (docs/format.md) -------------------------------------------------------------------------------------

static float half_at(const uint8_t * halves, int row) {
    uint16_t half;
    memcpy(&half, halves + 2 * row, sizeof(half));
    return tb_f16_to_f32(half);
}

// acc[token][row] = the chain of docs/format.md over one super-tile
static void tile_product(const struct tb_matrix * m, const uint8_t * data, const struct tb_acts * acts, float * acc) {
    const uint8_t * block  = data;
    const uint8_t * packed = data + TB_BLOCK_SCALES;
    for (int64_t g = 0; g < m->cols / TB_GROUP; g++, packed += tb_group_nbytes(m->bits)) {
        if (g > 0 && g % 4 == 0) {
            block  = packed;
            packed = block + TB_BLOCK_SCALES;
        }
        uint8_t codes[TB_TILE_ROWS][TB_GROUP];
        tb_unpack_group(m->bits, packed, codes[0]);
        for (int64_t i = 0; i < acts->n_tokens; i++) {
            const token x(acts, i);
            for (int row = 0; row < TB_TILE_ROWS; row++) {
                const float scale = half_at(block + TB_SUPER_OFFSET, row) * (int8_t) block[g % 4 * TB_TILE_ROWS + row];
                float sum = 0.0f;
                for (int64_t run = 2 * g; run < 2 * g + 2; run++) {
                    int32_t c = tb_offset(m->bits) * x.run(run).sum;
                    for (int k = 0; k < TB_RUN; k++) {
                        c += codes[row][run % 2 * TB_RUN + k] * x.run(run).q[k];
                    }
                    sum = fmaf((float) c, x.run(run).scale, sum);
                }
                acc[i * TB_TILE_ROWS + row] = fmaf(sum, scale, acc[i * TB_TILE_ROWS + row]);
            }
        }
    }
}

static void mul_add(const struct tb_matrix * m, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    for (int64_t tile = tile0; tile < tile1; tile++) {
        std::vector<float> acc(acts->n_tokens * TB_TILE_ROWS, 0.0f);
        tile_product(m, m->data + tile * tb_tile_nbytes(m->bits, m->cols), acts, acc.data());
        for (int64_t i = 0; i < acts->n_tokens; i++) {
            for (int64_t row = tile * TB_TILE_ROWS; row < m->rows && row < (tile + 1) * TB_TILE_ROWS; row++) {
                y[i][row] = fmaf(m->factor, acc[i * TB_TILE_ROWS + row % TB_TILE_ROWS], y[i][row]);
            }
        }
    }
}

// ---- bases (base.h) -------------------------------------------------------------------------------------------------

// bits `shift` and the next of byte `at` of a row in the vector of step `step` of a group
static int code_at(const uint8_t * codes, int row, int step, int at, int shift) {
    return codes[(2 * step + row / 16) * 64 + row % 16 * 4 + at] >> shift & 3;
}

// block: the block's first byte; g: the group in it; group: the one in the row
static float add_q2_0(const uint8_t * block, int n_groups, int g, int64_t group, int row, const token & x, float acc) {
    const uint8_t * codes = block + tb_q2_0_format::beside(n_groups) + g * tb_q2_0_format::CODES;
    float sum = 0.0f;
    for (int half = 0; half < 2; half++) {
        const int64_t run = 2 * group + half;
        int32_t c = 0;
        for (int k = 0; k < TB_RUN; k++) {
            const int col = half * TB_RUN + k;
            c += (code_at(codes, row, col / 16, col % 4, col % 16 / 4 * 2) - 1) * x.run(run).q[k];
        }
        sum = fmaf((float) c, x.run(run).scale, sum);
    }
    return fmaf(sum, half_at(block + g * 2 * TB_TILE_ROWS, row), acc);
}

static float add_q2_k(const uint8_t * block, int64_t index, int row, const token & x, float acc) {
    static const int SCALE_AT[] = { 0, 16, 4, 20 }; // of a group's four sub-blocks
    float sum = 0.0f;
    int32_t mins = 0;
    for (int g = 0; g < 4; g++) {
        const uint8_t * group = block + g * tb_q2_k_format::CODES;
        uint32_t scales;
        memcpy(&scales, group + 4 * row, sizeof(scales));
        for (int half = 0; half < 2; half++) {
            const int64_t run = 8 * index + 2 * g + half;
            int32_t c = 0;
            for (int k = 0; k < TB_RUN; k++) {
                const int b = 2 * half + k / 16; // the sub-block
                c += (int) (scales >> SCALE_AT[b] & 15) * code_at(group + tb_q2_k_format::SCALES, row, k % 16 / 4, k % 4, 2 * b) * x.run(run).q[k];
            }
            sum = fmaf((float) c, x.run(run).scale, sum);
        }
        for (int b = 0; b < 4; b++) {
            mins += (int) (scales >> (SCALE_AT[b] + 8) & 15) * x.sums(index).q[4 * g + b];
        }
    }
    acc = fmaf(sum, half_at(block + tb_q2_k_format::D, row), acc);
    return fmaf((float) mins * x.sums(index).scale, half_at(block + tb_q2_k_format::DMIN, row), acc);
}

static void mul_base(const struct tb_base * b, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    const int64_t tile_nbytes = tb_base_nbytes(b->type, 1, b->cols);
    for (int64_t i = 0; i < acts->n_tokens; i++) {
        const token x(acts, i);
        for (int64_t row = tile0 * TB_TILE_ROWS; row < b->rows && row < tile1 * TB_TILE_ROWS; row++) {
            const uint8_t * block = b->data + row / TB_TILE_ROWS * tile_nbytes;
            const int r = row % TB_TILE_ROWS;
            float acc = 0.0f;
            for (int64_t index = 0; index < tb_n_blocks(b->cols); index++) {
                if (b->type == TB_BASE_Q2_K) {
                    acc = add_q2_k(block, index, r, x, acc);
                    block += tb_format_block_nbytes<tb_q2_k_format>(4);
                    continue;
                }
                const int n_groups = (b->cols - index * TB_BLOCK_COLS) / TB_GROUP < 4 ? (int) (b->cols / TB_GROUP % 4) : 4;
                for (int g = 0; g < n_groups; g++) {
                    acc = add_q2_0(block, n_groups, g, 4 * index + g, r, x, acc);
                }
                block += tb_format_block_nbytes<tb_q2_0_format>(n_groups);
            }
            y[i][row] = acc;
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
