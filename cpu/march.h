// A sequence, chunk by chunk: forwards in time, and backwards over intervals whose states are computed again.
//
// `Chunk` is the arithmetic of one chunk of one head (`DiagonalChunk`, `DeltaChunk`): open, forward, carry, backward.
#pragma once

#include "chunk.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

template <class real, class Chunk> void march_forward(const Problem& p, index_t begin, index_t end) {
    const index_t size = p.keys * padded(p.values);
    Scratch<real> scratch;
    scratch.take(p.group * size);
    { Chunk counted(p, scratch, false); }
    scratch.allocate();
    real* states = scratch.take(p.group * size);
    Chunk chunk(p, scratch, false);
    const Intervals intervals(p);
    for (index_t number = begin; number < end; ++number) {
        const Task task(p, number);
        const index_t b = task.batch;
        for (index_t h = task.first; h < task.last; ++h) {
            load_state(states + (h - task.first) * size, p.initial_state, b * p.heads + h, p.keys, p.values);
        }
        // Heads lie side by side: all of them take a chunk of the same steps in turn, so that memory is read in order.
        for (index_t t = 0; t < p.time; t += CHUNK) {
            const index_t rows = minimum(CHUNK, p.time - t);
            for (index_t h = task.first; h < task.last; ++h) {
                real* state = states + (h - task.first) * size;
                if (p.interval > 0 && t > 0 && t % p.interval == 0) {
                    store_state(p.states, intervals.state(p, b, h, t / p.interval), state, p.keys, p.values);
                }
                chunk.open(b, t, h, rows, 1);
                chunk.forward(state, t == 0 && p.initial_state == nullptr);
            }
        }
        for (index_t h = task.first; h < task.last; ++h) {
            const real* state = states + (h - task.first) * size;
            store_state(p.final_state, b * p.heads + h, state, p.keys, p.values);
        }
    }
}

template <class real, class Chunk> void march_backward(const Problem& p, index_t begin, index_t end) {
    const index_t size = p.keys * padded(p.values);
    const Intervals intervals(p);
    const index_t chunks = minimum(intervals.length, padded(p.time)) / CHUNK;
    Scratch<real> scratch;
    scratch.take((p.group + chunks) * size);
    { Chunk counted(p, scratch, true); }
    scratch.allocate();
    real* d_states = scratch.take((p.group + chunks) * size);
    real* starts = d_states + p.group * size;
    Chunk chunk(p, scratch, true);
    for (index_t number = begin; number < end; ++number) {
        const Task task(p, number);
        const index_t b = task.batch;
        for (index_t h = task.first; h < task.last; ++h) {
            load_state(d_states + (h - task.first) * size, p.d_final_state, b * p.heads + h, p.keys, p.values);
        }
        for (index_t n = intervals.count - 1; n >= 0; --n) {
            const index_t first = intervals.begin(n), last = intervals.end(p, n);
            for (index_t h = task.first; h < task.last; ++h) {
                real* d_state = d_states + (h - task.first) * size;
                load_start(starts, p, intervals, b, h, n);
                for (index_t t = first; t + CHUNK < last; t += CHUNK) {
                    real* state = starts + (t - first) / CHUNK * size;
                    copy(state + size, state, size);
                    chunk.open(b, t, h, CHUNK, 1);
                    chunk.carry(state + size);
                }
                for (index_t t = first + (last - first - 1) / CHUNK * CHUNK; t >= first; t -= CHUNK) {
                    chunk.open(b, t, h, minimum(CHUNK, last - t), -1);
                    chunk.backward(starts + (t - first) / CHUNK * size, t == 0 && p.initial_state == nullptr, d_state,
                                   t + CHUNK >= p.time && p.d_final_state == nullptr);
                }
            }
        }
        for (index_t h = task.first; h < task.last && p.d_initial_state != nullptr; ++h) {
            const real* d_state = d_states + (h - task.first) * size;
            store_state(p.d_initial_state, b * p.heads + h, d_state, p.keys, p.values);
        }
    }
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
