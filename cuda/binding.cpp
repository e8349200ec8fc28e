// The CUDA kernels as torch operators: checks, allocation, the current stream. Their schemas, shape functions and
// derivatives are in fairseq_fastweights/ops/kernels.py.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "../native/operators.h"
#include "kernels.h"

namespace fairseq_fastweights {
namespace {

constexpr int64_t kMostDim = 512, kMost = std::numeric_limits<int32_t>::max();

// As the kernels' structs hold it.
int32_t size_of(const Tensor& x, int64_t dimension) {
    if (x.size(dimension) > kMost) fail("a tensor has shape ", x.sizes(), ", which is too large");
    return static_cast<int32_t>(x.size(dimension));
}

Sizes sizes_of(const Rule& rule, int64_t interval) {
    const Tensor &k = rule.k, &v = rule.v;
    check_sizes("q", rule.q, k.sizes());
    if (rule.erase) check_sizes("erase", *rule.erase, k.sizes());
    check_sizes("v", v, {k.size(0), k.size(1), k.size(2), v.size(3)});
    if (k.size(1) < 1 || k.size(2) < 1) fail("k has shape ", k.sizes(), "; time and heads must be at least 1");
    for (const int64_t dim : {k.size(3), v.size(3)}) {
        if (dim >= 1 && dim <= kMostDim) continue;
        fail("key_dim is ", k.size(3), " and value_dim ", v.size(3), "; each must be from 1 to ", kMostDim);
    }
    if (k.size(0) * k.size(2) > kMost) fail("k has shape ", k.sizes(), ", which is too large");
    if (interval < 0) fail("interval is ", interval, "; it must be at least 0");
    return {size_of(k, 0), size_of(k, 1), size_of(k, 2),
            size_of(k, 3), size_of(v, 3), static_cast<int32_t>(std::min(interval, kMost))};
}

cudaStream_t stream_of(const Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.get_device()).stream(); }

void check_launch(cudaError_t error, const char* name) {
    if (error != cudaSuccess) fail("fairseq_fastweights::", name, ": ", cudaGetErrorString(error));
}

// As `separate_decays` of fastweights_choose.
int32_t by_dimension(const Rule& rule) { return rule.log_value_decay ? 2 : rule.erase || rule.log_key_decay ? 1 : 0; }

// A state as the kernels read it, contiguous, where there is one.
optional<Tensor> state_input(const char* name, const optional<Tensor>& x, const Sizes& sizes, const Tensor& v) {
    if (x) check_state(name, *x, v, {sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim});
    return contiguous_of(x);
}

// Null for a tensor without elements, which may have any address.
void* pointer(const optional<Tensor>& x) { return x && x->numel() ? x->data_ptr() : nullptr; }

Tensor gradient_of(const optional<Tensor>& x, const Tensor& v) { return x ? gradient_like(*x) : nothing(v); }

Sequence gradient(const char* name, const optional<Tensor>& of, const Tensor& made) {
    return of ? sequence(name, made) : Sequence{};
}

std::array<int64_t, 5> kept_sizes(const Sizes& sizes) {
    const int64_t kept = sizes.interval ? (sizes.time - 1) / sizes.interval : 0;
    return {sizes.batch, sizes.heads, kept, sizes.key_dim, sizes.value_dim};
}

template <typename Params>
struct Algorithms {
    cudaError_t (*launch[2])(const Params*, cudaStream_t);  // by Algorithm
    size_t (*workspace[2])(const Params*);
};

// Chooses, allocates the workspace and launches.
template <typename Params>
void run(const char* name, const Algorithms<Params>& algorithms, Params& params, const Rule& rule) {
    const bool backward = std::is_same<Params, RuleBackward>::value;
    const int32_t operation = rule.is_delta ? (backward ? kDeltaBackward : kDeltaForward)
                              : backward    ? kDiagonalBackward
                                            : kDiagonalForward;
    int major = 0, minor = 0;
    const int device = rule.v.get_device();
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const int32_t chosen = fastweights_choose(operation, &params.sizes, params.v.dtype, params.log_gate.data != nullptr,
                                              by_dimension(rule), 10 * major + minor);
    optional<Tensor> workspace;
    if (const auto bytes = static_cast<int64_t>(algorithms.workspace[chosen](&params))) {
        workspace = new_empty(rule.v, {bytes}, ScalarType::Byte);
        params.workspace = workspace->data_ptr();
    }
    check_launch(algorithms.launch[chosen](&params, stream_of(rule.v)), name);
}

// The fields that all calls have in common.
template <typename Params>
Params params_of(const Rule& rule, int64_t interval) {
    if (rule.starts) fail("the CUDA kernels take no starts, but decays that empty the state");
    if (rule.log_gate && (by_dimension(rule) || (rule.complement && rule.is_delta))) {
        fail(
            "log_gate comes without erase, log_key_decay and log_value_decay, and without complement to rules that "
            "correct");
    }
    Params params{};
    rule.fill(params);
    params.is_delta = rule.is_delta;
    params.sizes = sizes_of(rule, interval);
    return params;
}

const Algorithms<RuleForward> kForwards{
    {fastweights_forward_recurrent, fastweights_forward_chunked},
    {fastweights_forward_recurrent_workspace, fastweights_forward_chunked_workspace}};
const Algorithms<RuleBackward> kBackwards{
    {fastweights_backward_recurrent, fastweights_backward_chunked},
    {fastweights_backward_recurrent_workspace, fastweights_backward_chunked_workspace}};

std::tuple<Tensor, Tensor, Tensor> rule_forward(FAST_WEIGHTS_RULE_PARAMETERS, const optional<Tensor>& initial_state,
                                                int64_t interval) {
    const Rule rule = FAST_WEIGHTS_RULE;
    const c10::cuda::CUDAGuard guard(v.device());
    auto params = params_of<RuleForward>(rule, interval);
    const Sizes sizes = params.sizes;
    const optional<Tensor> initial = state_input("initial_state", initial_state, sizes, v);
    const Tensor out = gradient_like(v), states = new_empty(v, kept_sizes(sizes), state_type(v));
    const Tensor final_state = new_empty(v, {sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim}, state_type(v));
    if (sizes.batch == 0) return {out, final_state, states};
    params.initial_state = pointer(initial);
    params.out = sequence("out", out);
    params.final_state = pointer(final_state);
    params.states = pointer(states);
    run("rule_forward", kForwards, params, rule);
    return {out, final_state, states};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients rule_backward(const Tensor& d_out, const optional<Tensor>& d_final_state, FAST_WEIGHTS_RULE_PARAMETERS,
                        const optional<Tensor>& initial_state, const Tensor& states, int64_t interval) {
    const Rule rule = FAST_WEIGHTS_RULE;
    const c10::cuda::CUDAGuard guard(v.device());
    auto params = params_of<RuleBackward>(rule, interval);
    const Sizes sizes = params.sizes;
    check_sizes("d_out", d_out, v.sizes());
    check_type("d_out", d_out, v, false);
    check_device("d_out", d_out, v);
    const Tensor dy = last_contiguous(d_out);
    params.d_out = sequence("d_out", dy);
    const optional<Tensor> initial = state_input("initial_state", initial_state, sizes, v);
    const optional<Tensor> d_final = state_input("d_final_state", d_final_state, sizes, v);
    const Tensor dq = gradient_like(rule.q), dk = gradient_like(rule.k), dv = gradient_like(v);
    const Tensor d_erase = gradient_of(rule.erase, v), d_beta = gradient_of(rule.beta, v),
                 d_log_gate = gradient_of(rule.log_gate, v), d_log_key_decay = gradient_of(rule.log_key_decay, v),
                 d_log_value_decay = gradient_of(rule.log_value_decay, v);
    const Tensor d_initial = initial ? new_empty(v, initial->sizes(), state_type(v)) : new_empty(v, {0}, state_type(v));
    const Gradients gradients{dq, dk, dv, d_erase, d_beta, d_log_gate, d_log_key_decay, d_log_value_decay, d_initial};
    if (interval <= 0) fail("the forward pass kept no states (interval 0)");
    check_state("states", states, v, kept_sizes(sizes));
    const optional<Tensor> kept = contiguous_of(states);
    if (sizes.batch == 0) return gradients;
    params.states = pointer(kept);
    params.initial_state = pointer(initial);
    params.d_final_state = pointer(d_final);
    params.dq = sequence("dq", dq);
    params.dk = sequence("dk", dk);
    params.dv = sequence("dv", dv);
    params.d_erase = gradient("d_erase", rule.erase, d_erase);
    params.d_beta = gradient("d_beta", rule.beta, d_beta);
    params.d_log_gate = gradient("d_log_gate", rule.log_gate, d_log_gate);
    params.d_log_key_decay = gradient("d_log_key_decay", rule.log_key_decay, d_log_key_decay);
    params.d_log_value_decay = gradient("d_log_value_decay", rule.log_value_decay, d_log_value_decay);
    params.d_initial_state = pointer(d_initial);
    run("rule_backward", kBackwards, params, rule);
    return gradients;
}

// Tells autograd, as torch's own in-place operations do: a graph that saved the state then refuses the new one.
void mark_changed(const Tensor& state) {
    if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
}

Tensor rule_step_(FAST_WEIGHTS_RULE_PARAMETERS, const Tensor& state) {
    const Rule rule = FAST_WEIGHTS_RULE;
    const c10::cuda::CUDAGuard guard(v.device());
    auto params = params_of<RuleStep>(rule, 0);
    const Sizes& sizes = params.sizes;
    if (sizes.time != 1) fail("v has shape ", v.sizes(), "; a step takes one token");
    check_own_state(state, v, {sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim});
    for (int i = 0; i < 3; ++i) {
        if (state.size(i) <= 1 || state.stride(i) != 0) continue;
        fail("state has strides ", state.strides(),
             "; it is updated in place, so no two of its elements may share memory");
    }
    params.state = {state.data_ptr(), state.stride(0), state.stride(1), state.stride(2)};
    Tensor out = gradient_like(v);
    params.out = sequence("out", out);
    check_launch(fastweights_step(&params, stream_of(v)), "rule_step_");
    mark_changed(state);
    return out;
}

// Feature maps, gates and short convolutions on a GPU (native/operators.h).
struct Gpu {
    using Features = fairseq_fastweights::Features;
    using Gating = fairseq_fastweights::Gating;
    using Convolution = fairseq_fastweights::Convolution;

    struct Guard {
        explicit Guard(const Tensor& x) : guard(x.device()) {}
        c10::cuda::CUDAGuard guard;
    };

    static void check(const Tensor& x, int64_t nu) {
        const int64_t dim = x.size(3);
        if (dim >= 1 && x.numel() / dim <= kMost && 2 * dim * std::max<int64_t>(nu, 1) <= kMost) return;
        fail("x has shape ", x.sizes(), ", which is too large, or has no dimensions");
    }
    static int32_t size(const Tensor& x, int64_t dimension) { return size_of(x, dimension); }

    static void run(const Features& p, const Tensor& x, bool backward) {
        const auto launch = backward ? fastweights_features_backward : fastweights_features_forward;
        check_launch(launch(&p, stream_of(x)), "map_features");
    }
    static void run(const Gating& p, const Tensor& x, bool backward) {
        const int64_t most = x.scalar_type() == ScalarType::Double ? 256 : 4096 / x.element_size();
        if (p.norm != kNoNorm && p.dim > most) fail("y has vectors of ", p.dim, " numbers; a norm takes up to ", most);
        const auto launch = backward ? fastweights_gating_backward : fastweights_gating_forward;
        check_launch(launch(&p, stream_of(x)), "gate");
    }
    static void run(const Convolution& p, const Tensor& x, bool backward) {
        if (backward && p.d_y.dtype != p.x.dtype) fail("d_y is not of the type of x, ", x.scalar_type());
        const auto launch = backward ? fastweights_convolution_backward : fastweights_convolution_forward;
        check_launch(launch(&p, stream_of(x)), "short_convolution");
    }

    static int64_t parts(const Gating& p) { return fastweights_gating_parts(&p); }
    static int64_t parts(const Convolution& p) { return fastweights_convolution_parts(&p); }
    static int64_t rates(const Gating& p) { return p.channels(); }

    // A part may hold several numbers in turn for each of x.
    static Tensor total(const Tensor& parts, const Tensor& x) {
        const int64_t count = parts.size(0), own = x.numel(), shared = count && own ? parts.numel() / count / own : 1;
        return parts.reshape({count, own, shared}).sum(at::IntArrayRef{0, 2}).view(x.sizes()).to(x.scalar_type());
    }

    // To look at them would be to wait for the GPU.
    static Tensor lengths(const Tensor& given, int64_t time) { return given.clamp(0, time).contiguous(); }
};

std::vector<int64_t> plan(const std::string& operation, at::IntArrayRef sizes, ScalarType dtype, bool gated,
                          int64_t separate_decays, int64_t capability) {
    constexpr std::array<const char*, 4> operations{"diagonal_forward", "diagonal_backward", "delta_forward",
                                                    "delta_backward"};  // by Operation
    const auto found = std::find(operations.begin(), operations.end(), operation);
    if (found == operations.end())
        fail("operation is ", operation, "; it must be one of ", c10::Join(", ", operations));
    if (sizes.size() != 6) {
        fail("sizes has ", sizes.size(),
             " numbers; it must have 6: batch, time, heads, key_dim, value_dim and interval");
    }
    const auto within = [&](int i, int64_t least, int64_t most) { return sizes[i] >= least && sizes[i] <= most; };
    if (!(within(0, 0, kMost) && within(1, 1, kMost) && within(2, 1, kMost) && sizes[0] <= kMost / sizes[2] &&
          within(3, 1, kMostDim) && within(4, 1, kMostDim) && within(5, 0, kMost))) {
        fail("sizes is ", sizes, "; batch and interval must be at least 0, time and heads at least 1, key_dim and ",
             "value_dim from 1 to ", kMostDim, ", and batch * heads and each of them less than 2^31");
    }
    if (separate_decays < 0 || separate_decays > 2)
        fail("separate_decays is ", separate_decays,
             "; it must be 0, 1 (decays of keys, or an erase key) or 2 (decays of values)");
    const auto number = static_cast<int32_t>(found - operations.begin());
    const auto device = static_cast<int32_t>(capability), decays = static_cast<int32_t>(separate_decays);
    const auto at = [&](int i) { return static_cast<int32_t>(sizes[i]); };
    const Sizes given{at(0), at(1), at(2), at(3), at(4), at(5)};
    const int32_t type = dtype_of("v", dtype);
    if (fastweights_choose(number, &given, type, gated, decays, device) == kRecurrent) return {};
    const ChunkedPlan made = fastweights_chunked_plan(number, &given, type, gated, decays, device);
    return {made.columns, made.blocks, made.stages, made.threads, made.segments, made.shared};
}

}  // namespace

TORCH_LIBRARY_IMPL(fairseq_fastweights, CompositeExplicitAutograd, m) { m.impl("cuda_plan", &plan); }

TORCH_LIBRARY_IMPL(fairseq_fastweights, CUDA, m) {
    m.impl("rule_forward", &rule_forward);
    m.impl("rule_backward", &rule_backward);
    m.impl("rule_step_", &rule_step_);
    FAST_WEIGHTS_OPERATORS_OF(m, Gpu);
}

}  // namespace fairseq_fastweights
