// The structs of steps of generation that are whole layers but for their projections: one token of each row.
#pragma once

#include "../native/types.h"

namespace fairseq_fastweights {

// A step of `FastWeightAttention` with the delta rule, learned features and sum normalisation: phi(x) = relu(W x + b), divided
// by its sum plus eps, with weight (heads, features, dim) and bias (heads, features). q, k and v are (batch, 1, heads, ...),
// beta the logits of write strengths, (1, batch, heads), and `state`, in the type of states, (batch, heads, features,
// value_dim). Parameters and states are contiguous.
struct DeltaStep {
    int64_t batch = 0, heads = 0, dim = 0, features = 0, value_dim = 0;
    double eps = 0;
    Sequence q, k, v, beta, weight, bias, out;
    void* state = nullptr;

    int64_t tasks() const { return batch * heads; }
};

// A step of `WindowSum`. Of q, (batch, 1, heads, dim), `sharing` heads have one of k and v, (batch, 1, kv_heads, dim). Keys
// and values are (batch, kv_heads, window, dim), the last at the end, and `state`, in the type of states, (batch, heads,
// features, dim + 1), all contiguous. cosines and sines, (batch, half), may be absent; `seen` has how many positions of its
// document a row has read.
struct WindowStep {
    int64_t batch = 0, kv_heads = 0, sharing = 1, dim = 0, window = 0, features = 0, half = 0;
    bool sums = false;
    double eps = 0;
    Sequence q, k, v, cosines, sines, weight, bias, log_factor, keys, values, out;
    const int64_t* seen = nullptr;  // (batch)
    const bool* starts = nullptr;   // (batch): the memory is emptied; null: none
    void* state = nullptr;

    int64_t heads() const { return kv_heads * sharing; }
    int64_t tasks() const { return batch * kv_heads; }
};

// A step of `GatedDelta`. x, (1, batch, channels), has queries, keys and values of so many heads side by side; beta, decay
// (both heads) and gate (heads * value_dim) are logits, (1, batch, ...). before, (batch, width - 1, channels) contiguous, and
// memory, (batch, heads, key_dim, value_dim), are of the type of states; parameters are contiguous.
struct GatedDeltaStep {
    int64_t batch = 0, heads = 0, q_heads = 0, k_heads = 0, v_heads = 0, key_dim = 0, value_dim = 0, width = 1;
    double most = 1, eps = 0;  // the largest write strength, and what the norm adds under its root
    Sequence x, beta, decay, gate, conv, rate, bias, norm, out;
    void *before = nullptr, *memory = nullptr;
    int64_t memory_batch = 0, memory_head = 0, memory_key = 0;

    int64_t channels() const { return (q_heads + k_heads) * key_dim + v_heads * value_dim; }
    int64_t tasks() const { return batch; }
};

}  // namespace fairseq_fastweights
