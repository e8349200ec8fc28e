// How a call is divided: among work items, by kept states, in chunks, and where documents begin.
#pragma once

#include "rows.h"
#include "states.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// A work item: some heads of a row of the batch.
struct WorkItem {
    index_t batch, first, last;
    WorkItem(const RuleCall& p, index_t item) {
        const index_t groups = p.head_groups();
        batch = item / groups;
        first = item % groups * p.heads_per_item;
        last = minimum(first + p.heads_per_item, p.heads);
    }
};

// The spans of time between kept states.
struct Intervals {
    index_t length, count;
    explicit Intervals(const RuleCall& p)
        : length(p.interval > 0 ? p.interval : padded(p.time)), count((p.time + length - 1) / length) {}
    index_t begin(index_t n) const { return n * length; }
    index_t end(const RuleCall& p, index_t n) const { return minimum(p.time, (n + 1) * length); }
    // The place of the state before interval n, n at least 1, in RuleCall::states.
    index_t state(const RuleCall& p, index_t b, index_t h, index_t n) const {
        return (b * p.heads + h) * (count - 1) + n - 1;
    }
};

// True if step t of a row begins a document, so that nothing of the steps before it reaches it.
inline bool starts_at(const RuleCall& p, index_t b, index_t t) {
    return p.starts != nullptr && p.starts[b * p.time + t];
}

// Chunks begin at multiples of CHUNK and where documents do. The first step of the one that step t is in, and the steps
// from its first, t, on to its end.
inline index_t chunk_begin(const RuleCall& p, index_t b, index_t t) {
    while (t % CHUNK != 0 && !starts_at(p, b, t)) --t;
    return t;
}
inline index_t chunk_rows(const RuleCall& p, index_t b, index_t t) {
    const index_t most = minimum(CHUNK - t % CHUNK, p.time - t);
    index_t rows = 1;
    while (rows < most && !starts_at(p, b, t + rows)) ++rows;
    return p.starts == nullptr ? most : rows;
}

// True if the state before step t is all zeros; and if nothing is asked of the one before step t, or the final one.
inline bool begins_empty(const RuleCall& p, index_t b, index_t t) {
    return (t == 0 && p.initial_state == nullptr) || starts_at(p, b, t);
}
inline bool ends_unread(const RuleCall& p, index_t b, index_t t) {
    return t >= p.time ? p.d_final_state == nullptr : starts_at(p, b, t);
}

// The most chunks that an interval has.
inline index_t most_chunks(const RuleCall& p, const Intervals& intervals) {
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

// The steps that a work item takes next, `rows` of them from t on; none if these are the last.
struct Next {
    index_t t, h, rows;
};

// The state before interval n: a kept one, or the initial one.
template <class real>
inline void load_start(real* dst, const RuleCall& p, const Intervals& intervals, index_t b, index_t h, index_t n) {
    if (n == 0) {
        load_state(dst, p, p.initial_state, b * p.heads + h);
    } else {
        load_state(dst, p, p.states, intervals.state(p, b, h, n));
    }
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
