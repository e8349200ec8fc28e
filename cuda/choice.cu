// Which algorithm runs, recurrent or chunked: what the chunked kernels take, and where they should be faster.
#include "choice.h"

#include <cstdlib>
#include <cstring>

#include "chunked_plan.h"

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

// Counted, not measured; a benchmark's numbers should replace these. Cycles of a multiprocessor for a step of a head,
// forwards (backwards both about treble):
//   recurrent  key_dim * value_dim elements, each multiplied twice (delta: four times), at 128 a cycle
//   chunked    products of (chunk / 2) (key_dim + value_dim) + 2 key_dim value_dim (delta: 3, twice the first term),
//              1024 to an instruction, whose operands come from shared memory (cycles_of_product); and some 3000 cycles
//              a chunk in which a block waits for memory and at barriers, while two or three others work
// Where a device is not full, steps follow one another at some 150 cycles in either, unless time is divided among
// blocks (chunked_segments.cuh), which only the chunked kernels do, but for decays by dimension.
//
// The environment variable FASTWEIGHTS_CUDA_ALGORITHM, "chunked" or "recurrent", overrides the estimate, so that a
// benchmark can time both (and FASTWEIGHTS_CUDA_PLAN all plans of the former: chunked_plan.h).
bool chunked_is_faster(int32_t operation, const Sizes& sizes, int32_t dtype, bool separate_decays) {
    if (const char* forced = std::getenv("FASTWEIGHTS_CUDA_ALGORITHM")) {
        if (std::strcmp(forced, "chunked") == 0) return true;
        if (std::strcmp(forced, "recurrent") == 0) return false;
    }
    // Up to 64 x 64 a block's registers hold the state of the recurrent pass, backwards too, and few heads are divided
    // in time there as well (recurrent_segments.cuh). By count of instructions the chunked kernels would pay from about
    // 32 x 64 on, but theirs are few warps, 16 steps from one barrier to the next. Beyond 64 x 64 the recurrent pass
    // divides the values among blocks, which backwards leave parts of every key's gradient, up to twenty times the
    // bytes of all inputs.
    if (separate_decays) return sizes.time > 16 && sizes.key_dim * sizes.value_dim > 64 * 64;
    if (sizes.batch * sizes.heads <= 32 && sizes.time >= 1024) return true;
    const bool delta = operation == kDeltaForward || operation == kDeltaBackward;
    const double keys = sizes.key_dim, values = sizes.value_dim, steps = sizes.time;
    const double length = delta ? 32 : 64, chunks = static_cast<int>((steps + length - 1) / length);
    const double recurrent = steps * (delta ? 4 : 2) * keys * values / 128;
    const double products =
        delta ? length * (keys + values) + 3 * keys * values : length / 2 * (keys + values) + 2 * keys * values;
    const double chunked = chunks * (length * products * cycles_of_product(dtype) / 1024 + 3000 / 2.5);
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
            return separate_decays ? ChunkedPlan{} : chunked_plan_delta_forward(*sizes, dtype, gated != 0, limit);
        case kDeltaBackward:
            return separate_decays ? ChunkedPlan{} : chunked_plan_delta_backward(*sizes, dtype, gated != 0, limit);
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
    if (!fastweights_chunked_supports(operation, sizes, dtype, separate_decays, capability)) return kRecurrent;
    return chunked_is_faster(operation, *sizes, dtype, separate_decays != 0) ? kChunked : kRecurrent;
}

}  // namespace fairseq_fastweights
