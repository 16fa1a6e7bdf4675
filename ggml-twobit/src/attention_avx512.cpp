// attention_avx512.cpp: 16 floats in a register.

#if defined(__x86_64__)

#include "attention-tile.h"

#include <immintrin.h>

namespace {

struct avx512 {
    using F = __m512;
    static const int CELLS = 16, ROWS = 4, COLS = 4;

    static TB_INLINE F zero(void) { return _mm512_setzero_ps(); }
    static TB_INLINE F set(float x) { return _mm512_set1_ps(x); }
    static TB_INLINE F load(const float * p) { return _mm512_loadu_ps(p); }
    static TB_INLINE F load_f16(const uint16_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
    static TB_INLINE void store(float * p, F x) { _mm512_storeu_ps(p, x); }
    static TB_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    static TB_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static TB_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static TB_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
    static TB_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

    static TB_INLINE F scale2(F x, F n) {
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
    }
    static TB_INLINE F at_least(F x, F limit, F y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y); }
    static TB_INLINE F masked(F m, F s) {
        return _mm512_mask_add_ps(m, _mm512_cmp_ps_mask(m, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), s, m);
    }
    static TB_INLINE int n_positive(F x) { return __builtin_popcount(_mm512_cmp_ps_mask(x, zero(), _CMP_NLE_UQ)); }
    static TB_INLINE float highest(F x) { return _mm512_reduce_max_ps(x); }

    static TB_INLINE F sum16(const F * s) {
        F quarters[4]; // [i]: 4 lanes each of the sums i, 4 + i, 8 + i, 12 + i
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const F a = halves(s[i], s[4 + i]);
            const F b = halves(s[8 + i], s[12 + i]);
            quarters[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        }
        const F a = add(_mm512_unpacklo_ps(quarters[0], quarters[1]), _mm512_unpackhi_ps(quarters[0], quarters[1]));
        const F b = add(_mm512_unpacklo_ps(quarters[2], quarters[3]), _mm512_unpackhi_ps(quarters[2], quarters[3]));
        return add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }

    static TB_INLINE void transpose(F * r) {
        F t[16];
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4) { // 4 × 4 within the quarters
            const F a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
            const F c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
            t[i]     = _mm512_shuffle_ps(a, c, 0x44);
            t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
            t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
            t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) { // the quarters
            const F a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x44), b = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xee);
            const F c = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x44), d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xee);
            r[i]      = _mm512_shuffle_f32x4(a, c, 0x88);
            r[4 + i]  = _mm512_shuffle_f32x4(a, c, 0xdd);
            r[8 + i]  = _mm512_shuffle_f32x4(b, d, 0x88);
            r[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
        }
    }

    // 8 lanes each of a and b: the upper half added to the lower
    static TB_INLINE F halves(F a, F b) { return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); }
};

} // namespace

void tb_attention_avx512(const tb_attention & a, int ith, int nth, void * scratch) {
    run<avx512>(a, ith, nth, scratch);
}

#endif
