// Which of the compiled kernels this processor runs.
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels.h"

namespace fairseq_fastweights {

// tools/native_build.py says which instruction sets are compiled, and compiles kernels.cpp for each.
#define FAST_WEIGHTS_DECLARE(set)          \
    namespace set {                        \
    extern const Kernels float32, float64; \
    }
#ifdef FAST_WEIGHTS_HAVE_BASELINE
FAST_WEIGHTS_DECLARE(baseline)
#endif
#ifdef FAST_WEIGHTS_HAVE_AVX2
FAST_WEIGHTS_DECLARE(avx2)
#endif
#ifdef FAST_WEIGHTS_HAVE_AVX512
FAST_WEIGHTS_DECLARE(avx512)
#endif

namespace {

struct Compiled {
    const Kernels *of_float32, *of_float64;
    bool runs;
};

// From the least to the best.
const std::vector<Compiled>& compiled() {
    static const std::vector<Compiled> sets{
#ifdef FAST_WEIGHTS_HAVE_BASELINE
        {&baseline::float32, &baseline::float64, true},
#endif
#ifdef FAST_WEIGHTS_HAVE_AVX2
        {&avx2::float32, &avx2::float64, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#ifdef FAST_WEIGHTS_HAVE_AVX512
        {&avx512::float32, &avx512::float64,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl")},
#endif
    };
    return sets;
}

const Compiled* choose(const char* wanted) {
    const Compiled* chosen = nullptr;
    for (const Compiled& set : compiled()) {
        const bool any = wanted == nullptr || *wanted == '\0';
        if (set.runs && (any || std::string(wanted) == set.of_float32->instruction_set)) chosen = &set;
    }
    return chosen;
}

}  // namespace

const Kernels* kernels(bool of_float64) {
    static const Compiled* const chosen = choose(std::getenv("FASTWEIGHTS_CPU_ISA"));
    return chosen == nullptr ? nullptr : of_float64 ? chosen->of_float64 : chosen->of_float32;
}

}  // namespace fairseq_fastweights

const char* fast_weights_instruction_sets() {
    using namespace fairseq_fastweights;
    static const std::string names = [] {
        std::string listed;
        for (const Compiled& set : compiled()) {
            if (set.runs) listed += (listed.empty() ? "" : ", ") + std::string(set.of_float32->instruction_set);
        }
        return listed;
    }();
    return names.c_str();
}
