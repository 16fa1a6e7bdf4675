// gptq_q2_0.cpp: error feedback into Q2_0: blocks of 64, values −d, 0, d, 2d, where d is f16 and may be negative.

#include "gptq.h"

#include <cmath>
#include <cstring>

#define N 64

namespace {

struct block_q2_0 {
    uint16_t d;
    uint8_t  qs[N / 4]; // four levels of 0…3 a byte, the first in the lowest bits
};

// scales tried: multiples of the targets' rms, both signs
const float coarse_from = 0.35f, coarse_step = 0.1f;

struct choice {
    float d = 0, loss = INFINITY;
};

} // namespace

// Tries d = (from + step · lane) · unit.
GPTQ_INLINE void try_scales(const gptq_block & block, const float * w, const float * t, float unit, float from, float step, choice & best) {
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) {
        scales[i] = tb_f16_to_f32(gptq_f16((from + step * i) * unit));
    }
    gptq_lanes loss;
    gptq_try<N>(block, 0, w, t, gptq_make_grids(scales, -1, 2), loss);
    int i;
    const float least = gptq_least(loss, i);
    if (least < best.loss) {
        best.loss = least;
        best.d    = scales[i];
    }
}

GPTQ_CLONES static void round_q2_0(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) {
    float sum = 0, weight = 0;
    for (int i = 0; i < N; i++) {
        sum += t[i] * t[i] * block->d[i];
        weight += block->d[i];
    }
    const float rms = std::sqrt(sum / weight);

    choice best;
    try_scales(*block, w, t, rms, coarse_from, coarse_step, best);
    try_scales(*block, w, t, -rms, coarse_from, coarse_step, best);
    const float unit = std::copysign(rms, best.d); // and between the coarse ones
    try_scales(*block, w, t, unit, std::fabs(best.d) / (rms > 0 ? rms : 1) - coarse_step, coarse_step / 8, best);

    int q[N];
    gptq_commit(*block, 0, N, w, t, best.d, 0, -1, 2, q, b);
    block_q2_0 * y = (block_q2_0 *) dst;
    y->d = gptq_f16(best.d);
    memset(y->qs, 0, sizeof(y->qs));
    for (int i = 0; i < N; i++) {
        y->qs[i / 4] |= (q[i] + 1) << 2 * (i % 4);
    }
}

const gptq_method * gptq_method_q2_0() {
    static const gptq_method method = {
        /* .block_cols  = */ N,
        /* .block_bytes = */ sizeof(block_q2_0),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .round       = */ round_q2_0,
    };
    return &method;
}
