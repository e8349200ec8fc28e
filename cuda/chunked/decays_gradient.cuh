// Decays by dimension, backwards: a dimension's gradients in a block of 16 steps, in the notation of decays.cuh.
//
// With dS the gradient of the state at the end and D_ts = <dy_t, v_s * Z_ts>, a rule that does not correct has
//   dq_t = F_t0 * (S_0 (dy_t * Z_t0)) + sum over s <= t of D_ts (k_s * F_ts)
//   dk_s = F_es * (dS (v_s * Z_es)) + sum over t >= s of D_ts (q_t * F_ts)
//   dv_s = Z_es * (dS^T (k_s * F_es)) + sum over t >= s of P_ts (dy_t * Z_ts)
//   dS_0 = (F_e0 Z_e0^T) * dS + sum over t of (q_t * F_t0) (dy_t * Z_t0)^T
// The gradient of log f_u collects, element by element, whatever passes through step u: of pairs s < u <= t
// D_ts q_t * k_s * F_ts, of reads of S_0 at t >= u their products with q_t * F_t0, of writes s < u that are left
// at the end theirs with k_s * F_es, and the row sums of (F_e0 Z_e0^T) * S_0 * dS. That of log z_u likewise, over
// columns.
//
// A rule that corrects has
//   dU = P^T dY + (K * F_e.) dS          (I + B G)^T X = dU              dV = B X
//   dP = dY U^T for s <= t               dG = -dV U^T for s < t          d beta_t = <x_t, what of r_t the steps before t leave>
//   d(Q * F_.0) = dY S_0^T               d(E * F_.0) = -dV S_0^T         d(K * F_e.) = U dS^T
//   dS_0 = diag(F_e0) dS + (Q * F_.0)^T dY - (E * F_.0)^T dV
// and from these the gradients of queries and keys, then those of erase keys and keys, which are added.
//
// Keys and values have the same equations, with dy in the place of q, v in that of k and P in that of D: `late`,
// `early` and `weights` here. Where pairs are parted at m, with x as in decays.cuh,
//   d late_t = F_tm * (sum over s of w_ts x_s),   d early_s = F_ms * (sum over t of w_ts x_t)
// and d log f_u has the sum over t >= u of x_t * (that sum) if u is in the second half, and over s < u if in the first.
#pragma once

#include "decays.cuh"

namespace fairseq_fastweights {

// The pairs of steps from `First` on, half of a block, that are parted at the middles of 2 Half of them.
template <int Half, int First, typename Weights>
__device__ __forceinline__ void differentiate_level(const Weights& weights, const float (&late)[kHalf],
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

// Rows whose products are weighted pairs: queries with keys, or erase keys with keys; or d_out with values.
template <typename Inputs, typename Weights, typename Found>
struct WeightedPairs {
    Inputs late, early;
    Weights weights;      // what each pair's product is weighted with, mirrored
    Found reads, writes;  // gradients of `late` decayed from the block's start, of `early` decayed to its end
    bool same;            // `late` is `early`, whose gradient has that of `late`, too
};

// One dimension's gradients in the steps from `First` on, half of a block (which takes fewer registers than all of it), to
// late(t, gradient), early(t, gradient) and log(t, gradient). With `Adds` there are no writes.
// `read`: the sum over the second half of late * d late as far as it passes the block's start, found in the second half
// and used in the first. Returned is the same of early * d early as far as it passes the block's end, and `passing`.
template <int First, bool Adds, typename Pairs, typename Late, typename Early, typename Log>
__device__ __forceinline__ float differentiate_half(const Pairs& pairs, const float (&given)[kSteps], int column,
                                                    float passing, float& read, Late put_late, Early put_early,
                                                    Log put_log) {
    constexpr bool kSecond = First == kHalf;
    float gates[kSteps];  // whose products are found anew, instead of kept
#pragma unroll
    for (int t = 0; t < kSteps; ++t) gates[t] = __uint_as_float(opaque(__float_as_uint(given[t])));
    const Column lates(pairs.late, column), earlies(pairs.early, column);
    const Column reads(pairs.reads, column), writes(pairs.writes, column);
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
        load_row(row, &pairs.weights(First + i, kHalf - First));
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
    differentiate_level<4, First>(pairs.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<2, First>(pairs.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<1, First>(pairs.weights, late, early, gates, d_late, d_early, d_log);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float weight = pairs.weights(First + i, First + i);
        d_late[i] += weight * early[i];
        d_early[i] += weight * late[i];
    }

    // The gradient that passes the block's start, or its end.
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
    run = passing;
    if constexpr (!Adds) {
        product = after;
#pragma unroll
        for (int i = kHalf - 1; i >= 0; --i) {
            x[i] = product * writes.get(First + i);
            d_early[i] += x[i];
            product *= gates[First + i];
        }
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            d_log[i] += run;
            run += early[i] * x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        if (Adds && pairs.same) d_early[i] += d_late[i];
        put_late(First + i, d_late[i]);
        put_early(First + i, d_early[i]);
        put_log(First + i, d_log[i]);
    }
    return run;
}

// Gradients of a whole block, of which `passing` is the gradient of what passes all of it.
template <bool Adds, typename Pairs, typename Late, typename Early, typename Log>
__device__ __forceinline__ void differentiate_column(const Pairs& pairs, const float (&gates)[kSteps], int column,
                                                     float passing, Late put_late, Early put_early, Log put_log) {
    float read;
    if constexpr (Adds) {
        differentiate_half<kHalf, true>(pairs, gates, column, 0.0f, read, put_late, put_early, put_log);
        differentiate_half<0, true>(pairs, gates, column, 0.0f, read, put_late, put_early, put_log);
    } else {
        const Column logs(pairs.reads, column);  // those of the second half wait where its reads were
        differentiate_half<kHalf, false>(pairs, gates, column, 0.0f, read, put_late, put_early,
                                         [&](int t, float x) { logs.set(t, x); });
        passing = differentiate_half<0, false>(pairs, gates, column, passing * product_of(gates), read, put_late,
                                               put_early, put_log);
#pragma unroll
        for (int t = kHalf; t < kSteps; ++t) put_log(t, logs.get(t) + passing);  // all of the second half's steps, too
    }
}

}  // namespace fairseq_fastweights
