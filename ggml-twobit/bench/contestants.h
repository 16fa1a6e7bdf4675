// contestants.h: what bench_kernels.cpp compares. Each makes graphs of the same matrix products for ggml's CPU threads.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

struct shape {
    int64_t rows, cols;
};

// buffers that all graphs share: what is measured is the weights
struct workspace {
    ggml_context * ctx; // of all tensors and graphs; they have no memory of their own
    float        * x;   // (tokens, columns)
    float        * y;   // (tokens, rows)
    void         * acts; // tb_acts scratch
};

struct contestant {
    std::string name;
    int64_t     nbytes = 0; // of weights, read once by each graph

    virtual ~contestant() = default;
    // the products of all matrices with n_tokens tokens; nodes that hold data for it live as long as the contestant
    virtual ggml_cgraph * graph(const workspace & ws, int64_t n_tokens) = 0;
};

// Adds up all bytes: the time that memory alone takes. It has the size of R6.
contestant * new_read(const std::vector<shape> & shapes);
// our kernels of the set `kernel` (NULL: the best): a repacked base (TB_BASE_… or 0), a residual (bits or 0), or both in one pass
contestant * new_ours(int base_type, int bits, const char * kernel, const std::vector<shape> & shapes);
// ggml's own product; repack: in the layout llama.cpp gives such weights on the CPU (NULL if there is none)
contestant * new_ggml(ggml_type type, bool repack, const std::vector<shape> & shapes);
