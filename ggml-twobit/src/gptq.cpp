// gptq.cpp: the walk over a matrix's blocks of columns, feedback between them, and the public functions (see gptq.h).

#include "gptq.h"

#include "codec.h"
#include "error.h"
#include "kernels/packing.h"
#include "twobit.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

// ---- feedback between blocks ----------------------------------------------------------------------------------------

// t[r][c] += Σ_{j in [j0, j1)} e[r][j] · u[j][c] for 4 rows and 32 columns
GPTQ_INLINE void feed_tile(const float * e, int64_t e_stride, const float * u, int64_t u_stride, int64_t j0, int64_t j1, float * t) {
    gptq_lanes acc[4][2];
    for (int r = 0; r < 4; r++) {
        memcpy(acc[r], t + r * GPTQ_BLOCK, sizeof(acc[r]));
    }
    for (int64_t j = j0; j < j1; j++) {
        gptq_lanes row[2];
        memcpy(row, u + j * u_stride, sizeof(row));
        for (int r = 0; r < 4; r++) {
            acc[r][0] += e[r * e_stride + j] * row[0];
            acc[r][1] += e[r * e_stride + j] * row[1];
        }
    }
    for (int r = 0; r < 4; r++) {
        memcpy(t + r * GPTQ_BLOCK, acc[r], sizeof(acc[r]));
    }
}

GPTQ_CLONES void gptq_feed_block(const float * e, const float * u, int64_t stride, int64_t k, int n, int64_t rows, float * t) {
    const int64_t depth = 256; // rows of U at a time: 32 columns of them stay in the L1 cache for all rows of the chunk
    for (int64_t j = 0; j < k; j += depth) {
        for (int c = 0; c < n; c += 32) {
            for (int64_t r = 0; r < rows; r += 4) {
                feed_tile(e + r * stride, stride, u + c, stride, j, std::min(j + depth, k), t + r * GPTQ_BLOCK + c);
            }
        }
    }
}

void gptq_round_rows(const gptq_method * method, const float * w, int64_t rows, int64_t cols, const float * u, const float * d,
                     uint8_t * dst, size_t dst_stride) {
    gptq_floats error(GPTQ_ROWS * cols);       // w − b of the columns done
    gptq_floats target(GPTQ_ROWS * GPTQ_BLOCK);
    gptq_floats extra(method->extra_bytes / sizeof(float) + 1);
    gptq_floats block_memory(sizeof(gptq_block) / sizeof(float));
    gptq_block &   block = *(gptq_block *) block_memory.data;
    float          rounded[GPTQ_BLOCK];

    for (int64_t k = 0, i_block = 0; k < cols; k += method->block_cols, i_block++) {
        block.n = (int) std::min<int64_t>(method->block_cols, cols - k);
        gptq_take_upper(block, u + k * cols + k, cols);
        std::copy(d + k, d + k + block.n, block.d);
        if (method->prepare) {
            method->prepare(&block, extra.data);
        }

        for (int64_t r = 0; r < rows; r++) {
            std::copy(w + r * cols + k, w + r * cols + k + block.n, target.data + r * GPTQ_BLOCK);
        }
        gptq_feed_block(error.data, u + k, cols, k, block.n, rows, target.data);

        for (int64_t r = 0; r < rows; r++) {
            method->round(&block, extra.data, w + r * cols + k, target.data + r * GPTQ_BLOCK, rounded,
                          dst + r * dst_stride + i_block * method->block_bytes);
            for (int i = 0; i < block.n; i++) {
                error.data[r * cols + k + i] = w[r * cols + k + i] - rounded[i];
            }
        }
    }
}

// ---- public functions -----------------------------------------------------------------------------------------------

static const gptq_method * method_of(int type) {
    switch (type) {
        case GGML_TYPE_Q2_0:   return gptq_method_q2_0();
        case GGML_TYPE_Q2_K:   return gptq_method_q2_k();
        case GGML_TYPE_Q3_K:   return gptq_method_q3_k();
        case GGML_TYPE_Q4_K:   return gptq_method_q4_k();
        case GGML_TYPE_Q4_0:   return gptq_method_q4_0();
        case GGML_TYPE_IQ2_XS: return gptq_method_iq2_xs();
        default:               return nullptr;
    }
}

static int check_arguments(const char * what, const float * w, int64_t rows, int64_t cols, const float * u, const float * d) {
    if (!w || !u || !d || rows < 0 || cols <= 0) {
        return tb_set_error("%s: null argument or empty shape (%lld, %lld)", what, (long long) rows, (long long) cols);
    }
    if (!tb_all_finite(w, rows * cols)) {
        return tb_set_error("%s: a weight is NaN or Inf", what);
    }
    for (int64_t k = 0; k < cols; k++) {
        if (!(d[k] > 0) || !std::isfinite(d[k])) {
            return tb_set_error("%s: d[%lld] of the calibration is %g, not positive", what, (long long) k, (double) d[k]);
        }
    }
    return 0;
}

bool twobit_feedback_supports(int type) {
    return method_of(type) != nullptr;
}

int64_t twobit_base_quantize_feedback(int type, const float * w, int64_t rows, int64_t cols, const float * u, const float * d,
                                      void * dst) {
    const char * what = "base quantisation with feedback";
    const gptq_method * method = method_of(type);
    if (!method) {
        return tb_set_error("%s: no method for ggml type %d", what, type);
    }
    if (check_arguments(what, w, rows, cols, u, d) < 0) {
        return -1;
    }
    if (cols % method->block_cols != 0) {
        return tb_set_error("%s: %lld columns are not a multiple of %d", what, (long long) cols, method->block_cols);
    }
    const size_t row_bytes = cols / method->block_cols * method->block_bytes;
    try {
        for (int64_t r = 0; r < rows; r += GPTQ_ROWS) {
            gptq_round_rows(method, w + r * cols, std::min<int64_t>(GPTQ_ROWS, rows - r), cols, u, d, (uint8_t *) dst + r * row_bytes,
                            row_bytes);
        }
    } catch (const std::bad_alloc &) {
        return tb_set_error("%s: out of memory", what);
    }
    return rows * (int64_t) row_bytes;
}

// Packs up to 32 rows of rounded blocks, (rows, blocks), into one super-tile (docs/format.md).
static void pack_tile(int bits, const gptq_residual_block * rounded, int64_t rows, int64_t cols, uint8_t * dst) {
    const int64_t blocks = (cols + TB_BLOCK_COLS - 1) / TB_BLOCK_COLS;
    for (int64_t i = 0; i < blocks; i++) {
        const int groups = (int) std::min<int64_t>(4, (cols - i * TB_BLOCK_COLS) / TB_GROUP);
        memset(dst, 0, TB_BLOCK_SCALES);
        for (int64_t r = 0; r < rows; r++) {
            const gptq_residual_block & block = rounded[r * blocks + i];
            for (int g = 0; g < groups; g++) {
                dst[g * TB_TILE_ROWS + r] = (uint8_t) block.code_s[g];
            }
            memcpy(dst + TB_SUPER_OFFSET + 2 * r, &block.super, 2);
        }
        for (int g = 0; g < groups; g++) {
            uint8_t codes[TB_TILE_ROWS * TB_GROUP];
            memset(codes, tb_offset(bits), sizeof(codes));
            for (int64_t r = 0; r < rows; r++) {
                memcpy(codes + r * TB_GROUP, rounded[r * blocks + i].q + g * TB_GROUP, TB_GROUP);
            }
            tb_pack_group(bits, codes, dst + TB_BLOCK_SCALES + g * tb_group_nbytes(bits));
        }
        dst += tb_block_nbytes(bits, groups);
    }
}

int twobit_residual_encode_feedback(int bits, float factor, const float * w, int base_type, const void * base, int64_t rows,
                                    int64_t cols, const float * u, const float * d, void * dst) {
    const char * what = "residual rounding with feedback";
    if (check_arguments(what, w, rows, cols, u, d) < 0) {
        return -1;
    }
    if (!tb_bits_valid(bits) || cols % TB_GROUP != 0 || !(factor > 0) || !std::isfinite(factor)) {
        return tb_set_error("%s: R%d with factor %g cannot hold rows of %lld", what, bits, (double) factor, (long long) cols);
    }
    tb_base_rows base_rows;
    if (tb_base_rows_init(&base_rows, base_type, base, cols) < 0) {
        return -1;
    }
    const gptq_method * method = gptq_method_residual(bits);
    const int64_t blocks = (cols + TB_BLOCK_COLS - 1) / TB_BLOCK_COLS;
    try {
        std::vector<float> left(GPTQ_ROWS * cols);
        std::vector<gptq_residual_block> rounded(GPTQ_ROWS * blocks);
        for (int64_t r = 0; r < rows; r += GPTQ_ROWS) {
            const int64_t n = std::min<int64_t>(GPTQ_ROWS, rows - r);
            for (int64_t i = 0; i < n; i++) {
                float * row = left.data() + i * cols;
                tb_base_row(&base_rows, r + i, cols, row);
                for (int64_t k = 0; k < cols; k++) {
                    row[k] = w[(r + i) * cols + k] - row[k];
                }
            }
            if (!tb_all_finite(left.data(), n * cols)) {
                return tb_set_error("%s: the base tensor has a NaN or Inf", what);
            }
            for (gptq_residual_block & block : rounded) {
                block.factor = factor;
            }
            gptq_round_rows(method, left.data(), n, cols, u, d, (uint8_t *) rounded.data(), blocks * sizeof(gptq_residual_block));
            for (int64_t tile = 0; tile < n; tile += TB_TILE_ROWS) {
                pack_tile(bits, rounded.data() + tile * blocks, std::min<int64_t>(TB_TILE_ROWS, n - tile), cols,
                          (uint8_t *) dst + (r + tile) / TB_TILE_ROWS * tb_tile_nbytes(bits, cols));
            }
        }
    } catch (const std::bad_alloc &) {
        return tb_set_error("%s: out of memory", what);
    }
    return 0;
}
