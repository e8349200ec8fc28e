// The backward pass of the delta rule, gated or not, chunk-parallel on tensor cores, in the notation of delta.cuh.
//
// Chunks are taken from the last to the first. The state at a chunk's start is computed again from the last one that
// the forward pass kept or that was put down since (checkpoints.cuh). With T = (I + B G)^-1, P = tril(D_ts Q K^T)
// and dS the gradient of the state at the chunk's end:
//   dU = P^T dY + diag(D_es) K dS         dR = T^T dU           (R = B E, the right side of the system)
//   dP = tril(dY U^T)                     dA = -dR U^T below the diagonal           (A = B G)
//   dV = B dR                             d beta_t = <dR_t, E_t> + <dA_t, G_t>
//   dQ = diag(D_t0) dY S_0^T + (D_ts dP) K
//   dK = (D_ts dP)^T Q + diag(D_es) U dS^T + (D_ts B dA + (D_ts B dA)^T) K - diag(D_t0) dV S_0^T
//   dS_0 = D dS + Q^T diag(D_t0) dY - K^T diag(D_t0) dV
// The gradient of log g_u collects whatever passes through step u, as in diagonal_backward.cu: P_ts dP_ts and
// G_ts (B dA)_ts for s < u <= t, what is read of S_0 at or after u, what is written before it, and D <S_0, dS>.
//
// dS collects what queries read in directions that no key erases, without bound, and K dS remains small: so dS is split in
// two for products, not rounded.
#include "../choice.h"
#include "by_dimension.h"
#include "delta.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

template <typename T, bool Gated>
struct Layout {
    Matrix<T> q, k, v, d_out;
    DeltaChunk<T, Gated> delta;
    SplitMatrix<T> d_state;
    Matrix<Factor<T>> scores, d_system;
    Matrix<float> d_update;
    GateGradient gradient;
    float *d_beta_right, *d_beta_system;  // by step, for each tile across
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver.matrix<T>(plan.chunk, plan.key_rows)), k(carver.matrix<T>(plan.chunk, plan.key_rows)),
          v(carver.matrix<T>(plan.chunk, plan.columns)), d_out(carver.matrix<T>(plan.chunk, plan.columns)),
          delta(carver, plan), d_state(carver, plan.key_rows, plan.columns),
          scores(carver.matrix<Factor<T>>(plan.chunk, plan.chunk)),
          d_system(carver.matrix<Factor<T>>(plan.chunk, plan.chunk)),
          d_update(carver.matrix<float>(plan.chunk, plan.columns, 8)), gradient(carver, plan, Gated) {
        d_beta_right = carver.take<float>(plan.chunk * round_up(plan.columns, kTileColumns) / kTileColumns);
        d_beta_system = carver.take<float>(plan.chunk * round_up(plan.chunk, kTileColumns) / kTileColumns);
        bytes = carver.used;
    }
};

// `Outputs` true: all gradients, of block `value_block` of each head. `Outputs` false: only what a segment makes of a
// gradient of zeros, in the first `plan.blocks` blocks of a head, and what it makes of the identity when all of dY is
// 0, in the others.
template <typename T, bool Gated, bool Outputs, int Places>
__global__ void __launch_bounds__(256, backward_blocks(Places, sizeof(T) == 4 || Gated))
    delta_backward(const RuleBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
                   const int value_block) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T, Gated> shared(Carver(memory), plan);
    const DeltaChunk<T, Gated>& delta = shared.delta;
    const GateGradient& gradient = shared.gradient;
    const Matrix<T>&q = shared.q, &k = shared.k, &v = shared.v, &d_out = shared.d_out;
    const Matrix<float>& d_update = shared.d_update;
    const Matrix<Factor<T>>&update = delta.update, &scores = shared.scores, &d_system = shared.d_system;
    // Each takes the place of what is no longer needed when it is computed; -dR that of dU, too.
    const Matrix<Factor<T>>& d_scores = shared.scores;
    const auto minus_d_right = [&] {
        if constexpr (kRounded<T>)
            return v;
        else
            return d_update;
    }();

    const int thread = threadIdx.x;
    const int blocks = Outputs ? 1 : gridDim.x / segments.heads, head_index = blockIdx.x / blocks;
    const int block = Outputs ? value_block : blockIdx.x % blocks;
    const bool transformation = !Outputs && block >= plan.blocks;
    const int first = (transformation ? block - plan.blocks : block) * plan.columns;
    const int columns = transformation ? p.sizes.key_dim : p.sizes.value_dim;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int time = p.sizes.time, chunk = plan.chunk, chunks = (time + chunk - 1) / chunk;
    // Found anew at each use: kept, these would hold some 40 registers.
    const auto key_head = [&](const Sequence& x) {
        return Head<T>(x, opaque(batch), opaque(head), 0, p.sizes.key_dim);
    };
    const auto value_head = [&](const Sequence& x) {
        return Head<T>(x, opaque(batch), opaque(head), first, transformation ? 0 : columns);
    };
    const StatePart part{p.sizes.key_dim, columns, first, plan.columns, plan.key_rows};

    // Nobody asks what the first segment makes of zeros: no segment comes before it.
    const int segment = Outputs ? blockIdx.y : blockIdx.y + 1, begin = segment * segments.chunks;
    const int end = min(chunks, begin + segments.chunks);
    const auto sweep = [&] { return segments.index(segment, head_index); };
    StateTiles<Places> state, d_state;
    const bool divided = Outputs && segments.count > 1;
    if (transformation)
        part.load_identity(d_state);
    else
        part.load(d_state,
                  divided   ? segments.states
                  : Outputs ? static_cast<const float*>(p.d_final_state)
                            : nullptr,
                  divided ? sweep() : head_index);
    d_state.each(plan.key_rows, plan.columns, [&](const Tile& tile) { shared.d_state.write(tile); });
    // On the way to a chunk its steps' queries and gradients are not there yet: keys and values come into either place
    // in turn, the next while a chunk is worked on.
    const auto keys_of = [&](int place) { return k.either(q, place); };
    const auto values_of = [&](int place) { return v.either(d_out, place); };
    const auto fetch = [&](int now, int place) {
        copy_rows(keys_of(place), key_head(p.k), chunk, plan.key_rows, now, time);
        if constexpr (Outputs) copy_rows(values_of(place), value_head(p.v), chunk, plan.columns, now, time);
    };
    for (int n = end - 1; n >= begin; --n) {
        const int start = n * chunk, base = start / checkpoints.interval * checkpoints.interval;
        // The chunk after it was of the same interval: on the sweep to that one states have been put down.
        const bool swept = n + 1 < end && (start + chunk) % checkpoints.interval != 0;
        int now = start;
        if constexpr (Outputs) {
            now = checkpoints.load(state, part, p.initial_state, p.states, head_index, sweep(), base, start, swept);
            state.copy_to(delta.state, plan.key_rows, plan.columns);
        }
        int place = (start - now) / chunk & 1;
        fetch(now, place);
        for (;; now += chunk, place ^= 1) {
            if (now == start) {
                copy_rows(q, key_head(p.q), chunk, plan.key_rows, now, time);
                copy_rows(d_out, value_head(p.d_out), chunk, plan.columns, now, time);
            }
            copies_commit();
            if (Outputs && !swept) checkpoints.put_down(state, part, sweep(), base, now);
            if (thread < chunk) delta.beta[thread] = load_step(p.beta, batch, head, now, chunk, time);
            if (Gated && thread < chunk)
                delta.gates.log_gate()[thread] = load_step(p.log_gate, batch, head, now, chunk, time);
            copies_wait<0>();
            __syncthreads();
            if (now != start) fetch(now + chunk, place ^ 1);
            delta.find_gates();
            delta.template find_products<kPasses>(keys_of(place), plan);
            if constexpr (Outputs) delta.template find_error<kPasses>(keys_of(place), values_of(place), plan);
            __syncthreads();
            delta.invert_blocks(chunk);
            if (now == start) break;
            __syncthreads();
            delta.template solve<kPasses>(plan);
            __syncthreads();
            delta.template advance<kPasses>(state, keys_of(place), plan);
            __syncthreads();
        }
        for_each_tile(chunk, chunk, [&](Tile& tile) {
            if (tile.column >= tile.row + kTileRows) return;
            multiply_stored<kPasses, false, true>(tile, 0, plan.key_rows, q, k);
            delta.keep_pairs(tile, true);
            if constexpr (Gated && Outputs)
                tile.each([&](int t, int s, float& value) { gradient.inside(t, s) = value; });
            write_tile(tile, scores);
        });
        __syncthreads();
        if constexpr (Outputs) delta.template solve<kPasses>(plan);
        for_each_tile(chunk, plan.columns, [&](Tile& tile) {
            multiply_split<kPasses, false>(tile, 0, plan.key_rows, k, shared.d_state);
            if constexpr (Gated) tile.each([&](int t, int, float& value) { value *= delta.gates.to_chunk()[t]; });
            multiply_stored<kPasses, true, false>(tile, tile.row, chunk, scores, d_out);
            write_tile(tile, d_update);
        });
        __syncthreads();
        delta.template solve_transposed<kPasses>(d_update, v, plan);
        __syncthreads();
        if constexpr (Outputs) {
            for_each_tile(chunk, plan.columns, [&](Tile& tile) {
                tile.each([&](int t, int j, float& value) { value = -d_update(t, j); });
                tile.sum_rows(
                    [&](int t, int j, float value) { return value * delta.error(t, j); },
                    [&](int t, float sum) { shared.d_beta_right[tile.column / kTileColumns * chunk + t] = sum; });
                tile.each([&](int t, int, float& value) { value *= delta.beta[t]; });
                store_tile(tile, value_head(p.dv), start, time);
            });
            for_each_tile(chunk, chunk, [&](Tile& tile) {
                if (tile.column >= tile.row + kTileRows) return;
                multiply_stored<kPasses, false, true>(tile, 0, plan.columns, d_out, update);
                // A tile is the same lanes' each time: what these left in `inside` needs no barrier.
                if constexpr (Gated)
                    tile.each([&](int t, int s, float& value) { gradient.inside(t, s) *= s <= t ? value : 0.0f; });
                delta.keep_pairs(tile, true);
                write_tile(tile, d_scores);
            });
            if constexpr (Gated) gradient.put_passing(state.dot(d_state));
            __syncthreads();
            for_each_tile(chunk, chunk, [&](Tile& tile) {
                if (tile.column >= tile.row + kTileRows) return;
                multiply_stored<kPasses, false, true>(tile, 0, plan.columns, minus_d_right, update);
                tile.each([&](int t, int s, float& value) { value = s < t ? value : 0.0f; });
                tile.sum_rows(
                    [&](int t, int s, float value) { return value * delta.products(t, s); },
                    [&](int t, float sum) { shared.d_beta_system[tile.column / kTileColumns * chunk + t] = sum; });
                tile.each([&](int t, int, float& value) { value *= delta.beta[t]; });
                if constexpr (Gated) {
                    tile.each(
                        [&](int t, int s, float& value) { gradient.inside(t, s) += value * delta.products(t, s); });
                    delta.keep_pairs(tile, false);
                }
                write_tile(tile, d_system);
            });
            __syncthreads();
            if constexpr (Gated) gradient.sum_rows(chunk);
            if (p.d_beta.data != nullptr && thread < chunk && start + thread < time) {
                float sum = 0.0f;
                for (int i = 0; i < plan.columns; i += kTileColumns)
                    sum += shared.d_beta_right[i / kTileColumns * chunk + thread];
                for (int i = 0; i <= thread; i += kTileColumns)
                    sum += shared.d_beta_system[i / kTileColumns * chunk + thread];
                store_step(p.d_beta, batch, head, start + thread, sum, block > 0);
            }
            for_each_tile(chunk, plan.key_rows, [&](Tile& tile) {
                multiply_stored<kPasses, false, true>(tile, 0, plan.columns, d_out, delta.state);
                if constexpr (Gated) {
                    delta.keep_read(tile);
                    tile.sum_rows(
                        [&](int t, int i, float value) { return value * q.get(t, i); },
                        [&](int t, float sum) { gradient.read()[tile.column / kTileColumns * chunk + t] = sum; });
                }
                multiply_stored<kPasses, false, false>(tile, 0, tile.row + kTileRows, d_scores, k);
                store_tile(tile, key_head(p.dq), start, time, block > 0);
            });
            for_each_tile(chunk, plan.key_rows, [&](Tile& tile) {
                multiply_stored<kPasses, false, true>(tile, 0, plan.columns, minus_d_right, delta.state);
                tile.each([&](int t, int, float& value) { value *= delta.read_beta[t]; });
                if constexpr (Gated) {
                    const int offset = tile.column / kTileColumns * chunk;
                    const auto term = [&](int t, int i, float value) { return value * k.get(t, i); };
                    tile.sum_rows(term, [&](int t, float sum) { gradient.read()[offset + t] += sum; });
                    Tile written(tile.row, tile.column, plan.key_rows);
                    multiply_split<kPasses, true>(written, 0, plan.columns, update, shared.d_state);
                    written.each([&](int t, int, float& value) { value *= delta.gates.to_chunk()[t]; });
                    written.sum_rows(term, [&](int t, float sum) { gradient.written()[offset + t] = sum; });
                    tile.each_with(written, [](int, int, float& value, float& more) { value += more; });
                } else {
                    multiply_split<kPasses, true>(tile, 0, plan.columns, update, shared.d_state);
                }
                multiply_stored<kPasses, true, false>(tile, tile.row, chunk, d_scores, q);
                multiply_stored<kPasses, false, false>(tile, 0, tile.row + kTileRows, d_system, k);
                multiply_stored<kPasses, true, false>(tile, tile.row, chunk, d_system, k);
                store_tile(tile, key_head(p.dk), start, time, block > 0);
            });
        }
        __syncthreads();
        if constexpr (Gated && Outputs)
            gradient.store(p.d_log_gate, batch, head, start, chunk, time, delta.gates, false, block > 0);
        if constexpr (Gated) d_state.scale(delta.gates.whole());
        d_state.each(plan.key_rows, plan.columns, [&](Tile& tile) {
            if constexpr (Gated)
                multiply_stored<kPasses, true, false>(tile, 0, chunk, q, d_out, delta.gates.from_chunk());
            else
                multiply_stored<kPasses, true, false>(tile, 0, chunk, q, d_out);
            multiply_stored<kPasses, true, false>(tile, 0, chunk, k, minus_d_right, delta.read_beta);
            shared.d_state.write(tile);
        });
        __syncthreads();
    }
    if constexpr (!Outputs)
        part.store(d_state, transformation ? segments.passed : segments.states, sweep());
    else if (segment == 0 && p.d_initial_state != nullptr)
        part.store(d_state, static_cast<float*>(p.d_initial_state), head_index);
}

template <bool Gated>
struct DeltaBackwardPass {
    static constexpr CostsOf kCosts = Gated
                                          ? CostsOf{{20000, 24, 22, 28000, 24, 0.29}, {15000, 47, 60, 30000, 44, 0.27}}
                                          : CostsOf{{560, 21, 13, 18000, 120, 0.44}, {9000, 20, 56, 21000, 33, 0.45}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return delta_backward<T, Gated, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_plan(
            sizes, device, true, [](const Plan& plan) { return Layout<T, Gated>(Carver(nullptr), plan).bytes; },
            [](int places) { return backward_blocks(places, sizeof(T) == 4 || Gated); },
            [&](const Plan& plan) {
                return least_cycles(plan, sizes, launches(plan, sizes, Stored<T>::kDType), device);
            });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), true, first_blocks(plan, sizes), sizes.key_dim * sizes.key_dim};
    }
    static constexpr auto carry = launch_carry_transformed;
};

}  // namespace

ChunkedPlan chunked_plan_delta_backward(const Sizes& sizes, int32_t dtype, bool gated, int limit) {
    return faster_plan(walked_plan_backward(sizes, dtype, {true, gated}, limit),
                       gated ? describe<DeltaBackwardPass<true>>(sizes, dtype, limit)
                             : describe<DeltaBackwardPass<false>>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (gradients.cu).
static bool walks(const RuleBackward& p) {
    return chunked_plan_delta_backward(p.sizes, p.v.dtype, p.log_gate.data != nullptr, shared_memory_limit()).walk != 0;
}

extern "C" cudaError_t fastweights_delta_backward_chunked(const RuleBackward* params, cudaStream_t stream) {
    if (params->sizes.batch == 0) return cudaSuccess;
    if (params->log_value_decay.data) return cudaErrorInvalidValue;
    if (params->erase.data || params->log_key_decay.data) return chunked_delta_decays_backward(*params, stream);
    if (walks(*params)) return walked_backward(*params, true, stream);
    return params->log_gate.data ? run<DeltaBackwardPass<true>>(*params, stream)
                                 : run<DeltaBackwardPass<false>>(*params, stream);
}

extern "C" size_t fastweights_delta_backward_chunked_workspace(const RuleBackward* params) {
    if (params->sizes.batch == 0) return 0;
    if (params->erase.data || params->log_key_decay.data) return chunked_delta_decays_backward_workspace(*params);
    if (walks(*params)) return walked_backward_workspace(*params, true);
    return params->log_gate.data ? workspace<DeltaBackwardPass<true>>(*params)
                                 : workspace<DeltaBackwardPass<false>>(*params);
}

}  // namespace fairseq_fastweights
