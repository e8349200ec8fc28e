// Decays by dimension and erase keys with chunks side by side, for those that go through a head's chunks in one chain to hand over to.
// Their passes are `walked_forward` and `walked_backward` (stages.h).
#pragma once

#include "stages.h"

namespace fairseq_fastweights {

// As `walked_plan_forward` and `walked_plan_backward`.
ChunkedPlan walked_plan_decays_forward(const Sizes& sizes, int32_t dtype, bool corrects, bool of_values, int limit);
ChunkedPlan walked_plan_decays_backward(const Sizes& sizes, int32_t dtype, bool corrects, bool of_values, int limit);

}  // namespace fairseq_fastweights
