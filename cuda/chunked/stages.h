// Passes with chunks side by side, for those that go through a head's chunks in one chain to hand over to.
#pragma once

#include "../kernels.h"

namespace fairseq_fastweights {

// The plan that takes the fewest cycles; either may be none.
inline ChunkedPlan faster_plan(const ChunkedPlan& walk, const ChunkedPlan& chain) {
    return walk.chunk != 0 && (chain.chunk == 0 || walk.cycles < chain.cycles) ? walk : chain;
}

// A pass of a rule, as far as what stages hand one another depends on it.
struct RulePass {
    bool corrects;  // the delta rule; else what is written does not depend on the state
    bool gated;
    bool decays;  // by dimension, or an erase key; not gated then
    bool values;  // decays of values are among them; nothing corrects then
    bool backward;
};

// The plan of a rule's pass with blocks of `limit` bytes of shared memory; `chunk` is 0 where nothing would.
ChunkedPlan walked_plan_forward(const Sizes& sizes, int32_t dtype, RulePass rule, int limit);
ChunkedPlan walked_plan_backward(const Sizes& sizes, int32_t dtype, RulePass rule, int limit);
cudaError_t walked_forward(const RuleForward& p, bool corrects, cudaStream_t stream);
cudaError_t walked_backward(const RuleBackward& p, bool corrects, cudaStream_t stream);
size_t walked_forward_workspace(const RuleForward& p, bool corrects);
size_t walked_backward_workspace(const RuleBackward& p, bool corrects);

}  // namespace fairseq_fastweights
