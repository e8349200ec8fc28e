// The structs that cross between the binding, which knows torch, and the kernels, which do not.
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

enum class Map : int { identity, elu, relu, dpfp, random };
enum class Normalization : int { none, sum, length };

// Feature maps, divided by a sum or a length: x is (batch, time, heads, dim), y (batch, time, heads, features()). For random
// features x are the projections of `source`, (batch, time, heads, source_dim).
struct Features {
    int64_t batch = 0, time = 0, heads = 0, dim = 0, nu = 1;
    Map map = Map::identity;
    Normalization normalization = Normalization::none;
    double eps = 0, scale = 1;
    Sequence x, y, dy, dx;

    Sequence source, d_source;
    int64_t source_dim = 0;
    double source_scale = 1, log_epsilon = 0;  // what the source is multiplied by; the logarithm of what is added
    bool stabilized = false;                   // whether each vector is divided by its largest number

    int64_t features() const { return map == Map::dpfp ? 2 * nu * dim : map == Map::random ? 2 * dim : dim; }
    int64_t tasks() const { return batch * time; }
};

enum class Activation : int { sigmoid, silu, log_sigmoid, softplus };
enum class Norm : int { none, rms, layer };

// Gates x, (outer, inner, channels), and what they multiply, if anything: y, as x or, with a norm, (outer, inner, heads, dim).
struct Gating {
    int64_t outer = 0, inner = 0, heads = 1, dim = 0;
    Activation activation = Activation::sigmoid;
    Norm norm = Norm::none;
    double eps = 0, scale = 1;
    Sequence x, y, out, d_out, dx, dy;
    // (channels) and (rates), each for as many channels in turn, without a norm; and (dim), with one. Contiguous.
    Sequence bias, log_rate, weight;
    int64_t rates = 1;
    // A part for each task, of the type of states; null: not wanted.
    void *d_bias = nullptr, *d_log_rate = nullptr, *d_weight = nullptr;

    int64_t channels() const { return heads * dim; }
    int64_t steps() const { return outer * inner; }
    // Steps that are worked on at once, and steps of a task, which do not depend on the number of threads.
    int64_t together() const { return norm == Norm::none && channels() < 256 ? 256 / channels() : 1; }
    int64_t share() const { return channels() < 16384 ? 16384 / channels() / together() * together() : 1; }
    int64_t tasks() const { return (steps() + share() - 1) / share(); }
};

// A short convolution of x, (batch, time, channels); `before`, `last` and their gradients are (batch, width - 1, channels).
struct Convolution {
    static constexpr int64_t GROUP = 64;  // channels of a task

    int64_t batch = 0, time = 0, channels = 0, width = 1;
    Sequence x, y, before, last;
    Sequence weight, bias;             // (channels, width) and (channels), contiguous; no bias: zeros
    const bool* starts = nullptr;      // (batch, time), as in Problem
    const int64_t* lengths = nullptr;  // (batch), of rows that padding follows; null: time

    Sequence d_y, d_last, dx, d_before;  // d_before absent: not wanted
    void *dw = nullptr, *db = nullptr;   // (batch, channels, width) and (batch, channels), of the type of states

    int64_t groups() const { return (channels + GROUP - 1) / GROUP; }
    int64_t tasks() const { return batch * groups(); }
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
    void (*gating_forward)(const Gating&, int64_t begin, int64_t end);
    void (*gating_backward)(const Gating&, int64_t begin, int64_t end);
    void (*convolution_forward)(const Convolution&, int64_t begin, int64_t end);
    void (*convolution_backward)(const Convolution&, int64_t begin, int64_t end);
};

// The kernels for the processor at hand, of float64 or of all other numbers; the environment variable FASTWEIGHTS_CPU_ISA
// (baseline, avx2, avx512) may ask for one of `fast_weights_instruction_sets`. Null where that is not there.
const Kernels* kernels(bool of_float64);

}  // namespace fast_weights

// The instruction sets that were compiled and that the processor has, as "baseline, avx2", the best last; or "".
// fairseq_fastweights/ops/libraries.py asks for them when it loads the library.
extern "C" __attribute__((visibility("default"))) const char* fast_weights_instruction_sets();
