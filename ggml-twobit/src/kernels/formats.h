// formats.h: the packed formats as tile.h sees them, and how vectors of codes are taken out of their bits.
//
// A super-tile (32 rows) is a row of blocks of up to 4 groups (64 columns each); a block has CODES bytes for each group and some
// `beside` them, for scales. Codes are vectors of 64 bytes, 16 rows × 4 columns, in turn of the upper and the lower 16 rows.

#pragma once

#include "packing.h"

#include <utility>

#define TB_INLINE inline __attribute__((always_inline))
#define TB_LAMBDA __attribute__((always_inline))

#define TB_STEPS (TB_RUN / 4) // steps, 4 columns each, of a run

// calls f(integral_constant 0), …, f(integral_constant N − 1): unrolled with every compiler
template <class F, int... J> static TB_INLINE void tb_unroll_over(F f, std::integer_sequence<int, J...>) {
    (void) f; // unused when N is 0
    (f(std::integral_constant<int, J>()), ...);
}

template <int N, class F> static TB_INLINE void tb_unroll(F f) {
    tb_unroll_over(f, std::make_integer_sequence<int, N>());
}

constexpr int tb_log2(int n) {
    return n > 1 ? 1 + tb_log2(n / 2) : 0;
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// the codes of step J of a unit of steps that share their bits; v: the unit's vectors (docs/format.md)
template <class V, int BITS, int J> static TB_INLINE typename V::I tb_codes(const typename V::I * v) {
    using I = typename V::I;
    if constexpr (BITS == 8) {
        return V::SIGNED8 ? V::flip(v[J]) : v[J];
    } else if constexpr (BITS == 6) {
        if constexpr (J < 3) {
            return V::mask(v[J], 0x3f);
        } else {
            const I high = V::mask(V::template shr<2>(v[2]), 0x30);
            return V::or_masked(V::or_masked(high, V::template shr<4>(v[1]), 0x0c), V::template shr<6>(v[0]), 0x03);
        }
    } else if constexpr (BITS == 5) {
        if constexpr (J < 5) {
            return V::mask(v[J], 0x1f);
        } else if constexpr (J < 7) { // w5 in v0, v1; w6 in v2, v3
            constexpr int Z = 2 * (J - 5);
            return V::or_masked(V::mask(V::template shr<3>(v[Z + 1]), 0x18), V::template shr<5>(v[Z]), 0x07);
        } else {
            const I high = V::or_masked(V::mask(V::template shr<1>(v[3]), 0x10), V::template shr<2>(v[1]), 0x08);
            return V::or_masked(high, V::template shr<5>(v[4]), 0x07);
        }
    } else if constexpr (BITS == 4) {
        return V::mask(J == 0 ? v[0] : V::template shr<4>(v[0]), 0x0f);
    } else {
        return V::mask(J == 0 ? v[0] : V::template shr<2 * J>(v[0]), 0x03);
    }
}

// The codes of the parts' rows from `row` on and the 32 columns of a run, whose vectors start at `codes`. U steps share Z vectors.
template <class V, int BITS, int U, int Z> static TB_INLINE void tb_unpack(const uint8_t * codes, int row, typename V::I (*w)[TB_STEPS]) {
    tb_unroll<TB_STEPS / U>([&](auto unit) TB_LAMBDA {
        tb_unroll<V::PARTS>([&](auto part) TB_LAMBDA {
            const int r = row + part * V::LANES;
            typename V::I v[Z];
            tb_unroll<Z>([&](auto z) TB_LAMBDA { v[z] = V::load(codes + ((unit * 2 + r / 16) * Z + z) * 64 + r % 16 * 4); });
            tb_unroll<U>([&](auto j) TB_LAMBDA { w[part][unit * U + j] = tb_codes<V, BITS, decltype(j)::value>(v); });
        });
    });
}

// ---- residuals (docs/format.md) -------------------------------------------------------------------------------------

template <int BITS_> struct tb_residual_format {
    static const int BITS = BITS_, OFFSET = 1 << (BITS - 1), CODES = TB_TILE_ROWS * TB_GROUP / 8 * BITS;

    static constexpr int beside(int) { return TB_BLOCK_SCALES; }

    template <class V> static TB_INLINE void unpack(const uint8_t * codes, int row, typename V::I (*w)[TB_STEPS]) {
        constexpr int U = BITS == 5 ? 8 : BITS == 4 ? 2 : 4, Z = U * BITS / 8;
        tb_unpack<V, BITS, U, Z>(codes, row, w);
    }

    // of the rows from `row` on and the block's group g
    template <class V> static TB_INLINE typename V::F scale(const uint8_t * block, int g, int row) {
        return V::mul(V::from_f16(block + TB_SUPER_OFFSET + 2 * row), V::from_i8(block + TB_TILE_ROWS * g + row));
    }
};

// ---- bases (base.h) -------------------------------------------------------------------------------------------------

struct tb_q2_0_format {
    static const int BITS = 2, OFFSET = 1, CODES = TB_TILE_ROWS * TB_GROUP / 8 * BITS;

    static constexpr int beside(int n_groups) { return TB_TILE_ROWS * 2 * n_groups; }

    template <class V> static TB_INLINE void unpack(const uint8_t * codes, int row, typename V::I (*w)[TB_STEPS]) {
        tb_unpack<V, BITS, 4, 1>(codes, row, w);
    }

    template <class V> static TB_INLINE typename V::F scale(const uint8_t * block, int g, int row) {
        return V::from_f16(block + (TB_TILE_ROWS * g + row) * 2);
    }
};

struct tb_q2_k_format {
    static const int SCALES = TB_TILE_ROWS * 4, CODES = SCALES + TB_TILE_ROWS * TB_GROUP / 8 * 2; // bytes of a group's scales; of it all
    static const int D = 4 * CODES, DMIN = D + TB_TILE_ROWS * 2; // where they are in the block

    static constexpr int beside(int) { return TB_TILE_ROWS * 4; }

    // The codes of one half of the group: w[0…3] of its first 16 columns, w[4…7] of the others, times 4.
    template <class V, int HALF> static TB_INLINE void unpack(const uint8_t * group, int row, typename V::I * w) {
        tb_unroll<4>([&](auto i) TB_LAMBDA {
            const typename V::I v = vector<V, HALF>(group, row, i);
            w[i] = V::mask(v, 0x03);
            w[4 + i] = V::mask(v, 0x0c);
        });
    }

    // the same codes times their scales (half_scales), by looking the products up among those of their row
    template <class V, int HALF>
    static TB_INLINE void unpack_scaled(const uint8_t * group, int row, typename V::I scales, typename V::I * w) {
        using I = typename V::I;
        const I first = V::multiples(scales), second = V::transpose(V::multiples(V::template shr32<16>(scales)));
        tb_unroll<4>([&](auto i) TB_LAMBDA {
            const I v = vector<V, HALF>(group, row, i);
            w[i] = V::lookup(first, V::or_masked(V::row_index(2), v, 0x03));
            w[4 + i] = V::lookup(second, V::or_masked(V::row_index(0), v, 0x0c));
        });
    }

    // for each row the two scales of half a group, or the two mins, as int16
    template <class V, int HALF> static TB_INLINE typename V::I half_scales(const uint8_t * group, int row) {
        return nibbles<V, 4 * HALF>(group, row);
    }

    template <class V, int HALF> static TB_INLINE typename V::I half_mins(const uint8_t * group, int row) {
        return nibbles<V, 8 + 4 * HALF>(group, row);
    }

    template <class V, int HALF> static TB_INLINE typename V::I vector(const uint8_t * group, int row, int i) {
        const typename V::I v = V::load(group + SCALES + (2 * i + row / 16) * 64 + row % 16 * 4);
        return HALF ? V::template shr<4>(v) : v;
    }

    template <class V, int SHIFT> static TB_INLINE typename V::I nibbles(const uint8_t * group, int row) {
        const typename V::I v = V::load(group + 4 * row);
        return V::mask32(SHIFT ? V::template shr<SHIFT>(v) : v, 0x000f000f);
    }
};

template <class F> static constexpr int64_t tb_format_block_nbytes(int n_groups) {
    return F::beside(n_groups) + (int64_t) n_groups * F::CODES;
}

template <class F> static inline int64_t tb_format_tile_nbytes(int64_t cols) {
    const int64_t groups = cols / TB_GROUP;
    return groups / 4 * tb_format_block_nbytes<F>(4) + (groups % 4 ? tb_format_block_nbytes<F>(groups % 4) : 0);
}
