// neon.cpp: sdot of ARMv8.2, 4 rows × 4 columns in a register (s8 × s8; codes of 8 bits are made signed, the others are below 128).
//
// 4 × 4 rows × 4 tokens = 16 sums stay in the 32 registers. i8mm has no use here: smmla takes 8 columns of a row at a time, and a
// vector of this layout holds 4.

#if defined(__aarch64__)

#include "tile.h"

#include <arm_neon.h>

namespace {

struct neon {
    using I = int32x4_t;
    static const int LANES = 4, PARTS = 4, TOKENS = 4, STEPS = 1;
    static const bool UNROLLED = false;
    static const bool SIGNED8 = true;

    static inline I from_u8(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
    static inline uint8x16_t u8(I v) { return vreinterpretq_u8_s32(v); }

    static inline I load(const uint8_t * p) { return from_u8(vld1q_u8(p)); }
    template <int N> static inline I shr(I v) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(v), N)); }
    static inline I mask(I v, int bits) { return from_u8(vandq_u8(u8(v), vdupq_n_u8((uint8_t) bits))); }
    static inline I or_masked(I a, I v, int bits) { return from_u8(vorrq_u8(u8(a), u8(mask(v, bits)))); }
    static inline I flip(I v) { return from_u8(veorq_u8(u8(v), vdupq_n_u8(0x80))); }
    static inline I set(int32_t i) { return vdupq_n_s32(i); }
    static inline void pin(I &) {}

    static inline I multiples(I scales) { return vmulq_s32(vandq_s32(scales, set(15)), set(0x03020100)); }
    static inline I row_index() { return int32x4_t{ 0, 0x04040404, 0x08080808, 0x0c0c0c0c }; }
    static inline I lookup(I table, I index) { return from_u8(vqtbl1q_u8(u8(table), u8(index))); }
    template <int N> static inline I shr32(I v) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N)); }
    template <int N> static inline I shl32(I v) { return vshlq_n_s32(v, N); }
    static inline I mask32(I v, int bits) { return vandq_s32(v, set(bits)); }
    static inline I mul_add32(I sums, I a, I b) { return vmlaq_s32(sums, a, b); }
    static inline I dot16(I sums, I m, int32_t x) {
        const int16x8_t a = vreinterpretq_s16_s32(m), b = vreinterpretq_s16_s32(set(x));
        return vaddq_s32(sums, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
    }

    template <tb_prefetch TO> static inline void prefetch(const char * p) { // in assembly: see x86.h
        if (TO == TB_PREFETCH_L1) {
            __asm__ volatile("prfm pldl1keep, %0" : : "Q"(*p));
        } else if (TO == TB_PREFETCH_L2) {
            __asm__ volatile("prfm pldl2keep, %0" : : "Q"(*p));
        }
    }

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x, int) {
        static_assert(N == 1, "one step at a time");
        return vdotq_s32(sums, vreinterpretq_s8_s32(w[0]), vreinterpretq_s8_s32(vld1q_dup_s32(x)));
    }

    static inline void scale_rows(const uint8_t * block, float * ws) {
        for (int row = 0; row < TB_TILE_ROWS; row += 8) {
            const float16x8_t super = vreinterpretq_f16_u8(vld1q_u8(block + TB_SUPER_OFFSET + 2 * row));
            const float32x4_t low = vcvt_f32_f16(vget_low_f16(super)), high = vcvt_f32_f16(vget_high_f16(super));
            for (int g = 0; g < 4; g++) {
                const int16x8_t code = vmovl_s8(vld1_s8((const int8_t *) block + TB_TILE_ROWS * g + row));
                float * out = ws + TB_TILE_ROWS * g + row;
                vst1q_f32(out, vmulq_f32(low, vcvtq_f32_s32(vmovl_s16(vget_low_s16(code)))));
                vst1q_f32(out + 4, vmulq_f32(high, vcvtq_f32_s32(vmovl_s16(vget_high_s16(code)))));
            }
        }
    }

    static inline void accumulate(float * y, I sums, float s, const float * ws) {
        const float32x4_t c = vmulq_f32(vcvtq_f32_s32(sums), vdupq_n_f32(s));
        vst1q_f32(y, vfmaq_f32(vld1q_f32(y), c, vld1q_f32(ws)));
    }

    static inline void subtract(float * y, I sums, float s, const float * ws) {
        const float32x4_t c = vmulq_f32(vcvtq_f32_s32(sums), vdupq_n_f32(s));
        vst1q_f32(y, vfmsq_f32(vld1q_f32(y), c, vld1q_f32(ws)));
    }

    static inline void from_f16(const uint8_t * src, int n, float * ws) {
        for (int i = 0; i < n; i += LANES) {
            vst1q_f32(ws + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(src + 2 * i))));
        }
    }

    static inline void add(float * out, float factor, const float * y) {
        vst1q_f32(out, vfmaq_f32(vld1q_f32(out), vdupq_n_f32(factor), vld1q_f32(y)));
    }

    // scalar.cpp, quantize_group
    static inline void quantize32(const float * x, int8_t * q, float * scale, int16_t * sums16) {
        uint32x4_t max4 = vdupq_n_u32(0); // of |x|: as integers NaN > Inf > everything else
        for (int i = 0; i < TB_ACT_GROUP; i += 4) {
            max4 = vmaxq_u32(max4, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffff)));
        }
        const uint32_t max_bits = vmaxvq_u32(max4);
        float max;
        memcpy(&max, &max_bits, sizeof(max));
        const bool finite = max_bits < 0x7f800000;
        if (!finite || max < TB_TINY) {
            *scale = finite ? 0.0f : NAN;
            memset(q, 0, TB_ACT_GROUP);
            memset(sums16, 0, 2 * sizeof(*sums16));
            return;
        }
        *scale = max / 127.0f;
        const float inverse = 127.0f / max;
        for (int i = 0; i < TB_ACT_GROUP; i += 16) {
            int32x4_t n[4];
            for (int j = 0; j < 4; j++) {
                n[j] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * j), inverse));
            }
            const int16x8_t a = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1])), b = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
            const int8x16_t bytes = vcombine_s8(vmovn_s16(a), vmovn_s16(b));
            vst1q_s8(q + i, bytes);
            sums16[i / 16] = vaddlvq_s8(bytes);
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
