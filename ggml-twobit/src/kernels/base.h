// base.h: Q2_K and Q2_0 bases on the CPU, repacked into super-tiles of 32 rows like a residual. Private memory: never in a file.
//
// Codes are vectors of 64 bytes, 16 rows × 4 columns, of which each byte holds four codes of its row. A group of 64 columns has four
// for its upper 16 rows and four for its lower, in turn: 512 bytes; a block has up to 4 groups.
//
//     Q2_0   d[group][32] f16, then the codes as in docs/format.md with U = 4, Z = 1               2.25 bits a weight
//            (vector i: columns 16·i … 16·i + 15, step j in bits 2·j)
//     Q2_K   for each group [32 rows] u32, the scales and mins of its four sub-blocks of 16        2.625
//            columns, 4 bits each: s0 s2 m0 m2 s1 s3 m1 m3; and its codes (vector i: step i of
//            each sub-block, sub-block j in bits 2·j); at the end d[32] f16, dmin[32] f16
//
// The product: with x rounded as for residuals (xq, s of each run of 32 columns), q the 2-bit codes, and sums c over a run that are exact,
//
//     Q2_0   c = Σ (q − 1)·xq;  for each group  acc = fma(fma(float(c1), s1, float(c0) · s0), d, acc)
//     Q2_K   c = Σ scale·q·xq;  for each block  p = 0, for each of its 8 runs  p = fma(float(c), s, p);  acc = fma(p, d, acc)
//            acc = fma(float(Σ min·xs) · u, dmin, acc)   xs, u: the block's sums of 16 xq, each times its s, rounded to int16 in
//            units of −u (struct tb_sums)
//
// from acc = 0. So it is exact in the same sense as the residual's: no sum depends on tokens, threads or instruction set.

#pragma once

#include "kernels.h"

// bytes of the repacked matrix; negative where the type (TB_BASE_…) or shape cannot be repacked
int64_t tb_base_nbytes(int type, int64_t rows, int64_t cols);

// Repacks the super-tiles [tile0, tile1). src: (rows, cols) in ggml's layout; dst: the whole repacked matrix.
void tb_base_repack(int type, const void * src, int64_t rows, int64_t cols, void * dst, int64_t tile0, int64_t tile1);
