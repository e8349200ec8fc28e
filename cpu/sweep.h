// A sequence, chunk by chunk: forwards in time, and backwards over intervals whose states are computed again.
//
// `Chunk` is the arithmetic of one chunk of one head (`DiagonalChunk`, `DeltaChunk`; `SteppedChunk` and `ColumnChunk`
// forwards): open it, then forward; or open it, carry (or prepare), and later reopen and backward. `Interval`
// (`SumInterval`, `DecayedInterval`, `ColumnInterval`) is that of a whole interval backwards, for small states.
#pragma once

#include "intervals.h"
#include "scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real, class Chunk> void sweep_forward(const RuleCall& p, index_t begin, index_t end) {
    const index_t size = padded(p.key_dim) * state_row<real>(p.columns);
    Scratch<real> scratch;
    scratch.take(p.heads_per_item * size);
    { Chunk counted(p, scratch, false, 1); }
    scratch.allocate();
    real* states = scratch.take(p.heads_per_item * size);
    Chunk chunk(p, scratch, false, 1);
    const Intervals intervals(p);
    for (index_t number = begin; number < end; ++number) {
        const WorkItem item(p, number);
        const index_t b = item.batch;
        for (index_t h = item.first; h < item.last; ++h) {
            load_state(states + (h - item.first) * size, p, p.initial_state, b * p.heads + h);
        }
        // Heads lie side by side: all of them take a chunk of the same steps in turn, so that memory is read in order.
        for (index_t t = 0, rows; t < p.time; t += rows) {
            rows = chunk_rows(p, b, t);
            for (index_t h = item.first; h < item.last; ++h) {
                real* state = states + (h - item.first) * size;
                if (starts_at(p, b, t)) fill(state, real(0), size);
                if (p.interval > 0 && t > 0 && t % p.interval == 0) {
                    store_state(p.states, p, intervals.state(p, b, h, t / p.interval), state);
                }
                chunk.open(b, t, h, rows, 0);
                chunk.forward(state, begins_empty(p, b, t));
            }
        }
        for (index_t h = item.first; h < item.last; ++h) {
            const real* state = states + (h - item.first) * size;
            store_state(p.final_state, p, b * p.heads + h, state);
        }
    }
}

template <class real, class Chunk> void sweep_backward(const RuleCall& p, index_t begin, index_t end) {
    const index_t size = padded(p.key_dim) * state_row<real>(p.columns);
    const Intervals intervals(p);
    const index_t chunks = most_chunks(p, intervals);
    Scratch<real> scratch;
    scratch.take((p.heads_per_item + chunks) * size);
    { Chunk counted(p, scratch, true, chunks); }
    scratch.allocate();
    real* d_states = scratch.take((p.heads_per_item + chunks) * size);
    real* chunk_states = d_states + p.heads_per_item * size;
    Chunk chunk(p, scratch, true, chunks);
    for (index_t number = begin; number < end; ++number) {
        const WorkItem item(p, number);
        const index_t b = item.batch;
        for (index_t h = item.first; h < item.last; ++h) {
            load_state(d_states + (h - item.first) * size, p, p.d_final_state, b * p.heads + h);
        }
        for (index_t n = intervals.count - 1; n >= 0; --n) {
            const index_t first = intervals.begin(n), last = intervals.end(p, n);
            for (index_t h = item.first; h < item.last; ++h) {
                real* d_state = d_states + (h - item.first) * size;
                load_start(chunk_states, p, intervals, b, h, n);
                index_t slot = 0;
                for (index_t t = first, rows; t < last; t += rows, ++slot) {
                    real* state = chunk_states + slot * size;
                    rows = chunk_rows(p, b, t);
                    if (starts_at(p, b, t)) fill(state, real(0), size);
                    chunk.open(b, t, h, rows, slot);
                    if (t + rows == last) {
                        chunk.prepare(state, begins_empty(p, b, t));
                    } else {
                        copy(state + size, state, size);
                        chunk.carry(state + size, begins_empty(p, b, t));
                    }
                }
                for (index_t end = last; slot-- > 0;) {
                    const index_t t = chunk_begin(p, b, end - 1);
                    chunk.reopen(b, t, h, end - t, slot);
                    chunk.backward(chunk_states + slot * size, begins_empty(p, b, t), d_state, ends_unread(p, b, end));
                    if (starts_at(p, b, t)) fill(d_state, real(0), size);
                    end = t;
                }
            }
        }
        for (index_t h = item.first; h < item.last && p.d_initial_state != nullptr; ++h) {
            const real* d_state = d_states + (h - item.first) * size;
            store_state(p.d_initial_state, p, b * p.heads + h, d_state);
        }
    }
}

template <class real, class Interval> void sweep_intervals_backward(const RuleCall& p, index_t begin, index_t end) {
    const index_t Kp = padded(p.key_dim), Vp = padded(p.columns), Vs = state_row<real>(p.columns), size = Kp * Vs;
    const Intervals intervals(p);
    const index_t length = minimum(intervals.length, padded(p.time));
    Scratch<real> scratch;
    scratch.take(2 * (1 + p.heads_per_item) * size);
    { Interval counted(p, scratch, length); }
    scratch.allocate();
    // A state and, behind it, the same transposed: those at hand, and the gradients of each head.
    real* state = scratch.take(2 * (1 + p.heads_per_item) * size);
    real* d_states = state + 2 * size;
    Interval interval(p, scratch, length);
    for (index_t number = begin; number < end; ++number) {
        const WorkItem item(p, number);
        const index_t b = item.batch;
        for (index_t h = item.first; h < item.last; ++h) {
            real* d_state = d_states + 2 * (h - item.first) * size;
            load_state(d_state, p, p.d_final_state, b * p.heads + h);
            transpose(d_state + size, Kp, d_state, Vs, Kp, Vp);
        }
        for (index_t n = intervals.count - 1; n >= 0; --n) {
            const index_t first = intervals.begin(n), last = intervals.end(p, n);
            for (index_t h = item.first; h < item.last; ++h) {
                real* d_state = d_states + 2 * (h - item.first) * size;
                const index_t after = h + 1 < item.last ? n : n - 1;
                const Next next{intervals.begin(after), h + 1 < item.last ? h + 1 : item.first,
                                after < 0 ? 0 : intervals.end(p, after) - intervals.begin(after)};
                // Documents that begin within the interval apart, the last first.
                for (index_t end = last, begin; end > first; end = begin) {
                    begin = end - 1;
                    while (begin > first && !starts_at(p, b, begin)) --begin;
                    if (starts_at(p, b, begin)) {
                        fill(state, real(0), 2 * size);
                    } else {
                        load_start(state, p, intervals, b, h, n);
                        transpose(state + size, Kp, state, Vs, Kp, Vp);
                    }
                    interval.backward(b, begin, h, end - begin, state, state + size, d_state, d_state + size,
                                      begin == first ? next : Next{});
                    if (starts_at(p, b, begin)) fill(d_state, real(0), 2 * size);
                }
            }
        }
        for (index_t h = item.first; h < item.last && p.d_initial_state != nullptr; ++h) {
            store_state(p.d_initial_state, p, b * p.heads + h, d_states + 2 * (h - item.first) * size);
        }
    }
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
