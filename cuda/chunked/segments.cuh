// Long sequences of few heads: a walk's chunks are dealt out to several blocks in segments, so that the device is full.
//
// A segment's change of the state is affine, S_end = M S_start + C. A first launch finds C (a walk from zeros), and
// M, for all segments at once; a second carries the state from segment to segment; the third is the walk that leaves
// results, each segment from its own start. The way back is the same with dS_start = M' dS_end + C'.
//
// M is a (key_dim, key_dim) matrix for rules that correct, found as the columns of a walk from the identity: these carry here.
// Of the others it multiplies element by element (../carried_states.cuh).
#pragma once

#include "../carried_states.cuh"
#include "block.cuh"

namespace fairseq_fastweights {

// A block has 4 columns of a head's state. Four neighbouring threads have a row of M, of which each takes every fourth number.
constexpr int kCarriedColumns = 4, kCarryLanes = 4;

// `states`: (segment, head, key_dim, value_dim), C, which become the starts. `passed`: (segment, head, key_dim, key_dim), M.
// `from`: the state before the first segment, or, `reverse`, the gradient after the last; null: zeros.
static __global__ void __launch_bounds__(256)
    carry_transformed(const int segments, float* states, const float* passed, const Sizes sizes, const float* from,
                      const int reverse) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const int rows = sizes.key_dim, head = blockIdx.x, heads = gridDim.x, first = blockIdx.y * kCarriedColumns;
    const int columns = min(kCarriedColumns, sizes.value_dim - first), count = rows * kCarriedColumns;
    const int lane = threadIdx.x % kCarryLanes, rows_on = blockDim.x / kCarryLanes;
    float* const both = reinterpret_cast<float*>(memory);  // the state and the next, in turns
    for (int i = threadIdx.x; i < 2 * count; i += blockDim.x) {
        const int row = i / kCarriedColumns, column = i % kCarriedColumns;
        both[i] = row < rows && column < columns && from != nullptr
                      ? from[(int64_t{head} * rows + row) * sizes.value_dim + first + column]
                      : 0.0f;
    }
    for (int step = 0; step < segments; ++step) {
        const int64_t index = int64_t{reverse ? segments - 1 - step : step} * heads + head;
        const bool last = step == segments - 1;  // what that segment makes of it, nobody asked
        float *const state = both + step % 2 * count, *const next = both + (step + 1) % 2 * count;
        __syncthreads();
        for (int begin = 0; begin < rows; begin += rows_on) {  // whole warps, which add up together
            const int row = begin + threadIdx.x / kCarryLanes;
            const bool there = row < rows && lane < columns;
            float* const place = states + (index * rows + row) * sizes.value_dim + first + lane;
            const float before = there ? *place : 0.0f;
            const float* const of_row = passed + (index * rows + min(row, rows - 1)) * rows;
            float sums[kCarriedColumns] = {};
#pragma unroll 8
            for (int k = lane; !last && k < rows; k += kCarryLanes) {
                const float4 x = *reinterpret_cast<const float4*>(state + k * kCarriedColumns);
                const float by = of_row[k];
                sums[0] += by * x.x, sums[1] += by * x.y, sums[2] += by * x.z, sums[3] += by * x.w;
            }
            for (int distance = 1; distance < kCarryLanes; distance *= 2)
                UNROLL for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
            if (!there) continue;
            const float sum = lane == 0 ? sums[0] : lane == 1 ? sums[1] : lane == 2 ? sums[2] : sums[3];
            next[row * kCarriedColumns + lane] = last ? 0.0f : before + sum;
            *place = state[row * kCarriedColumns + lane];
        }
    }
}

inline cudaError_t launch_carry_transformed(int segments, float* states, const float* passed, const Sizes& sizes,
                                            const float* first, bool reverse, cudaStream_t stream) {
    const dim3 grid(sizes.batch * sizes.heads, divide_up(sizes.value_dim, kCarriedColumns));
    const size_t shared = 2 * sizeof(float) * sizes.key_dim * kCarriedColumns;
    return launch(carry_transformed, grid, dim3(256), shared, stream, segments, states, passed, sizes, first,
                  static_cast<int>(reverse));
}

}  // namespace fairseq_fastweights
