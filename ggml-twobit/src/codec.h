// codec.h: what the codec's files share.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Rows of a base tensor as f32, one at a time.
struct tb_base_rows {
    void (*to_float)(const void * row, float * dst, int64_t cols); // NULL: there is no base, rows are zero
    const uint8_t * data;
    size_t          row_nbytes;
};

// 0, or -1 with an error: an unknown type, or one that cannot hold rows of `cols`. base may be NULL.
int tb_base_rows_init(struct tb_base_rows * rows, int base_type, const void * base, int64_t cols);

// dst: (cols) f32
void tb_base_row(const struct tb_base_rows * rows, int64_t row, int64_t cols, float * dst);

// 64-byte aligned, freed by free(); NULL with an error where there is no memory
void * tb_alloc(size_t size);

// whether all n values are finite (and, for tb_all_weights, not negative)
bool tb_all_finite(const float * x, int64_t n);
bool tb_all_weights(const float * x, int64_t n);
