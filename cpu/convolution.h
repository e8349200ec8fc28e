// The short causal convolution of each channel, with its SiLU:
//
//     u_t = b + sum_j w_{R - j} x_{t - j},  j = 0 ... R      y_t = silu(u_t)
//
// where x_{-R} ... x_{-1} are the convolution's state, and inputs before the beginning of t's document do not count: j
// is at most `reach(t)`. The next call's state is the last R inputs of a row, zeros before the document's beginning.
// Backwards, where g is the gradient of y:
//
//     d_t = g_t silu'(u_t)   dx_s = sum_j w_{R - j} d_{s + j}   dw_{R - j} = sum_t d_t x_{t - j}   db = sum_t d_t
//
// A work item has some channels of a row of the batch, for all steps; its sums over time are its part of dw and db.
#pragma once

#include "elementary.h"
#include "rows.h"
#include "scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real> class ConvolutionKernel {
public:
    ConvolutionKernel(const Convolution& p, Scratch<real>& scratch, bool backward) : p_(p), R_(p.width - 1) {
        const index_t most = padded(minimum(Convolution::CHANNELS_PER_ITEM, p.channels));
        x_ = scratch.take((R_ + CHUNK) * most), y_ = scratch.take(CHUNK * most);
        w_ = scratch.take(p.width * most), b_ = scratch.take(most), last_ = scratch.take(most);
        if (!backward) return;
        dx_ = scratch.take((R_ + CHUNK) * most), dw_ = scratch.take(p.width * most), db_ = scratch.take(most);
    }

    void forward(index_t item) {
        open(item);
        for (index_t t = 0; t < p_.time; t += CHUNK) {
            const index_t rows = next(t);
            for (index_t r = 0; r < rows; ++r) {
                const index_t reach = this->reach(t + r);
                for (index_t i = 0; i < ld_; i += W) { store(y_ + r * ld_ + i, Silu(convolved(r, i, reach)).value); }
            }
            store_rows(p_.y, offset(p_.y, t), p_.y.time, y_, rows, count_);
        }
        for (index_t j = 0; j < R_; ++j) {
            const index_t t = length() - R_ + j;
            is_kept(t) ? read(last_, t, 1) : fill(last_, real(0), ld_);
            store_rows(p_.last, offset(p_.last, j), 0, last_, 1, count_);
        }
    }

    void backward(index_t item) {
        open(item);
        fill(dx_, real(0), (R_ + CHUNK) * ld_), fill(dw_, real(0), p_.width * ld_), fill(db_, real(0), ld_);
        for (index_t t = 0; t < p_.time; t += CHUNK) {
            const index_t rows = next(t);
            load_rows(y_, p_.d_y, offset(p_.d_y, t), p_.d_y.time, rows, count_, 0);
            for (index_t r = 0; r < rows; ++r) {
                const index_t reach = this->reach(t + r);
                for (index_t i = 0; i < ld_; i += W) {
                    const vec<real> d = load(y_ + r * ld_ + i) * Silu(convolved(r, i, reach)).slope;
                    store(db_ + i, load(db_ + i) + d);
                    for (index_t j = 0; j <= reach; ++j) {
                        const index_t at = (R_ + r - j) * ld_ + i, of = (R_ - j) * ld_ + i;
                        store(dx_ + at, load(dx_ + at) + load(w_ + of) * d);
                        store(dw_ + of, load(dw_ + of) + load(x_ + at) * d);
                    }
                }
            }
            // Later steps read no input more than R steps before them: these gradients are complete.
            store_gradient(t - R_, rows);
            for (index_t r = 0; r < R_; ++r) copy(dx_ + r * ld_, dx_ + (r + rows) * ld_, ld_);
            fill(dx_ + R_ * ld_, real(0), CHUNK * ld_);
        }
        store_gradient(p_.time - R_, R_);
        for (index_t c = 0; c < count_; ++c) {
            const index_t channel = b_row_ * p_.channels + first_ + c;
            for (index_t i = 0; i < p_.width; ++i) static_cast<real*>(p_.dw)[channel * p_.width + i] = dw_[i * ld_ + c];
            static_cast<real*>(p_.db)[channel] = db_[c];
        }
    }

private:
    static constexpr int W = Vector<real>::lanes;
    using Silu = Activated<kSilu, real>;

    void open(index_t item) {
        b_row_ = item / p_.channel_blocks(), first_ = item % p_.channel_blocks() * Convolution::CHANNELS_PER_ITEM;
        count_ = minimum(Convolution::CHANNELS_PER_ITEM, p_.channels - first_), ld_ = padded(count_);
        with_type(p_.weight, first_ * p_.width, [&](const auto* weight) {
            for (index_t c = 0; c < count_; ++c) {
                for (index_t i = 0; i < p_.width; ++i) {
                    w_[i * ld_ + c] = static_cast<real>(from_stored(weight[c * p_.width + i]));
                }
            }
        });
        if (p_.bias.data) load_rows(b_, p_.bias, first_, 0, 1, count_, 0);
        read(x_, -R_, R_);
    }

    // The place of the channels of step t.
    index_t offset(const Sequence& x, index_t t) const { return place(x, b_row_, t, 0) + first_; }

    // Inputs t ... t + rows, of which those below 0 were given.
    void read(real* rows_of, index_t t, index_t rows) const {
        const index_t given = t < 0 ? minimum(rows, -t) : 0;
        if (given > 0 && p_.before.data) {
            load_rows(rows_of, p_.before, offset(p_.before, t + R_), p_.before.time, given, count_, 0);
        } else {
            fill(rows_of, real(0), given * ld_);
        }
        if (rows == given) return;  // a sequence of no steps has no address
        load_rows(rows_of + given * ld_, p_.x, offset(p_.x, t + given), p_.x.time, rows - given, count_, 0);
    }

    // x_ = inputs t - R ... t + rows.
    index_t next(index_t t) {
        const index_t rows = minimum(CHUNK, p_.time - t);
        for (index_t r = 0; t > 0 && r < R_; ++r) copy(x_ + r * ld_, x_ + (r + CHUNK) * ld_, ld_);
        read(x_ + R_ * ld_, t, rows);
        return rows;
    }

    // How far step t sees.
    index_t reach(index_t t) const {
        if (p_.starts == nullptr) return R_;
        index_t j = 0;
        while (j < R_ && (j > t || !p_.starts[b_row_ * p_.time + t - j])) ++j;
        return j;
    }

    FAST_WEIGHTS_INLINE vec<real> convolved(index_t r, index_t i, index_t reach) const {
        vec<real> u = load(b_ + i);
        for (index_t j = reach; j >= 0; --j) u += load(w_ + (R_ - j) * ld_ + i) * load(x_ + (R_ + r - j) * ld_ + i);
        return u;
    }

    index_t length() const { return p_.lengths == nullptr ? p_.time : p_.lengths[b_row_]; }

    // True if the next call is given input t, one of the last R: no document has begun after it.
    bool is_kept(index_t t) const {
        for (index_t s = t < 0 ? 0 : t + 1; p_.starts != nullptr && s < length(); ++s) {
            if (p_.starts[b_row_ * p_.time + s]) return false;
        }
        return true;
    }

    // The gradients of inputs t ... t + rows, which are the first of dx_.
    void store_gradient(index_t t, index_t rows) {
        for (index_t r = 0; r < rows; ++r, ++t) {
            real* row = dx_ + r * ld_;
            const index_t j = t - length() + R_;
            if (p_.d_last.data && j >= 0 && j < R_ && is_kept(t)) {
                load_rows(last_, p_.d_last, offset(p_.d_last, j), 0, 1, count_, 0);
                add(row, last_, ld_);
            }
            if (t >= 0) {
                store_rows(p_.dx, offset(p_.dx, t), 0, row, 1, count_);
            } else if (p_.d_before.data) {
                store_rows(p_.d_before, offset(p_.d_before, t + R_), 0, row, 1, count_);
            }
        }
    }

    const Convolution& p_;
    const index_t R_;
    index_t b_row_, first_, count_, ld_;
    // Inputs, and their gradients, from R steps before a chunk on; outputs or their gradients; parameters, and theirs.
    real *x_, *y_, *w_, *b_, *last_, *dx_, *dw_, *db_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
