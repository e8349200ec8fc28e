// The CUDA kernels as torch operators: checks, allocation, the current stream. The only file here with torch's headers.
//
// The operators are defined, with their autograd and fake kernels, in fairseq_fastweights/ops/native.py; this registers
// what they do for CUDA tensors. Sequences are (batch, time, heads, dim), gates (batch, time, heads), states
// (batch, heads, key_dim, value_dim).
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace fairseq_fastweights {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kMostDim = 512;

int32_t dtype_of(at::ScalarType type, const char* name) {
    switch (type) {
        case at::kFloat: return kFloat32;
        case at::kHalf: return kFloat16;
        case at::kBFloat16: return kBFloat16;
        case at::kDouble: return kFloat64;
        default: TORCH_CHECK(false, name, " has dtype ", type, "; it must be float32, float16, bfloat16 or float64");
    }
}

at::ScalarType state_type(const Tensor& v) { return v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Sizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& v, int64_t interval) {
    TORCH_CHECK(k.dim() == 4 && v.dim() == 4, "k and v must be (batch, time, heads, dim); they have ", k.dim(), " and ",
                v.dim(), " dimensions");
    TORCH_CHECK(q.sizes() == k.sizes(), "q has shape ", q.sizes(), "; it must be that of k, ", k.sizes());
    TORCH_CHECK(v.sizes().slice(0, 3) == k.sizes().slice(0, 3), "v has shape ", v.sizes(),
                "; batch, time and heads must be those of k, ", k.sizes());
    TORCH_CHECK(k.size(1) >= 1 && k.size(2) >= 1, "k has shape ", k.sizes(), "; time and heads must be at least 1");
    for (const int64_t dim : {k.size(3), v.size(3)})
        TORCH_CHECK(dim >= 1 && dim <= kMostDim, "key_dim is ", k.size(3), " and value_dim ", v.size(3),
                    "; each must be from 1 to ", kMostDim);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    TORCH_CHECK(k.size(0) * k.size(2) <= most && k.size(1) <= most, "k has shape ", k.sizes(), ", which is too large");
    TORCH_CHECK(interval >= 0, "interval is ", interval, "; it must be at least 0");
    return {static_cast<int32_t>(k.size(0)), static_cast<int32_t>(k.size(1)),
            static_cast<int32_t>(k.size(2)), static_cast<int32_t>(k.size(3)),
            static_cast<int32_t>(v.size(3)), static_cast<int32_t>(std::min(interval, most))};
}

void check_device(const Tensor& x, const Tensor& v, const char* name) {
    TORCH_CHECK(x.device() == v.device(), name, " is on ", x.device(), "; it must be on ", v.device(), " as v is");
}

Sequence sequence(const Tensor& x, const char* name) {
    // A tensor without elements has any strides, and contiguous() changes none of them.
    TORCH_CHECK(x.dim() < 4 || x.numel() == 0 || x.size(3) == 1 || x.stride(3) == 1, name, " has strides ", x.strides(),
                "; its last dimension must be contiguous");
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), dtype_of(x.scalar_type(), name)};
}

// q, k, v and what has their shapes.
Sequence sequence_like(const Tensor& x, const Tensor& like, const Tensor& v, const char* name) {
    TORCH_CHECK(x.sizes() == like.sizes(), name, " has shape ", x.sizes(), "; it must be ", like.sizes());
    TORCH_CHECK(x.scalar_type() == v.scalar_type(), name, " has dtype ", x.scalar_type(), "; it must be that of v, ",
                v.scalar_type());
    check_device(x, v, name);
    return sequence(x, name);
}

// log_gate, beta and log decays: of v's dtype or float32. `dim` is 0 for (batch, time, heads).
Sequence gate(const OptionalTensor& x, const Tensor& v, int64_t dim, const char* name) {
    if (!x.has_value() || !x->defined()) return {};
    TORCH_CHECK(
        x->dim() == (dim ? 4 : 3) && x->sizes().slice(0, 3) == v.sizes().slice(0, 3) && (dim == 0 || x->size(3) == dim),
        name, " has shape ", x->sizes(), ", which does not fit v, ", v.sizes());
    TORCH_CHECK(x->scalar_type() == v.scalar_type() || x->scalar_type() == at::kFloat, name, " has dtype ",
                x->scalar_type(), "; it must be that of v, ", v.scalar_type(), ", or float32");
    check_device(*x, v, name);
    return sequence(*x, name);
}

bool given(const OptionalTensor& x) { return x.has_value() && x->defined(); }

// The parts of the recurrence, as the operators take them.
struct Rule {
    const Tensor &q, &k, &v;
    const OptionalTensor& erase;
    bool corrects;
    const OptionalTensor &beta, &log_gate;
    bool complement;
    const OptionalTensor &log_key_decay, &log_value_decay, &starts;

    void check() const {
        TORCH_CHECK(!given(starts), "the CUDA kernels take no starts, but decays that empty the state");
        TORCH_CHECK(corrects || !(given(erase) || given(beta)), "erase and beta come with rules that correct alone");
        TORCH_CHECK(!corrects || !given(log_value_decay), "no kernel corrects and decays values");
        TORCH_CHECK(!given(log_gate) || !(by_dimension() || complement && corrects),
                    "log_gate comes without erase, log_key_decay and log_value_decay, and without complement to rules "
                    "that correct");
    }
    // As `separate_decays` of fastweights_choose.
    int32_t by_dimension() const { return given(log_value_decay) ? 2 : given(erase) || given(log_key_decay) ? 1 : 0; }
};

// A state as the kernels read it, contiguous; undefined where there is none.
Tensor state_input(const OptionalTensor& x, const Sizes& sizes, const Tensor& v, const char* name) {
    if (!x.has_value() || !x->defined()) return {};
    const std::array<int64_t, 4> shape{sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim};
    TORCH_CHECK(x->sizes() == at::IntArrayRef(shape), name, " has shape ", x->sizes(), "; it must be ",
                at::IntArrayRef(shape));
    TORCH_CHECK(x->scalar_type() == state_type(v), name, " has dtype ", x->scalar_type(), "; it must be ",
                state_type(v));
    check_device(*x, v, name);
    return x->contiguous();
}

const void* pointer(const Tensor& x) { return x.defined() && x.numel() ? x.data_ptr() : nullptr; }
void* mutable_pointer(const Tensor& x) { return x.defined() && x.numel() ? x.data_ptr() : nullptr; }

// An output of x's shape and layout, but for a layout in which the last dimension is not contiguous.
Tensor output_like(const Tensor& x) {
    Tensor made = at::empty_like(x);
    if (made.dim() == 4 && made.size(3) > 1 && made.stride(3) != 1) made = at::empty(x.sizes(), x.options());
    return made;
}

Tensor gradient_like(const OptionalTensor& x, const Tensor& v) {
    return x.has_value() && x->defined() ? output_like(*x) : at::empty({0}, v.options());
}

Sequence gradient(const OptionalTensor& of, const Tensor& made, const char* name) {
    return of.has_value() && of->defined() ? sequence(made, name) : Sequence{};
}

Tensor kept_states(const Sizes& sizes, const Tensor& v) {
    const int64_t kept = sizes.interval ? (sizes.time - 1) / sizes.interval : 0;
    return at::empty({sizes.batch, sizes.heads, kept, sizes.key_dim, sizes.value_dim},
                     v.options().dtype(state_type(v)));
}

const void* kept_states_input(const Tensor& states, const Sizes& sizes, const Tensor& v) {
    const int64_t kept = sizes.interval ? (sizes.time - 1) / sizes.interval : 0;
    const std::array<int64_t, 5> shape{sizes.batch, sizes.heads, kept, sizes.key_dim, sizes.value_dim};
    TORCH_CHECK(
        states.sizes() == at::IntArrayRef(shape) && states.is_contiguous() && states.scalar_type() == state_type(v),
        "states must be what the forward pass returned, contiguous ", at::IntArrayRef(shape), " of ", state_type(v),
        "; it is ", states.sizes(), " of ", states.scalar_type());
    check_device(states, v, "states");
    return pointer(states);
}

template <typename Params>
struct Algorithms {
    cudaError_t (*launch[2])(const Params*, cudaStream_t);  // by Algorithm
    size_t (*workspace[2])(const Params*);
};

// Chooses, allocates the workspace and launches.
template <typename Params>
void run(Operation operation, const char* name, const Algorithms<Params>& algorithms, Params& params, const Tensor& v,
         int32_t by_dimension) {
    int major = 0, minor = 0;
    const int device = v.get_device();
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const int32_t chosen = fastweights_choose(operation, &params.sizes, params.v.dtype, params.log_gate.data != nullptr,
                                              by_dimension, 10 * major + minor);
    const auto bytes = static_cast<int64_t>(algorithms.workspace[chosen](&params));
    Tensor workspace;
    if (bytes) {
        workspace = at::empty({bytes}, v.options().dtype(at::kByte));
        params.workspace = workspace.data_ptr();
    }
    const cudaError_t error = algorithms.launch[chosen](&params, c10::cuda::getCurrentCUDAStream(device).stream());
    TORCH_CHECK(error == cudaSuccess, "fairseq_fastweights::", name, ": ", cudaGetErrorString(error));
}

// The fields that all calls have in common.
template <typename Params>
Params params_of(const Rule& rule, int64_t interval) {
    Params params{};
    rule.check();
    params.sizes = sizes_of(rule.q, rule.k, rule.v, interval);
    params.q = sequence_like(rule.q, rule.k, rule.v, "q");
    params.k = sequence_like(rule.k, rule.k, rule.v, "k");
    params.v = sequence_like(rule.v, rule.v, rule.v, "v");
    if (given(rule.erase)) params.erase = sequence_like(*rule.erase, rule.k, rule.v, "erase");
    params.beta = gate(rule.beta, rule.v, 0, "beta");
    params.complement = rule.complement;
    params.log_gate = gate(rule.log_gate, rule.v, 0, "log_gate");
    params.log_key_decay = gate(rule.log_key_decay, rule.v, params.sizes.key_dim, "log_key_decay");
    params.log_value_decay = gate(rule.log_value_decay, rule.v, params.sizes.value_dim, "log_value_decay");
    return params;
}

std::tuple<Tensor, Tensor, Tensor> forward(Operation operation, const Algorithms<RuleForward>& algorithms,
                                           const Rule& rule, const OptionalTensor& initial_state, int64_t interval) {
    const Tensor& v = rule.v;
    const c10::cuda::CUDAGuard guard(v.device());
    auto params = params_of<RuleForward>(rule, interval);
    const Sizes sizes = params.sizes;
    const Tensor initial = state_input(initial_state, sizes, v, "initial_state");
    Tensor out = output_like(v), states = kept_states(sizes, v);
    Tensor final_state =
        at::empty({sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim}, v.options().dtype(state_type(v)));
    if (sizes.batch == 0) return {out, final_state, states};
    params.initial_state = pointer(initial);
    params.out = sequence(out, "out");
    params.final_state = mutable_pointer(final_state);
    params.states = mutable_pointer(states);
    run(operation, "rule_forward", algorithms, params, v, rule.by_dimension());
    return {out, final_state, states};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(Operation operation, const Algorithms<RuleBackward>& algorithms, const Tensor& d_out,
                   const OptionalTensor& d_final_state, const Rule& rule, const OptionalTensor& initial_state,
                   const Tensor& states, int64_t interval) {
    const Tensor& v = rule.v;
    const c10::cuda::CUDAGuard guard(v.device());
    auto params = params_of<RuleBackward>(rule, interval);
    const Sizes sizes = params.sizes;
    // Autograd hands on what it has: an expanded scalar, a transposed view.
    const Tensor dy = d_out.size(-1) == 1 || d_out.stride(-1) == 1 ? d_out : d_out.contiguous();
    params.d_out = sequence_like(dy, v, v, "d_out");
    const Tensor initial = state_input(initial_state, sizes, v, "initial_state");
    const Tensor d_final = state_input(d_final_state, sizes, v, "d_final_state");
    Tensor dq = output_like(rule.q), dk = output_like(rule.k), dv = output_like(v);
    Tensor d_erase = gradient_like(rule.erase, v), d_beta = gradient_like(rule.beta, v),
           d_log_gate = gradient_like(rule.log_gate, v), d_log_key_decay = gradient_like(rule.log_key_decay, v),
           d_log_value_decay = gradient_like(rule.log_value_decay, v);
    Tensor d_initial = initial.defined() ? at::empty(initial.sizes(), initial.options())
                                         : at::empty({0}, v.options().dtype(state_type(v)));
    const Gradients gradients{dq, dk, dv, d_erase, d_beta, d_log_gate, d_log_key_decay, d_log_value_decay, d_initial};
    TORCH_CHECK(interval > 0, "the forward pass kept no states (interval 0)");
    params.states = kept_states_input(states, sizes, v);
    if (sizes.batch == 0) return gradients;
    params.initial_state = pointer(initial);
    params.d_final_state = pointer(d_final);
    params.dq = sequence(dq, "dq");
    params.dk = sequence(dk, "dk");
    params.dv = sequence(dv, "dv");
    params.d_erase = gradient(rule.erase, d_erase, "d_erase");
    params.d_beta = gradient(rule.beta, d_beta, "d_beta");
    params.d_log_gate = gradient(rule.log_gate, d_log_gate, "d_log_gate");
    params.d_log_key_decay = gradient(rule.log_key_decay, d_log_key_decay, "d_log_key_decay");
    params.d_log_value_decay = gradient(rule.log_value_decay, d_log_value_decay, "d_log_value_decay");
    params.d_initial_state = mutable_pointer(d_initial);
    run(operation, "rule_backward", algorithms, params, v, rule.by_dimension());
    return gradients;
}

const Algorithms<RuleForward> kDiagonalForwards{
    {fastweights_diagonal_forward_recurrent, fastweights_diagonal_forward_chunked},
    {fastweights_diagonal_forward_recurrent_workspace, fastweights_diagonal_forward_chunked_workspace}};
const Algorithms<RuleBackward> kDiagonalBackwards{
    {fastweights_diagonal_backward_recurrent, fastweights_diagonal_backward_chunked},
    {fastweights_diagonal_backward_recurrent_workspace, fastweights_diagonal_backward_chunked_workspace}};
const Algorithms<RuleForward> kDeltaForwards{
    {fastweights_delta_forward_recurrent, fastweights_delta_forward_chunked},
    {fastweights_delta_forward_recurrent_workspace, fastweights_delta_forward_chunked_workspace}};
const Algorithms<RuleBackward> kDeltaBackwards{
    {fastweights_delta_backward_recurrent, fastweights_delta_backward_chunked},
    {fastweights_delta_backward_recurrent_workspace, fastweights_delta_backward_chunked_workspace}};

StepState step_state(const Tensor& state, const Sizes& sizes, const Tensor& v) {
    const std::array<int64_t, 4> shape{sizes.batch, sizes.heads, sizes.key_dim, sizes.value_dim};
    TORCH_CHECK(sizes.time == 1, "k has ", sizes.time, " steps; a step takes one");
    TORCH_CHECK(state.sizes() == at::IntArrayRef(shape), "state has shape ", state.sizes(), "; it must be ",
                at::IntArrayRef(shape));
    TORCH_CHECK(state.scalar_type() == state_type(v), "state has dtype ", state.scalar_type(), "; it must be ",
                state_type(v));
    check_device(state, v, "state");
    TORCH_CHECK(state.size(3) == 1 || state.stride(3) == 1, "state has strides ", state.strides(),
                "; its last dimension must be contiguous");
    for (int i = 0; i < 3; ++i)
        TORCH_CHECK(state.size(i) <= 1 || state.stride(i) != 0, "state has strides ", state.strides(),
                    "; it is updated in place, so no two of its elements may share memory");
    return {state.data_ptr(), state.stride(0), state.stride(1), state.stride(2)};
}

// Tells autograd, as torch's own in-place operations do: a graph that saved the state then refuses what it became.
void mark_changed(const Tensor& state) {
    if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
}

Tensor step(cudaError_t (*launch)(const RuleStep*, cudaStream_t), const Rule& rule, const Tensor& state) {
    const Tensor& v = rule.v;
    const c10::cuda::CUDAGuard guard(v.device());
    auto params = params_of<RuleStep>(rule, 0);
    params.state = step_state(state, params.sizes, v);
    Tensor out = output_like(v);
    params.out = sequence(out, "out");
    const cudaError_t error = launch(&params, c10::cuda::getCurrentCUDAStream(v.get_device()).stream());
    TORCH_CHECK(error == cudaSuccess, "fairseq_fastweights::rule_step_: ", cudaGetErrorString(error));
    mark_changed(state);
    return out;
}

// As torch calls them.
#define FAST_WEIGHTS_RULE_PARAMETERS                                                               \
    const Tensor &q, const Tensor &k, const Tensor &v, const OptionalTensor &erase, bool corrects, \
        const OptionalTensor &beta, const OptionalTensor &log_gate, bool complement,               \
        const OptionalTensor &log_key_decay, const OptionalTensor &log_value_decay, const OptionalTensor &starts
#define FAST_WEIGHTS_RULE \
    Rule { q, k, v, erase, corrects, beta, log_gate, complement, log_key_decay, log_value_decay, starts }

std::tuple<Tensor, Tensor, Tensor> rule_forward(FAST_WEIGHTS_RULE_PARAMETERS, const OptionalTensor& initial_state,
                                                int64_t interval) {
    const Rule rule = FAST_WEIGHTS_RULE;
    return corrects ? forward(kDeltaForward, kDeltaForwards, rule, initial_state, interval)
                    : forward(kDiagonalForward, kDiagonalForwards, rule, initial_state, interval);
}

Gradients rule_backward(const Tensor& d_out, const OptionalTensor& d_final_state, FAST_WEIGHTS_RULE_PARAMETERS,
                        const OptionalTensor& initial_state, const Tensor& states, int64_t interval) {
    const Rule rule = FAST_WEIGHTS_RULE;
    return corrects
               ? backward(kDeltaBackward, kDeltaBackwards, d_out, d_final_state, rule, initial_state, states, interval)
               : backward(kDiagonalBackward, kDiagonalBackwards, d_out, d_final_state, rule, initial_state, states,
                          interval);
}

Tensor rule_step_(FAST_WEIGHTS_RULE_PARAMETERS, const Tensor& state) {
    const Rule rule = FAST_WEIGHTS_RULE;
    return corrects ? step(fastweights_delta_step, rule, state) : step(fastweights_diagonal_step, rule, state);
}

// Feature maps. `map` and `normalization` are numbers of the enumerations in kernels.h.
Features features_of(const Tensor& x, int64_t map, int64_t nu, int64_t normalization, double eps, double scale) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    TORCH_CHECK(x.dim() == 4, "x has shape ", x.sizes(), "; it must be (batch, time, heads, dim)");
    TORCH_CHECK(map >= 0 && map <= kDpfp, "map is ", map, "; it must be from 0 to ", int(kDpfp));
    TORCH_CHECK(normalization >= 0 && normalization <= kLength, "normalization is ", normalization,
                "; it must be from 0 to ", int(kLength));
    TORCH_CHECK(map != kDpfp || (nu >= 1 && nu < 2 * x.size(3)), "nu is ", nu, "; it must be from 1 to ",
                2 * x.size(3) - 1);
    TORCH_CHECK(x.size(3) >= 1 && x.numel() / x.size(3) <= most && 2 * x.size(3) * std::max<int64_t>(nu, 1) <= most,
                "x has shape ", x.sizes(), ", which is too large, or has no dimensions");
    Features p{};
    p.batch = static_cast<int32_t>(x.size(0)), p.time = static_cast<int32_t>(x.size(1));
    p.heads = static_cast<int32_t>(x.size(2)), p.dim = static_cast<int32_t>(x.size(3));
    p.nu = map == kDpfp ? static_cast<int32_t>(nu) : 1;
    p.map = static_cast<int32_t>(map), p.normalization = static_cast<int32_t>(normalization);
    p.eps = eps, p.scale = scale;
    p.x = sequence(x, "x");
    return p;
}

std::array<int64_t, 4> mapped_sizes(const Features& p) {
    return {p.batch, p.time, p.heads, int64_t{p.dim} * (p.map == kDpfp ? 2 * p.nu : p.map == kRandom ? 2 : 1)};
}

void run_features(cudaError_t (*launch)(const Features*, cudaStream_t), const Features& p, const Tensor& x) {
    const cudaError_t error = launch(&p, c10::cuda::getCurrentCUDAStream(x.get_device()).stream());
    TORCH_CHECK(error == cudaSuccess, "fairseq_fastweights::map_features: ", cudaGetErrorString(error));
}

// As autograd hands it on: an expanded scalar, a transposed view.
Tensor last_contiguous(const Tensor& x) { return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous(); }

Tensor map_features(const Tensor& x, int64_t map, int64_t nu, int64_t normalization, double eps, double scale,
                    at::ScalarType dtype) {
    const c10::cuda::CUDAGuard guard(x.device());
    Features p = features_of(x, map, nu, normalization, eps, scale);
    Tensor y = at::empty(mapped_sizes(p), x.options().dtype(dtype));
    p.y = sequence(y, "y");
    run_features(fastweights_features_forward, p, x);
    return y;
}

Tensor map_features_backward(const Tensor& d_out, const Tensor& x, int64_t map, int64_t nu, int64_t normalization,
                             double eps, double scale) {
    const c10::cuda::CUDAGuard guard(x.device());
    Features p = features_of(x, map, nu, normalization, eps, scale);
    const auto sizes = mapped_sizes(p);
    TORCH_CHECK(d_out.sizes() == at::IntArrayRef(sizes), "d_out has shape ", d_out.sizes(), "; it must be ",
                at::IntArrayRef(sizes));
    check_device(d_out, x, "d_out");
    const Tensor dy = last_contiguous(d_out);
    Tensor dx = output_like(x);
    p.dy = sequence(dy, "d_out"), p.dx = sequence(dx, "dx");
    run_features(fastweights_features_backward, p, x);
    return dx;
}

void check_sizes(const Tensor& x, at::IntArrayRef sizes, const Tensor& like, const char* name) {
    TORCH_CHECK(x.sizes() == sizes, name, " has shape ", x.sizes(), "; it must be ", sizes);
    TORCH_CHECK(x.device() == like.device(), name, " is on ", x.device(), "; it must be on ", like.device(),
                " as x is");
}

// Random features of `source`, of which x are the projections: both (batch, time, heads, dim).
Features random_features_of(const Tensor& x, const Tensor& source, double source_scale, double log_epsilon,
                            bool stabilized, int64_t normalization, double eps) {
    Features p = features_of(x, kIdentity, 1, normalization, eps, 1);
    check_sizes(source, {p.batch, p.time, p.heads, source.size(-1)}, x, "source");
    p.map = kRandom, p.source = sequence(source, "source"), p.source_dim = static_cast<int32_t>(source.size(-1));
    p.source_scale = source_scale, p.log_epsilon = log_epsilon, p.stabilized = stabilized;
    return p;
}

Tensor random_features(const Tensor& x, const Tensor& source, double source_scale, double log_epsilon, bool stabilized,
                       int64_t normalization, double eps, at::ScalarType dtype) {
    const c10::cuda::CUDAGuard guard(x.device());
    Features p = random_features_of(x, source, source_scale, log_epsilon, stabilized, normalization, eps);
    Tensor y = at::empty(mapped_sizes(p), x.options().dtype(dtype));
    p.y = sequence(y, "y");
    run_features(fastweights_features_forward, p, x);
    return y;
}

std::tuple<Tensor, Tensor> random_features_backward(const Tensor& d_out, const Tensor& x, const Tensor& source,
                                                    double source_scale, double log_epsilon, bool stabilized,
                                                    int64_t normalization, double eps) {
    const c10::cuda::CUDAGuard guard(x.device());
    Features p = random_features_of(x, source, source_scale, log_epsilon, stabilized, normalization, eps);
    check_sizes(d_out, mapped_sizes(p), x, "d_out");
    const Tensor dy = last_contiguous(d_out), dx = output_like(x), d_source = output_like(source);
    p.dy = sequence(dy, "d_out"), p.dx = sequence(dx, "dx"), p.d_source = sequence(d_source, "d_source");
    run_features(fastweights_features_backward, p, x);
    return {dx, d_source};
}

// A tensor of three dimensions, or with a norm four; the last is contiguous.
Sequence rows(const Tensor& x, const char* name) {
    TORCH_CHECK(x.numel() == 0 || x.size(-1) == 1 || x.stride(-1) == 1, name, " has strides ", x.strides(),
                "; its last dimension must be contiguous");
    return {x.data_ptr(), x.stride(0), x.stride(1), x.dim() == 4 ? x.stride(2) : 0, dtype_of(x.scalar_type(), name)};
}

// Vectors of parameters; what it makes contiguous must outlive the call.
Sequence parameters(OptionalTensor& x, at::IntArrayRef sizes, const Tensor& like, const char* name) {
    if (!given(x)) return {};
    check_sizes(*x, sizes, like, name);
    x = x->contiguous();
    return {x->data_ptr(), 0, 0, 0, dtype_of(x->scalar_type(), name)};
}

// An output of x's layout, but for one in which the last dimension has gaps.
Tensor rows_like(const Tensor& x) {
    Tensor made = at::empty_like(x);
    return made.size(-1) <= 1 || made.stride(-1) == 1 ? made : at::empty(x.sizes(), x.options());
}

int32_t size_of(const Tensor& x, int64_t dim) {
    TORCH_CHECK(x.size(dim) <= std::numeric_limits<int32_t>::max(), "x has shape ", x.sizes(), ", which is too large");
    return static_cast<int32_t>(x.size(dim));
}

void check_launch(cudaError_t error, const char* name) {
    TORCH_CHECK(error == cudaSuccess, "fairseq_fastweights::", name, ": ", cudaGetErrorString(error));
}

// A call of gates, and what it has made contiguous. `activation` and `norm` are numbers of the enumerations in kernels.h.
struct GatingCall {
    OptionalTensor bias, log_rate, weight;
    Gating p{};

    GatingCall(const Tensor& x, const OptionalTensor& b, const OptionalTensor& A, const OptionalTensor& y,
               const OptionalTensor& w, int64_t activation, int64_t norm, double eps, double scale)
        : bias(b), log_rate(A), weight(w) {
        TORCH_CHECK(x.dim() == 3 && x.size(2) >= 1, "x has shape ", x.sizes(), "; it must be (outer, inner, channels)");
        TORCH_CHECK(activation >= 0 && activation <= kSoftplus, "activation is ", activation, "; it must be from 0 to ",
                    int(kSoftplus));
        TORCH_CHECK(norm >= 0 && norm <= kLayerNorm, "norm is ", norm, "; it must be from 0 to ", int(kLayerNorm));
        p.outer = size_of(x, 0), p.inner = size_of(x, 1), p.heads = 1, p.dim = size_of(x, 2);
        p.activation = static_cast<int32_t>(activation), p.norm = static_cast<int32_t>(norm);
        p.eps = eps, p.scale = scale, p.x = rows(x, "x");
        if (norm == kNoNorm) {
            TORCH_CHECK(!given(w), "weight was given without a norm");
            if (given(y)) check_sizes(*y, x.sizes(), x, "y");
        } else {
            TORCH_CHECK(given(y) && !given(b) && !given(A), "a norm is of y alone, without bias and log_rate");
            p.dim = y->dim() == 4 && y->size(3) ? static_cast<int32_t>(y->size(3)) : 1;
            p.heads = static_cast<int32_t>(x.size(2) / p.dim);
            check_sizes(*y, {p.outer, p.inner, p.heads, p.dim}, x, "y");
        }
        if (given(y)) p.y = rows(*y, "y");
        p.bias = parameters(bias, {x.size(2)}, x, "bias"), p.weight = parameters(weight, {p.dim}, x, "weight");
        p.rates = given(A) && A->dim() == 1 && A->size(0) ? static_cast<int32_t>(A->size(0)) : 1;
        p.log_rate = parameters(log_rate, {p.rates}, x, "log_rate");
        TORCH_CHECK(x.size(2) % p.rates == 0, "log_rate has ", p.rates, " numbers for ", x.size(2), " channels");
    }
};

Tensor gate_forward(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& log_rate,
                    const OptionalTensor& y, const OptionalTensor& weight, int64_t activation, int64_t norm, double eps,
                    double scale, at::ScalarType dtype) {
    const c10::cuda::CUDAGuard guard(x.device());
    GatingCall call(x, bias, log_rate, y, weight, activation, norm, eps, scale);
    Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
    call.p.out = rows(out, "out");
    check_launch(fastweights_gating_forward(&call.p, c10::cuda::getCurrentCUDAStream(x.get_device()).stream()), "gate");
    return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gate_backward(
    const Tensor& d_out, const Tensor& x, const OptionalTensor& bias, const OptionalTensor& log_rate,
    const OptionalTensor& y, const OptionalTensor& weight, int64_t activation, int64_t norm, double eps, double scale) {
    const c10::cuda::CUDAGuard guard(x.device());
    GatingCall call(x, bias, log_rate, y, weight, activation, norm, eps, scale);
    Gating& p = call.p;
    check_sizes(d_out, x.sizes(), x, "d_out");
    const auto precise = x.options().dtype(state_type(x));
    const Tensor g = last_contiguous(d_out), dx = rows_like(x);
    const Tensor dy = given(y) ? rows_like(*y) : at::empty({0}, x.options());
    p.d_out = rows(g, "d_out"), p.dx = rows(dx, "dx");
    if (given(y)) p.dy = rows(dy, "dy");
    const int64_t parts = fastweights_gating_parts(&p);
    // The gradient of an absent input is an empty tensor; the kernels leave parts of the others, to be added up.
    const auto part = [&](const OptionalTensor& of, int64_t size, void*& where) {
        const Tensor made = given(of) ? at::empty({parts, size}, precise) : at::empty({0}, x.options());
        where = given(of) ? made.data_ptr() : nullptr;
        return made;
    };
    const Tensor d_bias = part(bias, x.size(2), p.d_bias), d_rate = part(log_rate, x.size(2), p.d_log_rate);
    const Tensor d_weight = part(weight, p.dim, p.d_weight);
    const Tensor moments = given(weight) ? at::empty({x.size(0), x.size(1), p.heads, 2}, precise) : Tensor();
    p.moments = given(weight) ? moments.data_ptr() : nullptr;
    const auto stream = c10::cuda::getCurrentCUDAStream(x.get_device()).stream();
    check_launch(fastweights_gating_backward(&p, stream), "gate_backward");
    const auto total = [&](const Tensor& made, const OptionalTensor& of) {
        if (!given(of)) return made;
        return made.view({parts, of->size(0), made.size(1) / of->size(0)})
            .sum(at::IntArrayRef{0, 2})
            .to(of->scalar_type());
    };
    return {dx, total(d_bias, bias), total(d_rate, log_rate), dy, total(d_weight, weight)};
}

// A short convolution of x, (time, batch, channels), and what it has made contiguous.
struct ConvolutionCall {
    OptionalTensor weight, bias, starts, lengths;
    Convolution p{};

    ConvolutionCall(const Tensor& x, const Tensor& w, const OptionalTensor& b, const OptionalTensor& before,
                    const OptionalTensor& given_lengths, const OptionalTensor& given_starts)
        : weight(w), bias(b) {
        TORCH_CHECK(x.dim() == 3, "x has shape ", x.sizes(), "; it must be (time, batch, channels)");
        p.time = size_of(x, 0), p.batch = size_of(x, 1), p.channels = size_of(x, 2);
        p.width = w.dim() == 2 && w.size(1) ? static_cast<int32_t>(w.size(1)) : 1;
        p.weight = parameters(weight, {p.channels, p.width}, x, "weight");
        p.bias = parameters(bias, {p.channels}, x, "bias");
        p.x = time_first(x, "x");
        if (given(before)) {
            check_sizes(*before, {p.batch, p.width - 1, p.channels}, x, "before");
            p.before = rows(*before, "before");
        }
        if (given(given_starts)) {
            check_sizes(*given_starts, {p.batch, p.time}, x, "starts");
            TORCH_CHECK(given_starts->scalar_type() == at::kBool, "starts has dtype ", given_starts->scalar_type());
            starts = given_starts->contiguous();
            p.starts = static_cast<const bool*>(starts->data_ptr());
        }
        if (given(given_lengths)) {
            check_sizes(*given_lengths, {p.batch}, x, "lengths");
            TORCH_CHECK(given_lengths->scalar_type() == at::kLong, "lengths has dtype ", given_lengths->scalar_type());
            lengths = given_lengths->clamp(0, p.time).contiguous();  // to look at them would be to wait for the GPU
            p.lengths = static_cast<const int64_t*>(lengths->data_ptr());
        }
    }

    static Sequence time_first(const Tensor& x, const char* name) {
        Sequence made = rows(x, name);
        std::swap(made.batch, made.time);
        return made;
    }
};

std::tuple<Tensor, Tensor> short_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                             const OptionalTensor& before, const OptionalTensor& lengths,
                                             const OptionalTensor& starts) {
    const c10::cuda::CUDAGuard guard(x.device());
    ConvolutionCall call(x, weight, bias, before, lengths, starts);
    Convolution& p = call.p;
    Tensor y = at::empty(x.sizes(), x.options());
    Tensor last = at::empty({p.batch, p.width - 1, p.channels}, x.options().dtype(state_type(x)));
    p.y = call.time_first(y, "y"), p.last = rows(last, "last");
    const auto stream = c10::cuda::getCurrentCUDAStream(x.get_device()).stream();
    check_launch(fastweights_convolution_forward(&p, stream), "short_convolution");
    return {y, last};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> short_convolution_backward(
    const Tensor& d_y, const OptionalTensor& d_last, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& before, const OptionalTensor& lengths, const OptionalTensor& starts) {
    const c10::cuda::CUDAGuard guard(x.device());
    ConvolutionCall call(x, weight, bias, before, lengths, starts);
    Convolution& p = call.p;
    check_sizes(d_y, x.sizes(), x, "d_y");
    const Tensor g = last_contiguous(d_y), dx = rows_like(x);
    const Tensor d_before = given(before) ? rows_like(*before) : at::empty({0}, x.options());
    const Tensor d_after = given(d_last) ? last_contiguous(*d_last) : Tensor();
    p.d_y = call.time_first(g, "d_y"), p.dx = call.time_first(dx, "dx");
    if (given(d_last)) {
        check_sizes(*d_last, {p.batch, p.width - 1, p.channels}, x, "d_last");
        p.d_last = rows(d_after, "d_last");
    }
    if (given(before)) p.d_before = rows(d_before, "d_before");
    const auto precise = x.options().dtype(state_type(x));
    const int64_t parts = fastweights_convolution_parts(&p);
    const Tensor dw = at::empty({parts, p.channels, p.width}, precise), db = at::empty({parts, p.channels}, precise);
    const Tensor d = at::empty(x.sizes(), precise);
    p.dw = dw.data_ptr(), p.db = db.data_ptr(), p.d = d.data_ptr();
    const auto stream = c10::cuda::getCurrentCUDAStream(x.get_device()).stream();
    check_launch(fastweights_convolution_backward(&p, stream), "short_convolution_backward");
    const Tensor d_bias = given(bias) ? db.sum(0).to(bias->scalar_type()) : at::empty({0}, x.options());
    return {dx, dw.sum(0).to(weight.scalar_type()), d_bias, d_before};
}

std::vector<int64_t> plan(const std::string& operation, at::IntArrayRef sizes, at::ScalarType dtype, bool gated,
                          bool separate_decays, int64_t capability) {
    constexpr std::array<const char*, 4> operations{"diagonal_forward", "diagonal_backward", "delta_forward",
                                                    "delta_backward"};  // by Operation
    const auto found = std::find(operations.begin(), operations.end(), operation);
    TORCH_CHECK(found != operations.end(), "operation is ", operation, "; it must be one of ",
                c10::Join(", ", operations));
    TORCH_CHECK(sizes.size() == 6, "sizes has ", sizes.size(),
                " numbers; it must have 6: batch, time, heads, key_dim, value_dim and interval");
    const auto within = [&](int i, int64_t least, int64_t most) { return sizes[i] >= least && sizes[i] <= most; };
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    TORCH_CHECK(within(0, 0, most) && within(1, 1, most) && within(2, 1, most) && sizes[0] <= most / sizes[2] &&
                    within(3, 1, kMostDim) && within(4, 1, kMostDim) && within(5, 0, most),
                "sizes is ", sizes, "; batch and interval must be at least 0, time and heads at least 1, key_dim and ",
                "value_dim from 1 to ", kMostDim, ", and batch * heads and each of them less than 2^31");
    const auto number = static_cast<int32_t>(found - operations.begin());
    const auto device = static_cast<int32_t>(capability);
    const auto at = [&](int i) { return static_cast<int32_t>(sizes[i]); };
    const Sizes given{at(0), at(1), at(2), at(3), at(4), at(5)};
    const int32_t type = dtype_of(dtype, "v");
    if (fastweights_choose(number, &given, type, gated, separate_decays, device) == kRecurrent) return {};
    const ChunkedPlan made = fastweights_chunked_plan(number, &given, type, gated, separate_decays, device);
    return {made.chunk,    made.columns, made.blocks, made.stages, made.threads,
            made.segments, made.at_once, made.shared, made.walk};
}

}  // namespace

TORCH_LIBRARY_IMPL(fairseq_fastweights, CompositeExplicitAutograd, m) { m.impl("cuda_plan", &plan); }

TORCH_LIBRARY_IMPL(fairseq_fastweights, CUDA, m) {
    m.impl("rule_forward", &rule_forward);
    m.impl("rule_backward", &rule_backward);
    m.impl("rule_step_", &rule_step_);
    m.impl("map_features", &map_features);
    m.impl("map_features_backward", &map_features_backward);
    m.impl("random_features", &random_features);
    m.impl("random_features_backward", &random_features_backward);
    m.impl("gate", &gate_forward);
    m.impl("gate_backward", &gate_backward);
    m.impl("short_convolution", &short_convolution);
    m.impl("short_convolution_backward", &short_convolution_backward);
}

}  // namespace fairseq_fastweights
