// Which algorithm runs, recurrent or chunked: what the chunked kernels take, and where they should be faster.
#include "choice.h"

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

// Counted, not measured; a benchmark's numbers should replace these. Cycles of a multiprocessor, forwards (backwards both
// take about treble):
//   recurrent  a step of a head has key_dim * value_dim elements, each multiplied twice (delta: four times), at 128 a
//              cycle, with a third as many other instructions; but steps follow one another at some 150 cycles
//              (delta: 220, with sums that wait for one another), in which about 16 warps of heads that are worked on side by side can be busy
//   chunked    a chunk of a head has products of (chunk / 2) (key_dim + value_dim) + 2 key_dim value_dim (delta: 3, twice
//              the first term), 1024 to an instruction (cycles_of_product); and some 3000 cycles in which its block waits
//              for memory and at barriers, while as many others work as there is room for. Where time is divided
//              (chunked/segments.cuh) that is half as much again, in segments side by side.
//
// The environment variable FASTWEIGHTS_CUDA_ALGORITHM, "chunked" or "recurrent", overrides the estimate, so that a
// benchmark can time both (and FASTWEIGHTS_CUDA_PLAN all plans of the former: chunked/plan.h).
bool chunked_is_faster(int32_t operation, const Sizes& sizes, int32_t dtype, bool separate_decays,
                       const ChunkedPlan& plan, int limit) {
    if (const char* forced = std::getenv("FASTWEIGHTS_CUDA_ALGORITHM")) {
        if (std::strcmp(forced, "chunked") == 0) return true;
        if (std::strcmp(forced, "recurrent") == 0) return false;
    }
    // Up to 64 x 64 a block's registers hold the state of the recurrent pass, backwards too, and few heads are divided
    // in time there as well (recurrent/segments.cuh). By count of instructions the chunked kernels would pay from about
    // 32 x 64 on, but theirs are few warps, 16 steps from one barrier to the next. Beyond 64 x 64 the recurrent pass
    // divides the values among blocks, which backwards follow one another and leave parts of every key's gradient, as
    // many bytes as all inputs and gradients have.
    if (separate_decays) return sizes.time > 16 && sizes.key_dim * sizes.value_dim > 64 * 64;
    const bool delta = operation == kDeltaForward || operation == kDeltaBackward;
    const double keys = round_up(sizes.key_dim, 16), values = round_up(sizes.value_dim, 16), length = plan.chunk;
    const double heads = std::ceil(static_cast<double>(sizes.batch) * sizes.heads / multiprocessors());  // of each

    const double elements = static_cast<double>(sizes.key_dim) * sizes.value_dim,
                 computing = (delta ? 4 : 2) * elements / 96;
    const double side_by_side = std::max(1.0, std::floor(16 / std::ceil(elements / 1024)));
    const double latency = (delta ? 220 : 150) * std::ceil(heads / side_by_side);
    const double recurrent = sizes.time * std::max(heads * computing, latency);

    const double products =
        delta ? length * (keys + values) + 3 * keys * values : length / 2 * (keys + values) + 2 * keys * values;
    const double of_chunk = length * products * cycles_of_product(dtype) / 1024;
    const double room = std::min(512 / plan.threads, static_cast<int>((limit + 1024) / (plan.shared + 1024)));
    const double blocks = std::ceil(static_cast<double>(sizes.batch) * sizes.heads * plan.segments / multiprocessors());
    const double resident = std::max(1.0, std::min(room, blocks)), rounds = std::ceil(blocks / resident);
    const double chunks = std::ceil(std::ceil(sizes.time / length) / plan.segments) * (plan.segments > 1 ? 1.5 : 1);
    const double chunked = chunks * rounds * std::max(resident * of_chunk, of_chunk + 3000 * plan.blocks);
    return chunked < recurrent;
}

}  // namespace

extern "C" ChunkedPlan fastweights_chunked_plan(int32_t operation, const Sizes* sizes, int32_t dtype, int32_t gated,
                                                int32_t separate_decays, int32_t capability) {
    // Before 8.0 tensor cores multiply float16 alone: no tf32, no bfloat16, and no asynchronous copies either.
    if (capability < 80) return {};
    if (sizes->time < 1 || sizes->key_dim < 1 || sizes->value_dim < 1) return {};
    const int limit = shared_memory_of(capability);
    switch (operation) {
        case kDiagonalForward:
            return separate_decays ? chunked_plan_decays_forward(*sizes, dtype, limit)
                                   : chunked_plan_diagonal_forward(*sizes, dtype, gated != 0, limit);
        case kDiagonalBackward:
            return separate_decays ? chunked_plan_decays_backward(*sizes, dtype, limit)
                                   : chunked_plan_diagonal_backward(*sizes, dtype, gated != 0, limit);
        case kDeltaForward:
            return separate_decays ? chunked_plan_delta_decays_forward(*sizes, dtype, limit)
                                   : chunked_plan_delta_forward(*sizes, dtype, gated != 0, limit);
        case kDeltaBackward:
            return separate_decays ? chunked_plan_delta_decays_backward(*sizes, dtype, limit)
                                   : chunked_plan_delta_backward(*sizes, dtype, gated != 0, limit);
        default: return {};
    }
}

extern "C" int32_t fastweights_chunked_supports(int32_t operation, const Sizes* sizes, int32_t dtype,
                                                int32_t separate_decays, int32_t capability) {
    // With a gate: that takes more room than without.
    return fastweights_chunked_plan(operation, sizes, dtype, 1, separate_decays, capability).chunk > 0;
}

extern "C" int32_t fastweights_choose(int32_t operation, const Sizes* sizes, int32_t dtype, int32_t separate_decays,
                                      int32_t capability) {
    // With a gate: that takes more room than without.
    const ChunkedPlan plan = fastweights_chunked_plan(operation, sizes, dtype, 1, separate_decays, capability);
    if (plan.chunk == 0) return kRecurrent;
    if (sizes->batch == 0) return kRecurrent;
    return chunked_is_faster(operation, *sizes, dtype, separate_decays != 0, plan, shared_memory_of(capability))
               ? kChunked
               : kRecurrent;
}

}  // namespace fairseq_fastweights
