// residual_encode.cpp: the search for scales and codes.
//
// For each row and 64 columns the scale d that minimises Σ weight·(r − d·(q − offset))² is searched: the largest |r| is put on the
// code that reaches furthest (q = 0, the offset's side, so d takes its sign), a bit inside and outside of it; each candidate's codes
// get their least-squares scale. The scale's code is then rounded against the f16 super-scale, with its neighbours tried too, and
// the weights are rounded once more with the scale as it will be read.

#include "residual_encode.h"

#include "kernels/f16.h"
#include "kernels/packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// The same source for three vector widths, chosen when the library is loaded; without contraction all round alike.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#    define MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#    define MULTIVERSION
#endif

namespace {

const int LANES = 16;           // partial sums, added in one order: a fixed result for every vector width
const float ROUND = 0x1.8p23f;  // x + ROUND − ROUND rounds |x| < 2^22 to the nearest even integer

struct range {
    float lo, hi; // of q − offset
};

float add_lanes(const float * s) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) {
        sum += s[i];
    }
    return sum;
}

} // namespace

// What the codes of one scale give: rq = Σ weight·r·q, qq = Σ weight·q². wr: weight·r.
MULTIVERSION static void moments(const float * r, const float * wr, const float * weight, float inverse, float lo, float hi,
                                 float * rq, float * qq) {
    for (int j = 0; j < LANES; j++) {
        rq[j] = qq[j] = 0.0f;
    }
    for (int i = 0; i < TB_GROUP; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            const float v = std::min(hi, std::max(lo, r[i + j] * inverse));
            const float q = v + ROUND - ROUND;
            rq[j] += wr[i + j] * q;
            qq[j] += weight[i + j] * q * q;
        }
    }
}

MULTIVERSION static void round_codes(const float * r, float inverse, float lo, float hi, uint8_t * codes) {
    for (int i = 0; i < TB_GROUP; i++) {
        const float v = std::min(hi, std::max(lo, r[i] * inverse));
        codes[i] = (uint8_t) (int) (v + ROUND - ROUND - lo);
    }
}

namespace {

struct group {
    float r[TB_GROUP];
    float wr[TB_GROUP];
    float weight[TB_GROUP];
};

struct fit {
    float scale;
    float gain; // how much the weighted square error falls below that of scale 0
};

fit refit(const group & g, range q, float d) {
    float rq[LANES], qq[LANES];
    moments(g.r, g.wr, g.weight, 1.0f / d, q.lo, q.hi, rq, qq);
    const float a = add_lanes(rq), b = add_lanes(qq);
    return b > 0.0f ? fit{ a / b, a * a / b } : fit{ 0.0f, 0.0f };
}

// gain of exactly the scale d: Σ weight·(r² − (r − d·q)²)
float gain_of(const group & g, range q, float d) {
    float rq[LANES], qq[LANES];
    if (d == 0.0f || std::isinf(1.0f / d)) {
        return 0.0f;
    }
    moments(g.r, g.wr, g.weight, 1.0f / d, q.lo, q.hi, rq, qq);
    return d * (2.0f * add_lanes(rq) - d * add_lanes(qq));
}

void load(group & g, const float * r, const float * importance) {
    float sum = 0.0f;
    for (int i = 0; i < TB_GROUP; i++) {
        g.r[i] = r[i];
        g.weight[i] = importance ? importance[i] : 1.0f;
        sum += g.weight[i];
    }
    if (!(sum > 1e-30f)) { // columns nobody has seen: all alike
        std::fill(g.weight, g.weight + TB_GROUP, 1.0f);
    }
    for (int i = 0; i < TB_GROUP; i++) {
        g.wr[i] = g.weight[i] * g.r[i];
    }
}

const int N_CANDIDATES = 17;

// how far the largest |r| may lie beyond the last code, by candidate: with few codes clipping it pays
float reach(int bits, int i) {
    static const float span[9] = { 0, 0, 0, 0, 0.30f, 0.22f, 0.14f, 0, 0.05f };
    static const float above[9] = { 0, 0, 0, 0, 0.04f, 0.02f, 0.01f, 0, 0.004f };
    return 1.0f + above[bits] - span[bits] * i / (N_CANDIDATES - 1);
}

float search_scale(int bits, const group & g) {
    const range q = { -(float) tb_offset(bits), (float) tb_offset(bits) - 1.0f };
    float max = 0.0f;
    for (int i = 0; i < TB_GROUP; i++) {
        max = std::fabs(g.r[i]) > std::fabs(max) ? g.r[i] : max;
    }
    if (!(std::fabs(max) > 1e-30f)) {
        return 0.0f;
    }
    fit best = { 0.0f, 0.0f };
    for (int i = 0; i < N_CANDIDATES; i++) {
        const fit f = refit(g, q, max / q.lo * reach(bits, i));
        if (f.gain > best.gain) {
            best = f;
        }
    }
    return best.scale;
}

// code_s for one group, given its super-scale: the nearest of the searched scale, or a neighbour that does better
int8_t choose_code(int bits, const group & g, float super, float scale) {
    const range q = { -(float) tb_offset(bits), (float) tb_offset(bits) - 1.0f };
    const float nearest = std::nearbyint(std::max(-127.0f, std::min(127.0f, scale / super)));
    float best = nearest;
    float best_gain = gain_of(g, q, super * nearest);
    for (float code = nearest - 1.0f; code <= nearest + 1.0f; code += 2.0f) {
        const float gain = std::fabs(code) <= 127.0f ? gain_of(g, q, super * code) : 0.0f;
        if (gain > best_gain) {
            best = code;
            best_gain = gain;
        }
    }
    return (int8_t) best;
}

} // namespace

void tb_encode_tile(int bits, const float * r, int64_t n_rows, int64_t cols, const float * importance, uint8_t * dst) {
    const float lo = -(float) tb_offset(bits), hi = -lo - 1.0f;
    for (int64_t col = 0; col < cols; col += TB_BLOCK_COLS) {
        const int n_groups = (int) std::min<int64_t>(TB_BLOCK_COLS, cols - col) / TB_GROUP;
        uint8_t codes[4][TB_TILE_ROWS][TB_GROUP];
        memset(codes, tb_offset(bits), sizeof(codes)); // rows that are not there: super 0, code_s 0, q = offset
        memset(dst, 0, TB_BLOCK_SCALES);
        for (int64_t row = 0; row < n_rows; row++) {
            group groups[4];
            float scales[4];
            float largest = 0.0f;
            for (int g = 0; g < n_groups; g++) {
                const int64_t at = col + g * TB_GROUP;
                load(groups[g], r + row * cols + at, importance ? importance + at : NULL);
                scales[g] = search_scale(bits, groups[g]);
                largest = std::max(largest, std::fabs(scales[g]));
            }
            const uint16_t half = tb_f32_to_f16(std::min(65504.0f, largest / 127.0f));
            const float super = tb_f16_to_f32(half);
            memcpy(dst + TB_SUPER_OFFSET + 2 * row, &half, sizeof(half));
            if (super == 0.0f) {
                continue;
            }
            for (int g = 0; g < n_groups; g++) {
                const int8_t code_s = choose_code(bits, groups[g], super, scales[g]);
                const float d = super * code_s;
                dst[g * TB_TILE_ROWS + row] = (uint8_t) code_s;
                round_codes(groups[g].r, d != 0.0f ? 1.0f / d : 0.0f, lo, hi, codes[g][row]);
            }
        }
        dst += TB_BLOCK_SCALES;
        for (int g = 0; g < n_groups; g++, dst += tb_group_nbytes(bits)) {
            tb_pack_group(bits, codes[g][0], dst);
        }
    }
}
