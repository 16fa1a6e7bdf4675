// tile.h: the product of super-tiles and tokens, written once for all vector instruction sets.
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
//     scale_rows(block, ws)              ws[group][row] = super · code_s for the 4 groups of a block
//     accumulate(y, sums, s, ws)         y[row] = fma(float(sums) · s, ws[row], y[row]) for LANES rows
//     add(out, factor, y)                out[row] = fma(factor, y[row], out[row]) for LANES rows
//     prefetch(p)

#pragma once

#include "kernels.h"
#include "packing.h"

#include <math.h>
#include <string.h>

#include <type_traits>
#include <utility>

#define TB_AHEAD 2 // blocks to prefetch ahead: from 1 to 8 within 5 % on a Zen 4, none costs a third at 16 tokens

#define TB_INLINE inline __attribute__((always_inline))
#define TB_LAMBDA __attribute__((always_inline))

// ---- codes ----------------------------------------------------------------------------------------------------------

template <int BITS> struct tb_unit; // U steps in Z vectors of 64 bytes
template <> struct tb_unit<8> { static const int U = 4, Z = 4; };
template <> struct tb_unit<6> { static const int U = 4, Z = 3; };
template <> struct tb_unit<5> { static const int U = 8, Z = 5; };
template <> struct tb_unit<4> { static const int U = 2, Z = 1; };

// the codes of step J of the unit whose first vector is at p (docs/format.md, "Codes")
template <class V, int BITS, int J> static TB_INLINE typename V::I tb_codes(const uint8_t * p) {
    using I = typename V::I;
    const auto v = [p](int z) { return V::load(p + 64 * z); };
    if constexpr (BITS == 8) {
        return V::SIGNED8 ? V::flip(v(J)) : v(J);
    } else if constexpr (BITS == 6) {
        if constexpr (J < 3) {
            return V::mask(v(J), 0x3f);
        } else {
            const I high = V::mask(V::template shr<2>(v(2)), 0x30);
            return V::or_masked(V::or_masked(high, V::template shr<4>(v(1)), 0x0c), V::template shr<6>(v(0)), 0x03);
        }
    } else if constexpr (BITS == 5) {
        if constexpr (J < 5) {
            return V::mask(v(J), 0x1f);
        } else if constexpr (J < 7) { // w5 in v0, v1; w6 in v2, v3
            const int z = 2 * (J - 5);
            return V::or_masked(V::mask(V::template shr<3>(v(z + 1)), 0x18), V::template shr<5>(v(z)), 0x07);
        } else {
            const I high = V::or_masked(V::mask(V::template shr<1>(v(3)), 0x10), V::template shr<2>(v(1)), 0x08);
            return V::or_masked(high, V::template shr<5>(v(4)), 0x07);
        }
    } else {
        return V::mask(J == 0 ? v(0) : V::template shr<4>(v(0)), 0x0f);
    }
}

// calls f(integral_constant 0), …, f(integral_constant N − 1)
template <class F, int... J> static TB_INLINE void tb_unroll_over(F f, std::integer_sequence<int, J...>) {
    (f(std::integral_constant<int, J>()), ...);
}

template <int N, class F> static TB_INLINE void tb_unroll(F f) {
    tb_unroll_over(f, std::make_integer_sequence<int, N>());
}

// ---- one block ------------------------------------------------------------------------------------------------------

// a block and the activations of one tile of tokens that it meets
struct tb_work {
    const uint8_t * codes;    // of the block's first group
    int             n_groups; // 1…4
    const float   * ws;       // (4, 32) super · code_s
    int             width;    // tokens of the tile
    const int32_t * q;        // (column / 4, token)
    const int32_t * sums;     // (group, token)
    const float   * scales;   // (group, token)
    float         * y;        // (token, 32)
    const char    * ahead;    // what to prefetch next
    int             passes;   // how often the block's codes are gone through by all tiles of tokens together
};

// PARTS·LANES rows from `row` on, T tokens from `token` on. Of the unit's cache lines one part in PASSES is prefetched.
template <class V, int BITS, int T, int PASSES>
static __attribute__((noinline)) void tb_rows_by_tokens(tb_work & work, int row, int token) {
    using I = typename V::I;
    constexpr int U = tb_unit<BITS>::U, Z = tb_unit<BITS>::Z, PARTS = V::PARTS, UNITS = TB_GROUP / 4 / U;
    constexpr int OFFSET = BITS == 8 && V::SIGNED8 ? 0 : 1 << (BITS - 1);
    constexpr int LINES = (2 * Z + PASSES - 1) / PASSES;
    const int width = V::TOKENS == TB_TOKENS ? T : work.width; // a constant where registers hold a whole tile
    const uint8_t * codes = work.codes + row / 16 * Z * 64;
    const int32_t * q = work.q + token;
    const char * ahead = work.ahead;
    for (int g = 0; g < work.n_groups; g++) {
        I sums[PARTS][T];
        tb_unroll<T>([&](auto t) TB_LAMBDA {
            const I start = V::set(-OFFSET * work.sums[g * width + token + t]);
            tb_unroll<PARTS>([&](auto part) TB_LAMBDA { sums[part][t] = start; });
        });
        const auto unit = [&]() TB_LAMBDA {
            tb_unroll<LINES>([&](auto i) TB_LAMBDA { V::prefetch(ahead + 64 * i); });
            ahead += 64 * LINES;
            tb_unroll<U / V::STEPS>([&](auto i) TB_LAMBDA {
                constexpr int J = decltype(i)::value * V::STEPS;
                I w[PARTS][V::STEPS];
                tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                    constexpr int r = decltype(part)::value * V::LANES;
                    tb_unroll<V::STEPS>([&](auto s) TB_LAMBDA {
                        w[part][s] = tb_codes<V, BITS, J + decltype(s)::value>(codes + r / 16 * Z * 64 + r % 16 * 4);
                    });
                });
                tb_unroll<T>([&](auto t) TB_LAMBDA {
                    tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                        sums[part][t] = V::template dot<V::STEPS, BITS>(sums[part][t], w[part], q + t, width);
                    });
                });
                q += V::STEPS * width;
            });
            codes += 2 * Z * 64;
        };
        if constexpr (V::UNROLLED) {
            tb_unroll<UNITS>([&](auto) TB_LAMBDA { unit(); });
        } else {
            for (int i = 0; i < UNITS; i++) {
                unit();
            }
        }
        tb_unroll<T>([&](auto t) TB_LAMBDA {
            tb_unroll<PARTS>([&](auto part) TB_LAMBDA {
                const int r = row + part * V::LANES;
                V::accumulate(work.y + (token + t) * TB_TILE_ROWS + r, sums[part][t], work.scales[g * width + token + t],
                              work.ws + g * TB_TILE_ROWS + r);
            });
        });
    }
    work.ahead = ahead;
}

// T tokens that fill the registers, or fewer at the end
template <class V, int BITS, int T> static TB_INLINE void tb_rows(tb_work & work, int row, int token) {
    constexpr int ROW_SETS = TB_TILE_ROWS / (V::PARTS * V::LANES);
    if constexpr (T > V::TOKENS) {
        // never asked for
    } else if constexpr (T < V::TOKENS) {
        tb_rows_by_tokens<V, BITS, T, ROW_SETS>(work, row, token);
    } else if (work.passes >= 4 * ROW_SETS) {
        tb_rows_by_tokens<V, BITS, T, 4 * ROW_SETS>(work, row, token);
    } else if (work.passes >= 2 * ROW_SETS) {
        tb_rows_by_tokens<V, BITS, T, 2 * ROW_SETS>(work, row, token);
    } else {
        tb_rows_by_tokens<V, BITS, T, ROW_SETS>(work, row, token);
    }
}

// a block times a tile of tokens
template <class V, int BITS> static TB_INLINE void tb_block(tb_work & work) {
    for (int row = 0; row < TB_TILE_ROWS; row += V::PARTS * V::LANES) {
        for (int token = 0; token < work.width; token += V::TOKENS) {
            switch (work.width - token < V::TOKENS ? work.width - token : V::TOKENS) {
                case 1: tb_rows<V, BITS, 1>(work, row, token); break;
                case 2: tb_rows<V, BITS, 2>(work, row, token); break;
                case 3: tb_rows<V, BITS, 3>(work, row, token); break;
                case 4: tb_rows<V, BITS, 4>(work, row, token); break;
                case 5: tb_rows<V, BITS, 5>(work, row, token); break;
                case 6: tb_rows<V, BITS, 6>(work, row, token); break;
                case 7: tb_rows<V, BITS, 7>(work, row, token); break;
                case 8: tb_rows<V, BITS, 8>(work, row, token); break;
            }
        }
    }
}

// ---- super-tiles ----------------------------------------------------------------------------------------------------

// one super-tile times up to TB_MAX_TOKENS tokens from `first` on: y (token, 32), zero before
template <class V, int BITS>
static TB_INLINE void tb_tile_product(const uint8_t * block, const struct tb_acts * acts, int64_t first, int n_tokens, float * y) {
    const int64_t groups = acts->cols / TB_GROUP;
    const int64_t block_nbytes = TB_BLOCK_SCALES + 4 * (TB_TILE_ROWS * TB_GROUP / 8 * BITS);
    int passes = 0;
    for (int i = 0; i < n_tokens; i += TB_TOKENS) {
        const int width = n_tokens - i < TB_TOKENS ? n_tokens - i : TB_TOKENS;
        passes += (width + V::TOKENS - 1) / V::TOKENS * (TB_TILE_ROWS / (V::PARTS * V::LANES));
    }
    alignas(64) float ws[4 * TB_TILE_ROWS];
    for (int64_t g = 0; g < groups; g += 4) {
        tb_work work;
        work.codes    = block + TB_BLOCK_SCALES;
        work.n_groups = groups - g < 4 ? (int) (groups - g) : 4;
        work.ws       = ws;
        work.ahead    = (const char *) block + TB_AHEAD * block_nbytes + TB_BLOCK_SCALES;
        work.passes   = passes;
        for (int i = 0; i < TB_BLOCK_SCALES; i += 64) {
            V::prefetch((const char *) block + TB_AHEAD * block_nbytes + i);
        }
        V::scale_rows(block, ws);
        for (int i = 0; i < n_tokens; i += TB_TOKENS) {
            const int64_t token = first + i;
            work.width  = n_tokens - i < TB_TOKENS ? n_tokens - i : TB_TOKENS;
            work.q      = (const int32_t *) (acts->q + token * acts->cols) + g * (TB_GROUP / 4) * work.width;
            work.sums   = acts->sums + token * groups + g * work.width;
            work.scales = acts->scales + token * groups + g * work.width;
            work.y      = y + i * TB_TILE_ROWS;
            tb_block<V, BITS>(work);
        }
        block += TB_BLOCK_SCALES + work.n_groups * (TB_TILE_ROWS * TB_GROUP / 8 * BITS);
    }
}

template <class V, int BITS>
static void tb_mul_add_bits(const struct tb_matrix * m, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    for (int64_t tile = tile0; tile < tile1; tile++) {
        const uint8_t * data = m->data + tile * tb_tile_nbytes(BITS, m->cols);
        const int64_t row0 = tile * TB_TILE_ROWS;
        const int n_rows = m->rows - row0 < TB_TILE_ROWS ? (int) (m->rows - row0) : TB_TILE_ROWS;
        for (int64_t first = 0; first < acts->n_tokens; first += TB_MAX_TOKENS) {
            const int n = acts->n_tokens - first < TB_MAX_TOKENS ? (int) (acts->n_tokens - first) : TB_MAX_TOKENS;
            alignas(64) float sums[TB_MAX_TOKENS * TB_TILE_ROWS];
            memset(sums, 0, n * TB_TILE_ROWS * sizeof(float));
            tb_tile_product<V, BITS>(data, acts, first, n, sums);
            for (int t = 0; t < n; t++) {
                int row = 0;
                for (; row + V::LANES <= n_rows; row += V::LANES) {
                    V::add(y[first + t] + row0 + row, m->factor, sums + t * TB_TILE_ROWS + row);
                }
                for (; row < n_rows; row++) {
                    float * out = y[first + t] + row0 + row;
                    *out = fmaf(m->factor, sums[t * TB_TILE_ROWS + row], *out);
                }
            }
        }
    }
}

template <class V>
static void tb_mul_add(const struct tb_matrix * m, const struct tb_acts * acts, float * const * y, int64_t tile0, int64_t tile1) {
    switch (m->bits) {
        case 4: tb_mul_add_bits<V, 4>(m, acts, y, tile0, tile1); break;
        case 5: tb_mul_add_bits<V, 5>(m, acts, y, tile0, tile1); break;
        case 6: tb_mul_add_bits<V, 6>(m, acts, y, tile0, tile1); break;
        case 8: tb_mul_add_bits<V, 8>(m, acts, y, tile0, tile1); break;
    }
}

// ---- activations ----------------------------------------------------------------------------------------------------

// V::quantize64(x, q, scale) rounds 64 values to q[64] and returns their sum.
template <class V> static void tb_quantize(const struct tb_acts * acts, const float * const * x, int64_t group0, int64_t group1) {
    const int64_t groups = acts->cols / TB_GROUP;
    for (int64_t token = 0; token < acts->n_tokens; token++) {
        const int64_t first = token / TB_TOKENS * TB_TOKENS; // of the token's tile
        const int64_t width = tb_tile_width(acts, first);
        int32_t * q = (int32_t *) (acts->q + first * acts->cols) + (token - first);
        for (int64_t g = group0; g < group1; g++) {
            const int64_t i = first * groups + g * width + (token - first);
            alignas(64) int32_t rounded[TB_GROUP / 4];
            acts->sums[i] = V::quantize64(x[token] + g * TB_GROUP, (int8_t *) rounded, &acts->scales[i]);
            for (int k = 0; k < TB_GROUP / 4; k++) {
                q[(g * (TB_GROUP / 4) + k) * width] = rounded[k];
            }
        }
    }
}
