// base.h: Q2_K and Q2_0 bases on the CPU, repacked into super-tiles of 32 rows like a residual. Private memory: never in a file.
//
// The codes lie as in docs/format.md with U = 4, Z = 1 (w0, w1, w2, w3 from low bits to high), 512 bytes a group; a block, up to 4
// groups of 64 columns, has before them
//
//     Q2_0   d[group][32] f16                                                                    2.25 bits a weight
//     Q2_K   d[32] f16, dmin[32] f16, then for each group [32 rows][4]: scale | min << 4 of      2.625
//            its four sub-blocks of 16 columns
//
// The product: with x rounded as for residuals (xq, s of each 32 columns), q the 2-bit codes, and sums over those 32 that are exact,
//
//     Q2_0   acc = fma(float(Σ (q − 1)·xq) · s, d, acc)
//     Q2_K   acc = fma(float(Σ scale·q·xq) · s, d, acc);  acc = fma(−(float(Σ min·xq) · s), dmin, acc)
//
// 32 columns after 32 from acc = 0. So it is exact in the same sense as the residual's: no sum depends on tokens, threads or
// instruction set.

#pragma once

#include "kernels.h"

// bytes of the repacked matrix; negative where the type (TB_BASE_…) or shape cannot be repacked
int64_t tb_base_nbytes(int type, int64_t rows, int64_t cols);

// Repacks the super-tiles [tile0, tile1). src: (rows, cols) in ggml's layout; dst: the whole repacked matrix.
void tb_base_repack(int type, const void * src, int64_t rows, int64_t cols, void * dst, int64_t tile0, int64_t tile1);
