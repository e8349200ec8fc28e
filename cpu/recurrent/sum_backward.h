// The gradients of the sum rule where states are small. Nothing decays, so tiles (tiles.h) go through a whole interval:
// the state forwards, which makes dq, and its gradient backwards.
#pragma once

#include "../intervals.h"
#include "tiles.h"

namespace fairseq_fastweights {
namespace FAST_WEIGHTS_ISA {

// The arithmetic of one interval, of up to `length` steps, of one head.
template <class real> class SumInterval {
public:
    SumInterval(const RuleCall& p, Scratch<real>& scratch, index_t length)
        : K(p.key_dim), V(p.columns), Kp(padded(K)), Vs(state_row<real>(V)), few_(K <= FEW),
          queries_(p.q, K, few_ ? FEW : ROW), keys_(p.k, K, few_ ? FEW : ROW), values_(p.v, V), d_out_(p.d_out, V),
          d_queries_(p.dq, K, few_ ? FEW : ROW), d_keys_(p.dk, K, few_ ? FEW : ROW), d_values_(p.dv, V) {
        q_copies = scratch.take(queries_.room(length));
        k_copies = scratch.take(keys_.room(length));
        v_copies = scratch.take(values_.room(length));
        y_copies = scratch.take(d_out_.room(length));
        dq_copies = scratch.take(d_queries_.room(length));
        dk_copies = scratch.take(d_keys_.room(length));
        dv_copies = scratch.take(d_values_.room(length));
        in_lanes = scratch.take(few_ ? lanes_of_few<real>(length) : 0);
    }

    // All gradients of `rows` steps from t on. `d_state`, that of the state after them, becomes that of the one before.
    // `turned` and `d_turned` are the same transposed; all but `d_state` and `d_turned` are used up.
    void backward(index_t b, index_t t, index_t h, index_t rows, real* state, real* turned, real* d_state,
                  real* d_turned, const Next&) {
        const Side<real> keys{
            keys_.read(k_copies, b, t, h, rows, -1), queries_.read(q_copies, b, t, h, rows, -1), {}, {}};
        const Side<real> values{
            values_.read(v_copies, b, t, h, rows, -1), d_out_.read(y_copies, b, t, h, rows, -1), {}, {}};
        const Steps<real> dq = d_queries_.at(dq_copies, b, t, h), dk = d_keys_.at(dk_copies, b, t, h),
                          dv = d_values_.at(dv_copies, b, t, h);
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
                    all, turned + e * Kp + m, turned + e * Kp + m, Kp, values, keys, e, m, dq, none);
            });
            back(V, vectors<real>(K), values, keys, d_turned, Kp, all, dk);
            back(K, vectors<real>(V), keys, values, d_state, Vs, all, dv);
        }
        d_queries_.write(dq_copies, b, t, h, rows);
        d_keys_.write(dk_copies, b, t, h, rows);
        d_values_.write(dv_copies, b, t, h, rows);
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
    real *q_copies, *k_copies, *v_copies, *y_copies, *dq_copies, *dk_copies, *dv_copies, *in_lanes;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fairseq_fastweights
