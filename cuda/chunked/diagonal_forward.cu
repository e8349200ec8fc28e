// The forward pass of the sum rule and of scalar gates (gated rule, retention), chunk-parallel on tensor cores.
//
// In a chunk that starts from S_0, with G_ts the product of the gates of (s, t], w_s the strength of the write,
// where G_t0 are those from the chunk's start to and with t, and G_es those from after s to its end:
//   Y = diag(G_t0) Q S_0 + P V,   P_ts = G_ts <q_t, k_s> w_s for s <= t
//   S_end = G S_0 + K^T diag(G_es w_s) V
#include "../choice.h"
#include "by_dimension.h"
#include "gates.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

template <typename T, bool Gated>
struct Layout {
    Stages<T> q, k, v;
    Matrix<Factor<T>> state, scores;
    ChunkGates gates;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver, plan.stages, plan.chunk, plan.key_rows), k(carver, plan.stages, plan.chunk, plan.key_rows),
          v(carver, plan.stages, plan.chunk, plan.columns),
          state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns, 8)),
          scores(carver.matrix<Factor<T>>(plan.chunk, plan.chunk)), gates(carver, Gated ? plan.chunk : 0) {
        bytes = carver.used;
    }
};

// `Outputs` false: only what a segment makes of a state of zeros.
template <typename T, bool Gated, bool Outputs, int Places>
__global__ void __launch_bounds__(256, forward_blocks(Places))
    diagonal_forward(const RuleForward p, const Plan plan, const Segments segments) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T, Gated> shared(Carver(memory), plan);
    const ChunkGates& gates = shared.gates;
    const Matrix<Factor<T>>& scores = shared.scores;

    const int thread = threadIdx.x;
    const int head_index = blockIdx.x / plan.blocks, first = blockIdx.x % plan.blocks * plan.columns;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int time = p.sizes.time, chunk = plan.chunk, chunks = (time + chunk - 1) / chunk;
    // Found anew at each use: kept, these would hold some 20 registers.
    const auto key_head = [&](const Sequence& x) { return Head<T>(x, batch, head, 0, p.sizes.key_dim); };
    const auto value_head = [&](const Sequence& x) { return Head<T>(x, batch, head, first, p.sizes.value_dim); };
    const StatePart part{p.sizes.key_dim, p.sizes.value_dim, first, plan.columns, plan.key_rows};

    float log_gate = 0.0f;  // of this thread's step in the chunk to come
    const auto fetch = [&](int n) {
        const int stage = n % plan.stages, start = n * chunk;
        if constexpr (Outputs) copy_rows(shared.q[stage], key_head(p.q), chunk, plan.key_rows, start, time);
        copy_rows(shared.k[stage], key_head(p.k), chunk, plan.key_rows, start, time);
        copy_rows(shared.v[stage], value_head(p.v), chunk, plan.columns, start, time);
        copies_commit();
        if constexpr (Gated) log_gate = load_step(p.log_gate, batch, head, start, chunk, time);
    };

    const int segment = blockIdx.y, begin = segment * segments.chunks, end = min(chunks, begin + segments.chunks);
    float passed_log = 0.0f;
    StateTiles<Places> state;
    const bool divided = Outputs && segments.count > 1;
    part.load(state,
              divided   ? segments.states
              : Outputs ? static_cast<const float*>(p.initial_state)
                        : nullptr,
              divided ? segments.index(segment, head_index) : head_index);
    if constexpr (Outputs) state.copy_to(shared.state, plan.key_rows, plan.columns);
    if (plan.stages == 2) fetch(begin);
    for (int n = begin; n < end; ++n) {
        const int start = n * chunk;
        if (plan.stages == 1) {
            __syncthreads();
            fetch(n);
        }
        if (Gated && thread < chunk) gates.log_gate()[thread] = log_gate;
        copies_wait<0>();
        __syncthreads();
        const Matrix<T> q = shared.q[n % plan.stages], k = shared.k[n % plan.stages], v = shared.v[n % plan.stages];
        if (plan.stages == 2 && n + 1 < end) fetch(n + 1);
        if (const int kept = kept_states(p.sizes); Outputs && start > 0 && kept > 0 && start % p.sizes.interval == 0)
            part.store(state, static_cast<float*>(p.states),
                       static_cast<int64_t>(head_index) * kept + start / p.sizes.interval - 1);

        if constexpr (Gated) {
            gates.find_blocks(p.complement != 0);
            __syncthreads();
            gates.find_chunk();
        }
        if constexpr (Outputs) {
            for_each_tile(chunk, chunk, [&](Tile& tile) {
                if (tile.column >= tile.row + kTileRows) return;
                multiply_stored<kPasses, false, true>(tile, 0, plan.key_rows, q, k);
                if constexpr (Gated) {
                    Tile between(tile.row, tile.column, chunk);
                    gates.find_between(between);
                    tile.each_with(between, [&](int t, int s, float& value, float& gate) {
                        value = s <= t ? value * gate * gates.write()[s] : 0.0f;
                    });
                } else {
                    tile.each([&](int t, int s, float& value) { value = s <= t ? value : 0.0f; });
                }
                write_tile(tile, scores);
            });
            __syncthreads();
            for_each_tile(chunk, plan.columns, [&](Tile& tile) {
                multiply_stored<kPasses, false, false>(tile, 0, plan.key_rows, q, shared.state);
                if constexpr (Gated) tile.each([&](int t, int, float& value) { value *= gates.from_chunk()[t]; });
                multiply_stored<kPasses, false, false>(tile, 0, tile.row + kTileRows, scores, v);
                store_tile(tile, value_head(p.out), start, time);
            });
            __syncthreads();
        } else if constexpr (Gated) {
            __syncthreads();
            passed_log += gates.whole_log();
        }
        if constexpr (Gated) state.scale(gates.whole());
        state.each(plan.key_rows, plan.columns, [&](Tile& tile) {
            if constexpr (Gated)
                multiply_stored<kPasses, true, false>(tile, 0, chunk, k, v, gates.to_state());
            else
                multiply_stored<kPasses, true, false>(tile, 0, chunk, k, v);
            if constexpr (Outputs) write_tile(tile, shared.state);
        });
    }
    if constexpr (!Outputs) {
        part.store(state, segments.states, segments.index(segment, head_index));
        if (Gated && thread == 0) segments.passed[segments.index(segment, head_index)] = expf(passed_log);
    } else if (segment == segments.count - 1) {
        part.store(state, static_cast<float*>(p.final_state), head_index);
    }
}

template <bool Gated>
struct DiagonalForwardPass {
    static constexpr CostsOf kCosts = Gated
                                          ? CostsOf{{2500, 2.7, 3.1, 5200, 26, 0.76}, {1200, 11, 6.7, 7700, 12, 0.57}}
                                          : CostsOf{{1300, 1.8, 2.8, 2300, 9.8, 0.66}, {550, 9.2, 8.3, 5000, 11, 0.5}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return diagonal_forward<T, Gated, Outputs, Places>;
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
        return {kCosts(dtype), false, plan.blocks, Gated ? 1 : 0};
    }
    static constexpr auto carry = launch_carry_scaled;
};

}  // namespace

ChunkedPlan chunked_plan_diagonal_forward(const Sizes& sizes, int32_t dtype, bool gated, int limit) {
    return faster_plan(walked_plan_forward(sizes, dtype, {false, gated}, limit),
                       gated ? describe<DiagonalForwardPass<true>>(sizes, dtype, limit)
                             : describe<DiagonalForwardPass<false>>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (outputs.cu).
static bool walks(const RuleForward& p) {
    return chunked_plan_diagonal_forward(p.sizes, p.v.dtype, p.log_gate.data != nullptr, shared_memory_limit()).walk !=
           0;
}

extern "C" cudaError_t fastweights_diagonal_forward_chunked(const RuleForward* params, cudaStream_t stream) {
    if (params->sizes.batch == 0) return cudaSuccess;
    if (has_decays(params->log_key_decay, params->log_value_decay)) return chunked_decays_forward(*params, stream);
    if (walks(*params)) return walked_forward(*params, false, stream);
    return params->log_gate.data ? run<DiagonalForwardPass<true>>(*params, stream)
                                 : run<DiagonalForwardPass<false>>(*params, stream);
}

extern "C" size_t fastweights_diagonal_forward_chunked_workspace(const RuleForward* params) {
    if (params->sizes.batch == 0) return 0;
    if (has_decays(params->log_key_decay, params->log_value_decay)) return chunked_decays_forward_workspace(*params);
    if (walks(*params)) return walked_forward_workspace(*params, false);
    return params->log_gate.data ? workspace<DiagonalForwardPass<true>>(*params)
                                 : workspace<DiagonalForwardPass<false>>(*params);
}

}  // namespace fairseq_fastweights
