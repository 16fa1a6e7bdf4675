// q2_0.h: ggml's Q2_0 with a searched scale.
#pragma once

#include <stdint.h>

// w: (cols) f32; importance: (cols) f32 or NULL; dst: cols / 64 blocks of 18 bytes
void tb_q2_0_quantize_row(const float * w, const float * importance, int64_t cols, uint8_t * dst);
