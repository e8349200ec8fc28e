// A tensor's steps: where they lie, for kernels that take each number so few times that copying it would cost as much,
// or scaled on their way; and on their way into the cache before they are wanted.
#pragma once

#include "../rows.h"
#include "../scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Rows of numbers, one for each step.
template <class real> struct Steps {
    real* first = nullptr;
    index_t ld = 0;
    FAST_WEIGHTS_INLINE real* at(index_t t) const { return first + t * ld; }
    operator Steps<const real>() const { return {first, ld}; }
};

// How steps of a tensor are read and written: where they lie if they are whole `unit`s of the kernels' own numbers, and
// else by way of rows of padded(n) numbers in scratch memory, `copies`.
template <class real> class Access {
public:
    // With `unit` 0 steps are always copied, as they have to be for factors.
    Access(const Sequence& x, index_t n, index_t unit = ROW)
        : x_(x), n_(n), in_place_(unit > 0 && x.data && x.dtype == Number<real>::dtype && n % unit == 0) {}

    // With copies of `steps` steps in scratch memory.
    Access(Scratch<real>& scratch, index_t steps, const Sequence& x, index_t n, index_t unit = ROW)
        : Access(x, n, unit) {
        copies = scratch.take(room(steps));
    }

    // Numbers of scratch memory for so many steps.
    index_t room(index_t steps) const { return in_place_ || x_.data == nullptr ? 0 : steps * padded(n_); }

    Steps<real> at(index_t b, index_t t, index_t h) const {
        return in_place_ ? Steps<real>{static_cast<real*>(x_.data) + place(x_, b, t, h), x_.time}
                         : Steps<real>{copies, padded(n_)};
    }

    // The same, filled with `rows` steps, times `factors` (rows of padded(n) numbers) if there are any. Those as many
    // steps further in `direction` are fetched.
    Steps<real> read(index_t b, index_t t, index_t h, index_t rows, index_t direction,
                     const real* factors = nullptr) const {
        const Steps<real> steps = at(b, t, h);
        const index_t offset = place(x_, b, t, h), ahead = direction * rows * x_.time;
        if (in_place_) {
            for (index_t i = 0; ahead != 0 && i < rows; ++i) prefetch(steps.at(i) + ahead, n_ * sizeof(real));
        } else if (factors) {
            load_rows<true>(copies, x_, offset, x_.time, rows, n_, ahead, factors);
        } else {
            load_rows(copies, x_, offset, x_.time, rows, n_, ahead);
        }
        return steps;
    }

    // Fetches where steps further in `direction` are written to, if they come from `copies`, and so all at once.
    FAST_WEIGHTS_INLINE void prefetch_output(index_t b, index_t t, index_t h, index_t rows, index_t direction) const {
        if (!in_place_) prefetch_steps(x_, b, t + direction * rows, h, rows, n_);
    }

    // To where they belong, times `factors` if there are any, if they are in `copies`.
    void write(index_t b, index_t t, index_t h, index_t rows, const real* factors = nullptr) const {
        if (in_place_) return;
        const index_t offset = place(x_, b, t, h);
        factors ? store_rows<true>(x_, offset, x_.time, copies, rows, n_, factors)
                : store_rows(x_, offset, x_.time, copies, rows, n_);
    }

    real* copies = nullptr;

private:
    const Sequence& x_;
    index_t n_;
    bool in_place_;
};

// Steps of tensors that are wanted next, fetched a few at a time in between other work: all at once they would hold it
// up.
class Prefetcher {
public:
    void clear() { tensors_ = tensor_ = row_ = 0; }

    void add(const Sequence& x, index_t n, index_t b, index_t t, index_t h, index_t rows) {
        if (x.data == nullptr || rows <= 0) return;
        with_type(x, place(x, b, t, h), [&](const auto* p) {
            const index_t size = sizeof(*p);
            wanted_[tensors_++] = {reinterpret_cast<const char*>(p), x.time * size, n * size, rows};
        });
    }

    // To be all there after `parts` calls of `some`.
    void divide(index_t parts) {
        index_t rows = 0;
        for (index_t i = 0; i < tensors_; ++i) rows += wanted_[i].rows;
        share_ = (rows + parts - 1) / parts;
    }

    void prefetch_some() {
        for (index_t left = share_; left > 0 && tensor_ < tensors_; --left) {
            const Wanted& x = wanted_[tensor_];
            prefetch(x.first + row_ * x.step, x.bytes);
            if (++row_ == x.rows) row_ = 0, ++tensor_;
        }
    }

private:
    struct Wanted {
        const char* first;
        index_t step, bytes, rows;
    };
    Wanted wanted_[11];
    index_t tensors_ = 0, tensor_ = 0, row_ = 0, share_ = 0;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
