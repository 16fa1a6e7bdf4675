// kernels.h: y += R·x for packed residuals (docs/format.md) and y = B·x for repacked bases (base.h), one table of functions for each
// instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TB_TILE_ROWS   32  // rows of a super-tile
#define TB_BLOCK_COLS 256  // columns of a block
#define TB_GROUP       64  // columns that share a scale code
#define TB_RUN   32  // columns that share an activation scale
#define TB_TOKENS      32  // tokens of a tile of activations, which one pass over the weights serves
#define TB_TINY    0x1p-120f // a group of activations whose largest magnitude is below this is taken as zero

// one packed matrix
struct tb_matrix {
    const uint8_t * data; // super-tile after super-tile
    int64_t         rows; // any number
    int64_t         cols; // a multiple of TB_GROUP
    int             bits; // 4, 5, 6, 8
    float           factor;
};

#define TB_BASE_Q2_K 10 // ggml's numbers of the types
#define TB_BASE_Q2_0 42

// one base matrix, repacked (base.h)
struct tb_base {
    const uint8_t * data; // super-tile after super-tile
    int64_t         rows; // any number
    int64_t         cols; // a multiple of 256 (Q2_K) or 64 (Q2_0)
    int             type; // TB_BASE_…
};

// a run of 32 activations of a token, rounded to int8
struct tb_run {
    int8_t  q[TB_RUN];
    int32_t sum;   // negative: shifted, it is where a sum of codes starts that are too large by an offset
    float   scale;
};

// What Q2_K's mins are multiplied with: for each 16 columns of a block the sum of the int8 values times their scale, rounded in turn.
struct tb_sums {
    int16_t q[TB_BLOCK_COLS / 16];
    float   scale; // negative
};

// Activations, in tiles of up to TB_TOKENS tokens, one after the other; the last tile may have fewer and takes that much less room.
struct tb_acts {
    int64_t n_tokens;
    int64_t cols;
    struct tb_run  * runs; // (tile, column / 32, token)
    struct tb_sums * sums; // (tile, column / 256, token), of whole blocks only
};

// tokens of the tile that starts at token `first`
static inline int64_t tb_tile_width(const struct tb_acts * acts, int64_t first) {
    return acts->n_tokens - first < TB_TOKENS ? acts->n_tokens - first : TB_TOKENS;
}

// bytes of scratch, 64-byte aligned, that tb_acts_init lays out
size_t tb_acts_nbytes(int64_t n_tokens, int64_t cols);
void   tb_acts_init(struct tb_acts * acts, void * scratch, int64_t n_tokens, int64_t cols);

int64_t tb_matrix_nbytes(int bits, int64_t rows, int64_t cols); // negative: not a shape the format holds
int64_t tb_n_tiles(int64_t rows);                               // super-tiles
int64_t tb_n_blocks(int64_t cols);                              // of a super-tile; the last one may be narrower

struct tb_kernels {
    const char * name;
    // rounds the blocks of 256 columns [block0, block1) of every token; x[token] points to that token's cols floats
    void (*quantize)(const struct tb_acts * acts, const float * const * x, int64_t block0, int64_t block1);
    // y[token][row] += (R·x)[row] for the rows of the super-tiles [tile0, tile1); y[token] points to rows floats
    void (*mul_add)(const struct tb_matrix * m, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1);
    // y[token][row] = (B·x)[row], likewise
    void (*mul_base)(const struct tb_base * b, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1);
    // y = B·x + R·x in one pass over x: the very numbers of mul_base and then mul_add. Both have the same rows and cols.
    void (*mul_pair)(const struct tb_base * b, const struct tb_matrix * m, const struct tb_acts * acts, float * const * y,
                     int64_t tile0, int64_t tile1);
};

// The best set this CPU can run, or the one that the environment variable TWOBIT_KERNEL names (chosen once).
const struct tb_kernels * tb_kernels_best(void);
// NULL if there is none of that name or this CPU cannot run it
const struct tb_kernels * tb_kernels_by_name(const char * name);
// the i-th set this CPU can run, best first; NULL behind the last
const struct tb_kernels * tb_kernels_at(int i);
