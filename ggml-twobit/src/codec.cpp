// codec.cpp: the public functions on packed residuals (include/twobit.h), with every argument checked.

#include "codec.h"
#include "error.h"
#include "kernels/f16.h"
#include "kernels/kernels.h"
#include "kernels/packing.h"
#include "residual_encode.h"
#include "twobit.h"
#include "xxh64.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

uint64_t twobit_xxh64(const void * data, size_t size) {
    return tb_xxh64(data, size);
}

const char * twobit_kernel_name(int index) {
    const struct tb_kernels * kernels = index >= 0 ? tb_kernels_at(index) : NULL;
    return kernels ? kernels->name : NULL;
}

// ---- sizes and factor -----------------------------------------------------------------------------------------------

int64_t twobit_residual_nbytes(int bits, int64_t rows, int64_t cols, int64_t n_mats) {
    const int64_t nbytes = tb_matrix_nbytes(bits, rows, cols);
    if (nbytes < 0) {
        return tb_set_error("R%d cannot hold %lld rows of %lld columns (bits 4, 5, 6 or 8; columns in multiples of %d)", bits,
                            (long long) rows, (long long) cols, TB_GROUP);
    }
    if (n_mats <= 0 || n_mats > INT64_MAX / nbytes) {
        return tb_set_error("%lld is not a number of matrices", (long long) n_mats);
    }
    return nbytes * n_mats;
}

float twobit_residual_factor(int bits, float max_abs) {
    if (!tb_bits_valid(bits) || !(max_abs >= 0.0f) || std::isinf(max_abs)) {
        tb_set_error("no factor for R%d with a largest magnitude of %g", bits, max_abs);
        return 0.0f;
    }
    // the largest super-scale then lies near 2^11: 2^25 above f16's subnormals, 16 times below its end
    int exponent;
    std::frexp(max_abs, &exponent);
    exponent -= bits - 1 + 7 + 11;
    return max_abs > 0.0f ? std::ldexp(1.0f, std::max(-120, std::min(120, exponent))) : 1.0f;
}

static bool factor_valid(float factor) {
    int exponent;
    return std::isnormal(factor) && std::frexp(factor, &exponent) == 0.5f; // a positive power of two
}

float twobit_residual_max_abs(const float * w, int base_type, const void * base, int64_t rows, int64_t cols) {
    struct tb_base_rows base_rows;
    if (!w || rows <= 0 || cols <= 0) {
        return (float) tb_set_error("no weights");
    }
    if (tb_base_rows_init(&base_rows, base_type, base, cols) < 0) {
        return -1.0f;
    }
    float * b = (float *) tb_alloc(cols * sizeof(float));
    if (!b) {
        return -1.0f;
    }
    float max = 0.0f;
    bool finite = true;
    for (int64_t row = 0; row < rows && finite; row++) {
        tb_base_row(&base_rows, row, cols, b);
        for (int64_t col = 0; col < cols; col++) {
            b[col] = w[row * cols + col] - b[col];
        }
        finite = tb_all_finite(b, cols);
        for (int64_t col = 0; col < cols; col++) {
            max = std::max(max, std::fabs(b[col]));
        }
    }
    free(b);
    return finite ? max : (float) tb_set_error("NaN or Inf in the weights or their base");
}

// ---- encode, decode -------------------------------------------------------------------------------------------------

int twobit_residual_encode(int bits, float factor, const float * w, int base_type, const void * base, int64_t rows,
                           int64_t cols, const float * importance, void * dst) {
    struct tb_base_rows base_rows;
    if (twobit_residual_nbytes(bits, rows, cols, 1) < 0 || tb_base_rows_init(&base_rows, base_type, base, cols) < 0) {
        return -1;
    }
    if (!w || !dst) {
        return tb_set_error("encoding needs weights and a destination");
    }
    if (!factor_valid(factor)) {
        return tb_set_error("the factor %g is not a power of two", factor);
    }
    if (importance && !tb_all_weights(importance, cols)) {
        return tb_set_error("NaN, Inf or a negative value in the importance matrix");
    }
    float * r = (float *) tb_alloc(TB_TILE_ROWS * cols * sizeof(float)); // the residual of a super-tile, over factor
    if (!r) {
        return -1;
    }
    uint8_t * out = (uint8_t *) dst;
    int result = 0;
    for (int64_t row0 = 0; row0 < rows && result == 0; row0 += TB_TILE_ROWS, out += tb_tile_nbytes(bits, cols)) {
        const int64_t n = std::min<int64_t>(TB_TILE_ROWS, rows - row0);
        for (int64_t i = 0; i < n; i++) {
            const float * wi = w + (row0 + i) * cols;
            float * ri = r + i * cols;
            tb_base_row(&base_rows, row0 + i, cols, ri);
            for (int64_t col = 0; col < cols; col++) {
                ri[col] = (wi[col] - ri[col]) / factor; // exact
            }
        }
        if (!tb_all_finite(r, n * cols)) {
            result = tb_set_error("NaN or Inf in rows %lld to %lld of the weights or their base", (long long) row0,
                                  (long long) (row0 + n - 1));
        } else {
            tb_encode_tile(bits, r, n, cols, importance, out);
        }
    }
    free(r);
    return result;
}

int twobit_residual_decode(int bits, float factor, const void * src, int64_t rows, int64_t cols, float * dst) {
    if (twobit_residual_nbytes(bits, rows, cols, 1) < 0) {
        return -1;
    }
    if (!src || !dst) {
        return tb_set_error("decoding needs a source and a destination");
    }
    const uint8_t * packed = (const uint8_t *) src;
    const int offset = tb_offset(bits);
    for (int64_t row0 = 0; row0 < rows; row0 += TB_TILE_ROWS) {
        const uint8_t * block = packed;
        for (int64_t col = 0; col < cols; col += TB_GROUP, packed += tb_group_nbytes(bits)) {
            if (col % TB_BLOCK_COLS == 0) {
                block  = packed;
                packed = block + TB_BLOCK_SCALES;
            }
            uint8_t codes[TB_TILE_ROWS][TB_GROUP];
            tb_unpack_group(bits, packed, codes[0]);
            for (int64_t i = 0; i < TB_TILE_ROWS && row0 + i < rows; i++) {
                uint16_t super;
                memcpy(&super, block + TB_SUPER_OFFSET + 2 * i, sizeof(super));
                const float scale = factor * (tb_f16_to_f32(super) * (int8_t) block[col % TB_BLOCK_COLS / TB_GROUP * TB_TILE_ROWS + i]);
                for (int k = 0; k < TB_GROUP; k++) {
                    dst[(row0 + i) * cols + col + k] = scale * (codes[i][k] - offset);
                }
            }
        }
    }
    return 0;
}

// ---- multiply -------------------------------------------------------------------------------------------------------

int twobit_residual_mul(int bits, float factor, const void * src, int64_t rows, int64_t cols, const float * x,
                        int64_t n_tokens, float * y, const char * kernel) {
    if (twobit_residual_nbytes(bits, rows, cols, 1) < 0) {
        return -1;
    }
    if (!src || !x || !y || n_tokens <= 0 || n_tokens > INT32_MAX) {
        return tb_set_error("multiplying needs a matrix, tokens and a destination");
    }
    const struct tb_kernels * kernels = kernel ? tb_kernels_by_name(kernel) : tb_kernels_best();
    if (!kernels) {
        return tb_set_error("no kernels \"%s\" on this CPU", kernel);
    }
    void * scratch = tb_alloc(tb_acts_nbytes(n_tokens, cols));
    const float ** x_rows = new (std::nothrow) const float *[n_tokens];
    float ** y_rows = new (std::nothrow) float *[n_tokens];
    int result = 0;
    if (scratch && x_rows && y_rows) {
        for (int64_t t = 0; t < n_tokens; t++) {
            x_rows[t] = x + t * cols;
            y_rows[t] = y + t * rows;
        }
        const struct tb_matrix m = { (const uint8_t *) src, rows, cols, bits, factor };
        struct tb_acts acts;
        tb_acts_init(&acts, scratch, n_tokens, cols);
        kernels->quantize(&acts, x_rows, 0, tb_n_blocks(cols));
        kernels->mul_add(&m, &acts, y_rows, 0, tb_n_tiles(rows));
    } else {
        result = tb_set_error("no memory to multiply %lld tokens", (long long) n_tokens);
    }
    free(scratch);
    delete[] x_rows;
    delete[] y_rows;
    return result;
}
