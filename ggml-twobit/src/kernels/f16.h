// f16.h: IEEE half precision <-> single, by integer arithmetic alone, so that every machine rounds alike (to nearest even).
#pragma once

#include <stdint.h>
#include <string.h>

static inline float tb_bits_to_f32(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static inline uint32_t tb_f32_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static inline float tb_f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16;
    const uint32_t rest = h & 0x7fff;
    if (rest >= 0x7c00) { // Inf, NaN
        return tb_bits_to_f32(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    }
    if (rest >= 0x400) {
        return tb_bits_to_f32(sign | ((rest << 13) + (112u << 23)));
    }
    const float f = (float) rest * 0x1p-24f; // subnormal, exact
    return sign ? -f : f;
}

static inline uint16_t tb_f32_to_f16(float f) {
    const uint32_t bits = tb_f32_to_bits(f);
    const uint16_t sign = (uint16_t) (bits >> 16 & 0x8000);
    const uint32_t mag  = bits & 0x7fffffff;
    if (mag > 0x7f800000) {
        return sign | 0x7e00;
    }
    if (mag >= 0x477ff000) { // 65520 and above round to Inf
        return sign | 0x7c00;
    }
    if (mag >= 0x38800000) { // normal: rebias, round the 13 lost bits to nearest even
        const uint32_t v = mag - (112u << 23);
        return sign | (uint16_t) ((v + 0xfff + (v >> 13 & 1)) >> 13);
    }
    // subnormal: adding 0.5 puts the half's last bit where the float's is, and rounds
    const float shifted = tb_bits_to_f32(mag) + 0.5f;
    return sign | (uint16_t) (tb_f32_to_bits(shifted) - 0x3f000000);
}
