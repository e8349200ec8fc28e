// A step of softmax attention over a window and linear attention over older positions, with one denominator. Of the
// n-th position of a document, counted from 0, with j over the last min(n + 1, window):
//
//     a_j = exp(s_j - max_j s_j + log_factor),  s_j = q k_j / sqrt(dim)
//     S += phi(k') [v', 1]^T  for the key and value that leave the window, where n >= window
//     y = (sum_j a_j v_j + S^T phi(q)) / (sum_j a_j + z^T phi(q)),  z the last column of S
//
// A work item is a head of keys and values of a row, and the heads of queries that share it.
#pragma once

#include "features.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real> class WindowStepKernel {
public:
    WindowStepKernel(const WindowStep& p, Scratch<real>& scratch, bool)
        : p_(p), ld_(padded(p.dim)), map_(scratch, p.dim, p.features, p.sums, p.eps) {
        scratch.take(p.window * ld_, keys_, values_);
        scratch.take(p.dim, q_, k_, v_, old_k_, old_v_, read_);
        scratch.take(p.features, phi_q_, phi_k_);
        weights_ = scratch.take(p.window), turn_ = scratch.take(2 * padded(p.half));
    }

    void forward(index_t item) {
        const index_t b = item / p_.kv_heads, g = item % p_.kv_heads, seen = p_.seen[b], past = p_.window - 1;
        if (p_.half > 0) {
            load_rows(turn_, p_.cosines, b * p_.cosines.batch, 0, 1, p_.half, 0);
            load_rows(turn_ + padded(p_.half), p_.sines, b * p_.sines.batch, 0, 1, p_.half, 0);
        }
        load_rotated(k_, p_.k, b, g);
        load_rows(v_, p_.v, place(p_.v, b, 0, g), 0, 1, p_.dim, 0);
        const index_t kept = (b * p_.kv_heads + g) * p_.window * p_.dim;
        load_rows(old_k_, p_.keys, kept, 0, 1, p_.dim, 0);
        load_rows(old_v_, p_.values, kept, 0, 1, p_.dim, 0);
        push(p_.keys, kept, k_), push(p_.values, kept, v_);
        const index_t first = past - minimum(seen, past), count = p_.window - first;
        const real* keys = rows_at(p_.keys, kept + first * p_.dim, count, p_.dim, keys_);
        const real* values = rows_at(p_.values, kept + first * p_.dim, count, p_.dim, values_);
        for (index_t h = g * p_.sharing; h < (g + 1) * p_.sharing; ++h) {
            load_rotated(q_, p_.q, b, h);
            real total = compare(keys, count, load_one<real>(p_.log_factor, h));
            fill(read_, real(0), ld_);
            for (index_t j = 0; j < count; ++j) {
                for (index_t i = 0; i < ld_; i += W) {
                    store(read_ + i, load(read_ + i) + load_unaligned(values + j * ld_ + i) * weights_[j]);
                }
            }
            total += recall(b, h, seen >= p_.window);
            for (index_t i = 0; i < ld_; i += W) store(read_ + i, load(read_ + i) / total);
            store_rows(p_.out, place(p_.out, b, 0, h), 0, read_, 1, p_.dim);
        }
    }

private:
    static constexpr int W = Vector<real>::lanes;

    // Puts a row behind those from `kept` on, of which the first leaves.
    void push(const Sequence& rows, index_t kept, real* row) const {
        const index_t past = (p_.window - 1) * p_.dim;
        with_type(rows, kept, [&](auto* x) { __builtin_memmove(x, x + p_.dim, past * sizeof(*x)); });
        store_rows(rows, kept + past, 0, row, 1, p_.dim);
    }

    // A vector of a head, rotated in the planes of its dimensions i and i + half.
    void load_rotated(real* x, const Sequence& from, index_t b, index_t h) const {
        load_rows(x, from, place(from, b, 0, h), 0, 1, p_.dim, 0);
        const real *cosines = turn_, *sines = turn_ + padded(p_.half);
        for (index_t i = 0; i < p_.half; ++i) {
            const real first = x[i], second = x[p_.half + i];
            x[i] = first * cosines[i] - second * sines[i];
            x[p_.half + i] = second * cosines[i] + first * sines[i];
        }
    }

    // weights_ = a, and their sum.
    real compare(const real* keys, index_t count, real log_factor) {
        const real factor = 1 / square_root(static_cast<real>(p_.dim));
        real largest = 0;
        for (index_t j = 0; j < count; ++j) {
            weights_[j] = dot_unaligned(keys + j * ld_, q_, ld_) * factor;
            largest = j == 0 || weights_[j] > largest ? weights_[j] : largest;
        }
        largest -= log_factor;
        real total = 0;
        for (index_t j = 0; j < padded(count); j += W) {
            store(weights_ + j, exponential_of_any(load(weights_ + j) - largest));
        }
        for (index_t j = 0; j < count; ++j) total += weights_[j];
        return total;
    }

    // Writes the key and value that leave the window; adds the query's output to read_, and returns its output for
    // values of 1.
    real recall(index_t b, index_t h, bool leaves) {
        const index_t columns = p_.dim + 1;
        real* state = static_cast<real*>(p_.state) + (b * p_.heads() + h) * p_.features * columns;
        if (p_.starts != nullptr && p_.starts[b]) {
            for (index_t i = 0; i < p_.features * columns; ++i) state[i] = 0;
            return 0;
        }
        map_.open(p_.weight, p_.bias, h);
        map_.map(phi_q_, q_);
        if (leaves) map_.map(phi_k_, old_k_);
        real ones = 0;
        for (index_t e = 0; e < p_.features; ++e) {
            real* row = state + e * columns;
            const real q = phi_q_[e], k = leaves ? phi_k_[e] : real(0);
            index_t i = 0;
            for (; i + W <= p_.dim; i += W) {
                const vec<real> x = load_unaligned(row + i) + load(old_v_ + i) * k;
                if (leaves) store_unaligned(row + i, x);
                store(read_ + i, load(read_ + i) + x * q);
            }
            for (; i < columns; ++i) {
                const real x = row[i] + (i < p_.dim ? old_v_[i] : real(1)) * k;
                if (leaves) row[i] = x;
                i < p_.dim ? read_[i] += x* q : ones += x * q;
            }
        }
        return ones;
    }

    const WindowStep& p_;
    const index_t ld_;
    LearnedMap<real> map_;
    real *keys_, *values_, *q_, *k_, *v_, *old_k_, *old_v_, *read_, *phi_q_, *phi_k_, *weights_, *turn_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
