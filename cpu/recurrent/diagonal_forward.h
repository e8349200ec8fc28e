// Small states of the diagonal rules step by step, forwards: tiles of them (tiles.h) go through a whole chunk each,
// span by span (rescaled_spans.h) where something decays. This beats the products of matrices (diagonal.h,
// secondary_chunking.h), which would be mostly padding, copies and masks, and many short rows of the levels of decays.
#pragma once

#include "../intervals.h"
#include "tiles.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The forward arithmetic of one chunk of one head (sweep.h).
template <class real> class SteppedChunk {
public:
    SteppedChunk(const RuleCall& p, Scratch<real>& scratch, bool, index_t)
        : p_(p), K(p.key_dim), V(p.columns), Vs(state_row<real>(V)), decays(p, scratch, 1),
          queries_(scratch, CHUNK, p.q, K, decays.of_keys ? 0 : FEW),
          keys_(scratch, CHUNK, p.k, K, decays.of_keys ? 0 : FEW),
          values_(scratch, CHUNK, p.v, V, decays.of_values ? 0 : ROW),
          out_(scratch, CHUNK, p.out, V, decays.of_values ? 0 : ROW) {}

    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows;
        decays.open(b, t, h, rows, slot, 1);
    }

    void forward(real* state, bool) {
        const Steps<const real> q = queries_.read(b_, t_, h_, rows_, 1, decays.f.times()),
                                k = keys_.read(b_, t_, h_, rows_, 1, decays.f.over()),
                                v = values_.read(b_, t_, h_, rows_, 1, decays.z.over());
        const Steps<real> y = out_.at(b_, t_, h_);
        out_.prefetch_output(b_, t_, h_, rows_, 1);
        if (p_.complement) decays.gates.apply(keys_.copies, rows_, padded(K));
        key_side = {k, q, decays.f.entering(), decays.f.leaving()};
        value_side = {v, {}, decays.z.entering(), decays.z.leaving()};
        decays.of_keys || decays.of_values ? pass<true>(state, y) : pass<false>(state, y);
        out_.write(b_, t_, h_, rows_, decays.z.times());
    }

private:
    template <bool decay> void pass(real* state, Steps<real> y) {
        for_tiles<real>(K, vectors<real>(V), [&](auto tile, auto into, index_t e, index_t m) {
            for (index_t i = 0; i < decays.count; ++i) {
                real* place = state + e * Vs + m;
                forward_tile<decltype(tile)::value, decay, decltype(into)::value, false>(
                    decays.spans[i], place, place, Vs, key_side, value_side, e, m, y, none);
            }
        });
    }

    const RuleCall& p_;
    const index_t K, V, Vs;
    real* const none = nullptr;  // a history
    Decays<real> decays;
    const Access<real> queries_, keys_, values_, out_;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0;
    Side<real> key_side, value_side;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
