// States on their way into scratch memory and out of it.
#pragma once

#include "vector.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Numbers from row to row of a state in scratch memory. Rows that lie whole multiples of 512 bytes apart would fall
// into so few sets of the first cache that two vectors of each of 128 rows do not stay there.
template <class real> constexpr index_t state_row(index_t values) {
    return padded(values) * sizeof(real) % 512 == 0 ? padded(values) + ROW : padded(values);
}

// States: (keys, columns) contiguous outside, rows of `state_row` in scratch memory, and zeros up to padded(keys) rows.
// These are written for every head: 0 times an infinite number of the head before may have left NaN there.
template <class real> inline void load_state(real* dst, const RuleCall& p, const void* src, index_t index) {
    const index_t ld = state_row<real>(p.columns), keys = src == nullptr ? 0 : p.key_dim;
    for (index_t e = 0; e < keys; ++e) {
        const real* from = static_cast<const real*>(src) + (index * p.key_dim + e) * p.value_dim;
        for (index_t m = 0; m < p.columns; ++m) dst[e * ld + m] = from[m];
        for (index_t m = p.columns; m < ld; ++m) dst[e * ld + m] = 0;
    }
    fill(dst + keys * ld, real(0), (padded(p.key_dim) - keys) * ld);
}

template <class real> inline void store_state(void* dst, const RuleCall& p, index_t index, const real* src) {
    const index_t ld = state_row<real>(p.columns);
    real* to = static_cast<real*>(dst) + index * p.key_dim * p.value_dim;
    for (index_t e = 0; e < p.key_dim; ++e) {
        for (index_t m = 0; m < p.columns; ++m) to[e * p.value_dim + m] = src[e * ld + m];
    }
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
