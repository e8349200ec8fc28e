// The forward pass of decays by dimension, chunk-parallel: the equations are in chunked_decays.cuh.
#include "choice.h"
#include "chunked_decays.cuh"
#include "chunked_decays.h"

namespace fairseq_fastweights {
namespace {

constexpr int kResident = 2;  // blocks on a multiprocessor

template <typename T>
struct Layout {
    Matrix<T> q, k, v;
    Matrix<float> key_gates;       // then q * F_t0
    Matrix<float> written_keys;    // k * F_es
    Matrix<float> value_gates;
    Matrix<float> value_prefix;    // Z_t0
    Matrix<float> written_values;  // v * Z_es
    Matrix<float> inside;          // what is read of the chunk's own writes
    Matrix<float> state, scores;
    float *key_total, *value_total;
    size_t bytes;

    __host__ __device__ Layout(Carver carver, const Plan& plan)
        : q(carver.matrix<T>(kSteps, plan.key_rows)),
          k(carver.matrix<T>(kSteps, plan.key_rows)),
          v(carver.matrix<T>(kSteps, plan.columns)),
          key_gates(carver.matrix<float>(kSteps, plan.key_rows)),
          written_keys(carver.matrix<float>(kSteps, plan.key_rows)),
          value_gates(carver.matrix<float>(kSteps, plan.columns)),
          value_prefix(carver.matrix<float>(kSteps, plan.columns)),
          written_values(carver.matrix<float>(kSteps, plan.columns)),
          inside(carver.matrix<float>(kSteps, plan.columns)),
          // As in chunked_diagonal_forward.cu: an operand whose rows are the inner dimension.
          state{carver.take<float>(plan.key_rows * (plan.columns + 8)), plan.columns + 8},
          scores(carver.matrix<float>(kSteps, kSteps)),
          key_total(carver.take<float>(plan.key_rows)),
          value_total(carver.take<float>(plan.columns)) {
        bytes = carver.used;
    }
};

// `Outputs` false: only what a segment makes of a state of zeros.
template <typename T, bool Outputs>
__global__ void __launch_bounds__(kDecayThreads, kResident)
    decays_forward(const DiagonalForward p, const Plan plan, const Segments segments) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Layout<T> shared(Carver(memory), plan);
    const Matrix<T>&q = shared.q, &k = shared.k, &v = shared.v;
    const Matrix<float>&state = shared.state, &scores = shared.scores, &inside = shared.inside;

    const int head_index = blockIdx.x / plan.blocks, first = blockIdx.x % plan.blocks * plan.columns;
    const int batch = head_index / p.sizes.heads, head = head_index % p.sizes.heads;
    const int keys = p.sizes.key_dim, values = p.sizes.value_dim, time = p.sizes.time;
    const int chunks = (time + kSteps - 1) / kSteps, kept = kept_states(p.sizes);
    const StatePart part{keys, values, first, plan.columns, plan.key_rows};
    const auto no_rows = [](int, int) { return 0.0f; };

    const int segment = blockIdx.y, begin = segment * segments.chunks, end = min(chunks, begin + segments.chunks);
    PassedLogs passed_keys, passed_values;  // of `Outputs` false
    if (Outputs && segments.count > 1)
        part.load(state, segments.states, segments.index(segment, head_index));
    else
        part.load(state, Outputs ? static_cast<const float*>(p.initial_state) : nullptr, head_index);
    for (int n = begin; n < end; ++n) {
        const int start = n * kSteps;
        if constexpr (Outputs) copy_rows(q, Head<T>(p.q, batch, head, 0, keys), kSteps, plan.key_rows, start, time);
        copy_rows(k, Head<T>(p.k, batch, head, 0, keys), kSteps, plan.key_rows, start, time);
        copy_rows(v, Head<T>(p.v, batch, head, first, values), kSteps, plan.columns, start, time);
        copies_commit();
        load_gates(shared.key_gates, p.log_key_decay, batch, head, 0, keys, plan.key_rows, start, time);
        load_gates(shared.value_gates, p.log_value_decay, batch, head, first, values, plan.columns, start, time);
        copies_wait<0>();
        __syncthreads();
        if constexpr (Outputs) {
            if (start > 0 && kept > 0 && start % p.sizes.interval == 0)
                part.store(state, static_cast<float*>(p.states),
                           static_cast<int64_t>(head_index) * kept + start / p.sizes.interval - 1);
            score_pairs(scores, q, k, shared.key_gates, plan.key_rows);
            __syncthreads();
            for (int i = threadIdx.x; i < kSteps * plan.columns; i += blockDim.x) {
                const int t = i / plan.columns, j = i % plan.columns;
                float sum = 0.0f;
                for (int s = 0; s <= t; ++s) {
                    if (s > 0) sum *= shared.value_gates(s, j);
                    sum += scores(t, s) * v.get(s, j);
                }
                inside(t, j) = sum;
            }
        } else {
            passed_keys.add(p.log_key_decay, batch, head, 0, keys, plan.key_rows, start, time);
            passed_values.add(p.log_value_decay, batch, head, first, values, plan.columns, start, time);
        }
        const auto key_of = [&](int s, int i) { return k.get(s, i); };
        const auto value_of = [&](int s, int j) { return v.get(s, j); };
        if constexpr (Outputs) {
            decay_rows(shared.key_gates, [&](int t, int i) { return q.get(t, i); }, shared.written_keys, key_of,
                       shared.key_gates, shared.key_total, plan.key_rows);
            decay_rows(shared.value_prefix, [](int, int) { return 1.0f; }, shared.written_values, value_of,
                       shared.value_gates, shared.value_total, plan.columns);
        } else {
            const Matrix<float> nowhere{nullptr, 0};
            decay_rows(nowhere, no_rows, shared.written_keys, key_of, shared.key_gates, shared.key_total,
                       plan.key_rows);
            decay_rows(nowhere, no_rows, shared.written_values, value_of, shared.value_gates, shared.value_total,
                       plan.columns);
        }
        __syncthreads();
        if constexpr (Outputs) {
            for_each_tile(kSteps, plan.columns, [&](Tile& tile) {
                multiply<kPasses>(
                    tile, 0, plan.key_rows, [&](int t, int i) { return shared.key_gates(t, i); },
                    [&](int i, int j) { return state(i, j); });
                tile.each([&](int t, int j, float& value) {
                    value = shared.value_prefix(t, j) * value + inside(t, j);
                });
                store_tile(tile, Head<T>(p.out, batch, head, first, values), start, time);
            });
            __syncthreads();
        }
        pass_chunk<kPasses>(state, shared.key_total, shared.value_total, shared.written_keys, shared.written_values,
                            plan);
        __syncthreads();
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

template <typename T>
Plan plan_of(const Sizes& sizes, int limit) {
    return find_decay_plan(sizes, limit, kResident,
                           [](const Plan& plan) { return Layout<T>(Carver(nullptr), plan).bytes; });
}

Segments segments_of(const Plan& plan, const Sizes& sizes) {
    return find_segments(plan, sizes, plan.blocks, sizes.key_dim + sizes.value_dim);
}

template <typename T>
cudaError_t run(const DiagonalForward& p, cudaStream_t stream) {
    const Plan plan = plan_of<T>(p.sizes, shared_memory_limit());
    if (plan.chunk == 0) return cudaErrorInvalidValue;
    Segments segments = segments_of(plan, p.sizes);
    const unsigned blocks = static_cast<unsigned>(segments.heads) * plan.blocks;
    const dim3 block(plan.threads);
    if (segments.count > 1) {
        segments.place(p.workspace);
        cudaError_t error = launch(decays_forward<T, false>, dim3(blocks, segments.count - 1), block, plan.shared,
                                   stream, p, plan, segments);
        if (error == cudaSuccess)
            error = launch_carry_decayed<float>(segments.count, segments.states, segments.passed, p.sizes,
                                                p.initial_state, false, stream);
        if (error != cudaSuccess) return error;
    }
    return launch(decays_forward<T, true>, dim3(blocks, segments.count), block, plan.shared, stream, p, plan, segments);
}

template <typename T>
size_t workspace(const DiagonalForward& p) {
    return segments_of(plan_of<T>(p.sizes, shared_memory_limit()), p.sizes).bytes();
}

}  // namespace

ChunkedPlan chunked_plan_decays_forward(const Sizes& sizes, int32_t dtype, int limit) {
    return with_type(dtype, ChunkedPlan{}, [&](auto zero) {
        const Plan plan = plan_of<decltype(zero)>(sizes, limit);
        return describe(plan, segments_of(plan, sizes));
    });
}

cudaError_t chunked_decays_forward(const DiagonalForward& p, cudaStream_t stream) {
    return with_type(p.v.dtype, cudaErrorInvalidValue, [&](auto zero) { return run<decltype(zero)>(p, stream); });
}

size_t chunked_decays_forward_workspace(const DiagonalForward& p) {
    return with_type(p.v.dtype, size_t{0}, [&](auto zero) { return workspace<decltype(zero)>(p); });
}

}  // namespace fairseq_fastweights
