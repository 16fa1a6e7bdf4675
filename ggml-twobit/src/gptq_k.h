// gptq_k.h: what Q2_K and Q4_K share: the scale and min of a sub-block, fitted on its own.
#pragma once

#include "gptq.h"

#include <algorithm>

struct gptq_fit {
    float scale, min; // value = scale·q − min
};

// The best scale and min for one sub-block of N columns without feedback, levels 0…TOP: 48 steps are tried, each with its least-squares scale and min.
template <int N, int TOP> GPTQ_INLINE gptq_fit gptq_fit_sub(const float * t, const float * d) {
    float least = 0, most = t[0], w = 0, wt = 0, wtt = 0;
    for (int i = 0; i < N; i++) {
        least = std::min(least, t[i]);
        most  = std::max(most, t[i]);
        w += d[i];
        wt += d[i] * t[i];
        wtt += d[i] * t[i] * t[i];
    }
    if (!(most - least > 1e-20f)) {
        return { 0, -least };
    }
    gptq_fit best = { (most - least) / TOP, -least };
    float    best_loss = INFINITY;
    for (int turn = 0; turn < 3; turn++) {
        gptq_lanes steps, wq = {}, wqq = {}, wqt = {};
        for (int i = 0; i < GPTQ_LANES; i++) {
            steps[i] = (TOP - 1.2f + 0.05f * (turn * GPTQ_LANES + i)) / (most - least);
        }
        for (int i = 0; i < N; i++) {
            gptq_lanes q = steps * (t[i] - least);
            gptq_round_clamped(q, 0, TOP);
            wq += q * d[i];
            wqq += q * q * d[i];
            wqt += q * (t[i] * d[i]);
        }
        for (int i = 0; i < GPTQ_LANES; i++) {
            const float det = w * wqq[i] - wq[i] * wq[i];
            if (!(det > 0)) {
                continue;
            }
            float scale = (w * wqt[i] - wq[i] * wt) / det;
            float shift = (wqq[i] * wt - wq[i] * wqt[i]) / det; // t ≈ scale·q + shift
            if (shift > 0) { // mins are not negative
                shift = 0;
                scale = wqt[i] / wqq[i];
            }
            const float loss = wtt + scale * scale * wqq[i] + shift * shift * w + 2 * scale * shift * wq[i] - 2 * scale * wqt[i] - 2 * shift * wt;
            if (loss < best_loss && scale > 0) {
                best_loss = loss;
                best      = { scale, -shift };
            }
        }
    }
    return best;
}
