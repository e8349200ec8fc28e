// The forward pass of the delta rule and of the sum rule, chunks side by side, in the notation of system.cuh:
//
//   local    of all chunks at once: T = (I + B G)^-1, and gates                       (local.cu)
//   walk     chunk after chunk: states and U                                          (walk.cu)
//   outputs  of all chunks at once: Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U         (here)
//
// With decays of keys Q * F_.0 and the pairs, in the notation of decays.cuh, are from the local stage. Where nothing
// corrects, U is diag(w) V with the strengths of writes; they go with the pairs, and V is taken as it is. With decays of values
// what is read and written passes them from block to block, and within a block step by step, a value dimension to a thread.
#include "blocks.cuh"
#include "rows.cuh"
#include "stages.cuh"

namespace fairseq_fastweights {
namespace {

// Without decays by dimension: a part of the keys and values, in `Width` times 16 columns of keys.
template <typename T, bool Corrects, bool Gated, int Width>
struct OutputParts {
    Rows<T, 16 * Width> q, k;
    Rows<Factor<T>, 16 * Width> state;  // transposed
    WrittenRows<T, Corrects> update;
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ OutputParts(Carver carver, int values)
        : q(carver, kSide), k(carver, kSide), state(carver, values), update(carver, rows_of_writes<Corrects>(values)) {
        if (Gated) steps = ChunkSteps<Gated>(carver);
        bytes = carver.used;
    }
};

template <typename T, bool Corrects, bool Gated, int Width>
__global__ void __launch_bounds__(kStripThreads, sizeof(T) == 4 ? 2
                                                 : Gated        ? 3
                                                                : 4)
    outputs(const RuleForward p, const Slice<Factor<T>> slice, const int value_part) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = 16 * Width;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const OutputParts<T, Corrects, Gated, Width> shared(Carver(memory), value_part);
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, p.sizes);
    const int start = at.start, time = p.sizes.time, row = own_row();
    const auto copy_keys = [&](const Rows<T, kKeys>& to, const Sequence& x, int key) {
        copy_steps(to, Head<T>(x, at.batch, at.head, key, p.sizes.key_dim), start, time);
    };
    const auto copy_values = [&](int key, int value) {
        const int values = min(value_part, slice.columns - value);
        copy_pieces(shared.state, slice.state_of(slice.states, at.local, at.n) + value * slice.key_rows + key,
                    slice.key_rows, values, values, slice.key_rows - key);
        if (key == 0) copy_writes<Corrects>(shared.update, slice, at, p.v, p.sizes, value, values);
    };

    // The first parts of all are on their way at once, those that are needed first before the others.
    copy_keys(shared.q, p.q, 0);
    copy_keys(shared.k, p.k, 0);
    if constexpr (Gated) steps.copy(slice.steps_of(at.local, at.n));
    copies_commit();
    copy_values(0, 0);
    copies_commit();
    Strip<kSide / 8> scores;
    scores.clear();
    for (int key = 0; key < slice.key_rows; key += kKeys) {
        if (key > 0) {
            __syncthreads();
            copy_keys(shared.q, p.q, key);
            copy_keys(shared.k, p.k, key);
            copies_commit();
            copies_wait<0>();
        } else {
            copies_wait<1>();
        }
        __syncthreads();
        multiply_rows<kPasses, false, false>(scores, shared.q, row, shared.k, Width);
    }
    steps.template keep_pairs<true>(scores, row);
    if constexpr (Gated && !Corrects) scores.scale(steps.strengths());
    for (int value = 0; value < slice.columns; value += value_part) {
        const int values = min(value_part, slice.columns - value);
        Strip<kWidest / 8> out;
        out.clear();
        for (int key = 0; key < slice.key_rows; key += kKeys) {
            const bool there = slice.key_rows <= kKeys;  // all keys
            if (key > 0 || value > 0 || !there) {
                __syncthreads();
                if (!there) copy_keys(shared.q, p.q, key);
                if (key > 0 || value > 0) copy_values(key, value);
                copies_commit();
            }
            copies_wait<0>();
            __syncthreads();
            each_columns(out, values / 16, [&](auto& part, int first) {
                multiply_rows<kPasses, false, false>(part, shared.q, row, shared.state.from(first, 0), Width);
            });
        }
        if constexpr (Gated) out.each([&](int, int j, float& x) { x *= steps.from_start(row + j); });
        each_columns(out, values / 16, [&](auto& part, int first) {
            multiply_kept<kPasses, !Corrects, Part::kAll, sizeof(Written<T, Corrects>) == 4>(
                part, scores, Corrects ? shared.update.from(first, 0) : shared.update.from(0, first));
        });
        out.store_rows(Head<T>(p.out, at.batch, at.head, value, p.sizes.value_dim), values, start + row, time);
    }
}

template <typename T, bool Corrects, bool Gated, bool Decays, bool Values>
struct OutputLayout {
    size_t bytes;
    OutputLayout(const Carver& carver, int keys, int values)
        : bytes(with_width(keys, [&](auto width) {
              return OutputParts<T, Corrects, Gated, decltype(width)::value>(carver, values).bytes;
          })) {}
};

// With them: pairs, and queries with the decays from the chunk's start, are from the local stage.
template <typename T, bool Corrects, bool Gated, bool Values>
struct OutputLayout<T, Corrects, Gated, true, Values> {
    Matrix<T> q;
    Matrix<Factor<T>> state;
    Pairs<T> scores;
    Matrix<Written<T, Corrects>> update;
    BlockValues<T> values;
    size_t bytes;

    __host__ __device__ OutputLayout(Carver carver, int keys, int value_columns)
        : q(carver.matrix<T>(kSide, keys)), state(carver.matrix<Factor<T>>(value_columns, keys)),
          scores(carver, kSide, kSide), update(matrix_of_writes<T, Corrects>(carver, value_columns)) {
        if (Values) values = BlockValues<T>(carver, value_columns);
        bytes = carver.used;
    }
};

template <typename T, bool Corrects, bool Values>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 && !Values ? 3 : 2)
    decayed_outputs(const RuleForward p, const Sequence queries, const Slice<Factor<T>> slice, const int key_part,
                    const int value_part) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const OutputLayout<T, Corrects, false, true, Values> shared(Carver(memory), key_part, value_part);
    const Place at(slice, p.sizes);
    const int start = at.start, time = p.sizes.time;
    const auto copy_queries = [&](int key) {
        copy_steps(shared.q, Head<T>(queries, at.batch, at.head, key, p.sizes.key_dim),
                   min(key_part, slice.key_rows - key), start, time);
    };
    const auto copy_values = [&](int key, int value) {
        const int keys = min(key_part, slice.key_rows - key), values = min(value_part, slice.columns - value);
        copy_found(shared.state, slice.state_of(slice.states, at.local, at.n) + value * slice.key_rows + key,
                   slice.key_rows, values, keys);
        if (key == 0) copy_writes<Corrects>(shared.update, slice, at, p.v, p.sizes, value, values);
    };

    const bool all_keys = slice.key_rows <= key_part;
    copy_pairs(shared.scores, slice.scores, slice.rest, slice.index(at.local, at.n));
    if (all_keys) copy_queries(0);
    copy_values(0, 0);
    copies_commit();
    for (int value = 0; value < slice.columns; value += value_part) {
        const int values = min(value_part, slice.columns - value);
        Tile out = own_tile(values);
        for (int key = 0; key < slice.key_rows; key += key_part) {
            const int keys = min(key_part, slice.key_rows - key);
            __syncthreads();
            if (!all_keys) copy_queries(key);
            if (key > 0 || value > 0) copy_values(key, value);
            copies_commit();
            copies_wait<0>();
            __syncthreads();
            if (is_in(out, values)) multiply_stored<kPasses, false, true>(out, 0, keys, shared.q, shared.state);
        }
        const Head<T> to(p.out, at.batch, at.head, value, p.sizes.value_dim);
        if constexpr (Values) {
            shared.values.template add_writes<kPasses>(
                out, values, shared.update, shared.scores, [&](auto& logs, int b, int j) {
                    load_logs<T>(logs, p.log_value_decay, at.batch, at.head, value + j, p.sizes.value_dim,
                                 start + b * kSteps, time);
                });
            store_rows(to, shared.values.reads, kSide, values, start, time);
        } else if (is_in(out, values)) {
            shared.scores.template multiply<kPasses, false, Corrects>(out, 0, out.row + kTileRows, shared.update);
            store_tile(out, to, start, time);
        }
    }
}

template <typename T>
cudaError_t run_pass(const RuleForward& p, const WalkPlan& plan, cudaStream_t stream) {
    using F = Factor<T>;
    const Local local(p);
    unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
    return for_each_slice<F>(plan, p.sizes, workspace, [&](const Slice<F>& slice, size_t bytes) {
        cudaError_t error = launch_local<T>(local, plan.pass, slice, stream);
        if (error != cudaSuccess) return error;
        Walks<F> w = walks_of<T>(p, plan, slice);
        float* const last =
            nth_state(p.final_state, p.sizes, slice.first_head);  // also what the next slice starts from
        w.ends = {last, 1, 0};
        const int kept = kept_states(p.sizes);
        w.kept = kept > 0 ? nth_state(p.states, p.sizes, static_cast<int64_t>(slice.first_head) * kept) : nullptr;
        float* const first = slice.begin > 0 ? last : nth_state(p.initial_state, p.sizes, slice.first_head);
        error = launch_walk<T>(plan, w, first, workspace + bytes, stream);
        if (error != cudaSuccess) return error;
        const Sequence queries =
            plan.pass.decays ? slice.template sequence_of<T>(slice.queries, slice.key_rows, p.sizes) : p.q;
        return with_rule(plan.pass, [&](auto corrects, auto gated, auto decays, auto values) {
            const dim3 grid(slice.heads, slice.chunks);
            if constexpr (decays)
                return launch(decayed_outputs<T, corrects, values>, grid, dim3(kTileThreads), plan.last_shared, stream,
                              p, queries, slice, plan.key_part, plan.value_part);
            else
                return with_width(plan.key_part, [&](auto width) {
                    return launch(outputs<T, corrects, gated, width>, grid, dim3(kStripThreads), plan.last_shared,
                                  stream, p, slice, plan.value_part);
                });
        });
    });
}

cudaError_t run(const RuleForward& p, bool corrects, cudaStream_t stream) {
    return run_walked<OutputLayout>(p, pass_of(p, corrects, false), [&](const WalkPlan& plan, auto zero) {
        return run_pass<decltype(zero)>(p, plan, stream);
    });
}

}  // namespace

ChunkedPlan chunked_plan_forward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit) {
    return walked_plan<OutputLayout>(sizes, dtype, pass, limit);
}

extern "C" cudaError_t fastweights_diagonal_forward_chunked(const RuleForward* params, cudaStream_t stream) {
    return run(*params, false, stream);
}
extern "C" cudaError_t fastweights_delta_forward_chunked(const RuleForward* params, cudaStream_t stream) {
    return run(*params, true, stream);
}
extern "C" size_t fastweights_diagonal_forward_chunked_workspace(const RuleForward* params) {
    return walked_workspace<OutputLayout>(*params, pass_of(*params, false, false));
}
extern "C" size_t fastweights_delta_forward_chunked_workspace(const RuleForward* params) {
    return walked_workspace<OutputLayout>(*params, pass_of(*params, true, false));
}

}  // namespace fairseq_fastweights
