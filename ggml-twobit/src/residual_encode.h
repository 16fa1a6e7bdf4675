// residual_encode.h: from f32 residuals to the packed layout (docs/format.md).
#pragma once

#include <stdint.h>

// r: (n_rows ≤ 32, cols) finite residuals over the tensor's factor; importance: (cols) or NULL; dst: one super-tile
void tb_encode_tile(int bits, const float * r, int64_t n_rows, int64_t cols, const float * importance, uint8_t * dst);
