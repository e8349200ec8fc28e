// Plans of the chunked kernels: for the choice of algorithm (../choice.cu), plans that a benchmark requests, the limits
// of a device, and the costs of launches.
#pragma once

#include <cstdlib>
#include <cstring>

#include "../common.cuh"

namespace fairseq_fastweights {

__host__ __device__ constexpr int divide_up(int x, int size) { return (x + size - 1) / size; }
__host__ __device__ constexpr int round_up(int x, int multiple) { return divide_up(x, multiple) * multiple; }

// A pass of a rule: what the kernels' exchange through the workspace depends on.
struct RulePass {
    bool is_delta;  // delta rules: updates depend on the state
    bool gated;
    bool decays;         // by dimension, or an erase key; not gated then
    bool decays_values;  // decays of values, too; no delta rule then
    bool backward;
};

// The plan of a pass with blocks of `limit` bytes of shared memory; 0 columns where the kernels do not take the sizes.
ChunkedPlan chunked_plan_forward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit);
ChunkedPlan chunked_plan_backward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit);

// The plan that the environment variable FASTWEIGHTS_CUDA_PLAN requests, such as "columns=64 stages=2"; 0 for an open
// choice. benchmarks/cuda_plans.py times all plans this way. If no plan fits the request, the chunked kernels do not
// take the call.
struct RequestedPlan {
    int columns = number("columns="), stages = number("stages="), threads = number("threads="),
        segments = number("segments="), slice = number("slice=");  // slice: its chunks (workspace.cuh)

private:
    static int number(const char* name) {
        const char* const text = std::getenv("FASTWEIGHTS_CUDA_PLAN");
        const char* const found = text == nullptr ? nullptr : std::strstr(text, name);
        return found == nullptr ? 0 : std::atoi(found + std::strlen(name));
    }
};

// The limits of plans: those of the current device, unless another limit is given; and the requested plan.
struct Device {
    int limit = shared_memory_limit();  // bytes of shared memory that a block may have
    int processors = multiprocessors();
    RequestedPlan requested;
};

// Cycles of an H200's multiprocessor.
constexpr double kLaunch = 4000;    // of a launch
constexpr double kCarry = 6000;     // more, to carry the state from segment to segment
constexpr double kCarryOver = 600;  // and for each of them

// Steps of an interval between states that are kept: the whole sequence, in chunks, where none is.
inline int interval_of(const Sizes& sizes, int chunk) {
    return kept_states(sizes) == 0 ? round_up(sizes.time, chunk) : sizes.interval;
}

}  // namespace fairseq_fastweights
