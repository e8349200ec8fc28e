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

// The plan that the environment variable FASTWEIGHTS_CUDA_PLAN asks for, such as "chunk=32 columns=64"; 0 where it asks for
// nothing. benchmarks/cuda_plans.py times the plans that there are so. Where none is as it asks, there is none.
struct AskedPlan {
    int chunk, columns, stages, threads, segments;
    int walk, slice;  // 1: chunks side by side, of slices of so many (slices.h); -1: not so

    AskedPlan() : chunk(0), columns(0), stages(0), threads(0), segments(0), walk(0), slice(0) {
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
        walk = number("walk=");
        slice = number("slice=");
    }

    // A request is for plans of one chain, unless it says that it is for a walk.
    bool allows_walk() const {
        return walk > 0 || (walk == 0 && chunk == 0 && columns == 0 && stages == 0 && threads == 0 && segments == 0);
    }

    bool allows(const Plan& plan) const {
        return (chunk == 0 || chunk == plan.chunk) && (columns == 0 || columns == plan.columns) &&
               (stages == 0 || stages == plan.stages) && (threads == 0 || threads == plan.threads);
    }
};

// How the way back finds the states of an interval's `chunks` again (checkpoints.cuh).
struct Sweep {
    int spacing;  // chunks from one state that is put down to the next
    int slots;    // for those of an interval
    double mean;  // chunks that are swept through for each

    explicit Sweep(int chunks) : spacing(1), slots(0), mean((chunks - 1) / 2.0) {
        while (spacing * spacing < chunks) spacing *= 2;
        if (chunks <= 4) return;
        slots = (chunks - 1) / spacing;
        int swept = chunks - 1;
        for (int i = 0; i < chunks - 1; ++i) swept += i % spacing;
        mean = static_cast<double>(swept) / chunks;
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

// The cycles of a pass on an H200: fitted by benchmarks/cuda_costs.py, which prints these numbers, to the times
// of all plans of 188 calls (benchmarks/results/nvidia-h200-plans.csv). Backwards `row` and `product` count 0.3 times more
// for each chunk that is swept through.
struct Costs {
    double chunk;            // of a block for a chunk, whatever its size
    double row;              // and for each 8 numbers of its rows of keys and values
    double product;          // and for each 512 of steps times keys times values
    double waiting;          // of a chunk, while other blocks of the multiprocessor may work
    double waiting_of_step;  // and of each of its steps
    double first;            // where time is divided, the first launch's chunks over those of the last
};

// Costs in bfloat16; in float32, and in float16, whose products are mostly of float32 too (Factor in tensor_core.cuh).
struct CostsOf {
    Costs of_bfloat16, others;
    const Costs& operator()(int32_t dtype) const { return dtype == kBFloat16 ? of_bfloat16 : others; }
};

constexpr double kLaunch = 4000;      // cycles of a launch
constexpr double kCarry = 6000;       // more, to carry the state from segment to segment
constexpr double kCarryOver = 600;    // and for each of them
constexpr double kFewThreads = 1.15;  // times as much waiting with blocks of 128 threads, not 256
constexpr double kOneStage = 500;     // more waiting where a chunk's inputs are not on their way before

// The limits of plans: those of the current device, unless another limit is given; and what is asked of them.
struct Device {
    int processors;  // multiprocessors
    int limit;       // bytes of shared memory that a block may have
    AskedPlan asked;

    explicit Device(int limit = shared_memory_limit()) : processors(multiprocessors()), limit(limit) {}
};

// Cycles of a launch of so many blocks, each for so many chunks. Those that share a multiprocessor take turns: one works
// while others wait.
inline double cycles_of_launch(const Plan& plan, const Sizes& sizes, const Costs& costs, const Device& device,
                               bool backward, int64_t blocks, int chunks) {
    const double length = plan.chunk, keys = plan.key_rows, values = plan.columns;
    const double swept = backward ? Sweep(interval_of(sizes, plan.chunk) / plan.chunk).mean : 0;
    const double work = costs.chunk + (1 + 0.3 * swept) * (costs.row * length * (keys + values) / 8 +
                                                           costs.product * length * keys * values / 512);
    const double waiting = (costs.waiting + costs.waiting_of_step * length) * (plan.threads == 128 ? kFewThreads : 1) +
                           (plan.stages == 1 && !backward ? kOneStage : 0);
    const auto together = [&](double n) { return n * work > work + waiting ? n * work : work + waiting; };
    const int64_t at_once = plan.blocks_at_once(device.limit), wave = at_once * device.processors;
    const int64_t rest = (blocks % wave + device.processors - 1) / device.processors;
    const double waves = blocks / wave * together(at_once) + (rest == 0 ? 0 : together(rest));
    return kLaunch + chunks * waves;
}

// The plan that takes the fewest cycles; measure(plan) gives a plan's bytes, resident(places) the blocks of 256 threads
// that the kernel's registers leave room for, and cycles(plan) what it takes. `chunk` is 0 if none fits.
template <typename Measure, typename Resident, typename Cycles>
Plan find_plan(const Sizes& sizes, const Device& device, bool backward, Measure measure, Resident resident,
               Cycles cycles) {
    AskedPlan asked = device.asked;
    if (backward) asked.stages = 0;  // there is one
    const int value_columns = round_up(sizes.value_dim, 16);
    const bool keeps = sizes.interval > 0 && sizes.interval < sizes.time;
    Plan best{};
    double least = 0;
    for (int columns = value_columns <= 128 ? value_columns : 128;; columns = round_up(columns / 2, 16)) {
        for (int chunk = kLongestChunk; chunk >= 16; chunk /= 2) {
            if (chunk > 16 && chunk >= 2 * sizes.time) continue;  // it would be half empty
            if (keeps && sizes.interval % chunk != 0) continue;
            for (int stages = backward || sizes.time <= chunk ? 1 : 2; stages >= 1; --stages) {
                for (int threads = 256; threads >= 128; threads /= 2) {
                    Plan plan{chunk,   round_up(sizes.key_dim, 16),
                              columns, (sizes.value_dim + columns - 1) / columns,
                              stages,  threads,
                              0,       0};
                    if (plan.places() > kMostPlaces || !asked.allows(plan)) continue;
                    plan.resident = resident(plan.places()) * (256 / threads);
                    plan.shared = measure(plan);
                    if (plan.shared > static_cast<size_t>(device.limit)) continue;
                    const double cost = cycles(plan);
                    if (best.chunk == 0 || cost < least) {
                        best = plan;
                        least = cost;
                    }
                }
            }
        }
        if (columns == 16) return best;
    }
}

}  // namespace fairseq_fastweights
