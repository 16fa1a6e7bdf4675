// gptq_q2_k.cpp: error feedback into Q2_K: super-blocks of 256, in them 16 sub-blocks of 16 with values d·s·q − dmin·m, where
// s and m have four bits, q two.
//
// d and dmin are set from fits of each sub-block on its own; then, sub-block after sub-block, all 256 pairs (s, m) are run
// through the 16 columns with their feedback and the best is kept.

#include "gptq_k.h"
#include "gptq_sweep.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define SUB 16          // columns of a sub-block
#define N_SUB 16        // sub-blocks
#define TOP 15          // largest s and m
static_assert(GPTQ_LANES == TOP + 1, "one lane for each scale");

namespace {

struct block_q2_k {
    uint8_t  scales[N_SUB]; // s | m << 4
    uint8_t  qs[64];        // of each half of 128: byte l holds columns l, l + 32, l + 64, l + 96, the first in the lowest bits
    uint16_t d, dmin;
};

// shares of the largest fitted scale (min) that d·15 (dmin·15) is tried at: a few clipped sub-blocks may be worth finer steps
const float shares[] = { 1.0f, 0.94f, 0.88f, 0.82f, 0.75f, 0.68f };
const int   n_finalists = 2; // pairs (d, dmin) that are run through the whole super-block

} // namespace

// the loss of a super-block's fits, rounded to d and dmin, without feedback
GPTQ_INLINE float estimate(const gptq_block & block, const float * t, const gptq_fit * fits, float d, float dmin) {
    gptq_lanes loss = {};
    for (int g = 0; g < N_SUB; g++) {
        const float s = d * std::min((float) TOP, std::nearbyint(fits[g].scale * gptq_inverse(d)));
        const float m = dmin * std::min((float) TOP, std::nearbyint(fits[g].min * gptq_inverse(dmin)));
        const gptq_lanes target = *(const gptq_lanes *) (t + SUB * g);
        gptq_lanes q = (target + m) * gptq_inverse(s);
        gptq_round_clamped(q, 0, 3);
        const gptq_lanes miss = target - (q * s - m);
        loss += miss * miss * *(const gptq_lanes *) (block.d + SUB * g);
    }
    float sum = 0;
    for (int i = 0; i < GPTQ_LANES; i++) {
        sum += loss[i];
    }
    return sum;
}

// all 16 scales of a super-block
GPTQ_INLINE gptq_grids grids_of(float d) {
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) {
        scales[i] = d * i;
    }
    return gptq_make_grids(scales, 0, 3);
}

// the best (s, m) of sub-block g for targets t
GPTQ_INLINE void choose_sub(const gptq_block & block, int g, const float * w, const float * t, float d, float dmin, int & s, int & m) {
    gptq_grids grids = grids_of(d);
    float best = INFINITY;
    s = m = 0;
    for (int j = 0; j <= (dmin > 0 ? TOP : 0); j++) {
        grids.min = dmin * j;
        gptq_lanes loss;
        gptq_try<SUB>(block, SUB * g, w, t, grids, loss);
        int i;
        const float least = gptq_least(loss, i);
        if (least < best) {
            best = least;
            s    = i;
            m    = j;
        }
    }
}

struct q2_k_result {
    float loss;
    int   s[N_SUB], m[N_SUB], q[GPTQ_BLOCK];
    float b[GPTQ_BLOCK];
};

// The whole super-block with one (d, dmin); gives up once the loss exceeds `bound`.
GPTQ_INLINE void round_super(const gptq_block & block, const float * w, const float * targets, float d, float dmin, float bound,
                             q2_k_result & y) {
    alignas(64) float t[GPTQ_BLOCK];
    memcpy(t, targets, sizeof(t));
    y.loss = 0;
    for (int g = 0; g < N_SUB && !(y.loss > bound); g++) {
        choose_sub(block, g, w, t, d, dmin, y.s[g], y.m[g]);
        y.loss += gptq_commit(block, SUB * g, SUB, w, t, d * y.s[g], dmin * y.m[g], 0, 3, y.q, y.b);
    }
}

GPTQ_CLONES static void round_q2_k(const gptq_block * block, const void *, const float * w, float * t, float * b, void * dst) {
    gptq_fit fits[N_SUB], top = { 0, 0 };
    for (int g = 0; g < N_SUB; g++) {
        fits[g]   = gptq_fit_sub<SUB, 3>(t + SUB * g, block->d + SUB * g);
        top.scale = std::max(top.scale, fits[g].scale);
        top.min   = std::max(top.min, fits[g].min);
    }
    struct candidate {
        float    loss;
        uint16_t d, dmin;
    } candidates[36];
    int n = 0;
    for (float share_d : shares) {
        for (float share_m : shares) {
            candidate & c = candidates[n++];
            c.d    = gptq_f16(top.scale / TOP * share_d);
            c.dmin = gptq_f16(top.min / TOP * share_m);
            c.loss = estimate(*block, t, fits, tb_f16_to_f32(c.d), tb_f16_to_f32(c.dmin));
        }
    }
    std::partial_sort(candidates, candidates + n_finalists, candidates + n, [](const candidate & x, const candidate & y) { return x.loss < y.loss; });

    q2_k_result results[2];
    int best = 0, chosen = 0; // the better of the two results, and whose it is
    for (int i = 0; i < n_finalists; i++) {
        q2_k_result & y = results[i == 0 ? 0 : 1 - best];
        round_super(*block, w, t, tb_f16_to_f32(candidates[i].d), tb_f16_to_f32(candidates[i].dmin), i == 0 ? INFINITY : results[best].loss, y);
        if (i > 0 && y.loss < results[best].loss) {
            best   = 1 - best;
            chosen = i;
        }
    }

    const q2_k_result & y = results[best];
    memcpy(b, y.b, sizeof(y.b));
    block_q2_k * packed = (block_q2_k *) dst;
    packed->d    = candidates[chosen].d;
    packed->dmin = candidates[chosen].dmin;
    for (int g = 0; g < N_SUB; g++) {
        packed->scales[g] = (uint8_t) (y.s[g] | y.m[g] << 4);
    }
    for (int half = 0; half < 2; half++) {
        for (int l = 0; l < 32; l++) {
            const int * q = y.q + 128 * half + l;
            packed->qs[32 * half + l] = (uint8_t) (q[0] | q[32] << 2 | q[64] << 4 | q[96] << 6);
        }
    }
}

const gptq_method * gptq_method_q2_k() {
    static const gptq_method method = {
        /* .block_cols  = */ GPTQ_BLOCK,
        /* .block_bytes = */ sizeof(block_q2_k),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .round       = */ round_q2_k,
    };
    return &method;
}

// ---- sweeps ---------------------------------------------------------------------------------------------------------

#define NEIGHBOURS 2 // mins tried on either side of today's

GPTQ_INLINE int shift_of(int col) { // where in its byte
    return col % 128 / 32 * 2;
}

GPTQ_INLINE uint8_t & byte_of(uint8_t * qs, int col) {
    return qs[col / 128 * 32 + col % 32];
}

GPTQ_CLONES static void sweep_q2_k(const gptq_block * block, const void *, const float * w, float * b, float * g, void * data) {
    block_q2_k & packed = *(block_q2_k *) data;
    const float d = tb_f16_to_f32(packed.d), dmin = tb_f16_to_f32(packed.dmin);
    gptq_grids grids = grids_of(d);
    for (int sub = 0; sub < N_SUB; sub++) {
        const int k = SUB * sub, now = packed.scales[sub] >> 4;
        int   s = 0, m = 0;
        float best = -gptq_least_gain(*block, k, SUB, w, b);
        bool  gains = false;
        for (int j = std::max(0, now - NEIGHBOURS); j <= std::min(TOP, now + NEIGHBOURS); j++) {
            grids.min = dmin * j;
            gptq_lanes change;
            gptq_try_change<SUB>(*block, k, b, g, grids, change);
            int lane;
            const float least = gptq_least(change, lane);
            if (least < best) {
                best  = least;
                s     = lane;
                m     = j;
                gains = true;
            }
        }
        if (!gains) {
            continue;
        }
        int q[SUB];
        gptq_make_change(*block, k, SUB, b, g, d * s, dmin * m, 0, 3, q);
        packed.scales[sub] = (uint8_t) (s | m << 4);
        for (int i = 0; i < SUB; i++) {
            uint8_t & byte = byte_of(packed.qs, k + i);
            byte = (uint8_t) ((byte & ~(3 << shift_of(k + i))) | q[i] << shift_of(k + i));
        }
    }
}

GPTQ_CLONES static void read_q2_k(const void * data, float * b) {
    block_q2_k packed = *(const block_q2_k *) data;
    const float d = tb_f16_to_f32(packed.d), dmin = tb_f16_to_f32(packed.dmin);
    for (int i = 0; i < GPTQ_BLOCK; i++) {
        const uint8_t scale = packed.scales[i / SUB];
        b[i] = d * (scale & 15) * (byte_of(packed.qs, i) >> shift_of(i) & 3) - dmin * (scale >> 4);
    }
}

const gptq_sweep * gptq_sweep_q2_k() {
    static const gptq_sweep sweep = {
        /* .block_cols  = */ GPTQ_BLOCK,
        /* .block_bytes = */ sizeof(block_q2_k),
        /* .extra_bytes = */ 0,
        /* .prepare     = */ nullptr,
        /* .read        = */ read_q2_k,
        /* .sweep       = */ sweep_q2_k,
    };
    return &sweep;
}
