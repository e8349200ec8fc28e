// Decays by dimension in a chunk of 64 steps, by secondary chunking (Yang et al. 2024), in a hierarchy of levels.
//
// With F_ts and Z_ts the products of the decays of keys and of values of the steps (s, t], t0 from before the chunk's
// start and es to its end, from S_0:
//   Y_t = Z_t0 * (S_0^T (q_t * F_t0)) + sum over s <= t of P_ts (v_s * Z_ts),   P_ts = <q_t, k_s * F_ts>
//   S_end = (F_e0 Z_e0^T) * S_0 + sum over s of (k_s * F_es) (v_s * Z_es)^T
// and for delta rules (Kimi delta attention, two-gate rules), E the erase keys, B = diag(beta), steps as rows,
//   (I + B G) U = B R,   R = V - (E * F_.0) S_0,   G_ts = <e_t, k_s * F_ts> for s < t
//   Y = (Q * F_.0) S_0 + P U,                      P_ts = <q_t, k_s * F_ts> for s <= t
//   S_end = diag(F_e0) S_0 + (K * F_e.)^T U
// Absent decays are 1, and an absent erase key is the key.
//
// Products with states are matrix products. Decays between two steps cannot be pulled out of the sums over dimensions,
// but with a middle m between them they can: F_ts = F_tm F_ms. So the chunk is halved down to single steps. A pair s <
// t is separated at the middle of level l, the highest bit in which s and t differ, and P_ts = <l_t, l_s> with l_t =
// q_t * F_tm in second halves and l_s = k_s * F_ms in first ones: rows of one matrix for each level. No factor exceeds
// 1, and nothing is divided or subtracted, as in the recurrent kernels. Levels 0 to 3 separate steps of a subchunk of
// 16, levels 4 and 5 subchunks. Forwards, subchunks are separated at the start of each instead: keys pass them as a
// state does, which rounds them once.
//
// Decayed operands are stored in the inputs' type again. Decays are at most 1: this rounding, or float16's underflow,
// costs no more than that of the inputs.
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

// True if `level` separates steps t and s; level -1 is a step with itself.
DEVICE constexpr bool parts(int level, int t, int s) { return (t ^ s) >> level == 1; }

// True if step t of a subchunk is in a second half of a level.
template <int Level>
DEVICE constexpr bool is_late(int block, int t) {
    return Level < kSubchunkLevels ? t >> Level & 1 : block >> (Level - kSubchunkLevels) & 1;
}

// A thread's numbers of one dimension of a subchunk.
using PerSubchunk = float[kSubchunk];

// The decays of 16 steps from `start` on, of one dimension of (batch, time, heads, dim), from their logs, whose sum is
// returned. 1 beyond any end.
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

// The product of the decays of the subchunks between `block` and `middle`, the first subchunk behind a middle; `totals`
// has those of subchunks.
template <typename M>
DEVICE float between(const M& totals, int column, int block, int middle) {
    float product = 1.0f;
    UNROLL_FOR (int i = 0; i < kSubchunks; ++i)
        if (i < middle ? i > block : i < block) product *= totals(i, column);
    return product;
}

// From the start: scale(t) = `by` times the decays of steps `first` to t. To the end: scale(s) = `by` times the decays
// of the steps after s.
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
