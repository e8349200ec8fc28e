// Long sequences of few heads: a walk's chunks are dealt out to several blocks in segments, so that the device is full.
//
// What a segment makes of the state is affine, S_end = M S_start + C. A first launch finds C (a walk from zeros), and
// M, for all segments at once; a second carries the state from segment to segment; the third is the walk that leaves
// results, each segment from its own start. The way back is the same with dS_start = M' dS_end + C'. M is a number for
// scalar gates, and a (key_dim, key_dim) matrix for rules that correct, found as the columns of a walk from the identity.
// (With decays by dimension that do not correct it is what those of keys and of values leave: ../carried_decays.cuh.)
#pragma once

#include "block.cuh"

namespace fairseq_fastweights {

// A segment multiplies a state by `passed_floats` numbers: a matrix, decays of keys and values, one number or, for 0, as it is.
struct Segments {
    int count, heads;
    float* states;  // (segment, head, key_dim, value_dim): C, then the states at which the last launch starts
    float* passed;  // (segment, head, passed_floats): M; null where that is 0, for M = 1

    Segments(int count, int heads, int state_floats, int passed_floats, void* workspace)
        : count(count), heads(heads), states(static_cast<float*>(workspace)),
          passed(passed_floats == 0 ? nullptr : states + index(count, 0) * state_floats) {}

    __host__ __device__ __forceinline__ int64_t index(int segment, int head) const {
        return static_cast<int64_t>(segment) * heads + head;
    }
};

struct Carry {
    const void* first;  // the state before the first segment, or the gradient after the last; null: zeros
    int reverse;        // from the last segment to the first
    int key_dim, value_dim;
};

// M a number: an element to a thread.
static __global__ void __launch_bounds__(256) carry_scaled(const Segments segments, const Carry carry) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int elements = carry.key_dim * carry.value_dim;
    if (i >= static_cast<int64_t>(segments.heads) * elements) return;
    const int head = static_cast<int>(i / elements), element = static_cast<int>(i % elements);
    float state = carry.first == nullptr ? 0.0f : static_cast<const float*>(carry.first)[i];
    for (int step = 0; step < segments.count; ++step) {
        const int64_t index = segments.index(carry.reverse ? segments.count - 1 - step : step, head);
        float& place = segments.states[index * elements + element];
        const bool last = step == segments.count - 1;  // what that segment makes of it, nobody asked
        const float next = last ? 0.0f : (segments.passed == nullptr ? 1.0f : segments.passed[index]) * state + place;
        place = state;
        state = next;
    }
}

inline cudaError_t launch_carry_scaled(const Segments& segments, const Sizes& sizes, const void* first, bool reverse,
                                       cudaStream_t stream) {
    const Carry carry{first, reverse, sizes.key_dim, sizes.value_dim};
    const int64_t count = static_cast<int64_t>(segments.heads) * sizes.key_dim * sizes.value_dim;
    return launch(carry_scaled, dim3(static_cast<unsigned>((count + 255) / 256)), dim3(256), 0, stream, segments,
                  carry);
}

// M a matrix: 4 columns of a head's state to a block. Four neighbouring threads have a row of M, of which each takes every fourth
// four numbers, so that what a warp reads at once lies together.
constexpr int kCarriedColumns = 4, kCarryLanes = 4;

static __global__ void __launch_bounds__(256) carry_transformed(const Segments segments, const Carry carry) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const int rows = carry.key_dim, head = blockIdx.x, first = blockIdx.y * kCarriedColumns;
    const int columns = min(kCarriedColumns, carry.value_dim - first), count = round_up(rows, 4) * kCarriedColumns;
    float *state = reinterpret_cast<float*>(memory), *next = state + count;
    const int lane = threadIdx.x % kCarryLanes, rows_on = blockDim.x / kCarryLanes;
    const bool fours = rows % 4 == 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int row = i / kCarriedColumns, column = i % kCarriedColumns;
        next[i] = 0.0f;
        state[i] = row < rows && column < columns && carry.first != nullptr
                       ? static_cast<const float*>(
                             carry.first)[(static_cast<int64_t>(head) * rows + row) * carry.value_dim + first + column]
                       : 0.0f;
    }
    for (int step = 0; step < segments.count; ++step) {
        const int64_t index = segments.index(carry.reverse ? segments.count - 1 - step : step, head);
        const bool last = step == segments.count - 1;  // what that segment makes of it, nobody asked
        __syncthreads();
        for (int begin = 0; begin < rows; begin += rows_on) {  // whole warps, which add up together
            const int row = begin + threadIdx.x / kCarryLanes;
            const bool there = row < rows && lane < columns;
            float* const place = segments.states + (index * rows + row) * carry.value_dim + first + lane;
            const float before = there ? *place : 0.0f;
            const float* const passed = segments.passed + (index * rows + min(row, rows - 1)) * rows;
            float sums[kCarriedColumns] = {};
#pragma unroll 4
            for (int k = 4 * lane; !last && k < rows; k += 4 * kCarryLanes) {
                float by[4] = {};
                if (fours) {
                    load_row(by, passed + k);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) by[i] = k + i < rows ? passed[k + i] : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 x = *reinterpret_cast<const float4*>(state + (k + i) * kCarriedColumns);
                    sums[0] += by[i] * x.x;
                    sums[1] += by[i] * x.y;
                    sums[2] += by[i] * x.z;
                    sums[3] += by[i] * x.w;
                }
            }
#pragma unroll
            for (int c = 0; c < kCarriedColumns; ++c)
                for (int distance = 1; distance < kCarryLanes; distance *= 2)
                    sums[c] += __shfl_xor_sync(kAllLanes, sums[c], distance);
            if (!there) continue;
            const float sum = lane == 0 ? sums[0] : lane == 1 ? sums[1] : lane == 2 ? sums[2] : sums[3];
            next[row * kCarriedColumns + lane] = last ? 0.0f : before + sum;
            *place = state[row * kCarriedColumns + lane];
        }
        float* const before = state;
        state = next;
        next = before;
    }
}

inline cudaError_t launch_carry_transformed(const Segments& segments, const Sizes& sizes, const void* first,
                                            bool reverse, cudaStream_t stream) {
    const Carry carry{first, reverse, sizes.key_dim, sizes.value_dim};
    const dim3 grid(segments.heads, (sizes.value_dim + kCarriedColumns - 1) / kCarriedColumns);
    const size_t shared = 2 * sizeof(float) * round_up(sizes.key_dim, 4) * kCarriedColumns;
    return launch(carry_transformed, grid, dim3(256), shared, stream, segments, carry);
}

}  // namespace fairseq_fastweights
