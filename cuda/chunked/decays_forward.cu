// The forward pass of decays by dimension, chunk-parallel: the equations are in decays.cuh.
#include "../choice.h"
#include "by_dimension.h"
#include "decays.cuh"
#include "launch.cuh"
#include "stages.h"

namespace fairseq_fastweights {
namespace {

template <typename T>
struct Layout {
    Matrix<T> q, k;
    Stages<T> v;  // of this chunk and the next
    Stages<T> levels;
    Matrix<T> reading_queries;  // q_t * F_t0
    Matrix<T> written_keys;     // k_s * F_es
    Matrix<T> written_values;   // v_s * Z_es
    Matrix<float> value_gates;
    Matrix<float> reads;    // S_0^T (q_t * F_t0), then the output on its way
    Matrix<float> weights;  // P_ts
    Matrix<Factor<T>> state;
    float *key_total, *value_total;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver.matrix<T>(kSteps, plan.key_rows)), k(carver.matrix<T>(kSteps, plan.key_rows)),
          v(carver, 2, kSteps, plan.columns), levels(carver, kLevels, kSteps, plan.key_rows),
          reading_queries(carver.matrix<T>(kSteps, plan.key_rows)),
          written_keys(carver.matrix<T>(kSteps, plan.key_rows)), written_values(carver.matrix<T>(kSteps, plan.columns)),
          value_gates(carver.matrix<float>(kSteps, plan.columns)), reads(carver.matrix<float>(kSteps, plan.columns)),
          weights(carver.matrix<float>(kSteps, kSteps, 0)),
          state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns, 8)), key_total(carver.take<float>(plan.key_rows)),
          value_total(carver.take<float>(plan.columns)) {
        bytes = carver.used;
    }
};

// `Outputs` false: only what a segment makes of a state of zeros.
template <typename T, bool Outputs, int Places>
__global__ void __launch_bounds__(kDecayThreads, forward_blocks(Places))
    decays_forward(const RuleForward p, const Plan plan, const Segments segments) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T> shared(Carver(memory), plan);

    const int head_index = blockIdx.x / plan.blocks, first = blockIdx.x % plan.blocks * plan.columns;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int keys = p.sizes.key_dim, values = p.sizes.value_dim, time = p.sizes.time;
    const int chunks = (time + kSteps - 1) / kSteps, kept = kept_states(p.sizes);
    const StatePart part{keys, values, first, plan.columns, plan.key_rows};

    const int segment = blockIdx.y, begin = segment * segments.chunks, end = min(chunks, begin + segments.chunks);
    // Found anew at each use: kept, these would hold some 20 registers.
    const auto rows_of = [&](const Sequence& x, bool of_value) {
        return Head<T>(x, opaque(batch), opaque(head), of_value ? first : 0, of_value ? values : keys);
    };

    // Dimensions are dealt out to threads, those of values first. The gates of a thread's first one are in `gates`, for
    // the chunk that is worked on; or their logs, from when that is on its way.
    float gates[kSteps];
    const int items = plan.columns + plan.key_rows;
    const auto load_item = [&](float (&logs)[kSteps], int item, int start) {
        const bool of_value = item < plan.columns;
        load_logs<T>(logs, either(p.log_key_decay, p.log_value_decay, of_value), opaque(batch), opaque(head),
                     of_value ? first + item : item - plan.columns, of_value ? values : keys, start, time);
    };
    const auto fetch = [&](int n) {
        const int start = n * kSteps;
        if constexpr (Outputs) copy_rows<StepWalk>(shared.q, rows_of(p.q, false), kSteps, plan.key_rows, start, time);
        copy_rows<StepWalk>(shared.k, rows_of(p.k, false), kSteps, plan.key_rows, start, time);
        copy_rows<StepWalk>(shared.v[n % 2], rows_of(p.v, true), kSteps, plan.columns, start, time);
        copies_commit();
        load_item(gates, opaque(static_cast<int>(threadIdx.x)), start);
    };
    PassedLogs passed_keys, passed_values;  // of `Outputs` false
    StateTiles<Places> state;
    if (Outputs && segments.count > 1)
        part.load(state, segments.states, segments.index(segment, head_index));
    else
        part.load(state, Outputs ? static_cast<const float*>(p.initial_state) : nullptr, head_index);
    if constexpr (Outputs) state.copy_to(shared.state, plan.key_rows, plan.columns);
    fetch(begin);
    for (int n = begin; n < end; ++n) {
        const int start = n * kSteps, thread = threadIdx.x;
        const Matrix<T> v = shared.v[n % 2];
        exponentiate(gates);
        copies_wait<0>();
        __syncthreads();
        for (int item = thread; item < items; item += kDecayThreads) {
            float early[kSteps];
            if (item >= kDecayThreads) {
                load_item(gates, item, start);
                exponentiate(gates);
            }
            if (item < plan.columns) {
                load_column(early, v, item);
                write_column(shared.value_gates, gates, item);
                write_written(shared.written_values, early, gates, item);
                shared.value_total[item] = product_of(gates);
                continue;
            }
            const int i = item - plan.columns;
            if constexpr (Outputs) {
                write_operands(shared.q, shared.k, shared.levels, shared.reading_queries, shared.written_keys, gates,
                               i);
            } else {
                load_column(early, shared.k, i);
                write_written(shared.written_keys, early, gates, i);
            }
            shared.key_total[i] = product_of(gates);
        }
        if constexpr (Outputs) {
            if (start > 0 && kept > 0 && start % p.sizes.interval == 0)
                part.store(state, static_cast<float*>(p.states),
                           static_cast<int64_t>(head_index) * kept + start / p.sizes.interval - 1);
        } else {
            passed_keys.add(p.log_key_decay, batch, head, 0, keys, plan.key_rows, start, time);
            passed_values.add(p.log_value_decay, batch, head, first, values, plan.columns, start, time);
        }
        __syncthreads();
        if constexpr (Outputs) {
            Deal deal;
            deal.tiles(plan.columns, [&](Tile& tile) {
                multiply_stored<kPasses, false, false>(tile, 0, plan.key_rows, shared.reading_queries, shared.state);
                write_tile(tile, shared.reads);
            });
            deal.each(kLevels + 1, [&](int level) {
                weigh_pairs<kPasses, false>(shared.weights, shared.q, shared.k, shared.levels, shared.levels,
                                            plan.key_rows, level);
            });
            __syncthreads();
        }
        if (Outputs && thread < min(plan.columns, values - first)) {
            float early[kSteps];
            load_column(early, v, thread);
            load_column(gates, shared.value_gates, thread);
            write_outputs(shared.reads, early, gates, thread,
                          [&](float (&to)[4], int t, int s) { load_row(to, &shared.weights(t, s)); });
        }
        if (n + 1 < end) fetch(n + 1);
        pass_chunk<kPasses>(state, shared.key_total, shared.value_total, shared.written_keys, shared.written_values,
                            plan, [&](Tile& tile) {
                                if constexpr (Outputs) write_tile(tile, shared.state);
                            });
        if constexpr (Outputs) {
            __syncthreads();
            store_rows<StepWalk>(rows_of(p.out, true), shared.reads, kSteps, plan.columns, start, time, false);
        }
    }
    if constexpr (!Outputs) {
        const int64_t index = segments.index(segment, head_index);
        part.store(state, segments.states, index);
        float* const passed = segments.passed + index * (keys + values);
        if (first == 0) passed_keys.store(passed, 0, keys, plan.key_rows);
        passed_values.store(passed + keys, first, values, plan.columns);
    } else if (segment == segments.count - 1) {
        part.store(state, static_cast<float*>(p.final_state), head_index);
    }
}

struct DecaysForwardPass {
    static constexpr CostsOf kCosts{{3300, 5.6, 3, 3100, 61, 1.1}, {3800, 5.1, 17, 1600, 46, 0.89}};
    template <typename T, bool Outputs, int Places>
    static auto kernel() {
        return decays_forward<T, Outputs, Places>;
    }
    template <typename T>
    static Plan plan(const Sizes& sizes, const Device& device) {
        return find_decay_plan(
            sizes, device, [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; },
            [](const Plan& plan) { return plan.places() <= kMostPlaces ? forward_blocks(plan.places()) : 0; });
    }
    static Launches launches(const Plan& plan, const Sizes& sizes, int32_t dtype) {
        return {kCosts(dtype), false, plan.blocks, sizes.key_dim + sizes.value_dim};
    }
    static cudaError_t carry(const Segments& segments, const Sizes& sizes, const void* first, bool reverse,
                             cudaStream_t stream) {
        return launch_carry_decayed<float>(segments.count, segments.states, segments.passed, sizes, first, reverse,
                                           stream);
    }
};

}  // namespace

ChunkedPlan chunked_plan_decays_forward(const Sizes& sizes, int32_t dtype, bool of_values, int limit) {
    return faster_plan(walked_plan_forward(sizes, dtype, {false, false, true, of_values}, limit),
                       describe<DecaysForwardPass>(sizes, dtype, limit));
}

// True if a call's chunks are worked on side by side (outputs.cu).
static bool walks(const RuleForward& p) {
    const bool of_values = p.log_value_decay.data != nullptr;
    return chunked_plan_decays_forward(p.sizes, p.v.dtype, of_values, shared_memory_limit()).walk != 0;
}

cudaError_t chunked_decays_forward(const RuleForward& p, cudaStream_t stream) {
    return walks(p) ? walked_forward(p, false, stream) : run<DecaysForwardPass>(p, stream);
}

size_t chunked_decays_forward_workspace(const RuleForward& p) {
    return walks(p) ? walked_forward_workspace(p, false) : workspace<DecaysForwardPass>(p);
}

}  // namespace fairseq_fastweights
