#include "invariant.h"

#include "error.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "log.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

// below this many rows ggml multiplies K- and I-quants by vec_dot, from it on in tiles (ggml-cpu/tiled)
static const int64_t TILED_MIN_ROWS = 8;
// rows of a matrix that stay in the first cache while all columns pass
static const int64_t BLOCK_ROWS = 16;

static bool is_enabled(void) {
    static const bool enabled = [] {
        const char * value = getenv("TWOBIT_INVARIANT");
        return !value || strcmp(value, "0") != 0;
    }();
    return enabled;
}

// ---- one vec_dot for each row and column

// ggml's table of functions lies in its CPU backend, which may be a library that was loaded by name, so it cannot be linked to.
typedef const struct ggml_type_traits_cpu * (*traits_fn)(enum ggml_type type);

static const struct ggml_type_traits_cpu * cpu_traits(enum ggml_type type) {
    static const traits_fn fn = [] {
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        Dl_info info;
        void *  library = cpu && dladdr((void *) cpu->iface.get_name, &info) ? dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : nullptr;
        void *  symbol  = dlsym(library ? library : RTLD_DEFAULT, "ggml_get_type_traits_cpu");
        if (!symbol) {
            TB_LOG_WARN("this ggml hides its vec_dot; matmuls without a residual are computed token by token\n");
        }
        return (traits_fn) symbol;
    }();
    return fn ? fn(type) : nullptr;
}

static const char * row(const ggml_tensor * t, const char * data, int64_t i1, int64_t i2, int64_t i3) {
    return data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3];
}

// each thread takes a part of every column, as in ggml: a single column is shared out, too
static void round_columns(ggml_tensor *, int ith, int nth, void * userdata) {
    const tb_columns  & c      = *(const tb_columns *) userdata;
    const ggml_tensor * x      = c.matmul->src[1];
    const auto        * traits = cpu_traits(c.matmul->src[0]->type);
    const enum ggml_type type  = traits->vec_dot_type;

    const int64_t block    = ggml_blck_size(type);
    const int64_t n_blocks = x->ne[0]/block;
    const int64_t b0       = n_blocks*ith/nth;
    const int64_t b1       = n_blocks*(ith + 1)/nth;
    if (b0 == b1) {
        return;
    }
    uint8_t * out = c.owner->scratch + b0*ggml_type_size(type);
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++) {
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++) {
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                cpu_traits(type)->from_float((const float *) row(x, (const char *) x->data, i1, i2, i3) + b0*block, out, (b1 - b0)*block);
                out += ggml_row_size(type, x->ne[0]);
            }
        }
    }
}

// rows [r0, r1) of one matrix with all the columns that meet it
static void multiply_rows(const tb_columns & c, int64_t r0, int64_t r1, int64_t i02, int64_t i03) {
    const ggml_tensor * w      = c.matmul->src[0];
    const ggml_tensor * x      = c.matmul->src[1];
    const ggml_tensor * y      = c.matmul;
    const auto        * traits = cpu_traits(w->type);
    const bool          as_is  = x->type == traits->vec_dot_type;
    const size_t        size   = ggml_row_size(traits->vec_dot_type, x->ne[0]);
    const int64_t       n2     = x->ne[2]/w->ne[2]; // matrices of x that share one of w
    const int64_t       n3     = x->ne[3]/w->ne[3];

    for (int64_t i3 = i03*n3; i3 < (i03 + 1)*n3; i3++) {
        for (int64_t i2 = i02*n2; i2 < (i02 + 1)*n2; i2++) {
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++) {
                const void * column = as_is ? (const void *) row(x, (const char *) x->data, i1, i2, i3)
                                            : (const void *) (c.owner->scratch + size*(size_t) ((i3*x->ne[2] + i2)*x->ne[1] + i1));
                float * out = (float *) row(y, (const char *) y->data, i1, i2, i3);
                for (int64_t r = r0; r < r1; r++) {
                    traits->vec_dot((int) w->ne[0], out + r, 0, row(w, (const char *) w->data, r, i02, i03), 0, column, 0, 1);
                }
            }
        }
    }
}

static void multiply_columns(ggml_tensor *, int ith, int nth, void * userdata) {
    const tb_columns  & c = *(const tb_columns *) userdata;
    const ggml_tensor * w = c.matmul->src[0];

    // the rows of all matrices are one sequence, of which each thread takes a part
    const int64_t total = w->ne[1]*w->ne[2]*w->ne[3];
    const int64_t end   = total*(ith + 1)/nth;
    for (int64_t i = total*ith/nth; i < end;) {
        const int64_t mat = i/w->ne[1];
        const int64_t r0  = i - mat*w->ne[1];
        const int64_t r1  = std::min({ w->ne[1], r0 + BLOCK_ROWS, r0 + end - i });
        multiply_rows(c, r0, r1, mat % w->ne[2], mat/w->ne[2]);
        i += r1 - r0;
    }
}

static void append_columns(tb_invariant & inv, ggml_tensor * matmul, std::vector<ggml_tensor *> & order) {
    tb_columns & c = tb_next(inv.columns, inv.n_columns);
    c = { &inv, matmul };
    const ggml_tensor  * x    = matmul->src[1];
    const enum ggml_type type = cpu_traits(matmul->src[0]->type)->vec_dot_type;
    if (x->type != type) {
        inv.wanted = std::max(inv.wanted, ggml_row_size(type, x->ne[0])*(size_t) ggml_nrows(x));
        order.push_back(tb_invariant_custom(inv, round_columns, &c));
    }
    order.push_back(tb_invariant_custom(inv, multiply_columns, &c));
}

// ---- slices of few tokens

// the tokens [i0, i1) along dimension `dim` of a tensor
static ggml_tensor * slice(tb_invariant & inv, const ggml_tensor * t, int dim, int64_t i0, int64_t i1) {
    ggml_tensor & s = tb_next(inv.tensors, inv.n_tensors);
    s = *t;
    s.ne[dim] = i1 - i0;
    s.data    = (char *) t->data + i0*t->nb[dim];
    return &s;
}

// The matmul in slices of at most `width` tokens; a slice reads the weights again.
static void append_slices(tb_invariant & inv, ggml_tensor * matmul, int64_t width, std::vector<ggml_tensor *> & order) {
    const bool    by_ids   = matmul->op == GGML_OP_MUL_MAT_ID;
    const int     dim      = by_ids ? 2 : 1;
    const int64_t n_tokens = matmul->ne[dim];
    for (int64_t i = 0; i < n_tokens; i += width) {
        const int64_t end = std::min(n_tokens, i + width);
        ggml_tensor * s = slice(inv, matmul, dim, i, end);
        s->src[1] = slice(inv, matmul->src[1], dim, i, end);
        if (by_ids) {
            s->src[2] = slice(inv, matmul->src[2], 1, i, end);
        }
        order.push_back(s);
    }
}

// ---- which node gets what

// ggml's own forms of a weight (repacked, AMX) have kernels of their own, for one token and for several
static bool is_plain(const ggml_tensor * w) {
    return !w->extra && (!w->buffer || ggml_backend_buffer_is_host(w->buffer));
}

static bool append_matmul(tb_invariant & inv, ggml_tensor * node, std::vector<ggml_tensor *> & order) {
    const ggml_tensor * w = node->src[0];
    const ggml_tensor * x = node->src[1];
    if (x->ne[1] == 1 || ggml_get_op_params_i32(node, 1) == GGML_HINT_SRC0_IS_HADAMARD) { // the latter goes row by row
        return false;
    }
    const auto * traits = is_plain(w) ? cpu_traits(w->type) : nullptr;
    if (traits && traits->vec_dot && (x->type == traits->vec_dot_type || x->type == GGML_TYPE_F32)) {
        append_columns(inv, node, order);
    } else {
        append_slices(inv, node, 1, order);
    }
    return true;
}

static bool append_experts(tb_invariant & inv, ggml_tensor * node, std::vector<ggml_tensor *> & order) {
    // an expert sees a token at most once, so slices below ggml's limit keep every expert below it
    const int64_t width = is_plain(node->src[0]) ? TILED_MIN_ROWS - 1 : 1;
    if (node->ne[2] <= width) {
        return false;
    }
    append_slices(inv, node, width, order);
    return true;
}

ggml_tensor * tb_invariant_custom(tb_invariant & inv, ggml_custom_op_t fun, void * userdata) {
    static float nothing; // a node's own result, which nobody reads or writes
    const ggml_custom_op_params params = { fun, GGML_N_TASKS_MAX, userdata };
    ggml_tensor & t = tb_next(inv.tensors, inv.n_tensors);
    t = {};
    t.type  = GGML_TYPE_F32;
    t.op    = GGML_OP_CUSTOM;
    t.flags = GGML_TENSOR_FLAG_COMPUTE;
    t.data  = &nothing;
    for (int i = 0; i < GGML_MAX_DIMS; i++) {
        t.ne[i] = 1;
        t.nb[i] = sizeof(float);
    }
    memcpy(t.op_params, &params, sizeof(params));
    return &t;
}

tb_invariant::~tb_invariant() {
    free(scratch);
}

void tb_invariant_begin(tb_invariant & inv) {
    inv.n_tensors    = 0;
    inv.n_columns    = 0;
    inv.n_attentions = 0;
    inv.wanted       = 0;
    inv.fused_end    = 0;
}

bool tb_invariant_node(tb_invariant & inv, const ggml_cgraph * cgraph, int i, ggml_tensor * node, std::vector<ggml_tensor *> & order) {
    if (!is_enabled() || !(node->flags & GGML_TENSOR_FLAG_COMPUTE) || ggml_is_empty(node)) {
        return false;
    }
    if (i < inv.fused_end) {
        return true;
    }
    if (inv.fused_end > 0 && i == inv.fused_end) {
        inv.fused_end = 0;
        tb_append_attention_result(inv, order);
        return true;
    }
    switch (node->op) {
        case GGML_OP_FLASH_ATTN_EXT: return tb_append_flash_attention(inv, node, order);
        case GGML_OP_MUL_MAT:        return tb_append_attention(inv, cgraph, i, order) || append_matmul(inv, node, order);
        case GGML_OP_MUL_MAT_ID:     return append_experts(inv, node, order);
        default:                     return false;
    }
}

bool tb_invariant_end(tb_invariant & inv) {
    if (inv.scratch_size >= inv.wanted) {
        return true;
    }
    free(inv.scratch);
    inv.scratch_size = 0;
    inv.scratch      = (uint8_t *) aligned_alloc(64, (inv.wanted + 63)/64*64);
    if (!inv.scratch) {
        tb_set_error("out of memory: %zu bytes for attention", inv.wanted);
        return false;
    }
    inv.scratch_size = inv.wanted;
    return true;
}
