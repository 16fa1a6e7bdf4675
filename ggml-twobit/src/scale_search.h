// scale_search.h: how well 64 weights r fit d·q with integers lo ≤ q ≤ hi, in the weighted square error.
// Used for residuals (q from −2^(bits−1)) and for Q2_0 (q from −1 to 2). Results are the same on every machine.
#pragma once

#include <stdint.h>

#define TB_SEARCH_GROUP 64

struct tb_search_group {
    float r[TB_SEARCH_GROUP];
    float weight[TB_SEARCH_GROUP];
    float weighted[TB_SEARCH_GROUP]; // weight · r
    float max;                       // the r of largest magnitude, with its sign
};

struct tb_search_range {
    float lo, hi;
};

struct tb_search_fit {
    float scale;
    float gain; // how much the error falls below that of scale 0: larger is better
};

// importance: 64 weights, not negative, or NULL; all zero counts as all alike
void tb_search_load(struct tb_search_group * group, const float * r, const float * importance);

// the least-squares scale for the codes that scale d (not 0) leads to
struct tb_search_fit tb_search_refit(const struct tb_search_group * group, struct tb_search_range range, float d);

// the gain of exactly the scale d
float tb_search_gain(const struct tb_search_group * group, struct tb_search_range range, float d);

// codes[i] = q − lo, where q is r / d rounded into the range; d = 0 gives q = 0
void tb_search_codes(const struct tb_search_group * group, struct tb_search_range range, float d, uint8_t * codes);
