// q2_0.cpp: Q2_0 (ggml type 42): blocks of 64 weights, an f16 scale d and 2-bit codes q, value (q − 1)·d with q in 0…3.
//
// ggml's own quantizer takes d = max|w|, which leaves the outer codes to the extremes alone. Here d is searched on both
// sides of zero: the levels −d, 0, d, 2d lie unevenly, so its sign matters.

#include "q2_0.h"

#include "kernels/f16.h"
#include "scale_search.h"

#include <algorithm>

static const struct tb_search_range LEVELS = { -1.0f, 2.0f };

static float search_scale(const struct tb_search_group & g) {
    if (!(g.max > 1e-30f || g.max < -1e-30f)) {
        return 0.0f;
    }
    struct tb_search_fit best = { 0.0f, 0.0f };
    for (int sign = -1; sign <= 1; sign += 2) {
        for (int step = 4; step <= 20; step++) { // d from 0.2 to 1 of the largest magnitude
            const struct tb_search_fit fit = tb_search_refit(&g, LEVELS, sign * g.max * (step * 0.05f));
            best = fit.gain > best.gain ? fit : best;
        }
    }
    for (int i = 0; i < 3 && best.scale != 0.0f; i++) { // the codes of the refitted scale, and its scale again
        const struct tb_search_fit fit = tb_search_refit(&g, LEVELS, best.scale);
        best = fit.gain > best.gain ? fit : best;
    }
    return best.scale;
}

void tb_q2_0_quantize_row(const float * w, const float * importance, int64_t cols, uint8_t * dst) {
    for (int64_t col = 0; col < cols; col += TB_SEARCH_GROUP, dst += 2 + TB_SEARCH_GROUP / 4) {
        struct tb_search_group g;
        tb_search_load(&g, w + col, importance ? importance + col : nullptr);
        const uint16_t d = tb_f32_to_f16(std::max(-65504.0f, std::min(65504.0f, search_scale(g))));
        uint8_t q[TB_SEARCH_GROUP];
        tb_search_codes(&g, LEVELS, tb_f16_to_f32(d), q);
        dst[0] = d & 0xff;
        dst[1] = d >> 8;
        for (int i = 0; i < TB_SEARCH_GROUP; i += 4) {
            dst[2 + i / 4] = (uint8_t) (q[i] | q[i + 1] << 2 | q[i + 2] << 4 | q[i + 3] << 6);
        }
    }
}
