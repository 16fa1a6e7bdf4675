#include "scale_search.h"

#include <algorithm>
#include <cmath>

// The same source for three vector widths, chosen when the library is loaded; without contraction all round alike.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#    define MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#    define MULTIVERSION
#endif

static const int   LANES = 16;         // partial sums, added in one order: a fixed result for every vector width
static const float ROUND = 0x1.8p23f;  // x + ROUND − ROUND rounds |x| < 2^22 to the nearest even integer

struct moments {
    float rq[LANES]; // Σ weight · r · q
    float qq[LANES]; // Σ weight · q²
};

MULTIVERSION static void sum_moments(const struct tb_search_group * g, float inverse, float lo, float hi, struct moments * m) {
    for (int j = 0; j < LANES; j++) {
        m->rq[j] = m->qq[j] = 0.0f;
    }
    for (int i = 0; i < TB_SEARCH_GROUP; i += LANES) {
        for (int j = 0; j < LANES; j++) {
            const float v = std::min(hi, std::max(lo, g->r[i + j] * inverse));
            const float q = v + ROUND - ROUND;
            m->rq[j] += g->weighted[i + j] * q;
            m->qq[j] += g->weight[i + j] * q * q;
        }
    }
}

MULTIVERSION static void round_codes(const float * r, float inverse, float lo, float hi, uint8_t * codes) {
    for (int i = 0; i < TB_SEARCH_GROUP; i++) {
        const float v = std::min(hi, std::max(lo, r[i] * inverse));
        codes[i] = (uint8_t) (int) (v + ROUND - ROUND - lo);
    }
}

static float add_lanes(const float * s) {
    float sum = 0.0f;
    for (int j = 0; j < LANES; j++) {
        sum += s[j];
    }
    return sum;
}

static float inverse_of(float d) { // 0 where it would overflow
    const float inverse = 1.0f / d;
    return std::isfinite(inverse) ? inverse : 0.0f;
}

void tb_search_load(struct tb_search_group * group, const float * r, const float * importance) {
    float sum = 0.0f;
    group->max = 0.0f;
    for (int i = 0; i < TB_SEARCH_GROUP; i++) {
        group->r[i] = r[i];
        group->weight[i] = importance ? importance[i] : 1.0f;
        group->max = std::fabs(r[i]) > std::fabs(group->max) ? r[i] : group->max;
        sum += group->weight[i];
    }
    if (!(sum > 1e-30f)) { // columns nobody has seen
        std::fill(group->weight, group->weight + TB_SEARCH_GROUP, 1.0f);
    }
    for (int i = 0; i < TB_SEARCH_GROUP; i++) {
        group->weighted[i] = group->weight[i] * group->r[i];
    }
}

struct tb_search_fit tb_search_refit(const struct tb_search_group * group, struct tb_search_range range, float d) {
    struct moments m;
    sum_moments(group, inverse_of(d), range.lo, range.hi, &m);
    const float rq = add_lanes(m.rq), qq = add_lanes(m.qq);
    return qq > 0.0f ? tb_search_fit{ rq / qq, rq * rq / qq } : tb_search_fit{ 0.0f, 0.0f };
}

float tb_search_gain(const struct tb_search_group * group, struct tb_search_range range, float d) {
    struct moments m;
    sum_moments(group, inverse_of(d), range.lo, range.hi, &m);
    return d * (2.0f * add_lanes(m.rq) - d * add_lanes(m.qq));
}

void tb_search_codes(const struct tb_search_group * group, struct tb_search_range range, float d, uint8_t * codes) {
    round_codes(group->r, inverse_of(d), range.lo, range.hi, codes);
}
