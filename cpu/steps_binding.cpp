// The steps of whole layers as torch operators, which nothing differentiates (fairseq_fastweights/ops/kernels.py).
#include <algorithm>
#include <tuple>

#include "binding.h"

namespace fairseq_fastweights {
namespace {

template <class Call>
void run(void (*Kernels::*kernel)(const Call&, int64_t, int64_t), const Call& p, const Tensor& x, int64_t numbers) {
    const auto of_type = kernels_for(x).*kernel;
    const int64_t grain = std::max<int64_t>(1, SMALLEST_SHARE / std::max<int64_t>(1, numbers));
    parallel_for(0, p.work_items(), grain, [&](int64_t begin, int64_t end) { of_type(p, begin, end); });
}

// Parameters, contiguous as kernels read them.
Sequence parameter(const char* name, const Tensor& x, Shape sizes) {
    check_sizes(name, x, sizes);
    if (!x.is_contiguous()) fail(name, " has strides ", x.strides(), "; it must be contiguous");
    return {x.data_ptr(), 0, 0, 0, dtype_of(name, x.scalar_type())};
}

// A part of the state of a layer, which is changed where it lies.
Sequence own(const char* name, const Tensor& x, Shape sizes, ScalarType type) {
    if (x.scalar_type() != type) fail(name, " is of type ", x.scalar_type(), "; it must be ", type);
    return parameter(name, x, sizes);
}

// Heads of a step, of which each serves some of `heads`.
Sequence heads_of(const char* name, const Tensor& x, int64_t batch, int64_t heads, int64_t dim) {
    if (x.dim() != 4 || x.size(2) < 1 || heads % x.size(2)) {
        fail(name, " has shape ", x.sizes(), "; it must be (batch, 1, heads, dim) of ", heads, " heads or a divisor");
    }
    check_sizes(name, x, {batch, 1, x.size(2), dim});
    Sequence found = sequence(name, x);
    found.sharing = static_cast<int32_t>(heads / x.size(2));
    return found;
}

Tensor delta_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& weight,
                  const Tensor& bias, double eps, const Tensor& state) {
    if (weight.dim() != 3 || v.dim() != 4) {
        fail("weight has shape ", weight.sizes(), " and v ", v.sizes(),
             "; they must be (heads, features, dim) and (batch, 1, heads, value_dim)");
    }
    DeltaStep p;
    p.batch = v.size(0), p.heads = weight.size(0), p.features = weight.size(1), p.dim = weight.size(2);
    p.value_dim = v.size(3), p.eps = eps;
    p.weight = parameter("weight", weight, {p.heads, p.features, p.dim});
    p.bias = parameter("bias", bias, {p.heads, p.features});
    p.q = heads_of("q", q, p.batch, p.heads, p.dim), p.k = heads_of("k", k, p.batch, p.heads, p.dim);
    p.v = heads_of("v", v, p.batch, p.heads, p.value_dim);
    check_sizes("beta", beta, {1, p.batch, p.heads});
    p.beta = sequence("beta", beta, 3);
    p.state = own("state", state, {p.batch, p.heads, p.features, p.value_dim}, state_type(v)).data;
    Tensor out = new_empty(v, {p.batch, 1, p.heads, p.value_dim}, v.scalar_type());
    p.out = sequence("out", out);
    run(&Kernels::delta_step, p, v, p.features * (p.value_dim + p.dim));
    return out;
}

Tensor window_step(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& cosines,
                   const optional<Tensor>& sines, const Tensor& seen, const Tensor& weight, const Tensor& bias,
                   const Tensor& log_factor, bool sums, double eps, const optional<Tensor>& starts, const Tensor& keys,
                   const Tensor& values, const Tensor& state) {
    if (weight.dim() != 3 || keys.dim() != 4) {
        fail("weight has shape ", weight.sizes(), " and keys ", keys.sizes(),
             "; they must be (heads, features, dim) and (batch, heads of keys, window, dim)");
    }
    WindowStep p;
    const int64_t heads = weight.size(0);
    p.batch = keys.size(0), p.kv_heads = keys.size(1), p.window = keys.size(2), p.dim = keys.size(3);
    p.features = weight.size(1), p.sums = sums, p.eps = eps;
    if (p.kv_heads < 1 || heads % p.kv_heads || p.window < 1) {
        fail("keys has shape ", keys.sizes(), "; its heads must be a divisor of ", heads, " and its window not empty");
    }
    p.sharing = heads / p.kv_heads;
    p.weight = parameter("weight", weight, {heads, p.features, p.dim});
    p.bias = parameter("bias", bias, {heads, p.features});
    p.log_factor = parameter("log_factor", log_factor, {heads});
    p.q = heads_of("q", q, p.batch, heads, p.dim);
    for (auto [name, x, to] : {std::tuple("k", &k, &p.k), std::tuple("v", &v, &p.v)}) {
        *to = heads_of(name, *x, p.batch, p.kv_heads, p.dim);
        check_type(name, *x, q, false);
    }
    if (q.size(2) != heads || k.size(2) != p.kv_heads || v.size(2) != p.kv_heads) {
        fail("q, k and v have ", q.size(2), ", ", k.size(2), " and ", v.size(2), " heads; they must have ", heads,
             " and ", p.kv_heads);
    }
    if (cosines && sines) {
        p.half = cosines->size(-1);
        if (2 * p.half > p.dim) fail("cosines has shape ", cosines->sizes(), "; heads have ", p.dim, " numbers");
        for (auto [name, x, to] :
             {std::tuple("cosines", &*cosines, &p.cosines), std::tuple("sines", &*sines, &p.sines)}) {
            *to = parameter(name, *x, {p.batch, 1, 1, p.half});
            to->batch = p.half;
        }
    }
    check_sizes("seen", seen, {p.batch, 1});
    if (seen.scalar_type() != ScalarType::Long || !seen.is_contiguous()) fail("seen must be of int64 and contiguous");
    p.seen = static_cast<const int64_t*>(seen.data_ptr());
    for (int64_t b = 0; b < p.batch; ++b) {
        if (p.seen[b] < 0) fail("seen holds ", p.seen[b], "; it must be at least 0");
    }
    optional<Tensor> marks = starts;
    p.starts = flags_of(marks, {p.batch, 1}, q);
    p.keys = own("keys", keys, {p.batch, p.kv_heads, p.window, p.dim}, q.scalar_type());
    p.values = own("values", values, {p.batch, p.kv_heads, p.window, p.dim}, q.scalar_type());
    p.state = own("state", state, {p.batch, heads, p.features, p.dim + 1}, state_type(q)).data;
    Tensor out = new_empty(q, {p.batch, 1, heads, p.dim}, q.scalar_type());
    p.out = sequence("out", out);
    run(&Kernels::window_step, p, q, p.sharing * (p.features + p.window) * p.dim);
    return out;
}

Tensor gated_delta_step(const Tensor& x, const Tensor& beta, const Tensor& decay, const Tensor& gate,
                        const Tensor& conv, const Tensor& rate, const Tensor& bias, const Tensor& norm, int64_t q_heads,
                        int64_t k_heads, int64_t v_heads, double max_beta, double eps, const Tensor& before,
                        const Tensor& state) {
    if (x.dim() != 3 || conv.dim() != 3 || state.dim() != 4) {
        fail("x has shape ", x.sizes(), ", conv ", conv.sizes(), " and state ", state.sizes(),
             "; they must be (1, batch, channels), (channels, 1, width) and (batch, heads, key_dim, value_dim)");
    }
    GatedDeltaStep p;
    p.batch = state.size(0), p.heads = state.size(1), p.key_dim = state.size(2), p.value_dim = state.size(3);
    p.q_heads = q_heads, p.k_heads = k_heads, p.v_heads = v_heads, p.width = conv.size(2), p.max_beta = max_beta,
    p.eps = eps;
    for (const int64_t own_heads : {q_heads, k_heads, v_heads}) {
        if (own_heads < 1 || p.heads % own_heads) fail(own_heads, " heads; they must be a divisor of ", p.heads);
    }
    const auto logits = [&](const char* name, const Tensor& given, int64_t channels) {
        check_sizes(name, given, {1, p.batch, channels});
        return sequence(name, given, 3);
    };
    p.x = logits("x", x, p.channels()), p.gate = logits("gate", gate, p.heads * p.value_dim);
    p.beta = logits("beta", beta, p.heads), p.decay = logits("decay", decay, p.heads);
    p.conv = parameter("conv", conv, {p.channels(), 1, p.width}), p.norm = parameter("norm", norm, {p.value_dim});
    p.rate = parameter("rate", rate, {p.heads}), p.bias = parameter("bias", bias, {p.heads});
    p.before = own("before", before, {p.batch, p.width - 1, p.channels()}, state_type(x)).data;
    check_own_state(state, x, {p.batch, p.heads, p.key_dim, p.value_dim});
    p.state = state.data_ptr();
    p.state_batch = state.stride(0), p.state_head = state.stride(1), p.state_key = state.stride(2);
    Tensor out = new_empty(x, {1, p.batch, p.heads * p.value_dim}, x.scalar_type());
    p.out = sequence("out", out, 3);
    run(&Kernels::gated_delta_step, p, x, p.heads * p.key_dim * p.value_dim);
    return out;
}

FAST_WEIGHTS_OPERATORS(fairseq_fastweights, CPU, m) {
    m.impl("delta_step_", FAST_WEIGHTS_OPERATOR(delta_step));
    m.impl("window_step_", FAST_WEIGHTS_OPERATOR(window_step));
    m.impl("gated_delta_step_", FAST_WEIGHTS_OPERATOR(gated_delta_step));
}

}  // namespace
}  // namespace fairseq_fastweights
