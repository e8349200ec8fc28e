// The gradients of the gated and of the decay rule where states are small: chunk by chunk through an interval, and span
// by span (rescaled_spans.h) through a chunk. The decayed S_{t-1} is computed again, forwards through the chunk, and
// kept in a buffer that a core's first cache holds.
#pragma once

#include "../intervals.h"
#include "tiles.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The arithmetic of one interval, of up to `length` steps, of one head (sweep.h).
template <class real> class DecayedInterval {
public:
    DecayedInterval(const RuleCall& p, Scratch<real>& scratch, index_t length)
        : p_(p), K(p.key_dim), V(p.columns), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)), few_(K <= FEW),
          fetches_(few_ ? 2 * parts(V, WIDTH * W) : (2 * parts(V, TILE) * parts(K, W) + parts(K, TILE) * parts(V, W))),
          decays(p, scratch, length / CHUNK), key_unit_(decays.of_keys ? 0
                                                        : few_         ? FEW
                                                                       : ROW),
          value_unit_(decays.of_values ? 0 : ROW), queries_(scratch, CHUNK, p.q, K, key_unit_),
          keys_(scratch, length, p.k, K, key_unit_), values_(scratch, length, p.v, V, value_unit_),
          d_out_(scratch, CHUNK, p.d_out, V, value_unit_), d_queries_(scratch, CHUNK, p.dq, K, key_unit_),
          d_keys_(scratch, CHUNK, p.dk, K, key_unit_), d_values_(scratch, CHUNK, p.dv, V, value_unit_),
          k_slots(keys_.copies), v_slots(values_.copies) {
        df = {scratch.take(decays.of_keys ? CHUNK * Kp : 0), Kp};
        dz = {scratch.take(decays.of_values ? CHUNK * Vp : 0), Vp};
        history = scratch.take(CHUNK * TILE * Vector<real>::lanes);
        chunk_states = scratch.take((length / CHUNK - 1) * size());
        in_lanes = scratch.take(few_ ? 3 * LANES : 0);
    }

    // As that of SumInterval.
    void backward(index_t b, index_t t, index_t h, index_t rows, real* state, real* state_t, real* d_state,
                  real* d_state_t, const Next& next) {
        const index_t last = (rows - 1) / CHUNK;
        for (index_t slot = 0; slot <= last; ++slot) {
            open(b, t + slot * CHUNK, h, minimum(CHUNK, rows - slot * CHUNK), slot);
            if (slot < last) carry(start(few_ ? state : state_t, slot), start(nullptr, slot + 1));
        }
        for (index_t slot = last; slot >= 0; --slot) {
            reopen(b, t + slot * CHUNK, h, minimum(CHUNK, rows - slot * CHUNK), slot);
            look_ahead(b, next, slot, last);
            differentiate(start(few_ ? state : state_t, slot), d_state, d_state_t);
        }
    }

private:
    static constexpr int W = Vector<real>::lanes;
    static constexpr index_t LANES = lanes_of_few<real>(CHUNK);
    static index_t parts(index_t n, index_t size) { return (n + size - 1) / size; }

    // Prefetches beside chunk `slot` as many of the next steps, the last ones first, and by the end all of them.
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
    real* start(real* first, index_t slot) { return slot == 0 ? first : chunk_states + (slot - 1) * size(); }

    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        find(b, t, h, rows, slot);
        decays.open(b, t, h, rows, slot, 0);
        keys_.read(b, t, h, rows, 0, decays.f.over());
        values_.read(b, t, h, rows, 0, decays.z.over());
        if (p_.complement) decays.gates.apply(keys_.copies, rows, Kp);
        set_sides();
    }

    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        find(b, t, h, rows, slot);
        decays.reopen(b, t, h, rows, slot);
        set_sides();
        key_side.read = queries_.read(b, t, h, rows, 0, decays.f.times());
        value_side.read = d_out_.read(b, t, h, rows, 0, decays.z.times());
        dq = d_queries_.at(b, t, h);
        dk = d_keys_.at(b, t, h);
        dv = d_values_.at(b, t, h);
    }

    void find(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows;
        keys_.copies = k_slots + slot * keys_.room(CHUNK);
        values_.copies = v_slots + slot * values_.room(CHUNK);
    }

    void set_sides() {
        key_side = {keys_.at(b_, t_, h_), {}, decays.f.entering(), decays.f.leaving()};
        value_side = {values_.at(b_, t_, h_), {}, decays.z.entering(), decays.z.leaving()};
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

    void differentiate(real* start, real* d_state, real* d_state_t) {
        // No more columns are set than hold keys: in others, which gates scale, NaN of the head before might stay.
        if (p_.complement) fill(d_keys_.copies, real(0), CHUNK * Kp);
        if (few_) {
            !decays.of_values ? all_of_few<true, false>(start, d_state)
            : decays.of_keys  ? all_of_few<true, true>(start, d_state)
                              : all_of_few<false, true>(start, d_state);
        } else {
            !decays.of_values ? transposed_passes<false, true>(start, d_state_t)
            : decays.of_keys  ? transposed_passes<true, true>(start, d_state_t)
                              : transposed_passes<true, false>(start, d_state_t);
            straight_pass(d_state);
        }
        const real* over = decays.f.over();
        if (decays.gated) {
            multiply(d_keys_.copies, d_keys_.copies, over, rows_ * Kp);
            store_gate_gradient();
            over = nullptr;
        } else if (decays.of_keys) {
            store_steps(p_.d_log_key_decay, b_, t_, h_, df.first, rows_, K, 0);
        }
        if (decays.of_values) store_steps(p_.d_log_value_decay, b_, t_, h_, dz.first, rows_, V, 0);
        d_queries_.write(b_, t_, h_, rows_, decays.f.times());
        d_keys_.write(b_, t_, h_, rows_, over);
        d_values_.write(b_, t_, h_, rows_, decays.z.over());
    }

    // Values in the rows, keys in the lanes: dq, the output of reading with dy, dk, and the gradients of all decays.
    template <bool row_logs, bool lane_logs> void transposed_passes(real* start, real* d_state_t) {
        for_tiles<real>(V, vectors<real>(K), [&](auto tile, auto into, index_t e, index_t m) {
            constexpr int R = decltype(tile)::value;
            constexpr Out O = decltype(into)::value;
            real *place = start + e * Kp + m, *d_place = d_state_t + e * Kp + m;
            ahead.prefetch_some();
            for (index_t i = 0; i < decays.count; ++i) {
                forward_tile<R, true, O, true>(decays.spans[i], place, place, Kp, value_side, key_side, e, m, dq,
                                               history);
            }
            ahead.prefetch_some();
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
            ahead.prefetch_some();
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
            ahead.prefetch_some();
            for (index_t i = 0; i < decays.count; ++i) {
                forward_few<N, true, O>(decays.spans[i], start, Vs, key_side, value_side, m, dq_lanes, history);
            }
            ahead.prefetch_some();
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
        if (p_.complement) load_steps(queries_.copies, p_.k, b_, t_, h_, rows_, K, 0);  // the keys as they were given
        decays.gates.store_gradient(p_, b_, t_, h_, rows_, d_log, d_keys_.copies, queries_.copies, Kp);
    }

    const RuleCall& p_;
    const index_t K, V, Kp, Vp, Vs;
    const bool few_;
    const index_t fetches_;  // calls of Prefetcher::some for a chunk, or fewer
    Decays<real> decays;
    const index_t key_unit_, value_unit_;  // keys are in the lanes of vectors where there are more than a few
    Access<real> queries_, keys_, values_, d_out_, d_queries_, d_keys_, d_values_;
    Prefetcher ahead;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0;
    Side<real> key_side, value_side;
    Steps<real> dq, dk, dv, df, dz;
    real *k_slots, *v_slots, *history, *chunk_states, *in_lanes;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
