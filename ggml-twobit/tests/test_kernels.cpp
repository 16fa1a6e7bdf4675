// test_kernels.cpp: every kernel set that runs here against the scalar one, bit for bit. Exit status 0 if all agree.

#include "kernels/base.h"
#include "kernels/f16.h"
#include "kernels/kernels.h"
#include "kernels/packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#ifdef TWOBIT_TEST_AVXVNNI_AS_AVX512VL
extern const struct tb_kernels tb_kernels_avxvnni_as_avx512vl;
#endif

static std::mt19937 rng(1); // what is drawn must not depend on the sets of this machine
static long n_checks = 0;
static long n_failures = 0;

static void check(bool ok, const std::string & what) {
    n_checks++;
    if (!ok && n_failures++ < 20) {
        printf("FAILED: %s\n", what.c_str());
    }
}

// the same bits, or NaN both
static bool same(float a, float b) {
    return memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b));
}

static bool same(const std::vector<float> & a, const std::vector<float> & b) {
    for (size_t i = 0; i < a.size(); i++) {
        if (!same(a[i], b[i])) {
            return false;
        }
    }
    return a.size() == b.size();
}

// Memory that ends at a page nobody may touch: reading past the end is a crash.
struct guarded {
    uint8_t * map;
    size_t    map_size;
    uint8_t * data;

    explicit guarded(size_t size) {
        const size_t page = (size_t) sysconf(_SC_PAGESIZE);
        const size_t room = (size + page - 1) / page * page;
        map_size = room + page;
        map = (uint8_t *) mmap(NULL, map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED || mprotect(map + room, page, PROT_NONE) != 0) {
            printf("no memory\n");
            exit(2);
        }
        data = map + room - size;
    }
    guarded(const guarded &) = delete;
    ~guarded() { munmap(map, map_size); }
};

// ---- inputs ---------------------------------------------------------------------------------------------------------

// Random bytes are valid codes and scale codes; only the super-scales need care.
static void fill_matrix(uint8_t * data, int bits, int64_t rows, int64_t cols) {
    const float supers[] = { 1.0f, 0.37f, 3.0f, -0.5f, 0.0f, 6.0e-8f, 3.0e-6f, 60000.0f };
    for (int64_t tile = 0; tile < tb_n_tiles(rows); tile++) {
        for (int64_t col = 0; col < cols; col += TB_BLOCK_COLS) {
            const int64_t n = tb_block_nbytes(bits, std::min<int64_t>(TB_BLOCK_COLS, cols - col) / TB_GROUP);
            for (int64_t i = 0; i < n; i++) {
                data[i] = (uint8_t) rng();
            }
            for (int i = 0; i < 4 * TB_TILE_ROWS; i++) {
                data[i] = data[i] == 0x80 ? 0 : data[i]; // −128 is no scale code
            }
            for (int row = 0; row < TB_TILE_ROWS; row++) {
                const uint16_t super = tb_f32_to_f16(supers[rng() % 8 < 5 ? rng() % 3 : rng() % 8]);
                memcpy(data + TB_SUPER_OFFSET + 2 * row, &super, 2);
            }
            data += n;
        }
    }
}

enum input { RANDOM, EXTREME, ZEROS, DENORMALS, NOT_FINITE, N_INPUTS };

static float draw(int input) {
    std::normal_distribution<float> normal;
    const float extreme[] = { 1.0f, -1.0f, 127.0f, -127.0f, 0.5f, 1e30f, -1e30f, 1e-30f, 3.4e38f, 0.0f };
    switch (input) {
        case EXTREME:    return extreme[rng() % 10];
        case ZEROS:      return rng() % 2 ? 0.0f : -0.0f;
        case DENORMALS:  return normal(rng) * (rng() % 2 ? 1e-39f : 1e-36f);
        case NOT_FINITE: return rng() % 200 ? normal(rng) : rng() % 2 ? NAN : rng() % 2 ? INFINITY : -INFINITY;
        default:         return normal(rng) * (rng() % 100 ? 1.0f : 20.0f);
    }
}

// ---- one product ----------------------------------------------------------------------------------------------------

struct result {
    std::vector<struct tb_run>  runs;
    std::vector<struct tb_sums> sums;
    std::vector<float>          y; // (token, rows + 1): one value behind each row that must stay as it is
};

static bool same_activations(const result & a, const result & b) {
    bool ok = a.runs.size() == b.runs.size() && a.sums.size() == b.sums.size();
    for (size_t i = 0; ok && i < a.runs.size(); i++) {
        ok = memcmp(a.runs[i].q, b.runs[i].q, TB_RUN) == 0 && a.runs[i].sum == b.runs[i].sum && same(a.runs[i].scale, b.runs[i].scale);
    }
    for (size_t i = 0; ok && i < a.sums.size(); i++) {
        ok = memcmp(a.sums[i].q, b.sums[i].q, sizeof(a.sums[i].q)) == 0 && same(a.sums[i].scale, b.sums[i].scale);
    }
    return ok;
}

// x: (token, cols). The tiles are computed in `parts` pieces, last piece first.
static result multiply(const struct tb_kernels * k, const struct tb_matrix & m, const float * x, int64_t n_tokens, int parts) {
    std::vector<uint8_t> scratch(tb_acts_nbytes(n_tokens, m.cols) + 64);
    struct tb_acts acts;
    tb_acts_init(&acts, (void *) (((uintptr_t) scratch.data() + 63) / 64 * 64), n_tokens, m.cols);
    result r;
    r.y.resize(n_tokens * (m.rows + 1));
    for (size_t i = 0; i < r.y.size(); i++) {
        r.y[i] = (float) (i % 97) - 48.0f;
    }
    std::vector<const float *> xs;
    std::vector<float *> ys;
    for (int64_t t = 0; t < n_tokens; t++) {
        xs.push_back(x + t * m.cols);
        ys.push_back(r.y.data() + t * (m.rows + 1));
    }
    const int64_t blocks = tb_n_blocks(m.cols), tiles = tb_n_tiles(m.rows);
    for (int i = parts - 1; i >= 0; i--) {
        k->quantize(&acts, xs.data(), blocks * i / parts, blocks * (i + 1) / parts);
    }
    for (int i = parts - 1; i >= 0; i--) {
        k->mul_add(&m, &acts, ys.data(), tiles * i / parts, tiles * (i + 1) / parts);
    }
    r.runs.assign(acts.runs, acts.runs + n_tokens * (m.cols / TB_RUN));
    r.sums.assign(acts.sums, acts.sums + n_tokens * (m.cols / TB_BLOCK_COLS));
    return r;
}

static void check_product(const std::vector<const struct tb_kernels *> & sets, int bits, int64_t rows, int64_t cols, int64_t n_tokens,
                          int input) {
    guarded packed(tb_matrix_nbytes(bits, rows, cols));
    fill_matrix(packed.data, bits, rows, cols);
    guarded x(n_tokens * cols * sizeof(float));
    for (int64_t i = 0; i < n_tokens * cols; i++) {
        ((float *) x.data)[i] = draw(input);
    }
    const float * xs = (const float *) x.data;
    const struct tb_matrix m = { packed.data, rows, cols, bits, 0.125f };
    const std::string name = "R" + std::to_string(bits) + " " + std::to_string(rows) + "x" + std::to_string(cols) + " T=" +
                             std::to_string(n_tokens) + " input " + std::to_string(input) + ": ";

    const result expected = multiply(tb_kernels_by_name("scalar"), m, xs, n_tokens, 1);
    if (input == NOT_FINITE) { // a token's results are NaN exactly where one of its groups is not finite
        for (int64_t t = 0; t < n_tokens; t++) {
            bool finite = true;
            for (int64_t i = 0; i < cols; i++) {
                finite &= std::isfinite(xs[t * cols + i]);
            }
            for (int64_t row = 0; row < rows; row++) {
                check(std::isnan(expected.y[t * (rows + 1) + row]) == !finite, name + "NaN and Inf are passed on");
            }
        }
    }
    const int64_t t = rng() % n_tokens; // alone, a token gets what it gets among others
    for (const struct tb_kernels * k : sets) {
        const result r = multiply(k, m, xs, n_tokens, 1);
        check(same_activations(r, expected), name + k->name + ": activations");
        check(same(r.y, expected.y), name + k->name + ": result");
        if (tb_n_tiles(rows) > 1) {
            check(same(multiply(k, m, xs, n_tokens, 2).y, expected.y), name + k->name + ": two pieces");
        }
        const result one = multiply(k, m, xs + t * cols, 1, 1);
        const float * among = expected.y.data() + t * (rows + 1);
        for (int64_t row = 0; row < rows; row++) {
            const float start = (float) (row % 97) - 48.0f, start_among = (float) ((t * (rows + 1) + row) % 97) - 48.0f;
            if (start == start_among) {
                check(same(one.y[row], among[row]), name + k->name + ": one token alone");
            }
        }
    }
}

// ---- bases ----------------------------------------------------------------------------------------------------------

// Random bytes in ggml's layout with sane scales, and what they mean: values[row][col] - mins[row][col / 16]; Q2_0 has no mins.
static std::vector<uint8_t> random_base(int type, int64_t rows, int64_t cols, std::vector<double> & values, std::vector<double> & mins) {
    std::vector<uint8_t> bytes;
    const auto put_half = [&bytes](float f) {
        const uint16_t h = tb_f32_to_f16(f);
        bytes.push_back(h & 0xff);
        bytes.push_back(h >> 8);
        return (double) tb_f16_to_f32(h);
    };
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * cols / (type == TB_BASE_Q2_K ? 256 : 64); i++) {
        uint8_t raw[80];
        for (uint8_t & b : raw) {
            b = (uint8_t) rng();
        }
        if (type == TB_BASE_Q2_0) {
            const double d = put_half(normal(rng));
            bytes.insert(bytes.end(), raw, raw + 16);
            for (int k = 0; k < 64; k++) {
                values.push_back(d * ((raw[k / 4] >> (k % 4 * 2) & 3) - 1));
            }
        } else {
            bytes.insert(bytes.end(), raw, raw + 80);
            const double d = put_half(normal(rng)), dmin = put_half(normal(rng));
            for (int k = 0; k < 256; k++) {
                const int code = raw[16 + k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
                values.push_back(d * (raw[k / 16] & 15) * code);
            }
            for (int b = 0; b < 16; b++) {
                mins.push_back(dmin * (raw[b] >> 4));
            }
        }
    }
    return bytes;
}

// the scalar set's y (token, rows + 1) against the values and mins that ggml's bytes mean, and the sums that mins are multiplied with
static void check_meaning(const struct tb_acts & acts, const std::vector<double> & values, const std::vector<double> & mins,
                          const std::vector<float> & y, int64_t rows, const std::string & name) {
    const int64_t cols = acts.cols, n_runs = cols / TB_RUN, n_blocks = cols / TB_BLOCK_COLS;
    for (int64_t t = 0; t < acts.n_tokens; t++) {
        const int64_t first = t / TB_TOKENS * TB_TOKENS, width = tb_tile_width(&acts, first);
        std::vector<double> x(cols), sums(n_blocks * 16);
        for (int64_t k = 0; k < cols; k++) {
            const struct tb_run & run = acts.runs[first * n_runs + k / TB_RUN * width + (t - first)];
            x[k] = (double) run.q[k % TB_RUN] * run.scale;
        }
        for (int64_t i = 0; i < n_blocks * 16; i++) {
            const struct tb_sums & block = acts.sums[first * n_blocks + i / 16 * width + (t - first)];
            const double sum = std::accumulate(x.begin() + i * 16, x.begin() + i * 16 + 16, 0.0), step = -block.scale;
            sums[i] = block.q[i % 16] * step;
            check(std::fabs(sums[i] - sum) <= 0.51 * step, name + "a sum of 16 is rounded to the nearest 16 bits");
        }
        for (int64_t row = 0; row < rows; row++) {
            double sum = 0.0, size = 0.0;
            for (int64_t k = 0; k < cols; k++) {
                sum += values[row * cols + k] * x[k];
                size += std::fabs(values[row * cols + k] * x[k]);
            }
            for (int64_t i = 0; i < (int64_t) (mins.empty() ? 0 : sums.size()); i++) {
                sum -= mins[row * n_blocks * 16 + i] * sums[i];
                size += std::fabs(mins[row * n_blocks * 16 + i] * sums[i]);
            }
            check(std::fabs(y[t * (rows + 1) + row] - sum) <= 1e-6 * size, name + "what ggml's bytes mean");
        }
    }
}

static void check_base(const std::vector<const struct tb_kernels *> & sets, int type, int64_t rows, int64_t cols, int64_t n_tokens, int input) {
    const int64_t nbytes = tb_base_nbytes(type, rows, cols), tiles = tb_n_tiles(rows), blocks = tb_n_blocks(cols);
    const std::string name = "base " + std::to_string(type) + " " + std::to_string(rows) + "x" + std::to_string(cols) + " T=" +
                             std::to_string(n_tokens) + " input " + std::to_string(input) + ": ";
    std::vector<double> values, mins;
    const std::vector<uint8_t> bytes = random_base(type, rows, cols, values, mins);
    guarded packed(nbytes);
    tb_base_repack(type, bytes.data(), rows, cols, packed.data, tiles / 2, tiles);
    tb_base_repack(type, bytes.data(), rows, cols, packed.data, 0, tiles / 2);
    const struct tb_base base = { packed.data, rows, cols, type };

    const int bits = (int[]){ 4, 5, 6, 8 }[rng() % 4];
    guarded residual(tb_matrix_nbytes(bits, rows, cols));
    fill_matrix(residual.data, bits, rows, cols);
    const struct tb_matrix m = { residual.data, rows, cols, bits, 0.5f };

    std::vector<float> x(n_tokens * cols);
    std::vector<const float *> xs;
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = draw(input);
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        xs.push_back(x.data() + t * cols);
    }
    std::vector<uint8_t> scratch(tb_acts_nbytes(n_tokens, cols) + 64);
    struct tb_acts acts;
    tb_acts_init(&acts, (void *) (((uintptr_t) scratch.data() + 63) / 64 * 64), n_tokens, cols);
    std::vector<float> expected(n_tokens * (rows + 1), 7.0f), expected_pair;
    const auto pointers = [&](std::vector<float> & y) {
        std::vector<float *> ys;
        for (int64_t t = 0; t < n_tokens; t++) {
            ys.push_back(y.data() + t * (rows + 1));
        }
        return ys;
    };
    const struct tb_kernels * scalar = tb_kernels_by_name("scalar");
    scalar->quantize(&acts, xs.data(), 0, blocks);
    scalar->mul_base(&base, &acts, pointers(expected).data(), 0, tiles);
    expected_pair = expected;
    scalar->mul_add(&m, &acts, pointers(expected_pair).data(), 0, tiles);

    if (input == RANDOM) {
        check_meaning(acts, values, mins, expected, rows, name);
    }
    for (const struct tb_kernels * k : sets) {
        k->quantize(&acts, xs.data(), 0, blocks);
        std::vector<float> y(n_tokens * (rows + 1), 7.0f), pair = y;
        k->mul_base(&base, &acts, pointers(y).data(), tiles / 2, tiles);
        k->mul_base(&base, &acts, pointers(y).data(), 0, tiles / 2);
        check(same(y, expected), name + k->name + ": base");
        k->mul_pair(&base, &m, &acts, pointers(pair).data(), 0, tiles);
        check(same(pair, expected_pair), name + k->name + ": base and residual R" + std::to_string(bits));
    }
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// docs/format.md's table, written down a second time as the bits of each vector from low to high
static const struct {
    int bits, U, Z;
    const char * vectors[5]; // "w:lo-hi …", hi excluded
} FORMAT[] = {
    { 8, 4, 4, { "0:0-8", "1:0-8", "2:0-8", "3:0-8" } },
    { 6, 4, 3, { "0:0-6 3:0-2", "1:0-6 3:2-4", "2:0-6 3:4-6" } },
    { 5, 8, 5, { "0:0-5 5:0-3", "1:0-5 7:3-4 5:3-5", "2:0-5 6:0-3", "3:0-5 7:4-5 6:3-5", "4:0-5 7:0-3" } },
    { 4, 2, 1, { "0:0-4 1:0-4" } },
};

static void check_packing() {
    for (const auto & f : FORMAT) {
        uint8_t codes[TB_TILE_ROWS][TB_GROUP], back[TB_TILE_ROWS][TB_GROUP];
        for (auto & row : codes) {
            for (uint8_t & c : row) {
                c = rng() & ((1 << f.bits) - 1);
            }
        }
        std::vector<uint8_t> packed(tb_group_nbytes(f.bits));
        tb_pack_group(f.bits, codes[0], packed.data());
        tb_unpack_group(f.bits, packed.data(), back[0]);
        check(memcmp(codes, back, sizeof(codes)) == 0, "R" + std::to_string(f.bits) + ": unpacking gives the codes back");

        const uint8_t * p = packed.data();
        for (int unit = 0; unit < 16 / f.U; unit++) {
            for (int tile = 0; tile < 2; tile++) {
                for (int z = 0; z < f.Z; z++) {
                    for (int i = 0; i < 64; i++, p++) {
                        int expected = 0, at = 0, w, lo, hi, n;
                        for (const char * s = f.vectors[z]; sscanf(s, " %d:%d-%d%n", &w, &lo, &hi, &n) == 3; s += n) {
                            const int code = codes[16 * tile + i / 4][4 * (unit * f.U + w) + i % 4];
                            expected |= (code >> lo & ((1 << (hi - lo)) - 1)) << at;
                            at += hi - lo;
                        }
                        check(*p == expected, "R" + std::to_string(f.bits) + ": packed as docs/format.md says");
                    }
                }
            }
        }
    }
}

static void check_f16() {
    for (uint32_t h = 0; h < 0x10000; h++) {
        const float f = tb_f16_to_f32((uint16_t) h);
        if (!std::isnan(f)) {
            check(tb_f32_to_f16(f) == h, "f16 " + std::to_string(h) + " survives f32");
            const float up = std::nextafter(f, INFINITY); // a hair off rounds back
            check(std::isinf(f) || tb_f32_to_f16(up) == h || f == 0.0f, "f16 " + std::to_string(h) + " is the nearest");
        }
    }
    check(tb_f32_to_f16(1.0f + 0x1p-11f) == 0x3c00 && tb_f32_to_f16(1.0f + 3 * 0x1p-11f) == 0x3c02, "f16 ties go to even");
}

int main(int argc, char ** argv) {
    std::vector<const struct tb_kernels *> sets;
    for (int i = 0; tb_kernels_at(i); i++) {
        if (strcmp(tb_kernels_at(i)->name, "scalar") != 0 || tb_kernels_at(1) == NULL) {
            sets.push_back(tb_kernels_at(i));
        }
    }
#ifdef TWOBIT_TEST_AVXVNNI_AS_AVX512VL
    if (tb_kernels_by_name("avx512vnni")) {
        sets.push_back(&tb_kernels_avxvnni_as_avx512vl);
    }
#endif
    check_packing();
    check_f16();
    const bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0; // under an emulator
    const int64_t all_rows[] = { 1, 31, 32, 33, 49, 96 }, all_cols[] = { 64, 128, 256, 320, 576, 640, 896, 1024 };
    for (int bits : { 4, 5, 6, 8 }) {
        for (int64_t n_tokens = 1; n_tokens <= 40; n_tokens += quick && n_tokens >= 9 ? 11 : 1) {
            const int64_t rows = all_rows[rng() % 6], cols = all_cols[rng() % (quick ? 5 : 8)];
            check_product(sets, bits, rows, cols, n_tokens, RANDOM);
        }
        for (int64_t rows : all_rows) {
            for (int64_t cols : all_cols) {
                if (!quick || cols <= 320) {
                    check_product(sets, bits, rows, cols, 1 + rng() % 9, rng() % 2);
                }
            }
        }
        for (int input = 0; input < N_INPUTS; input++) {
            check_product(sets, bits, 49, 320, 11, input);
            check_product(sets, bits, 32, 256, 1, input);
        }
        check_product(sets, bits, 65, 128, quick ? 33 : 100, RANDOM); // several passes of 32 tokens
    }
    for (int type : { TB_BASE_Q2_K, TB_BASE_Q2_0 }) {
        const int64_t unit = type == TB_BASE_Q2_K ? 256 : 64;
        check(tb_base_nbytes(type, 1, unit / 2) < 0 && tb_base_nbytes(type, 0, unit) < 0, "a base that cannot be");
        for (int64_t n_tokens = 1; n_tokens <= 40; n_tokens += quick && n_tokens >= 9 ? 11 : 1) {
            check_base(sets, type, all_rows[rng() % 6], unit * (1 + rng() % (quick ? 3 : 7)), n_tokens, RANDOM);
        }
        for (int input = 0; input < N_INPUTS; input++) {
            check_base(sets, type, 49, 2 * unit, 11, input);
            check_base(sets, type, 1, unit, 1, input);
        }
    }
    check(tb_base_nbytes(0, 32, 256) < 0, "a base that cannot be");
    printf("%ld checks, %ld failed; sets:", n_checks, n_failures);
    for (const struct tb_kernels * k : sets) {
        printf(" %s", k->name);
    }
    printf("\n");
    return n_failures != 0;
}
