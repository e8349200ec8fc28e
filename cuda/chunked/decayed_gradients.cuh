// The last stage of the backward pass with decays by dimension or erase keys, for that of gradients.cu to hand over to.
#pragma once

#include "stages.cuh"

namespace fairseq_fastweights {

// Bytes of shared memory of a block that takes so many keys and values at once; `both` of them decay.
template <typename T>
size_t decayed_gradient_bytes(bool corrects, bool both, int keys, int values);

// `written`: keys with the decays to the chunk's end.
template <typename T>
cudaError_t launch_decayed_gradients(const RuleBackward& p, const WalkPlan& plan, const Slice<Factor<T>>& slice,
                                     const Sequence& written, cudaStream_t stream);

}  // namespace fairseq_fastweights
