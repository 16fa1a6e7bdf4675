// gptq_q2_0.cpp: error feedback into the types with one f16 scale a block, which may be negative: Q2_0 (blocks of 64, values −d, 0, d,
// 2d) and, for tensors that deserve more, Q4_0 (blocks of 32, values −8d … 7d).

#include "gptq_sweep.h"

namespace {

struct block_q2_0 {
    uint16_t d;
    uint8_t  qs[16]; // four levels of 0…3 a byte, the first in the lowest bits
};

struct block_q4_0 {
    uint16_t d;
    uint8_t  qs[16]; // byte i holds columns i (low) and i + 16 (high)
};

struct choice {
    float d = 0, loss = INFINITY;
};

} // namespace

// Tries d = (from + step · lane) · unit for one block of N columns with levels LO…HI.
template <int N, int LO, int HI>
GPTQ_INLINE void try_scales(const gptq_block & block, const float * w, const float * t, float unit, float from, float step, choice & best) {
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) {
        scales[i] = tb_f16_to_f32(gptq_f16((from + step * i) * unit));
    }
    gptq_lanes loss;
    gptq_try<N>(block, 0, w, t, gptq_make_grids(scales, LO, HI), loss);
    int i;
    const float least = gptq_least(loss, i);
    if (least < best.loss) {
        best.loss = least;
        best.d    = scales[i];
    }
}

// The block's best d and its levels q − LO: multiples of the targets' rms from `from` on, both signs, then between those.
template <int N, int LO, int HI>
GPTQ_INLINE uint16_t round_block(const gptq_block & block, const float * w, float * t, float * b, float from, float step, int * q) {
    float sum = 0, weight = 0;
    for (int i = 0; i < N; i++) {
        sum += t[i] * t[i] * block.d[i];
        weight += block.d[i];
    }
    const float rms = std::sqrt(sum / weight);
    choice best;
    try_scales<N, LO, HI>(block, w, t, rms, from, step, best);
    try_scales<N, LO, HI>(block, w, t, -rms, from, step, best);
    const float unit = std::copysign(rms, best.d);
    try_scales<N, LO, HI>(block, w, t, unit, std::fabs(best.d) / (rms > 0 ? rms : 1) - step, step / 8, best);
    gptq_commit(block, 0, N, w, t, best.d, 0, LO, HI, q, b);
    for (int i = 0; i < N; i++) {
        q[i] -= LO;
    }
    return gptq_f16(best.d);
}

GPTQ_INLINE void pack_q2_0(const int * q, block_q2_0 & packed) {
    for (int i = 0; i < 16; i++) {
        packed.qs[i] = (uint8_t) (q[4 * i] | q[4 * i + 1] << 2 | q[4 * i + 2] << 4 | q[4 * i + 3] << 6);
    }
}

GPTQ_CLONES static void round_q2_0(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) {
    int q[64];
    block_q2_0 & packed = *(block_q2_0 *) dst;
    packed.d = round_block<64, -1, 2>(*block, w, t, b, 0.35f, 0.1f, q);
    pack_q2_0(q, packed);
}

GPTQ_CLONES static void round_q4_0(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) {
    int q[32];
    block_q4_0 & packed = *(block_q4_0 *) dst;
    packed.d = round_block<32, -8, 7>(*block, w, t, b, 0.15f, 0.025f, q);
    for (int i = 0; i < 16; i++) {
        packed.qs[i] = (uint8_t) (q[i] | q[i + 16] << 4);
    }
}

const gptq_method * gptq_method_q2_0() {
    static const gptq_method method = {
        /* .block_cols  = */ 64,
        /* .block_bytes = */ sizeof(block_q2_0),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .round       = */ round_q2_0,
    };
    return &method;
}

const gptq_method * gptq_method_q4_0() {
    static const gptq_method method = {
        /* .block_cols  = */ 32,
        /* .block_bytes = */ sizeof(block_q4_0),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .round       = */ round_q4_0,
    };
    return &method;
}

// ---- sweeps over Q2_0 -----------------------------------------------------------------------------------------------

GPTQ_CLONES static void sweep_q2_0(const gptq_block * block, const void *, const float * w, float * b, float * g, void * data) {
    block_q2_0 & packed = *(block_q2_0 *) data;
    const float d = tb_f16_to_f32(packed.d);
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) { // the first is today's
        scales[i] = i == 0 ? d : tb_f16_to_f32(gptq_f16(d * (0.86f + 0.018f * i)));
    }
    gptq_lanes change;
    gptq_try_change<64>(*block, 0, b, g, gptq_make_grids(scales, -1, 2), change);
    int lane;
    if (!(gptq_least(change, lane) < -gptq_least_gain(*block, 0, 64, w, b))) {
        return;
    }
    int q[64];
    gptq_make_change(*block, 0, 64, b, g, scales[lane], 0, -1, 2, q);
    packed.d = gptq_f16(scales[lane]);
    for (int & level : q) {
        level += 1;
    }
    pack_q2_0(q, packed);
}

GPTQ_CLONES static void read_q2_0(const void * data, float * b) {
    const block_q2_0 & packed = *(const block_q2_0 *) data;
    const float d = tb_f16_to_f32(packed.d);
    for (int i = 0; i < 64; i++) {
        b[i] = d * ((packed.qs[i / 4] >> (2 * (i % 4)) & 3) - 1);
    }
}

const gptq_sweep * gptq_sweep_q2_0() {
    static const gptq_sweep sweep = {
        /* .block_cols  = */ 64,
        /* .block_bytes = */ sizeof(block_q2_0),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .read        = */ read_q2_0,
        /* .sweep       = */ sweep_q2_0,
    };
    return &sweep;
}
