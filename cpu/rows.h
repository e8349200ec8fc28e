// The rows of a chunk's steps, into scratch memory and back.
#pragma once

#include "vector.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Steps that are computed at once. A product of a chunk's rows then fills one vector of 16 floats.
constexpr index_t CHUNK = 16;

FAST_WEIGHTS_INLINE index_t minimum(index_t a, index_t b) { return a < b ? a : b; }

FAST_WEIGHTS_INLINE index_t place(const Sequence& x, index_t b, index_t t, index_t h) {
    return b * x.batch + t * x.time + h / x.sharing * x.head;
}

// Fetches the rows t .. t + rows of a head, of n numbers. In line, as GCC leaves out calls that do nothing but
// prefetch.
FAST_WEIGHTS_INLINE void prefetch_steps(const Sequence& x, index_t b, index_t t, index_t h, index_t rows, index_t n) {
    with_type(x, place(x, b, t, h), [&](const auto* p) __attribute__((always_inline)) {
        for (index_t i = 0; i < rows; ++i) prefetch(p + i * x.time, n * sizeof(*p));
    });
}

// The rows t .. t + rows of a head, and zeros up to CHUNK rows. `direction` is that in which time goes on, 1 or -1, or
// 0 if the next steps are not to be fetched.
template <class real>
inline void load_steps(real* dst, const Sequence& x, index_t b, index_t t, index_t h, index_t rows, index_t n,
                       index_t direction) {
    load_rows(dst, x, place(x, b, t, h), x.time, rows, n, direction * CHUNK * x.time);
    if (rows < CHUNK) fill(dst + rows * padded(n), real(0), (CHUNK - rows) * padded(n));
}

// `direction` as above: where the next steps' rows belong is fetched too, 0 if it has been.
template <class real>
inline void store_steps(const Sequence& x, index_t b, index_t t, index_t h, real* src, index_t rows, index_t n,
                        index_t direction) {
    if (direction != 0) prefetch_steps(x, b, t + direction * CHUNK, h, rows, n);
    store_rows(x, place(x, b, t, h), x.time, src, rows, n);
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
