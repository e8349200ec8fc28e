// Delta family, recurrent, forward.
#include "recurrent_forward.cuh"

using namespace fairseq_fastweights;

extern "C" size_t fairseq_fastweights::fastweights_delta_forward_recurrent_workspace(const DeltaForward*) { return 0; }

extern "C" cudaError_t fairseq_fastweights::fastweights_delta_forward_recurrent(const DeltaForward* params,
                                                                                cudaStream_t stream) {
    const DeltaForward& p = *params;
    const ForwardCall call{p.sizes, 0, p.q, p.k, p.v, p.beta, {}, {}, p.initial_state, p.out, p.final_state, p.states};
    return launch_forward<kDelta>(call, stream);
}
