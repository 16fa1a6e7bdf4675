// avx2.cpp: maddubs (u8 × s8, pairs added in 16 bits with saturation), for CPUs without VNNI.
//
// Codes of up to 6 bits leave room for two such pairs: 4 · 63 · 127 < 2^15. Codes of 8 bits do not; they are made signed, and their
// signs moved to the activations: 2 · 128 · 127 < 2^15.

#if defined(__x86_64__)

#include "tile.h"
#include "x86.h"

namespace {

struct avx2 : tb_x86_256 {
    using for_q2_k = tb_narrow<avx2>;
    static const int SCALED_FROM = TB_TOKENS + 1; // never
    static const bool SIGNED8 = true;

    // as many as 16 bits hold the sums of, but for 8-bit codes
    static constexpr int steps(int bits) { return bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x) {
        const I ones = _mm256_set1_epi16(1);
        if (BITS == 8) {
            return _mm256_add_epi32(sums, _mm256_madd_epi16(ones, _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(set(x[0]), w[0]))));
        }
        return _mm256_add_epi32(sums, _mm256_madd_epi16(ones, pairs<N>(w, x)));
    }

    static inline I dot_halves(const I * w, const int32_t * x, I scales) {
        const I both0 = _mm256_set1_epi32(0x01000100), both1 = _mm256_set1_epi32(0x03020302);
        const I rows = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
        const I a = _mm256_madd_epi16(pairs<4>(w, x), _mm256_shuffle_epi8(scales, _mm256_add_epi8(both0, rows)));
        const I b = _mm256_madd_epi16(pairs<4>(w + 4, x + 4), _mm256_shuffle_epi8(scales, _mm256_add_epi8(both1, rows)));
        return _mm256_add_epi32(a, _mm256_srai_epi32(b, 2));
    }

    template <int N> static inline I pairs(const I * w, const int32_t * x) {
        I sums = _mm256_maddubs_epi16(w[0], set(x[0]));
        for (int i = 1; i < N; i++) {
            sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w[i], set(x[i])));
        }
        return sums;
    }
};

} // namespace

extern const struct tb_kernels tb_kernels_avx2;
const struct tb_kernels tb_kernels_avx2 = {
    /* .name     = */ "avx2",
    /* .quantize = */ tb_quantize<avx2>,
    /* .mul_add  = */ tb_mul_add<avx2>,
    /* .mul_base = */ tb_mul_base<avx2>,
    /* .mul_pair = */ tb_mul_pair<avx2>,
};

#endif
