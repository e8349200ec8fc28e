// The choice of algorithm, recurrent or chunked: the calls that the chunked kernels take, and where they should be
// faster.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "chunked/plan.h"

namespace fairseq_fastweights {

namespace {

// Shared memory that a block may have, in bytes, from the CUDA programming guide's table of compute capabilities.
int shared_memory_of(int32_t capability) {
    switch (capability) {
        case 80:
        case 87: return 163 * 1024;
        case 86:
        case 89:
        case 120:
        case 121: return 99 * 1024;
        default: return 227 * 1024;
    }
}

// Cycles of an H200's multiprocessor for a step: its latency with states of 64 x 64, and the throughput for a head of
// that size. Read off the calls of benchmarks/results/nvidia-h200-plans.csv.
struct StepCosts {
    double waiting, of_head;
};

const StepCosts kOfSteps[4][3] = {
    // without decays, a gate, decays by dimension or an erase key
    {{700, 255}, {790, 405}, {1100, 550}},     // diagonal forward
    {{750, 740}, {3400, 3000}, {7600, 4600}},  // backward
    {{880, 460}, {960, 520}, {1190, 610}},     // delta forward
    {{2100, 2200}, {4100, 3700}, {7600, 4700}},
};

bool is_backward(int32_t operation) { return operation == kDiagonalBackward || operation == kDeltaBackward; }

double recurrent_cycles(int32_t operation, const Sizes& sizes, bool gated, bool separate_decays) {
    const bool backward = is_backward(operation);
    const StepCosts& costs = kOfSteps[operation][separate_decays ? 2 : gated];
    const double heads = static_cast<double>(sizes.batch) * sizes.heads / multiprocessors();
    // With the delta rule heads of 4 keys take about as long as of 16.
    const int keys = operation >= kDeltaForward ? std::max(sizes.key_dim, 16) : sizes.key_dim;
    const double size = static_cast<double>(keys) * sizes.value_dim / (64 * 64);
    double waiting = costs.waiting * (0.6 + 0.4 * std::min(1.0, size));
    if (backward) waiting *= 0.5 + 0.5 * std::min(1.0, size);
    // With few heads time is divided there as well (recurrent/forward.cuh).
    if (separate_decays && operation <= kDiagonalBackward) waiting *= std::min(1.0, 2 * heads);
    // Beyond 64 x 64 values are divided among blocks, which backwards follow one another.
    const double working = heads * costs.of_head * std::pow(size, 0.75) * (size <= 1 ? 1 : backward ? 4 : 2);
    return kLaunch + sizes.time * std::max(waiting, working);
}

// The environment variable FASTWEIGHTS_CUDA_ALGORITHM, "chunked" or "recurrent", overrides the costs, so that a
// benchmark can time both (and FASTWEIGHTS_CUDA_PLAN all plans of the former: chunked/plan.h).
bool chunked_is_faster(const ChunkedPlan& plan, int time, double recurrent) {
    if (const char* forced = std::getenv("FASTWEIGHTS_CUDA_ALGORITHM")) {
        if (std::strcmp(forced, "chunked") == 0) return true;
        if (std::strcmp(forced, "recurrent") == 0) return false;
    }
    // Shorter than any that was measured.
    return time > 16 && plan.cycles < recurrent;
}

}  // namespace

extern "C" ChunkedPlan fastweights_chunked_plan(int32_t operation, const Sizes* sizes, int32_t dtype, int32_t gated,
                                                int32_t separate_decays, int32_t capability) {
    // Before 8.0 tensor cores multiply float16 alone: no tf32, no bfloat16, and no asynchronous copies either.
    if (capability < 80) return {};
    if (sizes->time < 1 || sizes->key_dim < 1 || sizes->value_dim < 1) return {};
    const bool is_delta = operation >= kDeltaForward, decays = separate_decays != 0;
    // Decays of values are told apart as 2.
    const RulePass pass{is_delta, gated && !decays, decays, separate_decays > 1 && !is_delta, is_backward(operation)};
    return (pass.backward ? chunked_plan_backward : chunked_plan_forward)(*sizes, dtype, pass,
                                                                          shared_memory_of(capability));
}

extern "C" int32_t fastweights_choose(int32_t operation, const Sizes* sizes, int32_t dtype, int32_t gated,
                                      int32_t separate_decays, int32_t capability) {
    const ChunkedPlan plan = fastweights_chunked_plan(operation, sizes, dtype, gated, separate_decays, capability);
    if (plan.columns == 0) return kRecurrent;
    const double recurrent = recurrent_cycles(operation, *sizes, gated != 0, separate_decays != 0);
    return chunked_is_faster(plan, sizes->time, recurrent) ? kChunked : kRecurrent;
}

}  // namespace fairseq_fastweights
