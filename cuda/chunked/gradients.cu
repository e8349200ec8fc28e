// The backward pass of all rules, in the notation of gates.cuh:
//
//   intra_chunk  all chunks at once: gates, T = (I + B G)^-1 and P = tril(D_ts Q K^T)        (intra_chunk.cu)
//   pass_states  from each kept state to the next, all intervals at once: states and U       (state_passing.cu)
//   pass_states  chunk after chunk, from the last: dS, X = T^T dU, dV = B X                  (state_passing.cu)
//   gradients    all chunks at once, with dP = tril(dY U^T) and dA = -X U^T:                 (here)
//     dQ = diag(D_t0) dY S_0^T + (D_ts dP) K
//     dK = (D_ts dP)^T Q + diag(D_es) U dS^T + (D_ts B dA + (D_ts B dA)^T) K - diag(D_t0) dV S_0^T
//     d beta_t = <X_t, V_t> - D_t0 <X_t, S_0^T k_t> + <dA_t, G_t>
//
// The last is <X_t, R_t> + <dA_t, G_t> without R: the terms of R have been multiplied by X anyway, for dK.
//
// without the delta rule, U is diag(w) V with the write factors, there is neither dR nor dA, and
//     dV = diag(w) (P^T dY + diag(D_es) K dS)
//
// With decays by dimension or erase keys the last products with states are decayed, and pairs of steps are separated by
// secondary chunking (secondary_chunking_gradient.cuh). There the decayed erase key times beta has the place of K.
// Where values decay, a second launch computes their gradients as those of keys, with dY in the place of Q, V in that
// of K and P in that of dP; the decayed operands and dP come from the intra-chunk kernel.
#include "passes.cuh"
#include "secondary_chunking_gradient.cuh"

namespace fairseq_fastweights {
namespace {

// The dimensions whose gradients a launch computes: all or, where values decay, keys or values, the latter in the place
// of keys.
enum class Side { kUndecayed, kDecayed, kKeys, kValues };
constexpr Side first_side(bool decays, bool values) {
    return values ? Side::kKeys : decays ? Side::kDecayed : Side::kUndecayed;
}

// Shared memory for a part of the keys and values. With decays by dimension a lane has one of the keys.
template <typename T, bool IsDelta, bool Gated, Side Of, int Width>
struct GradientLayout {
    using C = Computed<T>;
    static constexpr bool kDecays = Of != Side::kUndecayed;
    static constexpr int kKeys = kDecays && Width > 2 ? kWarp : 16 * Width;
    using States = Rows<C, Of == Side::kValues ? kChunk : kKeys>;
    Rows<T, kKeys> q, k, erase;
    Rows<T, kChunk> d_out, v;  // v shares memory with d_scores, which are written later
    UpdateRows<T, IsDelta> update;
    Rows<C, kChunk> d_rhs;  // transposed
    States state, d_state;  // transposed, but for gradients of values
    // Pairs: d_scores; the gradient of the system or, without the delta rule, the scores; with decays mirrored.
    Rows<std::conditional_t<kDecays, float, C>, kChunk> d_scores, pairs;
    ChunkGates<Gated> steps;
    GateSums sums;
    LevelRows<kKeys> levels;
    size_t bytes;

    __host__ __device__ GradientLayout(SharedAllocator allocator, int values)
        : q(allocator, kChunk), k(allocator, kChunk), erase(allocator, kDecays && IsDelta ? kChunk : 0),
          d_out(allocator, kChunk), update(allocator, IsDelta ? values : kChunk),
          d_rhs(allocator, IsDelta ? values : 0), state(allocator, Of == Side::kValues ? kKeys : values),
          d_state(allocator, Of == Side::kValues ? kKeys : values), d_scores(allocator, kChunk),
          pairs(allocator, kDecays && !IsDelta ? 0 : kChunk) {
        v.data = reinterpret_cast<T*>(d_scores.data);
        if (Gated || IsDelta) steps = ChunkGates<Gated>(allocator);
        if (Gated) sums = GateSums(allocator);
        if (kDecays) levels = LevelRows<kKeys>(allocator);
        bytes = allocator.used;
    }
};

// `written`: keys decayed to the chunk's end.
template <typename T, bool IsDelta, bool Gated, Side Of, int Width>
__global__ void __launch_bounds__(kChunkThreads, sizeof(T) == 2 ? 2 : 1)
    gradients(const RuleBackward p, const Sequence written, const Slice<Computed<T>> slice, const int value_part) {
    using Parts = GradientLayout<T, IsDelta, Gated, Of, Width>;
    constexpr bool kDecays = Parts::kDecays, kOfBoth = Of >= Side::kKeys, kTransposed = Of == Side::kValues;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = Parts::kKeys;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Parts shared(SharedAllocator(memory), value_part);
    const ChunkGates<Gated>& steps = shared.steps;
    const ChunkCoord at(slice, p.sizes, kDecays);
    const int thread = threadIdx.x, row = first_own_step(), start = at.start, time = p.sizes.time;
    const int keys_in_all = p.sizes.key_dim, values_in_all = p.sizes.value_dim;
    const bool complement = !IsDelta && p.complement != 0;
    const bool all_keys = slice.key_rows <= kKeys, all_values = slice.columns <= value_part;
    const auto values_from = [&](int value) { return min(value_part, slice.columns - value); };
    const auto copy_keys = [&](int key) {
        at.copy(shared.q, p.q, key, keys_in_all);
        at.copy(shared.k, p.k, key, keys_in_all);
        if constexpr (kDecays && IsDelta)
            at.copy(shared.erase, p.erase.data != nullptr ? p.erase : p.k, key, keys_in_all);
    };
    const auto copy_values = [&](int value) {
        at.copy(shared.d_out, p.d_out, value, values_in_all);
        at.template copy_updates<IsDelta>(shared.update, p.v, value, values_from(value));
        if constexpr (IsDelta) at.copy_transposed(shared.d_rhs, slice.d_rhs, value, values_from(value));
    };
    const auto copy_all_values = [&](int value) {
        copy_values(value);
        if constexpr (IsDelta) at.copy(shared.v, p.v, value, values_in_all);
    };
    const auto copy_states = [&](int key, int value) {
        const int rows = kTransposed ? kKeys : values_from(value);
        at.template copy_state<kTransposed>(shared.state, slice.states, key, value, rows);
        at.template copy_state<kTransposed>(shared.d_state, slice.d_states, key, value, rows);
    };
    // A gate of this thread's step, whose write factor depends on it.
    const float own_log = Gated && complement ? load_step(p.log_gate, at.batch, at.head, start + thread, time) : 0.0f;

    // The first parts of all operands are copied at once, in the order of their use.
    copy_keys(0);
    if constexpr (Gated || IsDelta) steps.copy(slice.steps_of(at.local, at.n));
    copies_commit();
    copy_all_values(0);
    copies_commit();
    copy_states(0, 0);
    copies_commit();

    // Q K^T and, for the gradients of gates, K K^T: kept in registers until dP and dA are there.
    Fragment<kChunk / 8> scores, products;
    if constexpr (Gated || !(IsDelta || kDecays)) {
        scores.clear(), products.clear();
        each_part<2>(slice.key_rows, kKeys, copy_keys, [&](int) {
            multiply_rows<kPasses, false, false>(scores, shared.q, row, shared.k, kKeys / 16);
            if constexpr (IsDelta) multiply_rows<kPasses, false, false>(products, shared.k, row, shared.k, kKeys / 16);
        });
    }
    PerStep d_beta = {}, read_sums = {}, written_sums = {}, write_factor_sums = {};
    Fragment<kChunk / 8> d_scores, d_system;  // dP, dA
    d_scores.clear(), d_system.clear();
    each_part<1>(kOfBoth ? 0 : slice.columns, value_part, copy_all_values, [&](int value) {
        const int blocks = values_from(value) / 16;
        // dP = dY U^T, -dA = X U^T, and the part <X_t, V_t> of d beta_t.
        multiply_rows<kPasses, false, IsDelta>(d_scores, shared.d_out, row, shared.update, blocks);
        if constexpr (IsDelta) {
            multiply_rows<kPasses, true, true>(d_system, shared.d_rhs, row, shared.update, blocks);
#pragma unroll 1
            for (int inner = warp_lane() % 4; inner < 16 * blocks; inner += 4)
                UNROLL_FOR (int half = 0; half < 2; ++half) {
                    const int t = row + warp_lane() / 4 + 8 * half;
                    d_beta[half] += shared.d_rhs.get(inner, t) * shared.v.get(t, inner);
                }
        }
    });
    const auto by_beta = [&](auto& fragment) {
        fragment.each([&](int, int j, float& x) { x *= steps.beta(row + j); });
    };
    const auto mirror = [&](Fragment<kChunk / 8>& fragment, const auto& to) {
        fragment.each([&](int s, int j, float x) {
            if (s <= row + j) to(row + j, s) = to(s, row + j) = x;
        });
    };
    if constexpr (IsDelta) d_system.each([&](int s, int j, float& x) { x = s < row + j ? -x : 0.0f; });
    __syncthreads();  // d_scores take the memory of v
    if constexpr (kDecays) {
        if constexpr (kOfBoth) d_scores = load_pairs(at, row, slice.d_scores, slice.d_scores_low);
        mirror(d_scores, shared.d_scores);
        if constexpr (IsDelta) mirror(d_system, shared.pairs);
    } else {
        steps.mask_and_decay(d_scores, row);
        if constexpr (IsDelta) steps.mask_and_decay(d_system, row);
        // The terms of the gates' gradients within the chunk: P dP and G B dA, or w P dP.
        if constexpr (Gated) {
            Fragment<kChunk / 8> within = scores;
            within.each_with(d_scores, [](float& x, float y) { x *= y; });
            if constexpr (IsDelta) {
                products.each_with(d_system, [](float& x, float y) { x *= y; });
                products.each([&](int, int j, float& x) { d_beta[j >= 8] += x; });
                by_beta(products);
                within.each_with(products, [](float& x, float y) { x += y; });
            } else {
                within.scale(steps.write_factors());
            }
            shared.sums.add_within_chunk(within, row);
        }
        d_scores.write(shared.d_scores.from(row, 0));
        if constexpr (IsDelta) {
            scores = d_system;  // which is needed below by that name
            by_beta(scores);
        } else {
            steps.mask_and_decay(scores, row);
            if constexpr (Gated) scores.scale(steps.write_factors());
        }
        scores.write(shared.pairs.from(row, 0));
    }
    if (complement && Gated) d_scores.scale(steps.write_factors());  // for queries; keys have theirs in the end

    float passed = 0.0f;  // this thread's part of <S_0, dS>; with decays, of its key's row
    for (int key = 0; key < slice.key_rows; key += kKeys) {
        // dY S_0^T, X S_0^T (the gradient of keys through retrieval) and U dS^T, summed over the values.
        Fragment<kKeys / 8> dq, through_s, dk;
        dq.clear(), through_s.clear(), dk.clear();
        for (int value = 0; value < slice.columns; value += value_part) {
            if (!all_values || !all_keys) {
                __syncthreads();
                if (value == 0 && !all_keys && (key > 0 || !kDecays)) copy_keys(key);
                if (!all_values) copy_values(value);
                if (key > 0 || value > 0) copy_states(key, value);
            }
            arrive();
            const int blocks = values_from(value) / 16;
            multiply_rows<kPasses, false, !kTransposed>(dq, shared.d_out, row, shared.state, blocks);
            if constexpr (IsDelta && !kDecays)
                multiply_rows<kPasses, true, true>(through_s, shared.d_rhs, row, shared.state, blocks);
            multiply_rows<kPasses, IsDelta, !kTransposed>(dk, shared.update, row, shared.d_state, blocks);
            for (int j = row / kSubchunk; (Gated || kDecays) && j < 16 * blocks; j += kSubchunks)
                for (int own = warp_lane(); own < kKeys; own += kWarp) {
                    const int down = kTransposed ? own : j, across = kTransposed ? j : own;
                    const float product = shared.state.get(down, across) * shared.d_state.get(down, across);
                    passed += kOfBoth ? product * slice.value_decays_of(at.local, at.n)[value + j] : product;
                }
        }
        // Decays by dimension: a lane goes through the 16 steps of its key, level by level.
        if constexpr (kDecays) {
            SubchunkGradients<T, kKeys> of(shared.levels, row, at, p.log_key_decay, key, keys_in_all);
            const auto store = [&](auto zero, const Sequence& to, Fragment<kKeys / 8> fragment) {
                using To = decltype(zero);
                if (to.data != nullptr)
                    fragment.store_rows(at.template part_of<To>(to, key, keys_in_all), kKeys, start + row, time);
            };
            load_column(of.late, shared.q.from(row, 0), of.column);
            load_column(of.early, shared.k.from(row, 0), of.column);
            of.begin(dk);
            of.add(dq, shared.d_scores);
            store(T(), p.dq, of.fragment_of(of.d_late));
            if constexpr (IsDelta) {
                UNROLL_FOR (int t = 0; t < kSubchunk; ++t)
                    of.late[t] = steps.beta(row + t) * shared.erase.get(row + t, of.column);
                for (int value = 0; value < slice.columns; value += value_part) {
                    if (!all_values) {
                        __syncthreads();
                        copy_values(value);
                        copy_states(key, value);
                        arrive();
                    }
                    multiply_rows<kPasses, true, true>(through_s, shared.d_rhs, row, shared.state,
                                                       values_from(value) / 16);
                }
                through_s.each([](int, int, float& x) { x = -x; });
                of.add(through_s, shared.pairs);
                Fragment<kKeys / 8> d_erase = of.fragment_of(of.d_late);
                d_erase.dot(d_beta, shared.erase.from(row, 0));
                by_beta(d_erase);
                store(T(), p.d_erase, d_erase);
                if (p.erase.data == nullptr)
                    UNROLL_FOR (int t = 0; t < kSubchunk; ++t) of.d_early[t] += steps.beta(row + t) * of.d_late[t];
            }
            of.add_passing(passed);
            passed = 0.0f;
            store(T(), p.dk, of.fragment_of(of.d_early));
            const Fragment<kKeys / 8> d_log = of.fragment_of(of.d_log);
            p.d_log_key_decay.dtype == kFloat32 ? store(float(), p.d_log_key_decay, d_log)
                                                : store(T(), p.d_log_key_decay, d_log);
            continue;
        }
        // The parts through the state pass the gates from the chunk's start, and those to its end.
        const auto own_q = shared.q.from(row, 0), own_k = shared.k.from(row, 0);
        if constexpr (Gated) {
            dq.each([&](int, int j, float& x) { x *= steps.from_start(row + j); });
            dq.dot(read_sums, own_q);
            dk.each([&](int, int j, float& x) { x *= steps.to_end(row + j); });
            dk.dot(written_sums, own_k);
        }
        // dQ += (D_ts dP) K
        if constexpr (Gated && !IsDelta) {
            multiply<kPasses, true>(has_wgmma(), dq, d_scores, shared.k);
            if (complement && kRounded<T>)
                multiply<kPasses, true>(has_wgmma(), dq, d_scores.template low_half<T>(), shared.k);
        } else {  // from shared memory: the fragment's registers are free
            multiply_rows<kPasses, false, true>(dq, shared.d_scores, row, shared.k, kChunk / 16);
        }
        dq.store_rows(at.template part_of<T>(p.dq, key, keys_in_all), kKeys, start + row, time);
        if constexpr (IsDelta) {
            through_s.each([&](int, int j, float& x) { x *= -steps.from_start(row + j); });
            if constexpr (Gated) {
                through_s.dot(d_beta, own_k);
                by_beta(through_s);
                through_s.dot(read_sums, own_k);
                multiply<kPasses, true>(has_wgmma(), through_s, scores, shared.k);
            } else {  // <dA, G> is <dA K, K>, which all but cancels out if a key comes again and again
                multiply<kPasses, true, true>(has_wgmma(), through_s, d_system, shared.k);
                through_s.dot(d_beta, own_k);
                by_beta(through_s);
            }
            dk.each_with(through_s, [](float& x, float y) { x += y; });
        }
        // dK += (D_ts dP)^T Q + (D_ts B dA)^T K
        multiply_rows<kPasses, true, true>(dk, shared.d_scores, row, shared.q, kChunk / 16);
        if constexpr (IsDelta) {
            multiply_rows<kPasses, true, true>(dk, shared.pairs, row, shared.k, kChunk / 16);
        } else if constexpr (Gated) {
            dk.dot(write_factor_sums, own_k);
            dk.each([&](int, int j, float& x) { x *= steps.write_factor(row + j); });
        }
        dk.store_rows(at.template part_of<T>(p.dk, key, keys_in_all), kKeys, start + row, time);
    }
    // dV = diag(w) (P^T dY + diag(D_es) K dS); delta rules have it from state passing.
    if constexpr (!IsDelta && !kOfBoth) {
        if constexpr (kDecays) {
            __syncthreads();
            load_pairs(at, row, slice.scores, slice.scores_low).write(shared.d_scores.from(row, 0));
        }
        for (int value = 0; value < slice.columns; value += value_part) {
            const int across = values_from(value) / 16;
            Fragment<kWidest / 8> dv;
            dv.clear();
            for (int key = 0; key < slice.key_rows; key += kKeys) {
                if (kDecays || !all_keys || !all_values) {
                    __syncthreads();
                    if (kDecays || !all_keys) at.copy(shared.k, written, key, keys_in_all);
                    if (!all_values && key == 0) at.copy(shared.d_out, p.d_out, value, values_in_all);
                    at.copy_state(shared.d_state, slice.d_states, key, value, 16 * across);
                    arrive();
                }
                each_columns(dv, across, [&](auto& part, int first) {
                    multiply_rows<kPasses, false, false>(part, shared.k, row, shared.d_state.from(first, 0),
                                                         kKeys / 16);
                });
            }
            if constexpr (Gated)
                dv.each([&](int, int j, float& x) { x *= steps.to_end(row + j) * steps.write_factor(row + j); });
            each_columns(dv, across, [&](auto& part, int first) {
                const auto& pairs = kDecays ? shared.d_scores : shared.pairs;
                multiply_rows<kPasses, true, true, kDecays>(part, pairs, row, shared.d_out.from(0, first), kChunk / 16);
            });
            dv.store_rows(at.template part_of<T>(p.dv, value, values_in_all), 16 * across, start + row, time);
        }
    }
    if (IsDelta && p.d_beta.data != nullptr)
        sum_steps(d_beta, [&](int j, float sum) {
            if (start + row + j < time) store_step(p.d_beta, at.batch, at.head, start + row + j, sum);
        });
    if constexpr (Gated) {
        const GateSums& sums = shared.sums;
        sum_steps(read_sums, [&](int j, float sum) { sums.read()[row + j] = sum; });
        sum_steps(written_sums, [&](int j, float sum) { sums.written()[row + j] = sum * steps.write_factor(row + j); });
        if (complement) sum_steps(write_factor_sums, [&](int j, float sum) { sums.write_factor()[row + j] = sum; });
        sums.put_passing(passed);
        __syncthreads();
        if (thread >= kChunk || start + thread >= time) return;
        float sum = sums.of(thread, steps.whole());
        if (complement) sum -= sums.write_factor()[thread] * expf(own_log);
        store_step(p.d_log_gate, at.batch, at.head, start + thread, sum);
    }
}

struct Gradients {
    template <typename T>
    static size_t bytes(const RulePass& pass, int keys, int values) {
        return with_rule(pass, [&](auto is_delta, auto gated, auto decays, auto both) {
            return with_width(keys, [&](auto width) {
                constexpr Side side = first_side(decays, both);
                return std::max(GradientLayout<T, is_delta, gated, side, width>(SharedAllocator(nullptr), values).bytes,
                                GradientLayout<T, is_delta, gated, both ? Side::kValues : side, width>(
                                    SharedAllocator(nullptr), values)
                                    .bytes);
            });
        });
    }

    template <typename T, typename C>
    static cudaError_t run(const RuleBackward& p, const PassPlan& plan, StatePassing<C> w, unsigned char* room,
                           cudaStream_t stream) {
        const Slice<C>& slice = w.slice;
        const int interval = interval_of(p.sizes, kChunk) / kChunk, kept = kept_states(p.sizes);
        const int64_t head = slice.first_head;
        w.pass.backward = false;
        w.length = interval;
        w.count = (slice.chunks + interval - 1) / interval;
        w.others = {nth_state(p.states, p.sizes, head * kept + slice.begin / interval - 1), kept, 1};
        w.first = slice.begin > 0 ? w.others : BoundaryStates{nth_state(p.initial_state, p.sizes, head), 1, 0};
        cudaError_t error = launch_state_passing<T>(w, stream);
        if (error != cudaSuccess) return error;

        w.pass.backward = true;
        const Sequence written = w.keys;
        RuleBackward of_keys = p, of_values = p;  // with operands decayed on the other side in the place of d_out and v
        of_keys.v = w.values;
        (plan.pass.is_delta ? w.queries : w.keys) =
            plan.pass.decays ? slice.template sequence_of<T>(slice.decayed_q, slice.key_rows, p.sizes) : p.q;
        w.values = plan.pass.decays_values ? slice.template sequence_of<T>(slice.decayed_dout, slice.columns, p.sizes)
                                           : p.d_out;
        w.d_values = p.dv;
        of_keys.d_out = w.values;
        if (plan.pass.decays_values) {
            std::swap(of_values.sizes.key_dim, of_values.sizes.value_dim);
            of_values.q = p.d_out, of_values.k = p.v, of_values.log_key_decay = p.log_value_decay;
            of_values.d_out = w.keys, of_values.v = written;
            of_values.dq = {};  // the gradients of d_out are not wanted
            of_values.dk = p.dv, of_values.d_log_key_decay = p.d_log_value_decay;
        }
        const size_t state = sizeof(float) * p.sizes.key_dim * p.sizes.value_dim;
        float* const between = reinterpret_cast<float*>(static_cast<unsigned char*>(p.workspace) + plan.bytes -
                                                        up_to_256(plan.heads * state));
        w.ends = {slice.begin > 0 ? between : nth_state(p.d_initial_state, p.sizes, head), 1, 0};
        const bool last = (slice.begin + slice.chunks) * kChunk >= p.sizes.time;
        error =
            pass_states_of_slice<T>(plan, w, last ? nth_state(p.d_final_state, p.sizes, head) : between, room, stream);
        if (error != cudaSuccess) return error;
        return with_rule(plan.pass, [&](auto is_delta, auto gated, auto decays, auto values) {
            const auto launch_side = [&](auto side, const RuleBackward& of, const Slice<C>& from) {
                return with_width(plan.key_part, [&](auto width) {
                    constexpr int kWidth = side == Side::kUndecayed ? width : std::min<int>(width, 2);
                    return launch(gradients<T, is_delta, gated, side, kWidth>, dim3(slice.heads, slice.chunks),
                                  dim3(kChunkThreads), plan.last_shared, stream, of, written, from, plan.value_part);
                });
            };
            error = launch_side(std::integral_constant<Side, first_side(decays, values)>(), of_keys, slice);
            if constexpr (values)
                if (error == cudaSuccess)
                    error = launch_side(std::integral_constant<Side, Side::kValues>(), of_values, slice.swapped());
            return error;
        });
    }
};

}  // namespace

ChunkedPlan chunked_plan_backward(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit) {
    return plan_of_pass<Gradients>(sizes, dtype, pass, limit);
}

extern "C" cudaError_t fastweights_backward_chunked(const RuleBackward* params, cudaStream_t stream) {
    return run_pass<Gradients>(*params, stream);
}
extern "C" size_t fastweights_backward_chunked_workspace(const RuleBackward* params) {
    return workspace_of_pass<Gradients>(*params);
}

}  // namespace fairseq_fastweights
