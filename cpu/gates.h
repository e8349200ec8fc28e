// The gates of a chunk's steps: one decay for the whole state.
#pragma once

#include "rows.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The gates of a chunk's steps: one decay for the whole state (`keep`), and the factor of keys (`write`). Steps beyond
// the last keep all and write nothing.
template <class real> struct Gates {
    real keep[CHUNK] __attribute__((aligned(64))), write[CHUNK] __attribute__((aligned(64)));

    void load(const RuleCall& p, index_t b, index_t t, index_t h, index_t rows) {
        for (index_t i = 0; i < CHUNK; ++i) {
            keep[i] = write[i] = i < rows ? load_one<real>(p.log_gate, place(p.log_gate, b, t + i, h)) : real(0);
        }
        exponentiate(keep, CHUNK);
        p.complement ? exponentiate_to_one(write, CHUNK) : fill(write, real(1), CHUNK);
    }

    // k *= write
    void apply(real* k, index_t rows, index_t ld) const {
        for (index_t i = 0; i < rows; ++i) scale(k + i * ld, k + i * ld, write[i], ld);
    }

    // `dk` comes as the gradient of the multiplied keys and becomes that of `k`; d_log lacks the part that passes
    // through these.
    void store_gradient(const RuleCall& p, index_t b, index_t t, index_t h, index_t rows, real* d_log, real* dk,
                        const real* k, index_t ld) const {
        for (index_t i = 0; i < rows; ++i) {
            if (p.complement) {
                // k (1 - g): d(1 - g) / d log g = -g.
                d_log[i] -= keep[i] * dot(dk + i * ld, k + i * ld, ld);
                scale(dk + i * ld, dk + i * ld, write[i], ld);
            }
            store_one(p.d_log_gate, place(p.d_log_gate, b, t + i, h), d_log[i]);
        }
    }
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
