// What crosses between the binding, which knows torch, and the kernels, which do not.
#pragma once

#include <cstdint>

namespace fast_weights {

enum class Type : int { float32, float64, float16, bfloat16 };

// A tensor (batch, time, heads[, dim]); strides count elements, those of the last dimension are 1. No data: absent. Each of
// its heads serves as many heads of the call in turn as `sharing` says.
struct Sequence {
    void* data = nullptr;
    Type type = Type::float32;
    int64_t batch = 0, time = 0, head = 0, sharing = 1;
};

// One call of a kernel, or a block of its value columns: those do not depend on one another. States are float64 if `v` is
// and float32 otherwise, (batch, heads, keys, columns) contiguous, where `columns` are those of the whole call and
// `values` of them, from where the pointers point, are the block's.
struct Problem {
    int64_t batch = 0, time = 0, heads = 0, keys = 0, values = 0, columns = 0;
    // Heads that one task walks through time with: `tasks()` tasks, in any order and on any thread, are the call.
    int64_t group = 1;
    // A state is kept before every step that is a multiple of `interval`, but not before step 0; 0 keeps none.
    int64_t interval = 0;

    Sequence q, k, v;
    Sequence log_gate;                        // one decay for the whole state ...
    bool complement = false;                  // ... which writes with 1 - gate (of rules that do not correct)
    Sequence log_key_decay, log_value_decay;  // or one for each row, and for each column (not with `corrects`), of it
    bool corrects = false;                    // whether what the state holds under a key is taken out of the value
    Sequence erase;                           // corrects: that key; absent: k
    Sequence beta;                            // corrects: the write strength; absent: 1
    const bool* starts = nullptr;             // (batch, time): the state is emptied before these steps; null: none
    const void* initial_state = nullptr;      // null: zeros

    Sequence out;
    void* final_state = nullptr;
    void* states = nullptr;  // (batch, heads, ceil(time / interval) - 1, keys, columns)

    Sequence d_out;
    const void* d_final_state = nullptr;  // null: zeros
    Sequence dq, dk, dv, d_erase, d_beta, d_log_gate, d_log_key_decay, d_log_value_decay;
    void* d_initial_state = nullptr;  // null: not wanted

    int64_t groups() const { return (heads + group - 1) / group; }
    int64_t tasks() const { return batch * groups(); }
};

// A single step that changes the state where it lies; its rows are `state_key` elements apart.
struct Step {
    int64_t batch = 0, heads = 0, keys = 0, values = 0;
    Sequence q, k, v, log_gate;
    bool complement = false;
    Sequence log_key_decay, log_value_decay;
    bool corrects = false;
    Sequence erase, beta;
    const bool* starts = nullptr;  // (batch)
    Sequence out;
    void* state = nullptr;
    int64_t state_batch = 0, state_head = 0, state_key = 0;

    int64_t tasks() const { return batch * heads; }
};

// One call of the selective scan: a step that changes the state where it lies, or a sequence. u, delta and out are (batch,
// time, channels), B and C (batch, time, states); what is `void*` is float64 if `u` is and float32 otherwise.
struct Scan {
    // Channels of a task. They never depend on the number of threads, nor does any sum over them.
    static constexpr int64_t GROUP = 64;

    int64_t batch = 0, time = 0, channels = 0, states = 0;
    int64_t interval = 0;  // as in Problem
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

    int64_t groups() const { return (channels + GROUP - 1) / GROUP; }
    int64_t tasks() const { return batch * groups(); }
};

enum class Map : int { identity, elu, relu, dpfp };
enum class Normalization : int { none, sum, length };

// Feature maps, divided by a sum or a length: x is (batch, time, heads, dim), y (batch, time, heads, features()).
struct Features {
    int64_t batch = 0, time = 0, heads = 0, dim = 0, nu = 1;
    Map map = Map::identity;
    Normalization normalization = Normalization::none;
    double eps = 0, scale = 1;
    Sequence x, y, dy, dx;

    int64_t features() const { return map == Map::dpfp ? 2 * nu * dim : dim; }
    int64_t tasks() const { return batch * time; }
};

// Each runs the tasks [begin, end).
struct Kernels {
    const char* instruction_set;
    void (*rule_forward)(const Problem&, int64_t begin, int64_t end);
    void (*rule_backward)(const Problem&, int64_t begin, int64_t end);
    void (*rule_step)(const Step&, int64_t begin, int64_t end);
    void (*scan_forward)(const Scan&, int64_t begin, int64_t end);
    void (*scan_backward)(const Scan&, int64_t begin, int64_t end);
    void (*scan_step)(const Scan&, int64_t begin, int64_t end);
    void (*features_forward)(const Features&, int64_t begin, int64_t end);
    void (*features_backward)(const Features&, int64_t begin, int64_t end);
};

// Those for the processor at hand; the environment variable FASTWEIGHTS_CPU_ISA (baseline, avx2, avx512) may ask for
// less. Null if it asks for what is not there, and `*available` then lists what is.
const Kernels* kernels(const char** available = nullptr);

}  // namespace fast_weights
