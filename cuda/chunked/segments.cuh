// Long sequences of few heads: the chunks are dealt out to several blocks in segments, so that the device is full.
//
// What a segment makes of the state is affine, S_end = M S_start + C. A first launch finds C (a march from zeros), and
// M, for all segments at once; a second carries the state from segment to segment; the third is the march that computes
// results, each segment from its own start. The way back is the same with dS_start = M' dS_end + C'. M is a number for
// scalar gates, and a (key_dim, key_dim) matrix for the delta rule, found as the columns of a march from the identity.
// (With decays by dimension it is what those of keys and of values leave: decays.cuh.)
#pragma once

#include "block.cuh"

namespace fairseq_fastweights {

struct Segments {
    int count;          // 1: the sequence is not divided; 0: there is no plan, or nothing to do
    int chunks;         // of a segment; the last may have fewer
    int heads;          // batch * heads
    int first_of_head;  // blocks of the first launch
    int state_floats;   // key_dim * value_dim
    int passed_floats;
    float* states;  // (segment, head, key_dim, value_dim): C, then the states at which the last launch starts
    float* passed;  // (segment, head, passed_floats): M; null where that is 0, for M = 1

    __host__ __device__ __forceinline__ int64_t index(int segment, int head) const {
        return static_cast<int64_t>(segment) * heads + head;
    }

    // Of the workspace: room for states and what is passed, where a sequence is divided. What lies behind is aligned, too.
    size_t bytes() const {
        if (count <= 1) return 0;
        const size_t floats = static_cast<size_t>(index(count, 0)) * (state_floats + passed_floats);
        return (floats * sizeof(float) + 255) / 256 * 256;
    }
    void place(void* workspace) {
        states = static_cast<float*>(workspace);
        passed = passed_floats == 0 ? nullptr : states + index(count, 0) * state_floats;
    }
};

// How long so many blocks take, if one takes 1: `at_once` of them on a multiprocessor, one of which works while another
// waits. Counted, not measured.
inline double length_of_waves(int64_t blocks, int processors, int at_once) {
    const double whole = at_once > 1 ? 1.25 : 1.0;
    const int64_t wave = static_cast<int64_t>(processors) * at_once, rest = blocks % wave;
    return blocks / wave * whole + (rest == 0 ? 0.0 : rest <= processors ? 1.0 : whole);
}

// Divides where that should take a tenth less, into segments of at least 4 chunks. The first launch costs about half of the
// last one for its `first_of_head` blocks, of a head; each segment is another step of the second, about 0.3 chunks; and two
// more launches cost some 3. `blocks_of_head`: those that work at once, the others' launches follow.
inline Segments find_segments(const Plan& plan, const Sizes& sizes, int blocks_of_head, int first_of_head,
                              int passed_floats) {
    if (plan.chunk == 0 || sizes.batch * sizes.heads == 0) return Segments{};
    Segments segments{1,
                      (sizes.time + plan.chunk - 1) / plan.chunk,
                      sizes.batch * sizes.heads,
                      first_of_head,
                      sizes.key_dim * sizes.value_dim,
                      passed_floats,
                      nullptr,
                      nullptr};
    const int64_t heads = segments.heads;
    const int processors = multiprocessors(), chunks = segments.chunks;
    int count = AskedPlan().segments;
    if (count <= 0) {
        const int at_once = plan.blocks_at_once(shared_memory_limit()) >= 2 ? 2 : 1;
        const auto waves = [&](int64_t blocks) { return length_of_waves(blocks, processors, at_once); };
        const int launches = plan.blocks / blocks_of_head;
        double least = 0.9 * launches * waves(heads * blocks_of_head) * chunks;
        count = 1;
        // More than fill the device twice over are never better.
        for (int tried = 2; tried <= chunks / 4 && (tried - 1) * heads * blocks_of_head < 4 * processors; ++tried) {
            const int length = (chunks + tried - 1) / tried, made = (chunks + length - 1) / length;
            const double cost = length * (launches * waves(made * heads * blocks_of_head) +
                                          waves((made - 1) * heads * first_of_head) / 2) +
                                3 + 0.3 * made;
            if (cost < least) {
                least = cost;
                count = made;
            }
        }
    }
    if (count > chunks) count = chunks;
    segments.chunks = (chunks + count - 1) / count;
    segments.count = (chunks + segments.chunks - 1) / segments.chunks;
    return segments;
}

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

// Of a head, where time is divided: its value columns, and the columns of the identity.
inline int first_blocks(const Plan& plan, const Sizes& sizes) {
    return plan.chunk == 0 ? 0 : plan.blocks + (sizes.key_dim + plan.columns - 1) / plan.columns;
}

// M a matrix: 16 columns of a head's state to a block, 4 of them and a row to a thread, whose sums do not wait for one
// another.
constexpr int kCarriedColumns = 16;

static __global__ void __launch_bounds__(256) carry_transformed(const Segments segments, const Carry carry) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const int rows = carry.key_dim, head = blockIdx.x, first = blockIdx.y * kCarriedColumns;
    const int columns = min(kCarriedColumns, carry.value_dim - first), count = rows * kCarriedColumns;
    float *state = reinterpret_cast<float*>(memory), *next = state + count;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int row = i / kCarriedColumns, column = i % kCarriedColumns;
        state[i] = column < columns && carry.first != nullptr
                       ? static_cast<const float*>(
                             carry.first)[(static_cast<int64_t>(head) * rows + row) * carry.value_dim + first + column]
                       : 0.0f;
    }
    for (int step = 0; step < segments.count; ++step) {
        const int64_t index = segments.index(carry.reverse ? segments.count - 1 - step : step, head);
        const bool last = step == segments.count - 1;  // what that segment makes of it, nobody asked
        __syncthreads();
        for (int i = 4 * threadIdx.x; i < count; i += 4 * blockDim.x) {
            const int row = i / kCarriedColumns, column = i % kCarriedColumns;
            float* const place = segments.states + (index * rows + row) * carry.value_dim + first + column;
            const float* const passed = segments.passed + (index * rows + row) * rows;
            float sums[4] = {};
#pragma unroll 4
            for (int k = 0; !last && k < rows; ++k) {
                const float4 x = *reinterpret_cast<const float4*>(state + k * kCarriedColumns + column);
                sums[0] += passed[k] * x.x;
                sums[1] += passed[k] * x.y;
                sums[2] += passed[k] * x.z;
                sums[3] += passed[k] * x.w;
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (column + c >= columns) continue;
                next[i + c] = place[c] + sums[c];
                place[c] = state[i + c];
            }
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
    const size_t shared = 2 * sizeof(float) * sizes.key_dim * kCarriedColumns;
    return launch(carry_transformed, grid, dim3(256), shared, stream, segments, carry);
}

}  // namespace fairseq_fastweights
