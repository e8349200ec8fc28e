// Diagonal family, recurrent, forward.
#include "recurrent_forward.cuh"

using namespace fairseq_fastweights;

extern "C" size_t fairseq_fastweights::fastweights_diagonal_forward_recurrent_workspace(const DiagonalForward*) {
    return 0;
}

extern "C" cudaError_t fairseq_fastweights::fastweights_diagonal_forward_recurrent(const DiagonalForward* params,
                                                                                    cudaStream_t stream) {
    const DiagonalForward& p = *params;
    const ForwardCall call{p.sizes,         p.complement, p.q,           p.k,     p.v, p.log_gate, p.log_key_decay,
                           p.log_value_decay, p.initial_state, p.out, p.final_state, p.states};
    if (p.log_gate.data) return launch_forward<kScalar>(call, stream);
    if (p.log_value_decay.data) return launch_forward<kBoth>(call, stream);
    return p.log_key_decay.data ? launch_forward<kKey>(call, stream) : launch_forward<kPlain>(call, stream);
}
