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

// written(s) = early_s decayed from s to the block's end, by halves of it.
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

}  // namespace fairseq_fastweights
