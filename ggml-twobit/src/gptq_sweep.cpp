// gptq_sweep.cpp: sweeps (gptq_sweep.h) over Q2_0 and Q2_K, the walk over a matrix's blocks, and the public functions.

#include "gptq_sweep.h"

#include "error.h"
#include "twobit.h"

#include "ggml.h"

#include <algorithm>
#include <new>

// ---- a change of columns --------------------------------------------------------------------------------------------

// How the loss changes when the columns [k, k + N) with values b go to each of the grids, one after the other.
template <int N>
GPTQ_INLINE void try_change(const gptq_block & block, int k, const float * b, const float * g, const gptq_grids & grids, gptq_lanes & change) {
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
GPTQ_INLINE void make_change(const gptq_block & block, int k, int n, float * b, float * g, float scale, float min, int lo, int hi, int * q) {
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

// ---- Q2_0 -----------------------------------------------------------------------------------------------------------

namespace {

struct block_q2_0 {
    uint16_t d;
    uint8_t  qs[16];
};

struct block_q2_k {
    uint8_t  scales[16]; // s | m << 4
    uint8_t  qs[64];     // of each half of 128: byte l holds columns l, l + 32, l + 64, l + 96
    uint16_t d, dmin;
};

} // namespace

GPTQ_CLONES static void sweep_q2_0(const gptq_block * block, const void *, const float * w, float * b, float * g, void * data) {
    block_q2_0 & packed = *(block_q2_0 *) data;
    const float d = tb_f16_to_f32(packed.d);
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) { // the first is today's
        scales[i] = i == 0 ? d : tb_f16_to_f32(gptq_f16(d * (0.86f + 0.018f * i)));
    }
    gptq_lanes change;
    try_change<64>(*block, 0, b, g, gptq_make_grids(scales, -1, 2), change);
    int lane;
    if (!(gptq_least(change, lane) < -gptq_least_gain(*block, 0, 64, w, b))) {
        return;
    }
    int q[64];
    make_change(*block, 0, 64, b, g, scales[lane], 0, -1, 2, q);
    packed.d = gptq_f16(scales[lane]);
    for (int i = 0; i < 16; i++) {
        packed.qs[i] = (uint8_t) ((q[4 * i] + 1) | (q[4 * i + 1] + 1) << 2 | (q[4 * i + 2] + 1) << 4 | (q[4 * i + 3] + 1) << 6);
    }
}

GPTQ_CLONES static void read_q2_0(const void * data, float * b) {
    const block_q2_0 & packed = *(const block_q2_0 *) data;
    const float d = tb_f16_to_f32(packed.d);
    for (int i = 0; i < 64; i++) {
        b[i] = d * ((packed.qs[i / 4] >> (2 * (i % 4)) & 3) - 1);
    }
}

// ---- Q2_K -----------------------------------------------------------------------------------------------------------

#define SUB       16 // columns of a sub-block
#define TOP       15 // largest scale and min
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
    float scales[GPTQ_LANES];
    for (int i = 0; i < GPTQ_LANES; i++) {
        scales[i] = d * i;
    }
    gptq_grids grids = gptq_make_grids(scales, 0, 3);
    for (int sub = 0; sub < GPTQ_BLOCK / SUB; sub++) {
        const int k = SUB * sub, now = packed.scales[sub] >> 4;
        int   s = 0, m = 0;
        float best = -gptq_least_gain(*block, k, SUB, w, b);
        bool  gains = false;
        for (int j = std::max(0, now - NEIGHBOURS); j <= std::min(TOP, now + NEIGHBOURS); j++) {
            grids.min = dmin * j;
            gptq_lanes change;
            try_change<SUB>(*block, k, b, g, grids, change);
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
        make_change(*block, k, SUB, b, g, d * s, dmin * m, 0, 3, q);
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

// ---- all blocks of some rows ----------------------------------------------------------------------------------------

static const gptq_sweep * sweep_of(int type) {
    static const gptq_sweep q2_0 = { 64, sizeof(block_q2_0), 0, nullptr, read_q2_0, sweep_q2_0 };
    static const gptq_sweep q2_k = { GPTQ_BLOCK, sizeof(block_q2_k), 0, nullptr, read_q2_k, sweep_q2_k };
    switch (type) {
        case GGML_TYPE_Q2_0:   return &q2_0;
        case GGML_TYPE_Q2_K:   return &q2_k;
        case GGML_TYPE_IQ2_XS: return gptq_sweep_iq2_xs();
        default:               return nullptr;
    }
}

// rows: at most GPTQ_ROWS
static void sweep_rows(const gptq_sweep * method, const float * w, int64_t rows, int64_t cols, const float * h, int sweeps, uint8_t * base) {
    const int64_t blocks = cols / method->block_cols;
    const size_t  row_bytes = blocks * method->block_bytes;
    gptq_floats error(GPTQ_ROWS * cols), gradient(GPTQ_ROWS * GPTQ_BLOCK), block_memory(sizeof(gptq_block) / sizeof(float)),
        extra(method->extra_bytes / sizeof(float) + 1);
    gptq_block & block = *(gptq_block *) block_memory.data;
    block.n = method->block_cols;
    alignas(64) float b[GPTQ_BLOCK];

    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < blocks; i++) {
            method->read(base + r * row_bytes + i * method->block_bytes, b);
            for (int j = 0; j < block.n; j++) {
                const int64_t at = r * cols + i * block.n + j;
                error.data[at] = w[at] - b[j];
            }
        }
    }
    for (int64_t turn = 0; turn < sweeps * blocks; turn++) {
        const int64_t i = turn % blocks, k = i * block.n;
        for (int j = 0; j < block.n; j++) {
            const float * row = h + (k + j) * cols + k;
            std::copy(row + j + 1, row + block.n, block.u + GPTQ_BLOCK * j + j + 1);
            block.d[j] = row[j];
        }
        if (method->prepare) {
            method->prepare(&block, extra.data);
        }
        std::fill(gradient.data, gradient.data + GPTQ_ROWS * GPTQ_BLOCK, 0.0f);
        gptq_feed_block(error.data, h + k, cols, cols, block.n, rows, gradient.data);
        for (int64_t r = 0; r < rows; r++) {
            float * e = error.data + r * cols + k;
            const float * weights = w + r * cols + k;
            for (int j = 0; j < block.n; j++) {
                b[j] = weights[j] - e[j];
            }
            method->sweep(&block, extra.data, weights, b, gradient.data + r * GPTQ_BLOCK, base + r * row_bytes + i * method->block_bytes);
            for (int j = 0; j < block.n; j++) {
                e[j] = weights[j] - b[j];
            }
        }
    }
}

bool twobit_sweep_supports(int type) {
    return sweep_of(type) != nullptr;
}

int twobit_base_sweep(int type, const float * w, int64_t rows, int64_t cols, const float * h, int sweeps, void * base) {
    const char * what = "sweeps over a base";
    const gptq_sweep * method = sweep_of(type);
    if (!method) {
        return tb_set_error("%s: no method for ggml type %d", what, type);
    }
    if (!w || !h || !base || rows < 0 || cols <= 0 || cols % method->block_cols != 0 || sweeps < 0) {
        return tb_set_error("%s: null argument or a shape (%lld, %lld) that the type cannot hold", what, (long long) rows, (long long) cols);
    }
    for (int64_t k = 0; k < cols; k++) {
        if (!(h[k * cols + k] > 0)) {
            return tb_set_error("%s: H[%lld][%lld] is %g, not positive", what, (long long) k, (long long) k, (double) h[k * cols + k]);
        }
    }
    const size_t row_bytes = cols / method->block_cols * method->block_bytes;
    try {
        for (int64_t r = 0; r < rows; r += GPTQ_ROWS) {
            sweep_rows(method, w + r * cols, std::min<int64_t>(GPTQ_ROWS, rows - r), cols, h, sweeps, (uint8_t *) base + r * row_bytes);
        }
    } catch (const std::bad_alloc &) {
        return tb_set_error("%s: out of memory", what);
    }
    return 0;
}
