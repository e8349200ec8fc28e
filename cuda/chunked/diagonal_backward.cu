// The backward pass of the sum rule and of scalar gates, chunk-parallel on tensor cores.
//
// Chunks are taken from the last to the first. The state at a chunk's start is computed again from the last one that
// the forward pass kept or that was put down since (checkpoints.cuh). With the notation of
// diagonal_forward.cu, dS the gradient of the state at the chunk's end, and D_ts = G_ts <dy_t, v_s> for s <= t:
//   dQ = D diag(w) K + diag(G_t0) dY S_0^T
//   dK = diag(w) (D^T Q + diag(G_es) V dS^T)          dV = P^T dY + diag(G_es w) K dS
//   dS_0 = G dS + Q^T diag(G_t0) dY
// The gradient of log g_u collects whatever passes through step u: what was written before it and is read at or after
// it,
//   sum over s < u <= t of P_ts <dy_t, v_s>, and likewise for writes before the chunk and reads after it;
// sums of products over a range, without a subtraction, which keeps it exact where gates are so strong that it almost
// vanishes. Where the write is w = 1 - g, it loses g <k_u, (dK / w)_u>.
#include "../choice.h"
#include "by_dimension.h"
#include "gates.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

template <typename T, bool Gated>
struct Layout {
    Matrix<T> q, k, v, d_out;
    Matrix<Factor<T>> state, d_state, scores, d_scores;
    ChunkGates gates;
    GateGradient gradient;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver.matrix<T>(plan.chunk, plan.key_rows)), k(carver.matrix<T>(plan.chunk, plan.key_rows)),
          v(carver.matrix<T>(plan.chunk, plan.columns)), d_out(carver.matrix<T>(plan.chunk, plan.columns)),
          state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns)),
          d_state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns)),
          scores(carver.matrix<Factor<T>>(plan.chunk, plan.chunk)),
          d_scores(carver.matrix<Factor<T>>(plan.chunk, plan.chunk)), gates(carver, Gated ? plan.chunk : 0),
          gradient(carver, plan, Gated) {
        bytes = carver.used;
    }
};

// `Outputs` true: all gradients, of block `value_block` of each head. `Outputs` false: only what a segment makes of a
// gradient of zeros.
template <typename T, bool Gated, bool Outputs, int Places>
__global__ void __launch_bounds__(256, backward_blocks(Places, sizeof(T) == 4))
    diagonal_backward(const RuleBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
                      const int value_block) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T, Gated> shared(Carver(memory), plan);
    const ChunkGates& gates = shared.gates;
    const GateGradient& gradient = shared.gradient;
    const Matrix<T>&q = shared.q, &k = shared.k, &v = shared.v, &d_out = shared.d_out;
    const Matrix<Factor<T>>&scores = shared.scores, &d_scores = shared.d_scores;

    const int thread = threadIdx.x;
    const int head_index = Outputs ? blockIdx.x : blockIdx.x / plan.blocks;
    const int block = Outputs ? value_block : blockIdx.x % plan.blocks, first = block * plan.columns;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int time = p.sizes.time, chunk = plan.chunk, chunks = (time + chunk - 1) / chunk;
    // Found anew at each use: kept, these would hold some 40 registers.
    const auto key_head = [&](const Sequence& x) {
        return Head<T>(x, opaque(batch), opaque(head), 0, p.sizes.key_dim);
    };
    const auto value_head = [&](const Sequence& x) {
        return Head<T>(x, opaque(batch), opaque(head), first, p.sizes.value_dim);
    };
    const StatePart part{p.sizes.key_dim, p.sizes.value_dim, first, plan.columns, plan.key_rows};

    // Nobody asks what the first segment makes of zeros: no segment comes before it.
    const int segment = Outputs ? blockIdx.y : blockIdx.y + 1, begin = segment * segments.chunks;
    const int end = min(chunks, begin + segments.chunks);
    float passed_log = 0.0f;  // of `Outputs` false
    StateTiles<Places> state, d_state;
    const bool divided = Outputs && segments.count > 1;
    part.load(d_state,
              divided   ? segments.states
              : Outputs ? static_cast<const float*>(p.d_final_state)
                        : nullptr,
              divided ? segments.index(segment, head_index) : head_index);
    if constexpr (Outputs) d_state.copy_to(shared.d_state, plan.key_rows, plan.columns);
    // On the way to a chunk its steps' queries and gradients are not there yet: keys and values come into either place
    // in turn, the next while a chunk is worked on.
    const auto keys_of = [&](int place) { return k.either(q, place); };
    const auto values_of = [&](int place) { return v.either(d_out, place); };
    const auto fetch = [&](int now, int place) {
        copy_rows(keys_of(place), key_head(p.k), chunk, plan.key_rows, now, time);
        copy_rows(values_of(place), value_head(p.v), chunk, plan.columns, now, time);
    };
    const auto sweep = [&] { return segments.index(segment, head_index); };
    for (int n = end - 1; n >= begin; --n) {
        const int start = n * chunk, base = start / checkpoints.interval * checkpoints.interval;
        // The chunk after it was of the same interval: on the sweep to that one states have been put down.
        const bool swept = n + 1 < end && (start + chunk) % checkpoints.interval != 0;
        int now = start;
        if constexpr (Outputs)
            now = checkpoints.load(state, part, p.initial_state, p.states, head_index, sweep(), base, start, swept);
        int place = (start - now) / chunk & 1;
        if constexpr (Outputs) fetch(now, place);
        for (;; now += chunk, place ^= 1) {
            if (now == start) {
                copy_rows(q, key_head(p.q), chunk, plan.key_rows, now, time);
                copy_rows(d_out, value_head(p.d_out), chunk, plan.columns, now, time);
            }
            copies_commit();
            if (Outputs && !swept) checkpoints.put_down(state, part, sweep(), base, now);
            if constexpr (Gated)
                if (thread < chunk) gates.log_gate()[thread] = load_step(p.log_gate, batch, head, now, chunk, time);
            copies_wait<0>();
            __syncthreads();
            if constexpr (Gated) {
                gates.find_blocks(p.complement != 0);
                __syncthreads();
                gates.find_chunk();
            }
            if (!Outputs || now == start) break;
            fetch(now + chunk, place ^ 1);
            if constexpr (Gated) __syncthreads();
            const Matrix<T> keys = keys_of(place), values = values_of(place);
            if constexpr (Gated) state.scale(gates.whole());
            state.each(plan.key_rows, plan.columns, [&](Tile& tile) {
                if constexpr (Gated)
                    multiply_stored<kPasses, true, false>(tile, 0, chunk, keys, values, gates.to_state());
                else
                    multiply_stored<kPasses, true, false>(tile, 0, chunk, keys, values);
            });
            __syncthreads();
        }

        if constexpr (Outputs) {
            state.copy_to(shared.state, plan.key_rows, plan.columns);
            for_each_tile(chunk, chunk, [&](Tile& tile) {
                if (tile.column >= tile.row + kTileRows) return;
                Tile d_tile = tile, between = tile;
                multiply_stored<kPasses, false, true>(d_tile, 0, plan.columns, d_out, v);
                if constexpr (Gated) gates.find_between(between);
                d_tile.each_with(between, [&](int t, int s, float& value, float& gate) {
                    value = s <= t ? (Gated ? value * gate : value) : 0.0f;
                });
                write_tile(d_tile, d_scores);
                multiply_stored<kPasses, false, true>(tile, 0, plan.key_rows, q, k);
                if constexpr (Gated) {
                    tile.each([&](int t, int s, float& value) { value = s <= t ? value * gates.write()[s] : 0.0f; });
                    tile.each_with(d_tile, [&](int t, int s, float& value, float& d_value) {
                        gradient.inside(t, s) = value * d_value;
                    });
                }
                tile.each_with(between, [&](int t, int s, float& value, float& gate) {
                    value = s <= t ? (Gated ? value * gate : value) : 0.0f;
                });
                write_tile(tile, scores);
            });
            if constexpr (Gated) gradient.put_passing(state.dot(d_state));
            __syncthreads();
            if constexpr (Gated) gradient.sum_rows(chunk);
            for_each_tile(chunk, plan.key_rows, [&](Tile& tile) {
                multiply_stored<kPasses, false, true>(tile, 0, plan.columns, d_out, shared.state);
                if constexpr (Gated) {
                    tile.each([&](int t, int, float& value) { value *= gates.from_chunk()[t]; });
                    tile.sum_rows(
                        [&](int t, int i, float value) { return value * q.get(t, i); },
                        [&](int t, float sum) { gradient.read()[tile.column / kTileColumns * chunk + t] = sum; });
                }
                if (Gated && p.complement != 0)
                    multiply_stored<kPasses, false, false>(tile, 0, tile.row + kTileRows, d_scores, k, gates.write());
                else
                    multiply_stored<kPasses, false, false>(tile, 0, tile.row + kTileRows, d_scores, k);
                store_tile(tile, key_head(p.dq), start, time, block > 0);
            });
            for_each_tile(chunk, plan.key_rows, [&](Tile& tile) {
                multiply_stored<kPasses, false, true>(tile, 0, plan.columns, v, shared.d_state);
                const int offset = tile.column / kTileColumns * chunk;
                if constexpr (Gated) {
                    tile.each([&](int s, int, float& value) { value *= gates.to_chunk()[s]; });
                    tile.sum_rows([&](int s, int i, float value) { return value * (k.get(s, i) * gates.write()[s]); },
                                  [&](int s, float sum) { gradient.written()[offset + s] = sum; });
                }
                multiply_stored<kPasses, true, false>(tile, tile.row, chunk, d_scores, q);
                if constexpr (Gated) {
                    tile.sum_rows([&](int s, int i, float value) { return value * k.get(s, i); },
                                  [&](int s, float sum) { gradient.write_strength()[offset + s] = sum; });
                    tile.each([&](int s, int, float& value) { value *= gates.write()[s]; });
                }
                store_tile(tile, key_head(p.dk), start, time, block > 0);
            });
            for_each_tile(chunk, plan.columns, [&](Tile& tile) {
                multiply_stored<kPasses, false, false>(tile, 0, plan.key_rows, k, shared.d_state);
                if constexpr (Gated) tile.each([&](int s, int, float& value) { value *= gates.to_state()[s]; });
                multiply_stored<kPasses, true, false>(tile, tile.row, chunk, scores, d_out);
                store_tile(tile, value_head(p.dv), start, time);
            });
            __syncthreads();
            if constexpr (Gated)
                gradient.store(p.d_log_gate, batch, head, start, chunk, time, gates, p.complement != 0, block > 0);
        } else {
            if constexpr (Gated) __syncthreads();
            if constexpr (Gated) passed_log += gates.whole_log();
        }
        if constexpr (Gated) d_state.scale(gates.whole());
        d_state.each(plan.key_rows, plan.columns, [&](Tile& tile) {
            if constexpr (Gated)
                multiply_stored<kPasses, true, false>(tile, 0, chunk, q, d_out, gates.from_chunk());
            else
                multiply_stored<kPasses, true, false>(tile, 0, chunk, q, d_out);
            if constexpr (Outputs) write_tile(tile, shared.d_state);
        });
        __syncthreads();
    }
    if constexpr (!Outputs) {
        part.store(d_state, segments.states, segments.index(segment, head_index));
        if (Gated && thread == 0) segments.passed[segments.index(segment, head_index)] = expf(passed_log);
    } else if (segment == 0 && p.d_initial_state != nullptr) {
        part.store(d_state, static_cast<float*>(p.d_initial_state), head_index);
    }
}

template <bool Gated>
struct DiagonalBackwardPass {
    static constexpr CostsOf kCosts = Gated ? CostsOf{{440, 15, 3.4, 19000, 16, 0.41}, {7500, 19, 20, 14000, 30, 0.27}}
                                            : CostsOf{{150, 8.3, 3.2, 9200, 4.5, 0.4}, {1500, 21, 14, 4700, 13, 0.25}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return diagonal_backward<T, Gated, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_plan(
            sizes, device, true, [](const Plan& plan) { return Layout<T, Gated>(Carver(nullptr), plan).bytes; },
            [](int places) { return backward_blocks(places, sizeof(T) == 4); },
            [&](const Plan& plan) {
                return least_cycles(plan, sizes, launches(plan, sizes, Stored<T>::kDType), device);
            });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), true, plan.blocks, Gated ? 1 : 0};
    }
    static constexpr auto carry = launch_carry_scaled;
};

}  // namespace

ChunkedPlan chunked_plan_diagonal_backward(const Sizes& sizes, int32_t dtype, bool gated, int limit) {
    return faster_plan(walked_plan_backward(sizes, dtype, {false, gated}, limit),
                       gated ? describe<DiagonalBackwardPass<true>>(sizes, dtype, limit)
                             : describe<DiagonalBackwardPass<false>>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (gradients.cu).
static bool walks(const RuleBackward& p) {
    return chunked_plan_diagonal_backward(p.sizes, p.v.dtype, p.log_gate.data != nullptr, shared_memory_limit()).walk !=
           0;
}

extern "C" cudaError_t fastweights_diagonal_backward_chunked(const RuleBackward* params, cudaStream_t stream) {
    if (params->sizes.batch == 0) return cudaSuccess;
    if (has_decays(params->log_key_decay, params->log_value_decay)) return chunked_decays_backward(*params, stream);
    if (walks(*params)) return walked_backward(*params, false, stream);
    return params->log_gate.data ? run<DiagonalBackwardPass<true>>(*params, stream)
                                 : run<DiagonalBackwardPass<false>>(*params, stream);
}

extern "C" size_t fastweights_diagonal_backward_chunked_workspace(const RuleBackward* params) {
    if (params->sizes.batch == 0) return 0;
    if (has_decays(params->log_key_decay, params->log_value_decay)) return chunked_decays_backward_workspace(*params);
    if (walks(*params)) return walked_backward_workspace(*params, false);
    return params->log_gate.data ? workspace<DiagonalBackwardPass<true>>(*params)
                                 : workspace<DiagonalBackwardPass<false>>(*params);
}

}  // namespace fairseq_fastweights
