// Small states of the diagonal rules step by step: tiles of them (tiles.h) go through a whole chunk each. A gate, one decay
// for the whole state, which comes here with few keys, is in every lane of a row of decays.
//
// For decays, where states are small, this beats halving chunks (levels.h): three multiplications an element and step
// against the many short rows of the levels. Without, and for few keys, it beats the products of matrices (diagonal.h),
// which would be mostly padding, copies and masks. The gradients of what nothing decays are in small_sum.h.
#pragma once

#include "tiles.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// The arithmetic of one chunk of one head. What decays leave of S_{t-1} is computed again, forwards through the chunk,
// and kept in a buffer that a core's first cache holds.
template <class real> class SteppedChunk {
   public:
    // With `slots` for as many chunks: what `open` reads into one stays there until it is opened again.
    SteppedChunk(const Problem& p, Scratch<real>& scratch, bool backward, index_t slots)
        : p_(p), K(p.keys), V(p.values), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)),
          gated_(p.log_gate.data != nullptr), f_(p.log_key_decay.data != nullptr),
          z_(p.log_value_decay.data != nullptr), Fp(gated_ ? (Kp > Vp ? Kp : Vp) : Kp),
          queries_(p.q, K, unit(backward)),
          keys_(p.complement ? Access<real>::copying(p.k, K) : Access<real>(p.k, K, unit(backward))),
          values_(p.v, V),
          read_out_(backward ? p.d_out : p.out, V),
          d_queries_(p.dq, K, unit(backward)),
          d_keys_(p.complement ? Access<real>::copying(p.dk, K) : Access<real>(p.dk, K, unit(backward))),
          d_values_(p.dv, V) {
        k_slots = scratch.take(slots * keys_.room(CHUNK));
        v_slots = scratch.take(slots * values_.room(CHUNK));
        f_slots = scratch.take(gated_ || f_ ? slots * CHUNK * Fp : 0);
        z_slots = scratch.take(z_ ? slots * CHUNK * Vp : 0);
        q_copies = scratch.take(p.complement ? CHUNK * Kp : queries_.room(CHUNK));
        y_copies = scratch.take(read_out_.room(CHUNK));
        if (!backward) return;
        dq_copies = scratch.take(d_queries_.room(CHUNK));
        dk_copies = scratch.take(d_keys_.room(CHUNK));
        dv_copies = scratch.take(d_values_.room(CHUNK));
        df = {scratch.take(gated_ || f_ ? CHUNK * Fp : 0), Fp};
        dz = {scratch.take(z_ ? CHUNK * Vp : 0), Vp};
        history = scratch.take(CHUNK * TILE * Vector<real>::lanes);
        again = scratch.take(K <= FEW ? Kp * Vs : 0);
        in_lanes = scratch.take(K <= FEW ? 3 * LANES : 0);
        turned = scratch.take(K <= FEW ? 0 : Vp * Kp);
        d_turned = scratch.take(K <= FEW ? 0 : Vp * Kp);
    }

    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        reopen(b, t, h, rows, slot);
        direction_ = 1;
        keys_.read(k_copies, b, t, h, rows, 1);
        values_.read(v_copies, b, t, h, rows, 1);
        if (gated_) {
            gates.load(p_, b, t, h, rows);
            for (index_t i = 0; i < rows; ++i) fill(f + i * Fp, gates.keep[i], Fp);
            for (index_t i = 0; p_.complement && i < rows; ++i) {
                scale(k_copies + i * Kp, k_copies + i * Kp, gates.write[i], Kp);
            }
        } else if (f_) {
            load_decays(f, p_.log_key_decay, K);
        }
        if (z_) load_decays(z, p_.log_value_decay, V);
    }

    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows, direction_ = -1;
        k_copies = k_slots + slot * keys_.room(CHUNK);
        v_copies = v_slots + slot * values_.room(CHUNK);
        f = f_slots + slot * CHUNK * Fp;
        z = z_slots + slot * CHUNK * Vp;
        key_side = {keys_.at(k_copies, b, t, h), {}, {f, Fp}};
        value_side = {values_.at(v_copies, b, t, h), {}, gated_ ? Steps<const real>{f, Fp} : Steps<const real>{z, Vp}};
    }

    void forward(real* state, bool) {
        key_side.read = queries_.read(q_copies, b_, t_, h_, rows_, direction_);
        pass<true>(state, read_out_.at(y_copies, b_, t_, h_));
        read_out_.write(y_copies, b_, t_, h_, rows_);
    }

    void carry(real* state) { pass<false>(state, {}); }

    void prepare(const real*, bool) {}

    void backward(const real* state, bool, real* d_state, bool) {
        key_side.read = queries_.read(q_copies, b_, t_, h_, rows_, direction_);
        value_side.read = read_out_.read(y_copies, b_, t_, h_, rows_, direction_);
        dq = d_queries_.at(dq_copies, b_, t_, h_);
        dk = d_keys_.at(dk_copies, b_, t_, h_);
        dv = d_values_.at(dv_copies, b_, t_, h_);
        // No more columns are set than hold keys: in others, which gates scale, NaN of the head before might stay.
        if (p_.complement) fill(dk_copies, real(0), CHUNK * Kp);
        K <= FEW ? differentiate_few(state, d_state) : differentiate(state, d_state);
        if (gated_) store_gate_gradient();
        d_queries_.write(dq_copies, b_, t_, h_, rows_);
        d_keys_.write(dk_copies, b_, t_, h_, rows_);
        d_values_.write(dv_copies, b_, t_, h_, rows_);
        if (f_) store_steps(p_.d_log_key_decay, b_, t_, h_, df.first, rows_, K);
        if (z_) store_steps(p_.d_log_value_decay, b_, t_, h_, dz.first, rows_, V);
    }

   private:
    // Keys are in the lanes of vectors where there are more than a few and they are differentiated.
    index_t unit(bool backward) const { return backward && K > FEW ? ROW : FEW; }
    static constexpr index_t LANES = lanes_of_few<real>(CHUNK);

    void differentiate(const real* state, real* d_state) {
        transpose(turned, Kp, state, Vs, Kp, Vp);
        transpose(d_turned, Kp, d_state, Vs, Kp, Vp);
        if (f_) {
            z_ ? turned_passes<true, true, true, true>() : turned_passes<false, true, false, true>();
            z_ ? straight_pass<true, true>(d_state) : straight_pass<true, false>(d_state);
        } else {
            turned_passes<true, false, true, false>();
            straight_pass<false, true>(d_state);
        }
    }

    // Values in the rows, keys in the lanes: dq, which is what dy reads, dk, and the gradients of all decays.
    template <bool row_decay, bool lane_decay, bool row_logs, bool lane_logs> void turned_passes() {
        for_tiles<real>(V, vectors<real>(K), [&](auto tile, auto into, index_t e, index_t m) {
            constexpr int R = decltype(tile)::value;
            constexpr Out O = decltype(into)::value;
            forward_tile<R, row_decay, lane_decay, O, true>(rows_, turned + e * Kp + m, Kp, value_side, key_side, e, m,
                                                            dq, history);
            // dz is that of rows here: the tiles of the first lanes set it.
            m == 0 ? backward_tile<R, row_decay, lane_decay, row_logs, lane_logs, O, Out::set>(
                         rows_, d_turned + e * Kp + m, Kp, value_side, key_side, e, m, dk, dz, df, history)
                   : backward_tile<R, row_decay, lane_decay, row_logs, lane_logs, O, Out::add>(
                         rows_, d_turned + e * Kp + m, Kp, value_side, key_side, e, m, dk, dz, df, history);
        });
    }

    // Keys in the rows, values in the lanes: dv.
    template <bool row_decay, bool lane_decay> void straight_pass(real* d_state) {
        for_tiles<real>(K, vectors<real>(V), [&](auto tile, auto into, index_t e, index_t m) {
            backward_tile<decltype(tile)::value, row_decay, lane_decay, false, false, decltype(into)::value, Out::none>(
                rows_, d_state + e * Vs + m, Vs, key_side, value_side, e, m, dv, {}, {}, history);
        });
    }

    void differentiate_few(const real* state, real* d_state) {
        copy(again, state, Kp * Vs);
        if (gated_) return differentiate_few_as<false, true>(d_state, df);
        if (f_ && z_) return differentiate_few_as<true, true>(d_state, dz);
        f_ ? differentiate_few_as<true, false>(d_state, {}) : differentiate_few_as<false, true>(d_state, dz);
    }

    template <bool row_decay, bool lane_decay> void differentiate_few_as(real* d_state, Steps<real> d_log) {
        real *dq_lanes = in_lanes, *dk_lanes = in_lanes + LANES, *df_lanes = in_lanes + 2 * LANES;
        for_few<real>(Vp, [&](auto width, auto into, index_t m) {
            constexpr int N = decltype(width)::value;
            constexpr Out O = decltype(into)::value;
            forward_few<N, row_decay, lane_decay, O>(rows_, again, Vs, key_side, value_side, m, dq_lanes, history);
            backward_few<N, row_decay, lane_decay, O>(rows_, d_state, Vs, key_side, value_side, m, dv, d_log, dk_lanes,
                                                      df_lanes, history);
        });
        sum_few(dq, dq_lanes, rows_, K);
        sum_few(dk, dk_lanes, rows_, K);
        if (row_decay) sum_few(df, df_lanes, rows_, K);
    }

    // Turns df into the gate's gradient, and dk from that of the multiplied keys into that of the keys.
    void store_gate_gradient() {
        real d_log[CHUNK];
        for (index_t i = 0; i < rows_; ++i) {
            d_log[i] = 0;
            for (index_t e = 0; e < V; ++e) d_log[i] += df.at(i)[e];
        }
        if (p_.complement) load_steps(q_copies, p_.k, b_, t_, h_, rows_, K, 0);  // the keys as they were given
        gates.load(p_, b_, t_, h_, rows_);
        gates.store_gradient(p_, b_, t_, h_, rows_, d_log, dk_copies, q_copies, Kp);
    }

    void load_decays(real* decays, const Sequence& logs, index_t n) {
        load_steps(decays, logs, b_, t_, h_, rows_, n, 1);
        exponentiate(decays, rows_ * padded(n));
    }

    // The state through the chunk, with or without its output.
    template <bool reads> void pass(real* state, Steps<real> out) {
        if (gated_) return pass_as<reads, false, true>(state, out);
        if (f_ && z_) return pass_as<reads, true, true>(state, out);
        if (f_) return pass_as<reads, true, false>(state, out);
        z_ ? pass_as<reads, false, true>(state, out) : pass_as<reads, false, false>(state, out);
    }

    template <bool reads, bool row_decay, bool lane_decay> void pass_as(real* state, Steps<real> out) {
        for_tiles<real>(K, vectors<real>(V), [&](auto tile, auto into, index_t e, index_t m) {
            constexpr Out O = reads ? decltype(into)::value : Out::none;
            forward_tile<decltype(tile)::value, row_decay, lane_decay, O, false>(
                rows_, state + e * Vs + m, Vs, key_side, value_side, e, m, out, history);
        });
    }

    const Problem& p_;
    const index_t K, V, Kp, Vp, Vs;
    const bool gated_, f_, z_;
    const index_t Fp;
    const Access<real> queries_, keys_, values_, read_out_, d_queries_, d_keys_, d_values_;
    Gates<real> gates;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0, direction_ = 1;
    Side<real> key_side, value_side;
    Steps<real> dq, dk, dv, df, dz;
    real *k_slots, *v_slots, *f_slots, *z_slots, *q_copies, *y_copies, *k_copies = nullptr, *v_copies = nullptr,
         *f = nullptr, *z = nullptr;
    real *dq_copies = nullptr, *dk_copies = nullptr, *dv_copies = nullptr, *turned = nullptr, *d_turned = nullptr,
         *again = nullptr, *history = nullptr, *in_lanes = nullptr;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
