// Long sequences of few heads are divided into segments of time, so that the device is full. A segment's effect on a
// state is affine, S_end = M S_start + C. A first launch computes C (from zeros) and the transition M, for all segments
// at once; a second, here, carries the state from segment to segment; the third computes results, each segment from its
// own start. The way back is the same with dS_start = M' dS_end + C'. M multiplies element by element or, for delta
// rules, is a matrix, computed as the image of the identity.
#pragma once

#include "common.cuh"

namespace fairseq_fastweights {

// M of decays: F Z^T, the products of those of keys and of values. `passed`: (segment, head, key_dim + value_dim).
template <typename A>
struct PassedDecays {
    const A* passed;
    DEVICE A operator()(int64_t index, const Sizes& sizes, int row, int column) const {
        const A* const by = passed + index * (sizes.key_dim + sizes.value_dim);
        return by[row] * by[sizes.key_dim + column];
    }
};

// M of scalar gates, multiplied. `passed`: (segment, head); null for 1.
struct PassedGates {
    const float* passed;
    DEVICE float operator()(int64_t index, const Sizes&, int, int) const {
        return passed == nullptr ? 1.0f : passed[index];
    }
};

// M of delta rules. `passed`: (segment, head, key_dim, key_dim).
struct PassedMatrices {
    const float* passed;
};

// An element of a head's state to a thread. `states`: (segment, head, key_dim, value_dim), C, which become the starts.
// `first`: the state before the first segment, or, `reverse`, the gradient after the last; null: zeros.
template <typename A, typename Passed>
__global__ void __launch_bounds__(256) carry_states(const int segments, A* states, const Passed passed,
                                                    const Sizes sizes, const A* first, const int reverse) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int elements = sizes.key_dim * sizes.value_dim;
    const int64_t heads = static_cast<int64_t>(sizes.batch) * sizes.heads;
    if (i >= heads * elements) return;
    const int64_t head = i / elements;
    const int element = static_cast<int>(i % elements);
    const int row = element / sizes.value_dim, column = element % sizes.value_dim;
    A state = first == nullptr ? A(0) : first[i];
    for (int step = 0; step < segments; ++step) {
        const int64_t index = (reverse ? segments - 1 - step : step) * heads + head;
        A& place = states[index * elements + element];
        // The end of the last segment is not needed.
        const A next = step + 1 < segments ? passed(index, sizes, row, column) * state + place : A(0);
        place = state;
        state = next;
    }
}

template <typename A, typename Passed>
cudaError_t launch_carry(int segments, A* states, const Passed& passed, const Sizes& sizes, const void* first,
                         bool reverse, cudaStream_t stream) {
    const int64_t count = static_cast<int64_t>(sizes.batch) * sizes.heads * sizes.key_dim * sizes.value_dim;
    return launch(carry_states<A, Passed>, dim3(static_cast<unsigned>((count + 255) / 256)), dim3(256), 0, stream,
                  segments, states, passed, sizes, static_cast<const A*>(first), static_cast<int>(reverse));
}

// The same with matrices. A block has 4 columns of a head's state; 4 neighbouring threads have a row of M, of which
// each multiplies every fourth number.
template <int Columns>
__global__ void __launch_bounds__(256) carry_states(const int segments, float* states, const PassedMatrices passed,
                                                    const Sizes sizes, const float* from, const int reverse) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const int rows = sizes.key_dim, head = blockIdx.x, heads = gridDim.x, first = blockIdx.y * Columns;
    const int columns = min(Columns, sizes.value_dim - first), count = rows * Columns;
    const int lane = threadIdx.x % Columns, rows_on = blockDim.x / Columns;
    float* const both = reinterpret_cast<float*>(memory);  // the state and the next, in turns
    for (int i = threadIdx.x; i < 2 * count; i += blockDim.x) {
        const int row = i / Columns, column = i % Columns;
        both[i] = row < rows && column < columns && from != nullptr
                      ? from[(int64_t{head} * rows + row) * sizes.value_dim + first + column]
                      : 0.0f;
    }
    for (int step = 0; step < segments; ++step) {
        const int64_t index = int64_t{reverse ? segments - 1 - step : step} * heads + head;
        const bool last = step == segments - 1;  // the end of the last segment is not needed
        float *const state = both + step % 2 * count, *const next = both + (step + 1) % 2 * count;
        __syncthreads();
        for (int begin = 0; begin < rows; begin += rows_on) {  // whole warps, which add up together
            const int row = begin + threadIdx.x / Columns;
            const bool there = row < rows && lane < columns;
            float* const place = states + (index * rows + row) * sizes.value_dim + first + lane;
            const float before = there ? *place : 0.0f;
            const float* const of_row = passed.passed + (index * rows + min(row, rows - 1)) * rows;
            float sums[Columns] = {};
#pragma unroll 8
            for (int k = lane; !last && k < rows; k += Columns) {
                const float4 x = *reinterpret_cast<const float4*>(state + k * Columns);
                const float by = of_row[k];
                sums[0] += by * x.x, sums[1] += by * x.y, sums[2] += by * x.z, sums[3] += by * x.w;
            }
            for (int distance = 1; distance < Columns; distance *= 2)
                UNROLL_FOR (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
            if (!there) continue;
            const float sum = lane == 0 ? sums[0] : lane == 1 ? sums[1] : lane == 2 ? sums[2] : sums[3];
            next[row * Columns + lane] = last ? 0.0f : before + sum;
            *place = state[row * Columns + lane];
        }
    }
}

inline cudaError_t launch_carry(int segments, float* states, const PassedMatrices& passed, const Sizes& sizes,
                                const void* first, bool reverse, cudaStream_t stream) {
    constexpr int kColumns = 4;
    const dim3 grid(sizes.batch * sizes.heads, (sizes.value_dim + kColumns - 1) / kColumns);
    return launch(carry_states<kColumns>, grid, dim3(256), 2 * sizeof(float) * sizes.key_dim * kColumns, stream,
                  segments, states, passed, sizes, static_cast<const float*>(first), static_cast<int>(reverse));
}

}  // namespace fairseq_fastweights
