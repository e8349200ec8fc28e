// Sequences that are divided in time: from what each segment makes of a state, or of a gradient, of zeros, C, and what it
// multiplies the elements of a state by, to what it starts from: S_end = M * S_start + C.
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
        // Nobody asks what the last makes of it.
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

}  // namespace fairseq_fastweights
