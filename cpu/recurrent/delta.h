// The delta rule with few enough keys for a column of the state to stay in registers: step by step, as it is defined.
//
//     e_t = v_t - S_{t-1}^T k_t,  u_t = beta_t e_t,  S_t = S_{t-1} + k_t u_t^T,  y_t = S_t^T q_t
//
// Backwards over an interval, with G the gradient of S: e forwards; G_t = G_{t+1} - k_{t+1} w_{t+1}^T + q_t dy_t^T with
// du_t = G_t^T k_t and w_t = beta_t du_t, which is dv_t; and, as u and w are known now, on transposed states and in
// tiles of any rows, dq_t = S_t dy_t and dk_t = G_t u_t - S_{t-1} w_t.
#pragma once

#include "../intervals.h"
#include "tiles.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Keys that this takes at most; beyond half of them a column is partly in the first cache.
constexpr int LARGEST_COLUMN = FAST_WEIGHTS_VECTOR_BYTES == 64 ? 32 : 16;

// One vector of columns through `steps` steps: out (`reads`), or else e.
template <int R, bool reads, class real>
FAST_WEIGHTS_INLINE void forward_column(index_t steps, real* state, index_t ld, const Side<real>& keys,
                                        Steps<const real> values, const real* beta, index_t lane, Steps<real> result) {
    vec<real> s[R];
    UNROLL_FOR (int i = 0; i < R; ++i) s[i] = load(state + i * ld + lane);
    for (index_t t = 0; t < steps; ++t) {
        const real *k = keys.write.at(t), *q = reads ? keys.read.at(t) : nullptr;
        vec<real> e[4] = {load_unaligned(values.at(t) + lane)}, y[2] = {};
        UNROLL_FOR (int i = 0; i < R; ++i) e[i % 4] -= s[i] * k[i];
        e[0] = (e[0] + e[1]) + (e[2] + e[3]);
        if (!reads) store(result.at(t) + lane, e[0]);
        const vec<real> u = e[0] * beta[t];
        UNROLL_FOR (int i = 0; i < R; ++i) {
            s[i] += u * k[i];
            if (reads) y[i % 2] += s[i] * q[i];
        }
        if (reads) store_unaligned(result.at(t) + lane, y[0] + y[1]);
    }
    UNROLL_FOR (int i = 0; i < R; ++i) store(state + i * ld + lane, s[i]);
}

// And its gradient backwards: du.
template <int R, class real>
FAST_WEIGHTS_INLINE void backward_column(index_t steps, real* d_state, index_t ld, const Side<real>& keys,
                                         Steps<const real> d_out, const real* beta, index_t lane, Steps<real> du) {
    vec<real> g[R];
    UNROLL_FOR (int i = 0; i < R; ++i) g[i] = load(d_state + i * ld + lane);
    for (index_t t = steps - 1; t >= 0; --t) {
        const real *k = keys.write.at(t), *q = keys.read.at(t);
        const vec<real> dy = load_unaligned(d_out.at(t) + lane);
        vec<real> sum[4] = {};
        UNROLL_FOR (int i = 0; i < R; ++i) {
            g[i] += dy * q[i];
            sum[i % 4] += g[i] * k[i];
        }
        sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        store(du.at(t) + lane, sum[0]);
        const vec<real> w = sum[0] * beta[t];
        UNROLL_FOR (int i = 0; i < R; ++i) g[i] -= w * k[i];
    }
    UNROLL_FOR (int i = 0; i < R; ++i) store(d_state + i * ld + lane, g[i]);
}

// The numbers that the rows of a transposed state, one for each value, meet at each step.
template <class real> struct Columns {
    Steps<const real> u, w, d_out;
};

// A tile of R rows and one vector of lanes of a transposed state forwards: `dq` and `dk` = or += their parts of it.
template <int R, Out into, class real>
FAST_WEIGHTS_INLINE void forward_transposed(index_t steps, real* state, index_t ld, const Columns<real>& columns,
                                            Steps<const real> keys, index_t row, index_t lane, Steps<real> dq,
                                            Steps<real> dk) {
    constexpr bool adds = into == Out::add;
    vec<real> s[R];
    UNROLL_FOR (int i = 0; i < R; ++i) s[i] = load(state + i * ld);
    for (index_t t = 0; t < steps; ++t) {
        const real *u = columns.u.at(t) + row, *w = columns.w.at(t) + row, *dy = columns.d_out.at(t) + row;
        const vec<real> k = load_unaligned(keys.at(t) + lane);
        vec<real> read[2] = {adds ? load_unaligned(dq.at(t) + lane) : vec<real>{}, vec<real>{}};
        vec<real> written[2] = {adds ? load_unaligned(dk.at(t) + lane) : vec<real>{}, vec<real>{}};
        UNROLL_FOR (int i = 0; i < R; ++i) {
            written[i % 2] -= s[i] * w[i];
            s[i] += k * u[i];
            read[i % 2] += s[i] * dy[i];
        }
        store_unaligned(dq.at(t) + lane, read[0] + read[1]);
        store_unaligned(dk.at(t) + lane, written[0] + written[1]);
    }
    UNROLL_FOR (int i = 0; i < R; ++i) store(state + i * ld, s[i]);
}

// And its gradient backwards: `dk` += the rest.
template <int R, class real>
FAST_WEIGHTS_INLINE void backward_transposed(index_t steps, real* d_state, index_t ld, const Columns<real>& columns,
                                             const Side<real>& keys, index_t row, index_t lane, Steps<real> dk) {
    vec<real> g[R];
    UNROLL_FOR (int i = 0; i < R; ++i) g[i] = load(d_state + i * ld);
    for (index_t t = steps - 1; t >= 0; --t) {
        const real *u = columns.u.at(t) + row, *w = columns.w.at(t) + row, *dy = columns.d_out.at(t) + row;
        const vec<real> k = load_unaligned(keys.write.at(t) + lane), q = load_unaligned(keys.read.at(t) + lane);
        vec<real> written[2] = {load_unaligned(dk.at(t) + lane), vec<real>{}};
        UNROLL_FOR (int i = 0; i < R; ++i) {
            g[i] += q * dy[i];
            written[i % 2] += g[i] * u[i];
            g[i] -= k * w[i];
        }
        store_unaligned(dk.at(t) + lane, written[0] + written[1]);
    }
    UNROLL_FOR (int i = 0; i < R; ++i) store(d_state + i * ld, g[i]);
}

// Calls work(rows), the rows being those of a column of `keys` numbers and zeros.
constexpr index_t column(index_t keys) { return keys > 16 ? 32 : keys > 8 ? 16 : keys > 4 ? 8 : 4; }
template <class Work> FAST_WEIGHTS_INLINE void for_column(index_t keys, const Work& work) {
    switch (column(keys)) {
        case 32: return work(Constant<LARGEST_COLUMN>());
        case 16: return work(Constant<16>());
        case 8: return work(Constant<8>());
        default: return work(Constant<4>());
    }
}

template <class real>
inline void load_beta(real* beta, const RuleCall& p, index_t b, index_t t, index_t h, index_t rows) {
    for (index_t i = 0; i < rows; ++i) beta[i] = load_one<real>(p.beta, place(p.beta, b, t + i, h));
}

// The forward arithmetic of one chunk of one head (sweep.h).
template <class real> class ColumnChunk {
public:
    ColumnChunk(const RuleCall& p, Scratch<real>& scratch, bool, index_t)
        : p_(p), Vp(padded(p.columns)), Vs(state_row<real>(p.columns)),
          queries_(scratch, CHUNK, p.q, p.key_dim, column(p.key_dim)),
          keys_(scratch, CHUNK, p.k, p.key_dim, column(p.key_dim)), values_(scratch, CHUNK, p.v, p.columns),
          out_(scratch, CHUNK, p.out, p.columns) {}

    void open(index_t b, index_t t, index_t h, index_t rows, index_t) {
        b_ = b, t_ = t, h_ = h, rows_ = rows;
        load_beta(beta, p_, b, t, h, rows);
    }

    void forward(real* state, bool) {
        const Side<real> keys{keys_.read(b_, t_, h_, rows_, 1), queries_.read(b_, t_, h_, rows_, 1), {}, {}};
        const Steps<const real> values = values_.read(b_, t_, h_, rows_, 1);
        const Steps<real> out = out_.at(b_, t_, h_);
        for_column(p_.key_dim, [&](auto column) {
            for (index_t m = 0; m < Vp; m += Vector<real>::lanes) {
                forward_column<decltype(column)::value, true>(rows_, state, Vs, keys, values, beta, m, out);
            }
        });
        out_.write(b_, t_, h_, rows_);
    }

private:
    const RuleCall& p_;
    const index_t Vp, Vs;
    const Access<real> queries_, keys_, values_, out_;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0;
    real beta[CHUNK];
};

// The backward arithmetic of one interval, of up to `length` steps, of one head.
template <class real> class ColumnInterval {
public:
    ColumnInterval(const RuleCall& p, Scratch<real>& scratch, index_t length)
        : p_(p), K(p.key_dim), V(p.columns), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)),
          queries_(scratch, length, p.q, K), keys_(scratch, length, p.k, K), values_(scratch, length, p.v, V),
          d_out_(scratch, length, p.d_out, V), d_queries_(scratch, length, p.dq, K), d_keys_(scratch, length, p.dk, K) {
        beta = scratch.take(length);
        u = {scratch.take(length * Vp), Vp};
        w = {scratch.take(length * Vp), Vp};
    }

    // As that of SumInterval.
    void backward(index_t b, index_t t, index_t h, index_t rows, real* state, real* state_t, real* d_state,
                  real* d_state_t, const Next&) {
        const Side<real> keys{keys_.read(b, t, h, rows, -1), queries_.read(b, t, h, rows, -1), {}, {}};
        const Steps<const real> values = values_.read(b, t, h, rows, -1);
        const Steps<const real> d_out = d_out_.read(b, t, h, rows, -1);
        const Steps<real> dq = d_queries_.at(b, t, h), dk = d_keys_.at(b, t, h);
        load_beta(beta, p_, b, t, h, rows);
        for_column(K, [&](auto column) {
            for (index_t m = 0; m < Vp; m += Vector<real>::lanes) {
                forward_column<decltype(column)::value, false>(rows, state, Vs, keys, values, beta, m, u);
                backward_column<decltype(column)::value>(rows, d_state, Vs, keys, d_out, beta, m, w);
            }
        });
        // From e and du to u and w.
        for (index_t i = 0; i < rows; ++i) {
            store_one(p_.d_beta, place(p_.d_beta, b, t + i, h), dot(w.at(i), u.at(i), Vp));
            scale(u.at(i), u.at(i), beta[i], Vp);
            scale(w.at(i), w.at(i), beta[i], Vp);
        }
        const Columns<real> columns{u, w, d_out};
        for_tiles<real>(V, vectors<real>(K), [&](auto tile, auto into, index_t e, index_t m) {
            constexpr int R = decltype(tile)::value;
            forward_transposed<R, decltype(into)::value>(rows, state_t + e * Kp + m, Kp, columns, keys.write, e, m, dq,
                                                         dk);
            backward_transposed<R>(rows, d_state_t + e * Kp + m, Kp, columns, keys, e, m, dk);
        });
        d_queries_.write(b, t, h, rows);
        d_keys_.write(b, t, h, rows);
        store_rows(p_.dv, place(p_.dv, b, t, h), p_.dv.time, w.first, rows, V);
    }

private:
    const RuleCall& p_;
    const index_t K, V, Kp, Vp, Vs;
    const Access<real> queries_, keys_, values_, d_out_, d_queries_, d_keys_;
    real* beta;
    Steps<real> u, w;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
