// attention_avx2.cpp: 16 floats in two registers.

#if defined(__x86_64__)

#include "attention-tile.h"

#include <immintrin.h>

namespace {

struct avx2 {
    struct F {
        __m256 lo, hi;
    };
    static const int CELLS = 4, ROWS = 2, COLS = 2;

    static TB_INLINE F zero(void) { return set(0.0f); }
    static TB_INLINE F set(float x) { return { _mm256_set1_ps(x), _mm256_set1_ps(x) }; }
    static TB_INLINE F load(const float * p) { return { _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
    static TB_INLINE F load_f16(const uint16_t * p) {
        return { _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p + 1)) };
    }
    static TB_INLINE void store(float * p, F x) {
        _mm256_storeu_ps(p, x.lo);
        _mm256_storeu_ps(p + 8, x.hi);
    }
    static TB_INLINE F add(F a, F b) { return { _mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi) }; }
    static TB_INLINE F sub(F a, F b) { return { _mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi) }; }
    static TB_INLINE F mul(F a, F b) { return { _mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi) }; }
    static TB_INLINE F max(F a, F b) { return { _mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi) }; }
    static TB_INLINE F fma(F a, F b, F c) { return { _mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi) }; }

    static TB_INLINE F scale2(F x, F n) { return { scale2(x.lo, n.lo), scale2(x.hi, n.hi) }; }
    static TB_INLINE F at_least(F x, F limit, F y) { return { at_least(x.lo, limit.lo, y.lo), at_least(x.hi, limit.hi, y.hi) }; }
    static TB_INLINE F masked(F m, F s) { return { masked(m.lo, s.lo), masked(m.hi, s.hi) }; }
    static TB_INLINE int n_positive(F x) { return n_positive(x.lo) + n_positive(x.hi); }
    static TB_INLINE float highest(F x) {
        const __m256 a = _mm256_max_ps(x.lo, x.hi);
        __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        b = _mm_max_ps(b, _mm_movehl_ps(b, b));
        return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
    }

    static TB_INLINE F sum16(const F * s) { return { sum8(s), sum8(s + 8) }; }

    static TB_INLINE void transpose(F * r) {
        __m256 upper_right[8]; // rows 0-7, columns 8-15: they change places with rows 8-15, columns 0-7
        __m256 t[8];
        for (int i = 0; i < 8; i++) { t[i] = r[i].lo; }
        transpose8(t);
        for (int i = 0; i < 8; i++) { r[i].lo = t[i]; upper_right[i] = r[i].hi; }
        transpose8(upper_right);
        for (int i = 0; i < 8; i++) { t[i] = r[8 + i].lo; }
        transpose8(t);
        for (int i = 0; i < 8; i++) { r[i].hi = t[i]; t[i] = r[8 + i].hi; }
        transpose8(t);
        for (int i = 0; i < 8; i++) { r[8 + i].lo = upper_right[i]; r[8 + i].hi = t[i]; }
    }

  private:
    static TB_INLINE __m256 scale2(__m256 x, __m256 n) {
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
    }
    static TB_INLINE __m256 at_least(__m256 x, __m256 limit, __m256 y) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y); }
    static TB_INLINE __m256 masked(__m256 m, __m256 s) {
        return _mm256_blendv_ps(m, _mm256_add_ps(s, m), _mm256_cmp_ps(m, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ));
    }
    static TB_INLINE int n_positive(__m256 x) {
        return __builtin_popcount((unsigned) _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NLE_UQ)));
    }

    static TB_INLINE __m256 sum8(const F * s) {
        __m256 quarters[4]; // [i]: 4 lanes each of the sums i, 4 + i
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256 a = _mm256_add_ps(s[i].lo, s[i].hi), b = _mm256_add_ps(s[4 + i].lo, s[4 + i].hi);
            quarters[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
        }
        const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(quarters[0], quarters[1]), _mm256_unpackhi_ps(quarters[0], quarters[1]));
        const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(quarters[2], quarters[3]), _mm256_unpackhi_ps(quarters[2], quarters[3]));
        return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    }

    static TB_INLINE void transpose8(__m256 * r) {
        __m256 t[8];
        for (int i = 0; i < 8; i += 4) { // 4 × 4 within the halves
            const __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
            const __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
            t[i]     = _mm256_shuffle_ps(a, c, 0x44);
            t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
            t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
            t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
        }
        for (int i = 0; i < 4; i++) { // the halves
            r[i]     = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
            r[4 + i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
        }
    }
};

} // namespace

void tb_attention_avx2(const tb_attention & a, int ith, int nth, void * scratch) {
    run<avx2>(a, ith, nth, scratch);
}

#endif
