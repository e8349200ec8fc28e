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
template <Side Of>
using SideOf = std::integral_constant<Side, Of>;

// A part of the keys and values, in `Width` times 16 keys. Of 64 keys two warps share each block of steps, and have half of the
// columns of its products.
template <typename T, bool Corrects, Side Of, int Width>
struct DecayedParts {
    using F = Factor<T>;
    static constexpr int kKeys = 16 * Width, kGroups = Width == 4 ? 2 : 1, kThreads = kGroups * kStripThreads;
    using States = Rows<F, Of == Side::kValues ? kSide : kKeys>;
    Rows<T, kKeys> q, k, erase;
    BlockPairs<F, Of != Side::kKeysAlone> d_scores;
    BlockPairs<F, !Corrects> pairs;              // the gradient of the system or, where nothing corrects, the scores
    Rows<float, kSteps> weights, erase_weights;  // (t, s % 16): dP and dG of pairs of one block, mirrored
    Rows<T, kSide> v;                            // in the place of these, until they are found
    float *beta, *d_beta;                        // by step; d_beta by group as well
    DecayFactors<T, kKeys> factors;
    // One after another in the same place: what products with states take, factors with decays, and what comes of products.
    Rows<T, kSide> d_out;
    WrittenRows<T, Corrects> update;
    Rows<F, kSide> d_right;  // transposed
    States state, d_state;   // transposed, but for gradients of values
    Rows<float, kKeys> reads, writes, erase_reads;
    size_t bytes;

    __host__ __device__ DecayedParts(Carver carver, int values)
        : q(carver, kSide), k(carver, kSide), erase(carver, Corrects ? kSide : 0) {
        const Carver first = carver;
        d_scores = BlockPairs<F, Of != Side::kKeysAlone>(carver);
        if (Corrects || Of == Side::kKeysAlone) pairs = BlockPairs<F, !Corrects>(carver);
        weights = Rows<float, kSteps>(carver, kSide);
        erase_weights = Rows<float, kSteps>(carver, Corrects ? kSide : 0);
        Carver early = first;
        if (Corrects) v = Rows<T, kSide>(early, kSide);
        carver.used = max_of(carver.used, early.used);
        beta = carver.take<float>(Corrects ? kSide : 0);
        d_beta = carver.take<float>(Corrects ? kGroups * kSide : 0);
        factors.totals = Rows<float, kKeys>(carver, kBlocks);
        factors.masses = Rows<float, kKeys>(carver, factors.kMasses);
        const Carver place = carver;
        const int states = Of == Side::kValues ? kKeys : values, of_erase = Corrects ? kSide : 0;
        d_out = Rows<T, kSide>(carver, kSide);
        update = WrittenRows<T, Corrects>(carver, rows_of_writes<Corrects>(values));
        d_right = Rows<F, kSide>(carver, Corrects ? values : 0);
        state = States(carver, states);
        d_state = States(carver, states);
        Carver second = place, third = place;
        factors.reading = Rows<T, kKeys>(second, kSide);
        factors.written = Rows<T, kKeys>(second, kSide);
        factors.reading_erase = Rows<T, kKeys>(second, of_erase);
        reads = Rows<float, kKeys>(third, kSide);
        writes = Rows<float, kKeys>(third, kSide);
        erase_reads = Rows<float, kKeys>(third, of_erase);
        bytes = max_of(carver.used, max_of(second.used, third.used));
    }
    // Blocks of a multiprocessor that shared memory has room for.
    static constexpr int kAtOnce = kRounded<T> || (sizeof(T) == 2 && !Corrects) ? 2 : 1;

    __host__ __device__ static constexpr int max_of(int a, int b) { return a > b ? a : b; }
};

template <typename T, bool Corrects, Side Of, int Width>
__global__ void __launch_bounds__((DecayedParts<T, Corrects, Of, Width>::kThreads),
                                  (DecayedParts<T, Corrects, Of, Width>::kAtOnce))
    decayed_gradients(const RuleBackward p, const Sequence written, const Slice<Factor<T>> slice,
                      const int value_part) {
    using F = Factor<T>;
    using Parts = DecayedParts<T, Corrects, Of, Width>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = Parts::kKeys, kGroups = Parts::kGroups,
                  kThreads = Parts::kThreads, kOwn = kKeys / kGroups, kOwnSide = kSide / kGroups;
    constexpr bool kTurned = Of == Side::kValues, kAlone = Of == Side::kKeysAlone;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Parts shared(Carver(memory), value_part);
    const DecayFactors<T, kKeys>& factors = shared.factors;
    const Place at(slice, p.sizes);
    const int thread = threadIdx.x, lane = warp_lane(), start = at.start, time = p.sizes.time;
    const int warp = __shfl_sync(kAllLanes, thread / kWarp, 0), block = warp % kBlocks, group = warp / kBlocks;
    const int row = block * kSteps, column = group * kOwn, own = column + lane;  // own: the lane's key, if it has one
    const bool there = lane < kOwn;
    const auto key_head = [&](const Sequence& x, int key) {
        return Head<T>(x, at.batch, at.head, key, p.sizes.key_dim);
    };
    const auto value_head = [&](const Sequence& x, int value) {
        return Head<T>(x, at.batch, at.head, value, p.sizes.value_dim);
    };
    const auto values_from = [&](int value) { return min(value_part, slice.columns - value); };
    const auto copy_values = [&](int value) {
        const int values = values_from(value);
        copy_steps<kThreads>(shared.d_out, value_head(p.d_out, value), start, time);
        copy_writes<Corrects, kThreads>(shared.update, slice, at, p.v, p.sizes, value, values);
        if constexpr (Corrects)
            copy_pieces<kThreads>(shared.d_right, slice.rows_of(slice.d_right, at.local, at.n) + value * kSide, kSide,
                                  values, values, kSide);
    };
    const auto copy_state = [&](const typename Parts::States& to, F* all, int key, int value) {
        const F* const from = slice.state_of(all, at.local, at.n);
        const int values = values_from(value), keys = slice.key_rows - key;
        if constexpr (kTurned)
            copy_pieces<kThreads>(to, from + key * slice.columns + value, slice.columns, kKeys, keys, values);
        else
            copy_pieces<kThreads>(to, from + value * slice.key_rows + key, slice.key_rows, values, values, keys);
    };
    const auto copy_keys = [&](int key) {
        copy_steps<kThreads>(shared.q, key_head(p.q, key), start, time);
        copy_steps<kThreads>(shared.k, key_head(p.k, key), start, time);
        if constexpr (Corrects)
            copy_steps<kThreads>(shared.erase, key_head(p.erase.data != nullptr ? p.erase : p.k, key), start, time);
    };
    const auto arrive = [] {
        copies_commit();
        copies_wait<0>();
        __syncthreads();
    };

    OfSteps d_beta = {};
    copy_keys(0);
    if constexpr (kAlone) {
        Strip<kOwnSide / 8> d_scores, d_system;  // dP and dA
        d_scores.clear(), d_system.clear();
        const int first = group * kOwnSide;  // of their places
        for (int value = 0; value < slice.columns; value += value_part) {
            const int blocks = values_from(value) / 16;
            if (value > 0) __syncthreads();
            copy_values(value);
            if constexpr (Corrects) {
                copy_steps<kThreads>(shared.v, value_head(p.v, value), start, time);
                if (value == 0 && thread < kSide)
                    shared.beta[thread] = load_step(p.beta, at.batch, at.head, start + thread, time);
            }
            arrive();
            const auto update = Corrects ? shared.update.from(0, first) : shared.update.from(first, 0);
            multiply_rows<kPasses, false, Corrects>(d_scores, shared.d_out, row, update, blocks);
            if constexpr (Corrects)
                multiply_rows<kPasses, true, true>(
                    d_system, shared.d_right, row, update, blocks, [&](int j, int inner, float x, float y) {
                        if (group > 0) return;
                        const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(&shared.v(row + j, inner));
                        d_beta[j >= 8] += x * widen<float>(pair.x) + y * widen<float>(pair.y);
                    });
        }
        // Pairs of two blocks are kept for products, those of one as weights.
        const auto keep = [&](auto& strip, const auto& pairs, const Rows<float, kSteps>& weights) {
#pragma unroll
            for (int n = 0; n < kOwnSide / kSteps; ++n) {
                const int across = first / kSteps + n;
                Strip<2>& part = strip.template part<2>(2 * n);
                if (across < block) pairs.write(part, block, across);
                if (across == block)
                    part.each([&](int s, int t, float& x) {
                        if (s <= t) weights(row + t, s) = weights(row + s, t) = x;
                    });
            }
        };
        if constexpr (Corrects) {
            const LowerBlocks<F> products = slice.lower_of(slice.products, at.local, at.n);
            d_system.each_pair([&](int place, int t, float& x, float& y) {
                const int s = first + place;
                x = s < row + t ? -x : 0.0f;
                y = s + 1 < row + t ? -y : 0.0f;
                if (!products.has(row, s)) return;
                const Pair<F> pair = *reinterpret_cast<const Pair<F>*>(&products(row + t, s));
                d_beta[t >= 8] += x * widen<float>(pair.x) + y * widen<float>(pair.y);
                x *= shared.beta[row + t];
                y *= shared.beta[row + t];
            });
            __syncthreads();  // nobody reads v any more
            keep(d_system, shared.pairs, shared.erase_weights);
        } else {
            shared.pairs.template copy<kThreads>(slice.lower_of(slice.scores, at.local, at.n).data,
                                                 slice.lower_of(slice.rest, at.local, at.n).data);
        }
        keep(d_scores, shared.d_scores, shared.weights);
    } else {
        shared.d_scores.template copy<kThreads>(slice.lower_of(slice.d_scores, at.local, at.n).data,
                                                slice.lower_of(slice.d_rest, at.local, at.n).data);
        arrive();
        for (int i = thread; i < kSide * kSteps; i += kThreads) {
            const int t = i / kSteps, s = t / kSteps * kSteps + i % kSteps;
            shared.weights(t, i % kSteps) = shared.d_scores.get(max(t, s), min(t, s));
        }
    }

    for (int key = 0; key < slice.key_rows; key += kKeys) {
        Strip<kOwn / 8> dq, read, dk;
        dq.clear(), read.clear(), dk.clear();
        float whole = 0.0f;  // this thread's part of its key's sum of S_0 * dS
        for (int value = 0; value < slice.columns; value += value_part) {
            const int values = values_from(value), blocks = values / 16;
            __syncthreads();
            if (value == 0 && key > 0) copy_keys(key);
            if (!kAlone || key > 0 || slice.columns > value_part) copy_values(value);
            copy_state(shared.state, slice.states, key, value);
            copy_state(shared.d_state, slice.d_states, key, value);
            arrive();
            if (there)
                for (int j = block; j < values; j += kBlocks) {
                    const int down = kTurned ? own : j, across = kTurned ? j : own;
                    const float product = shared.state.get(down, across) * shared.d_state.get(down, across);
                    whole += kAlone ? product : product * slice.value_decays_of(at.local, at.n)[value + j];
                }
            const auto of_own = [&](const auto& x) { return kTurned ? x.from(column, 0) : x.from(0, column); };
            const auto state = of_own(shared.state), d_state = of_own(shared.d_state);
            multiply_rows<kPasses, false, !kTurned>(dq, shared.d_out, row, state, blocks);
            if constexpr (Corrects) multiply_rows<kPasses, true, true>(read, shared.d_right, row, state, blocks);
            multiply_rows<kPasses, Corrects, !kTurned>(dk, shared.update, row, d_state, blocks);
        }
        float gates[kSteps] = {};
        if (there)
            load_logs<T>(gates, p.log_key_decay, at.batch, at.head, key + own, p.sizes.key_dim, start + row, time);
        exponentiate(gates);
        __syncthreads();
        if (there) factors.template write<Corrects>(row, own, gates, shared.q, shared.k, shared.erase, whole);
        __syncthreads();
        factors.template pass_to_readers<kPasses, false>(dq, shared.d_scores, factors.reading, row, column);
        if constexpr (Corrects) {
            read.each([](int, int, float& x) { x = -x; });
            Strip<kOwn / 8> by_erase = read;  // times E * F_.0
            for (int before = 0; before < block; ++before) by_erase.scale(&factors.totals(before, column));
            by_erase.dot(d_beta, factors.reading_erase.from(row, column));
            read.each([&](int, int j, float& x) { x *= shared.beta[row + j]; });
            factors.template pass_to_readers<kPasses, true>(read, shared.pairs, factors.reading_erase, row, column);
        }
        factors.template pass_to_writers<kPasses, Corrects>(dk, shared.d_scores, shared.pairs, row, column);
        __syncthreads();
        dq.write(shared.reads.from(row, column));
        dk.write(shared.writes.from(row, column));
        if constexpr (Corrects) read.write(shared.erase_reads.from(row, column));
        __syncwarp();
        if (!there) continue;
        // A gradient of this lane's key, in step t of its block.
        const bool in = key + own < p.sizes.key_dim;
        const int left = time - start - row;
        const auto putter = [&](auto zero, const Sequence& to) {
            using To = decltype(zero);
            const int stride = static_cast<int>(to.time);
            To* const first = Head<To>(to, at.batch, at.head, key + own, 0).data + (start + row) * to.time;
            const bool wanted = in && to.data != nullptr;
            return [=](int t, float x) {
                if (wanted && t < left) first[static_cast<int64_t>(stride) * t] = narrow<To>(x);
            };
        };
        const auto put_q = putter(T(), p.dq), put_k = putter(T(), p.dk);
        const auto put_log = [&](int t, float x) {
            if (p.d_log_key_decay.dtype == kFloat32)
                putter(float(), p.d_log_key_decay)(t, x);
            else
                putter(T(), p.d_log_key_decay)(t, x);
        };
        using Inputs = Rows<T, kKeys>;
        using Weighted = WeightedPairs<Inputs, Rows<float, kSteps>, Rows<float, kKeys>>;
        const auto of = [&](const auto& rows) { return rows.from(row, 0); };
        const float passing = factors.passing(block, own);
        const Weighted pairs{of(shared.q),     of(shared.k),      of(shared.weights),
                             of(shared.reads), of(shared.writes), false};
        if constexpr (Corrects) {
            const Column<Rows<float, kKeys>> early(pairs.writes, own), logs(pairs.reads, own);
            differentiate_column<false>(
                pairs, gates, own, passing, put_q, [&](int t, float x) { early.set(t, x); },
                [&](int t, float x) { logs.set(t, x); });
            differentiate_column<true>(
                Weighted{of(shared.erase), of(shared.k), of(shared.erase_weights), of(shared.erase_reads), pairs.writes,
                         p.erase.data == nullptr},
                gates, own, 0.0f, putter(T(), p.d_erase), [&](int t, float x) { put_k(t, early.get(t) + x); },
                [&](int t, float x) { put_log(t, logs.get(t) + x); });
        } else {
            differentiate_column<false>(pairs, gates, own, passing, put_q, put_k, put_log);
        }
    }
    if constexpr (!Corrects && kAlone) {
        for (int value = 0; value < slice.columns; value += value_part) {
            const int first = group * kOwnSide, across = min(values_from(value) - first, kOwnSide) / 16;
            Strip<kOwnSide / 8> dv;
            dv.clear();
            for (int key = 0; key < slice.key_rows; key += kKeys) {
                __syncthreads();
                copy_steps<kThreads>(shared.k, key_head(written, key), start, time);
                if (key == 0) copy_steps<kThreads>(shared.d_out, value_head(p.d_out, value), start, time);
                copy_state(shared.d_state, slice.d_states, key, value);
                arrive();
                each_columns(dv, across, [&](auto& part, int more) {
                    multiply_rows<kPasses, false, false>(part, shared.k, row, shared.d_state.from(first + more, 0),
                                                         Width);
                });
            }
            each_columns(dv, across, [&](auto& part, int more) {
                for (int to = block; to < kBlocks; ++to)
                    shared.pairs.template multiply<kPasses, true>(part, to, block,
                                                                  shared.d_out.from(to * kSteps, first + more));
            });
            if (across > 0) dv.store_rows(value_head(p.dv, value + first), 16 * across, start + row, time);
        }
    }
    if (Corrects && p.d_beta.data != nullptr) {
        sum_steps(d_beta, [&](int j, float sum) { shared.d_beta[group * kSide + row + j] = sum; });
        __syncthreads();
        if (thread >= kSide || start + thread >= time) return;
        float sum = 0.0f;
        for (int of = 0; of < kGroups; ++of) sum += shared.d_beta[of * kSide + thread];
        store_step(p.d_beta, at.batch, at.head, start + thread, sum);
    }
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
size_t decayed_gradient_bytes(bool corrects, bool both, int keys, int values) {
    return with_width(keys, [&](auto width) {
        const auto bytes = [&](auto corrects, auto side) {
            return DecayedParts<T, corrects, decltype(side)::value, width>(Carver(nullptr), values).bytes;
        };
        if (corrects) return bytes(std::true_type(), SideOf<Side::kKeysAlone>());
        if (!both) return bytes(std::false_type(), SideOf<Side::kKeysAlone>());
        return std::max(bytes(std::false_type(), SideOf<Side::kKeys>()),
                        bytes(std::false_type(), SideOf<Side::kValues>()));
    });
}

template <typename T>
cudaError_t launch_decayed_gradients(const RuleBackward& p, const WalkPlan& plan, const Slice<Factor<T>>& slice,
                                     const Sequence& written, cudaStream_t stream) {
    return with_width(plan.key_part, [&](auto width) {
        const auto find = [&](auto corrects, auto side, const RuleBackward& of, const Slice<Factor<T>>& from) {
            constexpr Side kOf = decltype(side)::value;
            return launch(decayed_gradients<T, corrects, kOf, width>, dim3(slice.heads, slice.chunks),
                          dim3(DecayedParts<T, corrects, kOf, width>::kThreads), plan.last_shared, stream, of, written,
                          from, plan.value_part);
        };
        const std::true_type yes{};
        const std::false_type no{};
        if (plan.pass.corrects) return find(yes, SideOf<Side::kKeysAlone>(), p, slice);
        if (!plan.pass.values) return find(no, SideOf<Side::kKeysAlone>(), p, slice);
        const cudaError_t error = find(no, SideOf<Side::kKeys>(), side_of<T>(p, slice), slice);
        if (error != cudaSuccess) return error;
        const Slice<Factor<T>> turned = slice.swapped();
        return find(no, SideOf<Side::kValues>(), side_of<T>(swapped(p), turned), turned);
    });
}

#define FASTWEIGHTS_OF(T)                                                                                           \
    template size_t decayed_gradient_bytes<T>(bool, bool, int, int);                                                \
    template cudaError_t launch_decayed_gradients<T>(const RuleBackward&, const WalkPlan&, const Slice<Factor<T>>&, \
                                                     const Sequence&, cudaStream_t);
FASTWEIGHTS_OF(float)
FASTWEIGHTS_OF(__half)
FASTWEIGHTS_OF(__nv_bfloat16)
#undef FASTWEIGHTS_OF

}  // namespace fairseq_fastweights
