// The forward pass of the delta rule, gated or not, chunk-parallel on tensor cores; see delta.cuh for the algorithm.
#include "../choice.h"
#include "by_dimension.h"
#include "delta.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

template <typename T, bool Gated>
struct Layout {
    Stages<T> q, k, v;
    DeltaChunk<T, Gated> delta;
    Matrix<Factor<T>> scores;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver, plan.stages, plan.chunk, plan.key_rows), k(carver, plan.stages, plan.chunk, plan.key_rows),
          v(carver, plan.stages, plan.chunk, plan.columns), delta(carver, plan),
          scores(carver.matrix<Factor<T>>(plan.chunk, plan.chunk)) {
        bytes = carver.used;
    }
};

// `Outputs` false: only what a segment makes of a state of zeros, in the first `plan.blocks` blocks of a head, and what
// it makes of the identity when all values are 0, in the others.
template <typename T, bool Gated, bool Outputs, int Places>
__global__ void __launch_bounds__(256, forward_blocks(Places))
    delta_forward(const RuleForward p, const Plan plan, const Segments segments) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T, Gated> shared(Carver(memory), plan);
    const DeltaChunk<T, Gated>& delta = shared.delta;
    const Matrix<Factor<T>>& scores = shared.scores;

    const int thread = threadIdx.x;
    const int blocks = gridDim.x / segments.heads, block = blockIdx.x % blocks, head_index = blockIdx.x / blocks;
    const bool transformation = !Outputs && block >= plan.blocks;
    const int first = (transformation ? block - plan.blocks : block) * plan.columns;
    const int columns = transformation ? p.sizes.key_dim : p.sizes.value_dim;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int time = p.sizes.time, chunk = plan.chunk, chunks = (time + chunk - 1) / chunk, kept = kept_states(p.sizes);
    // Found anew at each use: kept, these would hold some 20 registers.
    const auto key_head = [&](const Sequence& x) { return Head<T>(x, batch, head, 0, p.sizes.key_dim); };
    const auto value_head = [&](const Sequence& x) {
        return Head<T>(x, batch, head, first, transformation ? 0 : columns);
    };
    const StatePart part{p.sizes.key_dim, columns, first, plan.columns, plan.key_rows};

    float beta = 0.0f, log_gate = 0.0f;  // of this thread's step in the chunk to come
    const auto fetch = [&](int n) {
        const int stage = n % plan.stages, start = n * chunk;
        if constexpr (Outputs) copy_rows(shared.q[stage], key_head(p.q), chunk, plan.key_rows, start, time);
        copy_rows(shared.k[stage], key_head(p.k), chunk, plan.key_rows, start, time);
        copy_rows(shared.v[stage], value_head(p.v), chunk, plan.columns, start, time);
        copies_commit();
        beta = load_step(p.beta, batch, head, start, chunk, time);
        if constexpr (Gated) log_gate = load_step(p.log_gate, batch, head, start, chunk, time);
    };

    const int segment = blockIdx.y, begin = segment * segments.chunks, end = min(chunks, begin + segments.chunks);
    const int64_t segment_index = segments.index(segment, head_index);
    StateTiles<Places> state;
    const bool divided = Outputs && segments.count > 1;
    if (transformation)
        part.load_identity(state);
    else
        part.load(state,
                  divided   ? segments.states
                  : Outputs ? static_cast<const float*>(p.initial_state)
                            : nullptr,
                  divided ? segment_index : head_index);
    state.copy_to(delta.state, plan.key_rows, plan.columns);
    if (plan.stages == 2) fetch(begin);
    for (int n = begin; n < end; ++n) {
        const int start = n * chunk;
        if (plan.stages == 1) {
            __syncthreads();
            fetch(n);
        }
        if (thread < chunk) delta.beta[thread] = beta;
        if (Gated && thread < chunk) delta.gates.log_gate()[thread] = log_gate;
        copies_wait<0>();
        __syncthreads();
        const Matrix<T> q = shared.q[n % plan.stages], k = shared.k[n % plan.stages], v = shared.v[n % plan.stages];
        if (plan.stages == 2 && n + 1 < end) fetch(n + 1);
        if (Outputs && start > 0 && kept > 0 && start % p.sizes.interval == 0)
            part.store(state, static_cast<float*>(p.states),
                       static_cast<int64_t>(head_index) * kept + start / p.sizes.interval - 1);

        delta.find_gates();
        delta.template find_products<kPasses>(k, plan);
        delta.template find_error<kPasses>(k, v, plan);
        __syncthreads();
        delta.invert_blocks(chunk);
        if constexpr (Outputs)
            for_each_tile(chunk, chunk, [&](Tile& tile) {
                if (tile.column >= tile.row + kTileRows) return;
                multiply_stored<kPasses, false, true>(tile, 0, plan.key_rows, q, k);
                delta.keep_pairs(tile, true);
                write_tile(tile, scores);
            });
        __syncthreads();
        delta.template solve<kPasses>(plan);
        __syncthreads();
        if constexpr (Outputs) {
            for_each_tile(chunk, plan.columns, [&](Tile& tile) {
                multiply_stored<kPasses, false, false>(tile, 0, plan.key_rows, q, delta.state);
                delta.keep_read(tile);
                multiply_stored<kPasses, false, false>(tile, 0, tile.row + kTileRows, scores, delta.update);
                store_tile(tile, value_head(p.out), start, time);
            });
            __syncthreads();
        }
        delta.template advance<kPasses>(state, k, plan);
    }
    if constexpr (!Outputs)
        part.store(state, transformation ? segments.passed : segments.states, segment_index);
    else if (segment == segments.count - 1)
        part.store(state, static_cast<float*>(p.final_state), head_index);
}

template <bool Gated>
struct DeltaForwardPass {
    static constexpr CostsOf kCosts = Gated
                                          ? CostsOf{{2200, 4.3, 5.9, 8900, 72, 0.99}, {1100, 22, 5.1, 12000, 33, 0.84}}
                                          : CostsOf{{1200, 4.2, 3.9, 5500, 53, 1}, {360, 20, 5.3, 8900, 24, 0.81}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return delta_forward<T, Gated, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_plan(
            sizes, device, false, [](const Plan& plan) { return Layout<T, Gated>(Carver(nullptr), plan).bytes; },
            forward_blocks,
            [&](const Plan& plan) {
                return least_cycles(plan, sizes, launches(plan, sizes, Stored<T>::kDType), device);
            });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), false, first_blocks(plan, sizes), sizes.key_dim * sizes.key_dim};
    }
    static constexpr auto carry = launch_carry_transformed;
};

}  // namespace

ChunkedPlan chunked_plan_delta_forward(const Sizes& sizes, int32_t dtype, bool gated, int limit) {
    return faster_plan(walked_plan_forward(sizes, dtype, {true, gated}, limit),
                       gated ? describe<DeltaForwardPass<true>>(sizes, dtype, limit)
                             : describe<DeltaForwardPass<false>>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (outputs.cu).
static bool walks(const RuleForward& p) {
    return chunked_plan_delta_forward(p.sizes, p.v.dtype, p.log_gate.data != nullptr, shared_memory_limit()).walk != 0;
}

extern "C" cudaError_t fastweights_delta_forward_chunked(const RuleForward* params, cudaStream_t stream) {
    if (params->sizes.batch == 0) return cudaSuccess;
    if (params->log_value_decay.data) return cudaErrorInvalidValue;
    if (params->erase.data || params->log_key_decay.data) return chunked_delta_decays_forward(*params, stream);
    if (walks(*params)) return walked_forward(*params, true, stream);
    return params->log_gate.data ? run<DeltaForwardPass<true>>(*params, stream)
                                 : run<DeltaForwardPass<false>>(*params, stream);
}

extern "C" size_t fastweights_delta_forward_chunked_workspace(const RuleForward* params) {
    if (params->sizes.batch == 0) return 0;
    if (params->erase.data || params->log_key_decay.data) return chunked_delta_decays_forward_workspace(*params);
    if (walks(*params)) return walked_forward_workspace(*params, true);
    return params->log_gate.data ? workspace<DeltaForwardPass<true>>(*params)
                                 : workspace<DeltaForwardPass<false>>(*params);
}

}  // namespace fairseq_fastweights
