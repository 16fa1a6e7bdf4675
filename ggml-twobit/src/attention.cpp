// attention.cpp: the plain kernel, which is also the specification, and the choice of a kernel.

#include "attention.h"

#include "attention-tile.h"

#if defined(__x86_64__)
void tb_attention_avx512(const tb_attention & a, int ith, int nth, void * scratch);
void tb_attention_avx2(const tb_attention & a, int ith, int nth, void * scratch);
#endif

namespace {

// Loops over 16 lanes; where fused multiply-add is part of the baseline (ARM) compilers make vectors of them.
struct plain {
    struct F {
        float x[16];
    };
    static const int CELLS = 4, ROWS = 2, COLS = 2;

    template <class Fn> static TB_INLINE F each(Fn fn) {
        F out;
        for (int i = 0; i < 16; i++) {
            out.x[i] = fn(i);
        }
        return out;
    }

    static TB_INLINE F zero(void) { return set(0.0f); }
    static TB_INLINE F set(float x) { return each([&](int) { return x; }); }
    static TB_INLINE F load(const float * p) { return each([&](int i) { return p[i]; }); }
    static TB_INLINE F load_f16(const uint16_t * p) { return each([&](int i) { return tb_f16_to_f32(p[i]); }); }
    static TB_INLINE void store(float * p, const F & x) { memcpy(p, x.x, sizeof(x)); }
    static TB_INLINE F add(const F & a, const F & b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
    static TB_INLINE F sub(const F & a, const F & b) { return each([&](int i) { return a.x[i] - b.x[i]; }); }
    static TB_INLINE F mul(const F & a, const F & b) { return each([&](int i) { return a.x[i]*b.x[i]; }); }
    static TB_INLINE F max(const F & a, const F & b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
    static TB_INLINE F fma(const F & a, const F & b, const F & c) { return each([&](int i) { return fmaf(a.x[i], b.x[i], c.x[i]); }); }

    static TB_INLINE F scale2(const F & x, const F & n) {
        return each([&](int i) { return tb_bits_to_f32(tb_f32_to_bits(x.x[i]) + (tb_f32_to_bits(n.x[i]) << 23)); });
    }
    static TB_INLINE F at_least(const F & x, const F & limit, const F & y) { return each([&](int i) { return x.x[i] < limit.x[i] ? 0.0f : y.x[i]; }); }
    static TB_INLINE F masked(const F & m, const F & s) { return each([&](int i) { return m.x[i] == -INFINITY ? -INFINITY : s.x[i] + m.x[i]; }); }
    static TB_INLINE int n_positive(const F & x) {
        int n = 0;
        for (float v : x.x) {
            n += !(v <= 0.0f);
        }
        return n;
    }
    static TB_INLINE float highest(const F & x) { return *std::max_element(x.x, x.x + 16); }

    static TB_INLINE F sum16(const F * s) {
        F out;
        for (int i = 0; i < 16; i++) {
            F t = s[i];
            for (int n = 8; n > 0; n /= 2) {
                for (int j = 0; j < n; j++) {
                    t.x[j] += t.x[j + n];
                }
            }
            out.x[i] = t.x[0];
        }
        return out;
    }

    static TB_INLINE void transpose(F * r) {
        for (int i = 0; i < 16; i++) {
            for (int j = 0; j < i; j++) {
                std::swap(r[i].x[j], r[j].x[i]);
            }
        }
    }
};

} // namespace

size_t tb_attention_scratch(const tb_attention & a) {
    layout l;
    return lay_out(a, nullptr, l);
}

tb_attention_fn tb_attention_kernel(const char * set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); // and f16c: no CPU has the one without the other
    if (strcmp(set, "avx512vnni") == 0) {
        return has_avx2 && __builtin_cpu_supports("avx512f") ? tb_attention_avx512 : nullptr;
    }
    if (strncmp(set, "avx", 3) == 0) {
        return has_avx2 ? tb_attention_avx2 : nullptr;
    }
#endif
    return run<plain>;
}
