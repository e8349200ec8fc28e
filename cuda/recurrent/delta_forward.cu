// Delta family, recurrent, forward.
#include "forward.cuh"

using namespace fairseq_fastweights;

extern "C" size_t fairseq_fastweights::fastweights_delta_forward_recurrent_workspace(const RuleForward*) { return 0; }

extern "C" cudaError_t fairseq_fastweights::fastweights_delta_forward_recurrent(const RuleForward* params,
                                                                                cudaStream_t stream) {
    return with_delta_mode(*params, [&](auto mode) { return launch_forward<decltype(mode)::value>(*params, stream); });
}
