// Decays by dimension in a chunk of 64 steps: pairs of its steps are parted by halving it.
//
// With F_ts and Z_ts the products of the decays of keys and of values of the steps (s, t], t0 from before the chunk's start and es
// to its end, steps that start from S_0 have
//   Y_t = Z_t0 * (S_0^T (q_t * F_t0)) + sum over s <= t of P_ts (v_s * Z_ts),   P_ts = <q_t, k_s * F_ts>
//   S_end = (F_e0 Z_e0^T) * S_0 + sum over s of (k_s * F_es) (v_s * Z_es)^T
// and with a correction (Kimi delta attention, two-gate rules), E the erase keys, B = diag(beta), steps as rows,
//   (I + B G) U = B R,   R = V - (E * F_.0) S_0,   G_ts = <e_t, k_s * F_ts> for s < t
//   Y = (Q * F_.0) S_0 + P U,                      P_ts = <q_t, k_s * F_ts> for s <= t
//   S_end = diag(F_e0) S_0 + (K * F_e.)^T U
// Absent decays are gates of 1, and where there is no erase key the key is read in its place.
//
// The products with states are those of matrices. Decays between two steps cannot be pulled out of the sums over dimensions, but
// with a middle m between them they can: F_ts = F_tm F_ms. So the chunk is halved, and its halves are, down to single steps: a pair
// s < t is parted at one of these middles, that of level l if l is the highest bit in which s and t differ, and P_ts = <x_t, x_s>
// with x_t = q_t * F_tm in second halves and x_s = k_s * F_ms in first ones: rows of one matrix for each level. No factor exceeds 1,
// and nothing is divided or subtracted, as in the recurrent kernels. Levels 0 to 3 part steps of a block of 16, 4 and 5 blocks.
// Forward, blocks are parted at the start of each instead: what is written passes them as a state does, which rounds it once.
//
// What is scaled by decays is stored in the inputs' type again. They are at most 1: what this rounds off, or what float16 loses of
// the smallest, is no more than what storing the inputs did.
#pragma once

#include "shared_memory.cuh"
#include "workspace.cuh"

namespace fairseq_fastweights {

constexpr int kSubchunkLevels = 4, kLevels = 6;
static_assert(1 << kSubchunkLevels == kSubchunk && 1 << kLevels == kChunk, "halved down to single steps");

// f(an integral_constant) for each level from `First` on, below `Last`.
template <int First, int Last, typename Function>
DEVICE void each_level(Function f) {
    if constexpr (First < Last) {
        f(std::integral_constant<int, First>());
        each_level<First + 1, Last>(f);
    }
}

// The level that parts a pair of steps, or -1 of a step with itself, is asked for by its number: true if it is `level`.
DEVICE constexpr bool parts(int level, int t, int s) { return (t ^ s) >> level == 1; }

// True if step t of a block is in a second half of a level.
template <int Level>
DEVICE constexpr bool is_late(int block, int t) {
    return Level < kSubchunkLevels ? t >> Level & 1 : block >> (Level - kSubchunkLevels) & 1;
}

// The rest is of one dimension of a block, in a thread's registers.
using PerSubchunk = float[kSubchunk];

// The gates of 16 steps from `start` on, of one dimension of (batch, time, heads, dim), from their logs, whose sum it returns. 1 past
// any end.
template <typename T>
DEVICE float load_gates(PerSubchunk& gates, const Sequence& logs, int batch, int head, int dimension, int dim,
                        int start, int time) {
    const int there = logs.data == nullptr || dimension >= dim ? 0 : time - start;
    const int64_t first = batch * logs.batch + start * logs.time + head * logs.head + dimension;
    const int64_t stride = opaque(logs.time);
    const auto load = [&](const auto* from) {
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t, from += stride) gates[t] = t < there ? widen<float>(*from) : 0.0f;
    };
    // Logs of decays may be float32 beside inputs of 16 bits.
    logs.dtype == kFloat32 ? load(static_cast<const float*>(logs.data) + first)
                           : load(static_cast<const T*>(logs.data) + first);
    float sum = 0.0f;
    UNROLL_FOR (float& gate : gates) sum += gate, gate = expf(gate);
    return sum;
}

// The decays of the blocks between a block and `middle`, the number of the first block behind a middle; `totals` has those of blocks.
template <typename M>
DEVICE float between(const M& totals, int column, int block, int middle) {
    float product = 1.0f;
    UNROLL_FOR (int i = 0; i < kSubchunks; ++i)
        if (i < middle ? i > block : i < block) product *= totals(i, column);
    return product;
}

// scale(t) = what is left of the start of `count` steps, decayed by `by`, at step t; of step s at their end, decayed by `by` then.
DEVICE void scale_from_start(PerSubchunk& scale, const PerSubchunk& gates, float by, int first = 0,
                             int count = kSubchunk) {
    UNROLL_FOR (int t = first; t < first + count; ++t) scale[t] = by *= gates[t];
}
DEVICE void scale_to_end(PerSubchunk& scale, const PerSubchunk& gates, float by, int first = 0, int count = kSubchunk) {
    UNROLL_FOR (int s = first + count - 1; s >= first; --s) scale[s] = by, by *= gates[s];
}

// scale(t) = F_tm in second halves of a level, F_mt in first ones.
template <int Level, typename M>
DEVICE void scale_to_middle(PerSubchunk& scale, const PerSubchunk& gates, const M& totals, int column, int block) {
    if constexpr (Level < kSubchunkLevels) {
        constexpr int kHalf = 1 << Level;
        UNROLL_FOR (int first = 0; first < kSubchunk; first += 2 * kHalf) {
            scale_to_end(scale, gates, 1.0f, first, kHalf);
            scale_from_start(scale, gates, 1.0f, first + kHalf, kHalf);
        }
    } else {
        constexpr int kShift = Level - kSubchunkLevels;
        const float by = between(totals, column, block, (block >> kShift | 1) << kShift);
        if (is_late<Level>(block, 0))
            scale_from_start(scale, gates, by);
        else
            scale_to_end(scale, gates, by);
    }
}

template <typename M>
DEVICE void load_column(PerSubchunk& to, const M& from, int column) {
    UNROLL_FOR (int t = 0; t < kSubchunk; ++t) to[t] = from.get(t, column);
}

}  // namespace fairseq_fastweights
