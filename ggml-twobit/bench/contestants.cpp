#include "contestants.h"

#include "kernels/base.h"
#include "kernels/f16.h"
#include "kernels/kernels.h"
#include "kernels/packing.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

// ---- memory ---------------------------------------------------------------------------------------------------------

// In huge pages: with small ones the luck of which pages a contestant got made 20 % of difference.
static uint8_t * map(int64_t size) {
    const size_t huge = 2 << 20;
    void * p = mmap(NULL, size + 2 * huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "no memory for %lld bytes of weights\n", (long long) size);
        exit(1);
    }
    uint8_t * aligned = (uint8_t *) (((uintptr_t) p + huge - 1) / huge * huge);
#ifdef MADV_HUGEPAGE
    madvise(aligned, size + huge, MADV_HUGEPAGE);
#endif
    return aligned;
}

static void fill_random(uint8_t * p, int64_t size) {
    uint64_t s = 88172645463325252u;
    for (int64_t i = 0; i + 8 <= size; i += 8) {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        memcpy(p + i, &s, 8);
    }
}

static ggml_tensor * tensor(const workspace & ws, ggml_type type, int64_t ne0, int64_t ne1, void * data) {
    ggml_tensor * t = ggml_new_tensor_2d(ws.ctx, type, ne0, ne1);
    t->data = data;
    return t;
}

static ggml_tensor * custom(const workspace & ws, ggml_type type, int64_t ne0, int64_t ne1, ggml_tensor * arg, ggml_custom_op_t op,
                            void * user, void * data) {
    ggml_tensor * t = ggml_custom_4d(ws.ctx, type, ne0, ne1, 1, 1, &arg, 1, op, GGML_N_TASKS_MAX, user);
    t->data = data;
    return t;
}

static ggml_cgraph * new_graph(const workspace & ws, const std::vector<ggml_tensor *> & nodes) {
    ggml_cgraph * graph = ggml_new_graph_custom(ws.ctx, 4 * nodes.size() + 16, false);
    for (ggml_tensor * node : nodes) {
        ggml_build_forward_expand(graph, node);
    }
    return graph;
}

// ---- pure read ------------------------------------------------------------------------------------------------------

namespace {

struct piece {
    const uint8_t * data;
    int64_t         nbytes;
    uint64_t        sum;
};

void read_piece(ggml_tensor *, int ith, int nth, void * user) {
    piece * p = (piece *) user;
    const int64_t lines = p->nbytes / 64;
    uint64_t sums[8] = {};
    const uint64_t * v = (const uint64_t *) p->data + lines * ith / nth * 8;
    for (const uint64_t * end = (const uint64_t *) p->data + lines * (ith + 1) / nth * 8; v < end; v += 8) {
        for (int i = 0; i < 8; i++) {
            sums[i] ^= v[i];
        }
    }
    uint64_t sum = 0;
    for (uint64_t s : sums) {
        sum ^= s;
    }
    __atomic_fetch_xor(&p->sum, sum, __ATOMIC_RELAXED); // keeps the loop from being dropped
}

struct read_all : contestant {
    std::deque<piece> pieces;

    ggml_cgraph * graph(const workspace & ws, int64_t) override {
        std::vector<ggml_tensor *> nodes;
        for (piece & p : pieces) {
            nodes.push_back(custom(ws, GGML_TYPE_F32, 1, 1, tensor(ws, GGML_TYPE_F32, 1, 1, ws.x), read_piece, &p, ws.y));
        }
        return new_graph(ws, nodes);
    }
};

} // namespace

contestant * new_read(const std::vector<shape> & shapes) {
    read_all * c = new read_all;
    c->name = "read";
    for (const shape & s : shapes) {
        c->nbytes += tb_matrix_nbytes(6, s.rows, s.cols);
    }
    uint8_t * p = map(c->nbytes);
    fill_random(p, c->nbytes);
    for (const shape & s : shapes) {
        c->pieces.push_back({ p, tb_matrix_nbytes(6, s.rows, s.cols), 0 });
        p += c->pieces.back().nbytes;
    }
    return c;
}

// ---- our kernels ----------------------------------------------------------------------------------------------------

namespace {

struct weights { // of one product: base, residual or both
    tb_base   base;
    tb_matrix residual;
};

struct product {
    const tb_kernels * kernels;
    const weights    * w;
    tb_acts            acts;
    std::vector<const float *> x;
    std::vector<float *>       y;
};

void quantize(ggml_tensor *, int ith, int nth, void * user) {
    product * p = (product *) user;
    const int64_t blocks = tb_n_blocks(p->acts.cols);
    p->kernels->quantize(&p->acts, p->x.data(), blocks * ith / nth, blocks * (ith + 1) / nth);
}

void multiply(ggml_tensor * dst, int ith, int nth, void * user) {
    product * p = (product *) user;
    const int64_t tiles = tb_n_tiles(dst->ne[0]), tile0 = tiles * ith / nth, tile1 = tiles * (ith + 1) / nth;
    if (!p->w->base.data) {
        p->kernels->mul_add(&p->w->residual, &p->acts, p->y.data(), tile0, tile1);
    } else if (!p->w->residual.data) {
        p->kernels->mul_base(&p->w->base, &p->acts, p->y.data(), tile0, tile1);
    } else {
        p->kernels->mul_pair(&p->w->base, &p->w->residual, &p->acts, p->y.data(), tile0, tile1);
    }
}

struct ours : contestant {
    const tb_kernels * kernels;
    std::vector<shape>   shapes;
    std::vector<weights> all;
    std::deque<product>  products;

    ggml_cgraph * graph(const workspace & ws, int64_t n_tokens) override {
        std::vector<ggml_tensor *> nodes;
        for (size_t i = 0; i < all.size(); i++) {
            const shape & s = shapes[i];
            products.push_back({ kernels, &all[i], {}, {}, {} });
            product & p = products.back();
            tb_acts_init(&p.acts, ws.acts, n_tokens, s.cols);
            for (int64_t t = 0; t < n_tokens; t++) {
                p.x.push_back(ws.x + t * s.cols);
                p.y.push_back(ws.y + t * s.rows);
            }
            ggml_tensor * x = tensor(ws, GGML_TYPE_F32, s.cols, n_tokens, ws.x);
            ggml_tensor * q = custom(ws, GGML_TYPE_I8, s.cols, n_tokens, x, quantize, &p, ws.acts);
            nodes.push_back(custom(ws, GGML_TYPE_F32, s.rows, n_tokens, q, multiply, &p, ws.y));
        }
        return new_graph(ws, nodes);
    }
};

// random codes; scales that keep sums small
void fill_residual(uint8_t * p, const shape & s, int bits) {
    const uint16_t super = tb_f32_to_f16(1e-5f);
    fill_random(p, tb_matrix_nbytes(bits, s.rows, s.cols));
    for (int64_t tile = 0; tile < tb_n_tiles(s.rows); tile++) {
        for (int64_t col = 0; col < s.cols; col += TB_BLOCK_COLS) {
            for (int row = 0; row < TB_TILE_ROWS; row++) {
                memcpy(p + TB_SUPER_OFFSET + 2 * row, &super, sizeof(super));
            }
            p += tb_block_nbytes(bits, std::min<int64_t>(TB_BLOCK_COLS, s.cols - col) / TB_GROUP);
        }
    }
}

void fill_base(uint8_t * p, const shape & s, int type) {
    const int64_t nbytes = tb_base_nbytes(type, 32, s.cols);
    const int row_nbytes = (int) (s.cols / 256 * (type == TB_BASE_Q2_K ? 84 : 72));
    std::vector<uint8_t> rows(32 * row_nbytes);
    fill_random(rows.data(), rows.size());
    const uint16_t scale = tb_f32_to_f16(1e-3f);
    for (size_t i = 0; i < rows.size(); i += type == TB_BASE_Q2_K ? 84 : 18) { // ggml's d, and dmin
        memcpy(&rows[i + (type == TB_BASE_Q2_K ? 80 : 0)], &scale, 2);
        memcpy(&rows[i + (type == TB_BASE_Q2_K ? 82 : 0)], &scale, 2);
    }
    tb_base_repack(type, rows.data(), 32, s.cols, p, 0, 1);
    for (int64_t tile = 1; tile < tb_n_tiles(s.rows); tile++) {
        memcpy(p + tile * nbytes, p, nbytes);
    }
}

} // namespace

#if defined(__x86_64__)
extern const struct tb_kernels tb_kernels_avxvnni_as_avx512vl;
#endif

// the kernel set of that name; "avxvnni" also where the CPU has its instruction in AVX-512's encoding only
static const tb_kernels * kernels_by_name(const char * name) {
    const tb_kernels * kernels = name ? tb_kernels_by_name(name) : tb_kernels_best();
#if defined(__x86_64__)
    if (!kernels && strcmp(name, "avxvnni") == 0 && tb_kernels_by_name("avx512vnni")) {
        return &tb_kernels_avxvnni_as_avx512vl;
    }
#endif
    return kernels;
}

contestant * new_ours(int base_type, int bits, const char * kernel, const std::vector<shape> & shapes) {
    ours * c = new ours;
    c->name = base_type == TB_BASE_Q2_K ? "base Q2_K" : base_type == TB_BASE_Q2_0 ? "base Q2_0" : "";
    c->name += bits ? (c->name.empty() ? "R" : "+R") + std::to_string(bits) : "";
    c->shapes = shapes;
    c->kernels = kernels_by_name(kernel);
    if (!c->kernels) {
        fprintf(stderr, "no kernels \"%s\" on this CPU\n", kernel);
        exit(2);
    }
    for (const shape & s : shapes) {
        c->nbytes += (base_type ? tb_base_nbytes(base_type, s.rows, s.cols) : 0) + (bits ? tb_matrix_nbytes(bits, s.rows, s.cols) : 0);
    }
    uint8_t * p = map(c->nbytes);
    for (const shape & s : shapes) {
        weights w = {};
        if (base_type) {
            fill_base(p, s, base_type);
            w.base = { p, s.rows, s.cols, base_type };
            p += tb_base_nbytes(base_type, s.rows, s.cols);
        }
        if (bits) {
            fill_residual(p, s, bits);
            w.residual = { p, s.rows, s.cols, bits, 1.0f };
            p += tb_matrix_nbytes(bits, s.rows, s.cols);
        }
        c->all.push_back(w);
    }
    return c;
}

// ---- ggml's kernels -------------------------------------------------------------------------------------------------

namespace {

struct ggml_product : contestant {
    std::vector<ggml_tensor *> weights;

    ggml_cgraph * graph(const workspace & ws, int64_t n_tokens) override {
        std::vector<ggml_tensor *> nodes;
        for (ggml_tensor * w : weights) {
            nodes.push_back(ggml_mul_mat(ws.ctx, w, tensor(ws, GGML_TYPE_F32, w->ne[0], n_tokens, ws.x)));
            nodes.back()->data = ws.y;
        }
        return new_graph(ws, nodes);
    }
};

ggml_backend_buffer_type_t repack_buffer_type() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = cpu ? ggml_backend_dev_backend_reg(cpu) : NULL;
    const auto get = reg ? (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts") : NULL;
    ggml_backend_buffer_type_t * list = get ? get(cpu) : NULL;
    for (; list && *list; list++) {
        if (strstr(ggml_backend_buft_name(*list), "REPACK")) {
            return *list;
        }
    }
    return NULL;
}

} // namespace

contestant * new_ggml(ggml_type type, bool repack, const std::vector<shape> & shapes) {
    std::unique_ptr<ggml_product> c(new ggml_product);
    c->name = ggml_type_name(type);
    std::transform(c->name.begin(), c->name.end(), c->name.begin(), ::toupper);
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead() * (shapes.size() + 1), NULL, true });
    int64_t largest = 0;
    for (const shape & s : shapes) {
        c->weights.push_back(ggml_new_tensor_2d(ctx, type, s.cols, s.rows));
        c->nbytes += ggml_nbytes(c->weights.back());
        largest = std::max<int64_t>(largest, ggml_nbytes(c->weights.back()));
    }
    uint8_t * memory = NULL;
    if (repack) {
        c->name += " repacked";
        ggml_backend_buffer_type_t type_of_buffer = repack_buffer_type();
        ggml_backend_buffer_t buffer = type_of_buffer ? ggml_backend_alloc_ctx_tensors_from_buft(ctx, type_of_buffer) : NULL;
        if (!buffer || !c->weights[0]->extra) {
            if (buffer) {
                ggml_backend_buffer_free(buffer);
            }
            ggml_free(ctx);
            return NULL; // this CPU has no such layout for the type
        }
#ifdef MADV_HUGEPAGE
        const uintptr_t page = 4096, start = (uintptr_t) ggml_backend_buffer_get_base(buffer) / page * page;
        madvise((void *) start, ggml_backend_buffer_get_size(buffer) / page * page, MADV_HUGEPAGE);
#endif
    } else {
        memory = map(c->nbytes);
    }
    // 32 random rows of each width, over and over
    std::vector<uint8_t> whole(largest);
    for (ggml_tensor * w : c->weights) {
        const int64_t cols = w->ne[0], row_nbytes = ggml_row_size(type, cols);
        std::vector<float> source(32 * cols), ones(cols, 1.0f);
        for (size_t i = 0; i < source.size(); i++) {
            source[i] = (float) ((i * 2654435761u >> 8 & 0xffff) - 32768.0) / 32768.0f;
        }
        std::vector<uint8_t> rows(32 * row_nbytes);
        ggml_quantize_chunk(type, source.data(), rows.data(), 0, 32, cols, ones.data());
        uint8_t * out = repack ? whole.data() : memory;
        for (int64_t row = 0; row < w->ne[1]; row += 32) {
            memcpy(out + row * row_nbytes, rows.data(), std::min<int64_t>(32, w->ne[1] - row) * row_nbytes);
        }
        if (repack) {
            ggml_backend_tensor_set(w, out, 0, ggml_nbytes(w));
        } else {
            w->data = memory;
            memory += ggml_nbytes(w);
        }
    }
    return c.release();
}
