// One step, on a state that is changed where it lies: read once, written once.
#pragma once

#include "chunk.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// Rows of a step in scratch memory.
template <class real> struct StepRows {
    real *q, *k, *v, *f, *z, *out, *retrieved;

    StepRows(const Step& p, Scratch<real>& scratch)
        : q(scratch.take(p.keys)), k(scratch.take(p.keys)), v(scratch.take(p.values)), f(scratch.take(p.keys)),
          z(scratch.take(p.values)), out(scratch.take(p.values)), retrieved(scratch.take(p.values)) {}

    void load(const Step& p, index_t b, index_t h) {
        load_rows(q, p.q, place(p.q, b, 0, h), 0, 1, p.keys, 0);
        load_rows(k, p.k, place(p.k, b, 0, h), 0, 1, p.keys, 0);
        load_rows(v, p.v, place(p.v, b, 0, h), 0, 1, p.values, 0);
    }
};

template <class real> void diagonal_step(const Step& p, index_t begin, index_t end) {
    const index_t K = p.keys, V = p.values;
    Scratch<real> scratch;
    { StepRows<real> counted(p, scratch); }
    scratch.allocate();
    StepRows<real> rows(p, scratch);
    for (index_t task = begin; task < end; ++task) {
        const index_t b = task / p.heads, h = task % p.heads;
        rows.load(p, b, h);
        real gate = 1;
        if (p.log_gate.data) {
            const real log = load_one<real>(p.log_gate, place(p.log_gate, b, 0, h));
            gate = exponential(log);
            if (p.complement) scale(rows.k, rows.k, -exponential_minus_one(log), padded(K));
        }
        fill(rows.f, gate, padded(K));
        if (p.log_key_decay.data) {
            load_rows(rows.f, p.log_key_decay, place(p.log_key_decay, b, 0, h), 0, 1, K, 0);
            exponentiate(rows.f, padded(K));
        }
        if (p.log_value_decay.data) {
            load_rows(rows.z, p.log_value_decay, place(p.log_value_decay, b, 0, h), 0, 1, V, 0);
            exponentiate(rows.z, padded(V));
        } else {
            fill(rows.z, real(1), padded(V));
        }
        fill(rows.out, real(0), padded(V));
        real* state = static_cast<real*>(p.state) + b * p.state_batch + h * p.state_head;
        const real *v = rows.v, *z = rows.z;
        real* out = rows.out;
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

template <class real> void delta_step(const Step& p, index_t begin, index_t end) {
    const index_t K = p.keys, V = p.values;
    Scratch<real> scratch;
    { StepRows<real> counted(p, scratch); }
    scratch.allocate();
    StepRows<real> rows(p, scratch);
    for (index_t task = begin; task < end; ++task) {
        const index_t b = task / p.heads, h = task % p.heads;
        rows.load(p, b, h);
        const real beta = load_one<real>(p.beta, place(p.beta, b, 0, h));
        fill(rows.retrieved, real(0), padded(V));
        fill(rows.out, real(0), padded(V));
        real* state = static_cast<real*>(p.state) + b * p.state_batch + h * p.state_head;
        real *u = rows.v, *retrieved = rows.retrieved, *out = rows.out;
        for (index_t e = 0; e < K; ++e) {
            const real* row = state + e * p.state_key;
            const real k = rows.k[e];
            for (index_t m = 0; m < V; ++m) retrieved[m] += k * row[m];
        }
        for (index_t m = 0; m < V; ++m) u[m] = beta * (u[m] - retrieved[m]);
        // The state is in the cache now, if it is not very large.
        for (index_t e = 0; e < K; ++e) {
            real* row = state + e * p.state_key;
            const real k = rows.k[e], q = rows.q[e];
            for (index_t m = 0; m < V; ++m) {
                const real x = row[m] + k * u[m];
                row[m] = x;
                out[m] += q * x;
            }
        }
        store_rows(p.out, place(p.out, b, 0, h), 0, out, 1, V);
    }
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
