// The gradients of the gated and of the decay rule where states are small: chunk by chunk through an interval, and span by
// span (rescaled_spans.h) through a chunk. What decays leave of S_{t-1} is computed again, forwards through the chunk, and kept
// in a buffer that a core's first cache holds.
#pragma once

#include "../intervals.h"
#include "tiles.h"

namespace fairseq_fastweights {
namespace FAST_WEIGHTS_ISA {

// The arithmetic of one interval, of up to `length` steps, of one head (sweep.h).
template <class real> class DecayedInterval {
public:
    DecayedInterval(const RuleCall& p, Scratch<real>& scratch, index_t length)
        : p_(p), K(p.key_dim), V(p.columns), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)), few_(K <= FEW),
          fetches_(few_ ? 2 * parts(V, WIDTH * W) : (2 * parts(V, TILE) * parts(K, W) + parts(K, TILE) * parts(V, W))),
          decays(p, scratch, length / CHUNK), queries_(of_keys(p.q)), keys_(of_keys(p.k)), values_(of_values(p.v)),
          d_out_(of_values(p.d_out)), d_queries_(of_keys(p.dq)), d_keys_(of_keys(p.dk)), d_values_(of_values(p.dv)) {
        k_slots = scratch.take(keys_.room(length));
        v_slots = scratch.take(values_.room(length));
        q_copies = scratch.take(queries_.room(CHUNK));
        y_copies = scratch.take(d_out_.room(CHUNK));
        dq_copies = scratch.take(d_queries_.room(CHUNK));
        dk_copies = scratch.take(d_keys_.room(CHUNK));
        dv_copies = scratch.take(d_values_.room(CHUNK));
        df = {scratch.take(decays.of_keys ? CHUNK * Kp : 0), Kp};
        dz = {scratch.take(decays.of_values ? CHUNK * Vp : 0), Vp};
        history = scratch.take(CHUNK * TILE * Vector<real>::lanes);
        starts = scratch.take((length / CHUNK - 1) * size());
        in_lanes = scratch.take(few_ ? 3 * LANES : 0);
    }

    // As that of SumInterval.
    void backward(index_t b, index_t t, index_t h, index_t rows, real* state, real* turned, real* d_state,
                  real* d_turned, const Next& next) {
        const index_t last = (rows - 1) / CHUNK;
        for (index_t slot = 0; slot <= last; ++slot) {
            open(b, t + slot * CHUNK, h, minimum(CHUNK, rows - slot * CHUNK), slot);
            if (slot < last) carry(start(few_ ? state : turned, slot), start(nullptr, slot + 1));
        }
        for (index_t slot = last; slot >= 0; --slot) {
            reopen(b, t + slot * CHUNK, h, minimum(CHUNK, rows - slot * CHUNK), slot);
            look_ahead(b, next, slot, last);
            differentiate(start(few_ ? state : turned, slot), d_state, d_turned);
        }
    }

private:
    static constexpr int W = Vector<real>::lanes;
    static constexpr index_t LANES = lanes_of_few<real>(CHUNK);
    static index_t parts(index_t n, index_t size) { return (n + size - 1) / size; }

    // To be fetched beside chunk `slot`: as much of what comes next, its last steps first, and all of that in the end.
    void look_ahead(index_t b, const Next& next, index_t slot, index_t last) {
        const index_t begin = slot * CHUNK, end = slot == last ? next.rows : minimum(begin + CHUNK, next.rows);
        const index_t t = next.t + begin, h = next.h, rows = end - begin;
        ahead.clear();
        const Sequence* const by_keys[] = {&p_.q, &p_.k, &p_.log_key_decay, &p_.dq, &p_.dk, &p_.d_log_key_decay};
        const Sequence* const by_values[] = {&p_.v, &p_.d_out, &p_.log_value_decay, &p_.dv, &p_.d_log_value_decay};
        for (const Sequence* x : by_keys) ahead.add(*x, K, b, t, h, rows);
        for (const Sequence* x : by_values) ahead.add(*x, V, b, t, h, rows);
        ahead.divide(fetches_);
    }

    index_t size() const { return few_ ? Kp * Vs : Vp * Kp; }

    // The state before a chunk, transposed but for few keys.
    real* start(real* first, index_t slot) { return slot == 0 ? first : starts + (slot - 1) * size(); }

    // Keys are in the lanes of vectors where there are more than a few.
    Access<real> of_keys(const Sequence& x) const {
        return decays.of_keys ? Access<real>::copying(x, K) : Access<real>(x, K, few_ ? FEW : ROW);
    }
    Access<real> of_values(const Sequence& x) const {
        return decays.of_values ? Access<real>::copying(x, V) : Access<real>(x, V);
    }

    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        find(b, t, h, rows, slot);
        decays.open(b, t, h, rows, slot, 0);
        keys_.read(k_copies, b, t, h, rows, 0, decays.f.over());
        values_.read(v_copies, b, t, h, rows, 0, decays.z.over());
        if (p_.complement) decays.gates.apply(k_copies, rows, Kp);
        set_sides();
    }

    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        find(b, t, h, rows, slot);
        decays.reopen(b, t, h, rows, slot);
        set_sides();
        key_side.read = queries_.read(q_copies, b, t, h, rows, 0, decays.f.times());
        value_side.read = d_out_.read(y_copies, b, t, h, rows, 0, decays.z.times());
        dq = d_queries_.at(dq_copies, b, t, h);
        dk = d_keys_.at(dk_copies, b, t, h);
        dv = d_values_.at(dv_copies, b, t, h);
    }

    void find(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows;
        k_copies = k_slots + slot * keys_.room(CHUNK);
        v_copies = v_slots + slot * values_.room(CHUNK);
    }

    void set_sides() {
        key_side = {keys_.at(k_copies, b_, t_, h_), {}, decays.f.entering(), decays.f.leaving()};
        value_side = {values_.at(v_copies, b_, t_, h_), {}, decays.z.entering(), decays.z.leaving()};
    }

    void carry(const real* from, real* to) {
        const Side<real>& rows = few_ ? key_side : value_side;
        const Side<real>& lanes = few_ ? value_side : key_side;
        const index_t ld = few_ ? Vs : Kp;
        for_tiles<real>(few_ ? FEW : V, vectors<real>(few_ ? V : K), [&](auto tile, auto, index_t e, index_t m) {
            real* place = to + e * ld + m;
            for (index_t i = 0; i < decays.count; ++i) {
                forward_tile<decltype(tile)::value, true, Out::none, false>(
                    decays.spans[i], i == 0 ? from + e * ld + m : place, place, ld, rows, lanes, e, m, {}, history);
            }
        });
    }

    void differentiate(real* start, real* d_state, real* d_turned) {
        // No more columns are set than hold keys: in others, which gates scale, NaN of the head before might stay.
        if (p_.complement) fill(dk_copies, real(0), CHUNK * Kp);
        if (few_) {
            !decays.of_values ? all_of_few<true, false>(start, d_state)
            : decays.of_keys  ? all_of_few<true, true>(start, d_state)
                              : all_of_few<false, true>(start, d_state);
        } else {
            !decays.of_values ? turned_passes<false, true>(start, d_turned)
            : decays.of_keys  ? turned_passes<true, true>(start, d_turned)
                              : turned_passes<true, false>(start, d_turned);
            straight_pass(d_state);
        }
        const real* over = decays.f.over();
        if (decays.gated) {
            multiply(dk_copies, dk_copies, over, rows_ * Kp);
            store_gate_gradient();
            over = nullptr;
        } else if (decays.of_keys) {
            store_steps(p_.d_log_key_decay, b_, t_, h_, df.first, rows_, K, 0);
        }
        if (decays.of_values) store_steps(p_.d_log_value_decay, b_, t_, h_, dz.first, rows_, V, 0);
        d_queries_.write(dq_copies, b_, t_, h_, rows_, decays.f.times());
        d_keys_.write(dk_copies, b_, t_, h_, rows_, over);
        d_values_.write(dv_copies, b_, t_, h_, rows_, decays.z.over());
    }

    // Values in the rows, keys in the lanes: dq, which is what dy reads, dk, and the gradients of all decays.
    template <bool row_logs, bool lane_logs> void turned_passes(real* start, real* d_turned) {
        for_tiles<real>(V, vectors<real>(K), [&](auto tile, auto into, index_t e, index_t m) {
            constexpr int R = decltype(tile)::value;
            constexpr Out O = decltype(into)::value;
            real *place = start + e * Kp + m, *d_place = d_turned + e * Kp + m;
            ahead.some();
            for (index_t i = 0; i < decays.count; ++i) {
                forward_tile<R, true, O, true>(decays.spans[i], place, place, Kp, value_side, key_side, e, m, dq,
                                               history);
            }
            ahead.some();
            for (index_t i = decays.count - 1; i >= 0; --i) {
                // dz is that of rows here: the tiles of the first lanes set it.
                m == 0 ? backward_tile<R, true, row_logs, lane_logs, O, Out::set>(
                             decays.spans[i], d_place, Kp, value_side, key_side, e, m, dk, dz, df, history)
                       : backward_tile<R, true, row_logs, lane_logs, O, Out::add>(
                             decays.spans[i], d_place, Kp, value_side, key_side, e, m, dk, dz, df, history);
            }
        });
    }

    // Keys in the rows, values in the lanes: dv.
    void straight_pass(real* d_state) {
        for_tiles<real>(K, vectors<real>(V), [&](auto tile, auto into, index_t e, index_t m) {
            ahead.some();
            for (index_t i = decays.count - 1; i >= 0; --i) {
                backward_tile<decltype(tile)::value, true, false, false, decltype(into)::value, Out::none>(
                    decays.spans[i], d_state + e * Vs + m, Vs, key_side, value_side, e, m, dv, {}, {}, history);
            }
        });
    }

    template <bool row_logs, bool lane_logs> void all_of_few(real* start, real* d_state) {
        real *dq_lanes = in_lanes, *dk_lanes = in_lanes + LANES, *df_lanes = in_lanes + 2 * LANES;
        for_few<real>(vectors<real>(V), [&](auto width, auto into, index_t m) {
            constexpr int N = decltype(width)::value;
            constexpr Out O = decltype(into)::value;
            ahead.some();
            for (index_t i = 0; i < decays.count; ++i) {
                forward_few<N, true, O>(decays.spans[i], start, Vs, key_side, value_side, m, dq_lanes, history);
            }
            ahead.some();
            for (index_t i = decays.count - 1; i >= 0; --i) {
                backward_few<N, row_logs, lane_logs, O>(decays.spans[i], d_state, Vs, key_side, value_side, m, dv, dz,
                                                        dk_lanes, df_lanes, history);
            }
        });
        sum_few(dq, dq_lanes, rows_, K);
        sum_few(dk, dk_lanes, rows_, K);
        if (row_logs) sum_few(df, df_lanes, rows_, K);
    }

    // Turns df into the gate's gradient, and dk from that of the multiplied keys into that of the keys.
    void store_gate_gradient() {
        real d_log[CHUNK];
        for (index_t i = 0; i < rows_; ++i) {
            d_log[i] = 0;
            for (index_t e = 0; e < K; ++e) d_log[i] += df.at(i)[e];
        }
        if (p_.complement) load_steps(q_copies, p_.k, b_, t_, h_, rows_, K, 0);  // the keys as they were given
        decays.gates.store_gradient(p_, b_, t_, h_, rows_, d_log, dk_copies, q_copies, Kp);
    }

    const RuleCall& p_;
    const index_t K, V, Kp, Vp, Vs;
    const bool few_;
    const index_t fetches_;  // calls of Ahead::some for a chunk, or fewer
    Decays<real> decays;
    Ahead ahead;
    const Access<real> queries_, keys_, values_, d_out_, d_queries_, d_keys_, d_values_;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0;
    Side<real> key_side, value_side;
    Steps<real> dq, dk, dv, df, dz;
    real *k_slots, *v_slots, *q_copies, *y_copies, *dq_copies, *dk_copies, *dv_copies, *history, *starts, *in_lanes;
    real *k_copies = nullptr, *v_copies = nullptr;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fairseq_fastweights
