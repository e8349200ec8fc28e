// The forward pass of the delta rule with decays of keys or an erase key, chunk-parallel: the equations are in
// delta_decays.cuh.
#include "../choice.h"
#include "by_dimension.h"
#include "delta_decays.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

constexpr int kForwardBlocks = 1;  // on a multiprocessor: with two, up to 184 bytes of registers are spilled

template <typename T>
struct Layout {
    DecayedDelta<T> delta;
    size_t bytes;
    __host__ __device__ Layout(Carver carver, const Plan& plan) : delta(carver, plan), bytes(carver.used) {}
};

// `Outputs` false: only what a segment makes of a state of zeros, in the first `plan.blocks` blocks of a head, and what
// it makes of the identity when all values are 0, in the others.
template <typename T, bool Outputs, int Places>
__global__ void __launch_bounds__(kDecayThreads, kForwardBlocks)
    delta_decays_forward(const RuleForward p, const Plan plan, const Segments segments) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T> shared(Carver(memory), plan);
    const DecayedDelta<T>& delta = shared.delta;

    const int thread = threadIdx.x;
    const int blocks = gridDim.x / segments.heads, block = blockIdx.x % blocks, head_index = blockIdx.x / blocks;
    const bool transformation = !Outputs && block >= plan.blocks;
    const int first = (transformation ? block - plan.blocks : block) * plan.columns;
    const int keys = p.sizes.key_dim, columns = transformation ? keys : p.sizes.value_dim, time = p.sizes.time;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int chunks = (time + kSteps - 1) / kSteps, kept = kept_states(p.sizes);
    const StatePart part{keys, columns, first, plan.columns, plan.key_rows};
    // Found anew at each use: kept, these would hold some 20 registers.
    const auto key_rows_of = [&](const Sequence& x) { return Head<T>(x, opaque(batch), opaque(head), 0, keys); };
    const auto value_rows_of = [&](const Sequence& x) {
        return Head<T>(x, opaque(batch), opaque(head), first, transformation ? 0 : columns);
    };

    // Key dimensions are dealt out to threads, once for keys and once for queries. The gates of a thread's first one
    // are in `gates`, for the chunk that is worked on; or their logs, from when that is on its way.
    float gates[kSteps], beta = 0.0f;
    const int items = Outputs ? 2 * plan.key_rows : plan.key_rows;
    const auto dimension_of = [&](int item) { return item < plan.key_rows ? item : item - plan.key_rows; };
    const auto load_item = [&](int item, int start) {
        load_logs<T>(gates, p.log_key_decay, opaque(batch), opaque(head), dimension_of(item), keys, start, time);
    };
    const auto fetch = [&](int n) {
        const int start = n * kSteps;
        if constexpr (Outputs) copy_rows<StepWalk>(delta.q, key_rows_of(p.q), kSteps, plan.key_rows, start, time);
        copy_rows<StepWalk>(delta.k, key_rows_of(p.k), kSteps, plan.key_rows, start, time);
        copy_rows<StepWalk>(delta.erase, key_rows_of(p.erase.data ? p.erase : p.k), kSteps, plan.key_rows, start, time);
        copy_rows<StepWalk>(delta.v, value_rows_of(p.v), kSteps, plan.columns, start, time);
        copies_commit();
        load_item(opaque(thread), start);
        beta = load_step(p.beta, batch, head, start, kSteps, time);
    };

    const int segment = blockIdx.y, begin = segment * segments.chunks, end = min(chunks, begin + segments.chunks);
    const int64_t segment_index = segments.index(segment, head_index);
    StateTiles<Places> state;
    if (transformation)
        part.load_identity(state);
    else if (Outputs && segments.count > 1)
        part.load(state, segments.states, segment_index);
    else
        part.load(state, Outputs ? static_cast<const float*>(p.initial_state) : nullptr, head_index);
    state.copy_to(delta.state, plan.key_rows, plan.columns);
    if constexpr (Outputs) delta.clear_scores();
    fetch(begin);
    for (int n = begin; n < end; ++n) {
        const int start = n * kSteps;
        exponentiate(gates);
        if (thread < kSteps) delta.beta[thread] = beta;
        copies_wait<0>();
        __syncthreads();
        for (int item = thread; item < items; item += kDecayThreads) {
            if (item >= kDecayThreads) {
                load_item(item, start);
                exponentiate(gates);
            }
            if (item < plan.key_rows)
                delta.write_keys(gates, item);
            else
                delta.write_queries(gates, dimension_of(item));
        }
        if (Outputs && start > 0 && kept > 0 && start % p.sizes.interval == 0)
            part.store(state, static_cast<float*>(p.states),
                       static_cast<int64_t>(head_index) * kept + start / p.sizes.interval - 1);
        __syncthreads();
        Deal deal;
        delta.template find_error<kPasses>(deal, plan);
        delta.template find_products<kPasses>(deal, plan);
        if constexpr (Outputs) delta.template find_scores<kPasses>(deal, plan);
        __syncthreads();
        delta.solve(plan);
        if (n + 1 < end) fetch(n + 1);
        __syncthreads();
        if constexpr (Outputs) {
            deal.tiles(plan.columns, [&](Tile& tile) {
                multiply_stored<kPasses, false, false>(tile, 0, plan.key_rows, delta.reading_queries, delta.state);
                multiply_stored<kPasses, false, false>(tile, 0, kSteps, delta.scores, delta.update);
                store_tile(tile, value_rows_of(p.out), start, time);
            });
            __syncthreads();
        }
        delta.template advance<kPasses>(state, plan, [&](Tile& tile) { write_tile(tile, delta.state); });
    }
    if constexpr (!Outputs)
        part.store(state, transformation ? segments.passed : segments.states, segment_index);
    else if (segment == segments.count - 1)
        part.store(state, static_cast<float*>(p.final_state), head_index);
}

struct DeltaDecaysForwardPass {
    static constexpr CostsOf kCosts{{1100, 5.9, 5.6, 6000, 68, 0.83}, {1100, 24, 10, 5100, 67, 0.65}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return delta_decays_forward<T, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_decay_plan(
            sizes, device, [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; },
            [](const Plan& plan) { return plan.places() <= kMostPlaces ? kForwardBlocks : 0; });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), false, first_blocks(plan, sizes), sizes.key_dim * sizes.key_dim};
    }
    static constexpr auto carry = launch_carry_transformed;
};

}  // namespace

ChunkedPlan chunked_plan_delta_decays_forward(const Sizes& sizes, int32_t dtype, int limit) {
    return faster_plan(walked_plan_forward(sizes, dtype, {true, false, true}, limit),
                       describe<DeltaDecaysForwardPass>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (outputs.cu).
static bool walks(const RuleForward& p) {
    return chunked_plan_delta_decays_forward(p.sizes, p.v.dtype, shared_memory_limit()).walk != 0;
}

cudaError_t chunked_delta_decays_forward(const RuleForward& p, cudaStream_t stream) {
    return walks(p) ? walked_forward(p, true, stream) : run<DeltaDecaysForwardPass>(p, stream);
}

size_t chunked_delta_decays_forward_workspace(const RuleForward& p) {
    return walks(p) ? walked_forward_workspace(p, true) : workspace<DeltaDecaysForwardPass>(p);
}

}  // namespace fairseq_fastweights
