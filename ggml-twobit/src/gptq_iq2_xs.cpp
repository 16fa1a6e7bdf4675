// gptq_iq2_xs.cpp: error feedback into IQ2_XS: super-blocks of 256; each 8 weights are one of 512 grid vectors with signs (an even
// number of minuses), times d · (1/2 + s) / 4 with four bits of s for each 16 weights.
//
// Eight columns are rounded at once. For a group g of them, t = w + f U_gg⁻¹ with f the feedback from all columns before, and the
// loss is (t − b) M (t − b)ᵀ with M = U_gg D_g U_ggᵀ. The grid is searched with M's diagonal; what is found, and scales, are compared with
// all of M.
//
// A sweep (gptq_sweep.h) is the same with M = H_gg, and t = b + g H_gg⁻¹ for the vector's columns g of the gradient.

#include "gptq_sweep.h"

#define GGML_COMMON_DECL_CPP
#define GGML_COMMON_IMPL_CPP
#include "ggml-common.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define V      8           // columns of a vector
#define N_VEC  (QK_K / V)  // vectors of a super-block
#define N_SUB  (QK_K / 16) // scale groups: two vectors each
#define N_GRID 512
#define TOP    15          // largest s

namespace {

// what is the same for all rows
struct tables {
    alignas(64) float grid[V][N_GRID];     // the grid vectors, transposed
    alignas(64) float norm[N_VEC][N_GRID]; // Σ_i M_ii grid_i²
    float metric[N_VEC][V][V];             // M
    float inverse[N_VEC][V][V];            // its inverse, for sweeps
};

// how well a target agrees with each grid vector, for the signs that suit it best
struct agreement {
    alignas(64) float dot[N_GRID]; // Σ_i M_ii t_i sign_i grid_i
    float weight[V];               // M_ii |t_i|
    int   minus;                   // bit i: t_i < 0
    float square;                  // Σ_i M_ii t_i²
};

struct pick {
    int   grid, minus;
    float loss; // (t − b) M (t − b)ᵀ
    float b[V];
};

const float shares[] = { 1.0f, 0.92f, 0.84f, 0.76f, 0.68f }; // of the largest fitted scale, to try as d's

} // namespace

// the grid, and its norms by the metric
static void fill_grid(tables & x) {
    for (int k = 0; k < N_GRID; k++) {
        for (int i = 0; i < V; i++) {
            x.grid[i][k] = (float) (iq2xs_grid[k] >> 8 * i & 0xff);
        }
        for (int v = 0; v < N_VEC; v++) {
            x.norm[v][k] = 0;
            for (int i = 0; i < V; i++) {
                x.norm[v][k] += x.metric[v][i][i] * x.grid[i][k] * x.grid[i][k];
            }
        }
    }
}

static void prepare_iq2_xs(const gptq_block * block, void * extra) {
    tables & x = *(tables *) extra;
    for (int v = 0; v < N_VEC; v++) {
        float u[V][V];
        for (int i = 0; i < V; i++) {
            for (int j = 0; j < V; j++) {
                u[i][j] = i == j ? 1.0f : block->u[GPTQ_BLOCK * (V * v + i) + V * v + j];
            }
        }
        for (int i = 0; i < V; i++) {
            for (int j = 0; j < V; j++) {
                x.metric[v][i][j] = 0;
                for (int k = 0; k < V; k++) {
                    x.metric[v][i][j] += u[i][k] * block->d[V * v + k] * u[j][k];
                }
            }
        }
    }
    fill_grid(x);
}

GPTQ_INLINE void agree(const tables & x, int v, const float * t, agreement & y) {
    y.minus  = 0;
    y.square = 0;
    for (int i = 0; i < V; i++) {
        y.weight[i] = x.metric[v][i][i] * std::fabs(t[i]);
        y.square += y.weight[i] * std::fabs(t[i]);
        y.minus |= (t[i] < 0) << i;
    }
    // an odd number of minuses is not to be had: the sign that matters least is turned
    const float turned = __builtin_parity(y.minus) ? 2.0f : 0.0f;
    for (int k = 0; k < N_GRID; k += GPTQ_LANES) {
        gptq_lanes sum = {}, least = gptq_lanes{} + INFINITY;
        for (int i = 0; i < V; i++) {
            const gptq_lanes term = *(const gptq_lanes *) (x.grid[i] + k) * y.weight[i];
            sum += term;
            least = term < least ? term : least;
        }
        *(gptq_lanes *) (y.dot + k) = sum - turned * least;
    }
}

// of each lane the grid vector that comes nearest with a scale, by the metric's diagonal, and its loss
GPTQ_INLINE void nearest_of_lanes(const tables & x, int v, const agreement & a, float scale, gptq_lanes & at, gptq_lanes & best) {
    gptq_lanes here;
    at   = gptq_lanes{};
    best = gptq_lanes{} + INFINITY;
    for (int i = 0; i < GPTQ_LANES; i++) {
        here[i] = (float) i;
    }
    for (int k = 0; k < N_GRID; k += GPTQ_LANES) {
        const gptq_lanes loss   = scale * (scale * *(const gptq_lanes *) (x.norm[v] + k) - 2.0f * *(const gptq_lanes *) (a.dot + k));
        const auto       better = loss < best;
        best = better ? loss : best;
        at   = better ? here + (float) k : at;
    }
}

// the loss of the nearest grid vector, by the metric's diagonal
GPTQ_INLINE float nearest_loss(const tables & x, int v, const agreement & a, float scale) {
    gptq_lanes at, best;
    nearest_of_lanes(x, v, a, scale, at, best);
    int i;
    return gptq_least(best, i) + a.square;
}

// (t − b) M (t − b)ᵀ
GPTQ_INLINE float exact_loss(const tables & x, int v, const float * t, const float * b) {
    float loss = 0;
    for (int i = 0; i < V; i++) {
        for (int j = 0; j < V; j++) {
            loss += (t[i] - b[i]) * x.metric[v][i][j] * (t[j] - b[j]);
        }
    }
    return loss;
}

// The best for targets t by all of M, of the grid vectors that are nearest in each lane by M's diagonal.
GPTQ_INLINE pick choose(const tables & x, int v, const float * t, const agreement & a, float scale) {
    gptq_lanes at, losses;
    nearest_of_lanes(x, v, a, scale, at, losses);
    pick best = {};
    best.loss = INFINITY;
    for (int lane = 0; lane < GPTQ_LANES; lane++) {
        pick y;
        y.grid  = (int) at[lane];
        y.minus = a.minus;
        if (__builtin_parity(a.minus)) {
            int turn = 0;
            for (int j = 1; j < V; j++) {
                turn = x.grid[j][y.grid] * a.weight[j] < x.grid[turn][y.grid] * a.weight[turn] ? j : turn;
            }
            y.minus ^= 1 << turn;
        }
        for (int i = 0; i < V; i++) {
            y.b[i] = x.grid[i][y.grid] * (y.minus >> i & 1 ? -scale : scale);
        }
        y.loss = exact_loss(x, v, t, y.b);
        if (y.loss < best.loss || lane == 0) {
            best = y;
        }
    }
    return best;
}

// t: the vector's targets, w + feedback, become w + feedback · U_gg⁻¹
GPTQ_INLINE void aim(const gptq_block & block, int v, const float * w, float * t) {
    float f[V];
    for (int i = 0; i < V; i++) {
        f[i] = t[i] - w[i];
        for (int j = 0; j < i; j++) {
            f[i] -= f[j] * block.u[GPTQ_BLOCK * (V * v + j) + V * v + i];
        }
        t[i] = w[i] + f[i];
    }
}

// the scale that suits a group's two vectors best, among 16 about its size; 0 for a group of zeros
GPTQ_INLINE float fit_scale(const tables & x, int v, const agreement * a) {
    float weight = 0;
    for (int i = 0; i < V; i++) {
        weight += x.metric[v][i][i] + x.metric[v + 1][i][i];
    }
    const float unit = std::sqrt((a[0].square + a[1].square) / weight) / 25; // the grid's middle value
    float best = 0, best_loss = INFINITY;
    for (int i = 0; i < 16 && unit > 0; i++) {
        const float scale = unit * (0.5f + 0.075f * i);
        const float loss  = nearest_loss(x, v, a[0], scale) + nearest_loss(x, v + 1, a[1], scale);
        if (loss < best_loss) {
            best_loss = loss;
            best      = scale;
        }
    }
    return best;
}

GPTQ_INLINE int nearest_s(float scale, float d) {
    return std::max(0, std::min(TOP, (int) std::nearbyint(4 * scale * gptq_inverse(d) - 0.5f)));
}

GPTQ_INLINE float scale_of(float d, int s) {
    return d * (0.5f + s) * 0.25f;
}

// d of a super-block, from its groups' fits without feedback
GPTQ_INLINE uint16_t choose_d(const gptq_block & block, const tables & x, const float * w, const float * targets) {
    agreement a[N_VEC];
    float fits[N_SUB], top = 0;
    for (int v = 0; v < N_VEC; v++) {
        float t[V];
        memcpy(t, targets + V * v, sizeof(t));
        agree(x, v, t, a[v]);
    }
    for (int g = 0; g < N_SUB; g++) {
        fits[g] = fit_scale(x, 2 * g, a + 2 * g);
        top     = std::max(top, fits[g]);
    }
    uint16_t best = 0;
    float best_loss = INFINITY;
    for (float share : shares) {
        const uint16_t half = gptq_f16(share * top / (0.25f * (TOP + 0.5f)));
        const float    d    = tb_f16_to_f32(half);
        float loss = 0;
        for (int g = 0; g < N_SUB; g++) {
            const float scale = scale_of(d, nearest_s(fits[g], d));
            loss += nearest_loss(x, 2 * g, a[2 * g], scale) + nearest_loss(x, 2 * g + 1, a[2 * g + 1], scale);
        }
        if (loss < best_loss) {
            best_loss = loss;
            best      = half;
        }
    }
    return best;
}

// a group of 16 columns, rounded with one s
struct trial {
    float loss;
    int   s;
    pick  picks[2];
};

GPTQ_INLINE trial try_s(const gptq_block & block, const tables & x, int g, const float * w, const float * targets, const agreement & first,
                        float d, int s) {
    const int   v     = 2 * g;
    const float scale = scale_of(d, s);
    float t[2 * V];
    memcpy(t, targets, sizeof(t));
    trial y;
    y.s        = s;
    y.picks[0] = choose(x, v, t, first, scale);
    for (int i = 0; i < V; i++) {
        for (int j = V; j < 2 * V; j++) {
            t[j] += (w[i] - y.picks[0].b[i]) * block.u[GPTQ_BLOCK * (V * v + i) + V * v + j];
        }
    }
    aim(block, v + 1, w + V, t + V);
    agreement second;
    agree(x, v + 1, t + V, second);
    y.picks[1] = choose(x, v + 1, t + V, second, scale);
    y.loss     = y.picks[0].loss + y.picks[1].loss;
    return y;
}

// into the group's place in the packed super-block
GPTQ_INLINE void put(block_iq2_xs & packed, int g, const trial & y) {
    packed.scales[g / 2] = (uint8_t) ((packed.scales[g / 2] & (g % 2 ? 0x0f : 0xf0)) | y.s << 4 * (g % 2));
    for (int i = 0; i < 2; i++) {
        packed.qs[2 * g + i] = (uint16_t) (y.picks[i].grid | (y.picks[i].minus & 127) << 9); // the eighth sign follows from the others
    }
}

GPTQ_CLONES static void round_iq2_xs(const gptq_block * block, const void * extra, const float * w, float * t, float * b, void * dst) {
    const tables & x = *(const tables *) extra;
    block_iq2_xs & packed = *(block_iq2_xs *) dst;
    const uint16_t half = choose_d(*block, x, w, t);
    const float    d    = tb_f16_to_f32(half);
    packed.d = half;
    memset(packed.scales, 0, sizeof(packed.scales));

    for (int g = 0; g < N_SUB; g++) {
        const int k = 2 * V * g;
        agreement a[2];
        aim(*block, 2 * g, w + k, t + k);
        agree(x, 2 * g, t + k, a[0]);
        agree(x, 2 * g + 1, t + k + V, a[1]);
        const int middle = nearest_s(fit_scale(x, 2 * g, a), d);
        trial best = {};
        best.loss = INFINITY;
        for (int s = std::max(0, middle - 1); s <= std::min(TOP, middle + 1); s++) {
            const trial y = try_s(*block, x, g, w + k, t + k, a[0], d, s);
            if (y.loss < best.loss || s == std::max(0, middle - 1)) {
                best = y;
            }
        }
        put(packed, g, best);
        for (int i = 0; i < 2 * V; i++) {
            b[k + i] = best.picks[i / V].b[i % V];
            gptq_feed(*block, k + i, w[k + i] - b[k + i], t);
        }
    }
}

const gptq_method * gptq_method_iq2_xs() {
    static const gptq_method method = {
        /* .block_cols  = */ QK_K,
        /* .block_bytes = */ sizeof(block_iq2_xs),
        /* .extra_bytes = */ sizeof(tables),
        /* .prepare     = */ prepare_iq2_xs,
        /* .round       = */ round_iq2_xs,
    };
    return &method;
}

// ---- sweeps ---------------------------------------------------------------------------------------------------------

// m⁻¹ of a positive definite matrix, by Gauss and Jordan
static void invert(const float m[V][V], float inverse[V][V]) {
    double a[V][2 * V];
    for (int i = 0; i < V; i++) {
        for (int j = 0; j < V; j++) {
            a[i][j]     = m[i][j];
            a[i][V + j] = i == j;
        }
    }
    for (int k = 0; k < V; k++) {
        const double pivot = a[k][k];
        for (int j = 0; j < 2 * V; j++) {
            a[k][j] /= pivot;
        }
        for (int i = 0; i < V; i++) {
            const double share = i == k ? 0 : a[i][k];
            for (int j = 0; j < 2 * V; j++) {
                a[i][j] -= share * a[k][j];
            }
        }
    }
    for (int i = 0; i < V; i++) {
        for (int j = 0; j < V; j++) {
            inverse[i][j] = (float) a[i][V + j];
        }
    }
}

static void prepare_sweep(const gptq_block * block, void * extra) {
    tables & x = *(tables *) extra;
    for (int v = 0; v < N_VEC; v++) {
        for (int i = 0; i < V; i++) {
            x.metric[v][i][i] = block->d[V * v + i];
            for (int j = i + 1; j < V; j++) {
                x.metric[v][i][j] = x.metric[v][j][i] = block->u[GPTQ_BLOCK * (V * v + i) + V * v + j];
            }
        }
        invert(x.metric[v], x.inverse[v]);
    }
    fill_grid(x);
}

// How the loss changes when group g, with values b and gradient g0, is rounded anew with one s.
GPTQ_INLINE trial try_again(const gptq_block & block, const tables & x, int g, const float * b, const float * g0, float d, int s) {
    float gradient[2 * V];
    memcpy(gradient, g0, sizeof(gradient));
    trial y;
    y.s    = s;
    y.loss = 0;
    for (int half = 0; half < 2; half++) {
        const int v = 2 * g + half;
        float t[V];
        for (int i = 0; i < V; i++) {
            t[i] = b[V * half + i];
            for (int j = 0; j < V; j++) {
                t[i] += gradient[V * half + j] * x.inverse[v][i][j];
            }
        }
        agreement a;
        agree(x, v, t, a);
        y.picks[half] = choose(x, v, t, a, scale_of(d, s));
        y.loss += y.picks[half].loss - exact_loss(x, v, t, b + V * half);
        for (int i = 0; i < V && half == 0; i++) {
            for (int j = V; j < 2 * V; j++) {
                gradient[j] += (b[i] - y.picks[0].b[i]) * block.u[GPTQ_BLOCK * (2 * V * g + i) + 2 * V * g + j];
            }
        }
    }
    return y;
}

GPTQ_CLONES static void sweep_iq2_xs(const gptq_block * block, const void * extra, const float * w, float * b, float * gradient, void * data) {
    const tables & x = *(const tables *) extra;
    block_iq2_xs & packed = *(block_iq2_xs *) data;
    const float d = tb_f16_to_f32(packed.d);
    for (int g = 0; g < N_SUB; g++) {
        const int k = 2 * V * g, now = packed.scales[g / 2] >> 4 * (g % 2) & 15;
        trial best = {};
        best.loss = -gptq_least_gain(*block, k, 2 * V, w, b);
        bool gains = false;
        for (int s = std::max(0, now - 1); s <= std::min(TOP, now + 1); s++) {
            const trial y = try_again(*block, x, g, b + k, gradient + k, d, s);
            if (y.loss < best.loss) {
                best  = y;
                gains = true;
            }
        }
        if (!gains) {
            continue;
        }
        put(packed, g, best);
        for (int i = 0; i < 2 * V; i++) {
            const float value = best.picks[i / V].b[i % V];
            gptq_feed(*block, k + i, b[k + i] - value, gradient);
            b[k + i] = value;
        }
    }
}

GPTQ_CLONES static void read_iq2_xs(const void * data, float * b) {
    const block_iq2_xs & packed = *(const block_iq2_xs *) data;
    const float d = tb_f16_to_f32(packed.d);
    for (int i = 0; i < QK_K; i++) {
        const int   g = i / (2 * V), code = packed.qs[i / V], signs = code >> 9, bit = i % V;
        const bool  minus = bit < 7 ? signs >> bit & 1 : __builtin_parity(signs);
        const float value = scale_of(d, packed.scales[g / 2] >> 4 * (g % 2) & 15) * (float) (iq2xs_grid[code & 511] >> 8 * bit & 0xff);
        b[i] = minus ? -value : value;
    }
}

const gptq_sweep * gptq_sweep_iq2_xs() {
    static const gptq_sweep sweep = {
        /* .block_cols  = */ QK_K,
        /* .block_bytes = */ sizeof(block_iq2_xs),
        /* .extra_bytes = */ sizeof(tables),
        /* .prepare     = */ prepare_sweep,
        /* .read        = */ read_iq2_xs,
        /* .sweep       = */ sweep_iq2_xs,
    };
    return &sweep;
}
