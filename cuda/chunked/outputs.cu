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
#include "stages.cuh"

namespace fairseq_fastweights {
namespace {

template <typename T, bool Corrects, bool Gated, bool Decays, bool Values>
struct OutputLayout {
    Matrix<T> q, k;           // of a part of the keys and values, as all here
    Matrix<Factor<T>> state;  // transposed
    Pairs<T, Decays> scores;
    Matrix<Written<T, Corrects>> update;
    ChunkSteps<Gated> steps;
    BlockValues<T> values;
    size_t bytes;

    __host__ __device__ OutputLayout(Carver carver, int keys, int value_columns)
        : q(carver.matrix<T>(kSide, keys)), k(carver.matrix<T>(Decays ? 0 : kSide, keys)),
          state(carver.matrix<Factor<T>>(value_columns, keys)), scores(carver, kSide, kSide),
          update(matrix_of_writes<T, Corrects>(carver, value_columns)), steps(carver) {
        if (Values) values = BlockValues<T>(carver, value_columns);
        bytes = carver.used;
    }
};

template <typename T, bool Corrects, bool Gated, bool Decays, bool Values>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 2 && !Values ? 3 : 2)
    outputs(const RuleForward p, const Sequence queries, const Slice<Factor<T>> slice, const int key_part,
            const int value_part) {
    using F = Factor<T>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const OutputLayout<T, Corrects, Gated, Decays, Values> shared(Carver(memory), key_part, value_part);
    const Place at(slice, p.sizes);
    const int batch = at.batch, head = at.head, start = at.start, time = p.sizes.time;
    const auto key_head = [&](const Sequence& x, int key) { return Head<T>(x, batch, head, key, p.sizes.key_dim); };
    const F* const states = slice.state_of(slice.states, at.local, at.n);

    const auto copy_keys = [&](int key) {
        const int keys = min(key_part, slice.key_rows - key);
        copy_steps(shared.q, key_head(queries, key), keys, start, time);
        if constexpr (!Decays) copy_steps(shared.k, key_head(p.k, key), keys, start, time);
    };
    const auto copy_values = [&](int key, int value) {
        const int keys = min(key_part, slice.key_rows - key), values = min(value_part, slice.columns - value);
        copy_found(shared.state, states + value * slice.key_rows + key, slice.key_rows, values, keys);
        if (key == 0) copy_writes<Corrects>(shared.update, slice, at, p.v, p.sizes, value, values);
    };

    const typename ChunkSteps<Gated>::Step own_step(Sequence{}, p.log_gate, batch, head, start, time);
    // The first parts of all are on their way at once, those that are needed first before the others.
    Tile scores = own_tile(kSide);
    const bool all_keys = slice.key_rows <= key_part;
    if constexpr (Decays) copy_pairs<T, Decays>(shared.scores, slice.scores, slice.rest, slice.index(at.local, at.n));
    if (!Decays || all_keys) copy_keys(0);
    copies_commit();
    copy_values(0, 0);
    copies_commit();
    shared.steps.find(own_step, !Corrects && p.complement != 0);
    for (int key = Decays ? slice.key_rows : 0; key < slice.key_rows; key += key_part) {
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
            copies_commit();
            copies_wait<0>();
        } else {
            copies_wait<1>();
        }
        __syncthreads();
        if (has_pairs(scores))
            multiply_stored<kPasses, false, true>(scores, 0, min(key_part, slice.key_rows - key), shared.q, shared.k);
    }
    if (!Decays && has_pairs(scores)) {
        shared.steps.keep_pairs(scores, true);
        if constexpr (Gated && !Corrects) scores.each([&](int, int s, float& x) { x *= shared.steps.strength(s); });
        shared.scores.write(scores);
    }
    for (int value = 0; value < slice.columns; value += value_part) {
        const int values = min(value_part, slice.columns - value);
        Tile out = own_tile(values);
        for (int key = 0; key < slice.key_rows; key += key_part) {
            const int keys = min(key_part, slice.key_rows - key);
            __syncthreads();
            if (!all_keys) copy_steps(shared.q, key_head(queries, key), keys, start, time);
            if (key > 0 || value > 0) copy_values(key, value);
            copies_commit();
            copies_wait<0>();
            __syncthreads();
            if (is_in(out, values)) multiply_stored<kPasses, false, true>(out, 0, keys, shared.q, shared.state);
        }
        if constexpr (Values) {
            shared.values.template add_writes<kPasses>(out, values, shared.update, shared.scores,
                                                       [&](auto& to, int b, int j) {
                                                           load_logs<T>(to, p.log_value_decay, batch, head, value + j,
                                                                        p.sizes.value_dim, start + b * kSteps, time);
                                                       });
            store_rows(Head<T>(p.out, batch, head, value, p.sizes.value_dim), shared.values.reads, kSide, values, start,
                       time);
            continue;
        }
        if (!is_in(out, values)) continue;
        if constexpr (Gated) out.each([&](int t, int, float& x) { x *= shared.steps.from_start(t); });
        shared.scores.template multiply<kPasses, false, Corrects>(out, 0, out.row + kTileRows, shared.update);
        store_tile(out, Head<T>(p.out, batch, head, value, p.sizes.value_dim), start, time);
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
            return launch(outputs<T, corrects, gated, decays, values>,
                          dim3(static_cast<unsigned>(slice.heads) * slice.chunks), dim3(kTileThreads), plan.last_shared,
                          stream, p, queries, slice, plan.key_part, plan.value_part);
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
