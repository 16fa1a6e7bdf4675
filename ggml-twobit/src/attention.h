// attention.h: softmax(K·q)·V over the cells of a KV cache, with one order of operations for each query.
//
// What a query gets depends on nothing but itself and the cells it sees, in the order of the cells: not on how many queries are computed
// at once, on the number of threads, on the instruction set, on how far the cache is padded, or on cells between that it does not see.
//
//   score(cell)    16 partial sums over d mod 16, each in the order of d, added as a tree: halves, quarters, ...
//   weight(cell)   exp(score - the largest score the query sees)
//   result[d]      Σ weight·V[d] / Σ weight, both sums in the order of the cells; cells of weight 0 take no part
//
// All in f32 with fused multiply-add, from whatever type K and V have. Queries that share K and V are computed in tiles: a block of K or V is
// converted once for all of a tile.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TB_ATTENTION_ROWS  32 // queries of a tile, at most
#define TB_ATTENTION_CELLS 32 // cells of a block

struct tb_strides { // in bytes
    size_t token, head, seq;
};

enum tb_kv_type { TB_KV_F32, TB_KV_F16, TB_KV_OTHER };

// K or V: rows of values, one for each cell, head and sequence
struct tb_kv {
    const char * data;
    tb_kv_type   type;
    void      (* to_float)(const void * row, float * out, int64_t n); // of TB_KV_OTHER
    int64_t      dim;      // values of a row
    int64_t      n_head;   // queries' heads are a multiple
    int64_t      n_seq;    // likewise
    size_t       nb_value; // from one value of a row to the next; where that is not the size of a value, nb_cell is
    size_t       nb_cell, nb_head, nb_seq;
};

struct tb_attention {
    int64_t n_kv, n_tokens, n_head, n_seq; // n_tokens: in each sequence (ggml's "stream")
    tb_kv   k, v;

    const char * q;   // f32 (k.dim) for each token, head and sequence
    tb_strides   nb_q;
    char       * out; // f32 (v.dim), likewise
    tb_strides   nb_out;

    const char  * mask; // (n_kv) for each token, added to the scores; or NULL
    bool          mask_f16;
    tb_strides    nb_mask;
    int64_t       mask_heads, mask_seqs; // heads and sequences take turns
    const float * sinks;                 // a score of each head that has no V; or NULL

    float pre;     // score = post·tanh(pre·K·q) where pre is not 0 (softcap), else post·K·q
    float post;
    float max_bias; // ALiBi: the mask is multiplied with a slope for each head; 0: none
};

// bytes of scratch that each thread needs, a multiple of 64
size_t tb_attention_scratch(const tb_attention & a);
// the part of thread ith of nth; scratch: that thread's, 64-byte aligned
typedef void (*tb_attention_fn)(const tb_attention & a, int ith, int nth, void * scratch);

// The kernel that goes with a set of tb_kernels (kernels/kernels.h), by the set's name; NULL if this CPU cannot run it.
tb_attention_fn tb_attention_kernel(const char * set);
