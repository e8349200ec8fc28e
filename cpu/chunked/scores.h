// A chunk's scores: their causal part, and the decay that the whole state shares, which multiplies them.
#pragma once

#include "../gates.h"
#include "../matrix.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The lower triangle of x (CHUNK, CHUNK), with the diagonal (`kept` 0) or without (`kept` -1). The rest becomes 0 by
// selection, not by a product with 0: it may be infinite.
template <class real> inline void lower_part(real* x, index_t kept) {
    using index = typename Index<real>::type;
    constexpr int W = Vector<real>::lanes;
    for (int t = 0; t < CHUNK; ++t) {
        for (int j = 0; j < CHUNK; j += W) {
            const index lost = lane_numbers<real>() + j > index{} + (t + static_cast<int>(kept));
            store(x + t * CHUNK + j, lost ? vec<real>{} : load(x + t * CHUNK + j));
        }
    }
}

enum class Decay { none, shared, separate };

template <class real> struct SharedDecay {
    Gates<real> gates;
    real prefix[CHUNK], suffix[CHUNK];
    real between[CHUNK * CHUNK] __attribute__((aligned(64)));

    void load(const RuleCall& p, index_t b, index_t t, index_t h, index_t rows) {
        gates.load(p, b, t, h, rows);
        const real* gate = gates.keep;
        real product = 1;
        for (index_t i = 0; i < CHUNK; ++i) prefix[i] = product *= gate[i];
        product = 1;
        for (index_t i = CHUNK - 1; i >= 0; --i) {
            suffix[i] = product;
            product *= gate[i];
        }
        // Each row is the one before times a gate, with a 1 on the diagonal and still nothing after it.
        constexpr int W = Vector<real>::lanes;
        for (int j = 0; j < CHUNK; j += W) {
            vec<real> row{};
            for (int i = 0; i < CHUNK; ++i) {
                row = lane_numbers<real>() + j == typename Index<real>::type{} + i ? vec<real>{} + 1 : row * gate[i];
                store(between + i * CHUNK + j, row);
            }
        }
    }

    // Rows decayed from the chunk's start, or to its end.
    static void scale_rows(real* scaled, const real* rows, const real* factors, index_t ld) {
        for (index_t i = 0; i < CHUNK; ++i) scale(scaled + i * ld, rows + i * ld, factors[i], ld);
    }

    // d_rows and d_log from the gradient of `scaled`, rows decayed from the chunk's start.
    void add_readers_gradient(real* d_rows, real* d_log, const real* gradient, const real* scaled, index_t rows,
                              index_t ld) const {
        real total = 0;
        for (index_t i = rows - 1; i >= 0; --i) {
            scale_add(d_rows + i * ld, gradient + i * ld, prefix[i], ld);
            d_log[i] += total += dot(scaled + i * ld, gradient + i * ld, ld);
        }
    }

    // The same of keys decayed to the chunk's end: d_log of the steps after each.
    void add_writers_gradient(real* dk, real* d_log, const real* gradient, const real* scaled, index_t rows,
                              index_t ld) const {
        real total = 0;
        for (index_t i = 0; i < rows; ++i) {
            scale_add(dk + i * ld, gradient + i * ld, suffix[i], ld);
            d_log[i] += total;
            total += dot(scaled + i * ld, gradient + i * ld, ld);
        }
    }

    // The product D <S_0, dS> passes all of the chunk's gates.
    void add_gradient_of_passing(real* d_log, const real* state, const real* d_state, index_t rows, index_t n) const {
        const real total = prefix[CHUNK - 1] * dot(state, d_state, n);
        for (index_t i = 0; i < rows; ++i) d_log[i] += total;
    }

    // d_log[u] += sum over s < u <= t of scores * d_scores: `scores` is masked and decayed, `d_scores` is not yet.
    static void add_gradient_within_chunk(real* d_log, const real* scores, const real* d_scores, index_t rows) {
        real column[CHUNK] = {};  // over the rows from t on: sums of scores * d_scores over s < u, for every u
        for (index_t t = rows - 1; t > 0; --t) {
            real row = 0;
            for (index_t u = 1; u <= t; ++u) {
                row += scores[t * CHUNK + u - 1] * d_scores[t * CHUNK + u - 1];
                column[u] += row;
            }
        }
        for (index_t u = 1; u < rows; ++u) d_log[u] += column[u];
    }
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
