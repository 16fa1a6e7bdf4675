// gptq_sweep.h: sweeps over a base that has been rounded once (gptq.h), to make up for what it could not know.
//
// Error feedback rounds a column for the errors of those before it; those behind it are not there yet. With all of them there, column k
// of a row w ≈ b is rounded anew: with e = w − b and g = e H, replacing b_k by v changes the loss e H eᵀ by
//
//     δ (2 g_k + δ H_kk)      δ = b_k − v
//
// which is least for the v nearest b_k + g_k / H_kk. (Coordinate descent; Behdin et al. 2023, arXiv:2309.01885, for uniform grids.)
// Here the scales are chosen anew, too: of each sub-block all scales and neighbouring mins are run through its columns, and the
// change is made if it gains. So no sweep makes the loss larger.
#pragma once

#include "gptq.h"

// How one kind of block is swept. Of a gptq_block, u holds H above the diagonal and d its diagonal; g is the block's columns of e H.
struct gptq_sweep {
    int    block_cols;
    size_t block_bytes;
    size_t extra_bytes; // bytes that `prepare` needs, 0 without one
    // works out whatever is the same for all rows
    void (*prepare)(const gptq_block * block, void * extra);
    // the values of a packed block
    void (*read)(const void * data, float * b);
    // Improves one row's block in place: b, data; g is changed on the way. w: the block's weights.
    void (*sweep)(const gptq_block * block, const void * extra, const float * w, float * b, float * g, void * data);
};

const gptq_sweep * gptq_sweep_q2_0();
const gptq_sweep * gptq_sweep_q2_k();
const gptq_sweep * gptq_sweep_iq2_xs();

// What a change must gain to be made: a little of the loss that the columns have by themselves. Less is noise.
GPTQ_INLINE float gptq_least_gain(const gptq_block & block, int k, int n, const float * w, const float * b) {
    float sum = 0;
    for (int i = k; i < k + n; i++) {
        sum += (w[i] - b[i]) * (w[i] - b[i]) * block.d[i];
    }
    return 1e-7f * sum;
}

// ---- a change of columns --------------------------------------------------------------------------------------------

// How the loss changes when the columns [k, k + N) with values b go to each of the grids, one after the other.
template <int N>
GPTQ_INLINE void gptq_try_change(const gptq_block & block, int k, const float * b, const float * g, const gptq_grids & grids, gptq_lanes & change) {
    gptq_lanes gradient[N];
    for (int i = 0; i < N; i++) {
        gradient[i] = gptq_lanes{} + g[k + i];
    }
    change = gptq_lanes{};
    for (int i = 0; i < N; i++) {
        const float *    u = block.u + GPTQ_BLOCK * (k + i) + k;
        const float      h = block.d[k + i];
        gptq_lanes       q = (gradient[i] * (1 / h) + (b[k + i] + grids.min)) * grids.inverse;
        gptq_round_clamped(q, grids.lo, grids.hi);
        const gptq_lanes delta = b[k + i] - (q * grids.scale - grids.min);
        change += delta * (gradient[i] + gradient[i] + delta * h);
        for (int j = i + 1; j < N; j++) {
            gradient[j] += delta * u[j];
        }
    }
}

// Makes the change for one grid: b, the levels q, and g of all later columns of the block.
GPTQ_INLINE void gptq_make_change(const gptq_block & block, int k, int n, float * b, float * g, float scale, float min, int lo, int hi, int * q) {
    const float inverse = gptq_inverse(scale);
    for (int i = k; i < k + n; i++) {
        float level = (g[i] / block.d[i] + b[i] + min) * inverse;
        gptq_round_clamped(level, (float) lo, (float) hi);
        q[i - k] = (int) level;
        const float value = level * scale - min;
        gptq_feed(block, i, b[i] - value, g);
        b[i] = value;
    }
}
