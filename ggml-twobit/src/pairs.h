// pairs.h: which loaded weights have a residual.
#pragma once

#include <atomic>
#include <memory>

#include "repack.h"
#include "section.h"
#include "twobit.h"

// a loaded base tensor and its residual
struct tb_pair {
    std::shared_ptr<tb_section> section;
    const tb_residual         * residual = nullptr;
    std::atomic<bool>           verified { false }; // the checksums of base and residual have been compared
    std::atomic<bool>           broken   { false }; // they differ: nothing may be computed with this tensor

    std::unique_ptr<tb_repacked> repacked; // only where the CPU computes the base; made before the first graph
    bool                         prepared = false;
};

// The pair of a weight (which lives as long as the weight's buffer), or NULL.
tb_pair * tb_pairs_find(const struct ggml_tensor * base);
void      tb_pairs_add(const struct ggml_tensor * base, std::unique_ptr<tb_pair> pair);
void      tb_pairs_remove(const struct ggml_tensor * base);
size_t    tb_pairs_count(void);                                   // alive now, in all models
size_t    tb_pairs_of_section(const tb_section * section);

// Compares the base's checksum, and the residual's, with what the file says. Marks the pair verified, or broken and says so.
void tb_pair_verify(tb_pair & pair, const struct ggml_tensor * base, uint64_t base_xxh64);

struct tb_counters {
    std::atomic<int64_t> graphs_draft, graphs_full, matmuls_paired, matmuls_unpaired, tokens_residual, slices;
};
extern tb_counters tb_count;
