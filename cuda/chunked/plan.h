// How the chunked kernels divide the work of a launch, and which way of doing so should be the fastest.
#pragma once

#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "../common.cuh"

namespace fairseq_fastweights {

struct Plan {
    int chunk;     // steps, a multiple of 16
    int key_rows;  // key_dim, rounded up to a multiple of 16
    int columns;   // value columns of a block, a multiple of 16
    int blocks;    // that share a (batch, head)
    int stages;    // buffers for inputs: with 2, the next chunk is on its way while this one is worked on
    int threads;
    size_t shared;  // bytes
    int resident;   // blocks whose registers a multiprocessor has room for

    // Blocks that a multiprocessor has room for: 4 hide each other's waiting as well as more would.
    int blocks_at_once(int limit) const {
        const int shared_for = static_cast<int>((static_cast<size_t>(limit) + 1024) / (shared + 1024));
        const int most = resident < 4 ? resident : 4;
        return shared_for < most ? shared_for : most;
    }

    // Tiles of the state, of 16 x 32, that a warp has in its registers (StateTiles): 1, 2 or 4; more than that is too many.
    int places() const {
        const int tiles = key_rows / 16 * ((columns + 31) / 32), warps = threads / 32;
        const int needed = (tiles + warps - 1) / warps;
        return needed == 3 ? 4 : needed;
    }
};

constexpr int kMostPlaces = 4;

// Blocks of 256 threads on a multiprocessor that the kernels' registers are held down for. `many`: a kernel that takes
// more of them than half of a multiprocessor's, as it does backwards in float32, and with the delta rule's gates.
constexpr int forward_blocks(int places) { return places < kMostPlaces ? 2 : 1; }
constexpr int backward_blocks(int places, bool many) { return places == 1 && !many ? 2 : 1; }

__host__ __device__ constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

constexpr int kLongestChunk = 64;

// What the environment variable FASTWEIGHTS_CUDA_PLAN asks for, such as "chunk=32 columns=64"; 0 where it asks for
// nothing. benchmarks/cuda_plans.py times the plans that there are so. Where none is as it asks, there is none.
struct AskedPlan {
    int chunk, columns, stages, threads, segments;

    AskedPlan() : chunk(0), columns(0), stages(0), threads(0), segments(0) {
        const char* const text = std::getenv("FASTWEIGHTS_CUDA_PLAN");
        if (text == nullptr) return;
        const auto number = [&](const char* name) {
            const char* const found = std::strstr(text, name);
            return found == nullptr ? 0 : std::atoi(found + std::strlen(name));
        };
        chunk = number("chunk=");
        columns = number("columns=");
        stages = number("stages=");
        threads = number("threads=");
        segments = number("segments=");
    }

    bool allows(const Plan& plan) const {
        return (chunk == 0 || chunk == plan.chunk) && (columns == 0 || columns == plan.columns) &&
               (stages == 0 || stages == plan.stages) && (threads == 0 || threads == plan.threads);
    }
};

// How the way back finds the states of an interval's `chunks` again (checkpoints.cuh).
struct March {
    int spacing;  // chunks from one state that is put down to the next
    int slots;    // for those of an interval
    double mean;  // chunks that are marched through for each

    explicit March(int chunks) : spacing(1), slots(0), mean((chunks - 1) / 2.0) {
        while (spacing * spacing < chunks) spacing *= 2;
        if (chunks <= 4) return;
        slots = (chunks - 1) / spacing;
        int marched = chunks - 1;
        for (int i = 0; i < chunks - 1; ++i) marched += i % spacing;
        mean = static_cast<double>(marched) / chunks;
    }
};

// f(an integral_constant) with a plan's places, for kernels to be instantiated for.
template <typename F>
cudaError_t with_places(const Plan& plan, F f) {
    switch (plan.places()) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case kMostPlaces: return f(std::integral_constant<int, kMostPlaces>());
        default: return cudaErrorInvalidValue;
    }
}

// Steps of an interval: the whole sequence where no state is kept.
inline int interval_of(const Sizes& sizes, int chunk) {
    return kept_states(sizes) == 0 ? round_up(sizes.time, chunk) : sizes.interval;
}

// Cycles of a multiprocessor for a product of 16 x 8 x 8, from the table in README.md. In bfloat16 shared memory takes
// longest, to give it its operands; with float16 and float32, where what is computed is float32 (Factor in tensor_core.cuh),
// it is the 14 and 22 instructions, of which 4 go out in a cycle.
inline double cycles_of_product(int32_t dtype) { return dtype == kBFloat16 ? 1.5 : dtype == kFloat16 ? 3.4 : 5.6; }

// A multiprocessor's share of an H100's or H200's bandwidth: 14 to 21 bytes a cycle.
constexpr double kBytesOfCycle = 18;

// Cycles of a multiprocessor for a step of one head, counted, not measured: those of its products or of its inputs' and
// outputs' way, whichever are more; and of a chunk's some 3000 in which its block waits for memory and at barriers, 1000
// more if its inputs are not on their way before, while the other blocks that fit work. `backward`: with the states that
// are computed again, and gradients of keys that each block of columns adds to.
inline double estimate(const Plan& plan, const Sizes& sizes, int32_t dtype, int limit, bool backward) {
    const double area = static_cast<double>(plan.key_rows) * plan.columns, length = plan.chunk;
    double products = length / 2 * (plan.key_rows + plan.columns) + 2 * area;
    double moved = 2 * (plan.key_rows + plan.columns);
    if (backward) {
        const double marched = March(interval_of(sizes, plan.chunk) / plan.chunk).mean;
        products = 2.5 * products + marched * area;
        moved += (plan.blocks > 1 ? 4 : 2) * plan.key_rows + plan.columns + marched * (plan.key_rows + plan.columns);
    }
    const double computing = products * cycles_of_product(dtype) / 1024;
    double moving = moved * (dtype == kFloat32 ? 4 : 2) / kBytesOfCycle;
    if (backward) moving += area * 4 / length / kBytesOfCycle;  // a state for each chunk
    const double waiting = (plan.stages == 2 ? 3000 : 4000) / length / plan.blocks_at_once(limit);
    return plan.blocks * ((computing > moving ? computing : moving) + waiting);
}

// The plan of the least estimate, of chunks of `longest_chunk` steps at most; measure(plan) gives a plan's bytes, and
// resident(places) the blocks of 256 threads that the kernel's registers leave room for. `chunk` is 0 if none fits.
template <typename Measure, typename Resident>
Plan find_plan(const Sizes& sizes, int32_t dtype, int longest_chunk, int limit, bool backward, Measure measure,
               Resident resident) {
    AskedPlan asked;
    if (backward) asked.stages = 0;  // there is one
    const int value_columns = round_up(sizes.value_dim, 16);
    const bool keeps = sizes.interval > 0 && sizes.interval < sizes.time;
    Plan best{};
    for (int columns = value_columns <= 128 ? value_columns : 128;; columns = round_up(columns / 2, 16)) {
        for (int chunk = asked.chunk == 0 ? longest_chunk : kLongestChunk; chunk >= 16; chunk /= 2) {
            if (chunk > 16 && chunk >= 2 * sizes.time) continue;  // it would be half empty
            if (keeps && sizes.interval % chunk != 0) continue;
            for (int stages = backward || sizes.time <= chunk ? 1 : 2; stages >= 1; --stages) {
                Plan plan{chunk,   round_up(sizes.key_dim, 16),
                          columns, (sizes.value_dim + columns - 1) / columns,
                          stages,  128,
                          0,       0};
                const bool large = plan.key_rows * columns > 32 * 64 && chunk * columns >= 32 * 32;
                if (large || plan.places() > kMostPlaces) plan.threads = 256;
                if (asked.threads == 128 || asked.threads == 256) plan.threads = asked.threads;
                if (plan.places() > kMostPlaces) continue;
                plan.resident = resident(plan.places()) * (256 / plan.threads);
                plan.shared = measure(plan);
                if (plan.shared > static_cast<size_t>(limit) || !asked.allows(plan)) continue;
                const auto cost = [&](const Plan& x) { return estimate(x, sizes, dtype, limit, backward); };
                if (best.chunk == 0 || cost(plan) < cost(best)) best = plan;
            }
        }
        if (columns == 16) return best;
    }
}

}  // namespace fairseq_fastweights
