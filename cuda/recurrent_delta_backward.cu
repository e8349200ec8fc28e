// Delta family, recurrent, backward.
#include "recurrent_backward.cuh"

using namespace fairseq_fastweights;

namespace {

BackwardCall call_of(const DeltaBackward& p) {
    BackwardCall call{};
    call.sizes = p.sizes;
    call.d_out = p.d_out;
    call.d_final_state = p.d_final_state;
    call.q = p.q;
    call.k = p.k;
    call.v = p.v;
    call.gate = p.beta;
    call.initial_state = p.initial_state;
    call.states = p.states;
    call.dq = p.dq;
    call.dk = p.dk;
    call.dv = p.dv;
    call.d_gate = p.d_beta;
    call.d_initial_state = p.d_initial_state;
    call.workspace = p.workspace;
    return call;
}

}  // namespace

extern "C" size_t fairseq_fastweights::fastweights_delta_backward_recurrent_workspace(const DeltaBackward* params) {
    return backward_workspace<kDelta>(call_of(*params));
}

extern "C" cudaError_t fairseq_fastweights::fastweights_delta_backward_recurrent(const DeltaBackward* params,
                                                                                 cudaStream_t stream) {
    return launch_backward<kDelta>(call_of(*params), stream);
}
