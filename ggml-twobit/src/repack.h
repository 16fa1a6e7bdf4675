// repack.h: a base in the layout of our kernels (kernels/base.h), where the CPU computes it. One private copy, in memory only.
#pragma once

#include <memory>

#include "ggml.h"
#include "kernels/kernels.h"

struct tb_repacked {
    int       type;
    int64_t   rows, cols, n_mats;
    int64_t   mat_nbytes;
    uint8_t * data;

    ~tb_repacked();

    tb_base base(int64_t i) const {
        return { data + i*mat_nbytes, rows, cols, type };
    }
};

// NULL if there is no kernel for the type, no memory, or the environment has TWOBIT_REPACK=0. base_data: the base's bytes in host memory.
std::unique_ptr<tb_repacked> tb_repack(const ggml_tensor * base, const void * base_data);
