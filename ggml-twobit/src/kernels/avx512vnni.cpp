// avx512vnni.cpp: a register holds 16 rows × 4 columns, just what one vpdpbusd takes (u8 codes, s8 activations).
//
// The codes of 32 rows × 32 columns take 16 of the 32 registers.

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // GCC's own avx512fintrin.h, up to 12
#endif

#include "tile.h"
#include "x86.h"

namespace {

struct avx512vnni : tb_x86 {
    using I = __m512i;
    using F = __m512;
    using for_q2_k = avx512vnni;
    static const int LANES = 16, PARTS = 2, TOKENS = 1;
    static const bool SIGNED8 = false;
    static constexpr int steps(int) { return 1; }
    static constexpr int prefetch_from(bool base, bool residual) { return !residual ? 2 : !base ? 4 : 3; }

    static inline I load(const uint8_t * p) {
        I v = _mm512_loadu_si512(p);
        __asm__ volatile("" : "+v"(v)); // once, and in order (tile.h)
        return v;
    }
    template <int N> static inline I shr(I v) { return _mm512_srli_epi16(v, N); }
    static inline I mask(I v, int bits) { return _mm512_and_si512(v, _mm512_set1_epi8((char) bits)); }
    static inline I or_masked(I a, I v, int bits) { return _mm512_ternarylogic_epi32(a, v, _mm512_set1_epi8((char) bits), 0xf8); }
    static inline I flip(I v) { return v; }
    static inline I set(int32_t i) { return _mm512_set1_epi32(i); }
    template <int N> static inline I shl32(I v) { return _mm512_slli_epi32(v, N); }

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x) {
        static_assert(N == 1, "one step at a time");
        return _mm512_dpbusd_epi32(sums, w[0], _mm512_set1_epi32(x[0]));
    }

    static inline F set(float f) { return _mm512_set1_ps(f); }
    static inline F convert(I v) { return _mm512_cvtepi32_ps(v); }
    static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static inline F load_f(const float * p) { return _mm512_loadu_ps(p); }
    static inline void store_f(float * p, F f) { _mm512_storeu_ps(p, f); }
    static inline F from_f16(const uint8_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
    static inline F from_i8(const uint8_t * p) { return convert(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p))); }

    static const int SCALED_FROM = 4;
    template <int N> static inline I shr32(I v) { return _mm512_srli_epi32(v, N); }
    static inline I mask32(I v, int bits) { return _mm512_and_si512(v, set(bits)); }
    static inline I multiples(I scales) { return _mm512_mullo_epi32(_mm512_and_si512(scales, set(15)), set(0x03020100)); }
    static inline I transpose(I v) {
        return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
    }
    static inline I row_index(int n) { return _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x01010101 << n, 0x02020202 << n, 0x03030303 << n)); }
    static inline I lookup(I table, I index) { return _mm512_shuffle_epi8(table, index); }
    static inline I dot16(I sums, I m, int32_t x) { return _mm512_dpwssd_epi32(sums, m, set(x)); }

    static inline I dot_halves(const I * w, const int32_t * x, I scales) {
        I a = set(0), b = set(0); // b / 4 · 2^16 leaves a pair of int16 with a
        for (int i = 0; i < 4; i++) {
            a = _mm512_dpbusd_epi32(a, w[i], set(x[i]));
            b = _mm512_dpbusd_epi32(b, w[4 + i], set(x[4 + i]));
        }
        const I pairs = _mm512_ternarylogic_epi32(shl32<14>(b), a, set(0xffff), 0xf8);
        return _mm512_dpwssd_epi32(set(0), pairs, scales);
    }
};

} // namespace

extern const struct tb_kernels tb_kernels_avx512vnni;
const struct tb_kernels tb_kernels_avx512vnni = {
    /* .name     = */ "avx512vnni",
    /* .quantize = */ tb_quantize<avx512vnni>,
    /* .mul_add  = */ tb_mul_add<avx512vnni>,
    /* .mul_base = */ tb_mul_base<avx512vnni>,
    /* .mul_pair = */ tb_mul_pair<avx512vnni>,
};

#endif
