// test_attention.cpp: attention against an f64 reference, and its promise: a query's result has the same bits whatever it is computed with, on
// every instruction set of this machine. Exit status 0 if all holds. --quick: without the long cache, for an emulator.

#include "attention.h"
#include "kernels/f16.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

static std::mt19937 rng(1);
static long n_checks = 0, n_failures = 0;

static void check(bool ok, const std::string & what) {
    n_checks++;
    if (!ok && n_failures++ < 20) {
        printf("FAILED: %s\n", what.c_str());
    }
}

static float gauss(float sigma) {
    return std::normal_distribution<float>(0.0f, sigma)(rng);
}

struct shape {
    const char * name;
    int64_t      dk, dv, n_head, n_head_kv, n_kv, n_tokens, n_seq;
    tb_kv_type   type;
    bool         transposed, mask_f16, sinks;
    float        softcap, max_bias;
    int64_t      window; // cells that a token sees; 0: all
};

static const shape SHAPES[] = {
    { "llama",             64,  64,  8, 2,  256,  7, 1, TB_KV_F16,   false, true,  false, 0,    0,   0 },
    { "no mask",           64,  64,  4, 4,   77,  3, 1, TB_KV_F32,   false, true,  false, 0,    0,  -1 },
    { "transposed V",     128, 128,  8, 2,  512, 16, 1, TB_KV_F16,   true,  false, false, 0,    0,   0 },
    { "odd everything",    72,  40,  6, 2,  333,  5, 1, TB_KV_F16,   true,  false, false, 0,    0,   0 },
    { "odd, f32",          72,  40,  6, 3,  333,  5, 2, TB_KV_F32,   true,  true,  false, 0,    0,   0 },
    { "sliding window",   256, 256,  4, 1, 1024, 33, 1, TB_KV_F16,   false, true,  false, 0,    0, 100 },
    { "softcap",          128, 128,  4, 2,  256,  4, 1, TB_KV_F16,   false, true,  false, 50.f, 0,   0 },
    { "ALiBi",             64,  64, 12, 3,  256,  9, 1, TB_KV_F16,   false, true,  false, 0,    8.f, 0 },
    { "sinks",             64,  64, 16, 2,  256,  4, 1, TB_KV_F16,   false, true,  true,  0,    0,  60 },
    { "two sequences",     80,  80,  4, 2,  256,  6, 2, TB_KV_F16,   false, true,  false, 0,    0,   0 },
    { "K and V as bytes",  64,  64,  8, 1,  256, 12, 1, TB_KV_OTHER, false, true,  false, 0,    0,   0 },
    { "MLA",              576, 512,  8, 1,  256,  5, 1, TB_KV_F16,   false, true,  false, 0,    0,   0 },
    { "long cache",        64,  64,  4, 2, 40000, 3, 1, TB_KV_F16,   false, true,  false, 0,    0,   0 },
};

static void bytes_to_float(const void * row, float * out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        out[i] = (float) ((const int8_t *) row)[i]/32.0f;
    }
}

// memory of one case, laid out as the tensors of llama.cpp: K and V (value, head, cell, sequence), transposed V (cell, value, head, sequence)
struct problem {
    shape s;
    std::vector<char>  k, v, mask;
    std::vector<float> q, sinks, out;
    tb_attention a;

    static size_t size_of(tb_kv_type type) { return type == TB_KV_F32 ? 4 : type == TB_KV_F16 ? 2 : 1; }

    static void put(std::vector<char> & to, tb_kv_type type, size_t i, float x) {
        const uint16_t half = tb_f32_to_f16(x);
        const int8_t   byte = (int8_t) std::lround(std::fmin(std::fmax(x*32.0f, -127.0f), 127.0f));
        memcpy(to.data() + i*size_of(type), type == TB_KV_F32 ? (const void *) &x : type == TB_KV_F16 ? (const void *) &half : &byte, size_of(type));
    }

    tb_kv side(const std::vector<char> & data, int64_t dim, bool transposed) const {
        const size_t size = size_of(s.type), n_kv = (size_t) s.n_kv, heads = (size_t) s.n_head_kv;
        tb_kv kv = { data.data(), s.type, bytes_to_float, dim, s.n_head_kv, s.n_seq, size, size*dim*heads, size*dim, size*dim*heads*n_kv };
        if (transposed) {
            kv.nb_cell = size, kv.nb_value = size*n_kv, kv.nb_head = size*n_kv*dim;
        }
        return kv;
    }

    tb_strides strides(int64_t dim) const { // of q and of the result
        const size_t head = (size_t) dim*sizeof(float), token = head*(size_t) s.n_head;
        return { token, head, token*(size_t) s.n_tokens };
    }

    bool sees(int64_t token, int64_t cell) const {
        const int64_t pos = s.n_kv - s.n_tokens - 3 + token; // the last cells are nobody's
        return s.window < 0 || (cell <= pos && (s.window == 0 || cell > pos - s.window) && cell % 11 != 5);
    }

    explicit problem(const shape & s) : s(s) {
        const size_t n_k = (size_t) (s.dk*s.n_head_kv*s.n_kv*s.n_seq), n_v = (size_t) (s.dv*s.n_head_kv*s.n_kv*s.n_seq);
        k.resize(n_k*size_of(s.type));
        v.resize(n_v*size_of(s.type));
        for (size_t i = 0; i < n_k; i++) {
            put(k, s.type, i, gauss(1.0f));
        }
        for (size_t i = 0; i < n_v; i++) {
            put(v, s.type, i, gauss(1.0f));
        }
        q.resize((size_t) (s.dk*s.n_head*s.n_tokens*s.n_seq));
        for (float & x : q) {
            x = gauss(2.0f);
        }
        sinks.resize((size_t) s.n_head);
        for (float & x : sinks) {
            x = gauss(3.0f);
        }
        const tb_kv_type mask_type = s.mask_f16 ? TB_KV_F16 : TB_KV_F32;
        mask.resize((size_t) (s.n_kv*s.n_tokens)*size_of(mask_type));
        for (int64_t t = 0; t < s.n_tokens; t++) {
            for (int64_t c = 0; c < s.n_kv; c++) {
                const float bias = s.max_bias > 0.0f ? -(float) (s.n_kv - c)/16.0f : 0.0f;
                put(mask, mask_type, (size_t) (t*s.n_kv + c), sees(t, c) ? bias : -INFINITY);
            }
        }
        if (s.type != TB_KV_OTHER) { // a cell that nobody sees may hold anything
            for (size_t i = 0; s.window >= 0 && !s.transposed && i < (size_t) s.dv; i++) {
                put(v, s.type, (size_t) (s.dv*s.n_head_kv*(s.n_kv - 1)) + i, NAN);
                put(k, s.type, (size_t) (s.dk*s.n_head_kv*(s.n_kv - 1)) + i%(size_t) s.dk, INFINITY);
            }
        }

        a = {};
        a.n_kv = s.n_kv, a.n_tokens = s.n_tokens, a.n_head = s.n_head, a.n_seq = s.n_seq;
        a.k    = side(k, s.dk, false);
        a.v    = side(v, s.dv, s.transposed);
        a.q    = (const char *) q.data();
        a.nb_q = strides(s.dk);
        a.nb_out = strides(s.dv);
        if (s.window >= 0) {
            a.mask = mask.data(), a.mask_f16 = s.mask_f16, a.mask_heads = 1, a.mask_seqs = 1;
            a.nb_mask = { size_of(mask_type)*(size_t) s.n_kv, 0, 0 };
        }
        a.sinks    = s.sinks ? sinks.data() : nullptr;
        a.max_bias = s.max_bias;
        const float scale = 1.0f/std::sqrt((float) s.dk);
        a.pre  = s.softcap > 0.0f ? scale/s.softcap : 0.0f;
        a.post = s.softcap > 0.0f ? s.softcap : scale;
    }

    std::vector<float> run(tb_attention_fn kernel, int n_threads, tb_attention a) {
        out.assign((size_t) (s.dv*s.n_head*s.n_tokens*s.n_seq), 777.0f);
        a.out = (char *) out.data();
        void * scratch = aligned_alloc(64, tb_attention_scratch(a));
        for (int i = n_threads - 1; i >= 0; i--) {
            kernel(a, i, n_threads, scratch);
        }
        free(scratch);
        return out;
    }

    double value(const tb_kv & kv, int64_t d, int64_t cell, int64_t head, int64_t seq) const {
        const char * p = kv.data + d*kv.nb_value + cell*kv.nb_cell + head*kv.nb_head + seq*kv.nb_seq;
        return s.type == TB_KV_F32 ? *(const float *) p : s.type == TB_KV_F16 ? tb_f16_to_f32(*(const uint16_t *) p) : *(const int8_t *) p/32.0;
    }

    // one query in f64
    std::vector<double> reference(int64_t token, int64_t head, int64_t seq) const {
        const int64_t kv_head = head/(s.n_head/s.n_head_kv);
        const double  n = std::pow(2.0, std::floor(std::log2((double) s.n_head)));
        const double  slope = s.max_bias == 0.0f ? 1.0 : head < n ? std::pow(2.0, -s.max_bias/n*(head + 1)) : std::pow(2.0, -s.max_bias/2/n*(2*(head - n) + 1));
        std::vector<double> score((size_t) s.n_kv, -INFINITY);
        double high = s.sinks ? sinks[(size_t) head] : -INFINITY;
        for (int64_t c = 0; c < s.n_kv; c++) {
            if (!sees(token, c)) {
                continue;
            }
            double x = 0;
            for (int64_t d = 0; d < s.dk; d++) {
                x += value(a.k, d, c, kv_head, seq)*q[(size_t) (((seq*s.n_tokens + token)*s.n_head + head)*s.dk + d)];
            }
            x = a.pre != 0.0f ? a.post*std::tanh(a.pre*x) : a.post*x;
            score[(size_t) c] = x + (s.max_bias > 0.0f ? slope*-(double) (s.n_kv - c)/16.0 : 0.0);
            high = std::fmax(high, score[(size_t) c]);
        }
        double sum = s.sinks ? std::exp(sinks[(size_t) head] - high) : 0.0;
        std::vector<double> result((size_t) s.dv, 0.0);
        for (int64_t c = 0; c < s.n_kv; c++) {
            if (sees(token, c)) {
                const double w = std::exp(score[(size_t) c] - high);
                sum += w;
                for (int64_t d = 0; d < s.dv; d++) {
                    result[(size_t) d] += w*value(a.v, d, c, kv_head, seq);
                }
            }
        }
        for (double & x : result) {
            x /= sum;
        }
        return result;
    }
};

static bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

static void test(const shape & s) {
    problem p(s);
    const std::string name = s.name;
    const std::vector<float> plain = p.run(tb_attention_kernel("scalar"), 1, p.a);

    double worst = 0;
    for (int64_t seq = 0; seq < s.n_seq; seq++) {
        for (int64_t token = 0; token < s.n_tokens; token++) {
            for (int64_t head = 0; head < s.n_head; head++) {
                const std::vector<double> expected = p.reference(token, head, seq);
                for (int64_t d = 0; d < s.dv; d++) {
                    const double got = plain[(size_t) (((seq*s.n_tokens + token)*s.n_head + head)*s.dv + d)];
                    worst = std::fmax(worst, std::isnan(got) ? INFINITY : std::fabs(got - expected[(size_t) d]));
                }
            }
        }
    }
    check(worst < 5e-6*(s.n_kv > 10000 ? 4 : 1), name + ": differs from f64 by " + std::to_string(worst));

    for (const char * set : { "scalar", "avx2", "avx512vnni" }) {
        const tb_attention_fn kernel = tb_attention_kernel(set);
        if (!kernel || (kernel == tb_attention_kernel("scalar") && strcmp(set, "scalar") != 0)) {
            continue;
        }
        const std::string at = name + ", " + set;
        for (int n_threads : { 1, 2, 3, 7, 64 }) {
            check(same(p.run(kernel, n_threads, p.a), plain), at + ": " + std::to_string(n_threads) + " threads");
        }
        // token by token
        std::vector<float> one_by_one = plain;
        for (int64_t t = 0; t < s.n_tokens; t++) {
            tb_attention a = p.a;
            a.n_tokens = 1;
            a.q += t*a.nb_q.token;
            a.mask = a.mask ? a.mask + t*a.nb_mask.token : nullptr;
            const std::vector<float> got = p.run(kernel, 2, a);
            for (int64_t seq = 0; seq < s.n_seq; seq++) {
                const size_t n = (size_t) (s.dv*s.n_head), to = n*(size_t) (seq*s.n_tokens + t);
                memcpy(one_by_one.data() + to, got.data() + n*(size_t) (seq*s.n_tokens), n*sizeof(float));
            }
        }
        check(same(one_by_one, plain), at + ": token by token");
        // cells at the end that nobody sees
        if (s.window >= 0) {
            tb_attention a = p.a;
            a.n_kv -= 2;
            check(same(p.run(kernel, 1, a), plain), at + ": fewer cells");
        }
    }
}

// The cells that a token sees are moved apart in the cache, others come between: nothing changes.
static void test_holes(void) {
    shape s = { "holes", 64, 64, 4, 2, 256, 1, 1, TB_KV_F16, false, true, false, 0, 0, 0 };
    problem p(s), q(s);
    q.q = p.q;
    const size_t row = 2u*64*2;
    int64_t to = 0;
    std::vector<uint16_t> mask(256, 0xfc00);
    std::vector<uint16_t> dense(256, 0xfc00);
    for (int64_t from = 0; from < 100; from++, to += 1 + rng()%2) {
        memcpy(q.k.data() + to*row, p.k.data() + from*row, row);
        memcpy(q.v.data() + to*row, p.v.data() + from*row, row);
        mask[(size_t) to] = 0;
        dense[(size_t) from] = 0;
    }
    q.a.mask = (const char *) mask.data();
    p.a.mask = (const char *) dense.data();
    check(same(q.run(tb_attention_kernel("scalar"), 1, q.a), p.run(tb_attention_kernel("scalar"), 1, p.a)), "holes between cells change the result");
}

int main(int argc, char ** argv) {
    const bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    for (const shape & s : SHAPES) {
        if (!quick || s.n_kv < 10000) {
            test(s);
        }
    }
    test_holes();
    printf("attention: %ld checks, %ld failed\n", n_checks, n_failures);
    return n_failures ? 1 : 0;
}
