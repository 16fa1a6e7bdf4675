// tile.h: the product of super-tiles and tokens, written once for all vector instruction sets and formats (formats.h).
//
// An instruction set is a struct V with
//     I                     a vector of integers: LANES rows × 4 columns of codes, or LANES sums
//     LANES, PARTS, TOKENS  PARTS·LANES rows × TOKENS tokens are summed up in registers at a time
//     STEPS                 steps (4 columns each) handed to one V::dot
//     UNROLLED              whether a group of 64 columns is unrolled, rather than its unit
//     load, shr<n>, mask, or_masked      to take codes out of their bits (shr moves 16-bit lanes)
//     SIGNED8               whether 8-bit codes become signed (V::flip) instead of taking off the offset at the end
//     dot<n>(sums, w, x, stride)         sums += Σ w[i] · x[i·stride], w: n vectors of codes, x: 4 int8 values in each int32
//     set(i)                the same integer in all lanes
//     scale_rows(block, ws)              ws[group][row] = super · code_s for the 4 groups of a residual's block
//     from_f16(src, n, ws)               n halves to floats
//     accumulate(y, sums, s, ws)         y[row] = fma(float(sums) · s, ws[row], y[row]) for LANES rows
//     add(out, factor, y)                out[row] = fma(factor, y[row], out[row]) for LANES rows
//     prefetch<to>(p)
//     pin(v)                keeps v in its register, where loading it anew for each use is slower
// and for Q2_K
//     multiples(scales)     in each lane bytes 0, 1, 2, 3 times its lowest 4 bits
//     row_index, lookup     byte 4·(row within 128 bits) in all lanes; bytes of 128 bits looked up by index
//     shr32<n>, shl32<n>, mask32         of 32-bit lanes
//     mul_add32(sums, a, b)              sums += a · b, of 32-bit lanes
//     dot16(sums, m, x)     sums += m · x, two int16 in each lane
//     subtract(y, sums, s, ws)           y[row] = fma(−(float(sums) · s), ws[row], y[row])

#pragma once

#include "base.h"
#include "formats.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

#define TB_AHEAD 2 // blocks to prefetch ahead: from 1 to 8 within 5 % on a Zen 4

// ---- one block ------------------------------------------------------------------------------------------------------

// a block and the activations of one tile of tokens that it meets
struct tb_work {
    const uint8_t * codes;    // of the block's first group
    int             n_groups; // 1…4
    const float   * ws;       // (4, 32) scales of the groups' rows; Q2_K: d[32], dmin[32]
    const uint8_t * scales16; // Q2_K: scales and mins of 16 columns each, (group, 32 rows, 4)
    int             width;    // tokens of the tile
    const int32_t * q;        // (column / 4, token)
    const int32_t * sums;     // (column / 32, token), negative
    const float   * scales;   // (column / 32, token)
    const int32_t * sums16;   // (column / 32, token): pairs of int16
    float         * y;        // (token, 32)
    const char    * ahead;    // what to prefetch next
    int             passes;   // how often the block's codes are gone through by all tiles of tokens together
};

// PARTS·LANES rows from `row` on, T tokens from `token` on. Of the unit's cache lines one part in PASSES is prefetched.
template <class V, class F, int T, int PASSES>
static __attribute__((noinline)) void tb_rows_by_tokens(tb_work & work, int row, int token) {
    using I = typename V::I;
    constexpr int U = F::U, Z = F::Z, PARTS = V::PARTS, UNITS = TB_ACT_GROUP / 4 / U;
    constexpr int OFFSET = F::BITS == 8 && V::SIGNED8 ? 0 : F::OFFSET;
    constexpr tb_prefetch TO = T < 4 ? F::FOR_FEW : TB_PREFETCH_L2;
    constexpr int LINES = TO == TB_PREFETCH_NOT ? 0 : (2 * Z + PASSES - 1) / PASSES;
    // Q2_K: a unit is a sub-block of 16 columns. Its scale goes into the codes, or, for a single token, onto the sum over the unit.
    constexpr bool SCALED = F::MINS && T > 1;
    const int width = V::TOKENS == TB_TOKENS ? T : work.width; // a constant where registers hold a whole tile
    const uint8_t * codes = work.codes + row / 16 * Z * 64;
    const int32_t * q = work.q + token;
    const char * ahead = work.ahead;
    for (int a = 0; a < 2 * work.n_groups; a++) { // 32 columns, half a group
        const int g = a / 2;
        I sums[PARTS][T], scales[PARTS];
        tb_unroll<T>([&](auto t) TB_LAMBDA {
            const I start = OFFSET ? V::template shl32<tb_log2(OFFSET)>(V::set(work.sums[a * width + token + t])) : V::set(0);
            tb_unroll<PARTS>([&](auto part) TB_LAMBDA { sums[part][t] = start; });
        });
        if constexpr (F::MINS) {
            tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                const I both = V::load(work.scales16 + (g * TB_TILE_ROWS + row + part * V::LANES) * 4);
                scales[part] = a % 2 ? V::template shr32<16>(both) : both;
            });
        }
        const auto unit = [&]() TB_LAMBDA {
            tb_unroll<LINES>([&](auto i) TB_LAMBDA { V::template prefetch<TO>(ahead + 64 * i); });
            ahead += 64 * LINES;
            I table[PARTS], unscaled[PARTS];
            if constexpr (SCALED) {
                tb_unroll<PARTS>([&](auto part) TB_LAMBDA { table[part] = V::multiples(scales[part]); });
            }
            tb_unroll<PARTS>([&](auto part) TB_LAMBDA { unscaled[part] = V::set(0); });
            I v[PARTS][Z];
            tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                constexpr int r = decltype(part)::value * V::LANES;
                tb_unroll<Z>([&](auto z) TB_LAMBDA {
                    v[part][z] = V::load(codes + (r / 16 * Z + z) * 64 + r % 16 * 4);
                    if constexpr (T == 1) {
                        V::pin(v[part][z]);
                    }
                });
            });
            tb_unroll<U / V::STEPS>([&](auto i) TB_LAMBDA {
                constexpr int J = decltype(i)::value * V::STEPS;
                I w[PARTS][V::STEPS];
                tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                    tb_unroll<V::STEPS>([&](auto s) TB_LAMBDA {
                        if constexpr (SCALED) {
                            w[part][s] = tb_scaled_codes<V, J + decltype(s)::value>(v[part][0], table[part]);
                        } else {
                            w[part][s] = tb_codes<V, F::BITS, J + decltype(s)::value>(v[part]);
                        }
                    });
                });
                tb_unroll<T>([&](auto t) TB_LAMBDA {
                    tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                        I & sum = F::MINS && !SCALED ? unscaled[part] : sums[part][t];
                        sum = V::template dot<V::STEPS, F::BITS>(sum, w[part], q + t, width);
                    });
                });
                q += V::STEPS * width;
            });
            if constexpr (F::MINS) { // on to the next 16 columns
                tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                    if constexpr (!SCALED) {
                        sums[part][0] = V::mul_add32(sums[part][0], unscaled[part], V::mask32(scales[part], 0x0f));
                    }
                    scales[part] = V::template shr32<8>(scales[part]);
                });
            }
            codes += 2 * Z * 64;
        };
        if constexpr (V::UNROLLED) {
            tb_unroll<UNITS>([&](auto) TB_LAMBDA { unit(); });
        } else {
            for (int i = 0; i < UNITS; i++) {
                unit();
            }
        }
        tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
            const int r = row + part * V::LANES;
            if constexpr (F::MINS) { // two of the bytes m0 m1 m2 m3 to a pair of int16
                const I all  = V::template shr<4>(V::load(work.scales16 + (g * TB_TILE_ROWS + r) * 4));
                const I here = a % 2 ? V::template shr32<16>(all) : all;
                const I mins = V::or_masked(V::mask32(here, 0x0000000f), V::mask32(V::template shl32<8>(here), 0x000f0000), 0x0f);
                tb_unroll<T>([&](auto t) TB_LAMBDA {
                    const int i = a * width + token + t;
                    const I m = V::dot16(V::set(0), mins, work.sums16[i]);
                    float * y = work.y + (token + t) * TB_TILE_ROWS + r;
                    V::accumulate(y, sums[part][t], work.scales[i], work.ws + r);
                    V::subtract(y, m, work.scales[i], work.ws + TB_TILE_ROWS + r);
                });
            } else {
                tb_unroll<T>([&](auto t) TB_LAMBDA {
                    V::accumulate(work.y + (token + t) * TB_TILE_ROWS + r, sums[part][t], work.scales[a * width + token + t],
                                  work.ws + g * TB_TILE_ROWS + r);
                });
            }
        });
    }
    work.ahead = ahead;
}

// T tokens that fill the registers, or fewer at the end
template <class V, class F, int T> static TB_INLINE void tb_rows(tb_work & work, int row, int token) {
    constexpr int ROW_SETS = TB_TILE_ROWS / (V::PARTS * V::LANES);
    if constexpr (T > V::TOKENS) {
        // never asked for
    } else if constexpr (T < V::TOKENS) {
        tb_rows_by_tokens<V, F, T, ROW_SETS>(work, row, token);
    } else if (work.passes >= 4 * ROW_SETS) {
        tb_rows_by_tokens<V, F, T, 4 * ROW_SETS>(work, row, token);
    } else if (work.passes >= 2 * ROW_SETS) {
        tb_rows_by_tokens<V, F, T, 2 * ROW_SETS>(work, row, token);
    } else {
        tb_rows_by_tokens<V, F, T, ROW_SETS>(work, row, token);
    }
}

// a block times a tile of tokens
template <class V, class F> static TB_INLINE void tb_block(tb_work & work) {
    for (int row = 0; row < TB_TILE_ROWS; row += V::PARTS * V::LANES) {
        for (int token = 0; token < work.width; token += V::TOKENS) {
            switch (work.width - token < V::TOKENS ? work.width - token : V::TOKENS) {
                case 1: tb_rows<V, F, 1>(work, row, token); break;
                case 2: tb_rows<V, F, 2>(work, row, token); break;
                case 3: tb_rows<V, F, 3>(work, row, token); break;
                case 4: tb_rows<V, F, 4>(work, row, token); break;
                case 5: tb_rows<V, F, 5>(work, row, token); break;
                case 6: tb_rows<V, F, 6>(work, row, token); break;
                case 7: tb_rows<V, F, 7>(work, row, token); break;
                case 8: tb_rows<V, F, 8>(work, row, token); break;
            }
        }
    }
}

// ---- super-tiles ----------------------------------------------------------------------------------------------------

// One super-tile times up to TB_MAX_TOKENS tokens from `first` on, block after block. y: (token, 32), zero before the first block.
template <class V, class F> struct tb_tile {
    const uint8_t * block;
    float         * y;
    int             passes; // over each block, for tb_work

    tb_tile(const uint8_t * data, float * y_, int n_tokens) : block(data), y(y_), passes(0) {
        for (int i = 0; i < n_tokens; i += TB_TOKENS) {
            const int width = n_tokens - i < TB_TOKENS ? n_tokens - i : TB_TOKENS;
            passes += (width + V::TOKENS - 1) / V::TOKENS * (TB_TILE_ROWS / (V::PARTS * V::LANES));
        }
    }

    // the block that starts with group g
    TB_INLINE void next(const struct tb_acts * acts, int64_t first, int n_tokens, int64_t g) {
        const int64_t groups = acts->cols / TB_GROUP;
        const int n_groups = groups - g < 4 ? (int) (groups - g) : 4;
        const char * ahead = (const char *) block + TB_AHEAD * tb_format_block_nbytes<F>(4);
        for (int i = 0; i < F::header(4); i += 64) {
            V::template prefetch<TB_PREFETCH_L1>(ahead + i);
        }
        alignas(64) float ws[4 * TB_TILE_ROWS];
        F::template load_scales<V>(block, n_groups, ws);
        tb_work work;
        work.codes    = block + F::header(n_groups);
        work.n_groups = n_groups;
        work.ws       = ws;
        work.scales16 = block + tb_q2_k_format::SCALES;
        work.ahead    = ahead + F::header(4);
        work.passes   = passes;
        for (int i = 0; i < n_tokens; i += TB_TOKENS) {
            const int64_t token = first + i;
            work.width  = n_tokens - i < TB_TOKENS ? n_tokens - i : TB_TOKENS;
            const int64_t at = 2 * (token * groups + g * work.width); // of 32 columns each
            work.q      = (const int32_t *) (acts->q + token * acts->cols) + g * (TB_GROUP / 4) * work.width;
            work.sums   = acts->sums + at;
            work.scales = acts->scales + at;
            work.sums16 = (const int32_t *) acts->sums16 + at;
            work.y      = y + i * TB_TILE_ROWS;
            tb_block<V, F>(work);
        }
        block += F::header(n_groups) + n_groups * F::CODES;
    }
};

// out[token][row] = fma(factor, y[token][row], out[token][row]), without the addition where `assign` (factor is 1 then)
template <class V> static void tb_store(const float * y, float factor, bool assign, float * const * out, int n_tokens, int64_t row0, int64_t rows) {
    const int n_rows = rows - row0 < TB_TILE_ROWS ? (int) (rows - row0) : TB_TILE_ROWS;
    for (int t = 0; t < n_tokens; t++, y += TB_TILE_ROWS) {
        float * to = out[t] + row0;
        if (assign) {
            memcpy(to, y, n_rows * sizeof(float));
            continue;
        }
        int row = 0;
        for (; row + V::LANES <= n_rows; row += V::LANES) {
            V::add(to + row, factor, y + row);
        }
        for (; row < n_rows; row++) {
            to[row] = fmaf(factor, y[row], to[row]);
        }
    }
}

struct tb_none {}; // no base, or no residual

// y = B·x + R·x, y = B·x or y += R·x, by which of the formats is tb_none
template <class V, class BASE, class RESIDUAL>
static void tb_product(const struct tb_base * b, const struct tb_matrix * m, const struct tb_acts * acts, float * const * y,
                       int64_t tile0, int64_t tile1) {
    constexpr bool HAS_BASE = !std::is_same<BASE, tb_none>::value, HAS_RESIDUAL = !std::is_same<RESIDUAL, tb_none>::value;
    using B = typename std::conditional<HAS_BASE, BASE, tb_q2_0_format>::type;
    using R = typename std::conditional<HAS_RESIDUAL, RESIDUAL, tb_residual_format<4>>::type;
    const int64_t rows = HAS_BASE ? b->rows : m->rows;
    for (int64_t tile = tile0; tile < tile1; tile++) {
        for (int64_t first = 0; first < acts->n_tokens; first += TB_MAX_TOKENS) {
            const int n = acts->n_tokens - first < TB_MAX_TOKENS ? (int) (acts->n_tokens - first) : TB_MAX_TOKENS;
            alignas(64) float of_base[HAS_BASE ? TB_MAX_TOKENS * TB_TILE_ROWS : 1];
            alignas(64) float of_residual[HAS_RESIDUAL ? TB_MAX_TOKENS * TB_TILE_ROWS : 1];
            if (HAS_BASE) {
                memset(of_base, 0, n * TB_TILE_ROWS * sizeof(float));
            }
            if (HAS_RESIDUAL) {
                memset(of_residual, 0, n * TB_TILE_ROWS * sizeof(float));
            }
            tb_tile<V, B> base(HAS_BASE ? b->data + tile * tb_format_tile_nbytes<B>(acts->cols) : NULL, of_base, n);
            tb_tile<V, R> residual(HAS_RESIDUAL ? m->data + tile * tb_format_tile_nbytes<R>(acts->cols) : NULL, of_residual, n);
            for (int64_t g = 0; g < acts->cols / TB_GROUP; g += 4) {
                if constexpr (HAS_BASE) {
                    base.next(acts, first, n, g);
                }
                if constexpr (HAS_RESIDUAL) {
                    residual.next(acts, first, n, g);
                }
            }
            if (HAS_BASE) {
                tb_store<V>(of_base, 1.0f, true, y + first, n, tile * TB_TILE_ROWS, rows);
            }
            if (HAS_RESIDUAL) {
                tb_store<V>(of_residual, m->factor, false, y + first, n, tile * TB_TILE_ROWS, rows);
            }
        }
    }
}

template <class V, class BASE>
static void tb_with_residual(const struct tb_base * b, const struct tb_matrix * m, const struct tb_acts * acts, float * const * y,
                             int64_t tile0, int64_t tile1) {
    switch (m->bits) {
        case 4: tb_product<V, BASE, tb_residual_format<4>>(b, m, acts, y, tile0, tile1); break;
        case 5: tb_product<V, BASE, tb_residual_format<5>>(b, m, acts, y, tile0, tile1); break;
        case 6: tb_product<V, BASE, tb_residual_format<6>>(b, m, acts, y, tile0, tile1); break;
        case 8: tb_product<V, BASE, tb_residual_format<8>>(b, m, acts, y, tile0, tile1); break;
    }
}

template <class V>
static void tb_mul_add(const struct tb_matrix * m, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    tb_with_residual<V, tb_none>(NULL, m, acts, y, tile0, tile1);
}

template <class V>
static void tb_mul_base(const struct tb_base * b, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    if (b->type == TB_BASE_Q2_K) {
        tb_product<V, tb_q2_k_format, tb_none>(b, NULL, acts, y, tile0, tile1);
    } else {
        tb_product<V, tb_q2_0_format, tb_none>(b, NULL, acts, y, tile0, tile1);
    }
}

template <class V>
static void tb_mul_pair(const struct tb_base * b, const struct tb_matrix * m, const struct tb_acts * acts, float * const * y,
                        int64_t tile0, int64_t tile1) {
    if (b->type == TB_BASE_Q2_K) {
        tb_with_residual<V, tb_q2_k_format>(b, m, acts, y, tile0, tile1);
    } else {
        tb_with_residual<V, tb_q2_0_format>(b, m, acts, y, tile0, tile1);
    }
}

// ---- activations ----------------------------------------------------------------------------------------------------

// V::quantize32(x, q, scale, sums16) rounds 32 values to q[32] and sums each 16 of them up.
template <class V> static void tb_quantize(const struct tb_acts * acts, const float * const * x, int64_t group0, int64_t group1) {
    const int64_t groups = acts->cols / TB_ACT_GROUP;
    for (int64_t token = 0; token < acts->n_tokens; token++) {
        const int64_t first = token / TB_TOKENS * TB_TOKENS; // of the token's tile
        const int64_t width = tb_tile_width(acts, first);
        int32_t * q = (int32_t *) (acts->q + first * acts->cols) + (token - first);
        for (int64_t a = group0 * TB_GROUP / TB_ACT_GROUP; a < group1 * TB_GROUP / TB_ACT_GROUP; a++) {
            const int64_t i = first * groups + a * width + (token - first);
            alignas(64) int32_t rounded[TB_ACT_GROUP / 4];
            V::quantize32(x[token] + a * TB_ACT_GROUP, (int8_t *) rounded, &acts->scales[i], acts->sums16 + 2 * i);
            acts->sums[i] = -(acts->sums16[2 * i] + acts->sums16[2 * i + 1]);
            for (int k = 0; k < TB_ACT_GROUP / 4; k++) {
                q[(a * (TB_ACT_GROUP / 4) + k) * width] = rounded[k];
            }
        }
    }
}
