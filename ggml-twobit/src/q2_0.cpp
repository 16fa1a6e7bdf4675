// q2_0.cpp: Q2_0 (ggml type 42): blocks of 64 weights, an f16 scale d and 2-bit codes q, value (q − 1)·d with q in 0…3.
//
// ggml's own quantizer takes d = max|w|, which leaves the codes 0 and 3 to the extremes alone. Here d is searched on both
// sides of zero: levels −d, 0, d, 2d lie unevenly, so its sign matters.

#include "q2_0.h"

#include "kernels/f16.h"

#include <algorithm>
#include <cmath>

namespace {

const int BLOCK = 64;

int code(float w, float inverse) {
    return (int) std::min(3.0f, std::max(0.0f, std::floor(w * inverse + 1.5f)));
}

struct fit {
    float scale;
    float gain; // by how much the weighted square error falls below that of d = 0
};

// The best scale for the codes that the scale d leads to.
fit refit(const float * w, const float * weight, float d) {
    const float inverse = 1.0f / d;
    float wl = 0.0f, ll = 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        const float level = (float) code(w[i], inverse) - 1.0f;
        wl += weight[i] * w[i] * level;
        ll += weight[i] * level * level;
    }
    return ll > 0.0f ? fit{ wl / ll, wl * wl / ll } : fit{ 0.0f, 0.0f };
}

void quantize_block(const float * w, const float * weight, uint8_t * dst) {
    float max = 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        max = std::max(max, std::fabs(w[i]));
    }
    fit best = { 0.0f, 0.0f };
    if (max > 1e-30f) {
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int step = 4; step <= 20; step++) { // d from 0.2 to 1 of max|w|
                fit f = refit(w, weight, sign * max * (step * 0.05f));
                if (f.gain > best.gain) {
                    best = f;
                }
            }
        }
        for (int i = 0; i < 3 && best.gain > 0.0f; i++) { // codes of the refitted scale, and its scale again
            const fit f = refit(w, weight, best.scale);
            if (f.gain <= best.gain) {
                break;
            }
            best = f;
        }
    }
    const uint16_t half = tb_f32_to_f16(std::max(-65504.0f, std::min(65504.0f, best.scale)));
    const float d = tb_f16_to_f32(half);
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    dst[0] = half & 0xff;
    dst[1] = half >> 8;
    for (int i = 0; i < BLOCK / 4; i++) {
        dst[2 + i] = 0;
        for (int j = 0; j < 4; j++) {
            dst[2 + i] |= code(w[4 * i + j], inverse) << (2 * j);
        }
    }
}

} // namespace

void tb_q2_0_quantize_row(const float * w, const float * importance, int64_t cols, uint8_t * dst) {
    for (int64_t col = 0; col < cols; col += BLOCK, dst += 2 + BLOCK / 4) {
        float weight[BLOCK];
        float sum = 0.0f;
        for (int i = 0; i < BLOCK; i++) {
            weight[i] = importance ? importance[col + i] : 1.0f;
            sum += weight[i];
        }
        if (!(sum > 0.0f)) { // columns nobody has seen: all alike
            std::fill(weight, weight + BLOCK, 1.0f);
        }
        quantize_block(w + col, weight, dst);
    }
}
