// The local stage, of all chunks of a slice at once: what gates and strengths make of a chunk's steps; of the delta rule, in the
// notation of system.cuh, also T = (I + B G)^-1, backwards P = tril(D_ts Q K^T) as well. Four of a block's warps have 16 columns
// of T each. With decays of keys also P and what they scale, in the notation of decays.cuh: Q * F_.0, K * F_e., E * F_.0.
//
// T is found by substitution from the inverses of its blocks on the diagonal, in float32 by three products whatever the inputs
// are: its errors reach all later steps.
#include <algorithm>

#include "blocks.cuh"
#include "stages.cuh"

namespace fairseq_fastweights {
namespace {

// As the walk multiplies by it: in one pass it is rounded here, once.
template <typename T>
__device__ __forceinline__ float as_right_factor(float x) {
    return sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x));
}

// Keys that are taken at once: with decays so many that a block fits wherever there are tensor cores for it.
template <typename T, bool Decays>
constexpr int kLocalKeys = !Decays          ? kWidest
                           : sizeof(T) == 4 ? 16
                                            : 32;

// Blocks of a multiprocessor that registers are held down for.
template <typename T, bool Decays, bool Backward>
constexpr int kLocalBlocks = sizeof(T) == 4 ? 1
                             : Decays       ? 2
                             : Backward     ? 3
                                            : 4;

template <typename T, bool Gated>
struct LocalLayout {
    DecayedRows<T> q, k, erase;  // without decays `rows` alone
    Matrix<float> totals, logs;  // of decays, by block
    Matrix<float> products;      // G; and the blocks' inverses, transposed, above its diagonal
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ LocalLayout(Carver carver, bool corrects, bool decays, bool backward, int keys)
        : products(carver.matrix<float>(corrects ? kSide : 0, kSide, 8)), steps(carver) {
        if (decays) {
            q = DecayedRows<T>(carver, keys);
            k = DecayedRows<T>(carver, keys);
            q.levels = k.levels = Stages<T>(carver, kLevels, kSide, keys);
            if (corrects) {
                erase = DecayedRows<T>(carver, keys);
                erase.levels = Stages<T>(carver, kLevels, kSide, keys);
            }
            totals = carver.matrix<float>(kTotals, keys, 0);
            logs = carver.matrix<float>(kBlocks, keys, 0);
        } else {
            k.rows = carver.matrix<T>(kSide, keys);
            q.rows = carver.matrix<T>(backward ? kSide : 0, keys);
        }
        bytes = carver.used;
    }

    // With the logs of a block's key dimension `gates`: all that products take of it, but for erase keys or, `of_erase`, of these.
    template <bool Corrects>
    __device__ __forceinline__ void write_decayed(const BlockColumn& at, bool of_erase, float (&gates)[kSteps]) const {
        float log = 0.0f;
#pragma unroll
        for (int t = 0; t < kSteps; ++t) log += gates[t];
        exponentiate(gates);
        const int b = at.block, i = at.column;
        if (Corrects && of_erase)
            return write_operands<false>(block_of(erase.rows, b), block_of(k.rows, b), erase.levels_of(b),
                                         block_of(erase.scaled, b), block_of(k.scaled, b), gates, i);
        write_operands(block_of(q.rows, b), block_of(k.rows, b), q.levels_of(b), block_of(q.scaled, b),
                       block_of(k.scaled, b), gates, i);
        totals(b, i) = product_of(gates);
        logs(b, i) = log;
    }
    // After that and a barrier: what the slice has of decays, for its key dimension `key`.
    template <bool Corrects, bool Backward, typename F>
    __device__ __forceinline__ void store_decayed(const BlockColumn& at, bool of_erase, const float (&gates)[kSteps],
                                                  const Slice<F>& slice, const Place& place, int key) const {
        const int b = at.block, i = at.column;
        const int64_t first = (slice.index(place.local, place.n) * kSide + b * kSteps) * slice.key_rows + key;
        const auto rows_of = [&](F* all) { return Matrix<T>{reinterpret_cast<T*>(all) + first, slice.key_rows}; };
        const auto copy = [&](F* to, const Matrix<T>& from) {
            const Column<Matrix<T>> target(rows_of(to), 0), source(block_of(from, b), i);
#pragma unroll
            for (int t = 0; t < kSteps; ++t) target.set(t, source.get(t));
        };
        if (Corrects && of_erase) return copy(slice.erased, erase.scaled);
        if constexpr (Corrects) {
            copy(slice.written, k.scaled);
        } else {
            const Column<Matrix<T>> target(rows_of(slice.written), 0), source(block_of(k.rows, b), i);
            float product = 1.0f;
            for (int after = b + 1; after < kBlocks; ++after) product *= totals(after, i);
#pragma unroll
            for (int s = kSteps - 1; s >= 0; --s) {
                target.set(s, source.get(s) * product);
                product *= gates[s];
            }
        }
        if constexpr (Corrects && Backward) {
            copy(slice.queries, q.scaled);
        } else if (slice.queries != nullptr) {
            const Column<Matrix<T>> target(rows_of(slice.queries), 0), source(block_of(q.rows, b), i);
            float product = 1.0f;
            for (int before = 0; before < b; ++before) product *= totals(before, i);
#pragma unroll
            for (int t = 0; t < kSteps; ++t) target.set(t, source.get(t) * (product *= gates[t]));
        }
        float* const decays = slice.decays_of(place.local, place.n) + key;
        if constexpr (Corrects) decays[b * slice.key_rows] = expf(logs(b, i));
        if (b > 0) return;
        totals(kBlocks, i) = totals(1, i) * totals(2, i);
        if constexpr (Corrects) return;
        float log = 0.0f;
        for (int block = 0; block < kBlocks; ++block) log += logs(block, i);
        decays[0] = expf(log);
        decays[slice.key_rows] = log;
    }
};

// Columns `first` and on, 16 of them, of (I + B G)^-1: a strip whose places are the rows. After `invert_diagonal_blocks`
// and a barrier.
__device__ __forceinline__ void find_inverse(Strip<kSide / 8>& known, const Matrix<float>& products, const float* beta,
                                             int first) {
    known.clear();
    const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
    for (int block = 0; block < kSide / 8; block += 2) {
        if (8 * block < first) continue;
        Strip<2> sums;
        sums.clear();
#pragma unroll
        for (int e = 0; e < block; ++e) {
            if (8 * e < first) continue;
            const KeptFactor<3> factor(known.value[e]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 pair =
                    *reinterpret_cast<const float2*>(&products(8 * (block + n) + group, 8 * e + 2 * member));
                factor.multiply(sums.value[n], pair.x, pair.y);
            }
        }
        sums.each([&](int place, int j, float& value) {
            const int s = 8 * block + place;
            value = (s == first + j ? 1.0f : 0.0f) - beta[s] * value;
        });
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int s = 8 * (block + e) + 2 * member;
            const KeptFactor<3> factor(sums.value[e]);
#pragma unroll
            for (int n = e; n < 2; ++n) {
                const int t = 8 * (block + n) + group;
                factor.multiply(known.value[block + n], entry_of_inverse(products, t, s),
                                entry_of_inverse(products, t, s + 1));
            }
        }
    }
}

template <typename T, bool Corrects, bool Gated, bool Decays, bool Backward>
__global__ void __launch_bounds__(kTileThreads, kLocalBlocks<T, Decays, Backward>)
    local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = kLocalKeys<T, Decays>;
    constexpr bool kScores = Decays || Backward;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const LocalLayout<T, Gated> shared(Carver(memory), Corrects, Decays, Backward, min(kKeys, slice.key_rows));
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, given.sizes);
    const int batch = at.batch, head = at.head, start = at.start, time = given.sizes.time;

    const auto copy_keys = [&](int key) {
        const auto copy = [&](const Matrix<T>& to, const Sequence& from) {
            copy_steps(to, Head<T>(from, batch, head, key, given.sizes.key_dim), min(kKeys, slice.key_rows - key),
                       start, time);
        };
        copy(shared.k.rows, given.k);
        if constexpr (kScores) copy(shared.q.rows, given.q);
        if constexpr (Corrects && Decays) copy(shared.erase.rows, given.erase);
        copies_commit();
    };
    const typename ChunkSteps<Gated>::Step own_step(given.strengths, given.log_gate, batch, head, start, time);
    copy_keys(0);
    steps.find(own_step, false);
    Tile products = own_tile(kSide), scores = products;
    for (int key = 0; key < slice.key_rows; key += kKeys) {
        const int keys = min(kKeys, slice.key_rows - key);
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
        }
        if constexpr (Decays) {
            BlockColumn own(keys);
            static_assert(2 * kBlocks * kKeys <= kTileThreads, "erase keys are of as many threads again");
            const bool of_erase = Corrects && own.block >= kBlocks;
            if (of_erase) own.block -= kBlocks;
            float gates[kSteps];
            if (own.there())
                load_logs<T>(gates, given.log_key_decay, batch, head, key + own.column, given.sizes.key_dim,
                             start + own.block * kSteps, time);
            copies_wait<0>();
            __syncthreads();
            if (own.there()) shared.template write_decayed<Corrects>(own, of_erase, gates);
            __syncthreads();
            if (own.there())
                shared.template store_decayed<Corrects, Backward>(own, of_erase, gates, slice, at, key + own.column);
        }
        copies_wait<0>();
        __syncthreads();
        if (!has_pairs(products) || (Decays && slice.scores == nullptr)) continue;
        if constexpr (Decays) {
            multiply_decayed<kPasses>(scores, keys, shared.q, shared.k, shared.totals);
            if constexpr (Corrects) multiply_decayed<kPasses>(products, keys, shared.erase, shared.k, shared.totals);
        } else {
            multiply_stored<kPasses, false, true>(products, 0, keys, shared.k.rows, shared.k.rows);
            if constexpr (kScores) multiply_stored<kPasses, false, true>(scores, 0, keys, shared.q.rows, shared.k.rows);
        }
    }
    if (has_pairs(products)) {
        const auto square_of = [&](Factor<T>* all) { return slice.lower_of(all, at.local, at.n); };
        if (kScores && slice.scores != nullptr) {
            steps.keep_pairs(scores, true);
            scores.each([](int, int, float& value) { value = as_right_factor<T>(value); });
            write_lower(scores, square_of(slice.scores));
            if constexpr (Decays && Pairs<T>::kSplit && !(Corrects && Backward)) {
                scores.each([](int, int, float& value) { value -= widen<float>(narrow<T>(value)); });
                write_lower(scores, square_of(slice.rest));
            }
        }
        if constexpr (Corrects) {
            steps.keep_pairs(products, false);
            write_tile(products, shared.products);
            if constexpr (Decays && Backward) write_lower(products, square_of(slice.products));
        }
    }
    if constexpr (Corrects) {
        const int thread = threadIdx.x, warp = thread / kWarp;
        steps.store(slice.steps_of(at.local, at.n));
        __syncthreads();
        invert_diagonal_blocks(shared.products, steps.beta, thread, kSide);
        __syncthreads();
        if (warp >= kSide / kTileRows) return;
        Strip<kSide / 8> inverse;
        find_inverse(inverse, shared.products, steps.beta, warp * kTileRows);
        const LowerBlocks<float> found = slice.lower_of(slice.inverse, at.local, at.n);
        const int group = warp_lane() / 4, row = 2 * (warp_lane() % 4), place = place_in_inverse(group);
        // This lane's first element in the block of each row of blocks: how far the others are is known before the kernel runs.
        float* const first = &found(row, 0) + warp * kBlockSide * kBlockSide + place;
#pragma unroll
        for (int n = 0; n < kSide / 8; ++n) {
            if (8 * n < warp * kTileRows) continue;
            float* const to = first + (&found(8 * n, 0) - found.data);
            const bool diagonal = n / 2 == warp;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool one = diagonal && row + n % 2 * 8 + i % 2 == group + i / 2 * 8;
                to[i % 2 * kBlockSide + i / 2 * 8] = one ? 0.0f : as_right_factor<T>(inverse.value[n][i]);
            }
        }
    }
}

// For a rule that does not correct: a block of kSide threads.
template <typename F>
__global__ void __launch_bounds__(kSide)
    gates_local(const Sizes sizes, const Sequence log_gate, const bool complement, const Slice<F> slice) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    Carver carver(memory);
    const ChunkSteps<true> steps(carver);
    const Place at(slice, sizes);
    steps.find({Sequence{}, log_gate, at.batch, at.head, at.start, sizes.time}, complement);
    steps.store(slice.steps_of(at.local, at.n));
}

}  // namespace

template <typename T>
cudaError_t launch_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice, cudaStream_t stream) {
    const dim3 grid(slice.heads, slice.chunks);
    if (!pass.corrects && !pass.decays) {
        if (!pass.gated) return cudaSuccess;
        Carver carver(nullptr);
        ChunkSteps<true>{carver};
        return launch(gates_local<Factor<T>>, grid, dim3(kSide), carver.used, stream, given.sizes, given.log_gate,
                      given.complement, slice);
    }
    const auto launch_of = [&](auto corrects, auto gated, auto decays, auto backward) {
        const int keys = std::min(kLocalKeys<T, decays>, slice.key_rows);
        return launch(local<T, corrects, gated, decays, backward>, grid, dim3(kTileThreads),
                      LocalLayout<T, gated>(Carver(nullptr), corrects, decays, backward, keys).bytes, stream, given,
                      slice);
    };
    const std::true_type yes{};
    const std::false_type no{};
    if (pass.values) {
        RulePass of_keys = pass;
        of_keys.values = false;
        const cudaError_t error = launch_local<T>(given.swapped(), of_keys, slice.swapped(), stream);
        return error == cudaSuccess ? launch_local<T>(given, of_keys, slice, stream) : error;
    }
    if (pass.decays)
        return with_flags(pass.corrects, pass.backward,
                          [&](auto corrects, auto backward) { return launch_of(corrects, no, yes, backward); });
    return with_flags(pass.gated, pass.backward,
                      [&](auto gated, auto backward) { return launch_of(yes, gated, no, backward); });
}

template cudaError_t launch_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                 cudaStream_t);

}  // namespace fairseq_fastweights
