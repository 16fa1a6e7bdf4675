#include "residual-op.h"

#include "error.h"

#include <stdlib.h>

#include <algorithm>

// ---- the nodes' work, on every thread of ggml's pool

static const float * x_row(const tb_input & in, int64_t i1, int64_t i2, int64_t i3) {
    return (const float *) (in.x_data + i1*in.x->nb[1] + i2*in.x->nb[2] + i3*in.x->nb[3]);
}

static void add_batch(tb_input & in, int64_t mat, int64_t first, uint8_t *& scratch) {
    tb_input::batch batch;
    batch.mat   = mat;
    batch.first = first;
    const int64_t n = (int64_t) in.rows.size() - first;
    tb_acts_init(&batch.acts, scratch, n, in.x->ne[0]);
    scratch += tb_acts_nbytes(n, in.x->ne[0]);
    in.batches.push_back(batch);
}

static void route(ggml_tensor *, int ith, int, void * userdata) {
    if (ith != 0) { // ggml calls every thread, whatever n_tasks says
        return;
    }
    tb_input & in = *(tb_input *) userdata;
    in.rows.clear();
    in.x_rows.clear();
    in.batches.clear();
    uint8_t * scratch = in.scratch;
    if (!in.ids) {
        for (int64_t i3 = 0; i3 < in.x->ne[3]; i3++) {
            for (int64_t i2 = 0; i2 < in.x->ne[2]; i2++) {
                for (int64_t i1 = 0; i1 < in.x->ne[1]; i1++) {
                    in.rows.push_back({ (int32_t) i1, (int32_t) i2, (int32_t) i3 });
                    in.x_rows.push_back(x_row(in, i1, i2, i3));
                }
            }
        }
        add_batch(in, 0, 0, scratch);
        return;
    }
    // one pass over an expert's weights serves all tokens that chose it
    const ggml_tensor * ids = in.ids;
    for (int64_t mat = 0; mat < in.n_mats; mat++) {
        const int64_t first = (int64_t) in.rows.size();
        for (int64_t token = 0; token < ids->ne[1]; token++) {
            for (int64_t slot = 0; slot < ids->ne[0]; slot++) {
                if (*(const int32_t *) (in.ids_data + slot*ids->nb[0] + token*ids->nb[1]) == mat) {
                    in.rows.push_back({ (int32_t) slot, (int32_t) token, 0 });
                    in.x_rows.push_back(x_row(in, slot % in.x->ne[1], token, 0));
                }
            }
        }
        if ((int64_t) in.rows.size() > first) {
            add_batch(in, mat, first, scratch);
        }
    }
}

static void quantise(ggml_tensor *, int ith, int nth, void * userdata) {
    const tb_input & in = *(const tb_input *) userdata;
    const int64_t n_blocks = tb_n_blocks(in.x->ne[0]);
    const int64_t b0 = n_blocks*ith/nth;
    const int64_t b1 = n_blocks*(ith + 1)/nth;
    if (b0 == b1) {
        return;
    }
    for (const tb_input::batch & batch : in.batches) {
        tb_kernels_best()->quantize(&batch.acts, in.x_rows.data() + batch.first, b0, b1);
    }
}

static void multiply(ggml_tensor *, int ith, int nth, void * userdata) {
    const tb_product  & p  = *(const tb_product *) userdata;
    const tb_input    & in = *p.input;
    const ggml_tensor * y  = p.matmul;
    static thread_local std::vector<float *> y_rows;

    // the super-tiles of all matrices in use are one sequence, of which each thread takes a part
    const int64_t n_tiles = tb_n_tiles(p.pair->residual->rows);
    const int64_t total   = n_tiles*(int64_t) in.batches.size();
    const int64_t begin   = total*ith/nth;
    const int64_t end     = total*(ith + 1)/nth;
    for (int64_t i = begin; i < end;) {
        const int64_t           b     = i/n_tiles;
        const int64_t           tile0 = i - b*n_tiles;
        const int64_t           tile1 = std::min(n_tiles, tile0 + end - i);
        const tb_input::batch & batch = in.batches[(size_t) b];
        y_rows.clear();
        for (int64_t r = 0; r < batch.acts.n_tokens; r++) {
            const tb_input::row & row = in.rows[(size_t) (batch.first + r)];
            y_rows.push_back((float *) (p.y_data + row.i1*y->nb[1] + row.i2*y->nb[2] + row.i3*y->nb[3]));
        }
        const tb_kernels * kernels = tb_kernels_best();
        const tb_matrix    matrix  = p.pair->residual->matrix(batch.mat);
        if (p.terms == TB_ADD_RESIDUAL) {
            kernels->mul_add(&matrix, &batch.acts, y_rows.data(), tile0, tile1);
        } else {
            const tb_base base = p.pair->repacked->base(batch.mat);
            if (p.terms == TB_BASE) {
                kernels->mul_base(&base, &batch.acts, y_rows.data(), tile0, tile1);
            } else {
                kernels->mul_pair(&base, &matrix, &batch.acts, y_rows.data(), tile0, tile1);
            }
        }
        i += tile1 - tile0;
    }
}

// ---- building them

static int64_t n_rows(const ggml_tensor * matmul) {
    const ggml_tensor * x = matmul->src[1];
    return matmul->op == GGML_OP_MUL_MAT_ID ? ggml_nelements(matmul->src[2]) : x->ne[1]*x->ne[2]*x->ne[3];
}

bool tb_can_multiply(const tb_pair & pair, const ggml_tensor * matmul) {
    const tb_residual & r = *pair.residual;
    const ggml_tensor * x = matmul->src[1];
    const bool by_ids = matmul->op == GGML_OP_MUL_MAT_ID;

    bool ok = x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[0] == r.cols &&
              matmul->type == GGML_TYPE_F32 && matmul->nb[0] == sizeof(float) && matmul->ne[0] == r.rows;
    if (by_ids) {
        const ggml_tensor * ids = matmul->src[2];
        ok = ok && ids->type == GGML_TYPE_I32 && ids->ne[2] == 1 && ids->ne[3] == 1 && x->ne[3] == 1 && (x->ne[1] == 1 || x->ne[1] == ids->ne[0]) &&
             x->ne[2] == ids->ne[1];
    } else {
        ok = ok && r.n_mats == 1;
    }
    if (!ok) {
        tb_set_error("%s: %s: cannot add the residual to this kind of matmul (%s)", pair.section->path.c_str(), matmul->src[0]->name, ggml_op_desc(matmul));
    }
    return ok;
}

size_t tb_scratch_size(const tb_pair & pair, const ggml_tensor * matmul) {
    const int64_t n       = n_rows(matmul);
    const int64_t n_parts = std::min(n, pair.residual->n_mats); // each part is rounded up to whole tiles and cache lines
    return tb_acts_nbytes(n, pair.residual->cols) + (size_t) n_parts*tb_acts_nbytes(1, pair.residual->cols);
}

tb_nodes::~tb_nodes() {
    ggml_free(ctx);
    free(scratch);
}

bool tb_nodes_begin(tb_nodes & nodes, size_t n_products, size_t scratch_size) {
    nodes.n_inputs   = 0;
    nodes.n_products = 0;
    nodes.current    = nullptr;

    if (nodes.scratch_size < scratch_size) {
        free(nodes.scratch);
        nodes.scratch_size = 0;
        nodes.scratch      = (uint8_t *) aligned_alloc(64, (scratch_size + 63)/64*64);
        if (!nodes.scratch) {
            tb_set_error("out of memory: %zu bytes for rounded activations", scratch_size);
            return false;
        }
        nodes.scratch_size = scratch_size;
    }
    const size_t n_nodes = 3*n_products; // route, quantise, multiply
    if (nodes.ctx_nodes < n_nodes || !nodes.ctx) {
        ggml_free(nodes.ctx);
        ggml_init_params params = { /*.mem_size =*/ ggml_tensor_overhead()*(n_nodes + 1), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true };
        nodes.ctx       = ggml_init(params);
        nodes.ctx_nodes = nodes.ctx ? n_nodes : 0;
        if (!nodes.ctx) {
            tb_set_error("out of memory: %zu graph nodes", n_nodes);
            return false;
        }
    }
    ggml_reset(nodes.ctx);
    return true;
}

static ggml_tensor * make_node(tb_nodes & nodes, ggml_custom_op_t fun, int n_tasks, void * userdata) {
    static float nothing; // a node's own result, which nobody reads or writes
    ggml_tensor * t = ggml_custom_4d(nodes.ctx, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, fun, n_tasks, userdata);
    t->data   = &nothing;
    t->flags |= GGML_TENSOR_FLAG_COMPUTE;
    return t;
}

template <typename T>
static T * next(std::vector<std::unique_ptr<T>> & pool, size_t & n) {
    if (n == pool.size()) {
        pool.push_back(std::make_unique<T>());
    }
    return pool[n++].get();
}

static tb_input * add_input(tb_nodes & nodes, const tb_pair & pair, const ggml_tensor * matmul, const void * x_data, const void * ids_data,
                            std::vector<ggml_tensor *> & out) {
    const ggml_tensor * x   = matmul->src[1];
    const ggml_tensor * ids = matmul->op == GGML_OP_MUL_MAT_ID ? matmul->src[2] : nullptr;
    if (nodes.current && nodes.current->x == x && nodes.current->ids == ids && nodes.current->n_mats == pair.residual->n_mats) {
        return nodes.current;
    }
    tb_input * in = next(nodes.inputs, nodes.n_inputs);
    in->x        = x;
    in->ids      = ids;
    in->x_data   = (const char *) (x_data ? x_data : x->data);
    in->ids_data = (const char *) (ids_data || !ids ? ids_data : ids->data);
    in->n_mats   = pair.residual->n_mats;
    in->scratch  = nodes.scratch;
    nodes.current = in;
    if (ids) {
        out.push_back(make_node(nodes, route, 1, in));
    } else {
        route(nullptr, 0, 1, in); // depends on addresses only
    }
    out.push_back(make_node(nodes, quantise, GGML_N_TASKS_MAX, in));
    return in;
}

void tb_add_product(tb_nodes & nodes, enum tb_terms terms, const tb_pair & pair, const ggml_tensor * matmul, const void * x_data, const void * ids_data,
                    void * y_data, std::vector<ggml_tensor *> & out) {
    const tb_input * in = add_input(nodes, pair, matmul, x_data, ids_data, out);
    tb_product * p = next(nodes.products, nodes.n_products);
    p->terms  = terms;
    p->pair   = &pair;
    p->input  = in;
    p->matmul = matmul;
    p->y_data = (char *) (y_data ? y_data : matmul->data);
    out.push_back(make_node(nodes, multiply, GGML_N_TASKS_MAX, p));

    if (terms != TB_BASE) {
        tb_count.matmuls_paired++;
        tb_count.tokens_residual += n_rows(matmul);
    }
}
