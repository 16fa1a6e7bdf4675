// avxvnni.cpp: 256-bit vpdpbusd, for CPUs that have it without AVX-512.

#if defined(__x86_64__)

#include "tile.h"
#include "x86.h"

namespace {

struct avxvnni : tb_x86_256 {
    static const int STEPS = 1;
    static const bool UNROLLED = false;
    static const bool SIGNED8 = false;

    template <int N, int BITS> static inline I dot(I sums, const I * w, const int32_t * x, int) {
        static_assert(N == 1, "one step at a time");
#ifdef TWOBIT_AVXVNNI_AS_AVX512VL // tests run the same code on CPUs that have this encoding of the instruction only
        return _mm256_dpbusd_epi32(sums, w[0], _mm256_set1_epi32(x[0]));
#else
        return _mm256_dpbusd_avx_epi32(sums, w[0], _mm256_set1_epi32(x[0]));
#endif
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
