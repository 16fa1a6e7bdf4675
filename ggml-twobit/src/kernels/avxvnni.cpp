// avxvnni.cpp: 256-bit vpdpbusd, for CPUs that have it without AVX-512.

#if defined(__x86_64__)

#include "tile.h"
#include "x86.h"

namespace {

#ifdef TWOBIT_AVXVNNI_AS_AVX512VL // the same code on CPUs that have this encoding of the instructions only
#    define TB_DPBUSD _mm256_dpbusd_epi32
#    define TB_DPWSSD _mm256_dpwssd_epi32
#else
#    define TB_DPBUSD _mm256_dpbusd_avx_epi32
#    define TB_DPWSSD _mm256_dpwssd_avx_epi32
#endif

struct avxvnni : tb_x86_256 {
    using for_q2_k = tb_narrow<avxvnni>;
    static const int SCALED_FROM = 4;
    static const bool SIGNED8 = false;
    static constexpr int steps(int) { return 1; }

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x) {
        static_assert(N == 1, "one step at a time");
        return TB_DPBUSD(sums, w[0], set(x[0]));
    }

    static inline I dot_halves(const I * w, const int32_t * x, I scales) {
        I a = set(0), b = set(0); // b / 4 · 2^16 leaves a pair of int16 with a
        for (int i = 0; i < 4; i++) {
            a = TB_DPBUSD(a, w[i], set(x[i]));
            b = TB_DPBUSD(b, w[4 + i], set(x[4 + i]));
        }
        return TB_DPWSSD(set(0), _mm256_blend_epi16(a, shl32<14>(b), 0xaa), scales);
    }
};

} // namespace

extern const struct tb_kernels tb_kernels_avxvnni;
const struct tb_kernels tb_kernels_avxvnni = {
    /* .name     = */ "avxvnni",
    /* .quantize = */ tb_quantize<avxvnni>,
    /* .mul_add  = */ tb_mul_add<avxvnni>,
    /* .mul_base = */ tb_mul_base<avxvnni>,
    /* .mul_pair = */ tb_mul_pair<avxvnni>,
};

#endif
