// gptq_q4_k.cpp: error feedback into Q4_K: super-blocks of 256, in them 8 sub-blocks of 32 with values d·s·q − dmin·m, where s and m
// have six bits, q four. For tensors that deserve more than two bits.

#include "gptq_k.h"

#define SUB 32   // columns of a sub-block
#define N_SUB 8  // sub-blocks
#define TOP 63   // largest s and m
#define LEVELS 15
#define NEAR_M 1 // mins tried on either side of the fitted one; of scales, 8

namespace {

struct block_q4_k {
    uint16_t d, dmin;
    uint8_t  scales[12]; // eight s and eight m of six bits
    uint8_t  qs[128];    // of each 64 columns: byte l holds columns l (low) and l + 32 (high)
};

int code_of(float value, float unit) {
    return (int) std::max(0.0f, std::min((float) TOP, std::nearbyint(value * gptq_inverse(unit))));
}

} // namespace

// the best (s, m) of sub-block g near the fit of its targets
GPTQ_INLINE void choose_sub(const gptq_block & block, int g, const float * w, const float * t, float d, float dmin, int & s, int & m) {
    const gptq_fit fit    = gptq_fit_sub<SUB, LEVELS>(t + SUB * g, block.d + SUB * g);
    const int      middle = code_of(fit.min, dmin);
    const int      first  = std::min(std::max(0, code_of(fit.scale, d) - 8), TOP + 1 - GPTQ_LANES);
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) {
        scales[i] = d * (first + i);
    }
    gptq_grids grids = gptq_make_grids(scales, 0, LEVELS);
    float best = INFINITY;
    s = m = 0;
    for (int j = std::max(0, middle - NEAR_M); j <= std::min(TOP, middle + NEAR_M); j++) {
        grids.min = dmin * j;
        gptq_lanes loss;
        gptq_try<SUB>(block, SUB * g, w, t, grids, loss);
        int i;
        const float least = gptq_least(loss, i);
        if (least < best) {
            best = least;
            s    = first + i;
            m    = j;
        }
    }
}

static void pack_scales(const int * s, const int * m, uint8_t * scales) {
    for (int g = 0; g < 4; g++) { // the first four keep their six bits, the others' upper two go on top of those
        scales[g]     = (uint8_t) (s[g] | s[g + 4] >> 4 << 6);
        scales[g + 4] = (uint8_t) (m[g] | m[g + 4] >> 4 << 6);
        scales[g + 8] = (uint8_t) ((s[g + 4] & 15) | (m[g + 4] & 15) << 4);
    }
}

GPTQ_CLONES static void round_q4_k(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) {
    gptq_fit top = { 0, 0 };
    for (int g = 0; g < N_SUB; g++) {
        const gptq_fit fit = gptq_fit_sub<SUB, LEVELS>(t + SUB * g, block->d + SUB * g);
        top.scale = std::max(top.scale, fit.scale);
        top.min   = std::max(top.min, fit.min);
    }
    block_q4_k & packed = *(block_q4_k *) dst;
    packed.d    = gptq_f16(top.scale / TOP);
    packed.dmin = gptq_f16(top.min / TOP);
    const float d = tb_f16_to_f32(packed.d), dmin = tb_f16_to_f32(packed.dmin);

    int s[N_SUB], m[N_SUB], q[GPTQ_BLOCK];
    for (int g = 0; g < N_SUB; g++) {
        choose_sub(*block, g, w, t, d, dmin, s[g], m[g]);
        gptq_commit(*block, SUB * g, SUB, w, t, d * s[g], dmin * m[g], 0, LEVELS, q, b);
    }
    pack_scales(s, m, packed.scales);
    for (int c = 0; c < GPTQ_BLOCK; c += 64) {
        for (int l = 0; l < 32; l++) {
            packed.qs[c / 2 + l] = (uint8_t) (q[c + l] | q[c + 32 + l] << 4);
        }
    }
}

const gptq_method * gptq_method_q4_k() {
    static const gptq_method method = {
        /* .block_cols  = */ GPTQ_BLOCK,
        /* .block_bytes = */ sizeof(block_q4_k),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .round       = */ round_q4_k,
    };
    return &method;
}
