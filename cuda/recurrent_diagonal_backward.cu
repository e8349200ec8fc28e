// Diagonal family, recurrent, backward.
#include "recurrent_backward.cuh"

using namespace fairseq_fastweights;

namespace {

BackwardCall call_of(const DiagonalBackward& p) {
    BackwardCall call{};
    call.sizes = p.sizes;
    call.complement = p.complement;
    call.d_out = p.d_out;
    call.d_final_state = p.d_final_state;
    call.q = p.q;
    call.k = p.k;
    call.v = p.v;
    call.gate = p.log_gate;
    call.key_decay = p.log_key_decay;
    call.value_decay = p.log_value_decay;
    call.initial_state = p.initial_state;
    call.states = p.states;
    call.dq = p.dq;
    call.dk = p.dk;
    call.dv = p.dv;
    call.d_gate = p.d_log_gate;
    call.d_key_decay = p.d_log_key_decay;
    call.d_value_decay = p.d_log_value_decay;
    call.d_initial_state = p.d_initial_state;
    call.workspace = p.workspace;
    return call;
}

template <typename Use>
auto with_mode(const DiagonalBackward& p, const Use& use) {
    if (p.log_gate.data) return use.template operator()<kScalar>();
    if (p.log_value_decay.data) return use.template operator()<kBoth>();
    return p.log_key_decay.data ? use.template operator()<kKey>() : use.template operator()<kPlain>();
}

struct AskWorkspace {
    const BackwardCall& call;
    template <int M>
    size_t operator()() const {
        return backward_workspace<M>(call);
    }
};

struct Launch {
    const BackwardCall& call;
    cudaStream_t stream;
    template <int M>
    cudaError_t operator()() const {
        return launch_backward<M>(call, stream);
    }
};

}  // namespace

extern "C" size_t fairseq_fastweights::fastweights_diagonal_backward_recurrent_workspace(
    const DiagonalBackward* params) {
    const BackwardCall call = call_of(*params);
    return with_mode(*params, AskWorkspace{call});
}

extern "C" cudaError_t fairseq_fastweights::fastweights_diagonal_backward_recurrent(const DiagonalBackward* params,
                                                                                    cudaStream_t stream) {
    const BackwardCall call = call_of(*params);
    return with_mode(*params, Launch{call, stream});
}
