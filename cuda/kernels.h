// The structs that cross from the binding (or a test) to the kernels: pointers, sizes, strides and a stream.
//
// No torch here, so that the kernels compile with `nvcc -c` alone and run under the host emulator of tests/cuda. The
// functions have C linkage: the emulator's tests call them through ctypes with these very structs.
//
// Notation, with S the (key_dim, value_dim) state of one head (the papers write its transpose):
//   diagonal  S_t = (f_t z_t^T) * g_t S_{t-1} + w_t k_t v_t^T      y_t = S_t^T q_t   w = 1 - g if `complement`, or 1
//   delta     S_t = S' + beta_t k_t (v_t - S'^T e_t)^T             y_t = S_t^T q_t   S' = Diag(f_t) g_t S_{t-1}
// The delta family decays by g (log_gate, where e is k) or by f (log_key_decay), and not by dimension of the values.
#pragma once

#include <cuda_runtime_api.h>
#include <cstddef>
#include <cstdint>

#include "../native/types.h"

namespace fairseq_fastweights {

// `interval`: a state is kept before step n * interval, n = 1 .. ceil(time / interval) - 1; 0 keeps none.
struct Sizes {
    int32_t batch;
    int32_t time;
    int32_t heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t interval;
};

// States are contiguous (batch, heads, key_dim, value_dim), `states` (batch, heads, kept, key_dim, value_dim); their
// elements are float, or double where q, k and v are double. `workspace` holds as many bytes as the function of the
// same name with `_workspace` at its end asks for, aligned to 256; null where that is 0.

struct RuleForward {
    Sizes sizes;
    int32_t complement, is_delta;  // is_delta: the delta family
    Sequence q, k, v;
    Sequence erase, beta;                               // each may be absent, for k and 1; of the delta family
    Sequence log_gate, log_key_decay, log_value_decay;  // each may be absent; log_gate comes without the other two
    const void* initial_state;                          // null: zeros
    Sequence out;
    void* final_state;
    void* states;  // null if interval is 0 or at least time
    void* workspace;
};

struct RuleBackward {
    Sizes sizes;
    int32_t complement, is_delta;  // is_delta: the delta family
    Sequence d_out;
    const void* d_final_state;  // null: zeros
    Sequence q, k, v;
    Sequence erase, beta;
    Sequence log_gate, log_key_decay, log_value_decay;
    const void* initial_state;
    const void* states;
    Sequence dq, dk, dv;
    Sequence d_erase, d_beta;  // absent where the input is
    Sequence d_log_gate, d_log_key_decay, d_log_value_decay;
    void* d_initial_state;  // null: not wanted
    void* workspace;
};

// A state that a step updates in place: strides of batch, head and key row in elements, value_dim contiguous.
struct StepState {
    void* data;
    int64_t batch;
    int64_t head;
    int64_t row;
};

// One token: `time` of the sizes is 1 and the sequences' time strides are not used.
struct RuleStep {
    Sizes sizes;
    int32_t complement, is_delta;  // is_delta: the delta family
    Sequence q, k, v;
    Sequence erase, beta;
    Sequence log_gate, log_key_decay, log_value_decay;
    StepState state;
    Sequence out;
};

using Features = FeaturesOf<int32_t>;
using Gating = GatingOf<int32_t>;            // `fastweights_gating_parts` parts, d_log_rate (parts, channels)
using Convolution = ConvolutionOf<int32_t>;  // `fastweights_convolution_parts` parts

// How state passing divides the work of a chunked launch: a head's values into `blocks` of `columns`, and the time into
// `segments` that run in parallel, as many as suit the current device; `stages` chunks are in flight. `columns` is 0
// where the chunked kernels do not take the sizes, and for a batch of 0.
struct ChunkedPlan {
    int32_t columns, blocks, stages, threads, segments;
    int64_t shared;  // bytes of a block's memory
    double cycles;   // that the launch takes, about
};

enum Operation : int32_t { kDiagonalForward = 0, kDiagonalBackward = 1, kDeltaForward = 2, kDeltaBackward = 3 };
enum Algorithm : int32_t { kRecurrent = 0, kChunked = 1 };

extern "C" {

// Each launches on `stream` and returns without waiting; cudaErrorInvalidValue for sizes that it does not take. A batch
// of 0 launches nothing.
cudaError_t fastweights_forward_recurrent(const RuleForward* params, cudaStream_t stream);
cudaError_t fastweights_forward_chunked(const RuleForward* params, cudaStream_t stream);
cudaError_t fastweights_backward_recurrent(const RuleBackward* params, cudaStream_t stream);
cudaError_t fastweights_backward_chunked(const RuleBackward* params, cudaStream_t stream);
cudaError_t fastweights_step(const RuleStep* params, cudaStream_t stream);
cudaError_t fastweights_features_forward(const Features* params, cudaStream_t stream);
cudaError_t fastweights_features_backward(const Features* params, cudaStream_t stream);
cudaError_t fastweights_gating_forward(const Gating* params, cudaStream_t stream);
cudaError_t fastweights_gating_backward(const Gating* params, cudaStream_t stream);
cudaError_t fastweights_convolution_forward(const Convolution* params, cudaStream_t stream);
cudaError_t fastweights_convolution_backward(const Convolution* params, cudaStream_t stream);

// Parts of the sums over steps of a backward pass. They read sizes only.
int32_t fastweights_gating_parts(const Gating* params);
int32_t fastweights_convolution_parts(const Convolution* params);

// Bytes of scratch that the launch of the same name needs. They read sizes, dtypes and which tensors are present, and
// never `data` of a tensor but for null.
size_t fastweights_forward_recurrent_workspace(const RuleForward* params);
size_t fastweights_forward_chunked_workspace(const RuleForward* params);
size_t fastweights_backward_recurrent_workspace(const RuleBackward* params);
size_t fastweights_backward_chunked_workspace(const RuleBackward* params);

// The plan of the chunked kernels: `dtype` of q, k and v, `gated` whether there is a log_gate, `separate_decays` 1 with
// decays of keys or an erase key, 2 with decays of values, too, and 0 with neither, `capability` 10 * major + minor.
ChunkedPlan fastweights_chunked_plan(int32_t operation, const Sizes* sizes, int32_t dtype, int32_t gated,
                                     int32_t separate_decays, int32_t capability);

// The algorithm to run: an `Algorithm`.
int32_t fastweights_choose(int32_t operation, const Sizes* sizes, int32_t dtype, int32_t gated, int32_t separate_decays,
                           int32_t capability);

}  // extern "C"

}  // namespace fairseq_fastweights
