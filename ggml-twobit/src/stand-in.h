// stand-in.h: a base in another type of the same values, for the CPU.
//
// ggml has no vector kernel for Q2_0 on x86: a matmul takes twenty times as long as with Q2_K. Every Q2_0 weight is exactly a Q4_1 weight
// (d·(q − 1) = d·q + m with m = −d), so where the CPU computes the base it does so with a Q4_1 copy in private memory.
#pragma once

#include <memory>

#include "ggml.h"

struct tb_stand_in {
    ggml_tensor tensor; // as the base, but for type, strides and data
    uint8_t   * data;

    ~tb_stand_in();
};

// NULL if the type needs none, there is no memory, or the environment has TWOBIT_REPACK=0. base_data: the base's bytes in host memory.
std::unique_ptr<tb_stand_in> tb_make_stand_in(const ggml_tensor * base, const void * base_data);
