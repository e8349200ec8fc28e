// All rules, recurrent, forward.
#include "forward.cuh"

using namespace fairseq_fastweights;

extern "C" size_t fairseq_fastweights::fastweights_forward_recurrent_workspace(const RuleForward* params) {
    return with_mode(*params, [&](auto mode) { return forward_workspace<decltype(mode)::value>(*params); });
}

extern "C" cudaError_t fairseq_fastweights::fastweights_forward_recurrent(const RuleForward* params,
                                                                          cudaStream_t stream) {
    return with_mode(*params, [&](auto mode) { return launch_forward<decltype(mode)::value>(*params, stream); });
}
