// The local stage, and what it is given.
#pragma once

#include "slices.h"
#include "tensor_core.cuh"

namespace fairseq_fastweights {

struct Local {
    Sizes sizes;
    Sequence q, k, erase, strengths, log_gate, log_key_decay, v, d_out, log_value_decay;
    bool complement;

    template <typename Params>
    explicit Local(const Params& p)
        : sizes(p.sizes), q(p.q), k(p.k), erase(p.erase.data ? p.erase : p.k), strengths(p.beta), log_gate(p.log_gate),
          log_key_decay(p.log_key_decay), v(p.v), d_out(p.v), log_value_decay(p.log_value_decay),
          complement(p.complement != 0) {
        if constexpr (std::is_same<Params, RuleBackward>::value) d_out = p.d_out;
    }
    // Values in the place of keys.
    Local swapped() const {
        Local of_values = *this;
        of_values.sizes.key_dim = sizes.value_dim;
        of_values.q = d_out;
        of_values.k = of_values.erase = v;
        of_values.log_key_decay = log_value_decay;
        return of_values;
    }
};
template <typename T>
cudaError_t launch_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice, cudaStream_t stream);

// The same with decays by dimension or erase keys (decayed_local.cu).
template <typename T>
cudaError_t launch_decayed_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice,
                                 cudaStream_t stream);

}  // namespace fairseq_fastweights
