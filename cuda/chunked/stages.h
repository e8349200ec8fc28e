// Questions of the choice of algorithm (../choice.cu) to the chunked kernels.
#pragma once

#include "../kernels.h"

namespace fairseq_fastweights {

// A pass of a rule, as far as what stages hand one another depends on it.
struct RulePass {
    bool corrects;  // the delta rule; else what is written does not depend on the state
    bool gated;
    bool decays;  // by dimension, or an erase key; not gated then
    bool values;  // decays of values are among them; nothing corrects then
    bool backward;
};

// The plan of a pass with blocks of `limit` bytes of shared memory; 0 columns where the kernels do not take the sizes.
ChunkedPlan chunked_plan_forward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit);
ChunkedPlan chunked_plan_backward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit);

}  // namespace fairseq_fastweights
