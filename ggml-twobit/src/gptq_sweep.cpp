// gptq_sweep.cpp: the walk of sweeps (gptq_sweep.h) over a matrix's blocks, and the public functions.

#include "gptq_sweep.h"

#include "error.h"
#include "twobit.h"

#include "ggml.h"

#include <algorithm>
#include <new>

// ---- all blocks of some rows ----------------------------------------------------------------------------------------

static const gptq_sweep * sweep_of(int type) {
    switch (type) {
        case GGML_TYPE_Q2_0:   return gptq_sweep_q2_0();
        case GGML_TYPE_Q2_K:   return gptq_sweep_q2_k();
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
        gptq_take_upper(block, h + k * cols + k, cols);
        for (int j = 0; j < block.n; j++) {
            block.d[j] = h[(k + j) * cols + k + j];
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
