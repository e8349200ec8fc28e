// Diagonal family, recurrent, forward.
#include "recurrent_forward.cuh"

using namespace fairseq_fastweights;

namespace {

ForwardCall call_of(const DiagonalForward& p) {
    return {p.sizes,           p.complement,    p.q,   p.k,           p.v,      p.log_gate, p.log_key_decay,
            p.log_value_decay, p.initial_state, p.out, p.final_state, p.states, p.workspace};
}

}  // namespace

extern "C" size_t fairseq_fastweights::fastweights_diagonal_forward_recurrent_workspace(const DiagonalForward* params) {
    const DiagonalForward& p = *params;
    if (p.log_value_decay.data) return forward_workspace<kBoth>(call_of(p));
    return p.log_key_decay.data ? forward_workspace<kKey>(call_of(p)) : 0;
}

extern "C" cudaError_t fairseq_fastweights::fastweights_diagonal_forward_recurrent(const DiagonalForward* params,
                                                                                   cudaStream_t stream) {
    const DiagonalForward& p = *params;
    const ForwardCall call = call_of(p);
    if (p.log_gate.data) return launch_forward<kScalar>(call, stream);
    if (p.log_value_decay.data) return launch_forward<kBoth>(call, stream);
    return p.log_key_decay.data ? launch_forward<kKey>(call, stream) : launch_forward<kPlain>(call, stream);
}
