// Decays by dimension, backwards: a dimension's gradients in a chunk, and what registers these leave for states. The
// equations are in decays_backward.cu.
#pragma once

#include "decays.cuh"

namespace fairseq_fastweights {

// The pairs of steps from `First` on, half of a chunk, that are parted at the middles of 2 Half of them.
template <int Half, int First>
__device__ __forceinline__ void differentiate_level(const Matrix<float>& weights, const float (&late)[kHalf],
                                                    const float (&early)[kHalf], const float (&gates)[kSteps],
                                                    float (&d_late)[kHalf], float (&d_early)[kHalf],
                                                    float (&d_log)[kHalf]) {
#pragma unroll
    for (int start = 0; start < kHalf; start += 2 * Half) {
        float scale[2 * Half], x[2 * Half], row[Half];
        scale_halves<Half>(scale, gates, First + start + Half);
#pragma unroll
        for (int i = 0; i < 2 * Half; ++i) x[i] = scale[i] * (i < Half ? early[start + i] : late[start + i]);
        float run = 0.0f;
#pragma unroll
        for (int t = 2 * Half - 1; t >= Half; --t) {
            load_row(row, &weights(First + start + t, First + start));
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < Half; ++s) sum += row[s] * x[s];
            d_late[start + t] += scale[t] * sum;
            d_log[start + t] += run += x[t] * sum;
        }
        run = 0.0f;
#pragma unroll
        for (int s = 0; s < Half; ++s) {
            load_row(row, &weights(First + start + s, First + start + Half));
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < Half; ++t) sum += row[t] * x[Half + t];
            d_early[start + s] += scale[s] * sum;
            d_log[start + s] += run;
            run += x[s] * sum;
        }
    }
}

// One dimension's gradients in the steps from `First` on, half of a chunk (which takes fewer registers than all of it),
// of a Side that has
//   late, early, weights   the pairs' rows, and what each pair's product is weighted with, mirrored
//   reads, writes          gradients of `late` decayed from the chunk's start, and of `early` decayed to its end
//   d_late(), d_log()      where the gradients of `late` and of the logs go; those of `early` go to `writes`
//   passing, parts         of which sums are the gradients of what passes the whole chunk
// With `Adds` there are no writes and nothing passes: the gradients of `early` and of the logs are added to those
// there, and where `same`, `late` is `early`, whose gradient has that of `late`, too.
// `read`: the sum over the second half of late * d late as far as it passes the chunk's start, found in the second half
// and used in the first. Returned is the same of early * d early as far as it passes the chunk's end.
template <int First, bool Adds, typename Side>
__device__ __forceinline__ float differentiate_half(const Side& side, const float (&gates)[kSteps], int column,
                                                    float& read) {
    constexpr bool kSecond = First == kHalf;
    const Column lates(side.late, column), earlies(side.early, column);
    const Column d_lates(side.d_late(), column);  // of another type, maybe
    const Column<float> reads(side.reads, column), writes(side.writes, column), d_logs(side.d_log(), column);
    float late[kHalf], early[kHalf], d_late[kHalf], d_early[kHalf], d_log[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        late[i] = lates.get(First + i);
        early[i] = earlies.get(First + i);
    }
    const float before = product_of(gates, 0, First), after = product_of(gates, First + kHalf, kSteps);

    // Pairs with a step of the other half.
    float x[kHalf], scale[kHalf], row[kHalf];
    float product = 1.0f, run = 0.0f;
    if constexpr (kSecond) {
#pragma unroll
        for (int s = kHalf - 1; s >= 0; --s) {
            x[s] = earlies.get(s) * product;
            product *= gates[s];
        }
        product = 1.0f;
#pragma unroll
        for (int t = 0; t < kHalf; ++t) scale[t] = product *= gates[kHalf + t];
    } else {
#pragma unroll
        for (int t = 0; t < kHalf; ++t) x[t] = lates.get(kHalf + t) * (product *= gates[kHalf + t]);
        product = 1.0f;
#pragma unroll
        for (int s = kHalf - 1; s >= 0; --s) {
            scale[s] = product;
            product *= gates[s];
        }
    }
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
        const int i = kSecond ? kHalf - 1 - n : n;
        load_row(row, &side.weights(First + i, kHalf - First));
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kHalf; ++j) sum += row[j] * x[j];
        sum *= scale[i];
        d_late[i] = kSecond ? sum : 0.0f;
        d_early[i] = kSecond ? 0.0f : sum;
        if (!kSecond) d_log[i] = run;
        run += (kSecond ? late[i] : early[i]) * sum;
        if (kSecond) d_log[i] = run;
    }

    // Pairs of steps of this half.
    differentiate_level<4, First>(side.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<2, First>(side.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<1, First>(side.weights, late, early, gates, d_late, d_early, d_log);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float weight = side.weights(First + i, First + i);
        d_late[i] += weight * early[i];
        d_early[i] += weight * late[i];
    }

    // The gradient that passes the chunk's start, or its end.
    product = before;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        x[i] = (product *= gates[First + i]) * reads.get(First + i);
        d_late[i] += x[i];
    }
    run = kSecond ? 0.0f : read;
#pragma unroll
    for (int i = kHalf - 1; i >= 0; --i) d_log[i] += run += late[i] * x[i];
    read = run;
    if constexpr (Adds) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            if (side.same) d_early[i] += d_late[i];
            writes.set(First + i, writes.get(First + i) + d_early[i]);
            d_logs.set(First + i, d_logs.get(First + i) + d_log[i]);
            d_lates.set(First + i, d_late[i]);
        }
        return 0.0f;
    } else {
        product = after;
#pragma unroll
        for (int i = kHalf - 1; i >= 0; --i) {
            x[i] = product * writes.get(First + i);
            d_early[i] += x[i];
            product *= gates[First + i];
        }
        run = 0.0f;
        if constexpr (!kSecond) {
            for (int i = 0; i < side.parts; ++i) run += side.passing(i, column);
            run *= product_of(gates);
        }
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            d_log[i] += run;
            run += early[i] * x[i];
            d_lates.set(First + i, d_late[i]);
            writes.set(First + i, d_early[i]);
            d_logs.set(First + i, d_log[i]);
        }
        return run;
    }
}

template <bool Adds = false, typename Side>
__device__ __forceinline__ void differentiate_column(const Side& side, const float (&gates)[kSteps], int column) {
    float read;
    differentiate_half<kHalf, Adds>(side, gates, column, read);
    const float passing =
        differentiate_half<0, Adds>(side, gates, column, read);  // all of the second half's steps, too
    if constexpr (Adds) return;
    const Column<float> d_logs(side.d_log(), column);
#pragma unroll
    for (int t = kHalf; t < kSteps; ++t) d_logs.set(t, d_logs.get(t) + passing);
}

// Queries with keys, or erase keys with keys, as `differentiate_column` takes them.
template <typename T, typename DLate>
struct Readers {
    Matrix<T> late, early;
    Matrix<float> weights, reads, writes, of_logs, passing;
    Matrix<DLate> of_late;
    int parts;
    bool same;
    __device__ __forceinline__ const Matrix<DLate>& d_late() const { return of_late; }
    __device__ __forceinline__ const Matrix<float>& d_log() const { return of_logs; }
};

}  // namespace fairseq_fastweights
