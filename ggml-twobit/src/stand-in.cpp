#include "stand-in.h"

#include "log.h"

#include <stdlib.h>
#include <string.h>

struct block_q2_0 { // 64 weights: d·(q − 1), byte i holds weights 4i … 4i + 3, low bits first
    uint16_t d;
    uint8_t  q[16];
};

struct block_q4_1 { // 32 weights: d·q + m, byte i holds weights i (low) and i + 16
    uint16_t d;
    uint16_t m;
    uint8_t  q[16];
};

static uint8_t code(const block_q2_0 & block, int i) {
    return block.q[i/4] >> (i%4*2) & 3;
}

static void to_q4_1(const block_q2_0 & in, block_q4_1 * out) {
    for (int half = 0; half < 2; half++) {
        out[half].d = in.d;
        out[half].m = in.d ^ 0x8000;
        for (int i = 0; i < 16; i++) {
            out[half].q[i] = (uint8_t) (code(in, 32*half + i) | code(in, 32*half + i + 16) << 4);
        }
    }
}

tb_stand_in::~tb_stand_in() {
    free(data);
}

std::unique_ptr<tb_stand_in> tb_make_stand_in(const ggml_tensor * base, const void * base_data) {
    const char * repack = getenv("TWOBIT_REPACK");
    if (base->type != GGML_TYPE_Q2_0 || (repack && strcmp(repack, "0") == 0)) {
        return nullptr;
    }
    const int64_t n_blocks = ggml_nelements(base)/64;
    auto copy = std::make_unique<tb_stand_in>();
    copy->data = (uint8_t *) malloc((size_t) n_blocks*2*sizeof(block_q4_1));
    if (!copy->data) {
        TB_LOG_WARN("%s: no memory for a copy that the CPU computes fast; it will be slow\n", base->name);
        return nullptr;
    }
    const block_q2_0 * in  = (const block_q2_0 *) base_data;
    block_q4_1       * out = (block_q4_1 *) copy->data;
    for (int64_t i = 0; i < n_blocks; i++) {
        to_q4_1(in[i], out + 2*i);
    }
    copy->tensor       = *base;
    copy->tensor.type  = GGML_TYPE_Q4_1;
    copy->tensor.data  = copy->data;
    copy->tensor.nb[0] = ggml_type_size(GGML_TYPE_Q4_1);
    copy->tensor.nb[1] = ggml_row_size(GGML_TYPE_Q4_1, base->ne[0]);
    for (int i = 2; i < GGML_MAX_DIMS; i++) {
        copy->tensor.nb[i] = copy->tensor.nb[i - 1]*(size_t) base->ne[i - 1];
    }
    return copy;
}
