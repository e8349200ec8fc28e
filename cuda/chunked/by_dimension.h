// Decays by dimension, and erase keys, to which the chunked kernels of either family hand over. Not for a batch of 0.
#pragma once

#include "../kernels.h"

namespace fairseq_fastweights {

inline bool has_decays(const Sequence& log_key_decay, const Sequence& log_value_decay) {
    return log_key_decay.data != nullptr || log_value_decay.data != nullptr;
}

cudaError_t chunked_decays_forward(const RuleForward& p, cudaStream_t stream);
cudaError_t chunked_decays_backward(const RuleBackward& p, cudaStream_t stream);
size_t chunked_decays_forward_workspace(const RuleForward& p);
size_t chunked_decays_backward_workspace(const RuleBackward& p);

// For rules that correct.
cudaError_t chunked_delta_decays_forward(const RuleForward& p, cudaStream_t stream);
cudaError_t chunked_delta_decays_backward(const RuleBackward& p, cudaStream_t stream);
size_t chunked_delta_decays_forward_workspace(const RuleForward& p);
size_t chunked_delta_decays_backward_workspace(const RuleBackward& p);

}  // namespace fairseq_fastweights
