// gptq_residual.cpp: error feedback into R4, R5, R6, R8 (docs/format.md): factor · super · code_s · (q − offset), super for each
// row and 256 columns, code_s for each 64.

#include "gptq.h"

#include "kernels/packing.h"

#include <algorithm>
#include <cmath>

namespace {

const int   MAX_CODE = 127;
const float HEADROOM = 1.25f; // feedback may enlarge a group's targets after its block's super-scale was fixed

// Where the largest target lands, as a share of the grid's end: with few levels it pays to clip it.
struct reach {
    float from, to;
};

reach reach_of(int bits) {
    return bits == 4 ? reach{ 0.72f, 1.40f } : bits == 5 ? reach{ 0.82f, 1.20f } : reach{ 0.90f, 1.08f };
}

float largest(const float * t, int n) {
    float max = 0;
    for (int i = 0; i < n; i++) {
        max = std::max(max, std::fabs(t[i]));
    }
    return max;
}

} // namespace

// The code whose scale, code · unit, gives the columns [k, k + 64) the least loss.
GPTQ_INLINE int choose_code(const gptq_block & block, int k, const float * w, const float * t, int bits, float unit) {
    const int   offset = tb_offset(bits);
    const reach range  = reach_of(bits);
    const float wanted = largest(t + k, TB_GROUP) / ((float) offset * unit); // for the grid's negative end to meet it
    int   best_code = 0;
    float best_loss = INFINITY;
    for (float sign : { 1.0f, -1.0f }) {
        float scales[GPTQ_LANES];
            int codes[GPTQ_LANES];
        for (int i = 0; i < GPTQ_LANES; i++) {
            const float share = range.from + (range.to - range.from) * i / (GPTQ_LANES - 1);
            codes[i]  = (int) std::min((float) MAX_CODE, std::nearbyint(wanted / share)) * (int) sign;
            scales[i] = codes[i] * unit;
        }
        gptq_lanes loss;
        gptq_try<TB_GROUP>(block, k, w, t, gptq_make_grids(scales, (float) -offset, (float) (offset - 1)), loss);
        int i;
        const float least = gptq_least(loss, i);
        if (least < best_loss) {
            best_loss = least;
            best_code = codes[i];
        }
    }
    return best_code;
}

template <int BITS> GPTQ_INLINE void round_block(const gptq_block & block, const float * w, float * t, float * b, gptq_residual_block & y) {
    const int   offset = tb_offset(BITS);
    const float top    = largest(t, block.n) / (offset * reach_of(BITS).from) * HEADROOM;
    y.super = gptq_f16(top / MAX_CODE / y.factor);
    const float unit = tb_f16_to_f32(y.super) * y.factor;

    for (int k = 0, g = 0; k < block.n; k += TB_GROUP, g++) {
        const int code = unit > 0 ? choose_code(block, k, w, t, BITS, unit) : 0;
        int q[GPTQ_BLOCK];
        gptq_commit(block, k, TB_GROUP, w, t, code * unit, 0, -offset, offset - 1, q, b);
        y.code_s[g] = (int8_t) code;
        for (int i = k; i < k + TB_GROUP; i++) {
            y.q[i] = (uint8_t) (q[i] + offset);
        }
    }
}

#define ROUND(BITS)                                                                                                              \
    GPTQ_CLONES static void round_r##BITS(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) { \
        round_block<BITS>(*block, w, t, b, *(gptq_residual_block *) dst);                                                        \
    }

ROUND(4)
ROUND(5)
ROUND(6)
ROUND(8)

const gptq_method * gptq_method_residual(int bits) {
    static const gptq_method methods[] = {
        { TB_BLOCK_COLS, sizeof(gptq_residual_block), 0, nullptr, round_r4 },
        { TB_BLOCK_COLS, sizeof(gptq_residual_block), 0, nullptr, round_r5 },
        { TB_BLOCK_COLS, sizeof(gptq_residual_block), 0, nullptr, round_r6 },
        { TB_BLOCK_COLS, sizeof(gptq_residual_block), 0, nullptr, round_r8 },
    };
    return &methods[bits == 4 ? 0 : bits == 5 ? 1 : bits == 6 ? 2 : 3];
}
