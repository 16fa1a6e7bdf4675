// gptq.h: rounding with error feedback (GPTQ, in the LDL form that QuIP calls LDLQ), shared by bases and residuals.
//
// A row w of a weight matrix is rounded to b. What counts is the error of the matmul's output over the calibration text,
// (w − b) H (w − b)ᵀ with H = XᵀX. With H = U D Uᵀ, U unit upper triangular and D diagonal, it is a sum over columns,
//
//     Σ_k D_k (t_k − b_k)²      t_k = w_k + Σ_{j<k} (w_j − b_j) U_jk
//
// so columns are rounded from left to right, each to the value nearest its target t_k: what went wrong before is made good
// as far as the inputs are correlated. (Frantar et al. 2022, arXiv:2210.17323; Chee et al. 2023, arXiv:2307.13304)
//
// Columns are handled in blocks of up to 256. Between blocks the feedback is a matrix product over a chunk of rows (gptq.cpp);
// within a block every type has its own way, since the scales of a block are chosen with the feedback in view:
// LANES candidate grids are run side by side through the block's columns, and the one with the least loss is kept.
#pragma once

#include "kernels/f16.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>

#define GPTQ_BLOCK 256 // most columns of a block, and the stride of its piece of U
#define GPTQ_ROWS   64 // rows of a chunk: they share each pass over U

// The hot functions are compiled for several instruction sets, one of which is chosen when the library is loaded.
// (Not under AddressSanitizer, whose run time is not there yet at that moment.)
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#    define GPTQ_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#    define GPTQ_CLONES
#endif
#define GPTQ_INLINE static inline __attribute__((always_inline))

// the columns of one block, the same for every row
struct gptq_block {
    alignas(64) float u[GPTQ_BLOCK * GPTQ_BLOCK]; // U[i][j] at u[GPTQ_BLOCK·i + j] for j > i, 0 elsewhere
    alignas(64) float d[GPTQ_BLOCK];              // D, positive
    int               n;                          // columns
};

// how one kind of block is rounded
struct gptq_method {
    int    block_cols;  // columns of a block; the last one of a row may have fewer
    size_t block_bytes; // bytes of a block of one row, in the order the type stores them
    size_t extra_bytes; // bytes that `prepare` needs, 0 without one
    // works out whatever is the same for all rows
    void (*prepare)(const gptq_block * block, void * extra);
    // Rounds one row's block. w: (n) weights; t: (n) targets, changed on the way; b: (n) what w became; dst: the packed block.
    void (*round)(const gptq_block * block, const void * extra, const float * w, float * t, float * b, void * dst);
};

const gptq_method * gptq_method_q2_0();
const gptq_method * gptq_method_q2_k();
const gptq_method * gptq_method_q3_k();
const gptq_method * gptq_method_q4_k();
const gptq_method * gptq_method_q4_0();
const gptq_method * gptq_method_iq2_xs();
const gptq_method * gptq_method_residual(int bits); // its block: struct gptq_residual_block

// one row's block of a residual, before it is packed into tiles
struct gptq_residual_block {
    float    factor;           // in: the tensor's
    uint16_t super;            // f16
    int8_t   code_s[4];        // of each group
    uint8_t  q[GPTQ_BLOCK];
};

// t: (GPTQ_ROWS, GPTQ_BLOCK) += e[:, :k] · u[:k, :n] for the first `rows` rows; e: (GPTQ_ROWS, stride), u: (k, stride)
void gptq_feed_block(const float * e, const float * u, int64_t stride, int64_t k, int n, int64_t rows, float * t);

// Takes what lies above the diagonal of block.n columns of a matrix; m: the first of them on the diagonal.
static inline void gptq_take_upper(gptq_block & block, const float * m, int64_t stride) {
    for (int i = 0; i < block.n; i++) {
        memcpy(block.u + GPTQ_BLOCK * i + i + 1, m + i * stride + i + 1, (block.n - i - 1) * sizeof(float));
    }
}

struct gptq_floats { // zeros, 64-byte aligned; throws std::bad_alloc
    float * data;
    explicit gptq_floats(size_t n) : data((float *) ::operator new(n * sizeof(float), std::align_val_t(64))) {
        memset(data, 0, n * sizeof(float));
    }
    ~gptq_floats() { ::operator delete(data, std::align_val_t(64)); }
    gptq_floats(const gptq_floats &) = delete;
    gptq_floats & operator=(const gptq_floats &) = delete;
};

// Rounds `rows` (at most GPTQ_ROWS) rows. w: (rows, cols); u: (cols, cols); d: (cols); dst: (rows, blocks) of block_bytes,
// rows dst_stride bytes apart. Throws std::bad_alloc.
void gptq_round_rows(const gptq_method * method, const float * w, int64_t rows, int64_t cols, const float * u, const float * d,
                     uint8_t * dst, size_t dst_stride);

// ---- candidates side by side ----------------------------------------------------------------------------------------

#define GPTQ_LANES 16
typedef float gptq_lanes __attribute__((vector_size(4 * GPTQ_LANES), may_alias));

// grids of values scale·q − min with whole q, lo ≤ q ≤ hi
struct gptq_grids {
    gptq_lanes scale, inverse; // 1 / scale, or 0 where scale is 0
    float      min;            // the same for all
    float      lo, hi;
};

// Rounds x (float or gptq_lanes) to a whole number in [lo, hi]; NaN becomes lo.
template <class T> GPTQ_INLINE void gptq_round_clamped(T & x, float lo, float hi) {
    const float magic = 12582912.0f; // 1.5 · 2^23: adding it rounds to nearest even
    const T low = T{} + lo, high = T{} + hi;
    x = x > low ? x : low;
    x = x < high ? x : high;
    x = (x + magic) - magic;
}

GPTQ_INLINE uint16_t gptq_f16(float x) { // never Inf
    return tb_f32_to_f16(std::fmax(-65504.0f, std::fmin(65504.0f, x)));
}

GPTQ_INLINE float gptq_inverse(float scale) {
    return scale != 0.0f ? 1.0f / scale : 0.0f;
}

GPTQ_INLINE gptq_grids gptq_make_grids(const float scales[GPTQ_LANES], float lo, float hi) {
    gptq_lanes scale, none = {};
    memcpy(&scale, scales, sizeof(scale));
    return { scale, scale != none ? 1.0f / scale : none, 0, lo, hi };
}

// The loss of rounding the block's columns [k, k + N) to each of the grids, feedback among them included.
template <int N>
GPTQ_INLINE void gptq_try(const gptq_block & block, int k, const float * w, const float * t, const gptq_grids & grids,
                          gptq_lanes & loss) {
    gptq_lanes target[N];
    for (int i = 0; i < N; i++) {
        target[i] = gptq_lanes{} + t[k + i];
    }
    loss = gptq_lanes{};
    for (int i = 0; i < N; i++) {
        const float *    u     = block.u + GPTQ_BLOCK * (k + i) + k;
        gptq_lanes       q     = (target[i] + grids.min) * grids.inverse;
        gptq_round_clamped(q, grids.lo, grids.hi);
        const gptq_lanes value = q * grids.scale - grids.min;
        const gptq_lanes miss  = target[i] - value;
        const gptq_lanes error = w[k + i] - value;
        loss += miss * miss * block.d[k + i];
        for (int j = i + 1; j < N; j++) {
            target[j] += error * u[j];
        }
    }
}

// Adds the error of column i to the targets of all later columns of the block.
GPTQ_INLINE void gptq_feed(const gptq_block & block, int i, float error, float * t) {
    const float * u = block.u + GPTQ_BLOCK * i;
    for (int j = i / GPTQ_LANES * GPTQ_LANES; j < block.n; j += GPTQ_LANES) {
        *(gptq_lanes *) (t + j) += error * *(const gptq_lanes *) (u + j);
    }
}

// Rounds the columns [k, k + n) to one grid for good: q, b and the later targets. Returns the loss.
GPTQ_INLINE float gptq_commit(const gptq_block & block, int k, int n, const float * w, float * t, float scale, float min,
                              int lo, int hi, int * q, float * b) {
    const float inverse = gptq_inverse(scale);
    float loss = 0;
    for (int i = k; i < k + n; i++) {
        float level = (t[i] + min) * inverse;
        gptq_round_clamped(level, (float) lo, (float) hi);
        q[i] = (int) level;
        b[i] = level * scale - min;
        loss += (t[i] - b[i]) * (t[i] - b[i]) * block.d[i];
        gptq_feed(block, i, w[i] - b[i], t);
    }
    return loss;
}

// the least of the lanes, and which one it is
GPTQ_INLINE float gptq_least(const gptq_lanes & x, int & lane) {
    lane = 0;
    for (int i = 1; i < GPTQ_LANES; i++) {
        lane = x[i] < x[lane] ? i : lane;
    }
    return x[lane];
}
