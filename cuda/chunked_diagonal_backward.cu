// The backward pass of the sum rule and of scalar gates, chunk-parallel on tensor cores.
//
// Chunks are taken from the last to the first. The state at a chunk's start is computed again from the last one that
// the forward pass kept or that was put down since (chunked_checkpoints.cuh). With the notation of
// chunked_diagonal_forward.cu, dS the gradient of the state at the chunk's end, and D_ts = G_ts <dy_t, v_s> for s <= t:
//   dQ = D diag(w) K + diag(G_t0) dY S_0^T
//   dK = diag(w) (D^T Q + diag(G_es) V dS^T)          dV = P^T dY + diag(G_es w) K dS
//   dS_0 = G dS + Q^T diag(G_t0) dY
// The gradient of log g_u collects whatever passes through step u: what was written before it and is read at or after
// it,
//   sum over s < u <= t of P_ts <dy_t, v_s>, and likewise for writes before the chunk and reads after it;
// sums of products over a range, without a subtraction, which keeps it exact where gates are so strong that it almost
// vanishes. Where the write is w = 1 - g, it loses g <k_u, (dK / w)_u>.
#include "choice.h"
#include "chunked_checkpoints.cuh"
#include "chunked_decays.h"
#include "chunked_gates.cuh"
#include "chunked_segments.cuh"

namespace fairseq_fastweights {
namespace {

// Sums by step of what the gates let through.
struct GateGradient {
    Matrix<float> inside;  // (t, u): first P_ts <dy_t, v_s> at u = s, then its sums over s < u
    float* steps;
    int length;  // of an array by tile across and step

    __host__ __device__ GateGradient(Carver& carver, const Plan& plan, bool gated)
        : inside{carver.take<float>(gated ? plan.chunk * (plan.chunk + 1) : 0), plan.chunk + 1},
          length(plan.chunk * round_up(plan.key_rows, kTileColumns) / kTileColumns) {
        steps = carver.take<float>(gated ? 3 * length + plan.threads / kWarp : 0);
    }

    __device__ __forceinline__ float* read() const { return steps; }
    __device__ __forceinline__ float* written() const { return steps + length; }
    __device__ __forceinline__ float* write_strength() const { return steps + 2 * length; }
    __device__ __forceinline__ float* passing() const { return steps + 3 * length; }  // by warp: <S_0, dS>

    // Threads that share a step: a power of two, neighbours in a warp, and all steps together the whole block.
    __device__ __forceinline__ static int lanes(int chunk) { return blockDim.x / chunk; }

    // After `inside` and a barrier: its sums. A barrier must follow.
    __device__ __forceinline__ void sum_rows(int chunk) const {
        const int count = lanes(chunk), lane = threadIdx.x % count, t = threadIdx.x / count;
        const int length = chunk / count, first = lane * length;  // of this lane's part of the row
        // Some at a time: all at once would be up to 32 registers.
        constexpr int kGroup = 8;
        const auto term = [&](int i) { return i < length && first + i < t ? inside(t, first + i) : 0.0f; };
        float sum = 0.0f;
#pragma unroll 1
        for (int group = 0; group < length; group += kGroup)
#pragma unroll
            for (int i = group; i < group + kGroup; ++i) sum += term(i);
        float before = sum;  // with the lanes before this one, and then without this one
        for (int distance = 1; distance < count; distance *= 2) {
            const float other = __shfl_up_sync(kAllLanes, before, distance);
            if (lane >= distance) before += other;
        }
        before = __shfl_up_sync(kAllLanes, before, 1);
        if (lane == 0) before = 0.0f;
#pragma unroll 1
        for (int group = 0; group < length; group += kGroup) {
            float terms[kGroup];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) terms[i] = term(group + i);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                if (group + i < length) inside(t, first + group + i) = before;
                before += terms[i];
            }
        }
    }

    // After all sums and a barrier: the gradient of the log gate of step `u`, this thread's: the same for all that share
    // it. `gate` is that gate where writes lose by it, else 0.
    __device__ __forceinline__ float of(int u, int chunk, float whole, float gate) const {
        const int count = lanes(chunk), lane = threadIdx.x % count;
        float passed = 0.0f, sum = 0.0f, strength = 0.0f;
        for (int warp = lane; warp < static_cast<int>(blockDim.x) / kWarp; warp += count) passed += passing()[warp];
        for (int step = lane; step < chunk; step += count) {
            if (step >= u) sum += inside(step, u);
            const float* const part = step >= u ? read() : written();
            for (int i = step; i < length; i += chunk) sum += part[i];
        }
        if (gate != 0.0f)
            for (int i = u + lane * chunk; i < length; i += count * chunk) strength += write_strength()[i];
        sum += passed * whole - strength * gate;
        for (int distance = count / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        return sum;
    }
};

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
    diagonal_backward(const DiagonalBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
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
    const auto key_head = [&](const Sequence& x) { return Head<T>(x, batch, head, 0, p.sizes.key_dim); };
    const auto value_head = [&](const Sequence& x) { return Head<T>(x, batch, head, first, p.sizes.value_dim); };
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
    const auto march = [&] { return segments.index(segment, head_index); };
    for (int n = end - 1; n >= begin; --n) {
        const int start = n * chunk, base = start / checkpoints.interval * checkpoints.interval;
        // The chunk after it was of the same interval: on the march to that one states have been put down.
        const bool marched = n + 1 < end && (start + chunk) % checkpoints.interval != 0;
        int now = start;
        if constexpr (Outputs)
            now = checkpoints.load(state, part, p.initial_state, p.states, head_index, march(), base, start, marched);
        int place = (start - now) / chunk & 1;
        if constexpr (Outputs) fetch(now, place);
        for (;; now += chunk, place ^= 1) {
            if (now == start) {
                copy_rows(q, key_head(p.q), chunk, plan.key_rows, now, time);
                copy_rows(d_out, value_head(p.d_out), chunk, plan.columns, now, time);
            }
            copies_commit();
            if (Outputs && !marched) checkpoints.put_down(state, part, march(), base, now);
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
            if constexpr (Gated) {
                float sum = state.dot(d_state);
                for (int distance = kWarp / 2; distance > 0; distance /= 2)
                    sum += __shfl_xor_sync(kAllLanes, sum, distance);
                if (warp_lane() == 0) gradient.passing()[thread / kWarp] = sum;
            }
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
            if constexpr (Gated) {
                const int step = thread / gradient.lanes(chunk);
                const float sum =
                    gradient.of(step, chunk, gates.whole(), p.complement != 0 ? expf(gates.log_gate()[step]) : 0.0f);
                if (thread % gradient.lanes(chunk) == 0 && start + step < time)
                    store_step(p.d_log_gate, batch, head, start + step, sum, block > 0);
            }
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

template <typename T, bool Gated>
Plan plan_of(const Sizes& sizes, int limit) {
    return find_plan(sizes, Stored<T>::kDType, 64, limit, true,
                     [](const Plan& plan) { return Layout<T, Gated>(Carver(nullptr), plan).bytes; });
}

template <bool Gated>
Segments segments_of(const Plan& plan, const Sizes& sizes) {
    return find_segments(plan, sizes, 1, Gated ? 1 : 0);
}

template <typename T, bool Gated>
cudaError_t run(const DiagonalBackward& p, cudaStream_t stream) {
    const Plan plan = plan_of<T, Gated>(p.sizes, shared_memory_limit());
    if (plan.chunk == 0) return cudaErrorInvalidValue;
    Segments segments = segments_of<Gated>(plan, p.sizes);
    Checkpoints checkpoints = find_checkpoints(plan, p.sizes, segments);
    checkpoints.place(p.workspace, segments);
    const dim3 block(plan.threads);
    return with_places(plan, [&](auto places) {
        constexpr int kPlaces = decltype(places)::value;
        cudaError_t error = cudaSuccess;
        if (segments.count > 1) {
            segments.place(p.workspace);
            const dim3 grid(segments.heads * plan.blocks, segments.count - 1);
            error = launch(diagonal_backward<T, Gated, false, kPlaces>, grid, block, plan.shared, stream, p, plan,
                           segments, checkpoints, 0);
            if (error == cudaSuccess) error = launch_carry_scaled(segments, p.sizes, p.d_final_state, true, stream);
        }
        const dim3 grid(segments.heads, segments.count);
        for (int i = 0; i < plan.blocks && error == cudaSuccess; ++i)
            error = launch(diagonal_backward<T, Gated, true, kPlaces>, grid, block, plan.shared, stream, p, plan,
                           segments, checkpoints, i);
        return error;
    });
}

template <typename T, bool Gated>
size_t workspace(const DiagonalBackward& p) {
    const Plan plan = plan_of<T, Gated>(p.sizes, shared_memory_limit());
    const Segments segments = segments_of<Gated>(plan, p.sizes);
    return segments.bytes() + find_checkpoints(plan, p.sizes, segments).bytes;
}

}  // namespace

ChunkedPlan chunked_plan_diagonal_backward(const Sizes& sizes, int32_t dtype, bool gated, int limit) {
    return with_type(dtype, ChunkedPlan{}, [&](auto zero) {
        using T = decltype(zero);
        const Plan plan = gated ? plan_of<T, true>(sizes, limit) : plan_of<T, false>(sizes, limit);
        return describe(plan, gated ? segments_of<true>(plan, sizes) : segments_of<false>(plan, sizes));
    });
}

extern "C" cudaError_t fastweights_diagonal_backward_chunked(const DiagonalBackward* params, cudaStream_t stream) {
    const DiagonalBackward& p = *params;
    if (p.sizes.batch == 0) return cudaSuccess;
    if (has_decays(p.log_key_decay, p.log_value_decay)) return chunked_decays_backward(p, stream);
    return with_type(p.v.dtype, cudaErrorInvalidValue, [&](auto zero) {
        using T = decltype(zero);
        return p.log_gate.data != nullptr ? run<T, true>(p, stream) : run<T, false>(p, stream);
    });
}

extern "C" size_t fastweights_diagonal_backward_chunked_workspace(const DiagonalBackward* params) {
    const DiagonalBackward& p = *params;
    if (p.sizes.batch == 0) return 0;
    if (has_decays(p.log_key_decay, p.log_value_decay)) return chunked_decays_backward_workspace(p);
    return with_type(p.v.dtype, size_t{0}, [&](auto zero) {
        using T = decltype(zero);
        return p.log_gate.data != nullptr ? workspace<T, true>(p) : workspace<T, false>(p);
    });
}

}  // namespace fairseq_fastweights
