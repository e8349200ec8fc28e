// How the kernels that work on chunks side by side share memory: stages hand one another what they found through the
// workspace. A call is worked on in slices, one after another, so that this stays small: some heads, and of these some chunks.
// A slice takes the state from the one before it in time (backwards its gradient from the one behind it).
#pragma once

#include "plan.h"

namespace fairseq_fastweights {

// A pass of a rule, as far as what stages hand one another depends on it.
struct RulePass {
    bool corrects;  // the delta rule; else what is written does not depend on the state
    bool gated, backward;
};

// Numbers by step that a chunk's local stage leaves, one array after another: beta_t, beta_t D_t0, D_t0, D_es w_s (in the
// notation of delta.cuh; w is 1, or a write's strength as in diagonal_forward.cu), then D and its log.
constexpr int kSide = kLongestChunk;  // a chunk here
enum StepNumbers { kBeta = 0, kReadBeta = kSide, kFromStart = 2 * kSide, kToEnd = 3 * kSide, kWholeGate = 4 * kSide };
constexpr int kWholeLog = kWholeGate + 1;
constexpr int kStepNumbers = 4 * kSide + 4;  // whole pieces of 16 bytes

// A slice's part of the workspace, by head and chunk: T = (I + B G)^-1, P, and transposed, a row for each value column, the
// states at chunks' starts, U, the gradients of states at chunks' ends, and dR; null what a rule does not need. F is Factor<T>.
template <typename F>
struct Slice {
    int first_head, heads, begin, chunks;  // from these on, so many; a head of a slice counts from its first
    int key_rows, columns;                 // padded to multiples of 16
    float *inverse, *steps;
    F *scores, *states, *updates, *d_states, *d_right;

    __host__ __device__ __forceinline__ int64_t index(int head, int n) const {
        return static_cast<int64_t>(head) * chunks + (n - begin);
    }
    __device__ __forceinline__ F* state_of(F* all, int head, int n) const {
        return all + index(head, n) * columns * key_rows;
    }
    __device__ __forceinline__ F* rows_of(F* all, int head, int n) const {
        return all + index(head, n) * columns * kSide;
    }
};

inline size_t up_to_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays a slice out in a workspace; with a null one it counts the bytes.
template <typename F>
Slice<F> lay_out(const Sizes& sizes, int first_head, int heads, int begin, int chunks, const RulePass& pass,
                 unsigned char* workspace, size_t& bytes) {
    Slice<F> slice{first_head, heads, begin, chunks, round_up(sizes.key_dim, 16), round_up(sizes.value_dim, 16)};
    size_t used = 0;
    const auto take = [&](auto*& place, size_t numbers) {
        using Number = std::remove_reference_t<decltype(*place)>;
        place = workspace == nullptr ? nullptr : reinterpret_cast<Number*>(workspace + used);
        used += up_to_256(static_cast<size_t>(slice.heads) * chunks * numbers * sizeof(Number));
    };
    if (pass.corrects) take(slice.inverse, kSide * kSide);
    if (pass.corrects || pass.gated) take(slice.steps, kStepNumbers);
    take(slice.states, slice.columns * slice.key_rows);
    if (pass.corrects) take(slice.updates, slice.columns * kSide);
    if (pass.backward) take(slice.d_states, slice.columns * slice.key_rows);
    if (pass.corrects && pass.backward) {
        take(slice.scores, kSide * kSide);
        take(slice.d_right, slice.columns * kSide);
    }
    bytes = used;
    return slice;
}

}  // namespace fairseq_fastweights
