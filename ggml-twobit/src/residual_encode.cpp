// residual_encode.cpp: the search for the scales and codes of a super-tile.
//
// For each row and 64 columns: the largest |r| is put on the code that reaches furthest (q = 0, offset steps from zero, so the
// scale takes its sign), a little inside and outside of it; each candidate's codes get their least-squares scale, and the best one
// wins. The super-scale follows from the block's largest scale; each group's i8 code is the nearest one or a neighbour that does
// better against the super-scale as f16 holds it; the weights are then rounded with the scale as it will be read.

#include "residual_encode.h"

#include "kernels/f16.h"
#include "kernels/packing.h"
#include "scale_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>

static const int N_CANDIDATES = 17;

// where the largest |r| may lie, in units of the last code's reach: with few codes clipping it pays
struct reach {
    float most, least;
};

static struct reach reach_of(int bits) {
    return bits == 4 ? reach{ 1.04f, 0.74f } : bits == 5 ? reach{ 1.02f, 0.80f } : bits == 6 ? reach{ 1.01f, 0.87f } : reach{ 1.004f, 0.954f };
}

static struct tb_search_range range_of(int bits) {
    return { (float) -tb_offset(bits), (float) (tb_offset(bits) - 1) };
}

static float search_scale(int bits, const struct tb_search_group & g) {
    if (!(std::fabs(g.max) > 1e-30f)) {
        return 0.0f;
    }
    const struct tb_search_range range = range_of(bits);
    const struct reach reach = reach_of(bits);
    struct tb_search_fit best = { 0.0f, 0.0f };
    for (int i = 0; i < N_CANDIDATES; i++) {
        const float at = reach.most + (reach.least - reach.most) * i / (N_CANDIDATES - 1);
        const struct tb_search_fit fit = tb_search_refit(&g, range, g.max / range.lo * at);
        best = fit.gain > best.gain ? fit : best;
    }
    return best.scale;
}

// the i8 scale code of a group whose searched scale is `scale`
static int choose_code(int bits, const struct tb_search_group & g, float super, float scale) {
    const int nearest = (int) std::lrint(std::max(-127.0f, std::min(127.0f, scale / super)));
    int best = nearest;
    float best_gain = tb_search_gain(&g, range_of(bits), super * nearest);
    for (int code = nearest - 1; code <= nearest + 1; code += 2) {
        const float gain = std::abs(code) <= 127 ? tb_search_gain(&g, range_of(bits), super * code) : best_gain;
        if (gain > best_gain) {
            best = code;
            best_gain = gain;
        }
    }
    return best;
}

// One row of a block. code_s: the row's byte in the first group (the next group's lies 32 bytes on); codes: (group, 32 rows, 64).
static void encode_row(int bits, const float * r, int n_groups, const float * importance, uint8_t * code_s, uint8_t * super_f16,
                       uint8_t (*codes)[TB_TILE_ROWS][TB_GROUP], int row) {
    struct tb_search_group groups[TB_BLOCK_COLS / TB_GROUP];
    float scales[TB_BLOCK_COLS / TB_GROUP];
    float largest = 0.0f;
    for (int g = 0; g < n_groups; g++) {
        tb_search_load(&groups[g], r + g * TB_GROUP, importance ? importance + g * TB_GROUP : NULL);
        scales[g] = search_scale(bits, groups[g]);
        largest = std::max(largest, std::fabs(scales[g]));
    }
    const uint16_t half = tb_f32_to_f16(std::min(65504.0f, largest / 127.0f));
    const float super = tb_f16_to_f32(half);
    if (super == 0.0f) {
        return; // the row stays as an absent one
    }
    memcpy(super_f16, &half, sizeof(half));
    for (int g = 0; g < n_groups; g++) {
        const int code = choose_code(bits, groups[g], super, scales[g]);
        code_s[g * TB_TILE_ROWS] = (uint8_t) code;
        tb_search_codes(&groups[g], range_of(bits), super * code, codes[g][row]);
    }
}

void tb_encode_tile(int bits, const float * r, int64_t n_rows, int64_t cols, const float * importance, uint8_t * dst) {
    for (int64_t col = 0; col < cols; col += TB_BLOCK_COLS) {
        const int n_groups = (int) std::min<int64_t>(TB_BLOCK_COLS, cols - col) / TB_GROUP;
        uint8_t codes[TB_BLOCK_COLS / TB_GROUP][TB_TILE_ROWS][TB_GROUP];
        memset(codes, tb_offset(bits), sizeof(codes)); // absent rows: super 0, code_s 0, q = offset
        memset(dst, 0, TB_BLOCK_SCALES);
        for (int64_t row = 0; row < n_rows; row++) {
            encode_row(bits, r + row * cols + col, n_groups, importance ? importance + col : NULL, dst + row,
                       dst + TB_SUPER_OFFSET + 2 * row, codes, (int) row);
        }
        dst += TB_BLOCK_SCALES;
        for (int g = 0; g < n_groups; g++, dst += tb_group_nbytes(bits)) {
            tb_pack_group(bits, codes[g][0], dst);
        }
    }
}
