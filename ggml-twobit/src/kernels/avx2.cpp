// avx2.cpp: maddubs (u8 × s8, pairs added in 16 bits with saturation), for CPUs without VNNI.
//
// Codes of up to 6 bits leave room for two such pairs: 4 · 63 · 127 < 2^15. Codes of 8 bits do not; they are made signed, and their
// signs moved to the activations: 2 · 128 · 127 < 2^15.

#if defined(__x86_64__)

#include "tile.h"
#include "x86.h"

namespace {

struct avx2 : tb_x86_256 {
    static const int STEPS = 2;
    static const bool UNROLLED = false;
    static const bool SIGNED8 = true;

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x, int stride) {
        static_assert(N == 2, "two steps at a time");
        const I ones = _mm256_set1_epi16(1);
        const I x0 = _mm256_set1_epi32(x[0]), x1 = _mm256_set1_epi32(x[stride]);
        if (BITS == 8) {
            const I a = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x0, w[0]));
            const I b = _mm256_maddubs_epi16(_mm256_abs_epi8(w[1]), _mm256_sign_epi8(x1, w[1]));
            return _mm256_add_epi32(sums, _mm256_add_epi32(_mm256_madd_epi16(ones, a), _mm256_madd_epi16(ones, b)));
        }
        const I pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], x0), _mm256_maddubs_epi16(w[1], x1));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(ones, pairs));
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
