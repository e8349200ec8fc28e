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
#include <type_traits>

#include "choice.h"
#include "chunked_checkpoints.cuh"
#include "chunked_decays.cuh"
#include "chunked_decays.h"

namespace fairseq_fastweights {
namespace {

constexpr int kResident = 1;  // blocks on a multiprocessor

template <typename T>
struct Layout {
    Matrix<T> q, k, v, d_out;
    Matrix<float> key_gates, value_gates;
    Matrix<float> key_reads;      // S_0 (dy_t * Z_t0), then q_t * F_t0
    Matrix<float> key_writes;     // dS (v_s * Z_es), then k_s * F_es
    Matrix<float> value_reads;    // dy_t * Z_t0
    Matrix<float> value_writes;   // v_s * Z_es
    Matrix<float> reads, writes;  // S_0^T (q_t * F_t0), dS^T (k_s * F_es)
    Matrix<float> dv, dz;         // of the chunk's own pairs
    Matrix<float> state, d_state, scores, d_scores;
    float *key_total, *value_total;
    float* passing;  // parts of the column sums of (F_e0 Z_e0^T) * S_0 * dS
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver.matrix<T>(kSteps, plan.key_rows)),
          k(carver.matrix<T>(kSteps, plan.key_rows)),
          v(carver.matrix<T>(kSteps, plan.columns)),
          d_out(carver.matrix<T>(kSteps, plan.columns)),
          key_gates(carver.matrix<float>(kSteps, plan.key_rows)),
          value_gates(carver.matrix<float>(kSteps, plan.columns)),
          key_reads(carver.matrix<float>(kSteps, plan.key_rows)),
          key_writes(carver.matrix<float>(kSteps, plan.key_rows)),
          value_reads(carver.matrix<float>(kSteps, plan.columns)),
          value_writes(carver.matrix<float>(kSteps, plan.columns)),
          reads(carver.matrix<float>(kSteps, plan.columns)),
          writes(carver.matrix<float>(kSteps, plan.columns)),
          dv(carver.matrix<float>(kSteps, plan.columns)),
          dz(carver.matrix<float>(kSteps, plan.columns)),
          state(carver.matrix<float>(plan.key_rows, plan.columns)),
          d_state(carver.matrix<float>(plan.key_rows, plan.columns)),
          scores(carver.matrix<float>(kSteps, kSteps)),
          d_scores(carver.matrix<float>(kSteps, kSteps)),
          key_total(carver.take<float>(plan.key_rows)),
          value_total(carver.take<float>(plan.columns)),
          passing(carver.take<float>(kDecayThreads)) {
        bytes = carver.used;
    }
};

// One column's share of sum over s <= t of c(t, s) <a_t, b_s decayed from s to t>: the gradients of b and of the logs of
// the gates g.
__device__ __forceinline__ void differentiate_pairs(const Matrix<float>& c, const float (&a)[kSteps],
                                                    const float (&b)[kSteps], const float (&g)[kSteps],
                                                    float (&db)[kSteps], float (&dg)[kSteps]) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) dg[t] = 0.0f;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        float met[kSteps];  // what passes through the steps after s
        float left = b[s];
#pragma unroll
        for (int t = s + 1; t < kSteps; ++t) {
            left *= g[t];
            met[t] = c(t, s) * left * a[t];
        }
        float sum = 0.0f, run = 0.0f;
#pragma unroll
        for (int t = kSteps - 1; t > s; --t) {
            sum = (sum + c(t, s) * a[t]) * g[t];
            run += met[t];
            dg[t] += run;
        }
        db[s] = sum + c(s, s) * a[s];
    }
}

// The first `steps` rows of a column to column `dim` of a gradient's steps from `start` on; with `add`, onto what is
// there.
template <typename T>
__device__ __forceinline__ void store_column(const Sequence& x, const Matrix<float>& from, int column, int steps,
                                             int batch, int start, int head, int dim, bool add) {
    if (x.data == nullptr) return;
    const int64_t first = batch * x.batch + start * x.time + head * x.head + dim;
    const auto store = [&](auto* to) {
        using To = std::remove_pointer_t<decltype(to)>;
#pragma unroll 1
        for (int t = 0; t < steps; ++t, to += x.time) {
            const float value = from(t, column);
            *to = narrow<To>(add ? value + widen<float>(*to) : value);
        }
    };
    // Logs of decays may be float32 beside inputs of 16 bits.
    if (x.dtype == kFloat32)
        store(static_cast<float*>(x.data) + first);
    else
        store(static_cast<T*>(x.data) + first);
}

// `Outputs` true: all gradients, of block `value_block` of each head. `Outputs` false: only what a segment makes of a
// gradient of zeros.
template <typename T, bool Outputs>
__global__ void __launch_bounds__(kDecayThreads, kResident)
    decays_backward(const DiagonalBackward p, const Plan plan, const Segments segments, const Checkpoints checkpoints,
                    const int value_block) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T> shared(Carver(memory), plan);
    const Matrix<T>&q = shared.q, &k = shared.k, &v = shared.v, &d_out = shared.d_out;
    const Matrix<float>&state = shared.state, &d_state = shared.d_state;
    const Matrix<float>&key_gates = shared.key_gates, &value_gates = shared.value_gates;

    const int head_index = Outputs ? blockIdx.x : blockIdx.x / plan.blocks;
    const int block = Outputs ? value_block : blockIdx.x % plan.blocks, first = block * plan.columns;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int keys = p.sizes.key_dim, values = p.sizes.value_dim, time = p.sizes.time;
    const int chunks = (time + kSteps - 1) / kSteps;
    const StatePart part{keys, values, first, plan.columns, plan.key_rows};
    const auto q_of = [&](int t, int i) { return q.get(t, i); };
    const auto k_of = [&](int s, int i) { return k.get(s, i); };
    const auto v_of = [&](int s, int j) { return v.get(s, j); };
    const auto d_out_of = [&](int t, int j) { return d_out.get(t, j); };
    const auto no_rows = [](int, int) { return 0.0f; };
    const Matrix<float> nowhere{nullptr, 0};

    // Nobody asks what the first segment makes of zeros: no segment comes before it.
    const int segment = Outputs ? blockIdx.y : blockIdx.y + 1, begin = segment * segments.chunks;
    const int end = min(chunks, begin + segments.chunks);
    PassedLogs key_logs, value_logs;  // of `Outputs` false
    if (Outputs && segments.count > 1)
        part.load(d_state, segments.states, segments.index(segment, head_index));
    else
        part.load(d_state, Outputs ? static_cast<const float*>(p.d_final_state) : nullptr, head_index);
    // On the way to a chunk its steps' queries and gradients are not there yet: keys and values come into either place
    // in turn, the next while a chunk is worked on.
    const auto keys_of = [&](int place) { return k.either(q, place); };
    const auto values_of = [&](int place) { return v.either(d_out, place); };
    const auto fetch = [&](int now, int place) {
        copy_rows(keys_of(place), Head<T>(p.k, batch, head, 0, keys), kSteps, plan.key_rows, now, time);
        copy_rows(values_of(place), Head<T>(p.v, batch, head, first, values), kSteps, plan.columns, now, time);
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
                copy_rows(q, Head<T>(p.q, batch, head, 0, keys), kSteps, plan.key_rows, now, time);
                copy_rows(d_out, Head<T>(p.d_out, batch, head, first, values), kSteps, plan.columns, now, time);
            }
            copies_commit();
            if (Outputs && !marched) checkpoints.put_down(state, part, march, base, now);
            load_gates(key_gates, p.log_key_decay, batch, head, 0, keys, plan.key_rows, now, time);
            load_gates(value_gates, p.log_value_decay, batch, head, first, values, plan.columns, now, time);
            copies_wait<0>();
            __syncthreads();
            if (now == start) break;
            fetch(now + kSteps, place ^ 1);
            const Matrix<T> passed_k = keys_of(place), passed_v = values_of(place);
            decay_rows(nowhere, no_rows, shared.key_writes, [&](int s, int i) { return passed_k.get(s, i); }, key_gates,
                       shared.key_total, plan.key_rows);
            decay_rows(nowhere, no_rows, shared.value_writes, [&](int s, int j) { return passed_v.get(s, j); },
                       value_gates, shared.value_total, plan.columns);
            __syncthreads();
            pass_chunk<kPasses>(state, shared.key_total, shared.value_total, shared.key_writes, shared.value_writes,
                                plan);
            __syncthreads();
        }

        if constexpr (Outputs) {
            score_pairs(shared.scores, q, k, key_gates, plan.key_rows);
            score_pairs(shared.d_scores, d_out, v, value_gates, plan.columns);
            decay_rows(shared.value_reads, d_out_of, shared.value_writes, v_of, value_gates, shared.value_total,
                       plan.columns);
            __syncthreads();
            for_each_tile(kSteps, plan.key_rows, [&](Tile& tile) {
                multiply<kPasses>(
                    tile, 0, plan.columns, [&](int t, int j) { return shared.value_reads(t, j); },
                    [&](int j, int i) { return state(i, j); });
                write_tile(tile, shared.key_reads);
            });
            for_each_tile(kSteps, plan.key_rows, [&](Tile& tile) {
                multiply<kPasses>(
                    tile, 0, plan.columns, [&](int s, int j) { return shared.value_writes(s, j); },
                    [&](int j, int i) { return d_state(i, j); });
                write_tile(tile, shared.key_writes);
            });
            __syncthreads();
            // A dimension's gradient on its way out lies where its gates were, which are in registers by then: stores of 16
            // steps side by side would take as many addresses.
            const int steps = min(kSteps, time - start);
            const auto store_key = [&](const Sequence& x, int i) {
                if (i < keys) store_column<T>(x, key_gates, i, steps, batch, start, head, i, block > 0);
            };
            // A dimension to a thread: of keys all that there is to their gradients, of values the chunk's own pairs.
            for (int item = threadIdx.x; item < plan.key_rows + plan.columns; item += blockDim.x) {
                float a[kSteps], b[kSteps], g[kSteps], db[kSteps], dg[kSteps];
                if (item >= plan.key_rows) {
                    const int j = item - plan.key_rows;
#pragma unroll
                    for (int t = 0; t < kSteps; ++t) {
                        a[t] = d_out.get(t, j);
                        b[t] = v.get(t, j);
                        g[t] = value_gates(t, j);
                    }
                    differentiate_pairs(shared.scores, a, b, g, db, dg);
#pragma unroll
                    for (int t = 0; t < kSteps; ++t) {
                        shared.dv(t, j) = db[t];
                        shared.dz(t, j) = dg[t];
                    }
                    continue;
                }
                const int i = item;
#pragma unroll
                for (int t = 0; t < kSteps; ++t) {
                    b[t] = k.get(t, i);
                    g[t] = key_gates(t, i);
                }
                float product = 1.0f;
#pragma unroll
                for (int t = 0; t < kSteps; ++t) {
                    float sum = 0.0f;
#pragma unroll
                    for (int s = 0; s <= t; ++s) {
                        if (s > 0) sum *= g[s];
                        sum += shared.d_scores(t, s) * b[s];
                    }
                    product *= g[t];
                    key_gates(t, i) = sum + product * shared.key_reads(t, i);
                }
                store_key(p.dq, i);
                shared.key_total[i] = product;
#pragma unroll
                for (int t = 0; t < kSteps; ++t) a[t] = q.get(t, i);
                differentiate_pairs(shared.d_scores, a, b, g, db, dg);
                product = 1.0f;
#pragma unroll
                for (int t = 0; t < kSteps; ++t) a[t] *= product *= g[t];  // q_t * F_t0
                float passing = 0.0f;
                // Each thread from a column of its own on: all in one column would read from few banks.
                for (int column = 0, j = i % plan.columns; column < plan.columns; ++column) {
                    passing += state(i, j) * shared.value_total[j] * d_state(i, j);
                    if (++j == plan.columns) j = 0;
                }
                passing *= product;
                product = 1.0f;
#pragma unroll
                for (int s = kSteps - 1; s >= 0; --s) {
                    b[s] *= product;  // k_s * F_es
                    db[s] += product * shared.key_writes(s, i);
                    product *= g[s];
                }
                float run = 0.0f;
#pragma unroll
                for (int t = kSteps - 1; t >= 0; --t) dg[t] += run += a[t] * shared.key_reads(t, i);
                run = passing;
#pragma unroll
                for (int s = 0; s < kSteps; ++s) {
                    dg[s] += run;
                    run += b[s] * shared.key_writes(s, i);
                    shared.key_reads(s, i) = a[s];
                    shared.key_writes(s, i) = b[s];
                }
#pragma unroll
                for (int t = 0; t < kSteps; ++t) key_gates(t, i) = db[t];
                store_key(p.dk, i);
#pragma unroll
                for (int t = 0; t < kSteps; ++t) key_gates(t, i) = dg[t];
                store_key(p.d_log_key_decay, i);
            }
            __syncthreads();
            for_each_tile(kSteps, plan.columns, [&](Tile& tile) {
                multiply<kPasses>(
                    tile, 0, plan.key_rows, [&](int t, int i) { return shared.key_reads(t, i); },
                    [&](int i, int j) { return state(i, j); });
                write_tile(tile, shared.reads);
            });
            for_each_tile(kSteps, plan.columns, [&](Tile& tile) {
                multiply<kPasses>(
                    tile, 0, plan.key_rows, [&](int s, int i) { return shared.key_writes(s, i); },
                    [&](int i, int j) { return d_state(i, j); });
                write_tile(tile, shared.writes);
            });
            const int slices = kDecayThreads / plan.columns;
            if (static_cast<int>(threadIdx.x) < slices * plan.columns) {
                const int j = threadIdx.x % plan.columns;
                float sum = 0.0f;
                for (int i = threadIdx.x / plan.columns; i < plan.key_rows; i += slices)
                    sum += state(i, j) * shared.key_total[i] * d_state(i, j);
                shared.passing[threadIdx.x] = sum;
            }
            __syncthreads();
            for (int j = threadIdx.x; j < min(plan.columns, values - first); j += blockDim.x) {
                float gate[kSteps], dz[kSteps];
                float run = 0.0f;
#pragma unroll
                for (int t = kSteps - 1; t >= 0; --t) {
                    gate[t] = value_gates(t, j);
                    dz[t] = shared.dz(t, j) + (run += shared.value_reads(t, j) * shared.reads(t, j));
                }
                run = 0.0f;
                for (int slice = 0; slice < slices; ++slice) run += shared.passing[slice * plan.columns + j];
                run *= shared.value_total[j];
#pragma unroll
                for (int s = 0; s < kSteps; ++s) {
                    dz[s] += run;
                    run += shared.value_writes(s, j) * shared.writes(s, j);
                }
                float product = 1.0f;
#pragma unroll
                for (int s = kSteps - 1; s >= 0; --s) {
                    shared.dv(s, j) += product * shared.writes(s, j);
                    value_gates(s, j) = dz[s];
                    product *= gate[s];
                }
                store_column<T>(p.dv, shared.dv, j, steps, batch, start, head, first + j, false);
                store_column<T>(p.d_log_value_decay, value_gates, j, steps, batch, start, head, first + j, false);
            }
        } else {
            key_logs.add(p.log_key_decay, batch, head, 0, keys, plan.key_rows, start, time);
            value_logs.add(p.log_value_decay, batch, head, first, values, plan.columns, start, time);
            decay_rows(shared.key_reads, q_of, nowhere, no_rows, key_gates, shared.key_total, plan.key_rows);
            decay_rows(shared.value_reads, d_out_of, nowhere, no_rows, value_gates, shared.value_total, plan.columns);
            __syncthreads();
        }
        pass_chunk<kPasses>(d_state, shared.key_total, shared.value_total, shared.key_reads, shared.value_reads, plan);
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
    return find_decay_plan(sizes, limit, kResident,
                           [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; });
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
    cudaError_t error = cudaSuccess;
    if (segments.count > 1) {
        segments.place(p.workspace);
        const dim3 grid(segments.heads * plan.blocks, segments.count - 1);
        error = launch(decays_backward<T, false>, grid, block, plan.shared, stream, p, plan, segments, checkpoints, 0);
        if (error == cudaSuccess)
            error = launch_carry_decayed<float>(segments.count, segments.states, segments.passed, p.sizes,
                                                p.d_final_state, true, stream);
    }
    const dim3 grid(segments.heads, segments.count);
    for (int i = 0; i < plan.blocks && error == cudaSuccess; ++i)
        error = launch(decays_backward<T, true>, grid, block, plan.shared, stream, p, plan, segments, checkpoints, i);
    return error;
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
