// gptq_q3_k.cpp: error feedback into Q3_K: super-blocks of 256, in them 16 sub-blocks of 16 with values d·(s − 32)·q, where s has six
// bits and −4 ≤ q ≤ 3. For tensors that deserve more than two bits.

#include "gptq.h"

#include <algorithm>

#define SUB 16   // columns of a sub-block
#define N_SUB 16 // sub-blocks
#define MID 32   // s − 32 is −32…31

namespace {

struct block_q3_k {
    uint8_t  hmask[32];  // bit 4·half + j of byte l: the third bit of column 128·half + 32·j + l
    uint8_t  qs[64];     // its lower two, at bit 2·j of byte 32·half + l
    uint8_t  scales[12]; // sixteen s of six bits
    uint16_t d;
};

// Where the largest target lands, as a share of the grid's end: with eight levels it pays to clip it.
const float reach_from = 0.6f, reach_to = 1.15f;

float largest(const float * t) {
    float max = 0;
    for (int i = 0; i < SUB; i++) {
        max = std::max(max, std::fabs(t[i]));
    }
    return max;
}

} // namespace

// the best s − 32 of sub-block g
GPTQ_INLINE int choose_sub(const gptq_block & block, int g, const float * w, const float * t, float d) {
    const float wanted = largest(t + SUB * g) / 4 * gptq_inverse(d);
    float best_loss = INFINITY;
    int   best = 0;
    for (int sign : { 1, -1 }) {
        float scales[GPTQ_LANES];
        int   codes[GPTQ_LANES];
        for (int i = 0; i < GPTQ_LANES; i++) {
            const float share = reach_from + (reach_to - reach_from) * i / (GPTQ_LANES - 1);
            codes[i]  = sign * (int) std::min(MID - 1.0f, std::nearbyint(wanted / share));
            scales[i] = d * codes[i];
        }
        gptq_lanes loss;
        gptq_try<SUB>(block, SUB * g, w, t, gptq_make_grids(scales, -4, 3), loss);
        int i;
        const float least = gptq_least(loss, i);
        if (least < best_loss) {
            best_loss = least;
            best      = codes[i];
        }
    }
    return best;
}

GPTQ_CLONES static void round_q3_k(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) {
    float top = 0;
    for (int g = 0; g < N_SUB; g++) {
        top = std::max(top, largest(t + SUB * g));
    }
    block_q3_k & packed = *(block_q3_k *) dst;
    memset(&packed, 0, sizeof(packed));
    packed.d = gptq_f16(top / (4 * 0.8f) / (MID - 1)); // the largest sub-block is clipped a little as well
    const float d = tb_f16_to_f32(packed.d);

    int q[GPTQ_BLOCK];
    for (int g = 0; g < N_SUB; g++) {
        const int s = choose_sub(*block, g, w, t, d);
        gptq_commit(*block, SUB * g, SUB, w, t, d * s, 0, -4, 3, q, b);
        const int code = s + MID;
        packed.scales[g % 8] |= (uint8_t) ((code & 15) << (g < 8 ? 0 : 4));
        packed.scales[8 + g % 4] |= (uint8_t) (code >> 4 << 2 * (g / 4));
    }
    for (int k = 0; k < GPTQ_BLOCK; k++) {
        const int half = k / 128, j = k / 32 % 4, l = k % 32, code = q[k] + 4;
        packed.qs[32 * half + l] |= (uint8_t) ((code & 3) << 2 * j);
        packed.hmask[l] |= (uint8_t) (code >> 2 << (4 * half + j));
    }
}

const gptq_method * gptq_method_q3_k() {
    static const gptq_method method = {
        /* .block_cols  = */ GPTQ_BLOCK,
        /* .block_bytes = */ sizeof(block_q3_k),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .round       = */ round_q3_k,
    };
    return &method;
}
