// neon.cpp: sdot of ARMv8.2, 4 rows × 4 columns in a register (s8 × s8; codes of 8 bits are made signed, the others are below 128).
//
// The codes of 2 × 4 rows × 32 columns take 16 of the 32 registers. i8mm has no use here: smmla takes 8 columns of a row at a time, and
// a vector of this layout holds 4.

#if defined(__aarch64__)

#include "tile.h"

#include <arm_neon.h>

namespace {

struct neon {
    using I = int32x4_t;
    using F = float32x4_t;
    using for_q2_k = neon;
    static const int LANES = 4, PARTS = 2, TOKENS = 2;
    static const bool SIGNED8 = true;
    static constexpr int steps(int) { return 4; }
    static constexpr int prefetch_from(bool, bool) { return 12; } // as with AVX2: not measured

    static inline I from_u8(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
    static inline uint8x16_t u8(I v) { return vreinterpretq_u8_s32(v); }
    static inline int8x16_t s8(I v) { return vreinterpretq_s8_s32(v); }

    static inline I load(const uint8_t * p) { return from_u8(vld1q_u8(p)); }
    template <int N> static inline I shr(I v) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(v), N)); }
    static inline I mask(I v, int bits) { return from_u8(vandq_u8(u8(v), vdupq_n_u8((uint8_t) bits))); }
    static inline I or_masked(I a, I v, int bits) { return from_u8(vorrq_u8(u8(a), u8(mask(v, bits)))); }
    static inline I flip(I v) { return from_u8(veorq_u8(u8(v), vdupq_n_u8(0x80))); }
    static inline I set(int32_t i) { return vdupq_n_s32(i); }
    template <int N> static inline I shl32(I v) { return vshlq_n_s32(v, N); }

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x) {
        static_assert(N == 4, "16 columns at a time");
        const int8x16_t all = vld1q_s8((const int8_t *) x);
        sums = vdotq_laneq_s32(sums, s8(w[0]), all, 0);
        sums = vdotq_laneq_s32(sums, s8(w[1]), all, 1);
        sums = vdotq_laneq_s32(sums, s8(w[2]), all, 2);
        return vdotq_laneq_s32(sums, s8(w[3]), all, 3);
    }

    // in assembly: see x86.h
    static inline void prefetch(const uint8_t * p) { __asm__ volatile("prfm pldl2keep, %0" : : "Q"(*p)); }

    static inline F set(float f) { return vdupq_n_f32(f); }
    static inline F convert(I v) { return vcvtq_f32_s32(v); }
    static inline F mul(F a, F b) { return vmulq_f32(a, b); }
    static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static inline F load_f(const float * p) { return vld1q_f32(p); }
    static inline void store_f(float * p, F f) { vst1q_f32(p, f); }
    static inline F from_f16(const uint8_t * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    static inline F from_i8(const uint8_t * p) {
        int32_t four;
        memcpy(&four, p, sizeof(four));
        return convert(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
    }

    static const int SCALED_FROM = 4;
    template <int N> static inline I shr32(I v) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N)); }
    static inline I mask32(I v, int bits) { return vandq_s32(v, set(bits)); }
    static inline I multiples(I scales) { return vmulq_s32(vandq_s32(scales, set(15)), set(0x03020100)); }
    static inline I transpose(I v) {
        static const uint8_t order[16] = { 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15 };
        return from_u8(vqtbl1q_u8(u8(v), vld1q_u8(order)));
    }
    static inline I row_index(int n) { return int32x4_t{ 0, 0x01010101 << n, 0x02020202 << n, 0x03030303 << n }; }
    static inline I lookup(I table, I index) { return from_u8(vqtbl1q_u8(u8(table), u8(index))); }
    static inline I dot16(I sums, I m, int32_t x) {
        const int16x8_t a = vreinterpretq_s16_s32(m), b = vreinterpretq_s16_s32(set(x));
        return vaddq_s32(sums, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
    }

    static inline I dot_halves(const I * w, const int32_t * x, I scales) {
        const I a = dot<4, 2>(set(0), w, x), b = vshrq_n_s32(dot<4, 4>(set(0), w + 4, x + 4), 2);
        return vmlaq_s32(vmulq_s32(a, mask32(scales, 0xffff)), b, shr32<16>(scales));
    }

    // scalar.cpp, round32
    static inline void round32(const float * x, int8_t * q, float * scale, int16_t * sums) {
        uint32x4_t max4 = vdupq_n_u32(0); // of |x|: as integers NaN > Inf > everything else
        for (int i = 0; i < TB_RUN; i += 4) {
            max4 = vmaxq_u32(max4, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffff)));
        }
        const uint32_t max_bits = vmaxvq_u32(max4);
        float max;
        memcpy(&max, &max_bits, sizeof(max));
        const bool finite = max_bits < 0x7f800000;
        if (!finite || max < TB_TINY) {
            *scale = finite ? 0.0f : NAN;
            memset(q, 0, TB_RUN);
            memset(sums, 0, 2 * sizeof(*sums));
            return;
        }
        *scale = max / 127.0f;
        const float inverse = 127.0f / max;
        for (int i = 0; i < TB_RUN; i += 16) {
            int32x4_t n[4];
            for (int j = 0; j < 4; j++) {
                n[j] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * j), inverse));
            }
            const int16x8_t a = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1])), b = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
            const int8x16_t bytes = vcombine_s8(vmovn_s16(a), vmovn_s16(b));
            vst1q_s8(q + i, bytes);
            sums[i / 16] = vaddlvq_s8(bytes);
        }
    }
};

} // namespace

extern const struct tb_kernels tb_kernels_neon;
const struct tb_kernels tb_kernels_neon = {
    /* .name     = */ "neon",
    /* .quantize = */ tb_quantize<neon>,
    /* .mul_add  = */ tb_mul_add<neon>,
    /* .mul_base = */ tb_mul_base<neon>,
    /* .mul_pair = */ tb_mul_pair<neon>,
};

#endif
