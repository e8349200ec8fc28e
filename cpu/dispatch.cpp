// Which of the compiled variants of the kernels this processor runs.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace fast_weights {

namespace baseline {
extern const Kernels table;
}
#ifdef FAST_WEIGHTS_HAVE_X86_VARIANTS
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

bool has_avx2() {
#ifdef FAST_WEIGHTS_HAVE_X86_VARIANTS
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool has_avx512() {
#ifdef FAST_WEIGHTS_HAVE_X86_VARIANTS
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

const Kernels* choose(const char* wanted) {
    const bool any = wanted == nullptr || *wanted == '\0';
#ifdef FAST_WEIGHTS_HAVE_X86_VARIANTS
    if ((any || !std::strcmp(wanted, "avx512")) && has_avx512()) return &avx512::table;
    if ((any || !std::strcmp(wanted, "avx2")) && has_avx2()) return &avx2::table;
#endif
    return any || !std::strcmp(wanted, "baseline") ? &baseline::table : nullptr;
}

}  // namespace

const Kernels* kernels(const char** available) {
    if (available) {
        *available = has_avx512() ? "baseline, avx2, avx512" : has_avx2() ? "baseline, avx2" : "baseline";
    }
    static const Kernels* const chosen = choose(std::getenv("FASTWEIGHTS_CPU_ISA"));
    return chosen;
}

}  // namespace fast_weights
