// Questions of the choice of algorithm (choice.cu) to the chunked kernels.
#pragma once

#include "kernels.h"

namespace fairseq_fastweights {

// Their plan with blocks of `limit` bytes of shared memory.
ChunkedPlan chunked_plan_diagonal_forward(const Sizes& sizes, int32_t dtype, bool gated, int limit);
ChunkedPlan chunked_plan_diagonal_backward(const Sizes& sizes, int32_t dtype, bool gated, int limit);
ChunkedPlan chunked_plan_decays_forward(const Sizes& sizes, int32_t dtype, bool of_values, int limit);
ChunkedPlan chunked_plan_decays_backward(const Sizes& sizes, int32_t dtype, bool of_values, int limit);
ChunkedPlan chunked_plan_delta_forward(const Sizes& sizes, int32_t dtype, bool gated, int limit);
ChunkedPlan chunked_plan_delta_backward(const Sizes& sizes, int32_t dtype, bool gated, int limit);
ChunkedPlan chunked_plan_delta_decays_forward(const Sizes& sizes, int32_t dtype, int limit);
ChunkedPlan chunked_plan_delta_decays_backward(const Sizes& sizes, int32_t dtype, int limit);

}  // namespace fairseq_fastweights
