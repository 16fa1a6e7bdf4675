#include "compute.h"

#include "error.h"
#include "ggml-impl.h"
#include "log.h"
#include "twobit.h"
#include "xxh64.h"

#include <string.h>

#include <algorithm>
#include <mutex>

tb_compute::~tb_compute() {
    ggml_backend_buffer_free(host);
    ggml_backend_buffer_free(staging);
    ggml_free(ctx);
    if (cpu) {
        ggml_backend_free(cpu);
    }
    if (inner) {
        ggml_backend_free(inner);
    }
}

// ---- which matmuls have a residual

static bool is_matmul(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
}

static bool is_view_op(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

static bool is_weight(const ggml_tensor * t) {
    return t && t->buffer && t->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

static tb_pair * pair_of(const ggml_tensor * node) {
    return is_matmul(node) && is_weight(node->src[0]) ? tb_pairs_find(node->src[0]) : nullptr;
}

// A weight that was read straight into host memory was not seen by the buffer: it is checked here, before its first use.
static bool check_pair(tb_pair & pair, const ggml_tensor * base) {
    if (!pair.verified && !pair.broken) {
        if ((pair.section->flags & TWOBIT_ATTACH_NO_VERIFY) || !ggml_backend_buffer_is_host(base->buffer)) {
            pair.verified = true;
        } else {
            tb_pair_verify(pair, base, tb_xxh64(base->data, ggml_nbytes(base)));
        }
    }
    if (pair.broken) {
        tb_set_error("%s: %s: the file is damaged; get it again", pair.section->path.c_str(), base->name);
    }
    return !pair.broken;
}

// before the first graph on the CPU
static void prepare(tb_pair & pair, const ggml_tensor * base) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex); // several contexts may share the model
    if (!pair.prepared) {
        pair.repacked = tb_repack(base, base->data);
        pair.prepared = true;
    }
}

// Another use of a paired weight than as a whole matrix of a matmul would silently be the 2-bit one.
static bool check_other_use(const ggml_tensor * node) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const ggml_tensor * src = node->src[i];
        const ggml_tensor * w   = src && src->view_src ? src->view_src : src;
        if (is_weight(w) && !(is_matmul(node) && src == w && i == 0) && !is_view_op(node) && tb_pairs_find(w)) {
            tb_set_error("%s: %s is used by %s, where its residual cannot be added; convert the model without it", tb_pairs_find(w)->section->path.c_str(),
                         w->name, ggml_op_desc(node));
            return false;
        }
    }
    return true;
}

static enum ggml_status fail(enum ggml_status status) {
    static thread_local char said[512];
    if (strcmp(said, twobit_last_error()) != 0) { // once, not for every graph
        snprintf(said, sizeof(said), "%s", twobit_last_error());
        TB_LOG_ERROR("%s\n", said);
    }
    return status;
}

// the graph with other nodes
static ggml_cgraph graph_of(const ggml_cgraph * cgraph, std::vector<ggml_tensor *> & nodes) {
    ggml_cgraph graph = *cgraph;
    graph.nodes   = nodes.data();
    graph.n_nodes = (int) nodes.size();
    graph.size    = graph.n_nodes;
    graph.uid     = 0; // the upstream graph's: RPC and others would replay that one
    return graph;
}

// ---- the CPU: our nodes between the graph's own, one graph in ggml's threads

static enum ggml_status compute_host(tb_compute & c, ggml_cgraph * cgraph, bool full, size_t n_products, size_t scratch_size) {
    if (!tb_nodes_begin(c.nodes, n_products, scratch_size)) {
        return fail(GGML_STATUS_ALLOC_FAILED);
    }
    c.order.clear();
    tb_invariant_begin(c.invariant);
    for (int i = 0; i < cgraph->n_nodes; i++) {
        ggml_tensor * node = cgraph->nodes[i];
        tb_pair     * pair = pair_of(node);
        if (pair && pair->repacked) {
            tb_add_product(c.nodes, full ? TB_BASE_AND_RESIDUAL : TB_BASE, *pair, node, nullptr, nullptr, nullptr, c.order);
            continue;
        }
        if (!full || !tb_invariant_node(c.invariant, cgraph, i, node, c.order)) {
            c.order.push_back(node);
        }
        if (pair && full) {
            tb_add_product(c.nodes, TB_ADD_RESIDUAL, *pair, node, nullptr, nullptr, nullptr, c.order);
        }
    }
    if (!tb_invariant_end(c.invariant)) {
        return fail(GGML_STATUS_ALLOC_FAILED);
    }
    ggml_cgraph graph = graph_of(cgraph, c.order);
    return ggml_backend_graph_compute_async(c.inner, &graph);
}

// ---- a wrapped GPU: slices of the graph that end where an x is wanted
//
//   GPU   ... -> x | base·x ----------------+-> += staging -> ...
//   CPU            | R·x for all that share x
//
// x comes down once for all matmuls that share it, R·x goes up, the GPU adds. The base's matmul runs meanwhile.

static enum ggml_status compute_slice(tb_compute & c, const ggml_cgraph * cgraph, std::vector<ggml_tensor *> & nodes) {
    if (nodes.empty()) {
        return GGML_STATUS_SUCCESS;
    }
    ggml_cgraph slice = graph_of(cgraph, nodes);
    tb_count.slices++;
    const enum ggml_status status = ggml_backend_graph_compute_async(c.inner, &slice);
    nodes.clear();
    return status;
}

// matmuls of one graph that share their input: x comes down and is rounded once for all of them
struct group {
    std::vector<ggml_tensor *> matmuls;
    int                        first;      // index of the first one in the graph
    const ggml_tensor        * x;
    const ggml_tensor        * ids;        // or NULL
    size_t                     ids_offset; // of the host buffer: x, ids, the products
    size_t                     y_offset;
    std::vector<size_t>        offsets;    // of each product, from y_offset and in the staging buffer
    size_t                     y_size;
};

// A group ends with the next paired matmul that has another input, so that only one group is under way at a time.
static std::vector<group> find_groups(const ggml_cgraph * cgraph, size_t align) {
    std::vector<group> groups;
    for (int i = 0; i < cgraph->n_nodes; i++) {
        ggml_tensor * node = cgraph->nodes[i];
        if (!pair_of(node)) {
            continue;
        }
        const ggml_tensor * x   = node->src[1];
        const ggml_tensor * ids = node->op == GGML_OP_MUL_MAT_ID ? node->src[2] : nullptr;
        if (groups.empty() || groups.back().x != x || groups.back().ids != ids) {
            const size_t ids_offset = GGML_PAD(ggml_nbytes(x), align);
            groups.push_back({ {}, i, x, ids, ids_offset, ids_offset + (ids ? GGML_PAD(ggml_nbytes(ids), align) : 0), {}, 0 });
        }
        group & g = groups.back();
        g.matmuls.push_back(node);
        g.offsets.push_back(g.y_size);
        g.y_size += GGML_PAD((size_t) ggml_nelements(node)*sizeof(float), align);
    }
    return groups;
}

static bool reserve_buffer(ggml_backend_buffer_t & buffer, ggml_backend_buffer_type_t buft, size_t size) {
    if (buffer && ggml_backend_buffer_get_size(buffer) >= size) {
        return true;
    }
    ggml_backend_buffer_free(buffer);
    buffer = ggml_backend_buft_alloc_buffer(buft, size);
    if (!buffer) {
        tb_set_error("%s: no memory for %zu bytes of staging; load fewer layers there", ggml_backend_buft_name(buft), size);
    }
    return buffer != nullptr;
}

static bool reserve_staging(tb_compute & c, const std::vector<group> & groups, size_t n_products) {
    size_t host_size   = 0;
    size_t device_size = 0;
    for (const group & g : groups) {
        host_size   = std::max(host_size, g.y_offset + g.y_size);
        device_size = std::max(device_size, g.y_size);
    }
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(c.inner));
    if (!reserve_buffer(c.host, pinned ? pinned : ggml_backend_cpu_buffer_type(), host_size) ||
        !reserve_buffer(c.staging, ggml_backend_get_default_buffer_type(c.inner), device_size)) {
        return false;
    }
    const size_t n_tensors = 2*n_products; // staging tensors and additions
    if (!c.ctx || c.ctx_nodes < n_tensors) {
        ggml_free(c.ctx);
        ggml_init_params params = { /*.mem_size =*/ ggml_tensor_overhead()*(n_tensors + 1), /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true };
        c.ctx       = ggml_init(params);
        c.ctx_nodes = c.ctx ? n_tensors : 0;
    }
    if (!c.ctx) {
        tb_set_error("out of memory: %zu staging tensors", n_tensors);
        return false;
    }
    ggml_reset(c.ctx);
    return true;
}

// matmul += what lies at `offset` of the staging buffer: a node for the inner backend. `addend`: its second operand.
static ggml_tensor * add_node(tb_compute & c, ggml_tensor * matmul, size_t offset, ggml_tensor ** addend) {
    *addend = ggml_new_tensor(c.ctx, GGML_TYPE_F32, GGML_MAX_DIMS, matmul->ne);
    ggml_backend_tensor_alloc(c.staging, *addend, (char *) ggml_backend_buffer_get_base(c.staging) + offset);
    ggml_tensor * sum = ggml_add_inplace(c.ctx, matmul, *addend);
    ggml_backend_view_init(sum);
    sum->flags |= GGML_TENSOR_FLAG_COMPUTE;
    return sum;
}

// R·x of the group on the CPU; x (and ids) lie in the host buffer, so will the products
static enum ggml_status compute_residuals(tb_compute & c, const ggml_cgraph * cgraph, const group & g) {
    char * host = (char *) ggml_backend_buffer_get_base(c.host);
    memset(host + g.y_offset, 0, g.y_size);
    c.order.clear();
    c.nodes.current = nullptr; // whatever the scratch holds is of another x
    for (size_t k = 0; k < g.matmuls.size(); k++) {
        tb_add_product(c.nodes, TB_ADD_RESIDUAL, *pair_of(g.matmuls[k]), g.matmuls[k], host, g.ids ? host + g.ids_offset : nullptr, host + g.y_offset + g.offsets[k], c.order);
    }
    ggml_cgraph graph = graph_of(cgraph, c.order);
    return ggml_backend_graph_compute(c.cpu, &graph);
}

static enum ggml_status compute_sliced(tb_compute & c, ggml_cgraph * cgraph, size_t n_products, size_t scratch_size) {
    const size_t align = std::max<size_t>(64, ggml_backend_buft_get_alignment(ggml_backend_get_default_buffer_type(c.inner)));
    const std::vector<group> groups = find_groups(cgraph, align);
    if (!reserve_staging(c, groups, n_products) || !tb_nodes_begin(c.nodes, n_products, scratch_size)) {
        return fail(GGML_STATUS_ALLOC_FAILED);
    }
    char * host = (char *) ggml_backend_buffer_get_base(c.host);

    std::vector<ggml_tensor *> slice;
    int i = 0;
    for (size_t gi = 0; gi < groups.size(); gi++) {
        const group & g = groups[gi];
        slice.insert(slice.end(), cgraph->nodes + i, cgraph->nodes + g.first);
        enum ggml_status status = compute_slice(c, cgraph, slice);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        // once this has been waited for, the uploads of the group before are over too, and host and staging are free
        ggml_backend_tensor_get_async(c.inner, g.x, host, 0, ggml_nbytes(g.x));
        if (g.ids) {
            ggml_backend_tensor_get_async(c.inner, g.ids, host + g.ids_offset, 0, ggml_nbytes(g.ids));
        }
        ggml_backend_synchronize(c.inner);

        slice.push_back(cgraph->nodes[g.first]);
        status = compute_slice(c, cgraph, slice);
        if (status == GGML_STATUS_SUCCESS) {
            status = compute_residuals(c, cgraph, g);
        }
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }

        // up to the last matmul of the group; the rest belongs to the next slice
        i = g.first;
        for (size_t k = 0; k < g.matmuls.size(); k++) {
            ggml_tensor * addend = nullptr;
            ggml_tensor * sum    = add_node(c, g.matmuls[k], g.offsets[k], &addend);
            ggml_backend_tensor_set_async(c.inner, addend, host + g.y_offset + g.offsets[k], 0, ggml_nbytes(addend));
            for (; i < cgraph->n_nodes; i++) {
                const bool is_first = i == g.first; // has been computed already
                if (!is_first) {
                    slice.push_back(cgraph->nodes[i]);
                }
                if (cgraph->nodes[i] == g.matmuls[k]) {
                    slice.push_back(sum);
                    i++;
                    break;
                }
            }
        }
    }
    slice.insert(slice.end(), cgraph->nodes + i, cgraph->nodes + cgraph->n_nodes);
    const enum ggml_status status = compute_slice(c, cgraph, slice);
    ggml_backend_synchronize(c.inner); // host and staging are free for the next graph
    return status;
}

// ----

enum ggml_status tb_compute_graph(tb_compute & c, ggml_cgraph * cgraph) {
    const bool full = twobit_get_mode() == TWOBIT_MODE_FULL;
    const bool host = !c.cpu;
    size_t n_products   = 0;
    size_t n_repacked  = 0;
    size_t scratch_size = 0;
    if (tb_pairs_count() > 0) {
        for (int i = 0; i < cgraph->n_nodes; i++) {
            const ggml_tensor * node = cgraph->nodes[i];
            tb_pair * pair = pair_of(node);
            if (pair) {
                if (!check_pair(*pair, node->src[0]) || !tb_can_multiply(*pair, node)) {
                    return fail(GGML_STATUS_FAILED);
                }
                if (host) {
                    prepare(*pair, node->src[0]);
                    n_repacked += pair->repacked != nullptr;
                }
                n_products++;
                scratch_size = std::max(scratch_size, tb_scratch_size(*pair, node));
            } else if (!check_other_use(node)) {
                return fail(GGML_STATUS_FAILED);
            }
        }
    }
    (full ? tb_count.graphs_full : tb_count.graphs_draft)++;
    c.paired |= n_products > 0;
    if (!full) {
        tb_count.matmuls_unpaired += (int64_t) n_products;
    }
    const bool keep = full ? n_products == 0 && !(host && c.paired) : n_repacked == 0; // the graph as it is
    if (keep) {
        return ggml_backend_graph_compute_async(c.inner, cgraph);
    }
    return host ? compute_host(c, cgraph, full, n_products, scratch_size) : compute_sliced(c, cgraph, n_products, scratch_size);
}
