#include "xxh64.h"

#include <algorithm>
#include <cstring>

static const uint64_t P1 = 0x9E3779B185EBCA87u;
static const uint64_t P2 = 0xC2B2AE3D27D4EB4Fu;
static const uint64_t P3 = 0x165667B19E3779F9u;
static const uint64_t P4 = 0x85EBCA77C2B2AE63u;
static const uint64_t P5 = 0x27D4EB2F165667C5u;

static uint64_t rotl(uint64_t v, int n) {
    return v << n | v >> (64 - n);
}

template <typename T> static T read_le(const uint8_t * p) {
    T v;
    memcpy(&v, p, sizeof(v)); // the project runs on little-endian machines only, as ggml's files do
    return v;
}

static uint64_t mix(uint64_t lane, uint64_t input) {
    return rotl(lane + input * P2, 31) * P1;
}

// consumes whole stripes of 32 bytes; returns where it stopped
static const uint8_t * stripes(uint64_t lanes[4], const uint8_t * p, const uint8_t * end) {
    uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
    for (; end - p >= 32; p += 32) {
        a = mix(a, read_le<uint64_t>(p));
        b = mix(b, read_le<uint64_t>(p + 8));
        c = mix(c, read_le<uint64_t>(p + 16));
        d = mix(d, read_le<uint64_t>(p + 24));
    }
    lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d;
    return p;
}

void tb_xxh64_init(struct tb_xxh64_state * state) {
    *state = { { P1 + P2, P2, 0, 0 - P1 }, 0, {} };
}

void tb_xxh64_update(struct tb_xxh64_state * state, const void * data, size_t size) {
    const uint8_t * p   = (const uint8_t *) data;
    const uint8_t * end = p + size;
    const size_t kept = state->total % 32;
    state->total += size;
    if (kept) {
        const size_t n = std::min(size, 32 - kept);
        memcpy(state->rest + kept, p, n);
        p += n;
        if (kept + n < 32) {
            return;
        }
        stripes(state->lanes, state->rest, state->rest + 32);
    }
    p = stripes(state->lanes, p, end);
    if (p < end) {
        memcpy(state->rest, p, end - p);
    }
}

uint64_t tb_xxh64_digest(const struct tb_xxh64_state * state) {
    const uint64_t * v = state->lanes;
    uint64_t h = P5;
    if (state->total >= 32) {
        h = rotl(v[0], 1) + rotl(v[1], 7) + rotl(v[2], 12) + rotl(v[3], 18);
        for (int i = 0; i < 4; i++) {
            h = (h ^ mix(0, v[i])) * P1 + P4;
        }
    }
    h += state->total;

    const uint8_t * p   = state->rest;
    const uint8_t * end = p + state->total % 32;
    for (; end - p >= 8; p += 8) {
        h = rotl(h ^ mix(0, read_le<uint64_t>(p)), 27) * P1 + P4;
    }
    if (end - p >= 4) {
        h = rotl(h ^ read_le<uint32_t>(p) * P1, 23) * P2 + P3;
        p += 4;
    }
    for (; p < end; p++) {
        h = rotl(h ^ *p * P5, 11) * P1;
    }
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

uint64_t tb_xxh64(const void * data, size_t size) {
    struct tb_xxh64_state state;
    tb_xxh64_init(&state);
    tb_xxh64_update(&state, data, size);
    return tb_xxh64_digest(&state);
}
