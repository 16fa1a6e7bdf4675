// candidates.cpp: the few likely tokens of a row of 150,000 to 260,000 logits, and their probabilities.
//
// One pass takes the maximum of every block; all else happens in the few blocks that reach near the best. Sums in one
// order and an exp of its own: every instruction set gives the same bits.

#include "twobit.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

const int64_t BLOCK      = 32;    // logits of which only the maximum is looked at if that is not near the best
const int64_t MAX_BLOCKS = 8192;  // beyond 262144 tokens blocks become larger
const float   NEGLIGIBLE = 12.0f; // e-folds below the best count as nothing: all such tokens of a model of language have less than 1 % together

// vectors of the compiler's, of a size that every CPU has
const int LANES = 4, VECTORS = 4, STEP = LANES*VECTORS;
typedef float   f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

inline f32x4 load(const float * p) {
    f32x4 x;
    memcpy(&x, p, sizeof(x));
    return x;
}

// the maximum of n floats, NaN left out; -INFINITY of none
float highest(const float * p, int64_t n) {
    f32x4 m[VECTORS];
    for (f32x4 & x : m) {
        x = f32x4{ -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    }
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        for (int v = 0; v < VECTORS; v++) {
            const f32x4 x = load(p + i + LANES*v);
            m[v] = x > m[v] ? x : m[v];
        }
    }
    for (int v = 1; v < VECTORS; v++) {
        m[0] = m[v] > m[0] ? m[v] : m[0];
    }
    float best = std::max(std::max(m[0][0], m[0][1]), std::max(m[0][2], m[0][3]));
    for (; i < n; i++) {
        best = p[i] > best ? p[i] : best;
    }
    return best;
}

// e^x for -NEGLIGIBLE <= x <= 0, 0 below (and for NaN); relative error 3e-6. Cody & Waite's reduction to |r| <= ln(2)/2, then Taylor's series.
inline f32x4 exp_near(f32x4 x) {
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    const i32x4 near  = x >= -NEGLIGIBLE;
    const f32x4 y     = (f32x4) ((i32x4) x & near);
    const f32x4 n     = (y*1.44269504f + magic) - magic;
    const f32x4 r     = (y - n*0.693359375f) + n*2.12194440e-4f;
    const f32x4 e     = 1 + r*(1 + r*(0.5f + r*(1.0f/6 + r*(1.0f/24 + r*(1.0f/120)))));
    const i32x4 power = (__builtin_convertvector(n, i32x4) + 127) << 23;
    return (f32x4) ((i32x4) (e*(f32x4) power) & near);
}

float exp_near(float x) {
    return exp_near(f32x4{ x, x, x, x })[0];
}

float sum_exp(const float * p, int64_t n, float top) {
    f32x4 s[VECTORS] = {};
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        for (int v = 0; v < VECTORS; v++) {
            s[v] += exp_near(load(p + i + LANES*v) - top);
        }
    }
    const f32x4 t = (s[0] + s[1]) + (s[2] + s[3]);
    float sum = (t[0] + t[1]) + (t[2] + t[3]);
    for (; i < n; i++) {
        sum += exp_near(p[i] - top);
    }
    return sum;
}

// Keeps the best `count` of what it is shown in `best`, in order; `p` holds logits meanwhile. Equal logits: the first shown stays in front.
struct ranking {
    twobit_candidate * best;
    int                count;
    int                size;

    bool wants(float logit) const { return size < count || logit > best[size - 1].p; }

    void add(int32_t token, float logit) {
        int i = size < count ? size++ : count - 1;
        for (; i > 0 && logit > best[i - 1].p; i--) {
            best[i] = best[i - 1];
        }
        best[i] = { token, logit };
    }
};

} // namespace

int twobit_top_candidates(const float * logits, int64_t n, int count, float p_min, struct twobit_candidate * out) {
    const int64_t block = std::max(BLOCK, (n + MAX_BLOCKS - 1)/MAX_BLOCKS);
    float maxima[MAX_BLOCKS];
    float top = -INFINITY;
    for (int64_t b = 0; b*block < n; b++) {
        maxima[b] = highest(logits + b*block, std::min(block, n - b*block));
        top = std::max(top, maxima[b]);
    }
    if (count < 1 || !std::isfinite(top)) {
        return 0; // all NaN or -inf, or one +inf: nothing to draft from
    }

    float   total = 0.0f;
    ranking rank  = { out, count, 0 };
    for (int64_t b = 0; b*block < n; b++) {
        if (maxima[b] < top - NEGLIGIBLE) {
            continue;
        }
        const int64_t begin = b*block, end = std::min(begin + block, n);
        total += sum_exp(logits + begin, end - begin, top);
        if (!rank.wants(maxima[b])) {
            continue;
        }
        for (int64_t i = begin; i < end; i++) {
            if (logits[i] >= top - NEGLIGIBLE && rank.wants(logits[i])) {
                rank.add((int32_t) i, logits[i]);
            }
        }
    }
    int found = 0;
    for (; found < rank.size; found++) {
        const float p = exp_near(out[found].p - top)/total;
        if (found > 0 && p < p_min) {
            break;
        }
        out[found].p = p;
    }
    return found;
}
