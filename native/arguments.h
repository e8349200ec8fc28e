// Checks of tensors, and their addresses and strides as kernels read them. The kernels trust the sizes of a call: a
// tensor that has others would be read beyond its end.
#pragma once

#include "tensors.h"
#include "types.h"

namespace fairseq_fastweights {

using std::optional;

inline int32_t dtype_of(const char* name, ScalarType type) {
    switch (type) {
        case ScalarType::Float: return kFloat32;
        case ScalarType::Double: return kFloat64;
        case ScalarType::Half: return kFloat16;
        case ScalarType::BFloat16: return kBFloat16;
        default: fail(name, " is of type ", type, "; it must be float32, float16, bfloat16 or float64");
    }
}

inline ScalarType state_type(const Tensor& v) {
    return v.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline bool last_is_contiguous(const Tensor& x) { return x.size(-1) <= 1 || x.stride(-1) == 1; }

// Autograd hands on any layout: an expanded scalar, a transposed view.
inline Tensor last_contiguous(const Tensor& x) { return last_is_contiguous(x) ? x : contiguous(x); }

// A tensor, contiguous; nothing of nothing. The result must outlive the pointer to its data.
inline optional<Tensor> contiguous_of(const optional<Tensor>& x) {
    if (!x || x->is_contiguous()) return x;
    return contiguous(*x);
}

inline void* data_of(const optional<Tensor>& x) { return x ? x->data_ptr() : nullptr; }

// The gradient of an absent input: no two results of an operator may share memory.
inline Tensor nothing(const Tensor& x) { return new_empty(x, {0}, x.scalar_type()); }

// In x's layout, unless its last dimension has gaps: so the gradient of a projection is no copy.
inline Tensor gradient_like(const Tensor& x) {
    const Tensor made = new_like(x);
    return last_is_contiguous(made) ? made : new_empty(x, x.sizes(), x.scalar_type());
}

// A tensor of `dims` dimensions, (batch, time, heads[, dim]) or (batch, time, channels), as kernels read it: where it
// has as many, its last dimension is contiguous.
inline Sequence sequence(const char* name, const Tensor& x, int64_t dims = 4) {
    const Shape strides = x.strides();
    if (int64_t(strides.size()) == dims && strides[dims - 1] != 1 && x.size(-1) > 1 && x.numel()) {
        fail(name, " has strides ", strides, "; its last dimension must be contiguous");
    }
    return {x.data_ptr(), strides[0], strides[1], dims == 4 ? strides[2] : 0, dtype_of(name, x.scalar_type())};
}

inline void check_sizes(const char* name, const Tensor& x, Shape sizes) {
    if (!x.sizes().equals(sizes)) fail(name, " has shape ", x.sizes(), "; it must be ", sizes);
}

inline void check_device(const char* name, const Tensor& x, const Tensor& like) {
    if (!on_same_device(x, like)) fail(name, " is on another device than the others");
}

// Checks the type of an input: that of v; gates may also be of float32.
inline void check_type(const char* name, const Tensor& x, const Tensor& v, bool gate) {
    if (x.scalar_type() == v.scalar_type() || (gate && x.scalar_type() == ScalarType::Float)) return;
    fail(name, " is of type ", x.scalar_type(), "; it must be that of v, ", v.scalar_type());
}

// A state: kernels read it as the type of states, whatever its dtype.
inline void check_state(const char* name, const Tensor& x, const Tensor& input, Shape sizes) {
    check_sizes(name, x, sizes);
    check_device(name, x, input);
    if (x.scalar_type() == state_type(input)) return;
    fail(name, " is of type ", x.scalar_type(), "; it must be ", state_type(input), " for inputs of ",
         input.scalar_type());
}

// The state of a step, which is changed where it lies.
inline void check_own_state(const Tensor& state, const Tensor& input, Shape sizes) {
    check_state("state", state, input, sizes);
    if (last_is_contiguous(state)) return;
    fail("state has strides ", state.strides(), "; its last dimension must be contiguous");
}

// Vectors of parameters, as the kernels read them; `x` becomes contiguous and must outlive the call.
inline Sequence parameters(const char* name, optional<Tensor>& x, Shape sizes, const Tensor& like) {
    if (!x) return {};
    check_sizes(name, *x, sizes);
    check_device(name, *x, like);
    x = contiguous_of(x);
    return {x->data_ptr(), 0, 0, 0, dtype_of(name, x->scalar_type())};
}

// The document starts, or null; `starts` becomes contiguous and must outlive the call.
inline const bool* flags_of(optional<Tensor>& starts, Shape sizes, const Tensor& like) {
    if (!starts) return nullptr;
    check_sizes("starts", *starts, sizes);
    check_device("starts", *starts, like);
    if (starts->scalar_type() != ScalarType::Bool) fail("starts is of type ", starts->scalar_type());
    starts = contiguous_of(starts);
    return static_cast<const bool*>(starts->data_ptr());
}

// The parts of the recurrence, as the operators take them.
struct Rule {
    const Tensor &q, &k, &v;
    const optional<Tensor>& erase;
    bool is_delta;
    const optional<Tensor>&beta, &log_gate;
    bool complement;
    const optional<Tensor>&log_key_decay, &log_value_decay, &starts;

    // Fills in the fields that all calls have in common. Heads of q, k and erase may be fewer than those of v (grouped
    // heads).
    template <class Call> void fill(Call& p) const {
        if (is_delta && log_value_decay) fail("a rule that corrects was given log_value_decay; there is no kernel");
        if (!is_delta && (erase || beta)) fail("a rule that does not correct was given erase or beta");
        if (k.dim() != 4 || v.dim() != 4) {
            fail("k has shape ", k.sizes(), " and v ", v.sizes(), "; they must be (batch, time, heads, dim)");
        }
        const int64_t batch = v.size(0), time = v.size(1), heads = v.size(2), key_dim = k.size(3);
        const auto of_keys = [&](const char* name, const Tensor& x) {
            const int64_t own = x.size(2);
            check_sizes(name, x, {batch, time, own, key_dim});
            check_type(name, x, v, false);
            check_device(name, x, v);
            if (own == 0 || heads % own) {
                fail("v has ", heads, " heads and ", name, " ", own, "; those of v must be a multiple");
            }
            Sequence keys = sequence(name, x);
            keys.sharing = static_cast<int32_t>(heads / own);
            return keys;
        };
        const auto given = [&](const char* name, const optional<Tensor>& x, Shape sizes) {
            if (!x) return Sequence{};
            check_sizes(name, *x, sizes);
            check_type(name, *x, v, true);
            check_device(name, *x, v);
            return sequence(name, *x);
        };
        p.complement = complement;
        p.q = of_keys("q", q), p.k = of_keys("k", k), p.v = sequence("v", v);
        if (erase) p.erase = of_keys("erase", *erase);
        p.beta = given("beta", beta, {batch, time, heads});
        p.log_gate = given("log_gate", log_gate, {batch, time, heads});
        p.log_key_decay = given("log_key_decay", log_key_decay, {batch, time, heads, key_dim});
        p.log_value_decay = given("log_value_decay", log_value_decay, {batch, time, heads, v.size(3)});
    }
};

// As torch calls the rules' operators.
#define FAST_WEIGHTS_RULE_PARAMETERS                                                                \
    const Tensor &q, const Tensor &k, const Tensor &v, const optional<Tensor>&erase, bool is_delta, \
        const optional<Tensor>&beta, const optional<Tensor>&log_gate, bool complement,              \
        const optional<Tensor>&log_key_decay, const optional<Tensor>&log_value_decay, const optional<Tensor>&starts
#define FAST_WEIGHTS_RULE \
    Rule { q, k, v, erase, is_delta, beta, log_gate, complement, log_key_decay, log_value_decay, starts }

}  // namespace fairseq_fastweights
