// tile.h: the product of super-tiles and tokens, written once for all vector instruction sets and formats (formats.h).
//
// The codes of 32 columns of PARTS·LANES rows are unpacked into registers and stay there while the tokens go by; what a token has
// summed up lies in L1. Weights are read in the order of their addresses, each vector once: both matter for the hardware's prefetching,
// with one token by a third of the speed.
//
// An instruction set is a struct V with
//     I, F                  a vector of integers: LANES rows × 4 columns of codes, or LANES sums; a vector of LANES floats
//     LANES, PARTS          PARTS·LANES rows are unpacked at a time
//     TOKENS                tokens that are computed side by side
//     load, shr<n>, mask, or_masked      to take codes out of their bits (shr moves 16-bit lanes)
//     SIGNED8               whether 8-bit codes become signed (V::flip) instead of taking off the offset at the end
//     steps(bits)           steps (4 columns each) handed to one V::dot
//     dot<n, bits>(sums, w, x)           sums += Σ w[i] · x[i], w: n vectors of codes, x: 4 int8 values in each int32
//     set(i), shl32<n>      the same integer in all lanes; shifts of 32-bit lanes
//     set(f), convert, mul, fma, from_f16, from_i8, load_f, store_f      floats; fma(a, b, c) = a · b + c
//     prefetch(p)           to L2
//     prefetch_from(base, residual)      tokens from which that is faster than leaving it to the hardware
// and for Q2_K
//     for_q2_k              V itself, or a V with other PARTS and TOKENS
//     SCALED_FROM           tokens from which it is faster to multiply codes by their scales before the product, not after it
//     dot_halves(w, x, scales)           scale0 · Σ w[i] · x[i] + scale1 · Σ w[4 + i] · x[4 + i] / 4, i < 4, w[4 + i] multiples of 4
//     multiples(scales)     in each lane bytes 0, 1, 2, 3 times its lowest 4 bits
//     transpose             byte 4·i + j of 128 bits to byte 4·j + i
//     row_index(n), lookup  the row within 128 bits, shifted left by n, in all bytes; bytes of 128 bits looked up by index
//     shr32<n>, mask32      of 32-bit lanes
//     dot16(sums, m, x)     sums += m · x, two int16 in each lane

#pragma once

#include "acts.h"
#include "base.h"
#include "formats.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

#define TB_AHEAD 8192 // bytes to prefetch ahead: 4096 is too little for 4 tokens, more is as good

// ---- tokens ---------------------------------------------------------------------------------------------------------

// f(integral_constant N, token) for all tokens, N at a time
template <class V, bool ONE, class F> static TB_INLINE void tb_for_tokens(int n, F f) {
    using one = std::integral_constant<int, 1>;
    if constexpr (ONE) {
        f(one(), 0);
        return;
    }
    int t = 0;
    for (; t + V::TOKENS <= n; t += V::TOKENS) {
        f(std::integral_constant<int, V::TOKENS>(), t);
    }
    if constexpr (V::TOKENS > 1) {
        for (; t < n; t++) {
            f(one(), t);
        }
    }
}

// sums[part][token] += Σ w[part][step] · x[token][step]
template <class V, int BITS, int N>
static TB_INLINE void tb_dot(typename V::I (*sums)[N], const typename V::I (*w)[TB_STEPS], const struct tb_run * x) {
    constexpr int STEPS = V::steps(BITS);
    tb_unroll<TB_STEPS / STEPS>([&](auto i) TB_LAMBDA {
        tb_unroll<N>([&](auto t) TB_LAMBDA {
            tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                sums[part][t] = V::template dot<STEPS, BITS>(sums[part][t], w[part] + i * STEPS, (const int32_t *) x[t].q + i * STEPS);
            });
        });
    });
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// fetches what lies TB_AHEAD behind the BYTES at p to L2
template <class V, int BYTES> static TB_INLINE void tb_prefetch(const uint8_t * p) {
    tb_unroll<BYTES / 64>([&](auto i) TB_LAMBDA { V::prefetch(p + TB_AHEAD + 64 * i); });
}

// the whole lines that each of n parts of so many bytes takes
constexpr int tb_share(int nbytes, int n) {
    return (nbytes / 64 + n - 1) / n * 64;
}

// One block of a residual or of Q2_0 times n tokens, added to y (token, 32 rows). x: (column / 32, token). Of each group
//     y = fma(fma(c1, s1, c0 · s0), scale, y)     c0, c1: sums over its two runs, s0, s1: the activations' scales
template <class V, class FORMAT, bool ONE>
static __attribute__((noinline)) void tb_block(const uint8_t * block, int n_groups, const struct tb_run * x, int n_tokens, bool prefetch,
                                               float * y) {
    using I = typename V::I;
    using F = typename V::F;
    constexpr int ROWS = V::PARTS * V::LANES, BITS = FORMAT::BITS, SHARE = tb_share(FORMAT::CODES / 2, TB_TILE_ROWS / ROWS);
    constexpr int OFFSET = BITS == 8 && V::SIGNED8 ? 0 : FORMAT::OFFSET;
    const int n = ONE ? 1 : n_tokens;
    alignas(64) float of_first_run[(ONE ? 1 : TB_TOKENS) * TB_TILE_ROWS];
    const uint8_t * codes = block + FORMAT::beside(n_groups);
    if (prefetch) {
        tb_prefetch<V, FORMAT::beside(4)>(block);
    }
    for (int g = 0; g < n_groups; g++) {
        tb_unroll<2>([&](auto half) TB_LAMBDA {
            for (int row = 0; row < TB_TILE_ROWS; row += ROWS) {
                if (prefetch) {
                    tb_prefetch<V, SHARE>(codes + row / ROWS * SHARE);
                }
                I w[V::PARTS][TB_STEPS];
                F scale[V::PARTS];
                tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                    if (half == 1) {
                        scale[part] = FORMAT::template scale<V>(block, g, row + part * V::LANES);
                    }
                });
                FORMAT::template unpack<V>(codes, row, w);
                tb_for_tokens<V, ONE>(n, [&](auto count, int token) TB_LAMBDA {
                    constexpr int N = decltype(count)::value;
                    I sums[V::PARTS][N];
                    tb_unroll<N>([&](auto t) TB_LAMBDA {
                        const I start = OFFSET ? V::template shl32<tb_log2(OFFSET)>(V::set(x[token + t].sum)) : V::set(0);
                        tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA { sums[part][t] = start; });
                    });
                    tb_dot<V, BITS, N>(sums, w, x + token);
                    tb_unroll<N>([&](auto t) TB_LAMBDA {
                        const F s = V::set(x[token + t].scale);
                        tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                            const int at = (token + t) * TB_TILE_ROWS + row + part * V::LANES;
                            const F c = V::convert(sums[part][t]);
                            if constexpr (decltype(half)::value == 0) {
                                V::store_f(of_first_run + at, V::mul(c, s));
                            } else {
                                const F both = V::fma(c, s, V::load_f(of_first_run + at));
                                V::store_f(y + at, V::fma(both, scale[part], V::load_f(y + at)));
                            }
                        });
                    });
                });
            }
            codes += FORMAT::CODES / 2;
            x += n;
        });
    }
}

// One block of Q2_K, likewise:
//     y = fma(Σ c · s, d, y), the sum a chain of fma over the runs;  y = fma(float(Σ min · sum) · scale of the sums, dmin, y)
template <class V, bool SCALED, bool ONE>
static __attribute__((noinline)) void tb_block_q2_k(const uint8_t * block, const struct tb_run * x, const struct tb_sums * x_sums, int n_tokens,
                                                    bool prefetch, float * y) {
    using I = typename V::I;
    using F = typename V::F;
    using FORMAT = tb_q2_k_format;
    constexpr int ROWS = V::PARTS * V::LANES, SHARE = tb_share(FORMAT::CODES / 2, TB_TILE_ROWS / ROWS);
    constexpr int BITS = 6; // codes · scales are below 2^6
    const int n = ONE ? 1 : n_tokens;
    alignas(64) float of_runs[(ONE ? 1 : TB_TOKENS) * TB_TILE_ROWS];
    memset(of_runs, 0, n * TB_TILE_ROWS * sizeof(float));
    const uint8_t * group = block;
    for (int g = 0; g < 4; g++) {
        tb_unroll<2>([&](auto half) TB_LAMBDA {
            constexpr int HALF = decltype(half)::value;
            for (int row = 0; row < TB_TILE_ROWS; row += ROWS) {
                if (prefetch) {
                    tb_prefetch<V, SHARE>(group + HALF * (FORMAT::CODES / 2) + row / ROWS * SHARE);
                }
                I w[V::PARTS][TB_STEPS], scales[V::PARTS];
                tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                    const int r = row + part * V::LANES;
                    scales[part] = FORMAT::template half_scales<V, HALF>(group, r);
                    if constexpr (SCALED) {
                        FORMAT::template unpack_scaled<V, HALF>(group, r, scales[part], w[part]);
                    } else {
                        FORMAT::template unpack<V, HALF>(group, r, w[part]);
                    }
                });
                tb_for_tokens<V, ONE>(n, [&](auto count, int token) TB_LAMBDA {
                    constexpr int N = decltype(count)::value;
                    I sums[V::PARTS][N];
                    if constexpr (SCALED) {
                        tb_unroll<N>([&](auto t) TB_LAMBDA {
                            tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA { sums[part][t] = V::set(0); });
                        });
                        tb_dot<V, BITS, N>(sums, w, x + token);
                    } else {
                        tb_unroll<N>([&](auto t) TB_LAMBDA {
                            tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                                sums[part][t] = V::dot_halves(w[part], (const int32_t *) x[token + t].q, scales[part]);
                            });
                        });
                    }
                    tb_unroll<N>([&](auto t) TB_LAMBDA {
                        const F s = V::set(x[token + t].scale);
                        tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                            float * sum = of_runs + (token + t) * TB_TILE_ROWS + row + part * V::LANES;
                            V::store_f(sum, V::fma(V::convert(sums[part][t]), s, V::load_f(sum)));
                        });
                    });
                });
            }
            x += n;
        });
        group += FORMAT::CODES;
    }
    if (prefetch) {
        tb_prefetch<V, FORMAT::beside(4)>(block + FORMAT::D);
    }
    for (int row = 0; row < TB_TILE_ROWS; row += ROWS) {
        I mins[V::PARTS][TB_STEPS];
        F d[V::PARTS], dmin[V::PARTS];
        tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
            const int r = row + part * V::LANES;
            tb_unroll<TB_STEPS>([&](auto i) TB_LAMBDA { mins[part][i] = FORMAT::template half_mins<V, i % 2>(block + i / 2 * FORMAT::CODES, r); });
            d[part] = V::from_f16(block + FORMAT::D + 2 * r);
            dmin[part] = V::from_f16(block + FORMAT::DMIN + 2 * r);
        });
        for (int token = 0; token < n; token++) {
            const F s = V::set(x_sums[token].scale);
            I sums[V::PARTS];
            tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA { sums[part] = V::set(0); });
            tb_unroll<TB_STEPS>([&](auto i) TB_LAMBDA {
                tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                    sums[part] = V::dot16(sums[part], mins[part][i], ((const int32_t *) x_sums[token].q)[i]);
                });
            });
            tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
                const int at = token * TB_TILE_ROWS + row + part * V::LANES;
                const F sum = V::fma(V::load_f(of_runs + at), d[part], V::load_f(y + at));
                V::store_f(y + at, V::fma(V::mul(V::convert(sums[part]), s), dmin[part], sum));
            });
        }
    }
}

// ---- super-tiles ----------------------------------------------------------------------------------------------------

// One super-tile times a tile of n tokens, block after block. y: (token, 32 rows), zero before the first block.
template <class V, class FORMAT> struct tb_tile {
    const uint8_t * block;
    bool            prefetch;
    float         * y;

    TB_INLINE void next(int n_groups, const struct tb_run * x, const struct tb_sums * sums, int n) {
        if constexpr (!std::is_same<FORMAT, tb_q2_k_format>::value) {
            if (n == 1) {
                tb_block<V, FORMAT, true>(block, n_groups, x, n, prefetch, y);
            } else {
                tb_block<V, FORMAT, false>(block, n_groups, x, n, prefetch, y);
            }
        } else if (n == 1) {
            tb_block_q2_k<typename V::for_q2_k, false, true>(block, x, sums, n, prefetch, y);
        } else if (n < V::SCALED_FROM) {
            tb_block_q2_k<typename V::for_q2_k, false, false>(block, x, sums, n, prefetch, y);
        } else {
            tb_block_q2_k<typename V::for_q2_k, true, false>(block, x, sums, n, prefetch, y);
        }
        block += tb_format_block_nbytes<FORMAT>(n_groups);
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
            V::store_f(to + row, V::fma(V::set(factor), V::load_f(y + row), V::load_f(to + row)));
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
        for (int64_t first = 0; first < acts->n_tokens; first += TB_TOKENS) {
            const int n = (int) tb_tile_width(acts, first);
            const bool prefetch = n >= V::prefetch_from(HAS_BASE, HAS_RESIDUAL); // both or none: half a stream is the slowest of all
            const struct tb_run  * x    = acts->runs + first * (acts->cols / TB_RUN);
            const struct tb_sums * sums = acts->sums + first * (acts->cols / TB_BLOCK_COLS);
            alignas(64) float of_base[HAS_BASE ? TB_TOKENS * TB_TILE_ROWS : 1];
            alignas(64) float of_residual[HAS_RESIDUAL ? TB_TOKENS * TB_TILE_ROWS : 1];
            if (HAS_BASE) {
                memset(of_base, 0, n * TB_TILE_ROWS * sizeof(float));
            }
            if (HAS_RESIDUAL) {
                memset(of_residual, 0, n * TB_TILE_ROWS * sizeof(float));
            }
            tb_tile<V, B> base = { HAS_BASE ? b->data + tile * tb_format_tile_nbytes<B>(acts->cols) : NULL, prefetch, of_base };
            tb_tile<V, R> residual = { HAS_RESIDUAL ? m->data + tile * tb_format_tile_nbytes<R>(acts->cols) : NULL, prefetch, of_residual };
            for (int64_t col = 0; col < acts->cols; col += TB_BLOCK_COLS) {
                const int n_groups = acts->cols - col < TB_BLOCK_COLS ? (int) (acts->cols - col) / TB_GROUP : TB_BLOCK_COLS / TB_GROUP;
                if constexpr (HAS_BASE) {
                    base.next(n_groups, x, sums, n);
                }
                if constexpr (HAS_RESIDUAL) {
                    residual.next(n_groups, x, sums, n);
                }
                x += 2 * n_groups * n;
                sums += n;
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

template <class V> static void tb_quantize(const struct tb_acts * acts, const float * const * x, int64_t block0, int64_t block1) {
    tb_quantize_with(acts, x, block0, block1, V::round32);
}
