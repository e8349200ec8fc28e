// The delta family: S_t = S_{t-1} + k_t u_t^T, u_t = beta_t (v_t - S_{t-1}^T k_t), y_t = S_t^T q_t, 16 steps at a time.
//
// With the steps of a chunk as rows, B = diag(beta), A the part of B K K^T below the diagonal, and S the state before it:
//
//     (I + A) U = B (V - K S)        Y = Q S + tril(Q K^T) U        S_end = S + K^T U
//
// The triangular system is solved by substitution, which stays exact however alike the keys are. Backwards, from
// dU = tril(Q K^T)^T dY + K dS_end:  (I + A)^T dR = dU,  dA = -dR U^T below the diagonal,  dV = B dR.
#pragma once

#include "chunk.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// Solves (I + A) X = X, or (I + A)^T X = X, in place for `rows` rows of `cols` numbers; A is CHUNK x CHUNK, and only
// its part below the diagonal counts.
template <bool transposed, class real>
inline void substitute(real* x, index_t ld, const real* a, index_t rows, index_t cols) {
    constexpr int W = Vector<real>::lanes;
    index_t j = 0;
    if (rows == CHUNK) {
        for (; j < cols; j += W) {
            vec<real> row[CHUNK];
#pragma GCC unroll 16
            for (int t = 0; t < CHUNK; ++t) row[t] = load(x + t * ld + j);
            // Each row, once it is known, is taken out of all that depend on it: these are independent of one another.
#pragma GCC unroll 16
            for (int i = 0; i < CHUNK; ++i) {
                const int s = transposed ? CHUNK - 1 - i : i;
#pragma GCC unroll 16
                for (int t = 0; t < CHUNK; ++t) {
                    if (!transposed && t > s) row[t] -= row[s] * a[t * CHUNK + s];
                    if (transposed && t < s) row[t] -= row[s] * a[s * CHUNK + t];
                }
            }
#pragma GCC unroll 16
            for (int t = 0; t < CHUNK; ++t) store(x + t * ld + j, row[t]);
        }
        return;
    }
    for (index_t i = 0; i < rows; ++i) {
        const index_t s = transposed ? rows - 1 - i : i;
        for (index_t t = transposed ? 0 : s + 1; t < (transposed ? s : rows); ++t) {
            scale_add(x + t * ld, x + s * ld, -(transposed ? a[s * CHUNK + t] : a[t * CHUNK + s]), cols);
        }
    }
}

// The arithmetic of one chunk of one head.
template <class real> class DeltaChunk {
public:
    // With `slots` for as many chunks: what `open` and `prepare` leave in one stays until it is opened again.
    DeltaChunk(const Problem& p, Scratch<real>& scratch, bool backward, index_t slots)
        : p_(p), K(p.keys), V(p.values), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)) {
        // Two blocks of 16 rows each that are multiplied as one: queries over keys, dy over -dv.
        q_slots = scratch.take(slots * 2 * CHUNK * Kp);
        y = scratch.take(2 * CHUNK * Vp);
        v_slots = scratch.take(slots * CHUNK * Vp);
        u_slots = scratch.take(slots * CHUNK * Vp);
        keys_t_slots = scratch.take(slots * Kp * CHUNK);
        products_slots = scratch.take(slots * CHUNK * CHUNK);
        system_slots = scratch.take(slots * CHUNK * CHUNK);
        beta_slots = scratch.take(slots * CHUNK);
        scores = scratch.take(CHUNK * CHUNK);
        if (!backward) return;
        dv = y + CHUNK * Vp;
        right = scratch.take(CHUNK * Vp);
        dq = scratch.take(CHUNK * Kp);
        dk = scratch.take(CHUNK * Kp);
        more_k = scratch.take(CHUNK * Kp);
        through_state = scratch.take(Kp * 2 * CHUNK);
        values_t = scratch.take(Vp * 2 * CHUNK);
        u_t = scratch.take(Vp * CHUNK);
        dk_t = scratch.take(Kp * CHUNK);
        d_scores = scratch.take(CHUNK * CHUNK);
        d_products = scratch.take(CHUNK * CHUNK);
    }

    // Reads keys, values and write strengths, what it takes to carry the state on, into a slot.
    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        reopen(b, t, h, rows, slot);
        direction_ = 1;
        load_steps(k, p_.k, b, t, h, rows, K, 1);
        load_steps(v, p_.v, b, t, h, rows, V, 1);
        for (index_t i = 0; i < CHUNK; ++i) {
            beta[i] = i < rows ? load_one<real>(p_.beta, place(p_.beta, b, t + i, h)) : real(0);
        }
    }

    // Goes back to a chunk that was opened and prepared before, in the same slot.
    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows, direction_ = -1;
        q = q_slots + slot * 2 * CHUNK * Kp;
        k = q + CHUNK * Kp;
        v = v_slots + slot * CHUNK * Vp;
        u = u_slots + slot * CHUNK * Vp;
        keys_t = keys_t_slots + slot * Kp * CHUNK;
        products = products_slots + slot * CHUNK * CHUNK;
        system = system_slots + slot * CHUNK * CHUNK;
        beta = beta_slots + slot * CHUNK;
    }

    void forward(real* state, bool empty) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        prepare(state, empty);
        score_queries();
        product<false, Into::set, Shape::lower>(rows_, Vp, rows_, y, Vp, scores, CHUNK, u, Vp);
        if (!empty) product<false, Into::add>(rows_, Vp, K, y, Vp, q, Kp, state, Vs);
        product<true, Into::add>(K, Vp, rows_, state, Vs, k, Kp, u, Vp);
        store_steps(p_.out, b_, t_, h_, y, rows_, V, direction_);
    }

    void carry(real* state) {
        prepare(state, false);
        product<true, Into::add>(K, Vp, rows_, state, Vs, k, Kp, u, Vp);
    }

    // u from v, which becomes V - K S; also K K^T, and A.
    void prepare(const real* state, bool empty) {
        transpose(keys_t, CHUNK, k, Kp, CHUNK, Kp);
        product<false, Into::set>(rows_, CHUNK, K, products, CHUNK, k, Kp, keys_t, CHUNK);
        lower_part(products, -1);
        for (index_t i = 0; i < rows_; ++i) scale(system + i * CHUNK, products + i * CHUNK, beta[i], CHUNK);
        if (!empty) {
            product<false, Into::set>(rows_, Vp, K, u, Vp, k, Kp, state, Vs);
            scale_add(v, u, real(-1), rows_ * Vp);
        }
        for (index_t i = 0; i < rows_; ++i) scale(u + i * Vp, v + i * Vp, beta[i], Vp);
        substitute<false>(u, Vp, system, rows_, Vp);
    }

    // All gradients of a prepared chunk. `state` is the one before the chunk; `d_state`, that of the state after it,
    // becomes that of the state before it. `empty`, `d_empty`: these are all zeros.
    void backward(const real* state, bool empty, real* d_state, bool d_empty) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        load_steps(y, p_.d_out, b_, t_, h_, rows_, V, direction_);
        score_queries();
        transpose(u_t, CHUNK, u, Vp, CHUNK, Vp);

        product<true, Into::set, Shape::upper>(rows_, Vp, rows_, right, Vp, scores, CHUNK, y, Vp);
        if (!d_empty) product<false, Into::add>(rows_, Vp, K, right, Vp, k, Kp, d_state, Vs);
        substitute<true>(right, Vp, system, rows_, Vp);

        product<false, Into::set>(rows_, CHUNK, V, d_products, CHUNK, right, Vp, u_t, CHUNK);
        lower_part(d_products, -1);
        for (index_t i = 0; i < rows_; ++i) {
            d_beta[i] = dot(right + i * Vp, v + i * Vp, Vp) - dot(d_products + i * CHUNK, products + i * CHUNK, CHUNK);
            scale(d_products + i * CHUNK, d_products + i * CHUNK, -beta[i], CHUNK);
            scale(dv + i * Vp, right + i * Vp, -beta[i], Vp);
        }
        if (rows_ < CHUNK) fill(dv + rows_ * Vp, real(0), (CHUNK - rows_) * Vp);
        product<false, Into::set>(rows_, CHUNK, V, d_scores, CHUNK, y, Vp, u_t, CHUNK);
        lower_part(d_scores, 0);
        product<false, Into::set, Shape::lower>(rows_, Kp, rows_, dq, Kp, d_scores, CHUNK, k, Kp);
        product<true, Into::set, Shape::upper>(rows_, Kp, rows_, dk, Kp, d_scores, CHUNK, q, Kp);
        product<false, Into::add, Shape::lower>(rows_, Kp, rows_, dk, Kp, d_products, CHUNK, k, Kp);
        product<true, Into::add, Shape::upper>(rows_, Kp, rows_, dk, Kp, d_products, CHUNK, k, Kp);
        if (!empty) {
            // S dY^T and -S dV^T side by side: they share every load of S.
            transpose(values_t, 2 * CHUNK, y, Vp, 2 * CHUNK, Vp);
            product<false, Into::set>(K, 2 * CHUNK, V, through_state, 2 * CHUNK, state, Vs, values_t, 2 * CHUNK);
            transpose(more_k, Kp, through_state, 2 * CHUNK, Kp, CHUNK);
            add(dq, more_k, rows_ * Kp);
            transpose(more_k, Kp, through_state + CHUNK, 2 * CHUNK, Kp, CHUNK);
            add(dk, more_k, rows_ * Kp);
        }
        if (!d_empty) {
            product<false, Into::set>(K, CHUNK, V, dk_t, CHUNK, d_state, Vs, u_t, CHUNK);
            transpose(more_k, Kp, dk_t, CHUNK, Kp, CHUNK);
            add(dk, more_k, rows_ * Kp);
        }
        product<true, Into::add>(K, Vp, CHUNK + rows_, d_state, Vs, q, Kp, y, Vp);
        for (index_t i = 0; i < rows_; ++i) scale(right + i * Vp, right + i * Vp, beta[i], Vp);
        store_steps(p_.dq, b_, t_, h_, dq, rows_, K, direction_);
        store_steps(p_.dk, b_, t_, h_, dk, rows_, K, direction_);
        store_steps(p_.dv, b_, t_, h_, right, rows_, V, direction_);
        for (index_t i = 0; i < rows_; ++i) store_one(p_.d_beta, place(p_.d_beta, b_, t_ + i, h_), d_beta[i]);
    }

private:
    void score_queries() {
        product<false, Into::set>(rows_, CHUNK, K, scores, CHUNK, q, Kp, keys_t, CHUNK);
        lower_part(scores, 0);
    }

    const Problem& p_;
    const index_t K, V, Kp, Vp, Vs;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0, direction_ = 1;
    real d_beta[CHUNK] = {};
    real *q_slots, *v_slots, *u_slots, *keys_t_slots, *products_slots, *system_slots, *beta_slots;
    real *q, *k, *v, *u, *y, *keys_t, *scores, *products, *system, *beta;
    real *dv = nullptr, *right = nullptr, *dq = nullptr, *dk = nullptr, *more_k = nullptr, *through_state = nullptr,
         *values_t = nullptr, *u_t = nullptr, *dk_t = nullptr, *d_scores = nullptr, *d_products = nullptr;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
