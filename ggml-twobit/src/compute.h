// compute.h: graphs with residuals, on the CPU and on a wrapped GPU.
#pragma once

#include <vector>

#include "ggml-backend-impl.h"
#include "invariant.h"
#include "residual-op.h"

// What one of our backends (ggml_backend_t) keeps between graphs.
struct tb_compute {
    ggml_backend_t inner = nullptr; // computes everything but the residual
    ggml_backend_t cpu   = nullptr; // computes the residual where inner is not the CPU
    bool           ran   = false;   // a graph of its context has been computed
    bool           paired = false;  // one of them had a residual

    tb_nodes                   nodes;
    tb_invariant               invariant; // where inner is the CPU
    std::vector<ggml_tensor *> order; // the graph's nodes with ours between them

    // wrapped GPU: x and R·x in host memory (pinned where the device has such), R·x in the device's
    ggml_backend_buffer_t host      = nullptr;
    ggml_backend_buffer_t staging   = nullptr;
    ggml_context        * ctx       = nullptr; // of the staging tensors
    size_t                ctx_nodes = 0;

    ~tb_compute();
};

// The mode is that of the calling thread. Like a backend's graph_compute: may return before the work is done, `cgraph` may be reused at once.
enum ggml_status tb_compute_graph(tb_compute & c, struct ggml_cgraph * cgraph);
