// What the choice of algorithm (choice.cu) asks the chunked kernels.
#pragma once

#include "kernels.h"

namespace fairseq_fastweights {

// Whether a block of `limit` bytes of shared memory has room for these sizes.
bool chunked_fits_diagonal_forward(const Sizes& sizes, int32_t dtype, int limit);
bool chunked_fits_diagonal_backward(const Sizes& sizes, int32_t dtype, int limit);
bool chunked_fits_decays_forward(const Sizes& sizes, int32_t dtype, int limit);
bool chunked_fits_decays_backward(const Sizes& sizes, int32_t dtype, int limit);
bool chunked_fits_delta_forward(const Sizes& sizes, int32_t dtype, int limit);
bool chunked_fits_delta_backward(const Sizes& sizes, int32_t dtype, int limit);

}  // namespace fairseq_fastweights
