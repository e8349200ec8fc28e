// The backward pass of the delta rule with decays of keys or an erase key, chunk-parallel.
//
// Chunks are taken from the last to the first; the state at a chunk's start is computed again from the last one that
// the forward pass kept or that was put down since (checkpoints.cuh). With the notation of
// delta_decays.cuh and dS the gradient of the state at the chunk's end:
//   dU = P^T dY + (K * F_e.) dS          (I + B G)^T X = dU              dV = B X
//   d beta_t = <x_t, what of r_t the steps before t leave>
//   dP = dY U^T for s <= t               dG = -dV U^T for s < t
//   d(Q * F_.0) = dY S_0^T               d(E * F_.0) = -dV S_0^T         d(K * F_e.) = U dS^T
//   dS_0 = diag(F_e0) dS + (Q * F_.0)^T dY - (E * F_.0)^T dV
// From these each dimension's gradients come as with decays that do not correct (decays_backward.cu): those of
// queries and keys, then those of erase keys and keys, which are added.
//
// dS collects what queries read in directions that no key erases, without bound, and K dS remains small: so dS is split
// in two for products, not rounded.
#include "../choice.h"
#include "by_dimension.h"
#include "decays_gradient.cuh"
#include "delta_decays.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

template <typename T>
struct Layout {
    DecayedDelta<T> delta;
    // In the place of the levels: d(Q * F_.0), then the gradients of the logs; d(E * F_.0), then those of erase keys;
    // d(K * F_e.), then those of keys.
    Matrix<float> query_reads, erase_reads, writes;
    Matrix<float> passing;  // parts of the sums of S_0 * dS
    Stages<T> d_out;        // of this chunk and the next
    SplitMatrix<T> d_state;
    Matrix<float> d_update;  // dU, then products of X with what is left of R
    Matrix<Factor<T>> minus_dv;
    Matrix<float> d_scores, d_products;  // dP and dG, mirrored
    int parts;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : delta(carver, plan), parts((plan.columns + kTileColumns - 1) / kTileColumns) {
        Carver levels = carver;
        levels.used = delta.levels;
        query_reads = levels.matrix<float>(kSteps, plan.key_rows);
        erase_reads = levels.matrix<float>(kSteps, plan.key_rows);
        writes = levels.matrix<float>(kSteps, plan.key_rows);
        passing = levels.matrix<float>(parts, plan.key_rows, 0);
        if (levels.used > carver.used) carver.used = levels.used;
        d_out = Stages<T>(carver, 2, kSteps, plan.columns);
        d_state = SplitMatrix<T>(carver, plan.key_rows, plan.columns);
        d_update = carver.matrix<float>(kSteps, plan.columns, 8);
        minus_dv = carver.matrix<Factor<T>>(kSteps, plan.columns, 8);
        d_scores = carver.matrix<float>(kSteps, kSteps, 0);
        d_products = carver.matrix<float>(kSteps, kSteps, 0);
        bytes = carver.used;
    }
};

// `Outputs` true: all gradients, of block `value_block` of each head. `Outputs` false: only what a segment makes of a
// gradient of zeros, in the first `plan.blocks` blocks of a head, and what it makes of the identity when all of dY is
// 0, in the others.
template <typename T, bool Outputs, int Places>
__global__ void __launch_bounds__(kDecayThreads, kDecayBlocks)
    delta_decays_backward(const RuleBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
                          const int value_block) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T> shared(Carver(memory), plan);
    const DecayedDelta<T>& delta = shared.delta;

    const int thread = threadIdx.x;
    const int blocks = Outputs ? 1 : gridDim.x / segments.heads, head_index = blockIdx.x / blocks;
    const int block = Outputs ? value_block : blockIdx.x % blocks;
    const bool transformation = !Outputs && block >= plan.blocks;
    const int first = (transformation ? block - plan.blocks : block) * plan.columns;
    const int keys = p.sizes.key_dim, columns = transformation ? keys : p.sizes.value_dim, time = p.sizes.time;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int chunks = (time + kSteps - 1) / kSteps;
    const StatePart part{keys, columns, first, plan.columns, plan.key_rows};
    // Found anew at each use: kept, these would hold some 40 registers.
    const auto key_rows_of = [&](auto zero, const Sequence& x) {
        return Head<decltype(zero)>(x, opaque(batch), opaque(head), 0, keys);
    };
    const auto value_rows_of = [&](const Sequence& x) {
        return Head<T>(x, opaque(batch), opaque(head), first, transformation ? 0 : columns);
    };

    // Nobody asks what the first segment makes of zeros: no segment comes before it.
    const int segment = Outputs ? blockIdx.y : blockIdx.y + 1, begin = segment * segments.chunks;
    const int end = min(chunks, begin + segments.chunks);
    const auto sweep = [&] { return segments.index(segment, opaque(head_index)); };
    DecayState<Places> state, d_state;
    if (transformation)
        part.load_identity(d_state);
    else if (Outputs && segments.count > 1)
        part.load(d_state, segments.states, sweep());
    else
        part.load(d_state, Outputs ? static_cast<const float*>(p.d_final_state) : nullptr, head_index);
    d_state.each(plan.key_rows, plan.columns, [&](const Tile& tile) { shared.d_state.write(tile); });
    delta.clear_scores();

    // Key dimensions are dealt out to threads: f(column), its gates in `gates`. There are those of the thread's first
    // one, of the chunk from `now` on; or their logs, while that is on its way.
    float gates[kSteps], beta = 0.0f;
    int now;
    const auto load_item = [&](int item) {
        load_logs<T>(gates, p.log_key_decay, opaque(batch), opaque(head), item, keys, now, time);
    };
    const auto each_column = [&](auto f) {
        for (int item = thread; item < plan.key_rows; item += kDecayThreads) {
            if (item >= kDecayThreads) {
                load_item(item);
                exponentiate(gates);
            }
            f(item);
        }
    };
    const auto fetch = [&](int start) {
        copy_rows<StepWalk>(delta.k, key_rows_of(T(), p.k), kSteps, plan.key_rows, now, time);
        copy_rows<StepWalk>(delta.erase, key_rows_of(T(), p.erase.data ? p.erase : p.k), kSteps, plan.key_rows, now,
                            time);
        if constexpr (Outputs) copy_rows<StepWalk>(delta.v, value_rows_of(p.v), kSteps, plan.columns, now, time);
        if (now == start) {
            copy_rows<StepWalk>(delta.q, key_rows_of(T(), p.q), kSteps, plan.key_rows, now, time);
            copy_rows<StepWalk>(shared.d_out[now / kSteps % 2], value_rows_of(p.d_out), kSteps, plan.columns, now,
                                time);
        }
        copies_commit();
        load_item(opaque(thread));
        beta = load_step(p.beta, batch, head, now, kSteps, time);
    };
    // The chunk after it was of the same interval: on the sweep to that one states have been put down.
    const auto is_swept = [&](int n) { return n + 1 < end && (n + 1) * kSteps % checkpoints.interval != 0; };
    const auto base_of = [&](int n) { return n * kSteps / checkpoints.interval * checkpoints.interval; };
    // Sets out for chunk n: its state's, inputs' and gates' way to where the sweep begins.
    const auto set_out = [&](int n) {
        now = n * kSteps;
        if constexpr (Outputs)
            now = checkpoints.load(state, part, p.initial_state, p.states, head_index, sweep(), base_of(n), now,
                                   is_swept(n));
        fetch(n * kSteps);
    };
    if (begin < end) set_out(end - 1);
    for (int n = end - 1; n >= begin; --n) {
        const int start = n * kSteps;
        const Matrix<T> d_out = shared.d_out[n % 2];
        Deal deal;
        for (;;) {
            if (Outputs && !is_swept(n)) checkpoints.put_down(state, part, sweep(), base_of(n), now);
            if constexpr (Outputs) state.copy_to(delta.state, plan.key_rows, plan.columns);
            exponentiate(gates);
            if (thread < kSteps) delta.beta[thread] = beta;
            copies_wait<0>();
            __syncthreads();
            each_column([&](int column) {
                delta.write_keys(gates, column);
                if (now == start) delta.write_queries(gates, column);
            });
            __syncthreads();
            if constexpr (Outputs) delta.template find_error<kPasses>(deal, plan);
            delta.template find_products<kPasses>(deal, plan);
            if (!Outputs || now == start) break;
            __syncthreads();
            now += kSteps;
            fetch(start);
            delta.solve(plan);
            __syncthreads();
            delta.template advance<kPasses>(state, plan, [](Tile&) {});
        }
        delta.template find_scores<kPasses>(deal, plan);
        if (Outputs && plan.key_rows > kDecayThreads) {
            load_item(thread);
            exponentiate(gates);
        }
        __syncthreads();
        if constexpr (Outputs) delta.solve(plan);
        deal.tiles(plan.columns, [&](Tile& tile) {
            multiply_split<kPasses, false>(tile, 0, plan.key_rows, delta.written, shared.d_state);
            multiply_stored<kPasses, true, false>(tile, 0, kSteps, delta.scores, d_out);
            write_tile(tile, shared.d_update);
        });
        __syncthreads();
        if (thread < plan.columns) {  // X, by substitution from the last step to the first
            const Column<float> error(delta.error, thread), d_update(shared.d_update, thread);
            const Column<Factor<T>> minus_dv(shared.minus_dv, thread);
            const Head<T> to = value_rows_of(p.dv);
            float dv[kSteps];
#pragma unroll
            for (int s = kSteps - 1; s >= 0; --s) {
                float x = d_update.get(s), weights[4];
#pragma unroll
                for (int t = kSteps - 1; t > s; --t) {
                    if (t % 4 == 3) load_row(weights, &delta.products(s, t - 3));
                    x -= weights[t % 4] * dv[t];
                }
                dv[s] = delta.beta[s] * x;
                minus_dv.set(s, -dv[s]);
                if constexpr (Outputs) {
                    d_update.set(s, x * error.get(s));
                    if (start + s < time && thread < to.dim)
                        to.data[(start + s) * to.stride + thread] = narrow<T>(dv[s]);
                }
            }
        }
        __syncthreads();
        if constexpr (Outputs) {
            const auto weigh = [&](const Matrix<float>& to, const auto& left, int least) {
                deal.each(1, [&](int) {
                    Tile tile(0, 0, kSteps);
                    multiply_stored<kPasses, false, true>(tile, 0, plan.columns, left, delta.update);
                    tile.each([&](int t, int s, float& value) {
                        if (s > t) return;
                        to(t, s) = to(s, t) = s + least <= t ? value : 0.0f;
                    });
                });
            };
            weigh(shared.d_scores, d_out, 0);
            weigh(shared.d_products, shared.minus_dv, 1);
            const auto read = [&](const Matrix<float>& to, const auto& from) {
                deal.tiles(plan.key_rows, [&](Tile& tile) {
                    multiply_stored<kPasses, false, true>(tile, 0, plan.columns, from, delta.state);
                    write_tile(tile, to);
                });
            };
            read(shared.query_reads, d_out);
            read(shared.erase_reads, shared.minus_dv);
            deal.tiles(plan.key_rows, [&](Tile& tile) {
                multiply_split<kPasses, true>(tile, 0, plan.columns, delta.update, shared.d_state);
                write_tile(tile, shared.writes);
            });
            state.each_with(d_state, plan.key_rows, plan.columns, [&](Tile& tile, Tile& d_tile) {
                tile.each_with(d_tile, [](int, int, float& value, float& d_value) { value *= d_value; });
                tile.sum_rows([&](int, int, float value) { return value; },
                              [&](int i, float sum) { shared.passing(tile.column / kTileColumns, i) = sum; });
            });
            if (p.d_beta.data != nullptr)
                for (int t = thread / kWarp; t < kSteps; t += kDecayThreads / kWarp) {
                    float sum = 0.0f;
                    for (int j = warp_lane(); j < plan.columns; j += kWarp) sum += shared.d_update(t, j);
                    for (int distance = kWarp / 2; distance > 0; distance /= 2)
                        sum += __shfl_xor_sync(kAllLanes, sum, distance);
                    if (warp_lane() == 0 && start + t < time)
                        store_step(p.d_beta, batch, head, start + t, sum, block > 0);
                }
            __syncthreads();
            each_column([&](int column) {
                differentiate_column(
                    Readers<T, T>{delta.q, delta.k, shared.d_scores, shared.query_reads, shared.writes,
                                  shared.query_reads, shared.passing, delta.written, shared.parts, false},
                    gates, column);
                differentiate_column<true>(
                    Readers<T, float>{delta.erase, delta.k, shared.d_products, shared.erase_reads, shared.writes,
                                      shared.query_reads, shared.passing, shared.erase_reads, shared.parts,
                                      p.erase.data == nullptr},
                    gates, column);
            });
            __syncthreads();
        }
        if (n > begin) set_out(n - 1);
        if constexpr (Outputs) {
            const auto store = [&](auto zero, const Sequence& x, const auto& from) {
                if (x.data != nullptr)
                    store_rows<StepWalk>(key_rows_of(zero, x), from, kSteps, plan.key_rows, start, time, block > 0);
            };
            store(T(), p.dq, delta.written);
            store(T(), p.dk, shared.writes);
            store(T(), p.d_erase, shared.erase_reads);
            if (p.d_log_key_decay.dtype == kFloat32)
                store(float(), p.d_log_key_decay, shared.query_reads);
            else
                store(T(), p.d_log_key_decay, shared.query_reads);
        }
        pass_chunk<kPasses>(d_state, delta.total, nullptr, delta.reading_queries, d_out, plan, [&](Tile& tile) {
            multiply_stored<kPasses, true, false>(tile, 0, kSteps, delta.reading_erase, shared.minus_dv);
            shared.d_state.write(tile);
        });
    }
    if constexpr (!Outputs)
        part.store(d_state, transformation ? segments.passed : segments.states, sweep());
    else if (segment == 0 && p.d_initial_state != nullptr)
        part.store(d_state, static_cast<float*>(p.d_initial_state), head_index);
}

struct DeltaDecaysBackwardPass {
    static constexpr CostsOf kCosts{{3400, 30, 30, 35000, 20, 0.25}, {3300, 35, 60, 38000, 20, 0.3}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return delta_decays_backward<T, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_decay_plan(
            sizes, device, [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; },
            [](const Plan& plan) { return has_registers(plan) ? kDecayBlocks : 0; });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), true, first_blocks(plan, sizes), sizes.key_dim * sizes.key_dim};
    }
    static constexpr auto carry = launch_carry_transformed;
};

}  // namespace

ChunkedPlan chunked_plan_delta_decays_backward(const Sizes& sizes, int32_t dtype, int limit) {
    return faster_plan(walked_plan_backward(sizes, dtype, {true, false, true}, limit),
                       describe<DeltaDecaysBackwardPass>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (gradients.cu).
static bool walks(const RuleBackward& p) {
    return chunked_plan_delta_decays_backward(p.sizes, p.v.dtype, shared_memory_limit()).walk != 0;
}

cudaError_t chunked_delta_decays_backward(const RuleBackward& p, cudaStream_t stream) {
    return walks(p) ? walked_backward(p, true, stream) : run<DeltaDecaysBackwardPass>(p, stream);
}

size_t chunked_delta_decays_backward_workspace(const RuleBackward& p) {
    return walks(p) ? walked_backward_workspace(p, true) : workspace<DeltaDecaysBackwardPass>(p);
}

}  // namespace fairseq_fastweights
