// The backward pass of decays by dimension, chunk-parallel.
//
// Chunks are taken from the last to the first; the state at a chunk's start is computed again from the last one that
// the forward pass kept or that was put down since (chunked_checkpoints.cuh). With the notation of chunked_decays.cuh,
// dS the gradient of the state at the chunk's end and D_ts = <dy_t, v_s * Z_ts>:
//   dq_t = F_t0 * (S_0 (dy_t * Z_t0)) + sum over s <= t of D_ts (k_s * F_ts)
//   dk_s = F_es * (dS (v_s * Z_es)) + sum over t >= s of D_ts (q_t * F_ts)
//   dv_s = Z_es * (dS^T (k_s * F_es)) + sum over t >= s of P_ts (dy_t * Z_ts)
//   dS_0 = (F_e0 Z_e0^T) * dS + sum over t of (q_t * F_t0) (dy_t * Z_t0)^T
// The gradient of log f_u collects, element by element, whatever passes through step u: of pairs s < u <= t of the chunk
// D_ts q_t * k_s * F_ts, of reads of S_0 at t >= u their products with q_t * F_t0, of writes s < u that are left at the
// end theirs with k_s * F_es, and the row sums of (F_e0 Z_e0^T) * S_0 * dS. That of log z_u likewise, over columns.
//
// Keys and values have the same equations, with dy in the place of q, v in that of k and P in that of D: `late`, `early`
// and `weights` here. Where pairs are parted at m, with x as in chunked_decays.cuh,
//   d late_t = F_tm * (sum over s of w_ts x_s),   d early_s = F_ms * (sum over t of w_ts x_t)
// and d log f_u has the sum over t >= u of x_t * (that sum) if u is in the second half, and over s < u if in the first.
#include "choice.h"
#include "chunked_checkpoints.cuh"
#include "chunked_decays.cuh"
#include "chunked_decays.h"

namespace fairseq_fastweights {
namespace {

constexpr int kResident = 1;  // blocks on a multiprocessor

// Keys, or values, of a chunk.
template <typename T>
struct Side {
    Matrix<T> late, early;
    Matrix<T> reading;  // late_t decayed from before the chunk to t
    Matrix<T> written;  // early_s decayed from s to the chunk's end
    Stages<T> levels;
    Matrix<float> reads, writes;  // of keys S_0 (dy_t * Z_t0) and dS (v_s * Z_es), of values S_0^T (q_t * F_t0) and
                                  // dS^T (k_s * F_es); where `levels` were
    Matrix<float> passing;        // parts of the sums of S_0 * dS, weighted with the other side's totals
    Matrix<float> weights;        // D_ts of keys, P_ts of values
    float* total;                 // the products of all gates
};

template <typename T>
struct Layout {
    Side<T> keys, values;
    Matrix<Factor<T>> state, d_state;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan) {
        const auto carve = [&](Side<T>& side, int columns) {
            side.late = carver.matrix<T>(kSteps, columns);
            side.early = carver.matrix<T>(kSteps, columns);
            side.reading = carver.matrix<T>(kSteps, columns);
            side.written = carver.matrix<T>(kSteps, columns);
            side.weights = carver.matrix<float>(kSteps, kSteps, 0);
            side.total = carver.take<float>(columns);
        };
        carve(keys, plan.key_rows);
        carve(values, plan.columns);
        state = carver.matrix<Factor<T>>(plan.key_rows, plan.columns);
        d_state = carver.matrix<Factor<T>>(plan.key_rows, plan.columns);
        Carver later = carver;
        keys.levels = Stages<T>(carver, kLevels, kSteps, plan.key_rows);
        values.levels = Stages<T>(carver, kLevels, kSteps, plan.columns);
        const auto carve_later = [&](Side<T>& side, int columns, int parts) {
            side.reads = later.matrix<float>(kSteps, columns);
            side.writes = later.matrix<float>(kSteps, columns);
            side.passing = later.matrix<float>(parts, columns, 0);
        };
        carve_later(keys, plan.key_rows, (plan.columns + kTileColumns - 1) / kTileColumns);
        carve_later(values, plan.columns, plan.key_rows / kTileRows);
        bytes = carver.used > later.used ? carver.used : later.used;
    }
};

// The pairs that are parted at the middle of 2 Half steps, for all of a chunk's.
template <int Half>
__device__ __forceinline__ void differentiate_level(const Matrix<float>& weights, const float (&late)[kSteps],
                                                    const float (&early)[kSteps], const float (&gates)[kSteps],
                                                    float (&d_late)[kSteps], float (&d_early)[kSteps],
                                                    float (&d_log)[kSteps]) {
#pragma unroll
    for (int middle = Half; middle < kSteps; middle += 2 * Half) {
        const int start = middle - Half;
        float scale[2 * Half], x[2 * Half], row[Half];
        scale_halves<Half>(scale, gates, middle);
#pragma unroll
        for (int i = 0; i < 2 * Half; ++i) x[i] = scale[i] * (i < Half ? early[start + i] : late[start + i]);
        float run = 0.0f;
#pragma unroll
        for (int t = 2 * Half - 1; t >= Half; --t) {
            load_row(row, &weights(start + t, start));
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < Half; ++s) sum += row[s] * x[s];
            d_late[start + t] += scale[t] * sum;
            d_log[start + t] += run += x[t] * sum;
        }
        run = 0.0f;
#pragma unroll
        for (int s = 0; s < Half; ++s) {
            load_row(row, &weights(start + s, middle));
            float sum = 0.0f;
#pragma unroll
            for (int t = 0; t < Half; ++t) sum += row[t] * x[Half + t];
            d_early[start + s] += scale[s] * sum;
            d_log[start + s] += run;
            run += x[s] * sum;
        }
    }
}

// A dimension's gradients, in the places of its reads and writes; those of the logs are returned.
template <typename T>
__device__ __forceinline__ void differentiate_column(const Side<T>& side, const float (&gates)[kSteps], int column,
                                                     int parts, float (&d_log)[kSteps]) {
    float late[kSteps], early[kSteps], d_late[kSteps], d_early[kSteps];
    load_column(late, side.late, column);
    load_column(early, side.early, column);
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
        const float weight = side.weights(t, t);
        d_late[t] = weight * early[t];
        d_early[t] = weight * late[t];
        d_log[t] = 0.0f;
    }
    differentiate_level<1>(side.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<2>(side.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<4>(side.weights, late, early, gates, d_late, d_early, d_log);
    differentiate_level<8>(side.weights, late, early, gates, d_late, d_early, d_log);

    float met[kSteps];  // of what passes the chunk's start, or its end
    float product = 1.0f, run = 0.0f;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
        const float read = (product *= gates[t]) * side.reads(t, column);
        d_late[t] += read;
        met[t] = late[t] * read;
    }
#pragma unroll
    for (int t = kSteps - 1; t >= 0; --t) d_log[t] += run += met[t];
    run = 0.0f;
    for (int i = 0; i < parts; ++i) run += side.passing(i, column);
    run *= product;
    product = 1.0f;
#pragma unroll
    for (int s = kSteps - 1; s >= 0; --s) {
        const float written = product * side.writes(s, column);
        d_early[s] += written;
        met[s] = early[s] * written;
        product *= gates[s];
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        d_log[s] += run;
        run += met[s];
    }
    write_column(side.reads, d_late, column);
    write_column(side.writes, d_early, column);
}

// `Outputs` true: all gradients, of block `value_block` of each head. `Outputs` false: only what a segment makes of a
// gradient of zeros.
template <typename T, bool Outputs, int Places>
__global__ void __launch_bounds__(kDecayThreads, kResident)
    decays_backward(const DiagonalBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
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
    StateTiles<Places> state, d_state;
    if (Outputs && segments.count > 1)
        part.load(d_state, segments.states, segments.index(segment, head_index));
    else
        part.load(d_state, Outputs ? static_cast<const float*>(p.d_final_state) : nullptr, head_index);
    if constexpr (Outputs) d_state.copy_to(shared.d_state, plan.key_rows, plan.columns);

    // Dimensions are dealt out to threads: f(side, its column, whether it is of values, its gates). Those of a thread's
    // first one are in `gates`, for the chunk from `now` on.
    float gates[kSteps];
    const int items = plan.key_rows + plan.columns;
    const auto load_item = [&](float(&to)[kSteps], int item, int now) {
        if (item < plan.key_rows)
            load_gates<T>(to, p.log_key_decay, batch, head, item, keys, now, time);
        else if (item < items)
            load_gates<T>(to, p.log_value_decay, batch, head, first + item - plan.key_rows, values, now, time);
    };
    const auto each_column = [&](int now, auto f) {
        for (int item = threadIdx.x; item < items; item += kDecayThreads) {
            float its_gates[kSteps];
#pragma unroll
            for (int t = 0; t < kSteps; ++t) its_gates[t] = gates[t];
            if (item >= kDecayThreads) load_item(its_gates, item, now);
            if (item < plan.key_rows)
                f(of_keys, item, false, its_gates);
            else
                f(of_values, item - plan.key_rows, true, its_gates);
        }
    };

    // On the way to a chunk its steps' queries and gradients are not there yet: keys and values come into either place
    // in turn, the next while a chunk is worked on.
    const auto early_of = [](const Side<T>& side, int place) { return side.early.either(side.late, place); };
    const auto fetch = [&](int now, int place) {
        copy_rows(early_of(of_keys, place), Head<T>(p.k, batch, head, 0, keys), kSteps, plan.key_rows, now, time);
        copy_rows(early_of(of_values, place), Head<T>(p.v, batch, head, first, values), kSteps, plan.columns, now, time);
    };
    const int64_t march = segments.index(segment, head_index);
    for (int n = end - 1; n >= begin; --n) {
        const int start = n * kSteps, base = start / checkpoints.interval * checkpoints.interval;
        // The chunk after it was of the same interval: on the march to that one states have been put down.
        const bool marched = n + 1 < end && (start + kSteps) % checkpoints.interval != 0;
        int now = start;
        if constexpr (Outputs)
            now = checkpoints.load(state, part, p.initial_state, p.states, head_index, march, base, start, marched);
        int place = (start - now) / kSteps & 1;
        if constexpr (Outputs) fetch(now, place);
        for (;; now += kSteps, place ^= 1) {
            if (now == start) {
                copy_rows(of_keys.late, Head<T>(p.q, batch, head, 0, keys), kSteps, plan.key_rows, now, time);
                copy_rows(of_values.late, Head<T>(p.d_out, batch, head, first, values), kSteps, plan.columns, now, time);
            }
            copies_commit();
            load_item(gates, threadIdx.x, now);
            if (Outputs && !marched) checkpoints.put_down(state, part, march, base, now);
            copies_wait<0>();
            __syncthreads();
            if (now == start) break;
            fetch(now + kSteps, place ^ 1);
            each_column(now, [&](const Side<T>& side, int column, bool, const float(&its_gates)[kSteps]) {
                float early[kSteps];
                load_column(early, early_of(side, place), column);
                write_written(side.written, early, its_gates, column);
                side.total[column] = product_of(its_gates);
            });
            __syncthreads();
            pass_chunk<kPasses>(state, of_keys.total, of_values.total, of_keys.written, of_values.written, plan,
                                [](Tile&) {});
        }

        if constexpr (Outputs) state.copy_to(shared.state, plan.key_rows, plan.columns);
        each_column(start, [&](const Side<T>& side, int column, bool, const float(&its_gates)[kSteps]) {
            float late[kSteps];
            load_column(late, side.late, column);
            write_reading(side.reading, late, its_gates, column);
            side.total[column] = product_of(its_gates);
            if constexpr (Outputs) {
                float early[kSteps];
                load_column(early, side.early, column);
                write_levels(side.levels, late, early, its_gates, column);
                write_written(side.written, early, its_gates, column);
            }
        });
        __syncthreads();
        if constexpr (Outputs) {
            Deal deal;
            const auto weigh = [&](const Side<T>& from, const Side<T>& to, int columns) {
                deal.each(kLevels + 1, [&](int level) {
                    weigh_pairs<kPasses, true>(to.weights, from.late, from.early, from.levels, columns, level);
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
            const int steps = min(kSteps, time - start);
            each_column(start, [&](const Side<T>& side, int column, bool of_value, const float(&its_gates)[kSteps]) {
                const int parts = of_value ? plan.key_rows / kTileRows : (plan.columns + kTileColumns - 1) / kTileColumns;
                float d_log[kSteps];
                differentiate_column(side, its_gates, column, parts, d_log);
                const int dimension = of_value ? first + column : column;
                if (dimension >= (of_value ? values : keys)) return;
                const bool add = !of_value && block > 0;
                const auto store = [&](const Sequence& x, const Matrix<float>& from) {
                    store_column<T>(x, from, column, steps, batch, start, head, dimension, add);
                };
                if (!of_value) store(p.dq, side.reads);
                store(of_value ? p.dv : p.dk, side.writes);
                write_column(side.reads, d_log, column);
                store(of_value ? p.d_log_value_decay : p.d_log_key_decay, side.reads);
            });
        } else {
            key_logs.add(p.log_key_decay, batch, head, 0, keys, plan.key_rows, start, time);
            value_logs.add(p.log_value_decay, batch, head, first, values, plan.columns, start, time);
        }
        pass_chunk<kPasses>(d_state, of_keys.total, of_values.total, of_keys.reading, of_values.reading, plan,
                            [&](Tile& tile) {
                                if constexpr (Outputs) write_tile(tile, shared.d_state);
                            });
        __syncthreads();
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

template <typename T>
Plan plan_of(const Sizes& sizes, int limit) {
    return find_decay_plan(
        sizes, limit, [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; },
        [](const Plan&) { return kResident; });
}

Segments segments_of(const Plan& plan, const Sizes& sizes) {
    return find_segments(plan, sizes, 1, sizes.key_dim + sizes.value_dim);
}

template <typename T>
cudaError_t run(const DiagonalBackward& p, cudaStream_t stream) {
    const Plan plan = plan_of<T>(p.sizes, shared_memory_limit());
    if (plan.chunk == 0) return cudaErrorInvalidValue;
    Segments segments = segments_of(plan, p.sizes);
    Checkpoints checkpoints = find_checkpoints(plan, p.sizes, segments);
    checkpoints.place(p.workspace, segments);
    const dim3 block(plan.threads);
    return with_places(plan, [&](auto places) {
        constexpr int kPlaces = decltype(places)::value;
        cudaError_t error = cudaSuccess;
        if (segments.count > 1) {
            segments.place(p.workspace);
            const dim3 grid(segments.heads * plan.blocks, segments.count - 1);
            error = launch(decays_backward<T, false, kPlaces>, grid, block, plan.shared, stream, p, plan, segments,
                           checkpoints, 0);
            if (error == cudaSuccess)
                error = launch_carry_decayed<float>(segments.count, segments.states, segments.passed, p.sizes,
                                                    p.d_final_state, true, stream);
        }
        const dim3 grid(segments.heads, segments.count);
        for (int i = 0; i < plan.blocks && error == cudaSuccess; ++i)
            error = launch(decays_backward<T, true, kPlaces>, grid, block, plan.shared, stream, p, plan, segments,
                           checkpoints, i);
        return error;
    });
}

template <typename T>
size_t workspace(const DiagonalBackward& p) {
    const Plan plan = plan_of<T>(p.sizes, shared_memory_limit());
    const Segments segments = segments_of(plan, p.sizes);
    return segments.bytes() + find_checkpoints(plan, p.sizes, segments).bytes;
}

}  // namespace

ChunkedPlan chunked_plan_decays_backward(const Sizes& sizes, int32_t dtype, int limit) {
    return with_type(dtype, ChunkedPlan{}, [&](auto zero) {
        const Plan plan = plan_of<decltype(zero)>(sizes, limit);
        return describe(plan, segments_of(plan, sizes));
    });
}

cudaError_t chunked_decays_backward(const DiagonalBackward& p, cudaStream_t stream) {
    return with_type(p.v.dtype, cudaErrorInvalidValue, [&](auto zero) { return run<decltype(zero)>(p, stream); });
}

size_t chunked_decays_backward_workspace(const DiagonalBackward& p) {
    return with_type(p.v.dtype, size_t{0}, [&](auto zero) { return workspace<decltype(zero)>(p); });
}

}  // namespace fairseq_fastweights
