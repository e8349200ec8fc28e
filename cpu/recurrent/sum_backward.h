// The gradients of the sum rule where states are small. Nothing decays, so tiles (tiles.h) go through a whole interval:
// the state forwards, which makes dq, and its gradient backwards.
#pragma once

#include "../intervals.h"
#include "tiles.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The arithmetic of one interval, of up to `length` steps, of one head.
template <class real> class SumInterval {
public:
    SumInterval(const RuleCall& p, Scratch<real>& scratch, index_t length)
        : K(p.key_dim), V(p.columns), Kp(padded(K)), Vs(state_row<real>(V)), few_(K <= FEW),
          queries_(scratch, length, p.q, K, few_ ? FEW : ROW), keys_(scratch, length, p.k, K, few_ ? FEW : ROW),
          values_(scratch, length, p.v, V), d_out_(scratch, length, p.d_out, V),
          d_queries_(scratch, length, p.dq, K, few_ ? FEW : ROW), d_keys_(scratch, length, p.dk, K, few_ ? FEW : ROW),
          d_values_(scratch, length, p.dv, V) {
        in_lanes = scratch.take(few_ ? lanes_of_few<real>(length) : 0);
    }

    // All gradients of `rows` steps from t on. `d_state`, that of the state after them, becomes that of the one before.
    // `state_t` and `d_state_t` are the same transposed; all but `d_state` and `d_state_t` are used up.
    void backward(index_t b, index_t t, index_t h, index_t rows, real* state, real* state_t, real* d_state,
                  real* d_state_t, const Next&) {
        const Side<real> keys{keys_.read(b, t, h, rows, -1), queries_.read(b, t, h, rows, -1), {}, {}};
        const Side<real> values{values_.read(b, t, h, rows, -1), d_out_.read(b, t, h, rows, -1), {}, {}};
        const Steps<real> dq = d_queries_.at(b, t, h), dk = d_keys_.at(b, t, h), dv = d_values_.at(b, t, h);
        const Span all{0, rows};
        if (few_) {
            for_few<real>(vectors<real>(V), [&](auto width, auto into, index_t m) {
                forward_few<decltype(width)::value, false, decltype(into)::value>(all, state, Vs, keys, values, m,
                                                                                  in_lanes, none);
            });
            sum_few(dq, in_lanes, rows, K);
            for_few<real>(vectors<real>(V), [&](auto width, auto into, index_t m) {
                backward_few<decltype(width)::value, false, false, decltype(into)::value>(
                    all, d_state, Vs, keys, values, m, dv, Steps<real>(), in_lanes, none, none);
            });
            sum_few(dk, in_lanes, rows, K);
        } else {
            for_tiles<real>(V, vectors<real>(K), [&](auto tile, auto into, index_t e, index_t m) {
                forward_tile<decltype(tile)::value, false, decltype(into)::value, false>(
                    all, state_t + e * Kp + m, state_t + e * Kp + m, Kp, values, keys, e, m, dq, none);
            });
            back(V, vectors<real>(K), values, keys, d_state_t, Kp, all, dk);
            back(K, vectors<real>(V), keys, values, d_state, Vs, all, dv);
        }
        d_queries_.write(b, t, h, rows);
        d_keys_.write(b, t, h, rows);
        d_values_.write(b, t, h, rows);
    }

private:
    void back(index_t rows, index_t lanes, const Side<real>& row_side, const Side<real>& lane_side, real* d_state,
              index_t ld, Span all, Steps<real> d_write) {
        for_tiles<real>(rows, lanes, [&](auto tile, auto into, index_t e, index_t m) {
            backward_tile<decltype(tile)::value, false, false, false, decltype(into)::value, Out::none>(
                all, d_state + e * ld + m, ld, row_side, lane_side, e, m, d_write, {}, {}, none);
        });
    }

    const index_t K, V, Kp, Vs;
    const bool few_;
    real* const none = nullptr;  // decays, which there are not
    const Access<real> queries_, keys_, values_, d_out_, d_queries_, d_keys_, d_values_;
    real* in_lanes;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
