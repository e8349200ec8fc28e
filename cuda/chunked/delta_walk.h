// The delta rule's passes with chunks side by side, for those that go through a head's chunks in one chain to hand over to.
#pragma once

#include "../kernels.h"

namespace fairseq_fastweights {

// Of two plans, of which either may be none.
inline bool is_faster(const ChunkedPlan& plan, const ChunkedPlan& other) {
    return plan.chunk != 0 && (other.chunk == 0 || plan.cycles < other.cycles);
}

// What would be done with blocks of `limit` bytes of shared memory; `chunk` is 0 where nothing would.
ChunkedPlan walked_plan_delta_forward(const Sizes& sizes, int32_t dtype, bool gated, int limit);
ChunkedPlan walked_plan_delta_backward(const Sizes& sizes, int32_t dtype, bool gated, int limit);
cudaError_t walked_delta_forward(const RuleForward& p, cudaStream_t stream);
cudaError_t walked_delta_backward(const RuleBackward& p, cudaStream_t stream);
size_t walked_delta_forward_workspace(const RuleForward& p);
size_t walked_delta_backward_workspace(const RuleBackward& p);

}  // namespace fairseq_fastweights
