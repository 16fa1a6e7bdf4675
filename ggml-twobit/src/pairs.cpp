#include "pairs.h"

#include "log.h"
#include "xxh64.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

tb_counters tb_count;

static std::shared_mutex                                                     g_mutex;
static std::unordered_map<const ggml_tensor *, std::unique_ptr<tb_pair>>     g_pairs;

tb_pair * tb_pairs_find(const ggml_tensor * base) {
    std::shared_lock<std::shared_mutex> lock(g_mutex);
    auto it = g_pairs.find(base);
    return it == g_pairs.end() ? nullptr : it->second.get();
}

void tb_pairs_add(const ggml_tensor * base, std::unique_ptr<tb_pair> pair) {
    std::unique_lock<std::shared_mutex> lock(g_mutex);
    g_pairs[base] = std::move(pair);
}

void tb_pairs_remove(const ggml_tensor * base) {
    std::unique_lock<std::shared_mutex> lock(g_mutex);
    g_pairs.erase(base);
}

size_t tb_pairs_count(void) {
    std::shared_lock<std::shared_mutex> lock(g_mutex);
    return g_pairs.size();
}

size_t tb_pairs_of_section(const tb_section * section) {
    std::shared_lock<std::shared_mutex> lock(g_mutex);
    size_t n = 0;
    for (const auto & entry : g_pairs) {
        n += entry.second->section.get() == section;
    }
    return n;
}

void tb_pair_verify(tb_pair & pair, const ggml_tensor * base, uint64_t base_xxh64) {
    const tb_residual & r = *pair.residual;
    const char * path = pair.section->path.c_str();
    if (base_xxh64 != r.base_xxh64) {
        TB_LOG_ERROR("%s: %s: the base's checksum differs: the file is damaged or its residual belongs to another model; get it again\n", path, base->name);
        pair.broken = true;
    } else if (tb_xxh64(r.data, (size_t) r.nbytes) != r.xxh64) {
        TB_LOG_ERROR("%s: %s: the residual's checksum differs: the file is damaged; get it again\n", path, base->name);
        pair.broken = true;
    } else {
        pair.verified = true;
    }
}

// ---- the public counters

extern "C" void twobit_get_counters(twobit_counters * out) {
    out->graphs_draft     = tb_count.graphs_draft;
    out->graphs_full      = tb_count.graphs_full;
    out->matmuls_paired   = tb_count.matmuls_paired;
    out->matmuls_unpaired = tb_count.matmuls_unpaired;
    out->tokens_residual  = tb_count.tokens_residual;
    out->slices           = tb_count.slices;

    std::shared_lock<std::shared_mutex> lock(g_mutex);
    out->pairs_alive    = (int64_t) g_pairs.size();
    out->residual_bytes = 0;
    for (const auto & entry : g_pairs) {
        out->residual_bytes += entry.second->residual->nbytes;
    }
}

extern "C" void twobit_reset_counters(void) {
    tb_count.graphs_draft     = 0;
    tb_count.graphs_full      = 0;
    tb_count.matmuls_paired   = 0;
    tb_count.matmuls_unpaired = 0;
    tb_count.tokens_residual  = 0;
    tb_count.slices           = 0;
}
