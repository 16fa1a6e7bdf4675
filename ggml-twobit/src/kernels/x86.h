// x86.h: what the x86 instruction sets share, in AVX2: rounding activations, and the 256-bit vectors of tile.h.
#pragma once

#include "formats.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace { // not shared between files: each compiles this for its own instruction set

struct tb_x86 {
    // to L2; in assembly: GCC 12 drops _mm_prefetch in functions that do nothing else
    static inline void prefetch(const uint8_t * p) { __asm__ volatile("prefetcht1 %0" : : "m"(*p)); }

    // 32 values to int8 (scalar.cpp, round32)
    static inline void round32(const float * x, int8_t * q, float * scale, int16_t * sums) {
        const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
        __m256 v[4];
        __m256i max8 = _mm256_setzero_si256(); // of |x|: as integers NaN > Inf > everything else
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            max8 = _mm256_max_epi32(max8, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
        }
        __m128i max4 = _mm_max_epi32(_mm256_castsi256_si128(max8), _mm256_extracti128_si256(max8, 1));
        max4 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0x4e));
        max4 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0xb1));
        const bool finite = _mm_cvtsi128_si32(max4) < 0x7f800000;
        const float max = _mm_cvtss_f32(_mm_castsi128_ps(max4));
        if (!finite || max < TB_TINY) {
            *scale = finite ? 0.0f : NAN;
            _mm256_storeu_si256((__m256i *) q, _mm256_setzero_si256());
            memset(sums, 0, 2 * sizeof(*sums));
            return;
        }
        *scale = max / 127.0f;
        const __m256 inverse = _mm256_set1_ps(127.0f / max);
        __m256i n[4];
        for (int i = 0; i < 4; i++) {
            n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        }
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); // the packs interleave 128-bit halves
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        bytes = _mm256_permutevar8x32_epi32(bytes, order);
        _mm256_storeu_si256((__m256i *) q, bytes);
        const __m256i fours = _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes)); // sums of 4 columns
        const __m256i eights = _mm256_hadd_epi32(fours, fours), all = _mm256_hadd_epi32(eights, eights); // 16 columns in each half
        sums[0] = (int16_t) _mm256_cvtsi256_si32(all);
        sums[1] = (int16_t) _mm_cvtsi128_si32(_mm256_extracti128_si256(all, 1));
    }
};

// 8 rows × 4 columns in a register. The codes of 16 rows × 32 columns would take all 16 of them: some lie in L1, which costs less than
// fetching the activations anew for each 8 rows. For Q2_K, whose loops need more registers, tb_narrow keeps to 8 rows.
struct tb_x86_256 : tb_x86 {
    using I = __m256i;
    using F = __m256;
    static const int LANES = 8, PARTS = 2, TOKENS = 2;
    static constexpr int prefetch_from(bool, bool) { return 12; }

    static inline I load(const uint8_t * p) {
        I v = _mm256_loadu_si256((const __m256i *) p);
        __asm__ volatile("" : "+x"(v)); // once, and in order (tile.h)
        return v;
    }
    template <int N> static inline I shr(I v) { return _mm256_srli_epi16(v, N); }
    static inline I mask(I v, int bits) { return _mm256_and_si256(v, _mm256_set1_epi8((char) bits)); }
    static inline I or_masked(I a, I v, int bits) { return _mm256_or_si256(a, mask(v, bits)); }
    static inline I flip(I v) { return _mm256_xor_si256(v, _mm256_set1_epi8((char) 0x80)); }
    static inline I set(int32_t i) { return _mm256_set1_epi32(i); }

    static inline I multiples(I scales) { return _mm256_mullo_epi32(_mm256_and_si256(scales, set(15)), set(0x03020100)); }
    static inline I transpose(I v) {
        return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
    }
    static inline I row_index(int n) {
        return _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x01010101 << n, 0x02020202 << n, 0x03030303 << n));
    }
    static inline I lookup(I table, I index) { return _mm256_shuffle_epi8(table, index); }
    template <int N> static inline I shr32(I v) { return _mm256_srli_epi32(v, N); }
    template <int N> static inline I shl32(I v) { return _mm256_slli_epi32(v, N); }
    static inline I mask32(I v, int bits) { return _mm256_and_si256(v, set(bits)); }
    static inline I dot16(I sums, I m, int32_t x) { return _mm256_add_epi32(sums, _mm256_madd_epi16(m, set(x))); }

    static inline F set(float f) { return _mm256_set1_ps(f); }
    static inline F convert(I v) { return _mm256_cvtepi32_ps(v); }
    static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static inline F load_f(const float * p) { return _mm256_loadu_ps(p); }
    static inline void store_f(float * p, F f) { _mm256_storeu_ps(p, f); }
    static inline F from_f16(const uint8_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
    static inline F from_i8(const uint8_t * p) { return convert(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))); }
};

template <class V> struct tb_narrow : V {
    static const int PARTS = 1, TOKENS = 4;
};

} // namespace
