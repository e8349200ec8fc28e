// The backward pass of the delta rule and of the sum rule, chunks side by side, in the notation of delta.cuh and of
// the equations in delta_backward.cu and diagonal_backward.cu:
//
//   local      of all chunks at once: T = (I + B G)^-1 and P = tril(D_ts Q K^T), and gates   (local.cu)
//   states     from each state that was kept to the next: states and U                       (walk.cu)
//   walk       chunk after chunk, from the last: dS, dR = T^T dU, dV = B dR                  (walk.cu)
//   gradients  of all chunks at once, with dP = tril(dY U^T) and dA = -dR U^T:               (here)
//     dQ = diag(D_t0) dY S_0^T + (D_ts dP) K
//     dK = (D_ts dP)^T Q + diag(D_es) U dS^T + (D_ts B dA + (D_ts B dA)^T) K - diag(D_t0) dV S_0^T
//     d beta_t = <dR_t, V_t> - D_t0 <dR_t, S_0^T k_t> + <dA_t, G_t>
//
// The last is <dR_t, E_t> + <dA_t, G_t> without E: what E is made of has been multiplied by the same dR anyway, for dK.
//
// Where nothing corrects, U is diag(w) V with the strengths of writes, there is neither dR nor dA, and
//     dV = diag(w) (P^T dY + diag(D_es) K dS)
//
// With decays of keys, in the notation of delta_decays.cuh, D is F and differs by key dimension: gradients go through a chunk's
// blocks of 16 steps, and those of logs are found, as blocks.cuh says; E F_.0 is in the place of K D_.0 where errors are read.
// Where values decay, a second launch finds their gradients as those of keys, with dY in the place of Q, V in that of K and P in that
// of dP; what decays of the other side scale, and dP, is from the local stage.
#include "blocks.cuh"
#include "stages.cuh"

namespace fairseq_fastweights {
namespace {

// The dimensions whose gradients a launch finds: keys and all the rest or, where values decay, keys or values.
enum class Side { kKeysAlone, kKeys, kValues };

template <typename T, bool Corrects, bool Gated, bool Decays, bool Values>
struct GradientLayout {
    Matrix<T> q, k, erase, d_out;
    Matrix<Written<T, Corrects>> update;
    Matrix<Factor<T>> d_right, state, d_state;  // transposed
    Pairs<T, Decays> d_scores, pairs;           // the gradient of the system or, where nothing corrects, the scores
    ChunkSteps<Gated> steps;
    GateGradient gradient;
    float* d_beta;  // by step, for each tile across
    DecayGradient<T> decays;
    size_t bytes;

    __host__ __device__ GradientLayout(Carver carver, int keys, int values)
        : q(carver.matrix<T>(kSide, keys)), k(carver.matrix<T>(kSide, keys)),
          erase(carver.matrix<T>(Corrects && Decays ? kSide : 0, keys)), d_out(carver.matrix<T>(kSide, values)),
          update(matrix_of_writes<T, Corrects>(carver, values)),
          d_right(carver.matrix<Factor<T>>(Corrects ? values : 0, kSide)), d_scores(carver, kSide, kSide),
          pairs(carver, kSide, kSide), steps(carver), gradient(carver, kSide, kWidest, kTileThreads, Gated) {
        d_beta = carver.take<float>(2 * kSide);
        if (Decays) decays.keep(carver, Corrects, keys);
        Carver later = carver;
        state = carver.matrix<Factor<T>>(values, keys);
        d_state = carver.matrix<Factor<T>>(values, keys);
        if (Decays) decays.replace(later, Corrects, keys);
        bytes = later.used > carver.used ? later.used : carver.used;
    }
};

template <typename T, bool Corrects, bool Gated, bool Decays, Side Of>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 4 || Decays ? 1 : 2)
    gradients(const RuleBackward p, const Sequence written, const Slice<Factor<T>> slice, const int key_part,
              const int value_part) {
    using F = Factor<T>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    constexpr bool kTurned = Of == Side::kValues;
    constexpr bool kAhead = !Decays;  // there is room for the first parts of all at once
    const GradientLayout<T, Corrects, Gated, Decays, Of != Side::kKeysAlone> shared(Carver(memory), key_part,
                                                                                    value_part);
    const ChunkSteps<Gated>& steps = shared.steps;
    const GateGradient& gradient = shared.gradient;
    const Place at(slice, p.sizes);
    const int thread = threadIdx.x, batch = at.batch, head = at.head, start = at.start, time = p.sizes.time;
    const auto key_head = [&](const Sequence& x, int key) { return Head<T>(x, batch, head, key, p.sizes.key_dim); };
    const auto value_head = [&](const Sequence& x, int value) {
        return Head<T>(x, batch, head, value, p.sizes.value_dim);
    };
    const bool complement = !Corrects && p.complement != 0;
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
    const Sequence& from_erase = Decays && p.erase.data != nullptr ? p.erase : p.k;
    const auto copy_keys = [&](int key, int keys) {
        copy_steps(shared.k, key_head(p.k, key), keys, start, time);
        copy_steps(shared.q, key_head(p.q, key), keys, start, time);
        if constexpr (Corrects && Decays) copy_steps(shared.erase, key_head(from_erase, key), keys, start, time);
    };
    const auto copy_states = [&](int key, int keys, int value, int values) {
        copy_state(shared.state, slice.states, key, keys, value, values);
        copy_state(shared.d_state, slice.d_states, key, keys, value, values);
    };
    const auto arrive = [] {
        copies_commit();
        copies_wait<0>();
        __syncthreads();
    };

    const typename ChunkSteps<Gated>::Step own_step(p.beta, p.log_gate, batch, head, start, time);
    for (int i = thread; i < 2 * kSide; i += kTileThreads) {
        shared.d_beta[i] = 0.0f;
        if constexpr (Gated) gradient.read()[i] = gradient.written()[i] = gradient.write_strength()[i] = 0.0f;
    }
    // The same lane each time adds to a step's sum of a tile across.
    const auto add_to = [&](float* sums, const Tile& tile, int t, float sum) {
        sums[tile.column / kTileColumns * kSide + t] += sum;
    };

    Tile products = own_tile(kSide), scores = products;
    if constexpr (Of != Side::kKeysAlone)
        copy_pairs<T, Decays>(shared.d_scores, slice.d_scores, slice.d_rest, slice.index(at.local, at.n));
    else if constexpr (Decays && !Corrects)
        copy_pairs<T, Decays>(shared.pairs, slice.scores, slice.rest, slice.index(at.local, at.n));
    if (kAhead || all_keys) copy_keys(0, min(key_part, slice.key_rows));
    if constexpr (kAhead) {  // what is needed first comes before the rest
        copies_commit();
        copy_values(0, min(value_part, slice.columns));
        copies_commit();
        copy_states(0, min(key_part, slice.key_rows), 0, min(value_part, slice.columns));
        copies_commit();
    }
    steps.find(own_step, complement);
    for (int key = Decays ? slice.key_rows : 0; key < slice.key_rows; key += key_part) {
        const int keys = min(key_part, slice.key_rows - key);
        if (key > 0) {
            __syncthreads();
            copy_keys(key, keys);
            arrive();
        } else {
            copies_wait<2>();
            __syncthreads();
        }
        if (!has_pairs(products)) continue;
        if constexpr (Corrects) multiply_stored<kPasses, false, true>(products, 0, keys, shared.k, shared.k);
        if constexpr (Gated || !Corrects) multiply_stored<kPasses, false, true>(scores, 0, keys, shared.q, shared.k);
    }
    Tile d_scores = own_tile(kSide), d_system = d_scores;
    if constexpr (Of != Side::kKeysAlone) {
        if (all_values) copy_values(0, slice.columns);
        arrive();
        shared.decays.keep_weights(shared.d_scores);
    }
    for (int value = Of == Side::kKeysAlone ? 0 : slice.columns; value < slice.columns; value += value_part) {
        const int values = min(value_part, slice.columns - value);
        if (kAhead && value == 0) {
            copies_wait<1>();
            __syncthreads();
        } else {
            if (value > 0) __syncthreads();
            copy_values(value, values);
            arrive();
        }
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
                [&](int t, float sum) { add_to(shared.d_beta, errors, t, sum); });
        }
    }
    if (Of == Side::kKeysAlone && has_pairs(d_scores)) {
        if constexpr (Corrects) {
            if constexpr (Decays) {
                const F* const found = slice.products + slice.index(at.local, at.n) * kSide * kSide;
                products.each([&](int t, int s, float& value) { value = widen<float>(found[t * kSide + s]); });
            }
            steps.keep_pairs(products, false);
            d_system.each([](int, int, float& value) { value = -value; });
            Tile by_strength = d_system;
            by_strength.each_with(products, [](int, int, float& value, float& product) { value *= product; });
            by_strength.sum_rows([](int, int, float value) { return value; },
                                 [&](int t, float sum) { add_to(shared.d_beta, by_strength, t, sum); });
            d_system.each([&](int t, int, float& value) { value *= steps.beta[t]; });
        }
        if constexpr (Gated || !Corrects) steps.keep_pairs(scores, true);
        if constexpr (!Corrects && !Decays) {
            if constexpr (Gated) scores.each([&](int, int s, float& value) { value *= steps.strength(s); });
            shared.pairs.write(scores);
        }
        if constexpr (Gated) {
            scores.each_with(d_scores, [](int, int, float& value, float& other) { value *= other; });
            if constexpr (Corrects) {
                products.each_with(d_system, [](int, int, float& value, float& other) { value *= other; });
                scores.each_with(products, [](int, int, float& value, float& other) { value += other; });
            }
            scores.each([&](int t, int s, float& value) { gradient.inside(t, s) = value; });
        }
        steps.keep_pairs(d_scores, true);
        shared.d_scores.write(d_scores);
        if constexpr (Decays) shared.decays.keep_weights(d_scores, shared.decays.weights);
        if constexpr (Corrects) {
            steps.keep_pairs(d_system, false);
            shared.pairs.write(d_system);
            if constexpr (Decays) shared.decays.keep_weights(d_system, shared.decays.erase_weights);
        }
    }
    if constexpr (Gated) {
        __syncthreads();
        gradient.sum_rows(kSide);
    }

    float passed = 0.0f;  // this thread's part of <S_0, dS>
    for (int key = 0; key < slice.key_rows; key += key_part) {
        const int keys = min(key_part, slice.key_rows - key);
        Tile dq = own_tile(keys), read = dq, dk = dq;
        const BlockColumn own(keys);
        float whole = 0.0f;  // this thread's part of its key's sum of S_0 * dS, with decays
        for (int value = 0; value < slice.columns; value += value_part) {
            const int values = min(value_part, slice.columns - value);
            __syncthreads();
            if (value == 0 && !all_keys) copy_keys(key, keys);
            if (!all_values) copy_values(value, values);
            if (!kAhead || key > 0 || value > 0) copy_states(key, keys, value, values);
            arrive();
            if constexpr (Gated)
                for (Walk i(keys); i.row < values; i.next())
                    passed += shared.state.get(i.row, i.column) * shared.d_state.get(i.row, i.column);
            if (Decays && own.there())
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
        if constexpr (Decays) {
            const DecayGradient<T>& decays = shared.decays;
            float gates[kSteps];
            if (own.there())
                load_logs<T>(gates, p.log_key_decay, batch, head, key + own.column, p.sizes.key_dim,
                             start + own.block * kSteps, time);
            exponentiate(gates);
            __syncthreads();
            if (own.there())
                decays.template write_factors<Corrects>(own, gates, shared.q, shared.k, shared.erase, whole);
            __syncthreads();
            if (is_in(dq, keys)) {
                decays.template pass_to_readers<kPasses>(dq, shared.d_scores, decays.reading, false);
                write_tile(dq, decays.reads);
                if constexpr (Corrects) {
                    read.each([](int, int, float& value) { value = -value; });
                    read.sum_rows([&](int t, int i, float value) { return value * decays.from_start(t, i); },
                                  [&](int t, float sum) { add_to(shared.d_beta, read, t, sum); });
                    read.each([&](int t, int, float& value) { value *= steps.beta[t]; });
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
                    store_rows(Head<decltype(zero)>(to, batch, head, key, p.sizes.key_dim), from, kSide, keys, start,
                               time, false);
            };
            store(T(), p.dq, decays.reading);
            store(T(), p.dk, decays.writes);
            if constexpr (Corrects) store(T(), p.d_erase, decays.erase_reads);
            if (p.d_log_key_decay.dtype == kFloat32)
                store(float(), p.d_log_key_decay, decays.reads);
            else
                store(T(), p.d_log_key_decay, decays.reads);
            continue;
        }
        if (!is_in(dq, keys)) continue;
        const auto of_query = [&](int t, int i, float value) { return value * shared.q.get(t, i); };
        const auto of_key = [&](int t, int i, float value) { return value * shared.k.get(t, i); };
        if constexpr (Corrects) {
            read.each([&](int t, int, float& value) { value *= -steps.from_start(t); });
            read.sum_rows(of_key, [&](int t, float sum) { add_to(shared.d_beta, read, t, sum); });
            read.each([&](int t, int, float& value) { value *= steps.beta[t]; });
        }
        if constexpr (Gated) {
            dq.each([&](int t, int, float& value) { value *= steps.from_start(t); });
            dk.each([&](int t, int, float& value) { value *= steps.to_end(t); });
            dq.sum_rows(of_query, [&](int t, float sum) { add_to(gradient.read(), dq, t, sum); });
            if constexpr (Corrects)
                read.sum_rows(of_key, [&](int t, float sum) { add_to(gradient.read(), read, t, sum); });
            dk.sum_rows(of_key, [&](int t, float sum) { add_to(gradient.written(), dk, t, sum * steps.strength(t)); });
        }
        if (Gated && complement)
            multiply_stored<kPasses, false, false>(dq, 0, dq.row + kTileRows, shared.d_scores.parts[0], shared.k,
                                                   steps.gates.write());
        else
            shared.d_scores.template multiply<kPasses, false, false>(dq, 0, dq.row + kTileRows, shared.k);
        store_tile(dq, key_head(p.dq, key), start, time);
        if constexpr (Corrects) dk.each_with(read, [](int, int, float& value, float& other) { value += other; });
        shared.d_scores.template multiply<kPasses, true, false>(dk, dk.row, kSide, shared.q);
        if constexpr (Corrects) {
            shared.pairs.template multiply<kPasses, false, false>(dk, 0, dk.row + kTileRows, shared.k);
            shared.pairs.template multiply<kPasses, true, false>(dk, dk.row, kSide, shared.k);
        } else if constexpr (Gated) {
            dk.sum_rows(of_key, [&](int t, float sum) { add_to(gradient.write_strength(), dk, t, sum); });
            dk.each([&](int t, int, float& value) { value *= steps.strength(t); });
        }
        store_tile(dk, key_head(p.dk, key), start, time);
    }
    if constexpr (!Corrects && Of == Side::kKeysAlone) {
        const bool there = all_keys && all_values && !Decays;  // in shared memory
        const Sequence& k = Decays ? written : p.k;
        for (int value = 0; value < slice.columns; value += value_part) {
            const int values = min(value_part, slice.columns - value);
            Tile dv = own_tile(values);
            for (int key = 0; key < slice.key_rows; key += key_part) {
                const int keys = min(key_part, slice.key_rows - key);
                if (!there) {
                    __syncthreads();
                    if (!all_keys || Decays) copy_steps(shared.k, key_head(k, key), keys, start, time);
                    if (!all_values && key == 0)
                        copy_steps(shared.d_out, value_head(p.d_out, value), values, start, time);
                    copy_state(shared.d_state, slice.d_states, key, keys, value, values);
                    arrive();
                }
                if (is_in(dv, values)) multiply_stored<kPasses, false, true>(dv, 0, keys, shared.k, shared.d_state);
            }
            if (!is_in(dv, values)) continue;
            if constexpr (Gated) dv.each([&](int s, int, float& x) { x *= steps.to_end(s) * steps.strength(s); });
            shared.pairs.template multiply<kPasses, true, false>(dv, dv.row, kSide, shared.d_out);
            store_tile(dv, value_head(p.dv, value), start, time);
        }
    }
    if constexpr (Gated) gradient.put_passing(passed);
    __syncthreads();
    if (Corrects && p.d_beta.data != nullptr && thread < kSide && start + thread < time)
        store_step(p.d_beta, batch, head, start + thread, shared.d_beta[thread] + shared.d_beta[kSide + thread], false);
    if constexpr (Gated) gradient.store(p.d_log_gate, batch, head, start, kSide, time, steps.gates, complement, false);
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

template <typename T>
cudaError_t run_pass(const RuleBackward& p, const WalkPlan& plan, cudaStream_t stream) {
    using F = Factor<T>;
    const int interval = interval_of(p.sizes, kSide) / kSide, kept = kept_states(p.sizes);
    const Local local(p);
    unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
    return for_each_slice<F>(plan, p.sizes, workspace, [&](const Slice<F>& slice, size_t bytes) {
        cudaError_t error = launch_local<T>(local, plan.pass, slice, stream);
        if (error != cudaSuccess) return error;

        Walks<F> w = walks_of<T>(p, plan, slice);
        w.pass.backward = false;
        w.length = interval;
        w.count = (slice.chunks + interval - 1) / interval;
        const int64_t head = slice.first_head;
        w.others = {nth_state(p.states, p.sizes, head * kept + slice.begin / interval - 1), kept, 1};
        w.first = slice.begin > 0 ? w.others : WalkStates{nth_state(p.initial_state, p.sizes, head), 1, 0};
        error = launch_walks<T>(w, stream);
        if (error != cudaSuccess) return error;

        w.pass.backward = true;
        const Sequence written = w.keys;
        (plan.pass.corrects ? w.queries : w.keys) =
            plan.pass.decays ? slice.template sequence_of<T>(slice.queries, slice.key_rows, p.sizes) : p.q;
        w.values = plan.pass.values ? slice.template sequence_of<T>(slice.d_outs, slice.columns, p.sizes) : p.d_out;
        w.d_values = p.dv;
        const size_t state = sizeof(float) * p.sizes.key_dim * p.sizes.value_dim;
        float* const between = reinterpret_cast<float*>(workspace + plan.bytes - up_to_256(plan.heads * state));
        w.ends = {slice.begin > 0 ? between : nth_state(p.d_initial_state, p.sizes, head), 1, 0};
        const bool last = (slice.begin + slice.chunks) * kSide >= p.sizes.time;
        error = launch_walk<T>(plan, w, last ? nth_state(p.d_final_state, p.sizes, head) : between, workspace + bytes,
                               stream);
        if (error != cudaSuccess) return error;
        const auto find = [&](auto kernel, const RuleBackward& of, const Slice<F>& from) {
            return launch(kernel, dim3(slice.heads, slice.chunks), dim3(kTileThreads),
                          plan.last_shared, stream, of, written, from, plan.key_part, plan.value_part);
        };
        return with_rule(plan.pass, [&](auto corrects, auto gated, auto decays, auto values) {
            if constexpr (values) {
                const Slice<F> turned = slice.swapped();
                error = find(gradients<T, corrects, gated, decays, Side::kKeys>, side_of<T>(p, slice), slice);
                if (error != cudaSuccess) return error;
                return find(gradients<T, corrects, gated, decays, Side::kValues>, side_of<T>(swapped(p), turned),
                            turned);
            } else {
                return find(gradients<T, corrects, gated, decays, Side::kKeysAlone>, p, slice);
            }
        });
    });
}

cudaError_t run(const RuleBackward& p, bool corrects, cudaStream_t stream) {
    return run_walked<GradientLayout>(p, pass_of(p, corrects, true), [&](const WalkPlan& plan, auto zero) {
        return run_pass<decltype(zero)>(p, plan, stream);
    });
}

}  // namespace

ChunkedPlan chunked_plan_backward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit) {
    return walked_plan<GradientLayout>(sizes, dtype, pass, limit);
}

extern "C" cudaError_t fastweights_diagonal_backward_chunked(const RuleBackward* params, cudaStream_t stream) {
    return run(*params, false, stream);
}
extern "C" cudaError_t fastweights_delta_backward_chunked(const RuleBackward* params, cudaStream_t stream) {
    return run(*params, true, stream);
}
extern "C" size_t fastweights_diagonal_backward_chunked_workspace(const RuleBackward* params) {
    return walked_workspace<GradientLayout>(*params, pass_of(*params, false, true));
}
extern "C" size_t fastweights_delta_backward_chunked_workspace(const RuleBackward* params) {
    return walked_workspace<GradientLayout>(*params, pass_of(*params, true, true));
}

}  // namespace fairseq_fastweights
