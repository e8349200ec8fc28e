// All rules, recurrent, backward.
#include "backward.cuh"

using namespace fairseq_fastweights;

extern "C" size_t fairseq_fastweights::fastweights_backward_recurrent_workspace(const RuleBackward* params) {
    return with_mode(*params, [&](auto mode) { return backward_workspace<decltype(mode)::value>(*params); });
}

extern "C" cudaError_t fairseq_fastweights::fastweights_backward_recurrent(const RuleBackward* params,
                                                                           cudaStream_t stream) {
    return with_mode(*params, [&](auto mode) { return launch_backward<decltype(mode)::value>(*params, stream); });
}
