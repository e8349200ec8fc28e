// The workspace, through which chunked kernels exchange their results. A call is computed in slices, one after another,
// so that it stays small: some heads, and some chunks of these. A slice starts from the state of the one before it in
// time (backwards from the gradient of the one after it).
#pragma once

#include <utility>

#include "plan.h"
#include "tensor_core.cuh"

namespace fairseq_fastweights {

// f(a, b), each as an integral constant; f(is_delta, gated, decays, decays_values) of a pass.
template <typename Function>
auto with_flags(bool a, bool b, Function f) {
    const auto with_a = [&](auto of_a) { return b ? f(of_a, std::true_type()) : f(of_a, std::false_type()); };
    return a ? with_a(std::true_type()) : with_a(std::false_type());
}

template <typename Function>
auto with_rule(const RulePass& pass, Function f) {
    const std::false_type no{};
    if (pass.decays_values) return f(no, no, std::true_type(), std::true_type());
    if (pass.decays)
        return with_flags(pass.is_delta, true, [&](auto is_delta, auto decays) { return f(is_delta, no, decays, no); });
    return with_flags(pass.is_delta, pass.gated, [&](auto is_delta, auto gated) { return f(is_delta, gated, no, no); });
}

// Numbers of a chunk from the intra-chunk kernel, one array after another. For state passing, by step: beta_t, beta_t
// D_t0, D_t0, D_es w_s (in the notation of gates.cuh), then D and its log. With gates, for the last kernel: w_s, D_es,
// and by level the gates from each step to its middle.
constexpr int kChunk = 64;     // steps of a chunk
constexpr int kSubchunks = 4;  // of a chunk, of 16 steps each
constexpr int kSubchunk = kChunk / kSubchunks;
constexpr int kWidest = 64;  // keys, or values, that chunk-parallel kernels take at once
enum StepNumbers {
    kBeta = 0,
    kReadBeta = kChunk,
    kFromStart = 2 * kChunk,
    kToEnd = 3 * kChunk,
    kWholeGate = 4 * kChunk
};
constexpr int kWholeLog = kWholeGate + 1;
constexpr int kStatePassingNumbers = 4 * kChunk + 4;  // a multiple of 16 bytes
constexpr int kGateLevels = 6;                        // halves of a chunk, quarters ... down to single steps
enum GateNumbers {
    kWriteFactor = kStatePassingNumbers,
    kToChunkEnd = kWriteFactor + kChunk,
    kLevelGates = kToChunkEnd + kChunk
};
constexpr int kGateNumbers = kLevelGates + kGateLevels * kChunk;
__host__ __device__ constexpr int step_numbers(bool gated) { return gated ? kGateNumbers : kStatePassingNumbers; }

// A lower triangular matrix of a chunk's steps, as kernels exchange it: its 16 x 16 blocks on and below the diagonal,
// one row of blocks after another, each block row-major.
constexpr int kLowerRows = kSubchunks * (kSubchunks + 1) / 2 * kSubchunk;  // of 16 numbers
constexpr int kLower = kLowerRows * kSubchunk;

template <typename C>
struct LowerTriangle {
    using Element = C;
    C* data;
    int stride;  // of a block's rows
    __host__ DEVICE C& operator()(int row, int column) const {
        const unsigned down = row, across = column,  // whose quotients are shifts
            block = (down / kSubchunk) * (down / kSubchunk + 1) / 2 + across / kSubchunk;
        return data[(block * kSubchunk + down % kSubchunk) * stride + across % kSubchunk];
    }
};

// The place of a column of T in its block: of each 8 the even ones come first, so that ldmatrix gives each lane the
// elements that it multiplies by.
__host__ DEVICE constexpr int place_in_inverse(int column) { return column / 8 * 8 + column % 2 * 4 + column % 8 / 2; }

// A slice's part of the workspace, by head and chunk: T - I with T = (I + B G)^-1; P; and transposed, a row for each
// value column, the states at chunks' starts, U, the gradients of states at chunks' ends, and X = T^T dU. Null if a
// rule does not need it. C is Computed<T>. With decays of keys, in the notation of secondary_chunking.cuh, also the low
// half of P if P is rounded, Q * F_.0, K * F_e. and E * F_.0, all three of T, and F_e0 with its log. For delta rules K
// and E, backwards Q as well, are decayed within subchunks only, and there is F_e0 of each subchunk.
template <typename C>
struct Slice {
    int first_head, heads, begin, chunks;  // the first, and how many; heads are counted from first_head
    int key_rows, columns;                 // padded to multiples of 16
    int decay_rows, step_numbers;          // of a chunk
    float *inverse, *steps, *decays;
    C *scores, *scores_low, *states, *updates, *d_states, *d_rhs, *decayed_q, *decayed_k, *decayed_erase;
    // With decays of values the same for values: V * Z_e. and dY * Z_.0 correspond to K * F_e. and Q * F_.0, dP to P.
    float* value_decays;
    C *decayed_v, *decayed_dout, *d_scores, *d_scores_low;

    // A chunk's number in the slice, less than 2^31: a 32-bit product takes one instruction.
    __host__ DEVICE int64_t index(int head, int n) const { return head * chunks + (n - begin); }
    DEVICE C* state_of(C* all, int head, int n) const { return all + index(head, n) * (columns * key_rows); }
    // A chunk's lower triangle.
    template <typename Number>
    DEVICE LowerTriangle<Number> lower_of(Number* all, int head, int n) const {
        return {all + index(head, n) * kLower, kSubchunk};
    }
    DEVICE C* rows_of(C* all, int head, int n) const { return all + index(head, n) * (columns * kChunk); }
    DEVICE float* decays_of(int head, int n) const { return decays + index(head, n) * (decay_rows * key_rows); }
    DEVICE float* value_decays_of(int head, int n) const { return value_decays + index(head, n) * (2 * columns); }
    DEVICE float* steps_of(int head, int n) const { return steps + index(head, n) * step_numbers; }
    // Rows by step, of `width` numbers, addressed like the call's own sequences, by batch and head.
    template <typename T>
    Sequence sequence_of(C* all, int width, const Sizes& sizes) const {
        const int64_t chunk = static_cast<int64_t>(kChunk) * width, head = chunk * chunks;
        return {reinterpret_cast<T*>(all) - (first_head * head + begin * chunk), sizes.heads * head, width, head, 0};
    }
    // Keys and values exchanged.
    Slice swapped() const {
        Slice s = *this;
        std::swap(s.key_rows, s.columns);
        std::swap(s.decays, s.value_decays);
        std::swap(s.scores, s.d_scores);
        std::swap(s.scores_low, s.d_scores_low);
        std::swap(s.decayed_q, s.decayed_dout);
        std::swap(s.decayed_k, s.decayed_v);
        return s;
    }
};

inline size_t up_to_256(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays a slice out in a workspace; without one it only counts bytes.
template <typename C>
Slice<C> lay_out(const Sizes& sizes, int first_head, int heads, int begin, int chunks, const RulePass& pass,
                 unsigned char* workspace, size_t& bytes) {
    const int keys = round_up(sizes.key_dim, 16), values = round_up(sizes.value_dim, 16);
    const int decay_rows = pass.is_delta ? kSubchunks : 2, steps = step_numbers(pass.gated);
    const bool solves_backward = pass.is_delta && pass.backward, rounded = sizeof(C) == 2;
    Slice<C> slice{first_head, heads, begin, chunks, keys, values, decay_rows, steps};
    bytes = 0;
    const auto take = [&](bool needed, auto*& place, size_t numbers) {
        if (!needed) return;
        using Number = std::remove_reference_t<decltype(*place)>;
        place = workspace == nullptr ? nullptr : reinterpret_cast<Number*>(workspace + bytes);
        bytes += up_to_256(static_cast<size_t>(heads) * chunks * numbers * sizeof(Number));
    };
    take(pass.is_delta, slice.inverse, kLower);
    take(pass.is_delta || pass.gated, slice.steps, steps);
    take(true, slice.states, values * keys);
    take(pass.is_delta, slice.updates, values * kChunk);
    take(pass.backward, slice.d_states, values * keys);
    take(pass.decays || solves_backward, slice.scores, kLower);
    take(pass.decays && !solves_backward && rounded, slice.scores_low, kLower);
    take(solves_backward, slice.d_rhs, values * kChunk);
    take(pass.decays, slice.decays, decay_rows * keys);
    take(pass.decays, slice.decayed_q, kChunk * keys);
    take(pass.decays, slice.decayed_k, kChunk * keys);
    take(pass.decays && pass.is_delta, slice.decayed_erase, kChunk * keys);
    take(pass.decays_values, slice.value_decays, 2 * values);
    take(pass.decays_values, slice.decayed_v, kChunk * values);
    take(pass.decays_values && pass.backward, slice.decayed_dout, kChunk * values);
    take(pass.decays_values && pass.backward, slice.d_scores, kLower);
    take(pass.decays_values && pass.backward && rounded, slice.d_scores_low, kLower);
    return slice;
}

// The intra-chunk kernel's arguments; backwards d_out is in the place of `out`.
inline RuleForward intra_chunk_inputs(const RuleForward& p) { return p; }
inline RuleForward intra_chunk_inputs(const RuleBackward& p) {
    return {p.sizes,         p.complement,      p.is_delta,      p.q,    p.k, p.v, p.erase, p.beta, p.log_gate,
            p.log_key_decay, p.log_value_decay, p.initial_state, p.d_out};
}

template <typename T>
cudaError_t launch_intra_chunk(RuleForward given, RulePass pass, const Slice<Computed<T>>& slice, cudaStream_t stream);

}  // namespace fairseq_fastweights
