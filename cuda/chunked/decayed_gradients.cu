// The last stage of the backward pass with decays by dimension or erase keys; see gradients.cu. Gradients go through a chunk's
// blocks of 16 steps, and those of logs are found, as blocks.cuh says; E F_.0 is in the place of K D_.0 where errors are read.
// Where values decay, a second launch finds their gradients as those of keys, with dY in the place of Q, V in that of K and P in that
// of dP; what decays of the other side scale, and dP, is from the local stage.
#include "decayed_gradients.cuh"

#include "blocks.cuh"

namespace fairseq_fastweights {
namespace {

// The dimensions whose gradients a launch finds: keys and all the rest or, where values decay, keys or values.
enum class Side { kKeysAlone, kKeys, kValues };

template <typename T, bool Corrects>
struct DecayedLayout {
    Matrix<T> q, k, erase, d_out;
    Matrix<Written<T, Corrects>> update;
    Matrix<Factor<T>> d_right, state, d_state;  // transposed
    Pairs<T> d_scores, pairs;  // pairs: the gradient of the system or, where nothing corrects, the scores
    float* beta;
    float* d_beta;  // by step, for each tile across
    DecayGradient<T> decays;
    size_t bytes;

    __host__ __device__ DecayedLayout(Carver carver, int keys, int values)
        : q(carver.matrix<T>(kSide, keys)), k(carver.matrix<T>(kSide, keys)),
          erase(carver.matrix<T>(Corrects ? kSide : 0, keys)), d_out(carver.matrix<T>(kSide, values)),
          update(matrix_of_writes<T, Corrects>(carver, values)),
          d_right(carver.matrix<Factor<T>>(Corrects ? values : 0, kSide)), d_scores(carver, kSide, kSide),
          pairs(carver, kSide, kSide), beta(carver.take<float>(kSide)), d_beta(carver.take<float>(2 * kSide)) {
        decays.keep(carver, Corrects, keys);
        Carver later = carver;
        state = carver.matrix<Factor<T>>(values, keys);
        d_state = carver.matrix<Factor<T>>(values, keys);
        decays.replace(later, Corrects, keys);
        bytes = later.used > carver.used ? later.used : carver.used;
    }
};

template <typename T, bool Corrects, Side Of>
__global__ void __launch_bounds__(kTileThreads, 1)
    decayed_gradients(const RuleBackward p, const Sequence written, const Slice<Factor<T>> slice, const int key_part,
                      const int value_part) {
    using F = Factor<T>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    constexpr bool kTurned = Of == Side::kValues;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const DecayedLayout<T, Corrects> shared(Carver(memory), key_part, value_part);
    const DecayGradient<T>& decays = shared.decays;
    const Place at(slice, p.sizes);
    const int thread = threadIdx.x, batch = at.batch, head = at.head, start = at.start, time = p.sizes.time;
    const int64_t index = slice.index(at.local, at.n);
    const auto key_head = [&](const Sequence& x, int key) { return Head<T>(x, batch, head, key, p.sizes.key_dim); };
    const auto value_head = [&](const Sequence& x, int value) {
        return Head<T>(x, batch, head, value, p.sizes.value_dim);
    };
    const bool all_keys = slice.key_rows <= key_part, all_values = slice.columns <= value_part;
    const auto copy_values = [&](int value, int values) {
        copy_steps(shared.d_out, value_head(p.d_out, value), values, start, time);
        copy_writes<Corrects>(shared.update, slice, at, p.v, p.sizes, value, values);
        if constexpr (Corrects)
            copy_found(shared.d_right, slice.rows_of(slice.d_right, at.local, at.n) + value * kSide, kSide, values,
                       kSide);
    };
    const auto copy_state = [&](const Matrix<F>& to, F* all, int key, int keys, int value, int values) {
        const F* const from = slice.state_of(all, at.local, at.n);
        if constexpr (kTurned)
            copy_found(to, from + key * slice.columns + value, slice.columns, keys, values);
        else
            copy_found(to, from + value * slice.key_rows + key, slice.key_rows, values, keys);
    };
    const Sequence& from_erase = p.erase.data != nullptr ? p.erase : p.k;
    const auto copy_keys = [&](int key, int keys) {
        copy_steps(shared.k, key_head(p.k, key), keys, start, time);
        copy_steps(shared.q, key_head(p.q, key), keys, start, time);
        if constexpr (Corrects) copy_steps(shared.erase, key_head(from_erase, key), keys, start, time);
    };
    const auto arrive = [] {
        copies_commit();
        copies_wait<0>();
        __syncthreads();
    };

    if (thread < kSide) shared.beta[thread] = load_step(p.beta, batch, head, start + thread, time);
    for (int i = thread; i < 2 * kSide; i += kTileThreads) shared.d_beta[i] = 0.0f;
    // The same lane each time adds to a step's sum of a tile across.
    const auto add_to_d_beta = [&](const Tile& tile, int t, float sum) {
        shared.d_beta[tile.column / kTileColumns * kSide + t] += sum;
    };

    if constexpr (Of != Side::kKeysAlone)
        copy_pairs(shared.d_scores, slice.d_scores, slice.d_rest, index);
    else if constexpr (!Corrects)
        copy_pairs(shared.pairs, slice.scores, slice.rest, index);
    if (all_keys) copy_keys(0, slice.key_rows);
    if constexpr (Of != Side::kKeysAlone) {
        if (all_values) copy_values(0, slice.columns);
        arrive();
        decays.keep_weights(shared.d_scores);
    }
    Tile d_scores = own_tile(kSide), d_system = d_scores;
    for (int value = Of == Side::kKeysAlone ? 0 : slice.columns; value < slice.columns; value += value_part) {
        const int values = min(value_part, slice.columns - value);
        if (value > 0) __syncthreads();
        copy_values(value, values);
        arrive();
        if (has_pairs(d_scores)) {
            multiply_stored<kPasses, false, !Corrects>(d_scores, 0, values, shared.d_out, shared.update);
            if constexpr (Corrects)
                multiply_stored<kPasses, true, false>(d_system, 0, values, shared.d_right, shared.update);
        }
        if constexpr (Corrects) {
            Tile errors = own_tile(values);  // of which only V is taken here
            if (!is_in(errors, values)) continue;
            const Head<T> v = value_head(p.v, value);
            errors.sum_rows(
                [&](int t, int j, float) {
                    const bool there = start + t < time && j < v.dim;
                    return there ? shared.d_right.get(j, t) * widen<float>(v.data[(start + t) * v.stride + j]) : 0.0f;
                },
                [&](int t, float sum) { add_to_d_beta(errors, t, sum); });
        }
    }
    if (Of == Side::kKeysAlone && has_pairs(d_scores)) {
        const auto keep = [](Tile& tile, int least) {
            tile.each([&](int t, int s, float& value) { value = s + least <= t ? value : 0.0f; });
        };
        keep(d_scores, 0);
        shared.d_scores.write(d_scores);
        decays.keep_weights(d_scores, decays.weights);
        if constexpr (Corrects) {
            const LowerBlocks<F> products = slice.lower_of(slice.products, at.local, at.n);
            d_system.each([](int, int, float& value) { value = -value; });
            keep(d_system, 1);
            d_system.sum_rows(
                [&](int t, int s, float value) {
                    return products.has(t, s) ? value * widen<float>(products(t, s)) : 0.0f;
                },

                [&](int t, float sum) { add_to_d_beta(d_system, t, sum); });
            d_system.each([&](int t, int, float& value) { value *= shared.beta[t]; });
            shared.pairs.write(d_system);
            decays.keep_weights(d_system, decays.erase_weights);
        }
    }

    for (int key = 0; key < slice.key_rows; key += key_part) {
        const int keys = min(key_part, slice.key_rows - key);
        Tile dq = own_tile(keys), read = dq, dk = dq;
        const BlockColumn own(keys);
        float whole = 0.0f;  // this thread's part of its key's sum of S_0 * dS
        for (int value = 0; value < slice.columns; value += value_part) {
            const int values = min(value_part, slice.columns - value);
            __syncthreads();
            if (value == 0 && !all_keys) copy_keys(key, keys);
            if (!all_values) copy_values(value, values);
            copy_state(shared.state, slice.states, key, keys, value, values);
            copy_state(shared.d_state, slice.d_states, key, keys, value, values);
            arrive();
            if (own.there())
                for (int j = own.block; j < values; j += kBlocks) {
                    const int row = kTurned ? own.column : j, column = kTurned ? j : own.column;
                    const float product = shared.state.get(row, column) * shared.d_state.get(row, column);
                    whole +=
                        Of == Side::kKeysAlone ? product : product * slice.value_decays_of(at.local, at.n)[value + j];
                }
            if (!is_in(dq, keys)) continue;
            multiply_stored<kPasses, false, kTurned>(dq, 0, values, shared.d_out, shared.state);
            if constexpr (Corrects)
                multiply_stored<kPasses, true, false>(read, 0, values, shared.d_right, shared.state);
            multiply_stored<kPasses, Corrects, kTurned>(dk, 0, values, shared.update, shared.d_state);
        }
        float gates[kSteps];
        if (own.there())
            load_logs<T>(gates, p.log_key_decay, batch, head, key + own.column, p.sizes.key_dim,
                         start + own.block * kSteps, time);
        exponentiate(gates);
        __syncthreads();
        if (own.there()) decays.template write_factors<Corrects>(own, gates, shared.q, shared.k, shared.erase, whole);
        __syncthreads();
        if (is_in(dq, keys)) {
            decays.template pass_to_readers<kPasses>(dq, shared.d_scores, decays.reading, false);
            write_tile(dq, decays.reads);
            if constexpr (Corrects) {
                read.each([](int, int, float& value) { value = -value; });
                read.sum_rows([&](int t, int i, float value) { return value * decays.from_start(t, i); },
                              [&](int t, float sum) { add_to_d_beta(read, t, sum); });
                read.each([&](int t, int, float& value) { value *= shared.beta[t]; });
                decays.template pass_to_readers<kPasses>(read, shared.pairs, decays.reading_erase, true);
                write_tile(read, decays.erase_reads);
            }
            decays.template pass_to_writers<kPasses, Corrects>(dk, shared.d_scores, shared.pairs);
            write_tile(dk, decays.writes);
        }
        __syncthreads();
        if (own.there())
            decays.template differentiate<Corrects>(own, gates, shared.q, shared.k, shared.erase,
                                                    p.erase.data == nullptr);
        __syncthreads();
        const auto store = [&](auto zero, const Sequence& to, const auto& from) {
            if (to.data != nullptr)
                store_rows(Head<decltype(zero)>(to, batch, head, key, p.sizes.key_dim), from, kSide, keys, start, time);
        };
        store(T(), p.dq, decays.reading);
        store(T(), p.dk, decays.writes);
        if constexpr (Corrects) store(T(), p.d_erase, decays.erase_reads);
        if (p.d_log_key_decay.dtype == kFloat32)
            store(float(), p.d_log_key_decay, decays.reads);
        else
            store(T(), p.d_log_key_decay, decays.reads);
    }
    if constexpr (!Corrects && Of == Side::kKeysAlone) {
        for (int value = 0; value < slice.columns; value += value_part) {
            const int values = min(value_part, slice.columns - value);
            Tile dv = own_tile(values);
            for (int key = 0; key < slice.key_rows; key += key_part) {
                const int keys = min(key_part, slice.key_rows - key);
                __syncthreads();
                copy_steps(shared.k, key_head(written, key), keys, start, time);
                if (!all_values && key == 0) copy_steps(shared.d_out, value_head(p.d_out, value), values, start, time);
                copy_state(shared.d_state, slice.d_states, key, keys, value, values);
                arrive();
                if (is_in(dv, values)) multiply_stored<kPasses, false, true>(dv, 0, keys, shared.k, shared.d_state);
            }
            if (!is_in(dv, values)) continue;
            shared.pairs.template multiply<kPasses, true, false>(dv, dv.row, kSide, shared.d_out);
            store_tile(dv, value_head(p.dv, value), start, time);
        }
    }
    __syncthreads();
    if (Corrects && p.d_beta.data != nullptr && thread < kSide && start + thread < time)
        store_step(p.d_beta, batch, head, start + thread, shared.d_beta[thread] + shared.d_beta[kSide + thread]);
}

// The gradients of one side where values decay: what decays of the other side scale is in the place of d_out and v.
template <typename T>
RuleBackward side_of(RuleBackward p, const Slice<Factor<T>>& slice) {
    p.d_out = slice.template sequence_of<T>(slice.d_outs, slice.columns, p.sizes);
    p.v = slice.template sequence_of<T>(slice.values, slice.columns, p.sizes);
    return p;
}
RuleBackward swapped(RuleBackward p) {
    std::swap(p.sizes.key_dim, p.sizes.value_dim);
    std::swap(p.q, p.d_out);
    std::swap(p.k, p.v);
    p.log_key_decay = p.log_value_decay;
    p.dq = {};  // outputs, that are there
    p.dk = p.dv;
    p.d_log_key_decay = p.d_log_value_decay;
    return p;
}

}  // namespace

template <typename T>
size_t decayed_gradient_bytes(bool corrects, int keys, int values) {
    return corrects ? DecayedLayout<T, true>(Carver(nullptr), keys, values).bytes
                    : DecayedLayout<T, false>(Carver(nullptr), keys, values).bytes;
}

template <typename T>
cudaError_t launch_decayed_gradients(const RuleBackward& p, const WalkPlan& plan, const Slice<Factor<T>>& slice,
                                     const Sequence& written, cudaStream_t stream) {
    const auto find = [&](auto kernel, const RuleBackward& of, const Slice<Factor<T>>& from) {
        return launch(kernel, dim3(slice.heads, slice.chunks), dim3(kTileThreads), plan.last_shared, stream, of,
                      written, from, plan.key_part, plan.value_part);
    };
    if (plan.pass.corrects) return find(decayed_gradients<T, true, Side::kKeysAlone>, p, slice);
    if (!plan.pass.values) return find(decayed_gradients<T, false, Side::kKeysAlone>, p, slice);
    const cudaError_t error = find(decayed_gradients<T, false, Side::kKeys>, side_of<T>(p, slice), slice);
    if (error != cudaSuccess) return error;
    const Slice<Factor<T>> turned = slice.swapped();
    return find(decayed_gradients<T, false, Side::kValues>, side_of<T>(swapped(p), turned), turned);
}

#define FASTWEIGHTS_OF(T)                                                                                           \
    template size_t decayed_gradient_bytes<T>(bool, int, int);                                                      \
    template cudaError_t launch_decayed_gradients<T>(const RuleBackward&, const WalkPlan&, const Slice<Factor<T>>&, \
                                                     const Sequence&, cudaStream_t);
FASTWEIGHTS_OF(float)
FASTWEIGHTS_OF(__half)
FASTWEIGHTS_OF(__nv_bfloat16)
#undef FASTWEIGHTS_OF

}  // namespace fairseq_fastweights
