// The backward pass of decays by dimension, chunk-parallel.
//
// Chunks are taken from the last to the first; the state at a chunk's start is computed again from the last one that
// the forward pass kept or that was put down since (checkpoints.cuh). With the notation of decays.cuh,
// dS the gradient of the state at the chunk's end and D_ts = <dy_t, v_s * Z_ts>:
//   dq_t = F_t0 * (S_0 (dy_t * Z_t0)) + sum over s <= t of D_ts (k_s * F_ts)
//   dk_s = F_es * (dS (v_s * Z_es)) + sum over t >= s of D_ts (q_t * F_ts)
//   dv_s = Z_es * (dS^T (k_s * F_es)) + sum over t >= s of P_ts (dy_t * Z_ts)
//   dS_0 = (F_e0 Z_e0^T) * dS + sum over t of (q_t * F_t0) (dy_t * Z_t0)^T
// The gradient of log f_u collects, element by element, whatever passes through step u: of pairs s < u <= t of the
// chunk D_ts q_t * k_s * F_ts, of reads of S_0 at t >= u their products with q_t * F_t0, of writes s < u that are left
// at the end theirs with k_s * F_es, and the row sums of (F_e0 Z_e0^T) * S_0 * dS. That of log z_u likewise, over
// columns.
//
// Keys and values have the same equations, with dy in the place of q, v in that of k and P in that of D: `late`,
// `early` and `weights` here. Where pairs are parted at m, with x as in decays.cuh,
//   d late_t = F_tm * (sum over s of w_ts x_s),   d early_s = F_ms * (sum over t of w_ts x_t)
// and d log f_u has the sum over t >= u of x_t * (that sum) if u is in the second half, and over s < u if in the first.
#include "../choice.h"
#include "by_dimension.h"
#include "decays_gradient.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

// Keys, or values, of a chunk.
template <typename T>
struct Side {
    int columns, parts;
    Matrix<T> late, early;
    Matrix<T> reading;      // late_t decayed from before the chunk to t
    Matrix<T> written;      // early_s decayed from s to the chunk's end, then the gradient of `late`
    Matrix<float> weights;  // D_ts of keys, P_ts of values
    float* total;           // the products of all gates
    Stages<T> levels;
    // In the place of the levels. For keys S_0 (dy_t * Z_t0) and dS (v_s * Z_es), of values S_0^T (q_t * F_t0) and
    // dS^T (k_s * F_es); then the gradients of the logs, and of `early`.
    Matrix<float> reads, writes;
    Matrix<float> passing;  // parts of the sums of S_0 * dS, weighted with the other side's totals

    __host__ __device__ Side(Carver& carver, int columns, int parts)
        : columns(columns), parts(parts), late(carver.matrix<T>(kSteps, columns)),
          early(carver.matrix<T>(kSteps, columns)), reading(carver.matrix<T>(kSteps, columns)),
          written(carver.matrix<T>(kSteps, columns)), weights(carver.matrix<float>(kSteps, kSteps, 0)),
          total(carver.take<float>(columns)) {
        Carver later = carver;
        levels = Stages<T>(carver, kLevels, kSteps, columns);
        reads = later.matrix<float>(kSteps, columns);
        writes = later.matrix<float>(kSteps, columns);
        passing = later.matrix<float>(parts, columns, 0);
        if (later.used > carver.used) carver.used = later.used;
    }
    __device__ __forceinline__ const Matrix<T>& d_late() const { return written; }
    __device__ __forceinline__ const Matrix<float>& d_log() const { return reads; }
};

template <typename T>
struct Layout {
    Side<T> keys, values;
    Matrix<Factor<T>> state, d_state;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : keys(carver, plan.key_rows, (plan.columns + kTileColumns - 1) / kTileColumns),
          values(carver, plan.columns, plan.key_rows / kTileRows),
          state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns)),
          d_state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns)) {
        bytes = carver.used;
    }
};

// One of the two, carved out again: to choose among pointers would be more work, and hide that they are to shared
// memory.
template <typename T>
__device__ __forceinline__ Side<T> side_of(const Layout<T>& layout, unsigned char* memory, bool of_value) {
    const int before = static_cast<int>(reinterpret_cast<unsigned char*>(layout.values.late.data) - memory);
    Carver carver(memory + (of_value ? before : 0));
    return Side<T>(carver, of_value ? layout.values.columns : layout.keys.columns,
                   of_value ? layout.values.parts : layout.keys.parts);
}

// `Outputs` true: all gradients, of block `value_block` of each head. `Outputs` false: only what a segment makes of a
// gradient of zeros.
template <typename T, bool Outputs, int Places>
__global__ void __launch_bounds__(kDecayThreads, kDecayBlocks)
    decays_backward(const RuleBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
                    const int value_block) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T> shared(Carver(memory), plan);
    const Side<T>&of_keys = shared.keys, &of_values = shared.values;

    const int head_index = Outputs ? blockIdx.x : blockIdx.x / plan.blocks;
    const int block = Outputs ? value_block : blockIdx.x % plan.blocks, first = block * plan.columns;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int keys = p.sizes.key_dim, values = p.sizes.value_dim, time = p.sizes.time;
    const int chunks = (time + kSteps - 1) / kSteps;
    const StatePart part{keys, values, first, plan.columns, plan.key_rows};

    // Nobody asks what the first segment makes of zeros: no segment comes before it.
    const int segment = Outputs ? blockIdx.y : blockIdx.y + 1, begin = segment * segments.chunks;
    const int end = min(chunks, begin + segments.chunks);
    PassedLogs key_logs, value_logs;  // of `Outputs` false
    DecayState<Places> state, d_state;
    if (Outputs && segments.count > 1)
        part.load(d_state, segments.states, segments.index(segment, head_index));
    else
        part.load(d_state, Outputs ? static_cast<const float*>(p.d_final_state) : nullptr, head_index);
    if constexpr (Outputs) d_state.copy_to(shared.d_state, plan.key_rows, plan.columns);

    // Found anew at each use: kept, these would hold some 40 registers.
    const auto rows_of = [&](auto zero, const Sequence& x, bool of_value) {
        return Head<decltype(zero)>(x, opaque(batch), opaque(head), of_value ? first : 0, of_value ? values : keys);
    };

    // Dimensions are dealt out to threads: f(side, its column), its gates in `gates`. There are those of the thread's
    // first one, of the chunk from `now` on; or their logs, while that is on its way.
    float gates[kSteps];
    int now, place;
    const int items = plan.key_rows + plan.columns;
    const auto load_item = [&](float (&logs)[kSteps], int item) {
        const bool of_value = item >= plan.key_rows;
        load_logs<T>(logs, either(p.log_key_decay, p.log_value_decay, of_value), opaque(batch), opaque(head),
                     of_value ? first + item - plan.key_rows : item, of_value ? values : keys, now, time);
    };
    const auto each_column = [&](auto f) {
        for (int item = threadIdx.x; item < items; item += kDecayThreads) {
            if (item >= kDecayThreads) {
                load_item(gates, item);
                exponentiate(gates);
            }
            const bool of_value = item >= plan.key_rows;
            f(side_of(shared, memory, of_value), of_value ? item - plan.key_rows : item);
        }
    };

    // On the way to a chunk its steps' queries and gradients are not there yet: keys and values come into either place
    // in turn, the next while a chunk is worked on.
    const auto early_of = [](const Side<T>& side, int at) { return side.early.either(side.late, at); };
    const auto fetch_early = [&](int from, int at) {
        copy_rows<StepWalk>(early_of(of_keys, at), rows_of(T(), p.k, false), kSteps, plan.key_rows, from, time);
        copy_rows<StepWalk>(early_of(of_values, at), rows_of(T(), p.v, true), kSteps, plan.columns, from, time);
    };
    const auto fetch_late = [&](int from) {
        copy_rows<StepWalk>(of_keys.late, rows_of(T(), p.q, false), kSteps, plan.key_rows, from, time);
        copy_rows<StepWalk>(of_values.late, rows_of(T(), p.d_out, true), kSteps, plan.columns, from, time);
    };
    const int64_t sweep = segments.index(segment, head_index);
    // The chunk after it was of the same interval: on the sweep to that one states have been put down.
    const auto is_swept = [&](int n) { return n + 1 < end && (n + 1) * kSteps % checkpoints.interval != 0; };
    const auto base_of = [&](int n) { return n * kSteps / checkpoints.interval * checkpoints.interval; };
    // Sets out for chunk n: its state's, inputs' and gates' way to where the sweep begins.
    const auto set_out = [&](int n) {
        const int start = n * kSteps;
        now = start;
        if constexpr (Outputs)
            now = checkpoints.load(state, part, p.initial_state, p.states, head_index, sweep, base_of(n), start,
                                   is_swept(n));
        place = (start - now) / kSteps & 1;
        if constexpr (Outputs) fetch_early(now, place);
        if (now == start) fetch_late(now);
        copies_commit();
        load_item(gates, threadIdx.x);
    };
    if (begin < end) set_out(end - 1);
    for (int n = end - 1; n >= begin; --n) {
        const int start = n * kSteps;
        for (;; place ^= 1) {
            if (Outputs && !is_swept(n)) checkpoints.put_down(state, part, sweep, base_of(n), now);
            exponentiate(gates);
            copies_wait<0>();
            __syncthreads();
            if (now == start) break;
            fetch_early(now + kSteps, place ^ 1);
            each_column([&](const Side<T>& side, int column) {
                float early[kSteps];
                load_column(early, early_of(side, place), column);
                write_written(side.written, early, gates, column);
                side.total[column] = product_of(gates);
            });
            __syncthreads();
            now += kSteps;
            if (now == start) fetch_late(now);
            copies_commit();
            load_item(gates, threadIdx.x);
            pass_chunk<kPasses>(state, of_keys.total, of_values.total, of_keys.written, of_values.written, plan,
                                [](Tile&) {});
        }

        if constexpr (Outputs) state.copy_to(shared.state, plan.key_rows, plan.columns);
        each_column([&](const Side<T>& side, int column) {
            if constexpr (Outputs) {
                write_operands(side.late, side.early, side.levels, side.reading, side.written, gates, column);
            } else {
                float late[kSteps];
                load_column(late, side.late, column);
                write_reading(side.reading, late, gates, column);
            }
            side.total[column] = product_of(gates);
        });
        if (Outputs && items > kDecayThreads) {
            load_item(gates, threadIdx.x);
            exponentiate(gates);
        }
        __syncthreads();
        if constexpr (Outputs) {
            Deal deal;
            const auto weigh = [&](const Side<T>& from, const Side<T>& to, int columns) {
                deal.each(kLevels + 1, [&](int level) {
                    weigh_pairs<kPasses, true>(to.weights, from.late, from.early, from.levels, from.levels, columns,
                                               level);
                });
            };
            weigh(of_values, of_keys, plan.columns);
            weigh(of_keys, of_values, plan.key_rows);
            __syncthreads();
            const auto read = [&](const Matrix<float>& to, const Matrix<T>& from, const Matrix<Factor<T>>& matrix) {
                deal.tiles(plan.columns, [&](Tile& tile) {
                    multiply_stored<kPasses, false, false>(tile, 0, plan.key_rows, from, matrix);
                    write_tile(tile, to);
                });
            };
            const auto read_transposed = [&](const Matrix<float>& to, const Matrix<T>& from,
                                             const Matrix<Factor<T>>& matrix) {
                deal.tiles(plan.key_rows, [&](Tile& tile) {
                    multiply_stored<kPasses, false, true>(tile, 0, plan.columns, from, matrix);
                    write_tile(tile, to);
                });
            };
            read_transposed(of_keys.reads, of_values.reading, shared.state);
            read_transposed(of_keys.writes, of_values.written, shared.d_state);
            read(of_values.reads, of_keys.reading, shared.state);
            read(of_values.writes, of_keys.written, shared.d_state);
            state.each_with(d_state, plan.key_rows, plan.columns, [&](Tile& tile, Tile& d_tile) {
                tile.each_with(d_tile, [](int, int, float& value, float& d_value) { value *= d_value; });
                tile.sum_rows([&](int, int j, float value) { return value * of_values.total[j]; },
                              [&](int i, float sum) { of_keys.passing(tile.column / kTileColumns, i) = sum; });
                tile.sum_columns([&](int i, int, float value) { return value * of_keys.total[i]; },
                                 [&](int j, float sum) { of_values.passing(tile.row / kTileRows, j) = sum; });
            });
            __syncthreads();
            each_column([&](const Side<T>& side, int column) { differentiate_column(side, gates, column); });
            __syncthreads();
        } else {
            key_logs.add(p.log_key_decay, batch, head, 0, keys, plan.key_rows, start, time);
            value_logs.add(p.log_value_decay, batch, head, first, values, plan.columns, start, time);
        }
        if (n > begin) set_out(n - 1);
        if constexpr (Outputs) {
            const bool add = block > 0;
            const auto store = [&](auto zero, const Sequence& x, const auto& from, bool of_value) {
                if (x.data != nullptr)
                    store_rows<StepWalk>(rows_of(zero, x, of_value), from, kSteps,
                                         of_value ? plan.columns : plan.key_rows, start, time, add && !of_value);
            };
            const auto store_logs = [&](const Sequence& x, const Side<T>& side, bool of_value) {
                if (x.dtype == kFloat32)
                    store(float(), x, side.reads, of_value);
                else
                    store(T(), x, side.reads, of_value);
            };
            store(T(), p.dq, of_keys.written, false);
            store(T(), p.dk, of_keys.writes, false);
            store(T(), p.dv, of_values.writes, true);
            store_logs(p.d_log_key_decay, of_keys, false);
            store_logs(p.d_log_value_decay, of_values, true);
        }
        pass_chunk<kPasses>(d_state, of_keys.total, of_values.total, of_keys.reading, of_values.reading, plan,
                            [&](Tile& tile) {
                                if constexpr (Outputs) write_tile(tile, shared.d_state);
                            });
    }
    if constexpr (!Outputs) {
        const int64_t index = segments.index(segment, head_index);
        part.store(d_state, segments.states, index);
        float* const passed = segments.passed + index * (keys + values);
        if (first == 0) key_logs.store(passed, 0, keys, plan.key_rows);
        value_logs.store(passed + keys, first, values, plan.columns);
    } else if (segment == 0 && p.d_initial_state != nullptr) {
        part.store(d_state, static_cast<float*>(p.d_initial_state), head_index);
    }
}

struct DecaysBackwardPass {
    static constexpr CostsOf kCosts{{3200, 31, 5.5, 13000, 20, 0.34}, {3300, 11, 55, 17000, 20, 0.32}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return decays_backward<T, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_decay_plan(
            sizes, device, [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; },
            [](const Plan& plan) { return has_registers(plan) ? kDecayBlocks : 0; });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), true, plan.blocks, sizes.key_dim + sizes.value_dim};
    }
    static cudaError_t carry(const Segments& segments, const Sizes& sizes, const void* first, bool reverse,
                             cudaStream_t stream) {
        return launch_carry_decayed<float>(segments.count, segments.states, segments.passed, sizes, first, reverse,
                                           stream);
    }
};

}  // namespace

ChunkedPlan chunked_plan_decays_backward(const Sizes& sizes, int32_t dtype, bool of_values, int limit) {
    return faster_plan(walked_plan_backward(sizes, dtype, {false, false, true, of_values}, limit),
                       describe<DecaysBackwardPass>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (gradients.cu).
static bool walks(const RuleBackward& p) {
    const bool of_values = p.log_value_decay.data != nullptr;
    return chunked_plan_decays_backward(p.sizes, p.v.dtype, of_values, shared_memory_limit()).walk != 0;
}

cudaError_t chunked_decays_backward(const RuleBackward& p, cudaStream_t stream) {
    return walks(p) ? walked_backward(p, false, stream) : run<DecaysBackwardPass>(p, stream);
}

size_t chunked_decays_backward_workspace(const RuleBackward& p) {
    return walks(p) ? walked_backward_workspace(p, false) : workspace<DecaysBackwardPass>(p);
}

}  // namespace fairseq_fastweights
