// The diagonal family: S_t = decay_t * S_{t-1} + k_t v_t^T, y_t = S_t^T q_t, a chunk of 16 steps at a time.
//
// Without decays a chunk is a causal matrix product. A decay that the whole state shares multiplies its scores: D[t][s]
// = g_{s+1} ... g_t, made row by row as running products. Decays of rows and columns, one for each key and value
// dimension, divide the chunk into pairs, blocks and halves (secondary_chunking.h).
#pragma once

#include "../states.h"
#include "scores.h"
#include "secondary_chunking.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The arithmetic of one chunk of one head.
template <class real, Decay decay> class DiagonalChunk {
public:
    // With `slots` for as many chunks: `open` fills one, which stays until it is opened again.
    DiagonalChunk(const RuleCall& p, Scratch<real>& scratch, bool backward, index_t slots)
        : p_(p), K(p.key_dim), V(p.columns), Kp(padded(K)), Vp(padded(V)), Vs(state_row<real>(V)) {
        // y is out, or its gradient; *_t are transposed, (dim, CHUNK).
        k_slots = scratch.take(slots * CHUNK * Kp), v_slots = scratch.take(slots * CHUNK * Vp);
        scratch.take(CHUNK * Kp, q, keys_t, scaled_q, scaled_k);
        scratch.take(CHUNK * Vp, y, scaled_v, retrieved);
        scores = scratch.take(CHUNK * CHUNK);
        if (decay == Decay::separate) {
            f.take(scratch, p.log_key_decay, K, slots);
            z.take(scratch, p.log_value_decay, V, slots);
            key_rows.take(scratch, Kp);
            value_rows.take(scratch, Vp);
        }
        if (!backward) return;
        plain_k_slots = scratch.take(slots * CHUNK * Kp), d_scores = scratch.take(CHUNK * CHUNK);
        scratch.take(CHUNK * Kp, dq, dk, dq_t, dk_t, more_k);
        scratch.take(CHUNK * Vp, dv, values_t, dy_t, more_v, scaled_y);
        if (decay != Decay::separate) return;
        df = scratch.take(CHUNK * Kp), dz = scratch.take(CHUNK * Vp);
        run = scratch.take(Vp), row_sums = scratch.take(Kp);
    }

    // Reads keys, values and decays, all that carrying the state takes, into a slot.
    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        reopen(b, t, h, rows, slot);
        direction_ = 1;
        load_steps(k, p_.k, b, t, h, rows, K, 1);
        load_steps(v, p_.v, b, t, h, rows, V, 1);
        if (decay == Decay::shared) {
            shared.load(p_, b, t, h, rows);
            if (p_.complement) {
                if (plain_k) copy(plain_k, k, CHUNK * Kp);
                for (index_t i = 0; i < rows; ++i) scale(k + i * Kp, k + i * Kp, shared.gates.write[i], Kp);
            }
        }
        if (decay == Decay::separate) {
            f.open(p_.log_key_decay, b, t, h, rows);
            z.open(p_.log_value_decay, b, t, h, rows);
        }
    }

    // Goes back to a chunk that was opened before, in the same slot.
    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        b_ = b, t_ = t, h_ = h, rows_ = rows, direction_ = -1;
        k = k_slots + slot * CHUNK * Kp;
        v = v_slots + slot * CHUNK * Vp;
        if (plain_k_slots) plain_k = plain_k_slots + slot * CHUNK * Kp;
        f.choose(slot);
        z.choose(slot);
    }

    // out and the state after the chunk, `state` (K, Vs) being the one before it; `empty`: that one is all zeros.
    void forward(real* state, bool empty) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        if (decay == Decay::separate) {
            read_within_chunk();
        } else {
            transpose(keys_t, CHUNK, k, Kp, CHUNK, Kp);
            product<false, Into::set>(rows_, CHUNK, K, scores, CHUNK, q, Kp, keys_t, CHUNK);
            mask_scores(scores);
            product<false, Into::set, Shape::lower>(rows_, Vp, rows_, y, Vp, scores, CHUNK, v, Vp);
        }
        if (!empty) {
            scale_queries();
            if (z.gate) {
                product<false, Into::set>(rows_, Vp, K, retrieved, Vp, scaled(q, scaled_q), Kp, state, Vs);
                z.apply_add(y, retrieved, z.prefix);
            } else {
                product<false, Into::add>(rows_, Vp, K, y, Vp, scaled(q, scaled_q), Kp, state, Vs);
            }
        }
        write(state);
        store_steps(p_.out, b_, t_, h_, y, rows_, V, direction_);
    }

    // The state alone.
    void carry(real* state, bool) {
        f.begin();
        z.begin();
        f.widen_to_chunk();
        z.widen_to_chunk();
        write(state);
    }

    // The work of `carry` beside carrying, for a chunk that is only to be differentiated.
    void prepare(const real*, bool) {}

    // All gradients of the chunk. `state` is the one before the chunk; `d_state`, that of the state after it, becomes
    // that of the state before it. `empty`, `d_empty`: these are all zeros.
    void backward(const real* state, bool empty, real* d_state, bool d_empty) {
        load_steps(q, p_.q, b_, t_, h_, rows_, K, direction_);
        load_steps(y, p_.d_out, b_, t_, h_, rows_, V, direction_);
        if (decay == Decay::shared) {
            shared.load(p_, b_, t_, h_, rows_);
            fill(d_log, real(0), CHUNK);
        }
        if (decay == Decay::separate) {
            differentiate_within_chunk();
        } else {
            transpose(keys_t, CHUNK, k, Kp, CHUNK, Kp);
            transpose(dy_t, CHUNK, y, Vp, CHUNK, Vp);
            transpose(values_t, CHUNK, v, Vp, CHUNK, Vp);
            product<false, Into::set>(rows_, CHUNK, K, scores, CHUNK, q, Kp, keys_t, CHUNK);
            product<false, Into::set>(rows_, CHUNK, V, d_scores, CHUNK, y, Vp, values_t, CHUNK);
            mask_scores(scores);
            if (decay == Decay::shared) shared.add_gradient_within_chunk(d_log, scores, d_scores, rows_);
            mask_scores(d_scores);
            product<false, Into::set, Shape::lower>(rows_, Kp, rows_, dq, Kp, d_scores, CHUNK, k, Kp);
            product<true, Into::set, Shape::upper>(rows_, Kp, rows_, dk, Kp, d_scores, CHUNK, q, Kp);
            product<true, Into::set, Shape::upper>(rows_, Vp, rows_, dv, Vp, scores, CHUNK, y, Vp);
        }
        scale_queries();
        scale_writes();
        const real* qs = scaled(q, scaled_q);
        const real* ys = y;
        if (z.gate) {
            z.apply(scaled_y, y, z.prefix);
            ys = scaled_y;
        }
        if (!empty) {
            // dq = dy S^T, by way of its transposed: S comes by rows.
            if (z.gate || decay == Decay::separate) transpose(dy_t, CHUNK, ys, Vp, CHUNK, Vp);
            product<false, Into::set>(K, CHUNK, V, dq_t, CHUNK, state, Vs, dy_t, CHUNK);
            transpose(more_k, Kp, dq_t, CHUNK, Kp, CHUNK);
            if (z.gate) product<false, Into::set>(rows_, Vp, K, more_v, Vp, qs, Kp, state, Vs);
            add_readers_gradients();
        }
        if (!d_empty) {
            const real* vs = z.gate ? scaled_v : v;
            if (decay == Decay::separate) transpose(values_t, CHUNK, vs, Vp, CHUNK, Vp);
            product<false, Into::set>(K, CHUNK, V, dk_t, CHUNK, d_state, Vs, values_t, CHUNK);
            transpose(more_k, Kp, dk_t, CHUNK, Kp, CHUNK);
            product<false, Into::set>(rows_, Vp, K, more_v, Vp, scaled(k, scaled_k), Kp, d_state, Vs);
            add_writers_gradients();
            if (!empty) add_gradient_of_passing(state, d_state);
        }
        add_to_state(d_state, qs, ys);
        store_gradients();
    }

private:
    static const real* scaled(const real* plain, const real* multiplied) {
        return decay == Decay::none ? plain : multiplied;
    }

    // The causal part, times the decays in between.
    void mask_scores(real* x) {
        lower_part(x, 0);
        if (decay == Decay::shared) multiply(x, x, shared.between, rows_ * CHUNK);
    }

    // Queries decayed from the chunk's start.
    void scale_queries() {
        if (decay == Decay::shared) shared.scale_rows(scaled_q, q, shared.prefix, Kp);
        if (decay == Decay::separate) f.apply(scaled_q, q, f.prefix);
    }

    // Keys and values decayed to the chunk's end.
    void scale_writes() {
        if (decay == Decay::shared) shared.scale_rows(scaled_k, k, shared.suffix, Kp);
        if (decay == Decay::separate) f.apply(scaled_k, k, f.suffix);
        if (z.gate) z.apply(scaled_v, v, z.suffix);
    }

    void write(real* state) {
        scale_writes();
        add_to_state(state, scaled(k, scaled_k), z.gate ? scaled_v : v);
    }

    // state = decays of the chunk * state + a^T b
    void add_to_state(real* state, const real* a, const real* b) {
        if (decay == Decay::none) return product<true, Into::add>(K, Vp, rows_, state, Vs, a, Kp, b, Vp);
        const DecayFactors<real> factors{decay == Decay::shared ? shared.prefix[CHUNK - 1] : real(1), f.total(),
                                         z.total()};
        product<true, Into::add_to_decayed>(K, Vp, rows_, state, Vs, a, Kp, b, Vp, factors);
    }

    void gather_levels(const real* dy) {
        f.begin();
        z.begin();
        for (index_t from = 0; from < CHUNK; from += 8) {
            key_rows.gather(f, from, q, k);
            value_rows.gather(z, from, dy, v);
            f.widen(levels::half(from));
            z.widen(levels::half(from));
        }
        transpose(keys_t, CHUNK, key_rows.read, Kp, CHUNK, Kp);
        product<false, Into::set>(CHUNK, CHUNK, K, scores, CHUNK, key_rows.readers, Kp, keys_t, CHUNK);
        mask_levels(scores);
    }

    void read_within_chunk() {
        score_pairs(scores, q, k, f.gate, Kp);
        read_pairs(y, scores, v, z.gate, Vp);
        gather_levels(nullptr);
        product<false, Into::set, Shape::blocks>(CHUNK, Vp, CHUNK, retrieved, Vp, scores, CHUNK, value_rows.read, Vp);
        for (index_t i = 0; i < CHUNK; ++i) {
            const index_t t = levels::reads(i);
            if (z.gate) {
                multiply_add(y + t * Vp, retrieved + i * Vp, value_rows.of_readers + i * Vp, Vp);
            } else {
                add(y + t * Vp, retrieved + i * Vp, Vp);
            }
        }
    }

    void differentiate_within_chunk() {
        score_pairs(scores, q, k, f.gate, Kp);
        score_pairs(d_scores, y, v, z.gate, Vp);
        read_pairs(dq, d_scores, k, f.gate, Kp);
        differentiate_pairs(d_scores, q, k, f.gate, Kp, dk, df);
        differentiate_pairs(scores, y, v, z.gate, Vp, dv, dz);
        gather_levels(y);
        transpose(values_t, CHUNK, value_rows.read, Vp, CHUNK, Vp);
        product<false, Into::set>(CHUNK, CHUNK, V, d_scores, CHUNK, value_rows.readers, Vp, values_t, CHUNK);
        mask_levels(d_scores);
        // The gradients of the queries of second halves, then of the keys and of the values of first halves.
        product<false, Into::set, Shape::blocks>(CHUNK, Kp, CHUNK, more_k, Kp, d_scores, CHUNK, key_rows.read, Kp);
        add_levels(f, true, more_k, key_rows, dq, df);
        product<true, Into::set, Shape::blocks>(CHUNK, Kp, CHUNK, more_k, Kp, d_scores, CHUNK, key_rows.readers, Kp);
        add_levels(f, false, more_k, key_rows, dk, df);
        product<true, Into::set, Shape::blocks>(CHUNK, Vp, CHUNK, more_v, Vp, scores, CHUNK, value_rows.readers, Vp);
        add_levels(z, false, more_v, value_rows, dv, dz);
        if (z.gate) {
            // The outputs: the gradients of the logs of values' decays are their products with d_out.
            product<false, Into::set, Shape::blocks>(CHUNK, Vp, CHUNK, more_v, Vp, scores, CHUNK, value_rows.read, Vp);
            add_levels(z, true, more_v, value_rows, static_cast<real*>(nullptr), dz);
        }
    }

    // more_k: the gradient of the scaled queries; more_v: the outputs (only with decays of values).
    void add_readers_gradients() {
        if (decay == Decay::none) add(dq, more_k, rows_ * Kp);
        if (decay == Decay::shared) shared.add_readers_gradient(dq, d_log, more_k, scaled_q, rows_, Kp);
        if (decay == Decay::separate) {
            f.apply_add(dq, more_k, f.prefix);
            if (f.gate) add_suffix_sums(df, scaled_q, more_k, rows_, Kp);
            if (z.gate) add_suffix_sums(dz, scaled_y, more_v, rows_, Vp);
        }
    }

    // more_k, more_v: the gradients of the scaled keys and values.
    void add_writers_gradients() {
        if (decay == Decay::none) {
            add(dk, more_k, rows_ * Kp);
            add(dv, more_v, rows_ * Vp);
        }
        if (decay == Decay::shared) {
            shared.add_writers_gradient(dk, d_log, more_k, scaled_k, rows_, Kp);
            add(dv, more_v, rows_ * Vp);
        }
        if (decay == Decay::separate) {
            f.apply_add(dk, more_k, f.suffix);
            z.apply_add(dv, more_v, z.suffix);
            if (f.gate) add_prefix_sums(df, scaled_k, more_k, rows_, Kp);
            if (z.gate) add_prefix_sums(dz, scaled_v, more_v, rows_, Vp);
        }
    }

    // The part of the state before the chunk that is still there after it has passed every decay.
    void add_gradient_of_passing(const real* state, const real* d_state) {
        if (decay == Decay::shared) shared.add_gradient_of_passing(d_log, state, d_state, rows_, K * Vs);
        if (decay == Decay::separate && (f.gate || z.gate)) {
            constexpr int W = Vector<real>::lanes;
            fill(run, real(0), Vp);
            for (index_t e = 0; e < K; ++e) {
                const real factor = f.gate ? f.total()[e] : real(1);
                vec<real> row{};
                for (index_t m = 0; m < Vp; m += W) {
                    vec<real> x = load(state + e * Vs + m) * load(d_state + e * Vs + m) * factor;
                    if (z.gate) x = x * load(z.total() + m);
                    row += x;
                    store(run + m, load(run + m) + x);
                }
                if (f.gate) row_sums[e] = sum<real>(row);
            }
            for (index_t i = 0; f.gate && i < rows_; ++i) add(df + i * Kp, row_sums, Kp);
            for (index_t i = 0; z.gate && i < rows_; ++i) add(dz + i * Vp, run, Vp);
        }
    }

    void store_gradients() {
        if (decay == Decay::shared) shared.gates.store_gradient(p_, b_, t_, h_, rows_, d_log, dk, plain_k, Kp);
        store_steps(p_.dq, b_, t_, h_, dq, rows_, K, direction_);
        store_steps(p_.dk, b_, t_, h_, dk, rows_, K, direction_);
        store_steps(p_.dv, b_, t_, h_, dv, rows_, V, direction_);
        if (f.gate) store_steps(p_.d_log_key_decay, b_, t_, h_, df, rows_, K, direction_);
        if (z.gate) store_steps(p_.d_log_value_decay, b_, t_, h_, dz, rows_, V, direction_);
    }

    const RuleCall& p_;
    const index_t K, V, Kp, Vp, Vs;
    index_t b_ = 0, t_ = 0, h_ = 0, rows_ = 0, direction_ = 1;
    SharedDecay<real> shared;
    Factors<real> f, z;
    LevelRows<real> key_rows, value_rows;
    real d_log[CHUNK] __attribute__((aligned(64)));
    real *q, *k_slots, *v_slots, *k, *v, *y, *keys_t, *scores, *scaled_q, *scaled_k, *scaled_v, *retrieved;
    real *plain_k_slots = nullptr, *plain_k = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr, *dq_t = nullptr,
         *dk_t = nullptr, *values_t = nullptr, *dy_t = nullptr, *d_scores = nullptr, *more_k = nullptr,
         *more_v = nullptr, *scaled_y = nullptr, *df = nullptr, *dz = nullptr, *run = nullptr, *row_sums = nullptr;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
