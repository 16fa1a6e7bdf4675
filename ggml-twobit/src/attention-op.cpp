// attention-op.cpp: attention.h as a node of a ggml graph on the CPU, in the place of FLASH_ATTN_EXT or of K·q, SOFT_MAX, V·p.
//
// The latter are computed where K·q is: q may be gone when V·p's turn comes. The result waits in scratch until V·p's turn, for its own memory
// may still be another's before that.

#include "invariant.h"
#include "kernels/kernels.h"

#include <string.h>

#include <algorithm>

// ---- the nodes' work

// scratch: (the result that waits), then a part for each thread
static void attend(ggml_tensor *, int ith, int nth, void * userdata) {
    static const tb_attention_fn run = tb_attention_kernel(tb_kernels_best()->name);
    const tb_attention_node & node = *(const tb_attention_node *) userdata;
    const int n_threads = std::min(nth, node.owner->n_threads);
    if (ith >= n_threads) {
        return;
    }
    uint8_t * scratch = node.owner->scratch;
    tb_attention a = node.args;
    if (!a.out) {
        a.out = (char *) scratch;
    }
    run(a, ith, n_threads, scratch + node.out_size + (size_t) ith*tb_attention_scratch(a));
}

static void copy_result(ggml_tensor *, int ith, int nth, void * userdata) {
    const tb_attention_node & node = *(const tb_attention_node *) userdata;
    const ggml_tensor * t = node.result;
    const int64_t n_rows = ggml_nrows(t);
    const size_t  size   = (size_t) t->ne[0]*sizeof(float);
    for (int64_t i = n_rows*ith/nth; i < n_rows*(ith + 1)/nth; i++) {
        const int64_t i3 = i/(t->ne[1]*t->ne[2]);
        const int64_t i2 = i/t->ne[1]%t->ne[2];
        const int64_t i1 = i%t->ne[1];
        memcpy((char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3], node.owner->scratch + (size_t) i*size, size);
    }
}

// ---- their arguments

static const ggml_tensor * root_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// K or V (dim, cell, head, sequence); transposed: V (cell, dim, head, sequence)
static bool read_kv(const ggml_tensor * t, bool transposed, tb_kv & kv) {
    const ggml_type_traits * traits = ggml_get_type_traits(t->type);
    const int cell = transposed ? 0 : 1, value = transposed ? 1 : 0;
    kv.type     = t->type == GGML_TYPE_F32 ? TB_KV_F32 : t->type == GGML_TYPE_F16 ? TB_KV_F16 : TB_KV_OTHER;
    kv.to_float = traits->to_float;
    kv.data     = (const char *) t->data;
    kv.dim      = t->ne[value];
    kv.n_head   = t->ne[2];
    kv.n_seq    = t->ne[3];
    kv.nb_value = t->nb[value];
    kv.nb_cell  = t->nb[cell];
    kv.nb_head  = t->nb[2];
    kv.nb_seq   = t->nb[3];
    return t->nb[0] == ggml_type_size(t->type) && (kv.type != TB_KV_OTHER || (traits->to_float && !transposed));
}

// q (dim, token, head, sequence), f32
static bool read_query(const ggml_tensor * q, tb_attention & a) {
    a.q        = (const char *) q->data;
    a.nb_q     = { q->nb[1], q->nb[2], q->nb[3] };
    a.n_tokens = q->ne[1];
    a.n_head   = q->ne[2];
    a.n_seq    = q->ne[3];
    return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[0] == a.k.dim && a.n_head % a.k.n_head == 0 && a.n_head % a.v.n_head == 0 &&
           a.n_seq % a.k.n_seq == 0 && a.n_seq % a.v.n_seq == 0;
}

static bool read_mask(const ggml_tensor * mask, const ggml_tensor * sinks, tb_attention & a) {
    if (sinks && (sinks->type != GGML_TYPE_F32 || sinks->ne[0] < a.n_head)) {
        return false;
    }
    a.sinks = sinks ? (const float *) sinks->data : nullptr;
    if (!mask) {
        return true;
    }
    a.mask       = (const char *) mask->data;
    a.mask_f16   = mask->type == GGML_TYPE_F16;
    a.nb_mask    = { mask->nb[1], mask->nb[2], mask->nb[3] };
    a.mask_heads = mask->ne[2];
    a.mask_seqs  = mask->ne[3];
    return (a.mask_f16 || mask->type == GGML_TYPE_F32) && mask->nb[0] == ggml_type_size(mask->type) && mask->ne[0] >= a.n_kv && mask->ne[1] >= a.n_tokens;
}

static float op_param(const ggml_tensor * t, int i) {
    return ggml_get_op_params_f32(t, i);
}

static tb_attention_node & append(tb_invariant & inv, const tb_attention & args, ggml_tensor * result, std::vector<ggml_tensor *> & order) {
    tb_attention_node & node = tb_next(inv.attentions, inv.n_attentions);
    node.owner    = &inv;
    node.args     = args;
    node.result   = result;
    node.out_size = args.out ? 0 : GGML_PAD(ggml_nelements(result)*sizeof(float), 64);
    inv.wanted    = std::max(inv.wanted, node.out_size + (size_t) inv.n_threads*tb_attention_scratch(args));
    order.push_back(tb_invariant_custom(inv, attend, &node));
    return node;
}

// ---- FLASH_ATTN_EXT

bool tb_append_flash_attention(tb_invariant & inv, ggml_tensor * node, std::vector<ggml_tensor *> & order) {
    tb_attention a = {};
    if (!read_kv(node->src[1], false, a.k) || !read_kv(node->src[2], false, a.v) || !read_query(node->src[0], a)) {
        return false;
    }
    a.n_kv = node->src[1]->ne[1];
    if (!read_mask(node->src[3], node->src[4], a) || !ggml_is_contiguous(node)) {
        return false;
    }
    const float scale = op_param(node, 0), softcap = op_param(node, 2);
    a.pre      = softcap != 0.0f ? scale/softcap : 0.0f;
    a.post     = softcap != 0.0f ? softcap : scale;
    a.max_bias = op_param(node, 1);
    a.out      = (char *) node->data; // (dim, head, token, sequence)
    a.nb_out   = { node->nb[2], node->nb[1], node->nb[3] };
    append(inv, a, node, order);
    return true;
}

// ---- K·q, [SCALE, TANH, SCALE,] SOFT_MAX, V·p

static bool is_view_op(const ggml_tensor * t) {
    return t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE || t->op == GGML_OP_NONE;
}

// the next node that computes something, if the result of node i goes there and nowhere else; else 0
static int only_user(const ggml_cgraph * cgraph, int i) {
    int next = i + 1;
    while (next < cgraph->n_nodes && is_view_op(cgraph->nodes[next])) {
        next++;
    }
    if (!cgraph->use_counts || next >= cgraph->n_nodes || !ggml_node_has_n_uses(cgraph, i, 1)) {
        return 0;
    }
    const ggml_tensor * user = cgraph->nodes[next];
    return user->src[0] == cgraph->nodes[i] || user->src[1] == cgraph->nodes[i] ? next : 0;
}

static bool is_scale(const ggml_tensor * t) {
    return t->op == GGML_OP_SCALE && op_param(t, 1) == 0.0f; // without an offset
}

// a weight, a cache or an input of the graph: nothing that the graph's own nodes compute, and so there when K·q is computed
static bool is_given(const ggml_tensor * t) {
    return !t || root_of(t)->op == GGML_OP_NONE;
}

bool tb_append_attention(tb_invariant & inv, const ggml_cgraph * cgraph, int i, std::vector<ggml_tensor *> & order) {
    const ggml_tensor * const * nodes = cgraph->nodes;
    const ggml_tensor * kq = nodes[i];

    tb_attention a = {};
    float cap = 1.0f;
    int   at  = only_user(cgraph, i);
    if (at && is_scale(nodes[at])) {
        a.pre = op_param(nodes[at], 0);
        at    = only_user(cgraph, at);
        if (!at || nodes[at]->op != GGML_OP_UNARY || ggml_get_unary_op(nodes[at]) != GGML_UNARY_OP_TANH) {
            return false;
        }
        at = only_user(cgraph, at);
        if (!at || !is_scale(nodes[at])) {
            return false;
        }
        cap = op_param(nodes[at], 0);
        at  = only_user(cgraph, at);
    }
    if (!at || nodes[at]->op != GGML_OP_SOFT_MAX || !ggml_are_same_shape(nodes[at], kq)) {
        return false;
    }
    const ggml_tensor * softmax = nodes[at];
    at = only_user(cgraph, at);
    if (!at || nodes[at]->op != GGML_OP_MUL_MAT || nodes[at]->src[1] != softmax || nodes[at]->src[0] == softmax) {
        return false;
    }
    ggml_tensor * result = cgraph->nodes[at];

    const ggml_tensor * v = result->src[0];
    if (!read_kv(kq->src[0], false, a.k) || !read_kv(v, true, a.v) || !read_query(kq->src[1], a)) {
        return false;
    }
    a.n_kv = kq->ne[0];
    if (!read_mask(softmax->src[1], softmax->src[2], a) || !is_given(v) || !is_given(softmax->src[1]) || !is_given(softmax->src[2])) {
        return false;
    }
    a.post     = cap*op_param(softmax, 0);
    a.max_bias = op_param(softmax, 1);
    const size_t row = (size_t) a.v.dim*sizeof(float); // as copy_result reads it: (dim, token, head, sequence)
    a.nb_out = { row, row*(size_t) a.n_tokens, row*(size_t) (a.n_tokens*a.n_head) };

    inv.fused     = &append(inv, a, result, order);
    inv.fused_end = at;
    return true;
}

void tb_append_attention_result(tb_invariant & inv, std::vector<ggml_tensor *> & order) {
    order.push_back(tb_invariant_custom(inv, copy_result, inv.fused));
}
