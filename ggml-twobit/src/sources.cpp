#include "sources.h"

#include "error.h"
#include "gguf.h"
#include "log.h"
#include "pairs.h"
#include "twobit.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

// a file as the kernel knows it, whatever path leads to it
using file_id = std::tuple<dev_t, ino_t, off_t, time_t, long>;

struct source {
    file_id                     id;
    std::string                 model_path;
    std::shared_ptr<tb_section> section;
    bool                        attached = false; // by twobit_attach or TWOBIT_MODEL: stays until detached
    bool                        used     = false; // a context has been made since
    bool                        warned   = false;
};

static std::mutex              g_mutex;
static std::vector<source>     g_sources;
static std::map<file_id, bool> g_seen;        // files looked at, so that each is read once
static bool                    g_env_read = false;

static file_id id_of(const struct stat & st) {
    return file_id(st.st_dev, st.st_ino, st.st_size, st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
}

// ---- opening

// The converter writes the twobit.* keys right behind general.architecture, so a look at the first bytes tells whether a GGUF is one of ours.
static bool has_twobit_keys(int fd) {
    char head[4096];
    const ssize_t n = pread(fd, head, sizeof(head), 0);
    return n > 4 && memcmp(head, "GGUF", 4) == 0 && memmem(head, (size_t) n, "twobit.version", strlen("twobit.version")) != nullptr;
}

// path of the residual file that the main part names, "" if it names none; pair_id: what it must carry
static std::string residual_file_of(const char * model_path, uint64_t & pair_id) {
    gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
    gguf_context * g = gguf_init_from_file(model_path, params);
    if (!g) {
        return "";
    }
    std::string result;
    const int64_t id_file = gguf_find_key(g, "twobit.residual_file");
    const int64_t id_pair = gguf_find_key(g, "twobit.pair_id");
    if (id_file >= 0 && gguf_get_kv_type(g, id_file) == GGUF_TYPE_STRING && id_pair >= 0 && gguf_get_kv_type(g, id_pair) == GGUF_TYPE_UINT64) {
        const std::string name = gguf_get_val_str(g, id_file);
        pair_id = gguf_get_val_u64(g, id_pair);
        // a base name only: a downloaded file must not point anywhere else
        if (!name.empty() && name.find('/') == std::string::npos) {
            const char * slash = strrchr(model_path, '/');
            result = slash ? std::string(model_path, slash + 1 - model_path) + name : name;
        }
    }
    gguf_free(g);
    return result;
}

// Opens the section for the model behind fd. TB_SECTION_NONE: a plain file.
static enum tb_section_status open_model(int fd, const char * path, int flags, std::shared_ptr<tb_section> & section) {
    const enum tb_section_status status = tb_section_open(fd, path, flags, section);
    if (status != TB_SECTION_NONE || !has_twobit_keys(fd)) {
        return status;
    }
    uint64_t pair_id = 0;
    const std::string residual_path = residual_file_of(path, pair_id);
    if (residual_path.empty()) {
        tb_set_error("%s: has lost its residual (cut, or rewritten by a GGUF tool); get the file again or convert the model again", path);
        return TB_SECTION_BROKEN;
    }
    const enum tb_section_status s = tb_section_open_path(residual_path.c_str(), flags, section);
    if (s == TB_SECTION_NONE) {
        tb_set_error("%s: is not a residual file; get it again", residual_path.c_str());
        return TB_SECTION_BROKEN;
    }
    if (s == TB_SECTION_OK && section->pair_id != pair_id) {
        section.reset();
        tb_set_error("%s: is the residual of another model than %s", residual_path.c_str(), path);
        return TB_SECTION_BROKEN;
    }
    return s;
}

static int flags_from_env() {
    auto on = [](const char * name) {
        const char * v = getenv(name);
        return v && *v && strcmp(v, "0") != 0;
    };
    int flags = 0;
    if (on("TWOBIT_POPULATE")) {
        flags |= TWOBIT_ATTACH_POPULATE;
    }
    if (on("TWOBIT_MLOCK")) {
        flags |= TWOBIT_ATTACH_MLOCK;
    }
    const char * verify = getenv("TWOBIT_VERIFY");
    if (verify && strcmp(verify, "0") == 0) {
        flags |= TWOBIT_ATTACH_NO_VERIFY;
    }
    return flags;
}

static int attach_locked(const char * model_path, const char * residual_path, int flags) {
    const int fd = open(model_path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        tb_set_error("%s: %s", model_path, strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return -1;
    }
    std::shared_ptr<tb_section> section;
    const enum tb_section_status status = residual_path ? tb_section_open_path(residual_path, flags, section)
                                                        : open_model(fd, model_path, flags, section);
    close(fd);
    if (status == TB_SECTION_NONE) {
        tb_set_error("%s: carries no residual; make one with twobit-convert", residual_path ? residual_path : model_path);
    }
    if (status != TB_SECTION_OK) {
        return -1;
    }
    const file_id id = id_of(st);
    g_seen[id] = true;
    for (source & s : g_sources) {
        if (s.id == id) {
            s.section  = section;
            s.attached = true;
            return 0;
        }
    }
    g_sources.push_back({ id, model_path, section, /*.attached =*/ true, /*.warned =*/ false });
    return 0;
}

static void warn_unused_locked(source & s) {
    const size_t n_paired = tb_pairs_of_section(s.section.get());
    if (!s.warned && n_paired < s.section->residuals.size()) {
        TB_LOG_WARN("%s: %zu of %zu residuals are not in use, those layers run as 2-bit: load it on device TWOBIT0 (-dev TWOBIT0)\n",
                    s.model_path.c_str(), s.section->residuals.size() - n_paired, s.section->residuals.size());
        s.warned = true;
    }
}

int tb_sources_attach(const char * model_path, const char * residual_path, int flags) {
    std::lock_guard<std::mutex> lock(g_mutex);
    return attach_locked(model_path, residual_path, flags);
}

int tb_sources_detach(const char * model_path) {
    std::lock_guard<std::mutex> lock(g_mutex);
    for (size_t i = 0; i < g_sources.size(); i++) {
        if (g_sources[i].attached && g_sources[i].model_path == model_path) {
            if (g_sources[i].used) {
                warn_unused_locked(g_sources[i]);
            }
            g_seen.erase(g_sources[i].id);
            g_sources.erase(g_sources.begin() + (ptrdiff_t) i);
            return 0;
        }
    }
    tb_set_error("%s: is not attached", model_path);
    return -1;
}

// ---- searching

static void read_env_locked() {
    if (g_env_read) {
        return;
    }
    g_env_read = true;
    const char * path = getenv("TWOBIT_MODEL");
    if (path && *path && attach_locked(path, nullptr, flags_from_env()) != 0) {
        TB_LOG_ERROR("TWOBIT_MODEL: %s\n", twobit_last_error());
    }
}

// looks at every regular file the process has open and has not been looked at
static void scan_open_files_locked() {
    DIR * dir = opendir("/proc/self/fd");
    if (!dir) {
        return; // not Linux: twobit_attach and TWOBIT_MODEL remain
    }
    while (const dirent * entry = readdir(dir)) {
        const int fd = atoi(entry->d_name);
        struct stat st;
        if (fd <= 2 || fd == dirfd(dir) || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
            continue;
        }
        const file_id id = id_of(st);
        if (!g_seen.emplace(id, true).second) {
            continue;
        }
        char link[64];
        char path[PATH_MAX];
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        const ssize_t n = readlink(link, path, sizeof(path) - 1);
        if (n <= 0) {
            continue;
        }
        path[n] = 0;
        const int own = open(link, O_RDONLY | O_CLOEXEC); // the host's descriptor may be write-only
        if (own < 0) {
            continue;
        }
        source s;
        s.id         = id;
        s.model_path = path;
        const enum tb_section_status status = open_model(own, path, flags_from_env(), s.section);
        close(own);
        if (status == TB_SECTION_BROKEN) {
            TB_LOG_ERROR("%s\n", twobit_last_error());
            TB_LOG_WARN("%s: runs as a plain 2-bit model, far below its full quality\n", path);
        } else if (status == TB_SECTION_OK) {
            g_sources.push_back(std::move(s));
        }
    }
    closedir(dir);
}

static bool matches(const tb_residual & r, const ggml_tensor * base) {
    return r.base_type == base->type && r.cols == base->ne[0] && r.rows == base->ne[1] && r.n_mats == base->ne[2] && base->ne[3] == 1;
}

// the first candidate, attached ones before open files and later ones before earlier, that `accept` takes
template <typename F>
static const tb_residual * find(const ggml_tensor * base, std::shared_ptr<tb_section> & section, F accept) {
    std::lock_guard<std::mutex> lock(g_mutex);
    read_env_locked();
    scan_open_files_locked();
    for (bool attached : { true, false }) {
        for (size_t i = g_sources.size(); i-- > 0;) {
            const source & s = g_sources[i];
            const tb_residual * r = s.attached == attached ? s.section->find(base->name) : nullptr;
            if (r && matches(*r, base) && accept(*r)) {
                section = s.section;
                return r;
            }
        }
    }
    return nullptr;
}

const tb_residual * tb_sources_find(const ggml_tensor * base, std::shared_ptr<tb_section> & section) {
    return find(base, section, [](const tb_residual &) { return true; });
}

const tb_residual * tb_sources_find_exact(const ggml_tensor * base, uint64_t base_xxh64, std::shared_ptr<tb_section> & section) {
    return find(base, section, [=](const tb_residual & r) { return r.base_xxh64 == base_xxh64; });
}

void tb_sources_context_made(void) {
    std::lock_guard<std::mutex> lock(g_mutex);
    for (source & s : g_sources) {
        s.used = true;
    }
}

void tb_sources_loading_done(void) {
    std::lock_guard<std::mutex> lock(g_mutex);
    for (source & s : g_sources) {
        warn_unused_locked(s);
    }
    for (size_t i = g_sources.size(); i-- > 0;) {
        if (!g_sources[i].attached) {
            g_sources.erase(g_sources.begin() + (ptrdiff_t) i);
        }
    }
    g_seen.clear(); // a later load looks again: the file may have been replaced
    for (const source & s : g_sources) {
        g_seen[s.id] = true;
    }
}
