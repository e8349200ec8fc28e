// Decays by dimension in a block of 16 steps: pairs of its steps are parted by halving it.
//
// With F_ts and Z_ts the products of the decays of keys and of values of the steps (s, t], t0 from before the start and es to
// the end, steps that start from S_0 have
//   Y_t = Z_t0 * (S_0^T (q_t * F_t0)) + sum over s <= t of P_ts (v_s * Z_ts),   P_ts = <q_t, k_s * F_ts>
//   S_end = (F_e0 Z_e0^T) * S_0 + sum over s of (k_s * F_es) (v_s * Z_es)^T
// and with a correction (Kimi delta attention, two-gate rules), E the erase keys, B = diag(beta), steps as rows,
//   (I + B G) U = B R,   R = V - (E * F_.0) S_0,   G_ts = <e_t, k_s * F_ts> for s < t
//   Y = (Q * F_.0) S_0 + P U,                      P_ts = <q_t, k_s * F_ts> for s <= t
//   S_end = diag(F_e0) S_0 + (K * F_e.)^T U
// Absent decays are gates of 1, and where there is no erase key the key is read in its place.
//
// The products with states are those of matrices. Decays between two steps cannot be pulled out of the
// sums over dimensions, but with a step m between them they can: F_ts = F_tm F_ms. So the block is halved, and its
// halves are, down to single steps: each pair s < t is parted by one of these halvings, and P_ts = <x_t, x_s> with x_t
// = q_t * F_tm and x_s = k_s * F_ms, m the last step of the first half. Each of the four levels is a product of
// matrices, of whose 16 x 16 elements some are wanted. No factor exceeds 1, and nothing is divided or subtracted, as in
// the recurrent kernels.
//
// What is scaled by decays is stored in the inputs' type again. They are at most 1: what this rounds off, or what
// float16 loses of the smallest, is no more than what storing the inputs did.
#pragma once

#include "block.cuh"

namespace fairseq_fastweights {

constexpr int kSteps = 16;  // of a block
constexpr int kHalf = kSteps / 2;
constexpr int kLevels = 4;  // halves of 1, 2, 4 and 8 steps
static_assert(1 << kLevels == kSteps, "halved down to single steps");

// The rest is of one dimension of a block, in a thread's registers.

// The logs of the gates of 16 steps from `start` on, of one dimension of (batch, time, heads, dim). 0 past any end.
template <typename T>
__device__ __forceinline__ void load_logs(float (&to)[kSteps], const Sequence& logs, int batch, int head, int dimension,
                                          int dim, int start, int time) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) to[t] = 0.0f;
    if (logs.data == nullptr || dimension >= dim) return;
    const int64_t first = batch * logs.batch + start * logs.time + head * logs.head + dimension;
    const int64_t stride = opaque(logs.time);
    const auto load = [&](const auto* from) {
        if (start + kSteps <= time) {
#pragma unroll
            for (int t = 0; t < kSteps; ++t, from += stride) to[t] = widen<float>(*from);
        } else {
#pragma unroll
            for (int t = 0; t < kSteps; ++t, from += stride)
                if (start + t < time) to[t] = widen<float>(*from);
        }
    };
    // Logs of decays may be float32 beside inputs of 16 bits.
    if (logs.dtype == kFloat32)
        load(static_cast<const float*>(logs.data) + first);
    else
        load(static_cast<const T*>(logs.data) + first);
}

__device__ __forceinline__ void exponentiate(float (&logs)[kSteps]) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) logs[t] = expf(logs[t]);
}

// A column of a matrix.
template <typename M>
struct Column {
    typename M::Element* first;
    int stride;

    __device__ __forceinline__ Column(const M& matrix, int column) : first(&matrix(0, column)), stride(matrix.stride) {}
    __device__ __forceinline__ float get(int t) const { return widen<float>(first[t * stride]); }
    __device__ __forceinline__ void set(int t, float value) const {
        first[t * stride] = narrow<typename M::Element>(value);
    }
};

template <typename M>
__device__ __forceinline__ void load_column(float (&to)[kSteps], const M& from, int column) {
    const Column<M> source(from, column);
#pragma unroll
    for (int t = 0; t < kSteps; ++t) to[t] = source.get(t);
}

// The part that is left of each of the 2 Half steps about `middle` there, and in the second half of what was there.
template <int Half>
__device__ __forceinline__ void scale_halves(float (&scale)[2 * Half], const float (&gates)[kSteps], int middle) {
    float product = 1.0f;
#pragma unroll
    for (int s = Half - 1; s >= 0; --s) {
        scale[s] = product;
        product *= gates[middle - Half + s];
    }
    product = 1.0f;
#pragma unroll
    for (int t = Half; t < 2 * Half; ++t) scale[t] = product *= gates[middle - Half + t];
}

__device__ __forceinline__ float product_of(const float (&gates)[kSteps], int begin = 0, int end = kSteps) {
    float product = 1.0f;
#pragma unroll
    for (int t = 0; t < kSteps; ++t)
        if (t >= begin && t < end) product *= gates[t];
    return product;
}

// reading(t) = late_t decayed from before the block to t.
template <typename M>
__device__ __forceinline__ void write_reading(const M& reading, const float (&late)[kSteps],
                                              const float (&gates)[kSteps], int column) {
    const Column<M> target(reading, column);
    float product = 1.0f;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) target.set(t, late[t] * (product *= gates[t]));
}

// written(s) = early_s decayed from s to the block's end, by halves of it, as `write_operands` has it.
template <typename M>
__device__ __forceinline__ void write_written(const M& written, const float (&early)[kSteps],
                                              const float (&gates)[kSteps], int column) {
    const Column<M> target(written, column);
    float after = 1.0f, product = 1.0f;
#pragma unroll
    for (int s = kSteps - 1; s >= 0; --s) {
        if (s == kHalf - 1) {
            after = product_of(gates, kHalf);
            product = 1.0f;
        }
        target.set(s, early[s] * (product * after));
        product *= gates[s];
    }
}

// A level's x in the steps from `First` on, half of a block: of `early` in first halves, of `late` in second ones.
// `Early` false: only the latter.
template <int Half, int First, bool Early, typename M>
__device__ __forceinline__ void write_level(const M& level, const float (&late)[kHalf], const float (&early)[kHalf],
                                            const float (&gates)[kSteps], int column) {
    const Column<M> target(level, column);
#pragma unroll
    for (int start = 0; start < kHalf; start += 2 * Half) {
        float scale[2 * Half];
        scale_halves<Half>(scale, gates, First + start + Half);
#pragma unroll
        for (int i = Early ? 0 : Half; i < 2 * Half; ++i)
            target.set(First + start + i, (i < Half ? early[start + i] : late[start + i]) * scale[i]);
    }
}

template <int First, bool Early, typename M>
__device__ __forceinline__ void write_operands_of_half(const M& late, const M& early, const M (&levels)[kLevels],
                                                       const M& reading, const M& written, const float (&gates)[kSteps],
                                                       int column) {
    float lates[kHalf], earlies[kHalf];
    const Column<M> from_late(late, column), from_early(early, column);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        lates[i] = from_late.get(First + i);
        earlies[i] = Early ? from_early.get(First + i) : 0.0f;
    }
    write_level<1, First, Early>(levels[0], lates, earlies, gates, column);
    write_level<2, First, Early>(levels[1], lates, earlies, gates, column);
    write_level<4, First, Early>(levels[2], lates, earlies, gates, column);
    const Column<M> to_level(levels[3], column), to_reading(reading, column), to_written(written, column);
    const float before = product_of(gates, 0, First), after = product_of(gates, First + kHalf, kSteps);
    float product = 1.0f;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        product *= gates[First + i];
        if (First > 0) to_level.set(First + i, lates[i] * product);
        to_reading.set(First + i, lates[i] * (before * product));
    }
    if constexpr (!Early) return;
    product = 1.0f;
#pragma unroll
    for (int i = kHalf - 1; i >= 0; --i) {
        if (First == 0) to_level.set(i, earlies[i] * product);
        to_written.set(First + i, earlies[i] * (product * after));
        product *= gates[First + i];
    }
}

// All that products take of a dimension: the levels' x, and what `write_reading` and `write_written` write. One half
// after the other: that takes fewer registers. `Early` false: only what is of `late`.
template <bool Early = true, typename M>
__device__ __forceinline__ void write_operands(const M& late, const M& early, const M (&levels)[kLevels],
                                               const M& reading, const M& written, const float (&gates)[kSteps],
                                               int column) {
    write_operands_of_half<0, Early>(late, early, levels, reading, written, gates, column);
    write_operands_of_half<kHalf, Early>(late, early, levels, reading, written, gates, column);
}

// A value dimension's outputs, by store(t, it), where what is read of the block's start is `reads`, and weights(t, s) P_ts.
template <typename Reads, typename Weights, typename Store>
__device__ __forceinline__ void write_outputs(const Reads& reads, const Weights& weights, const float (&early)[kSteps],
                                              const float (&gates)[kSteps], int column, Store store) {
    const Column<Reads> from(reads, column);
    float product = 1.0f;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
        product *= gates[t];
        float sum = 0.0f, four[4];
#pragma unroll
        for (int s = 0; s <= t; ++s) {
            if (s % 4 == 0) load_row(four, &weights(t, s));
            if (s > 0) sum *= gates[s];
            sum += four[s % 4] * early[s];
        }
        store(t, product * from.get(t) + sum);
    }
}

}  // namespace fairseq_fastweights
