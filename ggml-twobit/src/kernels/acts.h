// acts.h: rounding activations (struct tb_acts of kernels.h), written once for all instruction sets.
#pragma once

#include "f16.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

// sums: of each 16 int8 values of a block; runs: where the scales are, `stride` apart. A block that is not finite gets zeros: its codes'
// part of the product is NaN anyway.
static inline void tb_scale_sums(const int16_t * sums, const struct tb_run * runs, int64_t stride, struct tb_sums * out) {
    float largest = 0.0f;
    bool finite = true;
    for (int run = 0; run < TB_BLOCK_COLS / TB_RUN; run++) {
        const float scale = runs[run * stride].scale;
        finite = finite && scale >= 0.0f; // NaN is not
        largest = scale > largest ? scale : largest;
    }
    float scaled[TB_BLOCK_COLS / 16], most = 0.0f; // in units of the largest scale, in which nothing overflows
    for (int i = 0; i < TB_BLOCK_COLS / 16; i++) {
        scaled[i] = finite && largest > 0.0f ? (float) sums[i] * (runs[i / 2 * stride].scale / largest) : 0.0f;
        most = fabsf(scaled[i]) > most ? fabsf(scaled[i]) : most;
    }
    const float inverse = most > 0.0f ? 32767.0f / most : 0.0f;
    for (int i = 0; i < TB_BLOCK_COLS / 16; i++) {
        out->q[i] = (int16_t) tb_f32_to_bits(scaled[i] * inverse + 0x1.8p23f); // to nearest even: the last bits of the sum
    }
    out->scale = -(most / 32767.0f * largest);
}

// quantize of struct tb_kernels; round(x, q, scale, sums) rounds 32 values to int8 and sums each 16 of them up
template <class ROUND>
static void tb_quantize_with(const struct tb_acts * acts, const float * const * x, int64_t block0, int64_t block1, ROUND round) {
    const int64_t n_runs = acts->cols / TB_RUN, n_blocks = acts->cols / TB_BLOCK_COLS, in_block = TB_BLOCK_COLS / TB_RUN;
    for (int64_t token = 0; token < acts->n_tokens; token++) {
        const int64_t first = token / TB_TOKENS * TB_TOKENS; // of the token's tile
        const int64_t width = tb_tile_width(acts, first);
        struct tb_run * runs = acts->runs + first * n_runs + (token - first);
        for (int64_t block = block0; block < block1; block++) {
            int16_t sums[TB_BLOCK_COLS / 16];
            for (int64_t i = 0; i < in_block && block * in_block + i < n_runs; i++) {
                const int64_t run = block * in_block + i;
                struct tb_run * r = runs + run * width;
                round(x[token] + run * TB_RUN, r->q, &r->scale, sums + 2 * i);
                r->sum = -(sums[2 * i] + sums[2 * i + 1]);
            }
            if (block < n_blocks) {
                tb_scale_sums(sums, runs + block * in_block * width, width, acts->sums + first * n_blocks + block * width + (token - first));
            }
        }
    }
}
