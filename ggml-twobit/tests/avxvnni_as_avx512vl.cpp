// The 256-bit VNNI kernels with the instruction's AVX-512VL encoding, so that machines without AVX-VNNI can test them.

#define TWOBIT_AVXVNNI_AS_AVX512VL
#define tb_kernels_avxvnni tb_kernels_avxvnni_as_avx512vl
#include "../src/kernels/avxvnni.cpp"
