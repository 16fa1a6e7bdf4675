// invariant.h: nodes that make a CPU graph batch-invariant: a token's result is the same, bit for bit, whatever number of tokens it is computed
// with and on however many threads. docs/architecture.md, "Batch invariance", says where ggml's own nodes depend on either.
//
//   MUL_MAT of several columns       one vec_dot of ggml's for each row and column, as ggml does it for a single column
//   MUL_MAT_ID of many tokens        slices of few tokens, for which ggml does the same
//   FLASH_ATTN_EXT, and K·q, SOFT_MAX, V·p      a kernel of ours, attention.h
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <vector>

#include "attention.h"
#include "ggml-impl.h"

struct tb_invariant;

// a matmul whose columns are rounded to vec_dot's type, then multiplied one by one
struct tb_columns {
    const tb_invariant * owner; // has the scratch with the rounded columns
    ggml_tensor        * matmul;
};

// attention over the cells of a KV cache
struct tb_attention_node {
    const tb_invariant * owner;
    tb_attention         args;
    ggml_tensor        * result; // the tensor that wants the result; args.out lies in scratch if it is NULL until then
    size_t               out_size;
};

// What is kept for the graphs of one backend. The pools are used anew by each graph; their elements stay where they are.
struct tb_invariant {
    int n_threads = GGML_DEFAULT_N_THREADS; // of the next graphs, at most

    std::deque<ggml_tensor>       tensors;
    std::deque<tb_columns>        columns;
    std::deque<tb_attention_node> attentions;
    size_t n_tensors    = 0;
    size_t n_columns    = 0;
    size_t n_attentions = 0;

    uint8_t * scratch      = nullptr; // of the node that is being computed
    size_t    scratch_size = 0;
    size_t    wanted       = 0;       // what the nodes appended so far need

    int                 fused_end = 0;       // index of the V·p whose attention has been appended already; 0: none
    tb_attention_node * fused     = nullptr;

    ~tb_invariant();
};

// Begins a graph.
void tb_invariant_begin(tb_invariant & inv);
// `node` is node i of the graph or stands for it; nodes are asked for in order. If its result would depend on the batch width, appends others in its
// place to `order` and returns true. Needs tb_invariant_end before they are computed.
bool tb_invariant_node(tb_invariant & inv, const ggml_cgraph * cgraph, int i, ggml_tensor * node, std::vector<ggml_tensor *> & order);
// Gets the nodes' memory. false: out of memory, tb_set_error has said so.
bool tb_invariant_end(tb_invariant & inv);

// ---- for the files that append nodes

// a custom node that ggml runs on all threads
ggml_tensor * tb_invariant_custom(tb_invariant & inv, ggml_custom_op_t fun, void * userdata);
// the next free element of a pool
template <typename T> T & tb_next(std::deque<T> & pool, size_t & n) {
    if (n == pool.size()) {
        pool.emplace_back();
    }
    return pool[n++];
}

// attention-op.cpp: the two kinds of attention. The second looks for K·q at node i and appends everything up to V·p.
bool tb_append_flash_attention(tb_invariant & inv, ggml_tensor * node, std::vector<ggml_tensor *> & order);
bool tb_append_attention(tb_invariant & inv, const ggml_cgraph * cgraph, int i, std::vector<ggml_tensor *> & order);
void tb_append_attention_result(tb_invariant & inv, std::vector<ggml_tensor *> & order);
