// packing.cpp: the codes of a group, 32 rows × 64 columns, to and from their packed bits.
//
//   step s, tile n:  64 bytes, byte 4·r + c = code of row 16·n + r, column 4·s + c
//   unit:            U steps whose bits share Z vectors of 64 bytes (the tables below)
//   group:           unit 0 tile 0, unit 0 tile 1, unit 1 tile 0, …

#include "packing.h"

#include <string.h>

namespace {

// bits [lo, lo + n) of the unit's step w lie at bit `at` of its vector v
struct field {
    uint8_t w, lo, n, v, at;
};

struct format {
    int   U, Z;
    int   n_fields;
    field fields[12];
};

const format R8 = { 4, 4, 4, { { 0, 0, 8, 0, 0 }, { 1, 0, 8, 1, 0 }, { 2, 0, 8, 2, 0 }, { 3, 0, 8, 3, 0 } } };

const format R6 = { 4, 3, 6, {
    { 0, 0, 6, 0, 0 }, { 3, 0, 2, 0, 6 },
    { 1, 0, 6, 1, 0 }, { 3, 2, 2, 1, 6 },
    { 2, 0, 6, 2, 0 }, { 3, 4, 2, 2, 6 },
} };

const format R5 = { 8, 5, 12, {
    { 0, 0, 5, 0, 0 }, { 5, 0, 3, 0, 5 },
    { 1, 0, 5, 1, 0 }, { 7, 3, 1, 1, 5 }, { 5, 3, 2, 1, 6 },
    { 2, 0, 5, 2, 0 }, { 6, 0, 3, 2, 5 },
    { 3, 0, 5, 3, 0 }, { 7, 4, 1, 3, 5 }, { 6, 3, 2, 3, 6 },
    { 4, 0, 5, 4, 0 }, { 7, 0, 3, 4, 5 },
} };

const format R4 = { 2, 1, 2, { { 0, 0, 4, 0, 0 }, { 1, 0, 4, 0, 4 } } };

const format & format_of(int bits) {
    return bits == 8 ? R8 : bits == 6 ? R6 : bits == 5 ? R5 : R4;
}

const int STEPS = TB_GROUP / 4;

} // namespace

void tb_pack_group(int bits, const uint8_t * codes, uint8_t * packed) {
    const format & f = format_of(bits);
    memset(packed, 0, tb_group_nbytes(bits));
    for (int unit = 0; unit < STEPS / f.U; unit++) {
        for (int tile = 0; tile < 2; tile++, packed += 64 * f.Z) {
            for (int i = 0; i < f.n_fields; i++) {
                const field & b = f.fields[i];
                const uint8_t * code = codes + tile * 16 * TB_GROUP + (unit * f.U + b.w) * 4;
                for (int r = 0; r < 16; r++) {
                    for (int c = 0; c < 4; c++) {
                        packed[64 * b.v + 4 * r + c] |= (code[r * TB_GROUP + c] >> b.lo & ((1 << b.n) - 1)) << b.at;
                    }
                }
            }
        }
    }
}

void tb_unpack_group(int bits, const uint8_t * packed, uint8_t * codes) {
    const format & f = format_of(bits);
    memset(codes, 0, TB_TILE_ROWS * TB_GROUP);
    for (int unit = 0; unit < STEPS / f.U; unit++) {
        for (int tile = 0; tile < 2; tile++, packed += 64 * f.Z) {
            for (int i = 0; i < f.n_fields; i++) {
                const field & b = f.fields[i];
                uint8_t * code = codes + tile * 16 * TB_GROUP + (unit * f.U + b.w) * 4;
                for (int r = 0; r < 16; r++) {
                    for (int c = 0; c < 4; c++) {
                        code[r * TB_GROUP + c] |= (packed[64 * b.v + 4 * r + c] >> b.at & ((1 << b.n) - 1)) << b.lo;
                    }
                }
            }
        }
    }
}
