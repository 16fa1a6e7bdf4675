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

const gptq_sweep * gptq_sweep_iq2_xs();

// What a change must gain to be made: a little of the loss that the columns have by themselves. Less is noise.
GPTQ_INLINE float gptq_least_gain(const gptq_block & block, int k, int n, const float * w, const float * b) {
    float sum = 0;
    for (int i = k; i < k + n; i++) {
        sum += (w[i] - b[i]) * (w[i] - b[i]) * block.d[i];
    }
    return 1e-7f * sum;
}
