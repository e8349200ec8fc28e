// What all kernels share: scratch memory, the rows of a chunk, and states on their way in and out.
#pragma once

#include <cstddef>
#include <new>

#include "matrix.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

// Steps that are computed at once. A product of a chunk's rows then fills one vector of 16 floats.
constexpr index_t CHUNK = 16;

// Scratch memory of one thread: counted first, then taken piece by piece.
template <class real> class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { ::operator delete(memory_, std::align_val_t(64)); }

    // The first time around every piece is null; `allocate` then makes them real for the second.
    real* take(index_t n) {
        real* piece = memory_ ? memory_ + taken_ : nullptr;
        taken_ += padded(n);
        return piece;
    }
    void allocate() {
        memory_ = static_cast<real*>(::operator new(static_cast<size_t>(taken_) * sizeof(real), std::align_val_t(64)));
        for (index_t i = 0; i < taken_; ++i) memory_[i] = 0;
        taken_ = 0;
    }

private:
    real* memory_ = nullptr;
    index_t taken_ = 0;
};

FAST_WEIGHTS_INLINE index_t minimum(index_t a, index_t b) { return a < b ? a : b; }

FAST_WEIGHTS_INLINE index_t place(const Sequence& x, index_t b, index_t t, index_t h) {
    return b * x.batch + t * x.time + h / x.sharing * x.head;
}

// Fetches the rows t .. t + rows of a head, of n numbers. In line, as GCC leaves out calls that do nothing but fetch.
FAST_WEIGHTS_INLINE void fetch_steps(const Sequence& x, index_t b, index_t t, index_t h, index_t rows, index_t n) {
    with_type(x, place(x, b, t, h), [&](const auto* p) __attribute__((always_inline)) {
        for (index_t i = 0; i < rows; ++i) fetch(p + i * x.time, n * sizeof(*p));
    });
}

// The rows t .. t + rows of a head, and zeros up to CHUNK rows. `direction` is that in which time goes on, 1 or -1, or 0 if
// the next steps are not to be fetched.
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
    if (direction != 0) fetch_steps(x, b, t + direction * CHUNK, h, rows, n);
    store_rows(x, place(x, b, t, h), x.time, src, rows, n);
}

// Numbers from row to row of a state in scratch memory. Rows that lie whole multiples of 512 bytes apart would fall into so
// few sets of the first cache that two vectors of each of 128 rows do not stay there.
template <class real> constexpr index_t state_row(index_t values) {
    return padded(values) * sizeof(real) % 512 == 0 ? padded(values) + ROW : padded(values);
}

// The gates of a chunk's steps: one decay for the whole state, and what keys are multiplied by. Steps beyond the last
// keep all and write nothing.
template <class real> struct Gates {
    real keep[CHUNK] __attribute__((aligned(64))), write[CHUNK] __attribute__((aligned(64)));

    void load(const Problem& p, index_t b, index_t t, index_t h, index_t rows) {
        for (index_t i = 0; i < CHUNK; ++i) {
            keep[i] = write[i] = i < rows ? load_one<real>(p.log_gate, place(p.log_gate, b, t + i, h)) : real(0);
        }
        exponentiate(keep, CHUNK);
        p.complement ? exponentiate_to_one(write, CHUNK) : fill(write, real(1), CHUNK);
    }

    // k = what is written of it.
    void apply(real* k, index_t rows, index_t ld) const {
        for (index_t i = 0; i < rows; ++i) scale(k + i * ld, k + i * ld, write[i], ld);
    }

    // `dk` comes as the gradient of the multiplied keys and becomes that of `k`; d_log lacks what passes through these.
    void store_gradient(const Problem& p, index_t b, index_t t, index_t h, index_t rows, real* d_log, real* dk,
                        const real* k, index_t ld) const {
        for (index_t i = 0; i < rows; ++i) {
            if (p.complement) {
                // k (1 - g): d(1 - g) / d log g = -g.
                d_log[i] -= keep[i] * dot(dk + i * ld, k + i * ld, ld);
                scale(dk + i * ld, dk + i * ld, write[i], ld);
            }
            store_one(p.d_log_gate, place(p.d_log_gate, b, t + i, h), d_log[i]);
        }
    }
};

// States: (keys, columns) contiguous outside, rows of `state_row` in scratch memory, and zeros up to padded(keys) rows.
// These are written for every head: 0 times what was infinite in the one before may have left NaN there.
template <class real> inline void load_state(real* dst, const Problem& p, const void* src, index_t index) {
    const index_t ld = state_row<real>(p.values), keys = src == nullptr ? 0 : p.keys;
    for (index_t e = 0; e < keys; ++e) {
        const real* from = static_cast<const real*>(src) + (index * p.keys + e) * p.columns;
        for (index_t m = 0; m < p.values; ++m) dst[e * ld + m] = from[m];
        for (index_t m = p.values; m < ld; ++m) dst[e * ld + m] = 0;
    }
    fill(dst + keys * ld, real(0), (padded(p.keys) - keys) * ld);
}

template <class real> inline void store_state(void* dst, const Problem& p, index_t index, const real* src) {
    const index_t ld = state_row<real>(p.values);
    real* to = static_cast<real*>(dst) + index * p.keys * p.columns;
    for (index_t e = 0; e < p.keys; ++e) {
        for (index_t m = 0; m < p.values; ++m) to[e * p.columns + m] = src[e * ld + m];
    }
}

// x (CHUNK, CHUNK) keeps what is on and below its diagonal (`kept` 0), or below it only (`kept` -1). The rest is
// replaced, not multiplied by 0: it may be infinite.
template <class real> inline void lower_part(real* x, index_t kept) {
    using index = typename Index<real>::type;
    constexpr int W = Vector<real>::lanes;
    for (int t = 0; t < CHUNK; ++t) {
        for (int j = 0; j < CHUNK; j += W) {
            const index lost = lane_numbers<real>() + j > index{} + (t + static_cast<int>(kept));
            store(x + t * CHUNK + j, lost ? vec<real>{} : load(x + t * CHUNK + j));
        }
    }
}

// Which part of a call a task is: a row of the batch and some of its heads.
struct Task {
    index_t batch, first, last;
    Task(const Problem& p, index_t task) {
        const index_t groups = p.groups();
        batch = task / groups;
        first = task % groups * p.group;
        last = minimum(first + p.group, p.heads);
    }
};

// The stretches of time between kept states.
struct Intervals {
    index_t length, count;
    explicit Intervals(const Problem& p)
        : length(p.interval > 0 ? p.interval : padded(p.time)), count((p.time + length - 1) / length) {}
    index_t begin(index_t n) const { return n * length; }
    index_t end(const Problem& p, index_t n) const { return minimum(p.time, (n + 1) * length); }
    // Of the state before interval n, n at least 1, in Problem::states.
    index_t state(const Problem& p, index_t b, index_t h, index_t n) const {
        return (b * p.heads + h) * (count - 1) + n - 1;
    }
};

// Whether step t of a row begins a document, so that nothing of the steps before it reaches it.
inline bool starts_at(const Problem& p, index_t b, index_t t) {
    return p.starts != nullptr && p.starts[b * p.time + t];
}

// Chunks begin at multiples of CHUNK and where documents do. The first step of the one that step t is in, and the steps
// from its first, t, on to its end.
inline index_t chunk_begin(const Problem& p, index_t b, index_t t) {
    while (t % CHUNK != 0 && !starts_at(p, b, t)) --t;
    return t;
}
inline index_t chunk_rows(const Problem& p, index_t b, index_t t) {
    const index_t most = minimum(CHUNK - t % CHUNK, p.time - t);
    index_t rows = 1;
    while (rows < most && !starts_at(p, b, t + rows)) ++rows;
    return p.starts == nullptr ? most : rows;
}

// Whether the state before step t is all zeros, and whether nothing is asked of the one before step t, or the final one.
inline bool begins_empty(const Problem& p, index_t b, index_t t) {
    return (t == 0 && p.initial_state == nullptr) || starts_at(p, b, t);
}
inline bool ends_unread(const Problem& p, index_t b, index_t t) {
    return t >= p.time ? p.d_final_state == nullptr : starts_at(p, b, t);
}

// The most chunks that an interval has.
inline index_t most_chunks(const Problem& p, const Intervals& intervals) {
    if (p.starts == nullptr) return minimum(intervals.length, padded(p.time)) / CHUNK;
    index_t most = 0;
    for (index_t b = 0; b < p.batch; ++b) {
        for (index_t n = 0; n < intervals.count; ++n) {
            index_t chunks = 0;
            for (index_t t = intervals.begin(n); t < intervals.end(p, n); t += chunk_rows(p, b, t)) ++chunks;
            most = chunks > most ? chunks : most;
        }
    }
    return most;
}

// The steps that a task takes after those at hand, `rows` of them from t on; none if these are the last.
struct Next {
    index_t t, h, rows;
};

// The state before interval n: a kept one, or the initial one.
template <class real>
inline void load_start(real* dst, const Problem& p, const Intervals& intervals, index_t b, index_t h, index_t n) {
    if (n == 0) {
        load_state(dst, p, p.initial_state, b * p.heads + h);
    } else {
        load_state(dst, p, p.states, intervals.state(p, b, h, n));
    }
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
