// A tensor's steps where they lie, for kernels that take each number so few times that copying it would cost as much.
#pragma once

#include "chunk.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

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
    Access(const Sequence& x, index_t n, index_t unit = ROW)
        : x_(x), n_(n), in_place_(x.data != nullptr && x.type == Number<real>::type && n % unit == 0) {}

    // One that copies in any case.
    static Access copying(const Sequence& x, index_t n) {
        Access access(x, n);
        access.in_place_ = false;
        return access;
    }

    // Numbers of scratch memory for so many steps.
    index_t room(index_t steps) const { return in_place_ || x_.data == nullptr ? 0 : steps * padded(n_); }

    Steps<real> at(real* copies, index_t b, index_t t, index_t h) const {
        return in_place_ ? Steps<real>{static_cast<real*>(x_.data) + place(x_, b, t, h), x_.time}
                         : Steps<real>{copies, padded(n_)};
    }

    // The same, filled with `rows` steps; those as many steps further in `direction` are fetched into the cache.
    Steps<real> read(real* copies, index_t b, index_t t, index_t h, index_t rows, index_t direction) const {
        const Steps<real> steps = at(copies, b, t, h);
        const index_t ahead = direction * rows * x_.time;
        if (in_place_) {
            for (index_t i = 0; i < rows; ++i) {
                for (index_t j = 0; j < n_; j += 64 / sizeof(real)) __builtin_prefetch(steps.at(i) + ahead + j);
            }
        } else {
            load_rows(copies, x_, place(x_, b, t, h), x_.time, rows, n_, ahead);
        }
        return steps;
    }

    // To where they belong, if they are in `copies`.
    void write(const real* copies, index_t b, index_t t, index_t h, index_t rows) const {
        if (!in_place_) store_rows(x_, place(x_, b, t, h), x_.time, copies, rows, n_);
    }

   private:
    const Sequence& x_;
    index_t n_;
    bool in_place_;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
