// Shared by the bindings: the kernels for a type of numbers, and how much work is worth a thread.
#pragma once

#include <cstdlib>

#include "../native/arguments.h"
#include "kernels.h"

namespace fairseq_fastweights {

// The kernels that compute with numbers of this type.
inline const Kernels& kernels_for(ScalarType type) {
    const Kernels* found = kernels(type == ScalarType::Double);
    if (found) return *found;
    const char* wanted = std::getenv("FASTWEIGHTS_CPU_ISA");
    fail("FASTWEIGHTS_CPU_ISA is ", wanted ? wanted : "", "; here it may be one of ", fast_weights_instruction_sets());
}
inline const Kernels& kernels_for(const Tensor& x) { return kernels_for(x.scalar_type()); }

// Fewer numbers of state are not worth another thread.
constexpr int64_t SMALLEST_SHARE = 65536;

}  // namespace fairseq_fastweights
