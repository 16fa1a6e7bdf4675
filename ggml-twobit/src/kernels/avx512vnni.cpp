// avx512vnni.cpp: a register holds 16 rows × 4 columns, just what one vpdpbusd takes (u8 codes, s8 activations).
//
// 2 row tiles × 8 tokens = 16 sums stay in registers. More tokens pass over the block again while it is in L1.

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized" // GCC's own avx512fintrin.h, up to 12
#endif

#include "tile.h"
#include "x86.h"

namespace {

struct avx512vnni : tb_x86 {
    using I = __m512i;
    static const int LANES = 16, PARTS = 2, TOKENS = 8, STEPS = 1;
    static const bool UNROLLED = true;
    static const bool SIGNED8 = false;

    static inline I load(const uint8_t * p) { return _mm512_loadu_si512(p); }
    template <int N> static inline I shr(I v) { return _mm512_srli_epi16(v, N); }
    static inline I mask(I v, int bits) { return _mm512_and_si512(v, _mm512_set1_epi8((char) bits)); }
    static inline I or_masked(I a, I v, int bits) { return _mm512_ternarylogic_epi32(a, v, _mm512_set1_epi8((char) bits), 0xf8); }
    static inline I flip(I v) { return v; }
    static inline void pin(I & v) { __asm__("" : "+v"(v)); }
    static inline I set(int32_t i) { return _mm512_set1_epi32(i); }

    static inline I multiples(I scales) { return _mm512_mullo_epi32(_mm512_and_si512(scales, set(15)), set(0x03020100)); }
    static inline I row_index() { return _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c)); }
    static inline I lookup(I table, I index) { return _mm512_shuffle_epi8(table, index); }
    template <int N> static inline I shr32(I v) { return _mm512_srli_epi32(v, N); }
    template <int N> static inline I shl32(I v) { return _mm512_slli_epi32(v, N); }
    static inline I mask32(I v, int bits) { return _mm512_and_si512(v, set(bits)); }
    static inline I mul_add32(I sums, I a, I b) { return _mm512_add_epi32(sums, _mm512_mullo_epi32(a, b)); }
    static inline I dot16(I sums, I m, int32_t x) { return _mm512_dpwssd_epi32(sums, m, set(x)); }

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x, int) {
        static_assert(N == 1, "one step at a time");
        return _mm512_dpbusd_epi32(sums, w[0], _mm512_set1_epi32(x[0]));
    }

    static inline void scale_rows(const uint8_t * block, float * ws) {
        for (int row = 0; row < TB_TILE_ROWS; row += LANES) {
            const __m512 super = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (block + TB_SUPER_OFFSET + 2 * row)));
            for (int g = 0; g < 4; g++) {
                const __m512i code = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) (block + TB_TILE_ROWS * g + row)));
                _mm512_store_ps(ws + TB_TILE_ROWS * g + row, _mm512_mul_ps(super, _mm512_cvtepi32_ps(code)));
            }
        }
    }

    static inline void accumulate(float * y, I sums, float s, const float * ws) {
        const __m512 c = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(s));
        _mm512_store_ps(y, _mm512_fmadd_ps(c, _mm512_load_ps(ws), _mm512_load_ps(y)));
    }

    static inline void subtract(float * y, I sums, float s, const float * ws) {
        const __m512 c = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(s));
        _mm512_store_ps(y, _mm512_fnmadd_ps(c, _mm512_load_ps(ws), _mm512_load_ps(y)));
    }

    static inline void from_f16(const uint8_t * src, int n, float * ws) {
        for (int i = 0; i < n; i += LANES) {
            _mm512_store_ps(ws + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (src + 2 * i))));
        }
    }

    static inline void add(float * out, float factor, const float * y) {
        _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_set1_ps(factor), _mm512_load_ps(y), _mm512_loadu_ps(out)));
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
