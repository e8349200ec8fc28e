// The forward pass of all rules, in the notation of gates.cuh:
//
//   intra_chunk  all chunks at once: gates, and T = (I + B G)^-1                      (intra_chunk.cu)
//   pass_states  chunk after chunk: states and U                                      (state_passing.cu)
//   outputs      all chunks at once: Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        (here)
//
// With decays by dimension Q * F_.0 and the pairs come from the intra-chunk kernel, in the notation of
// secondary_chunking.cuh. Without the delta rule U is diag(w) V; the write factors are applied to the pairs, and V is
// taken as it is. With decays of values outputs are computed by secondary chunking, like gradients of queries
// (secondary_chunking_gradient.cuh).
#include "chunk_parallel.cuh"
#include "passes.cuh"
#include "secondary_chunking_gradient.cuh"

namespace fairseq_fastweights {
namespace {

// Shared memory for a part of the keys and values, 16 `Width` keys. With decays by dimension, of keys alone or of
// `Values` as well, pairs of steps come from the intra-chunk kernel.
template <typename T, bool IsDelta, bool Gated, bool Decays, bool Values, int Width>
struct OutputLayout {
    static constexpr int kAtOnce = sizeof(T) == 4 || Values ? 2
                                   : Gated || Decays        ? 3
                                                            : 4;  // blocks on a multiprocessor
    Rows<T, 16 * Width> q, k;
    Rows<Computed<T>, 16 * Width> state;  // transposed
    UpdateRows<T, IsDelta> update;
    ChunkGates<Gated> steps;
    Rows<float, kChunk> pairs;  // P
    LevelRows<kWarp> levels;
    size_t bytes;

    __host__ __device__ OutputLayout(SharedAllocator allocator, int value_part)
        : q(allocator, kChunk), k(allocator, Decays ? 0 : kChunk), state(allocator, value_part),
          update(allocator, IsDelta ? value_part : kChunk), pairs(allocator, Values ? kChunk : 0) {
        if (Values) levels = LevelRows<kWarp>(allocator);
        if (Gated) steps = ChunkGates<Gated>(allocator);
        bytes = allocator.used;
    }
};

template <typename T, bool IsDelta, bool Gated, bool Decays, bool Values, int Width>
__global__ void __launch_bounds__(kChunkThreads, (OutputLayout<T, IsDelta, Gated, Decays, Values, Width>::kAtOnce))
    outputs(const RuleForward p, const Sequence queries, const Slice<Computed<T>> slice, const int value_part) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = 16 * Width;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const OutputLayout<T, IsDelta, Gated, Decays, Values, Width> shared(SharedAllocator(memory), value_part);
    const ChunkGates<Gated>& steps = shared.steps;
    const ChunkCoord at(slice, p.sizes);
    const int start = at.start, time = p.sizes.time, row = first_own_step();
    const auto copy_keys = [&](int key) {
        at.copy(shared.q, queries, key, p.sizes.key_dim);
        if constexpr (!Decays) at.copy(shared.k, p.k, key, p.sizes.key_dim);
    };
    const auto copy_values = [&](int key, int value) {
        const int values = min(value_part, slice.columns - value);
        at.copy_state(shared.state, slice.states, key, value, values);
        if (key == 0) at.template copy_updates<IsDelta>(shared.update, p.v, value, values);
    };

    // The first parts of all operands are copied at once, in the order of their use.
    copy_keys(0);
    if constexpr (Gated) steps.copy(slice.steps_of(at.local, at.n));
    copies_commit();
    copy_values(0, 0);
    copies_commit();
    // P = tril(D_ts Q K^T), of this warp's steps.
    Fragment<kChunk / 8> scores;
    scores.clear();
    if constexpr (Decays) {
        scores = load_pairs(at, row, slice.scores, slice.scores_low);
        if constexpr (Values) scores.write(shared.pairs.from(row, 0));
    } else {
        each_part<1>(slice.key_rows, kKeys, copy_keys,
                     [&](int) { multiply_rows<kPasses, false, false>(scores, shared.q, row, shared.k, Width); });
        steps.mask_and_decay(scores, row);
        if constexpr (Gated && !IsDelta) scores.scale(steps.write_factors());
    }
    for (int value = 0; value < slice.columns; value += value_part) {
        const int values = min(value_part, slice.columns - value);
        // diag(D_t0) Q S_0, summed over the parts of the keys.
        Fragment<kWidest / 8> out;
        out.clear();
        for (int key = 0; key < slice.key_rows; key += kKeys) {
            const bool there = slice.key_rows <= kKeys;  // all keys
            if (value > 0 || !there) {
                __syncthreads();
                if (!there) at.copy(shared.q, queries, key, p.sizes.key_dim);
                if (key > 0 || value > 0) copy_values(key, value);
            }
            arrive();
            each_columns(out, values / 16, [&](auto& part, int first) {
                multiply_rows<kPasses, false, false>(part, shared.q, row, shared.state.from(first, 0), Width);
            });
        }
        if constexpr (Gated) out.each([&](int, int j, float& x) { x *= steps.from_start(row + j); });
        if constexpr (Values) {  // outputs from values and P, like gradients of queries from keys and dP
            UNROLL_FOR (int first = 0; first < kWidest; first += kWarp) {
                if (first >= values) break;
                Fragment<kWarp / 8>& part = out.template part<kWarp / 8>(first / 8);
                __syncthreads();  // the levels' rows are free
                SubchunkGradients<T, kWarp> of(shared.levels, row, at, p.log_value_decay, value + first,
                                               p.sizes.value_dim);
                load_column(of.early, shared.update.from(row, first), of.column);
                of.add(part, shared.pairs);
                part = of.fragment_of(of.d_late);
            }
        } else {  // + P U
            each_columns(out, values / 16, [&](auto& part, int first) {
                const auto update = IsDelta ? shared.update.from(first, 0) : shared.update.from(0, first);
                multiply<kPasses, !IsDelta, Decays>(has_wgmma(), part, scores, update);
            });
        }
        out.store_rows(at.template part_of<T>(p.out, value, p.sizes.value_dim), values, start + row, time);
    }
}

struct Outputs {
    template <typename T>
    static size_t bytes(const RulePass& pass, int keys, int values) {
        return with_rule(pass, [&](auto is_delta, auto gated, auto decays, auto both) {
            return with_width(keys, [&](auto width) {
                return OutputLayout<T, is_delta, gated, decays, both, width>(SharedAllocator(nullptr), values).bytes;
            });
        });
    }

    template <typename T, typename C>
    static cudaError_t run(const RuleForward& p, const PassPlan& plan, StatePassing<C> w, unsigned char* room,
                           cudaStream_t stream) {
        const Slice<C>& slice = w.slice;
        const int64_t head = slice.first_head, kept = kept_states(p.sizes);
        float* const last = nth_state(p.final_state, p.sizes, head);  // also the start of the next slice
        w.ends = {last, 1, 0};
        w.kept = kept > 0 ? nth_state(p.states, p.sizes, head * kept) : nullptr;
        const cudaError_t error = pass_states_of_slice<T>(
            plan, w, slice.begin > 0 ? last : nth_state(p.initial_state, p.sizes, head), room, stream);
        if (error != cudaSuccess) return error;
        const Sequence queries =
            plan.pass.decays ? slice.template sequence_of<T>(slice.decayed_q, slice.key_rows, p.sizes) : p.q;
        return with_rule(plan.pass, [&](auto is_delta, auto gated, auto decays, auto values) {
            return with_width(plan.key_part, [&](auto width) {
                return launch(outputs<T, is_delta, gated, decays, values, width>, dim3(slice.heads, slice.chunks),
                              dim3(kChunkThreads), plan.last_shared, stream, p, queries, slice, plan.value_part);
            });
        });
    }
};

}  // namespace

ChunkedPlan chunked_plan_forward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit) {
    return plan_of_pass<Outputs>(sizes, dtype, pass, limit);
}

extern "C" cudaError_t fastweights_forward_chunked(const RuleForward* params, cudaStream_t stream) {
    return run_pass<Outputs>(*params, stream);
}
extern "C" size_t fastweights_forward_chunked_workspace(const RuleForward* params) {
    return workspace_of_pass<Outputs>(*params);
}

}  // namespace fairseq_fastweights
