// kernels.cpp: sizes, scratch layout, and the choice of a kernel set by CPU features.

#include "kernels.h"

#include "packing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#    include <asm/hwcap.h>
#    include <sys/auxv.h>
#endif

// ---- sizes ----------------------------------------------------------------------------------------------------------

static size_t align64(size_t n) {
    return (n + 63) / 64 * 64;
}

size_t tb_acts_nbytes(int64_t n_tokens, int64_t cols) {
    return align64(n_tokens * (cols / TB_RUN) * sizeof(struct tb_run)) + align64(n_tokens * (cols / TB_BLOCK_COLS) * sizeof(struct tb_sums));
}

void tb_acts_init(struct tb_acts * acts, void * scratch, int64_t n_tokens, int64_t cols) {
    acts->n_tokens = n_tokens;
    acts->cols     = cols;
    acts->runs     = (struct tb_run *) scratch;
    acts->sums     = (struct tb_sums *) ((uint8_t *) scratch + align64(n_tokens * (cols / TB_RUN) * sizeof(struct tb_run)));
}

int64_t tb_n_tiles(int64_t rows) {
    return (rows + TB_TILE_ROWS - 1) / TB_TILE_ROWS;
}

int64_t tb_n_blocks(int64_t cols) {
    return (cols + TB_BLOCK_COLS - 1) / TB_BLOCK_COLS;
}

int64_t tb_matrix_nbytes(int bits, int64_t rows, int64_t cols) {
    const int64_t limit = INT64_C(1) << 31; // of rows and of columns: the product of all factors stays within 63 bits
    if (!tb_bits_valid(bits) || rows <= 0 || rows > limit || cols <= 0 || cols > limit || cols % TB_GROUP != 0) {
        return -1;
    }
    return tb_n_tiles(rows) * tb_tile_nbytes(bits, cols);
}

// ---- the sets this machine can run ----------------------------------------------------------------------------------

extern const struct tb_kernels tb_kernels_scalar;

static bool always(void) {
    return true;
}

#if defined(__x86_64__)
extern const struct tb_kernels tb_kernels_avx512vnni;
extern const struct tb_kernels tb_kernels_avxvnni;
extern const struct tb_kernels tb_kernels_avx2;

static bool has_avx2(void) { // and what comes with it; the compiler's answers include the operating system's support
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avxvnni(void) { // leaf 7.1, EAX bit 4: older compilers have no name for it
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

static bool has_avx512vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(__aarch64__)
extern const struct tb_kernels tb_kernels_neon;

static bool has_dotprod(void) {
#    if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#    else
    return true; // Apple's have it since the M1
#    endif
}
#endif

struct candidate {
    const struct tb_kernels * kernels;
    bool (*runs_here)(void);
};

static const candidate candidates[] = { // best first
#if defined(__x86_64__)
    { &tb_kernels_avx512vnni, has_avx512vnni },
    { &tb_kernels_avxvnni,    has_avxvnni    },
    { &tb_kernels_avx2,       has_avx2       },
#endif
#if defined(__aarch64__)
    { &tb_kernels_neon,       has_dotprod    },
#endif
    { &tb_kernels_scalar,     always         },
};

const struct tb_kernels * tb_kernels_at(int i) {
    for (const candidate & c : candidates) {
        if (c.runs_here() && i-- == 0) {
            return c.kernels;
        }
    }
    return NULL;
}

const struct tb_kernels * tb_kernels_by_name(const char * name) {
    const struct tb_kernels * kernels;
    for (int i = 0; (kernels = tb_kernels_at(i)); i++) {
        if (strcmp(kernels->name, name) == 0) {
            return kernels;
        }
    }
    return NULL;
}

static const struct tb_kernels * choose(void) {
    const char * name = getenv("TWOBIT_KERNEL");
    if (name && *name) {
        const struct tb_kernels * kernels = tb_kernels_by_name(name);
        if (kernels) {
            return kernels;
        }
        fprintf(stderr, "twobit: TWOBIT_KERNEL=%s: no such kernels on this CPU, using %s\n", name, tb_kernels_at(0)->name);
    }
    return tb_kernels_at(0);
}

const struct tb_kernels * tb_kernels_best(void) {
    static const struct tb_kernels * const chosen = choose();
    return chosen;
}
