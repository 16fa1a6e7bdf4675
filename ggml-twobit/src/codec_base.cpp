// codec_base.cpp: base tensors, in stock ggml types, through ggml's own quantizers; Q2_0 through ours (q2_0.cpp).

#include "codec.h"
#include "error.h"
#include "q2_0.h"
#include "twobit.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

// ---- shared by the codec's files ------------------------------------------------------------------------------------

void * tb_alloc(size_t size) {
    void * p = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!p) {
        tb_set_error("no memory for %zu bytes", size);
    }
    return p;
}

bool tb_all_finite(const float * x, int64_t n) {
    float sum = 0.0f; // 0·x is NaN for NaN and Inf alone
    for (int64_t i = 0; i < n; i++) {
        sum += 0.0f * x[i];
    }
    return sum == 0.0f;
}

bool tb_all_weights(const float * x, int64_t n) {
    bool good = true;
    for (int64_t i = 0; i < n; i++) {
        good &= x[i] >= 0.0f && x[i] <= 3.0e38f;
    }
    return good;
}

// NULL, with an error, for a number that is not a type whose rows can be read
static const struct ggml_type_traits * type_traits(int type) {
    const struct ggml_type_traits * traits = type >= 0 && type < GGML_TYPE_COUNT ? ggml_get_type_traits((enum ggml_type) type) : NULL;
    if (!traits || traits->blck_size <= 0 || traits->type_size == 0 || !(traits->to_float || type == GGML_TYPE_F32)) {
        tb_set_error("%d is not a ggml type that weights can have", type);
        return NULL;
    }
    return traits;
}

int64_t twobit_base_nbytes(int type, int64_t rows, int64_t cols) {
    const struct ggml_type_traits * traits = type_traits(type);
    if (!traits) {
        return -1;
    }
    if (rows <= 0 || cols <= 0 || rows > INT32_MAX || cols > INT32_MAX || cols % traits->blck_size != 0) {
        return tb_set_error("%s cannot hold %lld rows of %lld: rows are whole blocks of %lld", traits->type_name, (long long) rows,
                            (long long) cols, (long long) traits->blck_size);
    }
    return rows * (cols / traits->blck_size) * (int64_t) traits->type_size;
}

static void copy_row(const void * row, float * dst, int64_t cols) {
    memcpy(dst, row, cols * sizeof(float));
}

int tb_base_rows_init(struct tb_base_rows * rows, int base_type, const void * base, int64_t cols) {
    if (!base) {
        *rows = {};
        return 0;
    }
    const int64_t row_nbytes = twobit_base_nbytes(base_type, 1, cols);
    if (row_nbytes < 0) {
        return -1;
    }
    rows->to_float   = base_type == GGML_TYPE_F32 ? copy_row : ggml_get_type_traits((enum ggml_type) base_type)->to_float;
    rows->data       = (const uint8_t *) base;
    rows->row_nbytes = row_nbytes;
    return 0;
}

void tb_base_row(const struct tb_base_rows * rows, int64_t row, int64_t cols, float * dst) {
    if (rows->to_float) {
        rows->to_float(rows->data + row * rows->row_nbytes, dst, cols);
    } else {
        std::fill(dst, dst + cols, 0.0f);
    }
}

// ---- quantise and back ----------------------------------------------------------------------------------------------

int twobit_base_dequantize(int type, const void * src, int64_t rows, int64_t cols, float * dst) {
    struct tb_base_rows base;
    if (!src || !dst) {
        return tb_set_error("dequantising needs a source and a destination");
    }
    if (twobit_base_nbytes(type, rows, cols) < 0 || tb_base_rows_init(&base, type, src, cols) < 0) {
        return -1;
    }
    for (int64_t row = 0; row < rows; row++) {
        tb_base_row(&base, row, cols, dst + row * cols);
    }
    return 0;
}

// ggml aborts on types it has no quantizer for
static bool ggml_can_quantize(int type) {
    switch (type) {
        case GGML_TYPE_F32:  case GGML_TYPE_F16:  case GGML_TYPE_BF16:
        case GGML_TYPE_Q4_0: case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_0: case GGML_TYPE_Q5_1: case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q2_K: case GGML_TYPE_Q3_K: case GGML_TYPE_Q4_K: case GGML_TYPE_Q5_K: case GGML_TYPE_Q6_K:
        case GGML_TYPE_IQ2_XXS: case GGML_TYPE_IQ2_XS: case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS: case GGML_TYPE_IQ3_S: case GGML_TYPE_IQ4_NL: case GGML_TYPE_IQ4_XS:
        case GGML_TYPE_TQ1_0: case GGML_TYPE_TQ2_0:
            return true;
        default:
            return false;
    }
}

// Without an importance matrix ggml refuses IQ2_XXS and IQ2_XS and weighs Q2_K and IQ2_S by the weights themselves. A base has a
// residual, which gains most from the smallest plain error: equal importance leaves it a fifth less (tests/test_codec.py).
static bool is_2bit(int type) {
    return type == GGML_TYPE_Q2_K || type == GGML_TYPE_IQ2_XXS || type == GGML_TYPE_IQ2_XS || type == GGML_TYPE_IQ2_S;
}

int64_t twobit_base_quantize(int type, const float * w, int64_t rows, int64_t cols, const float * importance, void * dst) {
    const int64_t nbytes = twobit_base_nbytes(type, rows, cols);
    if (nbytes < 0) {
        return -1;
    }
    if (!w || !dst) {
        return tb_set_error("quantising needs weights and a destination");
    }
    if (!tb_all_finite(w, rows * cols)) {
        return tb_set_error("NaN or Inf in the weights");
    }
    if (importance && !tb_all_weights(importance, cols)) {
        return tb_set_error("NaN, Inf or a negative value in the importance matrix");
    }
    if (type == GGML_TYPE_Q2_0) {
        for (int64_t row = 0; row < rows; row++) {
            tb_q2_0_quantize_row(w + row * cols, importance, cols, (uint8_t *) dst + row * (nbytes / rows));
        }
        return nbytes;
    }
    if (!ggml_can_quantize(type)) {
        return tb_set_error("no quantizer for ggml type %s", ggml_type_name((enum ggml_type) type));
    }
    std::vector<float> ones;
    if (!importance && is_2bit(type)) {
        ones.assign(cols, 1.0f);
        importance = ones.data();
    }
    ggml_quantize_chunk((enum ggml_type) type, w, dst, 0, rows, cols, importance);
    return nbytes;
}
