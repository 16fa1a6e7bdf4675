#include "repack.h"

#include "kernels/base.h"
#include "log.h"

#include <stdlib.h>
#include <string.h>

tb_repacked::~tb_repacked() {
    free(data);
}

std::unique_ptr<tb_repacked> tb_repack(const ggml_tensor * base, const void * base_data) {
    const char *  off        = getenv("TWOBIT_REPACK");
    const int64_t mat_nbytes = tb_base_nbytes(base->type, base->ne[1], base->ne[0]);
    if (mat_nbytes < 0 || (off && strcmp(off, "0") == 0)) {
        return nullptr;
    }
    auto r = std::make_unique<tb_repacked>();
    r->type       = base->type;
    r->rows       = base->ne[1];
    r->cols       = base->ne[0];
    r->n_mats     = base->ne[2];
    r->mat_nbytes = (mat_nbytes + 63)/64*64;
    r->data       = (uint8_t *) aligned_alloc(64, (size_t) (r->n_mats*r->mat_nbytes));
    if (!r->data) {
        TB_LOG_WARN("%s: no memory for a copy that the CPU computes fast; it will be slow\n", base->name);
        return nullptr;
    }
    const size_t src_nbytes = ggml_row_size(base->type, base->ne[0])*(size_t) base->ne[1];
    for (int64_t i = 0; i < r->n_mats; i++) {
        tb_base_repack(r->type, (const char *) base_data + (size_t) i*src_nbytes, r->rows, r->cols, r->data + i*r->mat_nbytes, 0, tb_n_tiles(r->rows));
    }
    return r;
}
