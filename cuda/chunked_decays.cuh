// Decays by dimension, chunk-parallel on tensor cores: what the forward and the backward pass share.
//
// In a chunk of 16 steps that starts from S_0, with F_ts and Z_ts the products of the decays of keys and of values of the
// steps (s, t], t0 from before the chunk's start and es to its end:
//   Y_t = Z_t0 * (S_0^T (q_t * F_t0)) + sum over s <= t of P_ts (v_s * Z_ts),   P_ts = <q_t, k_s * F_ts>
//   S_end = (F_e0 Z_e0^T) * S_0 + sum over s of (k_s * F_es) (v_s * Z_es)^T
// The products with states are those of matrices. Decays between two steps of the chunk cannot be pulled out of the sums
// over dimensions; there are 120 pairs of such steps, few enough for the ordinary cores, with running products: no
// factor exceeds 1, and nothing is divided or subtracted, as in the recurrent kernels.
//
// For states that do not fit into the registers of a block, where the recurrent backward pass divides the value columns
// among many blocks, each of which has a part of every key's gradient to hand over. Absent decays are gates of 1.
#pragma once

#include "carried_decays.cuh"
#include "chunked_block.cuh"
#include "chunked_segments.cuh"

namespace fairseq_fastweights {

constexpr int kSteps = 16;  // of a chunk
constexpr int kDecayThreads = 256;
constexpr int kMostDecays = 2 * kDecayThreads;  // of keys, two to a thread (PassedLogs)

// The plan of the most columns whose shared memory fits; measure(plan) gives its bytes. `resident`: blocks whose registers
// a multiprocessor has room for. `chunk` is 0 if none fits.
template <typename Measure>
Plan find_decay_plan(const Sizes& sizes, int limit, int resident, Measure measure) {
    if (sizes.key_dim > kMostDecays) return Plan{};
    if (sizes.interval > 0 && sizes.interval < sizes.time && sizes.interval % kSteps != 0) return Plan{};
    AskedPlan asked;
    asked.stages = 0;  // there is one
    const int value_columns = round_up(sizes.value_dim, 16);
    for (int columns = value_columns <= 128 ? value_columns : 128;; columns = round_up(columns / 2, 16)) {
        Plan plan{kSteps,        round_up(sizes.key_dim, 16), columns, (sizes.value_dim + columns - 1) / columns, 1,
                  kDecayThreads, 0,                              resident};
        plan.shared = measure(plan);
        if (plan.shared <= static_cast<size_t>(limit) && asked.allows(plan)) return plan;
        if (columns == 16) return Plan{};
    }
}

// The gates of a chunk's steps: `columns` from `first` on of (batch, time, heads, dim) logs. 1 past any end.
__device__ __forceinline__ void load_gates(const Matrix<float>& gates, const Sequence& logs, int batch, int head,
                                           int first, int dim, int columns, int start, int time) {
    for (Walk at(columns); at.row < kSteps; at.next()) {
        const int row = at.row, column = at.column, t = start + row;
        float log = 0.0f;
        if (logs.data != nullptr && t < time && first + column < dim)
            log = load_element<float>(logs.data, logs.dtype,
                                      batch * logs.batch + t * logs.time + head * logs.head + first + column);
        gates(row, column) = expf(log);
    }
}

// scores(t, s) = <left_t, right_s decayed from s to t> for s <= t. A warp takes the columns s and 15 - s: together these
// are as much work for each.
template <typename T>
__device__ __forceinline__ void score_pairs(const Matrix<float>& scores, const Matrix<T>& left, const Matrix<T>& right,
                                            const Matrix<float>& gates, int columns) {
    for (int i = threadIdx.x / kWarp; i < kSteps; i += blockDim.x / kWarp) {
        const int s = i < kSteps / 2 ? i : 3 * kSteps / 2 - 1 - i;
        float sums[kSteps] = {};
        for (int column = warp_lane(); column < columns; column += kWarp) {
            float written = right.get(s, column);
#pragma unroll
            for (int t = 0; t < kSteps; ++t) {
                if (t < s) continue;
                if (t > s) written *= gates(t, column);
                sums[t] += left.get(t, column) * written;
            }
        }
#pragma unroll
        for (int t = 0; t < kSteps; ++t) {
            if (t < s) continue;
            for (int distance = kWarp / 2; distance > 0; distance /= 2)
                sums[t] += __shfl_xor_sync(kAllLanes, sums[t], distance);
            if (warp_lane() == 0) scores(t, s) = sums[t];
        }
    }
}

// By column: read(t) = left_t decayed from before the chunk to t, written(s) = right_s decayed from s to the chunk's end,
// total the product of all gates. `left`: a function of (t, column). `read` may lie where the gates do; no data: not
// wanted.
template <typename Left, typename Right>
__device__ __forceinline__ void decay_rows(const Matrix<float>& read, Left left, const Matrix<float>& written,
                                           Right right, const Matrix<float>& gates, float* total, int columns) {
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        float gate[kSteps];
#pragma unroll
        for (int t = 0; t < kSteps; ++t) gate[t] = gates(t, column);
        float product = 1.0f;
#pragma unroll
        for (int t = 0; t < kSteps; ++t) {
            product *= gate[t];
            if (read.data != nullptr) read(t, column) = left(t, column) * product;
        }
        total[column] = product;
        product = 1.0f;
#pragma unroll
        for (int s = kSteps - 1; s >= 0; --s) {
            if (written.data != nullptr) written(s, column) = right(s, column) * product;
            product *= gate[s];
        }
    }
}

// state = (rows columns^T) * state + left^T right, both (16, .). A barrier must come before and after.
template <int Passes>
__device__ __forceinline__ void pass_chunk(const Matrix<float>& state, const float* rows, const float* columns,
                                           const Matrix<float>& left, const Matrix<float>& right, const Plan& plan) {
    for_each_tile(plan.key_rows, plan.columns, [&](Tile& tile) {
        read_tile(tile, state);
        tile.each([&](int i, int j, float& value) { value *= rows[i] * columns[j]; });
        multiply<Passes>(
            tile, 0, kSteps, [&](int i, int s) { return left(s, i); }, [&](int s, int j) { return right(s, j); });
        write_tile(tile, state);
    });
}

// What a segment's decays leave, by sums of their logs: products of rounded factors would drift over thousands of steps
// with gates near 1. Thread i keeps columns i and i + 256.
struct PassedLogs {
    static constexpr int kColumns = kMostDecays / kDecayThreads;
    float logs[kColumns] = {};

    __device__ __forceinline__ void add(const Sequence& x, int batch, int head, int first, int dim, int columns,
                                        int start, int time) {
        if (x.data == nullptr) return;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int column = threadIdx.x + i * kDecayThreads;
            if (column >= columns || first + column >= dim) continue;
            for (int t = start; t < min(time, start + kSteps); ++t)
                logs[i] += load_element<float>(x.data, x.dtype,
                                               batch * x.batch + t * x.time + head * x.head + first + column);
        }
    }
    __device__ __forceinline__ void store(float* to, int first, int dim, int columns) const {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const int column = threadIdx.x + i * kDecayThreads;
            if (column < columns && first + column < dim) to[first + column] = expf(logs[i]);
        }
    }
};

}  // namespace fairseq_fastweights
