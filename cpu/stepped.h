// Small states step by step, in registers: S_t = (f_t z_t^T) * S_{t-1} + k_t v_t^T, y_t = S_t^T q_t, with or without decays
// of rows and columns. A gate, one decay for the whole state, is taken as that of each row where these are few.
//
// The elements of the state do not depend on one another, so a tile of it passes through a whole chunk on its own. For
// decays, where states are small, this beats halving chunks (levels.h): three multiplications an element and step against
// the many short rows of the levels; for few keys it beats the products of matrices (diagonal.h), which would be mostly
// padding. Products with everything in the other dimension are sums over the tile's rows; so the backward pass goes over
// the state twice, once with columns in the lanes of a vector (for v and z) and once, on transposed states, with rows (for
// q, k and f). Few keys would leave most of these lanes empty: their products are added up in the lanes of the columns
// instead, which are summed at the end. With G the gradient of S:
//
//     G_t = q_t dy_t^T + (f_{t+1} z_{t+1}^T) * G_{t+1}      dv_t = G_t^T k_t     dq_t = S_t dy_t     dk_t = G_t v_t
//     d log z_t = column sums of S_{t-1} * (f_t z_t^T) * G_t,    d log f_t = its row sums
//
// What decays leave of S_{t-1} is computed again, forwards through the chunk, and kept in a buffer that a core's first
// cache holds.
#pragma once

#include "chunk.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// Rows of a tile that fit into registers, and so few that the lanes of a vector are not for them.
constexpr int TILE = FAST_WEIGHTS_VECTOR_BYTES == 64 ? 16 : 8;
constexpr int FEW = 4;

// One side of a chunk: the rows of the state (keys), or its columns (values); by steps, `ld` numbers apart.
template <class real> struct Side {
    index_t ld;
    const real *write, *read, *decay;  // k, q, f; or v, dy, z; no decay: null
};

template <bool row_decay, bool lane_decay, class real>
FAST_WEIGHTS_INLINE vec<real> decayed(vec<real> x, real f, vec<real> z) {
    return row_decay && lane_decay ? x * (z * f) : row_decay ? x * f : lane_decay ? x * z : x;
}

// Takes a tile of R rows and one vector of lanes through the chunk. `out` += what is read; `history`: what decays left
// of S_{t-1}.
template <int R, bool row_decay, bool lane_decay, bool reads, bool keeps, class real>
FAST_WEIGHTS_INLINE void forward_tile(index_t steps, real* state, index_t ld, const Side<real>& rows,
                                      const Side<real>& lanes, index_t row, index_t lane, real* out, real* history) {
    constexpr int W = Vector<real>::lanes;
    vec<real> s[R];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) s[i] = load(state + i * ld);
    for (index_t t = 0; t < steps; ++t) {
        const real *k = rows.write + t * rows.ld + row, *q = rows.read + t * rows.ld + row;
        const real* f = row_decay ? rows.decay + t * rows.ld + row : nullptr;
        const vec<real> v = load(lanes.write + t * lanes.ld + lane);
        const vec<real> z = lane_decay ? load(lanes.decay + t * lanes.ld + lane) : vec<real>{};
        vec<real> y[2] = {reads ? load(out + t * lanes.ld) : vec<real>{}, vec<real>{}};
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            s[i] = decayed<row_decay, lane_decay>(s[i], row_decay ? f[i] : real(1), z);
            if (keeps) store(history + (t * R + i) * W, s[i]);
            s[i] += v * k[i];
            if (reads) y[i % 2] += s[i] * q[i];
        }
        if (reads) store(out + t * lanes.ld, y[0] + y[1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) store(state + i * ld, s[i]);
}

// Takes the gradient of a tile back through the chunk. `d_write` += dv (or dk), `d_log` += d log z (or f).
template <int R, bool row_decay, bool lane_decay, class real>
FAST_WEIGHTS_INLINE void backward_tile(index_t steps, real* d_state, index_t ld, const Side<real>& rows,
                                       const Side<real>& lanes, index_t row, index_t lane, real* d_write, real* d_log,
                                       const real* history) {
    constexpr int W = Vector<real>::lanes;
    vec<real> g[R];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) g[i] = load(d_state + i * ld);
    for (index_t t = steps - 1; t >= 0; --t) {
        const real *k = rows.write + t * rows.ld + row, *q = rows.read + t * rows.ld + row;
        const real* f = row_decay ? rows.decay + t * rows.ld + row : nullptr;
        const vec<real> dy = load(lanes.read + t * lanes.ld + lane);
        const vec<real> z = lane_decay ? load(lanes.decay + t * lanes.ld + lane) : vec<real>{};
        vec<real> dv[2] = {load(d_write + t * lanes.ld), vec<real>{}};
        vec<real> dz[2] = {lane_decay ? load(d_log + t * lanes.ld) : vec<real>{}, vec<real>{}};
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            g[i] += dy * q[i];
            dv[i % 2] += g[i] * k[i];
            if (lane_decay) dz[i % 2] += g[i] * load(history + (t * R + i) * W);
            g[i] = decayed<row_decay, lane_decay>(g[i], row_decay ? f[i] : real(1), z);
        }
        store(d_write + t * lanes.ld, dv[0] + dv[1]);
        if (lane_decay) store(d_log + t * lanes.ld, dz[0] + dz[1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) store(d_state + i * ld, g[i]);
}

// `sums` of FEW rows by step, in the lanes of a vector each: how a tile adds to them.
template <class real> FAST_WEIGHTS_INLINE void add_in_lanes(real* sums, index_t t, int row, vec<real> x) {
    real* place = sums + (t * FEW + row) * Vector<real>::lanes;
    store(place, load(place) + x);
}

// A tile of FEW rows and one vector of lanes forwards: `dq` += what dy reads, in lanes. `history` as above.
template <bool row_decay, bool lane_decay, class real>
FAST_WEIGHTS_INLINE void forward_few(index_t steps, const real* state, index_t ld, const Side<real>& rows,
                                     const Side<real>& lanes, index_t lane, real* dq, real* history) {
    constexpr int W = Vector<real>::lanes;
    vec<real> s[FEW];
#pragma GCC unroll 4
    for (int i = 0; i < FEW; ++i) s[i] = load(state + i * ld);
    for (index_t t = 0; t < steps; ++t) {
        const real* k = rows.write + t * rows.ld;
        const real* f = row_decay ? rows.decay + t * rows.ld : nullptr;
        const vec<real> v = load(lanes.write + t * lanes.ld + lane), dy = load(lanes.read + t * lanes.ld + lane);
        const vec<real> z = lane_decay ? load(lanes.decay + t * lanes.ld + lane) : vec<real>{};
#pragma GCC unroll 4
        for (int i = 0; i < FEW; ++i) {
            s[i] = decayed<row_decay, lane_decay>(s[i], row_decay ? f[i] : real(1), z);
            if (row_decay || lane_decay) store(history + (t * FEW + i) * W, s[i]);
            s[i] += v * k[i];
            add_in_lanes(dq, t, i, s[i] * dy);
        }
    }
}

// And its gradient backwards: dv, d log z of these lanes; `dk` and `df` += those of the rows, in lanes.
template <bool row_decay, bool lane_decay, class real>
FAST_WEIGHTS_INLINE void backward_few(index_t steps, real* d_state, index_t ld, const Side<real>& rows,
                                      const Side<real>& lanes, index_t lane, real* dv, real* dz, real* dk, real* df,
                                      const real* history) {
    constexpr int W = Vector<real>::lanes;
    vec<real> g[FEW];
#pragma GCC unroll 4
    for (int i = 0; i < FEW; ++i) g[i] = load(d_state + i * ld);
    for (index_t t = steps - 1; t >= 0; --t) {
        const real *k = rows.write + t * rows.ld, *q = rows.read + t * rows.ld;
        const real* f = row_decay ? rows.decay + t * rows.ld : nullptr;
        const vec<real> v = load(lanes.write + t * lanes.ld + lane), dy = load(lanes.read + t * lanes.ld + lane);
        const vec<real> z = lane_decay ? load(lanes.decay + t * lanes.ld + lane) : vec<real>{};
        vec<real> dv_t{}, dz_t{};
#pragma GCC unroll 4
        for (int i = 0; i < FEW; ++i) {
            g[i] += dy * q[i];
            dv_t += g[i] * k[i];
            add_in_lanes(dk, t, i, g[i] * v);
            if (row_decay || lane_decay) {
                const vec<real> passed = g[i] * load(history + (t * FEW + i) * W);
                if (lane_decay) dz_t += passed;
                if (row_decay) add_in_lanes(df, t, i, passed);
            }
            g[i] = decayed<row_decay, lane_decay>(g[i], row_decay ? f[i] : real(1), z);
        }
        store(dv + t * lanes.ld, dv_t);
        if (lane_decay) store(dz + t * lanes.ld, dz_t);
    }
#pragma GCC unroll 4
    for (int i = 0; i < FEW; ++i) store(d_state + i * ld, g[i]);
}

// The arithmetic of one chunk of one head.
template <class real> class SteppedChunk {
   public:
    // With `slots` for as many chunks: what `open` reads into one stays there until it is opened again.
    SteppedChunk(const Problem& p, Scratch<real>& scratch, bool backward, index_t slots)
        : p_(p), K(p.keys), V(p.values), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)),
          gated_(p.log_gate.data != nullptr),
          f_(gated_ || p.log_key_decay.data != nullptr),
          z_(p.log_value_decay.data != nullptr) {
        k_slots = scratch.take(slots * CHUNK * Kp);
        v_slots = scratch.take(slots * CHUNK * Vp);
        f_slots = scratch.take(f_ ? slots * CHUNK * Kp : 0);
        z_slots = scratch.take(z_ ? slots * CHUNK * Vp : 0);
        q = scratch.take(CHUNK * Kp);
        y = scratch.take(CHUNK * Vp);
        if (!backward) return;
        dq = scratch.take(3 * CHUNK * Kp);
        dk = dq + CHUNK * Kp;
        df = dk + CHUNK * Kp;
        dv = scratch.take(2 * CHUNK * Vp);
        dz = dv + CHUNK * Vp;
        history = scratch.take(CHUNK * TILE * Vector<real>::lanes);
        if (K <= FEW) {
            in_lanes = scratch.take(3 * LANES);
            return;
        }
        turned = scratch.take(Vp * Kp);
        d_turned = scratch.take(Vp * Kp);
        again = scratch.take(Kp * Vs);
    }

    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        reopen(b, t, h, rows, slot);
        direction_ = 1;
        load_steps(k, p_.k, b, t, h, rows, K, 1);
        load_steps(v, p_.v, b, t, h, rows, V, 1);
        if (gated_) {
            gates.load(p_, b, t, h, rows);
            for (index_t i = 0; i < rows; ++i) {
                fill(f + i * Kp, gates.keep[i], Kp);
                scale(k + i * Kp, k + i * Kp, gates.write[i], Kp);
            }
        } else if (f_) {
            load_decays(f, p_.log_key_decay, K);
        }
        if (z_) load_decays(z, p_.log_value_decay, V);
    }

    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows, direction_ = -1;
        k = k_slots + slot * CHUNK * Kp;
        v = v_slots + slot * CHUNK * Vp;
        f = f_ ? f_slots + slot * CHUNK * Kp : nullptr;
        z = z_ ? z_slots + slot * CHUNK * Vp : nullptr;
    }

    void forward(real* state, bool) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        fill(y, real(0), CHUNK * Vp);
        pass<true>(state);
        store_steps(p_.out, b_, t_, h_, y, rows_, V);
    }

    void carry(real* state) { pass<false>(state); }

    void prepare(const real*, bool) {}

    void backward(const real* state, bool, real* d_state, bool) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        load_steps(y, p_.d_out, b_, t_, h_, rows_, V, direction_);
        // dk and df lie behind it. Few keys set no more than FEW columns: in others NaN of the head before might stay.
        fill(dq, real(0), 3 * CHUNK * Kp);
        K <= FEW ? differentiate_few(state, d_state) : differentiate(state, d_state);
        if (gated_) store_gate_gradient();
        store_steps(p_.dq, b_, t_, h_, dq, rows_, K);
        store_steps(p_.dk, b_, t_, h_, dk, rows_, K);
        store_steps(p_.dv, b_, t_, h_, dv, rows_, V);
        if (f_ && !gated_) store_steps(p_.d_log_key_decay, b_, t_, h_, df, rows_, K);
        if (z_) store_steps(p_.d_log_value_decay, b_, t_, h_, dz, rows_, V);
    }

   private:
    static constexpr index_t LANES = CHUNK * FEW * Vector<real>::lanes;

    void differentiate(const real* state, real* d_state) {
        fill(dv, real(0), 2 * CHUNK * Vp);  // and dz behind this
        const Side<real> keys{Kp, k, q, f}, values{Vp, v, y, z};
        transpose(turned, Kp, state, Vs, Kp, Vp);
        transpose(d_turned, Kp, d_state, Vs, Kp, Vp);
        copy(again, state, Kp * Vs);
        // Rows in the lanes: what is read forwards is dq, of which dy is the query.
        f_ ? (z_ ? passes<true, true, true>(V, Kp, values, keys, turned, d_turned, Kp, dq, dk, df)
                 : passes<false, true, true>(V, Kp, values, keys, turned, d_turned, Kp, dq, dk, df))
           : passes<true, false, true>(V, Kp, values, keys, turned, d_turned, Kp, dq, dk, df);
        // Columns in the lanes: what is read forwards would be the output.
        z_ ? (f_ ? passes<true, true, false>(K, Vp, keys, values, again, d_state, Vs, nullptr, dv, dz)
                 : passes<false, true, false>(K, Vp, keys, values, again, d_state, Vs, nullptr, dv, dz))
           : passes<true, false, false>(K, Vp, keys, values, again, d_state, Vs, nullptr, dv, dz);
    }

    void differentiate_few(const real* state, real* d_state) {
        if (f_ && z_) return differentiate_few_as<true, true>(state, d_state);
        if (f_) return differentiate_few_as<true, false>(state, d_state);
        z_ ? differentiate_few_as<false, true>(state, d_state) : differentiate_few_as<false, false>(state, d_state);
    }

    template <bool row_decay, bool lane_decay> void differentiate_few_as(const real* state, real* d_state) {
        const Side<real> keys{Kp, k, q, f}, values{Vp, v, y, z};
        real *dq_lanes = in_lanes, *dk_lanes = in_lanes + LANES, *df_lanes = in_lanes + 2 * LANES;
        fill(in_lanes, real(0), (row_decay ? 3 : 2) * LANES);
        for (index_t m = 0; m < Vp; m += Vector<real>::lanes) {
            forward_few<row_decay, lane_decay>(rows_, state + m, Vs, keys, values, m, dq_lanes, history);
            backward_few<row_decay, lane_decay>(rows_, d_state + m, Vs, keys, values, m, dv + m, dz + m, dk_lanes,
                                                df_lanes, history);
        }
        sum_few(dq, dq_lanes);
        sum_few(dk, dk_lanes);
        if (row_decay) sum_few(df, df_lanes);
    }

    // Turns df into the gate's gradient, and dk from that of the multiplied keys into that of the keys.
    void store_gate_gradient() {
        real d_log[CHUNK];
        for (index_t i = 0; i < rows_; ++i) {
            d_log[i] = 0;
            for (index_t e = 0; e < K; ++e) d_log[i] += df[i * Kp + e];
        }
        load_steps(q, p_.k, b_, t_, h_, rows_, K, 0);  // the keys as they were given
        gates.load(p_, b_, t_, h_, rows_);
        gates.store_gradient(p_, b_, t_, h_, rows_, d_log, dk, q, Kp);
    }

    // Rows of Kp numbers, of which FEW count, from their lanes.
    void sum_few(real* rows, const real* lanes) {
        constexpr int W = Vector<real>::lanes;
        real sums[CHUNK * FEW] __attribute__((aligned(64)));
        for (index_t i = 0; i < CHUNK * FEW; i += W) sum_vectors(sums + i, lanes + i * W);
        for (index_t t = 0; t < rows_; ++t) {
            for (index_t e = 0; e < FEW; ++e) rows[t * Kp + e] = sums[t * FEW + e];
        }
    }

    void load_decays(real* gates, const Sequence& logs, index_t n) {
        load_steps(gates, logs, b_, t_, h_, rows_, n, 1);
        exponentiate(gates, rows_ * padded(n));
    }

    // Calls work(number of rows, first row) for tiles that cover `rows` rows, and a few of zeros.
    template <class Work> static FAST_WEIGHTS_INLINE void for_tiles(index_t rows, const Work& work) {
        index_t i = 0;
        for (; rows - i > TILE / 2; i += TILE) work(Constant<TILE>(), i);
        for (; rows - i > TILE / 4; i += TILE / 2) work(Constant<TILE / 2>(), i);
        for (; i < rows; i += TILE / 4) work(Constant<TILE / 4>(), i);
    }
    template <int n> struct Constant {
        static constexpr int value = n;
    };

    // The state through the chunk, with or without its output.
    template <bool reads> void pass(real* state) {
        const Side<real> keys{Kp, k, q, f}, values{Vp, v, y, z};
        if (f_ && z_) return pass_as<reads, true, true>(state, keys, values);
        if (f_) return pass_as<reads, true, false>(state, keys, values);
        z_ ? pass_as<reads, false, true>(state, keys, values) : pass_as<reads, false, false>(state, keys, values);
    }

    template <bool reads, bool row_decay, bool lane_decay>
    void pass_as(real* state, const Side<real>& keys, const Side<real>& values) {
        for (index_t m = 0; m < Vp; m += Vector<real>::lanes) {
            for_tiles(K, [&](auto tile, index_t e) {
                forward_tile<decltype(tile)::value, row_decay, lane_decay, reads, false>(
                    rows_, state + e * Vs + m, Vs, keys, values, e, m, y + m, history);
            });
        }
    }

    // Forwards and backwards, tile by tile.
    template <bool row_decay, bool lane_decay, bool reads>
    void passes(index_t rows, index_t lanes, const Side<real>& row_side, const Side<real>& lane_side, real* state,
                real* d_state, index_t ld, real* out, real* d_write, real* d_log) {
        for (index_t m = 0; m < lanes; m += Vector<real>::lanes) {
            for_tiles(rows, [&](auto tile, index_t e) {
                constexpr int R = decltype(tile)::value;
                if (reads || lane_decay) {
                    forward_tile<R, row_decay, lane_decay, reads, lane_decay>(
                        rows_, state + e * ld + m, ld, row_side, lane_side, e, m, reads ? out + m : nullptr,
                        history);
                }
                backward_tile<R, row_decay, lane_decay>(rows_, d_state + e * ld + m, ld, row_side, lane_side, e, m,
                                                        d_write + m, d_log + m, history);
            });
        }
    }

    const Problem& p_;
    const index_t K, V, Kp, Vp, Vs;
    const bool gated_, f_, z_;
    Gates<real> gates;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0, direction_ = 1;
    real *k_slots, *v_slots, *f_slots, *z_slots, *q, *y, *k, *v, *f, *z;
    real *dq = nullptr, *dk = nullptr, *df = nullptr, *dv = nullptr, *dz = nullptr, *turned = nullptr,
         *d_turned = nullptr, *again = nullptr, *history = nullptr, *in_lanes = nullptr;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
