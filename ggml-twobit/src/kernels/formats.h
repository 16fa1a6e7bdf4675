// formats.h: the packed formats as tile.h sees them, and how a vector of codes is taken out of its bits.
//
// A super-tile (32 rows) is a row of blocks of up to 4 groups (64 columns each); a block is a header of scales and then the codes,
// group after group, CODES bytes each: for each unit of U steps (4 columns) and each of two tiles of 16 rows, Z vectors of 64 bytes.

#pragma once

#include "packing.h"

#include <utility>

#define TB_INLINE inline __attribute__((always_inline))
#define TB_LAMBDA __attribute__((always_inline))

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

// Where a block is fetched to while an earlier one is computed. From 4 tokens on it is L2; with fewer the hardware's own prefetching
// is as good or better for most formats (docs/performance.md).
enum tb_prefetch { TB_PREFETCH_NOT, TB_PREFETCH_L1, TB_PREFETCH_L2 };

// ---- residuals (docs/format.md) -------------------------------------------------------------------------------------

template <int BITS_> struct tb_residual_format {
    static const int  BITS = BITS_, OFFSET = 1 << (BITS - 1), CODES = TB_TILE_ROWS * TB_GROUP / 8 * BITS;
    static const int  U = BITS == 5 ? 8 : BITS == 4 ? 2 : 4, Z = U * BITS / 8;
    static const bool MINS = false;
    static const tb_prefetch FOR_FEW = BITS == 5 ? TB_PREFETCH_L2 : TB_PREFETCH_NOT;

    static constexpr int header(int) { return TB_BLOCK_SCALES; }

    template <class V> static inline void load_scales(const uint8_t * block, int, float * ws) { V::scale_rows(block, ws); }
};

// ---- bases (base.h) -------------------------------------------------------------------------------------------------

struct tb_q2_0_format {
    static const int  BITS = 2, OFFSET = 1, CODES = TB_TILE_ROWS * TB_GROUP / 8 * BITS, U = 4, Z = 1;
    static const bool MINS = false;
    static const tb_prefetch FOR_FEW = TB_PREFETCH_L1;

    static constexpr int header(int n_groups) { return TB_TILE_ROWS * 2 * n_groups; }

    template <class V> static inline void load_scales(const uint8_t * block, int n_groups, float * ws) {
        V::from_f16(block, n_groups * TB_TILE_ROWS, ws);
    }
};

// the codes' own scales (4 bits for each 16 columns) and the mins are dealt with in tile.h
struct tb_q2_k_format {
    static const int  BITS = 2, OFFSET = 0, CODES = TB_TILE_ROWS * TB_GROUP / 8 * BITS, U = 4, Z = 1;
    static const bool MINS = true;
    static const tb_prefetch FOR_FEW = TB_PREFETCH_L1;
    static const int  SCALES = 128, GROUP_SCALES = TB_TILE_ROWS * 4; // offset in the header, bytes of a group

    static constexpr int header(int) { return SCALES + 4 * GROUP_SCALES; }

    template <class V> static inline void load_scales(const uint8_t * block, int, float * ws) {
        V::from_f16(block, 2 * TB_TILE_ROWS, ws); // d, dmin
    }
};

template <class F> static constexpr int64_t tb_format_block_nbytes(int n_groups) {
    return F::header(n_groups) + (int64_t) n_groups * F::CODES;
}

template <class F> static inline int64_t tb_format_tile_nbytes(int64_t cols) {
    const int64_t groups = cols / TB_GROUP;
    return groups / 4 * tb_format_block_nbytes<F>(4) + (groups % 4 ? tb_format_block_nbytes<F>(groups % 4) : 0);
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// the codes of step J of a unit; vectors: its Z vectors
template <class V, int BITS, int J> static TB_INLINE typename V::I tb_codes(const typename V::I * vectors) {
    using I = typename V::I;
    const auto v = [vectors](int z) TB_LAMBDA { return vectors[z]; };
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
    } else if constexpr (BITS == 4) {
        return V::mask(J == 0 ? v(0) : V::template shr<4>(v(0)), 0x0f);
    } else {
        return V::mask(J == 0 ? v(0) : V::template shr<2 * J>(v(0)), 0x03);
    }
}

// Q2_K: code · scale for the step J; table: bytes 0, 1, 2, 3 times the scale of each row (V::multiples)
template <class V, int J> static TB_INLINE typename V::I tb_scaled_codes(typename V::I v, typename V::I table) {
    return V::lookup(table, V::or_masked(V::row_index(), J == 0 ? v : V::template shr<2 * J>(v), 0x03));
}
