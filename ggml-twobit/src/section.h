// section.h: the residual section of a paired file (docs/format.md), checked and mapped.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ggml.h"
#include "kernels/kernels.h"

// one residual tensor: n_mats packed matrices of one shape, one behind the other
struct tb_residual {
    std::string     base_name;
    enum ggml_type  base_type;
    uint64_t        base_xxh64;
    uint64_t        xxh64;
    int             bits;
    int64_t         rows;
    int64_t         cols;
    int64_t         n_mats;
    float           factor;
    const uint8_t * data;   // in the section's mapping
    int64_t         nbytes;

    tb_matrix matrix(int64_t i) const {
        return { data + i*(nbytes/n_mats), rows, cols, bits, factor };
    }
};

struct tb_section {
    std::string path;
    uint64_t    pair_id = 0;
    int         flags   = 0; // enum twobit_attach_flags

    std::vector<tb_residual>                residuals;
    std::unordered_map<std::string, size_t> by_base_name;

    // the mapping, unmapped with the section
    void * map      = nullptr;
    size_t map_size = 0;

    tb_section() = default;
    tb_section(const tb_section &) = delete;
    tb_section & operator=(const tb_section &) = delete;
    ~tb_section();

    // NULL if this section has no residual for a tensor of that name
    const tb_residual * find(const char * base_name) const;
};

enum tb_section_status {
    TB_SECTION_OK,
    TB_SECTION_NONE,   // the file carries no trailer: not a paired file, or one that lost its tail
    TB_SECTION_BROKEN, // there is one, but it must not be used; tb_set_error has the reason
};

// Opens the section of the paired or residual file behind fd. `path` is for messages; fd stays the caller's and may be closed afterwards.
enum tb_section_status tb_section_open(int fd, const char * path, int flags, std::shared_ptr<tb_section> & out);
enum tb_section_status tb_section_open_path(const char * path, int flags, std::shared_ptr<tb_section> & out);
