// xxh64.h: the XXH64 checksum (xxHash specification 0.1.1, section "XXH64"), in one go or in pieces.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct tb_xxh64_state {
    uint64_t lanes[4];
    uint64_t total;    // bytes seen
    uint8_t  rest[32]; // the last total % 32 bytes, not yet in the lanes
};

void     tb_xxh64_init(struct tb_xxh64_state * state);
void     tb_xxh64_update(struct tb_xxh64_state * state, const void * data, size_t size);
uint64_t tb_xxh64_digest(const struct tb_xxh64_state * state);

uint64_t tb_xxh64(const void * data, size_t size); // seed 0
