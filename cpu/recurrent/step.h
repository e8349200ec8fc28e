// One step, on a state that is changed where it lies: read once, written once.
#pragma once

#include "../rows.h"
#include "../scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Rows of a step in scratch memory.
template <class real> struct StepRows {
    const bool is_delta;
    real beta = 1;
    real *q, *k, *v, *erase, *f, *z, *out;

    StepRows(Scratch<real>& scratch, bool is_delta, index_t key_dim, index_t columns) : is_delta(is_delta) {
        scratch.take(key_dim, q, k, erase, f), scratch.take(columns, v, z, out);
    }

    // f and z are the decays themselves, k comes with its write factor.
    void load(const RuleStep& p, index_t b, index_t h) {
        load_row(q, p.q, b, h, p.key_dim);
        load_row(k, p.k, b, h, p.key_dim);
        load_row(v, p.v, b, h, p.columns);
        real gate = 1;
        if (p.log_gate.data) {
            const real log = load_one<real>(p.log_gate, place(p.log_gate, b, 0, h));
            gate = exponential(log);
            if (p.complement) scale(k, k, -exponential_minus_one(log), padded(p.key_dim));
        }
        load_decays(f, p.log_key_decay, b, h, p.key_dim, gate);
        load_decays(z, p.log_value_decay, b, h, p.columns, 1);
        if (!is_delta) return;
        const Sequence& key = p.erase.data ? p.erase : p.k;
        load_row(erase, key, b, h, p.key_dim);
        beta = p.beta.data ? load_one<real>(p.beta, place(p.beta, b, 0, h)) : real(1);
    }

private:
    static void load_row(real* row, const Sequence& x, index_t b, index_t h, index_t n) {
        load_rows(row, x, place(x, b, 0, h), 0, 1, n, 0);
    }

    static void load_decays(real* row, const Sequence& logs, index_t b, index_t h, index_t n, real otherwise) {
        if (logs.data == nullptr) return fill(row, otherwise, padded(n));
        load_row(row, logs, b, h, n);
        exponentiate(row, padded(n));
    }
};

// Columns of a state from `m` on, N vectors of them, that take a step: S = S' + k u^T, u = beta (v - S'^T e) or v, S' =
// f S z. Retrieved values and outputs stay in registers, sums of even rows beside those of odd ones.
template <int N, class real>
FAST_WEIGHTS_INLINE void step_columns(const StepRows<real>& rows, real* state, index_t ld, index_t keys, index_t m) {
    constexpr int W = Vector<real>::lanes;
    vec<real> u[N], z[N], sums[2][N];
    UNROLL_FOR (int j = 0; j < N; ++j) {
        u[j] = load(rows.v + m + j * W), z[j] = load(rows.z + m + j * W), sums[0][j] = sums[1][j] = vec<real>{};
    }
    if (rows.is_delta) {
        for (index_t e = 0; e < keys; e += 2) {
            UNROLL_FOR (index_t i = 0; i < 2; ++i) {
                if (e + i == keys) break;
                const real factor = rows.f[e + i] * rows.erase[e + i];
                UNROLL_FOR (int j = 0; j < N; ++j) {
                    sums[i][j] += load_unaligned(state + (e + i) * ld + m + j * W) * factor;
                }
            }
        }
        UNROLL_FOR (int j = 0; j < N; ++j) {
            u[j] = (u[j] - (sums[0][j] + sums[1][j]) * z[j]) * rows.beta;
            sums[0][j] = sums[1][j] = vec<real>{};
        }
    }
    for (index_t e = 0; e < keys; e += 2) {
        UNROLL_FOR (index_t i = 0; i < 2; ++i) {
            if (e + i == keys) break;
            const real f = rows.f[e + i], k = rows.k[e + i], q = rows.q[e + i];
            real* row = state + (e + i) * ld + m;
            UNROLL_FOR (int j = 0; j < N; ++j) {
                const vec<real> x = load_unaligned(row + j * W) * (z[j] * f) + u[j] * k;
                store_unaligned(row + j * W, x);
                sums[i][j] += x * q;
            }
        }
    }
    UNROLL_FOR (int j = 0; j < N; ++j) store(rows.out + m + j * W, sums[0][j] + sums[1][j]);
}

// The columns that make no whole vector.
template <class real>
inline void step_rest(const StepRows<real>& rows, real* state, index_t ld, index_t keys, index_t m, index_t end) {
    for (; m < end; ++m) {
        real u = rows.v[m], read = 0;
        if (rows.is_delta) {
            real retrieved = 0;
            for (index_t e = 0; e < keys; ++e) retrieved += rows.f[e] * rows.erase[e] * state[e * ld + m];
            u = rows.beta * (u - rows.z[m] * retrieved);
        }
        for (index_t e = 0; e < keys; ++e) {
            real& x = state[e * ld + m];
            x = rows.f[e] * rows.z[m] * x + rows.k[e] * u;
            read += rows.q[e] * x;
        }
        rows.out[m] = read;
    }
}

// A state of V columns that takes a step.
template <class real>
inline void step_state(const StepRows<real>& rows, real* state, index_t ld, index_t keys, index_t V) {
    constexpr int W = Vector<real>::lanes;
    index_t m = 0;
    for (; m + 4 * W <= V; m += 4 * W) step_columns<4>(rows, state, ld, keys, m);
    for (; m + W <= V; m += W) step_columns<1>(rows, state, ld, keys, m);
    step_rest(rows, state, ld, keys, m, V);
}

template <class real> void rule_step(const RuleStep& p, index_t begin, index_t end) {
    const index_t K = p.key_dim, V = p.columns;
    Scratch<real> scratch;
    { StepRows<real> counted(scratch, p.is_delta, K, V); }
    scratch.allocate();
    StepRows<real> rows(scratch, p.is_delta, K, V);
    for (index_t item = begin; item < end; ++item) {
        const index_t b = item / p.heads, h = item % p.heads;
        rows.load(p, b, h);
        real* state = static_cast<real*>(p.state) + b * p.state_batch + h * p.state_head;
        for (index_t e = 0; p.starts != nullptr && p.starts[b] && e < K; ++e) {
            for (index_t m = 0; m < V; ++m) state[e * p.state_key + m] = 0;
        }
        step_state(rows, state, p.state_key, K, V);
        store_rows(p.out, place(p.out, b, 0, h), 0, rows.out, 1, V);
    }
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
