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

static void put_half(uint8_t * halves, int row, uint16_t half) {
    memcpy(halves + 2 * row, &half, sizeof(half));
}

// A code of the row to byte `at` of the step's vector, bits `shift` and the next. The codes are zero before.
static void put_code(uint8_t * codes, int step_vector, int row, int at, int shift, unsigned code) {
    codes[(2 * step_vector + row / 16) * 64 + row % 16 * 4 + at] |= (code & 3) << shift;
}

static void repack_q2_k(const block_q2_k * src, int row, uint8_t * block) {
    static const int SCALE_AT[] = { 0, 16, 4, 20 }; // of the four sub-blocks; the min is 8 bits further
    put_half(block + tb_q2_k_format::D, row, src->d);
    put_half(block + tb_q2_k_format::DMIN, row, src->dmin);
    uint8_t * group = block;
    for (int g = 0; g < 4; g++, group += tb_q2_k_format::CODES) {
        uint32_t scales = 0;
        for (int b = 0; b < 4; b++) {
            const uint32_t both = src->scales[4 * g + b];
            scales |= (both & 15) << SCALE_AT[b] | both >> 4 << (SCALE_AT[b] + 8);
        }
        memcpy(group + 4 * row, &scales, sizeof(scales));
        for (int col = 0; col < TB_GROUP; col++) {
            const int k = g * TB_GROUP + col;
            put_code(group + tb_q2_k_format::SCALES, col % 16 / 4, row, col % 4, 2 * (col / 16), src->qs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2));
        }
    }
}

static void repack_q2_0(const block_q2_0 * src, int n_groups, int row, uint8_t * block) {
    for (int g = 0; g < n_groups; g++) {
        put_half(block + g * 2 * TB_TILE_ROWS, row, src[g].d);
        uint8_t * codes = block + tb_q2_0_format::beside(n_groups) + g * tb_q2_0_format::CODES;
        for (int col = 0; col < TB_GROUP; col++) {
            put_code(codes, col / 16, row, col % 4, 2 * (col % 16 / 4), src[g].qs[col / 4] >> (2 * (col % 4)));
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
