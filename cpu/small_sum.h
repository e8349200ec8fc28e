// The gradients of the sum rule where states are small. Nothing decays, so tiles (tiles.h) take a state, or its gradient,
// through a whole interval each; states are carried forwards once, in the pass that also makes dq.
#pragma once

#include "tiles.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// Steps that are taken at once: copies of them, where there are any, stay in a core's caches.
constexpr index_t PIECE = 64;

template <class real> class SmallSum {
   public:
    SmallSum(const Problem& p, Scratch<real>& scratch)
        : p_(p), K(p.keys), V(p.values), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)), few_(K <= FEW),
          queries_(p.q, K, few_ ? FEW : ROW), keys_(p.k, K, few_ ? FEW : ROW), values_(p.v, V), d_out_(p.d_out, V),
          d_queries_(p.dq, K, few_ ? FEW : ROW), d_keys_(p.dk, K, few_ ? FEW : ROW), d_values_(p.dv, V) {
        q_copies = scratch.take(queries_.room(PIECE));
        k_copies = scratch.take(keys_.room(PIECE));
        v_copies = scratch.take(values_.room(PIECE));
        y_copies = scratch.take(d_out_.room(PIECE));
        dk_copies = scratch.take(d_keys_.room(PIECE));
        dv_copies = scratch.take(d_values_.room(PIECE));
        dq_copies = scratch.take(d_queries_.room(PIECE));
        in_lanes = scratch.take(few_ ? lanes_of_few<real>(PIECE) : 0);
    }

    // A state (K, Vs) as it is carried here: transposed, but for few keys.
    index_t size() const { return few_ ? Kp * Vs : Vp * Kp; }
    void take(real* carried, const real* state) const {
        few_ ? copy(carried, state, Kp * Vs) : transpose(carried, Kp, state, Vs, Kp, Vp);
    }

    // dq of `rows` steps from t on; `carried`, the state before them, becomes the one after them.
    void forward(index_t b, index_t t, index_t h, index_t rows, real* carried) {
        const Side<real> keys{keys_.read(k_copies, b, t, h, rows, 1), {}, {}};
        const Side<real> values{values_.read(v_copies, b, t, h, rows, 1), d_out_.read(y_copies, b, t, h, rows, 1), {}};
        const Steps<real> dq = d_queries_.at(dq_copies, b, t, h);
        if (few_) {
            for_few<real>(Vp, [&](auto width, auto into, index_t m) {
                forward_few<decltype(width)::value, false, false, decltype(into)::value>(rows, carried, Vs, keys,
                                                                                         values, m, in_lanes, carried);
            });
            sum_few(dq, in_lanes, rows, K);
        } else {
            for_tiles<real>(V, Kp, [&](auto tile, auto into, index_t e, index_t m) {
                forward_tile<decltype(tile)::value, false, false, decltype(into)::value, false>(
                    rows, carried + e * Kp + m, Kp, values, keys, e, m, dq, carried);
            });
        }
        d_queries_.write(dq_copies, b, t, h, rows);
    }

    // dk and dv of `rows` steps from t on; `d_state` and the same `carried`, gradients of the state after them, become
    // those of the one before. Few keys take the former alone.
    void backward(index_t b, index_t t, index_t h, index_t rows, real* d_state, real* carried) {
        const Side<real> keys{keys_.read(k_copies, b, t, h, rows, -1), queries_.read(q_copies, b, t, h, rows, -1), {}};
        const Side<real> values{values_.read(v_copies, b, t, h, rows, -1),
                                d_out_.read(y_copies, b, t, h, rows, -1), {}};
        const Steps<real> dk = d_keys_.at(dk_copies, b, t, h), dv = d_values_.at(dv_copies, b, t, h);
        if (few_) {
            for_few<real>(Vp, [&](auto width, auto into, index_t m) {
                backward_few<decltype(width)::value, false, false, decltype(into)::value>(
                    rows, d_state, Vs, keys, values, m, dv, Steps<real>(), in_lanes, none, none);
            });
            sum_few(dk, in_lanes, rows, K);
        } else {
            back(K, Vp, keys, values, d_state, Vs, rows, dv);
            back(V, Kp, values, keys, carried, Kp, rows, dk);
        }
        d_keys_.write(dk_copies, b, t, h, rows);
        d_values_.write(dv_copies, b, t, h, rows);
    }

   private:
    void back(index_t rows, index_t lanes, const Side<real>& row_side, const Side<real>& lane_side, real* d_state,
              index_t ld, index_t steps, Steps<real> d_write) {
        for_tiles<real>(rows, lanes, [&](auto tile, auto into, index_t e, index_t m) {
            backward_tile<decltype(tile)::value, false, false, false, false, decltype(into)::value, Out::none>(
                steps, d_state + e * ld + m, ld, row_side, lane_side, e, m, d_write, {}, {}, none);
        });
    }

    const Problem& p_;
    const index_t K, V, Kp, Vp, Vs;
    const bool few_;
    real* const none = nullptr;  // decays, which there are not
    const Access<real> queries_, keys_, values_, d_out_, d_queries_, d_keys_, d_values_;
    real *q_copies, *k_copies, *v_copies, *y_copies, *dq_copies, *dk_copies, *dv_copies, *in_lanes;
};

template <class real> void march_small_sum_backward(const Problem& p, index_t begin, index_t end) {
    const index_t size = padded(p.keys) * state_row<real>(p.values);
    const Intervals intervals(p);
    Scratch<real> scratch;
    scratch.take((2 * p.group + 2) * size);
    { SmallSum<real> counted(p, scratch); }
    scratch.allocate();
    real* state = scratch.take((2 * p.group + 2) * size);
    real *carried = state + size, *d_states = carried + size;
    SmallSum<real> sum(p, scratch);
    for (index_t number = begin; number < end; ++number) {
        const Task task(p, number);
        const index_t b = task.batch;
        for (index_t h = task.first; h < task.last; ++h) {
            real* d_state = d_states + 2 * (h - task.first) * size;
            load_state(d_state, p, p.d_final_state, b * p.heads + h);
            sum.take(d_state + size, d_state);
        }
        for (index_t n = intervals.count - 1; n >= 0; --n) {
            const index_t first = intervals.begin(n), last = intervals.end(p, n);
            for (index_t h = task.first; h < task.last; ++h) {
                load_start(state, p, intervals, b, h, n);
                sum.take(carried, state);
                for (index_t t = first; t < last; t += PIECE) sum.forward(b, t, h, minimum(PIECE, last - t), carried);
                real* d_state = d_states + 2 * (h - task.first) * size;
                for (index_t t = first + (last - first - 1) / PIECE * PIECE; t >= first; t -= PIECE) {
                    sum.backward(b, t, h, minimum(PIECE, last - t), d_state, d_state + size);
                }
            }
        }
        for (index_t h = task.first; h < task.last && p.d_initial_state != nullptr; ++h) {
            store_state(p.d_initial_state, p, b * p.heads + h, d_states + 2 * (h - task.first) * size);
        }
    }
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
