// attention-tile.h: attention of a tile of queries, written once for all instruction sets.
//
// An instruction set is a struct V with
//     F                              16 floats
//     CELLS                          cells whose scores are summed up in registers at a time
//     ROWS, COLS                     queries × vectors of V's rows, likewise
//     zero, set, load, store, load_f16, add, sub, mul, fma, max
//     scale2(x, n)                   x · 2^n, n being the low bits of a float (after adding 1.5·2^23)
//     at_least(x, limit, y)          x >= limit ? y : 0
//     masked(m, s)                   m == -inf ? -inf : s + m
//     n_positive(x)                  how many are > 0
//     highest(x)                     the largest
//     sum16(sums)                    out[i] = the 16 lanes of sums[i] as a tree
//     transpose(rows)                16 × 16, in place
#pragma once

#include "attention.h"
#include "kernels/f16.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#define TB_INLINE inline __attribute__((always_inline))

namespace { // each file compiles this for its own instruction set

const int ROWS  = TB_ATTENTION_ROWS;
const int CELLS = TB_ATTENTION_CELLS;

TB_INLINE int64_t pad16(int64_t n) {
    return (n + 15)/16*16;
}

// ---- exp, tanh

// exp(x) for x <= 0, within 0.64 ulp; 0 below -87. Cody & Waite's reduction, a minimax polynomial for the rest
template <class V> TB_INLINE typename V::F exp_negative(typename V::F x) {
    using F = typename V::F;
    const F big = V::set(0x1.8p23f);
    const F n   = V::fma(x, V::set(0x1.715476p0f), big); // round(x / ln 2) in the low bits
    const F k   = V::sub(n, big);
    const F r   = V::fma(k, V::set(-0x1.7f7d1cp-20f), V::fma(k, V::set(-0x1.62e400p-1f), x));
    F p = V::set(0x1.6a2352p-10f);
    p = V::fma(p, r, V::set(0x1.123a6cp-7f));
    p = V::fma(p, r, V::set(0x1.5558f4p-5f));
    p = V::fma(p, r, V::set(0x1.555490p-3f));
    p = V::fma(p, r, V::set(0x1.fffffcp-2f));
    p = V::fma(p, r, V::set(1.0f));
    p = V::fma(p, r, V::set(1.0f));
    return V::at_least(x, V::set(-87.0f), V::scale2(p, n));
}

float exp_negative(float x) { // the same for one value
    if (x < -87.0f) {
        return 0.0f;
    }
    const float n = fmaf(x, 0x1.715476p0f, 0x1.8p23f);
    const float k = n - 0x1.8p23f;
    const float r = fmaf(k, -0x1.7f7d1cp-20f, fmaf(k, -0x1.62e400p-1f, x));
    float p = 0x1.6a2352p-10f;
    p = fmaf(p, r, 0x1.123a6cp-7f);
    p = fmaf(p, r, 0x1.5558f4p-5f);
    p = fmaf(p, r, 0x1.555490p-3f);
    p = fmaf(p, r, 0x1.fffffcp-2f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return tb_bits_to_f32(tb_f32_to_bits(p) + (tb_f32_to_bits(n) << 23));
}

float tanh_by_exp(float x) {
    const float t = exp_negative(-2.0f*fabsf(x));
    return copysignf((1.0f - t)/(1.0f + t), x);
}

// ---- a block of cells as f32

template <class V> TB_INLINE typename V::F load_as(tb_kv_type type, const char * p) {
    return type == TB_KV_F16 ? V::load_f16((const uint16_t *) p) : V::load((const float *) p);
}

template <class V> float value_at(tb_kv_type type, const char * p) {
    if (type == TB_KV_F32) {
        return *(const float *) p;
    }
    uint16_t half[16] = { *(const uint16_t *) p };
    float    out[16];
    V::store(out, V::load_f16(half));
    return out[0];
}

// rows of the cells: cells × pad16(dim), zeros behind the row
template <class V> void load_rows(const tb_kv & kv, const char * data, int n, float * out) {
    const int64_t dim   = kv.dim;
    const int64_t width = pad16(dim);
    const size_t  size  = kv.type == TB_KV_F16 ? 2 : 4;
    for (int c = 0; c < n; c++, data += kv.nb_cell, out += width) {
        int64_t d = 0;
        if (kv.type == TB_KV_OTHER) {
            kv.to_float(data, out, dim);
            d = dim;
        } else {
            for (; d + 16 <= dim; d += 16) {
                V::store(out + d, load_as<V>(kv.type, data + d*size));
            }
            for (; d < dim; d++) {
                out[d] = value_at<V>(kv.type, data + d*size);
            }
        }
        for (; d < width; d++) {
            out[d] = 0.0f;
        }
    }
}

// the same where the cells of a value lie side by side
template <class V> void load_transposed(const tb_kv & kv, const char * data, int n, float * out) {
    const int64_t width = pad16(kv.dim);
    for (int64_t d = 0; d < width; d += 16) {
        for (int c = 0; c < n; c += 16) {
            if (d + 16 <= kv.dim && c + 16 <= n) {
                typename V::F rows[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) {
                    rows[i] = load_as<V>(kv.type, data + (d + i)*kv.nb_value + c*kv.nb_cell);
                }
                V::transpose(rows);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) {
                    V::store(out + (c + i)*width + d, rows[i]);
                }
            } else {
                for (int i = c; i < std::min(n, c + 16); i++) {
                    for (int64_t j = d; j < d + 16; j++) {
                        out[i*width + j] = j < kv.dim ? value_at<V>(kv.type, data + j*kv.nb_value + i*kv.nb_cell) : 0.0f;
                    }
                }
            }
        }
    }
}

template <class V> void load_cells(const tb_kv & kv, int64_t head, int64_t seq, int64_t cell, int n, float * out) {
    const char * data = kv.data + head*kv.nb_head + seq*kv.nb_seq + cell*kv.nb_cell;
    const size_t size = kv.type == TB_KV_F16 ? 2 : 4;
    if (kv.type == TB_KV_OTHER || kv.nb_value == size) {
        load_rows<V>(kv, data, n, out);
    } else {
        load_transposed<V>(kv, data, n, out);
    }
}

// ---- scores

// K·q of 16 cells; width: of a row
template <class V> TB_INLINE typename V::F dot16(const float * k, const float * q, int64_t width) {
    typename V::F sums[16];
#pragma GCC unroll 16
    for (int c0 = 0; c0 < 16; c0 += V::CELLS) {
        typename V::F s[V::CELLS];
#pragma GCC unroll 16
        for (int c = 0; c < V::CELLS; c++) {
            s[c] = V::zero();
        }
        for (int64_t d = 0; d < width; d += 16) {
            const typename V::F x = V::load(q + d);
#pragma GCC unroll 16
            for (int c = 0; c < V::CELLS; c++) {
                s[c] = V::fma(V::load(k + (c0 + c)*width + d), x, s[c]);
            }
        }
#pragma GCC unroll 16
        for (int c = 0; c < V::CELLS; c++) {
            sums[c0 + c] = s[c];
        }
    }
    return V::sum16(sums);
}

// a query of a tile
struct query {
    int64_t      token, head;
    const char * mask; // its row of the mask, or NULL
    float        slope;
};

bool sees_any(const tb_attention & a, const query & q, int64_t cell, int n) {
    if (!q.mask) {
        return true;
    }
    for (int c = 0; c < n; c++) {
        if (a.mask_f16 ? ((const uint16_t *) q.mask)[cell + c] != 0xfc00 : ((const float *) q.mask)[cell + c] != -INFINITY) {
            return true;
        }
    }
    return false;
}

// what is added to the scores of 32 cells: slope · mask, -inf behind the last one
template <class V> void load_mask(const tb_attention & a, const query & q, int64_t cell, int n, float * out) {
    const size_t size = a.mask_f16 ? 2 : 4;
    int c = 0;
    if (q.mask && n == CELLS) {
        for (; c < CELLS; c += 16) {
            V::store(out + c, V::mul(load_as<V>(a.mask_f16 ? TB_KV_F16 : TB_KV_F32, q.mask + (cell + c)*size), V::set(q.slope)));
        }
        return;
    }
    for (; c < n; c++) {
        out[c] = q.mask ? value_at<V>(a.mask_f16 ? TB_KV_F16 : TB_KV_F32, q.mask + (cell + c)*size)*q.slope : 0.0f;
    }
    for (; c < CELLS; c++) {
        out[c] = -INFINITY;
    }
}

// scores of a block's 32 cells
template <class V> TB_INLINE void score(const tb_attention & a, const float * k, const float * q, int64_t width, const float * mask, float * out) {
    for (int c = 0; c < CELLS; c += 16) {
        typename V::F s = dot16<V>(k + c*width, q, width);
        if (a.pre != 0.0f) {
            float t[16];
            V::store(t, V::mul(s, V::set(a.pre)));
            for (int i = 0; i < 16; i++) {
                t[i] = tanh_by_exp(t[i]);
            }
            s = V::load(t);
        }
        V::store(out + c, V::masked(V::load(mask + c), V::mul(s, V::set(a.post))));
    }
}

// ---- weights

enum { NO_CELLS, SOME_CELLS, ALL_CELLS }; // of a block, that have a weight

// scores to weights, in place; returns the largest score
template <class V> float weigh(float * s, int64_t n_blocks, uint8_t * use, float highest) {
    typename V::F high = V::set(highest);
    for (int64_t b = 0; b < n_blocks; b++) {
        for (int c = 0; use[b] && c < CELLS; c += 16) {
            high = V::max(high, V::load(s + b*CELLS + c));
        }
    }
    highest = V::highest(high);
    high    = V::set(highest);
    for (int64_t b = 0; b < n_blocks; b++) {
        if (!use[b] || highest == -INFINITY) {
            use[b] = NO_CELLS;
            continue;
        }
        int n = 0;
        for (int c = 0; c < CELLS; c += 16) {
            const typename V::F w = exp_negative<V>(V::sub(V::load(s + b*CELLS + c), high));
            n += V::n_positive(w);
            V::store(s + b*CELLS + c, w);
        }
        use[b] = n == CELLS ? ALL_CELLS : n > 0 ? SOME_CELLS : NO_CELLS;
    }
    return highest;
}

// ---- V

// NR queries: result += weights · V for n cells that all have a weight
template <class V, int NR, int NC>
TB_INLINE void add_cells(const float * v, int64_t width, const float * w, int64_t w_stride, int n, float * out) {
    typename V::F sum[NR][NC];
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++) {
#pragma GCC unroll 16
        for (int j = 0; j < NC; j++) {
            sum[r][j] = V::load(out + r*width + 16*j);
        }
    }
    for (int c = 0; c < n; c++) {
        typename V::F x[NC];
#pragma GCC unroll 16
        for (int j = 0; j < NC; j++) {
            x[j] = V::load(v + c*width + 16*j);
        }
#pragma GCC unroll 16
        for (int r = 0; r < NR; r++) {
            const typename V::F weight = V::set(w[r*w_stride + c]);
#pragma GCC unroll 16
            for (int j = 0; j < NC; j++) {
                sum[r][j] = V::fma(weight, x[j], sum[r][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++) {
#pragma GCC unroll 16
        for (int j = 0; j < NC; j++) {
            V::store(out + r*width + 16*j, sum[r][j]);
        }
    }
}

template <class V, int NR> void add_values(const float * v, int64_t width, const float * w, int64_t w_stride, int n, float * out, float * sums) {
    for (int c = 0; c < n; c++) {
#pragma GCC unroll 16
        for (int r = 0; r < NR; r++) {
            sums[r] += w[r*w_stride + c];
        }
    }
    int64_t d = 0;
    for (; d + 16*V::COLS <= width; d += 16*V::COLS) {
        add_cells<V, NR, V::COLS>(v + d, width, w, w_stride, n, out + d);
    }
    for (; d < width; d += 16) {
        add_cells<V, NR, 1>(v + d, width, w, w_stride, n, out + d);
    }
}

// one block of V for all queries of the tile. weights, results: a row each query; use[query][block]
template <class V>
void add_block(const float * v, int64_t width, const float * weights, int64_t w_stride, const uint8_t * use, int64_t use_stride, int n, int n_rows,
               float * results, float * sums) {
    for (int r = 0; r < n_rows;) {
        int full = 0;
        while (full < V::ROWS && r + full < n_rows && use[(r + full)*use_stride] == ALL_CELLS) {
            full++;
        }
        const float * w   = weights + r*w_stride;
        float       * out = results + r*width;
        if (full == V::ROWS) {
            add_values<V, V::ROWS>(v, width, w, w_stride, n, out, sums + r);
            r += V::ROWS;
            continue;
        }
        if (full > 0) {
            add_values<V, 1>(v, width, w, w_stride, n, out, sums + r);
        } else if (use[r*use_stride] == SOME_CELLS) {
            for (int c = 0; c < n; c++) {
                if (w[c] > 0.0f) {
                    add_values<V, 1>(v + c*width, width, w + c, w_stride, 1, out, sums + r);
                }
            }
        }
        r++;
    }
}

// ---- a tile

// scratch of a thread, in floats but for `use`
struct layout {
    int64_t n_blocks, k_width, v_width;
    int     rows; // queries of a tile: fewer where the cache is long, so that their scores stay in the second cache
    float * q, * block, * scores, * results, * mask, * sums;
    uint8_t * use; // (query, block)
};

const int64_t SCORES = (int64_t) 1 << 19; // floats

size_t lay_out(const tb_attention & a, void * scratch, layout & l) {
    l.n_blocks = (a.n_kv + CELLS - 1)/CELLS;
    l.k_width  = pad16(a.k.dim);
    l.v_width  = pad16(a.v.dim);
    l.rows     = (int) std::clamp<int64_t>(SCORES/(l.n_blocks*CELLS), 4, ROWS);
    uintptr_t p = (uintptr_t) scratch; // NULL where only the size is asked for
    const auto take = [&p](int64_t n) {
        float * at = (float *) p;
        p += (size_t) pad16(n)*sizeof(float);
        return at;
    };
    l.q       = take(l.rows*l.k_width);
    l.block   = take(CELLS*std::max(l.k_width, l.v_width));
    l.scores  = take(l.rows*l.n_blocks*CELLS);
    l.results = take(l.rows*l.v_width);
    l.mask    = take(CELLS);
    l.sums    = take(ROWS);
    l.use     = (uint8_t *) take((l.rows*l.n_blocks + 3)/4);
    return (size_t) (p - (uintptr_t) scratch);
}

// ALiBi, as ggml has it
float slope_of(const tb_attention & a, int64_t head) {
    if (a.max_bias <= 0.0f) {
        return 1.0f;
    }
    const int64_t n  = (int64_t) 1 << (int) floor(log2((double) a.n_head));
    const float   m0 = powf(2.0f, -a.max_bias/n);
    const float   m1 = powf(2.0f, -a.max_bias/2.0f/n);
    return head < n ? powf(m0, head + 1) : powf(m1, 2*(head - n) + 1);
}

template <class V> void attend(const tb_attention & a, const layout & l, const query * queries, int n_rows, int64_t seq) {
    const int64_t stride = l.n_blocks*CELLS;
    const int64_t k_head = queries[0].head/(a.n_head/a.k.n_head), k_seq = seq/(a.n_seq/a.k.n_seq);
    const int64_t v_head = queries[0].head/(a.n_head/a.v.n_head), v_seq = seq/(a.n_seq/a.v.n_seq);

    for (int r = 0; r < n_rows; r++) {
        const char * q = a.q + queries[r].token*a.nb_q.token + queries[r].head*a.nb_q.head + seq*a.nb_q.seq;
        float * out = l.q + r*l.k_width;
        memcpy(out, q, (size_t) a.k.dim*sizeof(float));
        std::fill(out + a.k.dim, out + l.k_width, 0.0f);
    }

    for (int64_t b = 0; b < l.n_blocks; b++) {
        const int64_t cell = b*CELLS;
        const int     n    = (int) std::min<int64_t>(CELLS, a.n_kv - cell);
        bool loaded = false, any = false;
        for (int r = 0; r < n_rows; r++) {
            const bool as_before = r > 0 && queries[r].mask == queries[r - 1].mask && queries[r].slope == queries[r - 1].slope;
            if (!as_before) {
                any = sees_any(a, queries[r], cell, n);
                if (any) {
                    load_mask<V>(a, queries[r], cell, n, l.mask);
                }
            }
            l.use[r*l.n_blocks + b] = any;
            if (!any) {
                continue;
            }
            if (!loaded) {
                load_cells<V>(a.k, k_head, k_seq, cell, n, l.block);
                std::fill(l.block + n*l.k_width, l.block + CELLS*l.k_width, 0.0f);
                loaded = true;
            }
            score<V>(a, l.block, l.q + r*l.k_width, l.k_width, l.mask, l.scores + r*stride + cell);
        }
    }

    std::fill(l.results, l.results + n_rows*l.v_width, 0.0f);
    float highest[ROWS];
    for (int r = 0; r < n_rows; r++) {
        highest[r] = weigh<V>(l.scores + r*stride, l.n_blocks, l.use + r*l.n_blocks, a.sinks ? a.sinks[queries[r].head] : -INFINITY);
        l.sums[r]  = 0.0f;
    }
    for (int64_t b = 0; b < l.n_blocks; b++) {
        const int64_t cell = b*CELLS;
        const int     n    = (int) std::min<int64_t>(CELLS, a.n_kv - cell);
        bool wanted = false;
        for (int r = 0; r < n_rows && !wanted; r++) {
            wanted = l.use[r*l.n_blocks + b] != NO_CELLS;
        }
        if (wanted) {
            load_cells<V>(a.v, v_head, v_seq, cell, n, l.block);
            add_block<V>(l.block, l.v_width, l.scores + cell, stride, l.use + b, l.n_blocks, n, n_rows, l.results, l.sums);
        }
    }

    for (int r = 0; r < n_rows; r++) {
        float sum = l.sums[r];
        if (a.sinks) {
            sum += exp_negative(a.sinks[queries[r].head] - highest[r]);
        }
        const float   inverse = sum > 0.0f ? 1.0f/sum : sum; // no cell seen: 0; NaN stays
        const float * result  = l.results + r*l.v_width;
        float * out = (float *) (a.out + queries[r].token*a.nb_out.token + queries[r].head*a.nb_out.head + seq*a.nb_out.seq);
        for (int64_t d = 0; d < a.v.dim; d++) {
            out[d] = result[d]*inverse;
        }
    }
}

// All queries are one sequence: (seq, head of K and V, token, head within that). Threads take units of it in turn, which end where K and V change.
template <class V> void run(const tb_attention & a, int ith, int nth, void * scratch) {
    layout l;
    lay_out(a, scratch, l);
    const int64_t group    = a.k.n_head == a.v.n_head ? a.n_head/a.k.n_head : 1; // heads that share K and V
    const int64_t per_head = a.n_tokens*group;
    const int64_t total    = per_head*(a.n_head/group)*a.n_seq;
    const int64_t unit     = std::clamp<int64_t>((total + nth - 1)/nth, 1, l.rows);

    query queries[ROWS];
    for (int64_t u = ith*unit; u < total; u += nth*unit) {
        const int64_t end = std::min(total, u + unit);
        for (int64_t i = u; i < end;) {
            const int64_t shared = i/per_head; // which K and V
            const int64_t seq    = shared/(a.n_head/group);
            const int64_t head0  = shared%(a.n_head/group)*group;
            const int     n      = (int) (std::min(end, (shared + 1)*per_head) - i);
            for (int r = 0; r < n; r++) {
                query & q = queries[r];
                q.token = (i + r)%per_head/group;
                q.head  = head0 + (i + r)%group;
                q.slope = slope_of(a, q.head);
                q.mask  = a.mask ? a.mask + q.token*a.nb_mask.token + q.head%a.mask_heads*a.nb_mask.head + seq%a.mask_seqs*a.nb_mask.seq : nullptr;
            }
            attend<V>(a, l, queries, n, seq);
            i += n;
        }
    }
}

} // namespace
