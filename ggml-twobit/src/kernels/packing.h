// packing.h: sizes of the packed layout (docs/format.md) and the codes' bits.
#pragma once

#include "kernels.h"

#define TB_BLOCK_SCALES 192 // bytes before a block's codes: code_s[4][32] i8, super[32] f16
#define TB_SUPER_OFFSET 128

static inline bool tb_bits_valid(int bits) {
    return bits == 4 || bits == 5 || bits == 6 || bits == 8;
}

static inline int tb_offset(int bits) { // what is taken off a code
    return 1 << (bits - 1);
}

static inline int64_t tb_group_nbytes(int bits) { // codes of 32 rows × 64 columns
    return TB_TILE_ROWS * TB_GROUP / 8 * bits;
}

static inline int64_t tb_block_nbytes(int bits, int64_t groups) {
    return TB_BLOCK_SCALES + groups * tb_group_nbytes(bits);
}

static inline int64_t tb_tile_nbytes(int bits, int64_t cols) { // one super-tile
    return (cols + TB_BLOCK_COLS - 1) / TB_BLOCK_COLS * TB_BLOCK_SCALES + cols / TB_GROUP * tb_group_nbytes(bits);
}

// codes: (32 rows, 64 columns), one byte each
void tb_pack_group(int bits, const uint8_t * codes, uint8_t * packed);
void tb_unpack_group(int bits, const uint8_t * packed, uint8_t * codes);
