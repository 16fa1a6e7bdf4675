// base.cpp: from ggml's Q2_K and Q2_0 to the layout of base.h.

#include "base.h"

#include "formats.h"

#include <string.h>

// ggml's blocks, as its own files have them
struct block_q2_k { // 256 columns
    uint8_t  scales[16]; // scale | min << 4, for each 16 columns
    uint8_t  qs[64];     // column 128·h + 32·j + l: bits 2·j of byte 32·h + l
    uint16_t d, dmin;
};

struct block_q2_0 { // 64 columns
    uint16_t d;
    uint8_t  qs[16]; // column 4·i + j: bits 2·j of byte i
};

int64_t tb_base_nbytes(int type, int64_t rows, int64_t cols) {
    const int64_t limit = INT64_C(1) << 31;
    if (rows <= 0 || rows > limit || cols <= 0 || cols > limit) {
        return -1;
    }
    if (type == TB_BASE_Q2_K && cols % TB_BLOCK_COLS == 0) {
        return tb_n_tiles(rows) * tb_format_tile_nbytes<tb_q2_k_format>(cols);
    }
    if (type == TB_BASE_Q2_0 && cols % TB_GROUP == 0) {
        return tb_n_tiles(rows) * tb_format_tile_nbytes<tb_q2_0_format>(cols);
    }
    return -1;
}

// puts the code of row, column (of a group) to its place among the group's codes, which are zero before
static void put(uint8_t * codes, int row, int col, unsigned code) {
    const int step = col / 4, unit = step / 4, tile = row / 16;
    codes[(2 * unit + tile) * 64 + row % 16 * 4 + col % 4] |= code << (2 * (step % 4));
}

static void put_half(uint8_t * halves, int row, uint16_t half) {
    memcpy(halves + 2 * row, &half, sizeof(half));
}

static void repack_q2_k(const block_q2_k * src, int row, uint8_t * block) {
    put_half(block, row, src->d);
    put_half(block + 2 * TB_TILE_ROWS, row, src->dmin);
    for (int g = 0; g < 4; g++) {
        memcpy(block + tb_q2_k_format::SCALES + g * tb_q2_k_format::GROUP_SCALES + 4 * row, src->scales + 4 * g, 4);
        uint8_t * codes = block + tb_q2_k_format::header(4) + g * tb_q2_k_format::CODES;
        for (int col = 0; col < TB_GROUP; col++) {
            const int k = g * TB_GROUP + col;
            put(codes, row, col, src->qs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3);
        }
    }
}

static void repack_q2_0(const block_q2_0 * src, int n_groups, int row, uint8_t * block) {
    for (int g = 0; g < n_groups; g++) {
        put_half(block + g * 2 * TB_TILE_ROWS, row, src[g].d);
        uint8_t * codes = block + tb_q2_0_format::header(n_groups) + g * tb_q2_0_format::CODES;
        for (int col = 0; col < TB_GROUP; col++) {
            put(codes, row, col, src[g].qs[col / 4] >> (2 * (col % 4)) & 3);
        }
    }
}

void tb_base_repack(int type, const void * src, int64_t rows, int64_t cols, void * dst, int64_t tile0, int64_t tile1) {
    const bool q2_k = type == TB_BASE_Q2_K;
    const int64_t tile_nbytes = tb_base_nbytes(type, 1, cols);
    for (int64_t tile = tile0; tile < tile1; tile++) {
        uint8_t * block = (uint8_t *) dst + tile * tile_nbytes;
        memset(block, 0, tile_nbytes); // absent rows: all scales 0
        for (int64_t col = 0; col < cols; col += TB_BLOCK_COLS) {
            const int n_groups = cols - col < TB_BLOCK_COLS ? (int) (cols - col) / TB_GROUP : 4;
            for (int64_t row = tile * TB_TILE_ROWS; row < rows && row < (tile + 1) * TB_TILE_ROWS; row++) {
                if (q2_k) {
                    repack_q2_k((const block_q2_k *) src + (row * cols + col) / TB_BLOCK_COLS, row % TB_TILE_ROWS, block);
                } else {
                    repack_q2_0((const block_q2_0 *) src + (row * cols + col) / TB_GROUP, n_groups, row % TB_TILE_ROWS, block);
                }
            }
            block += q2_k ? tb_format_block_nbytes<tb_q2_k_format>(4) : tb_format_block_nbytes<tb_q2_0_format>(n_groups);
        }
    }
}
