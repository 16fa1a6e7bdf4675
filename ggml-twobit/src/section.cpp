#include "section.h"

#include "error.h"
#include "gguf.h"
#include "log.h"
#include "twobit.h"
#include "xxh64.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const size_t TRAILER_SIZE = 64;
static const size_t SECTION_ALIGN = 4096; // the section's start
static const size_t DATA_ALIGN = 64;      // its tensors
static const char   MAGIC[8] = { 'T', 'W', 'O', 'B', 'I', 'T', 0, 1 };

struct trailer {
    char     magic[8];
    uint32_t version;
    uint32_t header_size;
    uint64_t section_size;
    uint64_t main_size;
    uint64_t header_xxh64;
    uint64_t pair_id;
    uint64_t reserved;
    uint64_t xxh64;
};
static_assert(sizeof(trailer) == TRAILER_SIZE, "the trailer is 64 bytes");

tb_section::~tb_section() {
    if (map) {
        munmap(map, map_size);
    }
}

const tb_residual * tb_section::find(const char * base_name) const {
    auto it = by_base_name.find(base_name);
    return it == by_base_name.end() ? nullptr : &residuals[it->second];
}

// ---- the section's own GGUF header

// data of the array `key` if it holds n entries of that type, else NULL
static const void * array_data(const gguf_context * g, const char * key, enum gguf_type type, int64_t n) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_ARRAY || gguf_get_arr_type(g, id) != type || (int64_t) gguf_get_arr_n(g, id) != n) {
        return nullptr;
    }
    return gguf_get_arr_data(g, id);
}

static bool scalar_u32(const gguf_context * g, const char * key, uint32_t & value) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_UINT32) {
        return false;
    }
    value = gguf_get_val_u32(g, id);
    return true;
}

static bool scalar_u64(const gguf_context * g, const char * key, uint64_t & value) {
    const int64_t id = gguf_find_key(g, key);
    if (id < 0 || gguf_get_kv_type(g, id) != GGUF_TYPE_UINT64) {
        return false;
    }
    value = gguf_get_val_u64(g, id);
    return true;
}

// fills section.residuals; `start`: the section's first byte in memory, `size`: its bytes
static bool read_header(const gguf_context * g, const uint8_t * start, size_t size, size_t header_size, tb_section & section) {
    const char * path = section.path.c_str();

    uint32_t version = 0, layout = 0;
    uint64_t pair_id = 0;
    if (!scalar_u32(g, "twobit.version", version) || !scalar_u32(g, "twobit.layout_version", layout) || !scalar_u64(g, "twobit.pair_id", pair_id)) {
        tb_set_error("%s: the residual section lacks its twobit.* keys; convert the model again", path);
        return false;
    }
    if (version != 1 || layout != 1) {
        tb_set_error("%s: format version %u, layout %u; this build reads version 1, layout 1: update twobit or convert the model again", path, version, layout);
        return false;
    }
    if (pair_id != section.pair_id) {
        tb_set_error("%s: the residual section does not belong to this file's trailer; convert the model again", path);
        return false;
    }

    const int64_t n = gguf_get_n_tensors(g);
    auto * bits    = (const uint32_t *) array_data(g, "twobit.bits",           GGUF_TYPE_UINT32,  n);
    auto * rows    = (const uint64_t *) array_data(g, "twobit.rows",           GGUF_TYPE_UINT64,  n);
    auto * cols    = (const uint64_t *) array_data(g, "twobit.columns",        GGUF_TYPE_UINT64,  n);
    auto * mats    = (const uint64_t *) array_data(g, "twobit.matrices",       GGUF_TYPE_UINT64,  n);
    auto * factor  = (const float    *) array_data(g, "twobit.factor",         GGUF_TYPE_FLOAT32, n);
    auto * type    = (const uint32_t *) array_data(g, "twobit.base_type",      GGUF_TYPE_UINT32,  n);
    auto * base_h  = (const uint64_t *) array_data(g, "twobit.base_xxh64",     GGUF_TYPE_UINT64,  n);
    auto * res_h   = (const uint64_t *) array_data(g, "twobit.residual_xxh64", GGUF_TYPE_UINT64,  n);
    if (n <= 0 || !bits || !rows || !cols || !mats || !factor || !type || !base_h || !res_h) {
        tb_set_error("%s: the residual section's tables are incomplete; convert the model again", path);
        return false;
    }
    if (gguf_get_data_offset(g) != header_size || gguf_get_alignment(g) % DATA_ALIGN != 0) {
        tb_set_error("%s: the residual section's header has another size than the trailer says; convert the model again", path);
        return false;
    }

    section.residuals.reserve(n);
    for (int64_t i = 0; i < n; i++) {
        const char * name   = gguf_get_tensor_name(g, i);
        const size_t suffix = strlen(".residual");
        const size_t length = strlen(name);
        const size_t offset = gguf_get_tensor_offset(g, i); // GGUF's reader has checked that the offsets follow one another
        const size_t nbytes = gguf_get_tensor_size(g, i);

        if (length <= suffix || strcmp(name + length - suffix, ".residual") != 0 || type[i] >= GGML_TYPE_COUNT) {
            tb_set_error("%s: %s is not a residual tensor; convert the model again", path, name);
            return false;
        }
        // bounds first, so that the products below cannot overflow
        const uint64_t limit = (uint64_t) 1 << 31;
        const bool     sane  = rows[i] > 0 && rows[i] < limit && cols[i] > 0 && cols[i] < limit && mats[i] > 0 && mats[i] < (1u << 20) &&
                               bits[i] <= 8 && factor[i] > 0 && factor[i] <= 3.0e38f;
        const int64_t  one   = sane ? tb_matrix_nbytes((int) bits[i], (int64_t) rows[i], (int64_t) cols[i]) : -1;
        if (one <= 0 || one > (int64_t) size || mats[i] > size/(uint64_t) one || nbytes != (size_t) one*mats[i]) {
            tb_set_error("%s: %s: its size does not fit its shape; convert the model again", path, name);
            return false;
        }
        if (offset % DATA_ALIGN != 0 || offset > size - header_size || nbytes > size - header_size - offset) {
            tb_set_error("%s: %s lies outside the residual section: the file is cut or damaged; get it again", path, name);
            return false;
        }

        tb_residual r;
        r.base_name  = std::string(name, length - suffix);
        r.base_type  = (enum ggml_type) type[i];
        r.base_xxh64 = base_h[i];
        r.xxh64      = res_h[i];
        r.bits       = (int) bits[i];
        r.rows       = (int64_t) rows[i];
        r.cols       = (int64_t) cols[i];
        r.n_mats     = (int64_t) mats[i];
        r.factor     = factor[i];
        r.data       = start + header_size + offset;
        r.nbytes     = (int64_t) nbytes;
        section.by_base_name[r.base_name] = section.residuals.size();
        section.residuals.push_back(std::move(r));
    }
    return true;
}

// ---- the file

static bool read_at(int fd, void * dst, size_t size, uint64_t offset) {
    char * p = (char *) dst;
    while (size > 0) {
        const ssize_t n = pread(fd, p, size, (off_t) offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        p += n;
        offset += (uint64_t) n;
        size -= (size_t) n;
    }
    return true;
}

static int64_t memory_available() {
    FILE * f = fopen("/proc/meminfo", "r");
    if (!f) {
        return -1;
    }
    long long kib = -1;
    char line[256];
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, "MemAvailable: %lld", &kib) == 1) {
            break;
        }
    }
    fclose(f);
    return kib < 0 ? -1 : (int64_t) kib*1024;
}

// said before the pages are touched, so that a user who waits knows for what
static void say_memory(const tb_section & section) {
    const double  gib       = 1024.0*1024.0*1024.0;
    const int64_t available = memory_available();
    if (available >= 0 && (int64_t) section.map_size > available) {
        TB_LOG_WARN("%s: the residual takes %.2f GiB of RAM, %.2f GiB are free: it will be read from disk again and again, and be slow\n",
                    section.path.c_str(), section.map_size/gib, available/gib);
    } else {
        TB_LOG_INFO("%s: %zu residuals, %.2f GiB of RAM\n", section.path.c_str(), section.residuals.size(), section.map_size/gib);
    }
}

static void make_resident(const tb_section & section) {
    if (section.flags & TWOBIT_ATTACH_MLOCK) {
        if (mlock(section.map, section.map_size) != 0) {
            TB_LOG_WARN("%s: cannot lock the residual in RAM (%s); raise `ulimit -l`\n", section.path.c_str(), strerror(errno));
        }
    } else if (section.flags & TWOBIT_ATTACH_POPULATE) {
        const volatile uint8_t * p = (const volatile uint8_t *) section.map;
        for (size_t i = 0; i < section.map_size; i += SECTION_ALIGN) {
            (void) p[i];
        }
    }
}

enum tb_section_status tb_section_open(int fd, const char * path, int flags, std::shared_ptr<tb_section> & out) {
    struct stat st;
    if (fstat(fd, &st) != 0) {
        tb_set_error("%s: %s", path, strerror(errno));
        return TB_SECTION_BROKEN;
    }
    if (!S_ISREG(st.st_mode) || (uint64_t) st.st_size < TRAILER_SIZE) {
        return TB_SECTION_NONE;
    }
    const uint64_t file_size = (uint64_t) st.st_size;

    trailer t;
    if (!read_at(fd, &t, sizeof(t), file_size - TRAILER_SIZE)) {
        tb_set_error("%s: cannot be read (%s)", path, strerror(errno));
        return TB_SECTION_BROKEN;
    }
    if (memcmp(t.magic, MAGIC, sizeof(MAGIC)) != 0) {
        return TB_SECTION_NONE;
    }
    if (t.xxh64 != tb_xxh64(&t, TRAILER_SIZE - sizeof(t.xxh64))) {
        tb_set_error("%s: the trailer is damaged; get the file again", path);
        return TB_SECTION_BROKEN;
    }
    if (t.version != 1) {
        tb_set_error("%s: format version %u; this build reads version 1: update twobit or convert the model again", path, t.version);
        return TB_SECTION_BROKEN;
    }
    if (t.section_size > file_size - TRAILER_SIZE || t.header_size > t.section_size) {
        tb_set_error("%s: the file is shorter than its trailer says; get it again", path);
        return TB_SECTION_BROKEN;
    }
    const uint64_t section_start = file_size - TRAILER_SIZE - t.section_size;
    if (t.main_size > section_start || section_start != (t.main_size + SECTION_ALIGN - 1)/SECTION_ALIGN*SECTION_ALIGN) {
        tb_set_error("%s: the main part has another size than when the residual was made (rewritten by a GGUF tool?); convert the model again", path);
        return TB_SECTION_BROKEN;
    }

    auto section     = std::make_shared<tb_section>();
    section->path    = path;
    section->pair_id = t.pair_id;
    section->flags   = flags;

    void * map = mmap(nullptr, t.section_size, PROT_READ, MAP_SHARED, fd, (off_t) section_start);
    if (map == MAP_FAILED) {
        tb_set_error("%s: cannot map the residual (%s)", path, strerror(errno));
        return TB_SECTION_BROKEN;
    }
    section->map      = map;
    section->map_size = t.section_size;

    if (tb_xxh64(map, t.header_size) != t.header_xxh64) {
        tb_set_error("%s: the residual section's header is damaged; get the file again", path);
        return TB_SECTION_BROKEN;
    }

    gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
    gguf_context * g = gguf_init_from_buffer(map, t.section_size, params);
    if (!g) {
        tb_set_error("%s: the residual section is not a GGUF; get the file again", path);
        return TB_SECTION_BROKEN;
    }
    const bool ok = read_header(g, (const uint8_t *) map, t.section_size, t.header_size, *section);
    gguf_free(g);
    if (!ok) {
        return TB_SECTION_BROKEN;
    }

    say_memory(*section);
    make_resident(*section);
    out = std::move(section);
    return TB_SECTION_OK;
}

enum tb_section_status tb_section_open_path(const char * path, int flags, std::shared_ptr<tb_section> & out) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        tb_set_error("%s: %s", path, strerror(errno));
        return TB_SECTION_BROKEN;
    }
    const enum tb_section_status status = tb_section_open(fd, path, flags, out);
    close(fd);
    return status;
}
