// The structs that cross from the binding, which knows torch, to the kernels, which do not, and a table of functions.
#pragma once

#include "../native/types.h"

namespace fairseq_fastweights {

// One call of a kernel, or a block of its value columns, which do not depend on one another. States are float64 if `v`
// is and float32 otherwise, (batch, heads, key_dim, value_dim) contiguous; the block is the first `columns` of the
// value_dim columns that the pointers point to.
struct RuleCall {
    int64_t batch = 0, time = 0, heads = 0, key_dim = 0, value_dim = 0, columns = 0;
    // Heads of a work item, whose chunks are computed in turn. A call is `work_items()` items, in any order and on any
    // thread.
    int64_t heads_per_item = 1;
    // A state is kept before every step that is a multiple of `interval`, but not before step 0; 0 keeps none.
    int64_t interval = 0;

    Sequence q, k, v;
    Sequence log_gate;                        // one decay for the whole state ...
    bool complement = false;                  // ... which writes with 1 - gate (of rules that do not correct)
    Sequence log_key_decay, log_value_decay;  // or one for each row, and for each column (not with `is_delta`), of it
    bool is_delta = false;                    // delta rules: the value retrieved under the erase key is subtracted
    Sequence erase;                           // delta rules: absent for k
    Sequence beta;                            // delta rules: absent for 1
    const bool* starts = nullptr;             // (batch, time): the state is emptied before these steps; null: none
    const void* initial_state = nullptr;      // null: zeros

    Sequence out;
    void* final_state = nullptr;
    void* states = nullptr;  // (batch, heads, ceil(time / interval) - 1, key_dim, value_dim)

    Sequence d_out;
    const void* d_final_state = nullptr;  // null: zeros
    Sequence dq, dk, dv, d_erase, d_beta, d_log_gate, d_log_key_decay, d_log_value_decay;
    void* d_initial_state = nullptr;  // null: not wanted

    int64_t head_groups() const { return (heads + heads_per_item - 1) / heads_per_item; }
    int64_t work_items() const { return batch * head_groups(); }
};

// A single step that changes the state where it lies; its rows are `state_key` elements apart.
struct RuleStep {
    int64_t batch = 0, heads = 0, key_dim = 0, columns = 0;
    Sequence q, k, v, log_gate;
    bool complement = false;
    Sequence log_key_decay, log_value_decay;
    bool is_delta = false;
    Sequence erase, beta;
    const bool* starts = nullptr;  // (batch)
    Sequence out;
    void* state = nullptr;
    int64_t state_batch = 0, state_head = 0, state_key = 0;

    int64_t work_items() const { return batch * heads; }
};

// One call of the selective scan: a step that changes the state where it lies, or a sequence. u, delta and out are
// (batch, time, channels), B and C (batch, time, states); `void*` tensors are float64 if `u` is and float32 otherwise.
struct Scan {
    // Channels of a work item. They never depend on the number of threads, nor does any sum over them.
    static constexpr int64_t CHANNELS_PER_ITEM = 64;

    int64_t batch = 0, time = 0, channels = 0, states = 0;
    int64_t interval = 0;  // as in RuleCall
    Sequence u, delta, B, C, out;
    const void *A = nullptr, *D = nullptr;         // (channels, states) and (channels), contiguous; no D: zeros
    const void* initial_state = nullptr;           // (batch, channels, states) contiguous, as all states; null: zeros
    void *final_state = nullptr, *kept = nullptr;  // kept: (batch, ceil(time / interval) - 1, states, channels)

    void* state = nullptr;  // of a step; those of a channel are contiguous
    int64_t state_batch = 0, state_channel = 0;

    Sequence d_out, du, d_delta;
    Sequence dB, dC;  // of each group of channels, which are its "heads"
    const void* d_final_state = nullptr;
    void *dA = nullptr, *dD = nullptr;  // (batch, channels, states) and (batch, channels)
    void* d_initial_state = nullptr;    // null: not wanted

    int64_t channel_blocks() const { return (channels + CHANNELS_PER_ITEM - 1) / CHANNELS_PER_ITEM; }
    int64_t work_items() const { return batch * channel_blocks(); }
};

struct Features : FeaturesOf<int64_t> {
    int64_t work_items() const { return batch * time; }
};

struct Gating : GatingOf<int64_t> {
    int64_t steps() const { return outer * inner; }
    // Steps that are computed at once, and steps of a work item, which do not depend on the number of threads. Each
    // item has a part of the gradients of parameters.
    int64_t together() const { return norm == kNoNorm && channels() < 256 ? 256 / channels() : 1; }
    int64_t share() const { return channels() < 16384 ? 16384 / channels() / together() * together() : 1; }
    int64_t work_items() const { return (steps() + share() - 1) / share(); }
};

// dw is (batch, channels, width), and db (batch, channels).
struct Convolution : ConvolutionOf<int64_t> {
    static constexpr int64_t CHANNELS_PER_ITEM = 64;  // of a work item

    int64_t channel_blocks() const { return (channels + CHANNELS_PER_ITEM - 1) / CHANNELS_PER_ITEM; }
    int64_t work_items() const { return batch * channel_blocks(); }
};

// Decode steps of whole layers but for their projections: one token of each row.

// A step of `FastWeightAttention` with the delta rule, learned features and sum normalisation: phi(x) = relu(W x + b),
// divided by its sum plus eps, with weight (heads, features, dim) and bias (heads, features). q, k and v are (batch, 1,
// heads, ...), beta the logits of beta, (1, batch, heads), and `state`, in the type of states, (batch, heads, features,
// value_dim). Parameters and states are contiguous.
struct DeltaStep {
    int64_t batch = 0, heads = 0, dim = 0, features = 0, value_dim = 0;
    double eps = 0;
    Sequence q, k, v, beta, weight, bias, out;
    void* state = nullptr;

    int64_t work_items() const { return batch * heads; }
};

// A step of `WindowSum`. Of q, (batch, 1, heads, dim), `sharing` heads have one of k and v, (batch, 1, kv_heads, dim).
// Keys and values are (batch, kv_heads, window, dim), the last at the end, and `state`, in the type of states, (batch,
// heads, features, dim + 1), all contiguous. cosines and sines, (batch, half), may be absent; `seen` has how many
// positions of its document a row has read.
struct WindowStep {
    int64_t batch = 0, kv_heads = 0, sharing = 1, dim = 0, window = 0, features = 0, half = 0;
    bool sums = false;
    double eps = 0;
    Sequence q, k, v, cosines, sines, weight, bias, log_factor, keys, values, out;
    const int64_t* seen = nullptr;  // (batch)
    const bool* starts = nullptr;   // (batch): the state is emptied; null: none
    void* state = nullptr;

    int64_t heads() const { return kv_heads * sharing; }
    int64_t work_items() const { return batch * kv_heads; }
};

// A step of `GatedDelta`. x, (1, batch, channels), has queries, keys and values of so many heads side by side; beta,
// decay (both heads) and gate (heads * value_dim) are logits, (1, batch, ...). before, (batch, width - 1, channels)
// contiguous, and state, (batch, heads, key_dim, value_dim), are of the type of states; parameters are contiguous.
struct GatedDeltaStep {
    int64_t batch = 0, heads = 0, q_heads = 0, k_heads = 0, v_heads = 0, key_dim = 0, value_dim = 0, width = 1;
    double max_beta = 1, eps = 0;  // the largest beta; the norm's epsilon
    Sequence x, beta, decay, gate, conv, rate, bias, norm, out;
    void *before = nullptr, *state = nullptr;
    int64_t state_batch = 0, state_head = 0, state_key = 0;

    int64_t channels() const { return (q_heads + k_heads) * key_dim + v_heads * value_dim; }
    int64_t work_items() const { return batch; }
};

// Each runs the work items [begin, end).
struct Kernels {
    const char* instruction_set;
    void (*rule_forward)(const RuleCall&, int64_t begin, int64_t end);
    void (*rule_backward)(const RuleCall&, int64_t begin, int64_t end);
    void (*rule_step)(const RuleStep&, int64_t begin, int64_t end);
    void (*scan_forward)(const Scan&, int64_t begin, int64_t end);
    void (*scan_backward)(const Scan&, int64_t begin, int64_t end);
    void (*scan_step)(const Scan&, int64_t begin, int64_t end);
    void (*features_forward)(const Features&, int64_t begin, int64_t end);
    void (*features_backward)(const Features&, int64_t begin, int64_t end);
    void (*gating_forward)(const Gating&, int64_t begin, int64_t end);
    void (*gating_backward)(const Gating&, int64_t begin, int64_t end);
    void (*convolution_forward)(const Convolution&, int64_t begin, int64_t end);
    void (*convolution_backward)(const Convolution&, int64_t begin, int64_t end);
    void (*delta_step)(const DeltaStep&, int64_t begin, int64_t end);
    void (*window_step)(const WindowStep&, int64_t begin, int64_t end);
    void (*gated_delta_step)(const GatedDeltaStep&, int64_t begin, int64_t end);
};

// The kernels for the processor at hand, of float64 or of all other numbers; the environment variable
// FASTWEIGHTS_CPU_ISA (baseline, avx2, avx512) may ask for one of `fast_weights_instruction_sets`. Null where that is
// not there.
const Kernels* kernels(bool of_float64);

}  // namespace fairseq_fastweights

// The instruction sets that were compiled and that the processor has, as "baseline, avx2", the best last; or "".
// fairseq_fastweights/ops/libraries.py asks for them when it loads the library.
extern "C" __attribute__((visibility("default"))) const char* fast_weights_instruction_sets();
