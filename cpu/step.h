// One step, on a state that is changed where it lies: read once, written once.
#pragma once

#include "chunk.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// Rows of a step in scratch memory.
template <class real> struct StepRows {
    real *q, *k, *v, *erase, *f, *z, *out;

    StepRows(const Step& p, Scratch<real>& scratch)
        : q(scratch.take(p.keys)), k(scratch.take(p.keys)), v(scratch.take(p.values)), erase(scratch.take(p.keys)),
          f(scratch.take(p.keys)), z(scratch.take(p.values)), out(scratch.take(p.values)) {}

    // f and z are the decays themselves, k is what is written of it.
    void load(const Step& p, index_t b, index_t h) {
        load_row(q, p.q, b, h, p.keys);
        load_row(k, p.k, b, h, p.keys);
        load_row(v, p.v, b, h, p.values);
        real gate = 1;
        if (p.log_gate.data) {
            const real log = load_one<real>(p.log_gate, place(p.log_gate, b, 0, h));
            gate = exponential(log);
            if (p.complement) scale(k, k, -exponential_minus_one(log), padded(p.keys));
        }
        load_decays(f, p.log_key_decay, b, h, p.keys, gate);
        load_decays(z, p.log_value_decay, b, h, p.values, 1);
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

// v becomes beta (v - S'^T e), S' being what the decays of keys leave of the state.
template <class real> void correct(const Step& p, StepRows<real>& rows, const real* state, index_t b, index_t h) {
    const Sequence& erase = p.erase.data ? p.erase : p.k;
    load_rows(rows.erase, erase, place(erase, b, 0, h), 0, 1, p.keys, 0);
    const real beta = p.beta.data ? load_one<real>(p.beta, place(p.beta, b, 0, h)) : real(1);
    real *retrieved = rows.out, *v = rows.v;
    fill(retrieved, real(0), padded(p.values));
    for (index_t i = 0; i < p.keys; ++i) {
        const real* row = state + i * p.state_key;
        const real e = rows.f[i] * rows.erase[i];
        for (index_t m = 0; m < p.values; ++m) retrieved[m] += e * row[m];
    }
    for (index_t m = 0; m < p.values; ++m) v[m] = beta * (v[m] - retrieved[m]);
}

template <class real> void rule_step(const Step& p, index_t begin, index_t end) {
    const index_t K = p.keys, V = p.values;
    Scratch<real> scratch;
    { StepRows<real> counted(p, scratch); }
    scratch.allocate();
    StepRows<real> rows(p, scratch);
    for (index_t task = begin; task < end; ++task) {
        const index_t b = task / p.heads, h = task % p.heads;
        rows.load(p, b, h);
        real* state = static_cast<real*>(p.state) + b * p.state_batch + h * p.state_head;
        for (index_t e = 0; p.starts != nullptr && p.starts[b] && e < K; ++e) {
            for (index_t m = 0; m < V; ++m) state[e * p.state_key + m] = 0;
        }
        if (p.corrects) correct(p, rows, state, b, h);
        fill(rows.out, real(0), padded(V));
        const real *v = rows.v, *z = rows.z;
        real* out = rows.out;
        // If it was read to be corrected, the state is in the cache now, unless it is very large.
        for (index_t e = 0; e < K; ++e) {
            real* row = state + e * p.state_key;
            const real f = rows.f[e], k = rows.k[e], q = rows.q[e];
            for (index_t m = 0; m < V; ++m) {
                const real x = f * z[m] * row[m] + k * v[m];
                row[m] = x;
                out[m] += q * x;
            }
        }
        store_rows(p.out, place(p.out, b, 0, h), 0, out, 1, V);
    }
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
