// The learned map of a step's queries and keys:  phi(x) = relu(W x + b),  divided by the sum of its numbers plus eps if
// `sums`. A sum that has underflowed divides nothing, as in ../features.h.
#pragma once

#include "../features.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// `rows` rows of n numbers from an element of x on: where they lie, if their type and length allow that, or in `room`.
template <class real>
inline const real* rows_at(const Sequence& x, index_t offset, index_t rows, index_t n, real* room) {
    if (x.dtype == Number<real>::dtype && n % ROW == 0) return static_cast<const real*>(x.data) + offset;
    load_rows(room, x, offset, n, rows, n, 0);
    return room;
}

// The product of a row at any address with one in scratch memory.
template <class real> FAST_WEIGHTS_INLINE real dot_unaligned(const real* a, const real* b, index_t n) {
    constexpr int W = Vector<real>::lanes;
    vec<real> total{};
    for (index_t i = 0; i < n; i += W) total += load_unaligned(a + i) * load(b + i);
    return sum<real>(total);
}

// The map of one head.
template <class real> class LearnedMap {
public:
    LearnedMap(Scratch<real>& scratch, index_t dim, index_t features, bool sums, double eps)
        : dim_(dim), features_(features), sums_(sums), eps_(static_cast<real>(eps)) {
        room_ = scratch.take(features * padded(dim)), bias_ = scratch.take(features);
    }

    void open(const Sequence& weight, const Sequence& bias, index_t head) {
        weight_ = rows_at(weight, head * features_ * dim_, features_, dim_, room_);
        load_rows(bias_, bias, head * features_, 0, 1, features_, 0);
    }

    // y has padded(features) numbers, x padded(dim).
    void map(real* y, const real* x) const {
        const index_t ld = padded(dim_);
        real total = eps_;
        for (index_t i = 0; i < features_; ++i) {
            y[i] = positive(dot_unaligned(weight_ + i * ld, x, ld) + bias_[i]);
            total += y[i];
        }
        for (index_t i = features_; i < padded(features_); ++i) y[i] = 0;
        if (!sums_ || (total < SMALLEST_NORMAL<real> && -total < SMALLEST_NORMAL<real>)) return;
        scale(y, y, 1 / total, padded(features_));
    }

private:
    const index_t dim_, features_;
    const bool sums_;
    const real eps_;
    const real* weight_ = nullptr;
    real *room_, *bias_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
