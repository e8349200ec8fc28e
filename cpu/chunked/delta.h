// The delta rules: S_t = S' + k_t u_t^T, u_t = beta_t (v_t - S'^T e_t), S' = Diag(f_t) S_{t-1}, y_t = S_t^T q_t, 16
// steps at a time. The erase key e is k or a tensor of its own; the decays f are none, one number a step, or one for
// each key.
//
// With the steps of a chunk as rows, B = diag(beta), <A, B> the products of rows with the decays of the steps between
// them, P and R the decays from the chunk's start to each step and from each step to its end, L the part of B <E, K>
// below the diagonal, and S the state before the chunk:
//
//     (I + L) U = B (V - (E * P) S)      Y = (Q * P) S + tril(<Q, K>) U      S_end = Diag(P_end) S + (K * R)^T U
//
// The triangular system is solved by substitution, which stays exact however alike the keys are. Backwards, from
// dU = tril(<Q, K>)^T dY + (K * R) dS_end:  (I + L)^T dR = dU,  dL = -dR U^T below the diagonal,  dV = B dR.
#pragma once

#include "../states.h"
#include "scores.h"
#include "secondary_chunking.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Solves (I + A) X = X, or (I + A)^T X = X, in place for `rows` rows of `cols` numbers; A is CHUNK x CHUNK, and only
// its part below the diagonal counts.
template <bool transposed, class real>
inline void substitute(real* x, index_t ld, const real* a, index_t rows, index_t cols) {
    constexpr int W = Vector<real>::lanes;
    index_t j = 0;
    if (rows == CHUNK) {
        for (; j < cols; j += W) {
            vec<real> row[CHUNK];
            UNROLL_FOR (int t = 0; t < CHUNK; ++t) row[t] = load(x + t * ld + j);
            // Each row, once it is known, is taken out of all that depend on it: these are independent of one another.
            UNROLL_FOR (int i = 0; i < CHUNK; ++i) {
                const int s = transposed ? CHUNK - 1 - i : i;
                UNROLL_FOR (int t = 0; t < CHUNK; ++t) {
                    if (!transposed && t > s) row[t] -= row[s] * a[t * CHUNK + s];
                    if (transposed && t < s) row[t] -= row[s] * a[s * CHUNK + t];
                }
            }
            UNROLL_FOR (int t = 0; t < CHUNK; ++t) store(x + t * ld + j, row[t]);
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
    // With `slots` for as many chunks: `open` and `prepare` fill one, which stays until it is opened again.
    DeltaChunk(const RuleCall& p, Scratch<real>& scratch, bool backward, index_t slots)
        : p_(p), K(p.key_dim), V(p.columns), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)),
          decay(p.log_gate.data        ? Decay::shared
                : p.log_key_decay.data ? Decay::separate
                                       : Decay::none),
          has_erase_key(p.erase.data != nullptr) {
        // Two blocks of 16 rows each that are multiplied as one: queries over erase keys, dy over -dv.
        q_slots = scratch.take(slots * 2 * CHUNK * Kp);
        y = scratch.take(2 * CHUNK * Vp);
        if (has_erase_key) k_slots = scratch.take(slots * CHUNK * Kp);
        scratch.take(slots * CHUNK * Vp, v_slots, u_slots);
        keys_t_slots = scratch.take(slots * Kp * CHUNK);
        scratch.take(slots * CHUNK * CHUNK, products_slots, system_slots);
        beta_slots = scratch.take(slots * CHUNK), scores = scratch.take(CHUNK * CHUNK);
        if (decay != Decay::none) {
            scaled_q = scratch.take(2 * CHUNK * Kp);
            scaled_e = scaled_q + CHUNK * Kp;
            scaled_k = scratch.take(CHUNK * Kp);
        }
        if (decay == Decay::separate) {
            f.take(scratch, p.log_key_decay, K, slots);
            q_levels.take(scratch, Kp);
            e_levels = q_levels;
            e_levels.readers = scratch.take(CHUNK * Kp);
            level_keys_t = scratch.take(Kp * CHUNK);
            scratch.take(CHUNK * CHUNK, pairs, on_levels);
        }
        if (!backward) return;
        dv = y + CHUNK * Vp;
        scratch.take(CHUNK * Vp, rhs, u_t);
        scratch.take(CHUNK * Kp, dq, dk, dk_t, more_k);
        de = has_erase_key ? scratch.take(CHUNK * Kp) : dk;
        through_state = scratch.take(Kp * 2 * CHUNK), values_t = scratch.take(Vp * 2 * CHUNK);
        scratch.take(CHUNK * CHUNK, d_scores, d_products);
        if (decay == Decay::separate) {
            scratch.take(CHUNK * Kp, df, more_f);
            e_on_levels = scratch.take(CHUNK * CHUNK);
        }
    }

    // Reads keys, values, beta and decays, all that carrying the state takes, into a slot.
    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        reopen(b, t, h, rows, slot);
        direction_ = 1;
        load_steps(k, p_.k, b, t, h, rows, K, 1);
        if (has_erase_key) load_steps(e, p_.erase, b, t, h, rows, K, 1);
        load_steps(v, p_.v, b, t, h, rows, V, 1);
        for (index_t i = 0; i < CHUNK; ++i) {
            const bool given = i < rows && p_.beta.data != nullptr;
            beta[i] = given ? load_one<real>(p_.beta, place(p_.beta, b, t + i, h)) : real(i < rows);
        }
        if (decay == Decay::shared) shared.load(p_, b, t, h, rows);
        if (decay == Decay::separate) f.open(p_.log_key_decay, b, t, h, rows);
    }

    // Goes back to a chunk that was opened and prepared before, in the same slot.
    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows, direction_ = -1;
        q = q_slots + slot * 2 * CHUNK * Kp;
        e = q + CHUNK * Kp;
        k = has_erase_key ? k_slots + slot * CHUNK * Kp : e;
        v = v_slots + slot * CHUNK * Vp;
        u = u_slots + slot * CHUNK * Vp;
        keys_t = keys_t_slots + slot * Kp * CHUNK;
        products = products_slots + slot * CHUNK * CHUNK;
        system = system_slots + slot * CHUNK * CHUNK;
        beta = beta_slots + slot * CHUNK;
        f.choose(slot);
    }

    void forward(real* state, bool empty) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        gather_levels(q);
        solve(state, empty);
        score(scores, q, q_levels.readers, 0);
        product<false, Into::set, Shape::lower>(rows_, Vp, rows_, y, Vp, scores, CHUNK, u, Vp);
        if (!empty) product<false, Into::add>(rows_, Vp, K, y, Vp, decayed(q, scaled_q), Kp, state, Vs);
        write(state);
        store_steps(p_.out, b_, t_, h_, y, rows_, V, direction_);
    }

    void carry(real* state, bool empty) {
        prepare(state, empty);
        write(state);
    }

    // u from v, which becomes V - (E * P) S; also <E, K>, and L.
    void prepare(const real* state, bool empty) {
        gather_levels(nullptr);
        solve(state, empty);
    }

    // All gradients of a prepared chunk. `state` is the one before the chunk; `d_state`, that of the state after it,
    // becomes that of the state before it. `empty`, `d_empty`: these are all zeros.
    void backward(const real* state, bool empty, real* d_state, bool d_empty) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        load_steps(y, p_.d_out, b_, t_, h_, rows_, V, direction_);
        if (decay == Decay::shared) shared.load(p_, b_, t_, h_, rows_);
        gather_levels(q);
        score(scores, q, q_levels.readers, 0);
        transpose(u_t, CHUNK, u, Vp, CHUNK, Vp);

        product<true, Into::set, Shape::upper>(rows_, Vp, rows_, rhs, Vp, scores, CHUNK, y, Vp);
        if (!d_empty) product<false, Into::add>(rows_, Vp, K, rhs, Vp, decayed_keys(), Kp, d_state, Vs);
        substitute<true>(rhs, Vp, system, rows_, Vp);

        product<false, Into::set>(rows_, CHUNK, V, d_products, CHUNK, rhs, Vp, u_t, CHUNK);
        lower_part(d_products, -1);
        for (index_t i = 0; i < rows_; ++i) {
            d_beta[i] = dot(rhs + i * Vp, v + i * Vp, Vp) - dot(d_products + i * CHUNK, products + i * CHUNK, CHUNK);
            scale(d_products + i * CHUNK, d_products + i * CHUNK, -beta[i], CHUNK);
            scale(dv + i * Vp, rhs + i * Vp, -beta[i], Vp);
        }
        if (rows_ < CHUNK) fill(dv + rows_ * Vp, real(0), (CHUNK - rows_) * Vp);
        product<false, Into::set>(rows_, CHUNK, V, d_scores, CHUNK, y, Vp, u_t, CHUNK);
        lower_part(d_scores, 0);
        if (rows_ < CHUNK && decay == Decay::separate) {
            fill(d_scores + rows_ * CHUNK, real(0), (CHUNK - rows_) * CHUNK);
            fill(d_products + rows_ * CHUNK, real(0), (CHUNK - rows_) * CHUNK);
        }
        decay == Decay::separate ? differentiate_levels() : differentiate_products();
        const real* qs = decayed(q, scaled_q);
        const real* es = decayed(e, scaled_e);
        if (!empty) {
            // S dY^T and -S dV^T side by side: they share every load of S.
            transpose(values_t, 2 * CHUNK, y, Vp, 2 * CHUNK, Vp);
            product<false, Into::set>(K, 2 * CHUNK, V, through_state, 2 * CHUNK, state, Vs, values_t, 2 * CHUNK);
            add_readers_gradient(dq, through_state, qs);
            add_readers_gradient(de, through_state + CHUNK, es);
        }
        if (!d_empty) {
            product<false, Into::set>(K, CHUNK, V, dk_t, CHUNK, d_state, Vs, u_t, CHUNK);
            transpose(more_k, Kp, dk_t, CHUNK, Kp, CHUNK);
            add_writers_gradient();
            if (!empty) add_gradient_of_passing(state, d_state);
        }
        add_to_state(d_state, CHUNK + rows_, qs, y);
        for (index_t i = 0; i < rows_; ++i) scale(rhs + i * Vp, rhs + i * Vp, beta[i], Vp);
        store_steps(p_.dq, b_, t_, h_, dq, rows_, K, direction_);
        store_steps(p_.dk, b_, t_, h_, dk, rows_, K, direction_);
        store_steps(p_.dv, b_, t_, h_, rhs, rows_, V, direction_);
        if (has_erase_key) store_steps(p_.d_erase, b_, t_, h_, de, rows_, K, direction_);
        for (index_t i = 0; p_.d_beta.data != nullptr && i < rows_; ++i) {
            store_one(p_.d_beta, place(p_.d_beta, b_, t_ + i, h_), d_beta[i]);
        }
        for (index_t i = 0; decay == Decay::shared && i < rows_; ++i) {
            store_one(p_.d_log_gate, place(p_.d_log_gate, b_, t_ + i, h_), d_log[i]);
        }
        if (decay == Decay::separate) store_steps(p_.d_log_key_decay, b_, t_, h_, df, rows_, K, direction_);
    }

private:
    // Rows decayed from the chunk's start, in `scaled`.
    const real* decayed(const real* rows, real* scaled) const {
        if (decay == Decay::none) return rows;
        if (decay == Decay::separate) {
            multiply(scaled, rows, f.prefix, CHUNK * Kp);
        } else {
            shared.scale_rows(scaled, rows, shared.prefix, Kp);
        }
        return scaled;
    }

    // Keys decayed to the chunk's end.
    const real* decayed_keys() const {
        if (decay == Decay::none) return k;
        if (decay == Decay::separate) {
            multiply(scaled_k, k, f.suffix, CHUNK * Kp);
        } else {
            shared.scale_rows(scaled_k, k, shared.suffix, Kp);
        }
        return scaled_k;
    }

    void write(real* state) { add_to_state(state, rows_, decayed_keys(), u); }

    // state = decays of the chunk * state + a^T b
    void add_to_state(real* state, index_t rows, const real* a, const real* b) {
        if (decay == Decay::none) return product<true, Into::add>(K, Vp, rows, state, Vs, a, Kp, b, Vp);
        const DecayFactors<real> factors{decay == Decay::shared ? shared.prefix[CHUNK - 1] : real(1), f.total(),
                                         nullptr};
        product<true, Into::add_to_decayed>(K, Vp, rows, state, Vs, a, Kp, b, Vp, factors);
    }

    // With decays for each key: the rows of all levels, for `queries` too unless these are null, and P and R.
    void gather_levels(const real* queries) {
        if (decay != Decay::separate) return;
        f.begin();
        for (index_t from = 0; from < CHUNK; from += 8) {
            q_levels.gather(f, from, queries, k);
            for (index_t i = from; i < from + 8; ++i) {
                f.apply_row(e_levels.readers + i * Kp, e + levels::reads(i) * Kp, e_levels.of_readers + i * Kp);
            }
            f.widen(levels::half(from));
        }
        transpose(level_keys_t, CHUNK, q_levels.read, Kp, CHUNK, Kp);
    }

    // result = <readers, K>, zero above the diagonal, and on it if `kept` is -1.
    void score(real* result, const real* readers, const real* level_readers, index_t kept) {
        if (decay == Decay::separate) {
            score_pairs(pairs, readers, k, f.gate, Kp);
            product<false, Into::set>(CHUNK, CHUNK, K, on_levels, CHUNK, level_readers, Kp, level_keys_t, CHUNK);
            return join_levels(result, pairs, on_levels, kept);
        }
        product<false, Into::set>(rows_, CHUNK, K, result, CHUNK, readers, Kp, keys_t, CHUNK);
        lower_part(result, kept);
        if (decay == Decay::shared) multiply(result, result, shared.between, rows_ * CHUNK);
    }

    void solve(const real* state, bool empty) {
        if (decay != Decay::separate) transpose(keys_t, CHUNK, k, Kp, CHUNK, Kp);
        score(products, e, e_levels.readers, -1);
        for (index_t i = 0; i < rows_; ++i) scale(system + i * CHUNK, products + i * CHUNK, beta[i], CHUNK);
        if (!empty) {
            product<false, Into::set>(rows_, Vp, K, u, Vp, decayed(e, scaled_e), Kp, state, Vs);
            scale_add(v, u, real(-1), rows_ * Vp);
        }
        for (index_t i = 0; i < rows_; ++i) scale(u + i * Vp, v + i * Vp, beta[i], Vp);
        substitute<false>(u, Vp, system, rows_, Vp);
    }

    // dq, de, dk, and the gradients of shared decays, from d_scores and d_products.
    void differentiate_products() {
        if (decay == Decay::shared) {
            fill(d_log, real(0), CHUNK);
            shared.add_gradient_within_chunk(d_log, scores, d_scores, rows_);
            shared.add_gradient_within_chunk(d_log, products, d_products, rows_);
            multiply(d_scores, d_scores, shared.between, rows_ * CHUNK);
            multiply(d_products, d_products, shared.between, rows_ * CHUNK);
        }
        product<false, Into::set, Shape::lower>(rows_, Kp, rows_, dq, Kp, d_scores, CHUNK, k, Kp);
        product<true, Into::set, Shape::upper>(rows_, Kp, rows_, dk, Kp, d_scores, CHUNK, q, Kp);
        product<true, Into::add, Shape::upper>(rows_, Kp, rows_, dk, Kp, d_products, CHUNK, e, Kp);
        if (has_erase_key) {
            product<false, Into::set, Shape::lower>(rows_, Kp, rows_, de, Kp, d_products, CHUNK, k, Kp);
        } else {
            product<false, Into::add, Shape::lower>(rows_, Kp, rows_, de, Kp, d_products, CHUNK, k, Kp);
        }
    }

    // The same with decays for each key, and their gradients.
    void differentiate_levels() {
        part_levels(d_scores, pairs, on_levels);
        read_pairs(dq, pairs, k, f.gate, Kp);
        differentiate_pairs(pairs, q, k, f.gate, Kp, dk, df);
        part_levels(d_products, pairs, e_on_levels);
        differentiate_pairs(pairs, e, k, f.gate, Kp, more_k, more_f);
        add(dk, more_k, CHUNK * Kp);
        add(df, more_f, CHUNK * Kp);
        read_pairs(more_k, pairs, k, f.gate, Kp);
        has_erase_key ? copy(de, more_k, CHUNK * Kp) : add(de, more_k, CHUNK * Kp);
        product<false, Into::set, Shape::blocks>(CHUNK, Kp, CHUNK, more_k, Kp, on_levels, CHUNK, q_levels.read, Kp);
        add_levels(f, true, more_k, q_levels, dq, df);
        product<false, Into::set, Shape::blocks>(CHUNK, Kp, CHUNK, more_k, Kp, e_on_levels, CHUNK, q_levels.read, Kp);
        add_levels(f, true, more_k, e_levels, de, df);
        product<true, Into::set, Shape::blocks>(CHUNK, Kp, CHUNK, more_k, Kp, on_levels, CHUNK, q_levels.readers, Kp);
        product<true, Into::add, Shape::blocks>(CHUNK, Kp, CHUNK, more_k, Kp, e_on_levels, CHUNK, e_levels.readers, Kp);
        add_levels(f, false, more_k, q_levels, dk, df);
    }

    // `transposed` (K, 2 CHUNK) holds the gradient of `scaled` rows, which is added to that of the rows, and to the
    // decays'.
    void add_readers_gradient(real* d_rows, const real* transposed, const real* scaled) {
        transpose(more_k, Kp, transposed, 2 * CHUNK, Kp, CHUNK);
        if (decay == Decay::none) return add(d_rows, more_k, rows_ * Kp);
        if (decay == Decay::separate) {
            multiply_add(d_rows, more_k, f.prefix, CHUNK * Kp);
            return add_suffix_sums(df, scaled, more_k, rows_, Kp);
        }
        shared.add_readers_gradient(d_rows, d_log, more_k, scaled, rows_, Kp);
    }

    // more_k: the gradient of the keys that leave the chunk.
    void add_writers_gradient() {
        if (decay == Decay::none) return add(dk, more_k, rows_ * Kp);
        if (decay == Decay::separate) {
            multiply_add(dk, more_k, f.suffix, CHUNK * Kp);
            return add_prefix_sums(df, scaled_k, more_k, rows_, Kp);
        }
        shared.add_writers_gradient(dk, d_log, more_k, scaled_k, rows_, Kp);
    }

    // The part of the state before the chunk that is still there after it has passed every decay.
    void add_gradient_of_passing(const real* state, const real* d_state) {
        if (decay == Decay::shared) shared.add_gradient_of_passing(d_log, state, d_state, rows_, K * Vs);
        if (decay == Decay::separate) {
            for (index_t i = 0; i < K; ++i) more_f[i] = f.total()[i] * dot(state + i * Vs, d_state + i * Vs, Vp);
            for (index_t i = K; i < Kp; ++i) more_f[i] = 0;
            for (index_t i = 0; i < rows_; ++i) add(df + i * Kp, more_f, Kp);
        }
    }

    const RuleCall& p_;
    const index_t K, V, Kp, Vp, Vs;
    const Decay decay;
    const bool has_erase_key;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0, direction_ = 1;
    SharedDecay<real> shared;
    Factors<real> f;
    LevelRows<real> q_levels{}, e_levels{};
    real d_beta[CHUNK] = {}, d_log[CHUNK] __attribute__((aligned(64))) = {};
    real *q_slots, *k_slots = nullptr, *v_slots, *u_slots, *keys_t_slots, *products_slots, *system_slots, *beta_slots;
    real *q, *e, *k, *v, *u, *y, *keys_t, *scores, *products, *system, *beta;
    real *scaled_q = nullptr, *scaled_e = nullptr, *scaled_k = nullptr, *level_keys_t = nullptr, *pairs = nullptr,
         *on_levels = nullptr, *e_on_levels = nullptr;
    real *dv = nullptr, *rhs = nullptr, *dq = nullptr, *dk = nullptr, *de = nullptr, *more_k = nullptr,
         *through_state = nullptr, *values_t = nullptr, *u_t = nullptr, *dk_t = nullptr, *d_scores = nullptr,
         *d_products = nullptr, *df = nullptr, *more_f = nullptr;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
