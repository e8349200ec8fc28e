// The local stage, of all chunks of a slice at once: what gates and strengths make of a chunk's steps; of the delta rule, in the
// notation of system.cuh, also T = (I + B G)^-1, backwards P = tril(D_ts Q K^T) as well. Four warps have 16 columns of
// T each. With decays of keys also P and what they scale, in the notation of decays.cuh: Q * F_.0, K * F_e., E * F_.0.
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

constexpr int kInverseThreads = kSide / kTileRows * kWarp;  // a warp has 16 columns of T

// Keys that are taken at once with decays: so many that a block fits wherever there are tensor cores for it.
template <typename T>
constexpr int kDecayedKeys = sizeof(T) == 4 ? 16 : 32;

// A block's shared memory with decays of keys.
template <typename T>
struct DecayedLayout {
    DecayedRows<T> q, k, erase;
    Matrix<float> totals, logs;  // of decays, by block
    Matrix<float> products;      // G; and the blocks' inverses, transposed, above its diagonal
    ChunkSteps<false> steps;
    size_t bytes;

    __host__ __device__ DecayedLayout(Carver carver, bool corrects, int keys)
        : q(carver, keys), k(carver, keys), products(carver.matrix<float>(corrects ? kSide : 0, kSide, 8)),
          steps(carver) {
        q.levels = k.levels = Stages<T>(carver, kLevels, kSide, keys);
        if (corrects) {
            erase = DecayedRows<T>(carver, keys);
            erase.levels = Stages<T>(carver, kLevels, kSide, keys);
        }
        totals = carver.matrix<float>(kTotals, keys, 0);
        logs = carver.matrix<float>(kBlocks, keys, 0);
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
            const Column<T> target(rows_of(to), 0), source(block_of(from, b), i);
#pragma unroll
            for (int t = 0; t < kSteps; ++t) target.set(t, source.get(t));
        };
        if (Corrects && of_erase) return copy(slice.erased, erase.scaled);
        if constexpr (Corrects) {
            copy(slice.written, k.scaled);
        } else {
            const Column<T> target(rows_of(slice.written), 0), source(block_of(k.rows, b), i);
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
            const Column<T> target(rows_of(slice.queries), 0), source(block_of(q.rows, b), i);
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

// Stores T - I, a strip of 16 columns by each of four warps, once the blocks of I + B G on the diagonal are inverted, in `products`.
template <typename T>
__device__ __forceinline__ void store_inverse(const Matrix<float>& products, const float* beta,
                                              const LowerBlocks<float>& found) {
    const int warp = threadIdx.x / kWarp, group = warp_lane() / 4, row = 2 * (warp_lane() % 4);
    Strip<kSide / 8> inverse;
    find_inverse(inverse, products, beta, warp * kTileRows);
    // This lane's first element in the block of each row of blocks: how far the others are is known before the kernel runs.
    float* const first = &found(row, 0) + warp * kBlockSide * kBlockSide + place_in_inverse(group);
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

// With decays of keys: a block of kTileThreads threads.
template <typename T, bool Corrects, bool Backward>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 4 ? 1 : 2)
    decayed_local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = kDecayedKeys<T>;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const DecayedLayout<T> shared(Carver(memory), Corrects, min(kKeys, slice.key_rows));
    const ChunkSteps<false>& steps = shared.steps;
    const Place at(slice, given.sizes);
    const int batch = at.batch, head = at.head, start = at.start, time = given.sizes.time;

    const auto copy_keys = [&](int key) {
        const auto copy = [&](const Matrix<T>& to, const Sequence& from) {
            copy_steps(to, Head<T>(from, batch, head, key, given.sizes.key_dim), min(kKeys, slice.key_rows - key),
                       start, time);
        };
        copy(shared.k.rows, given.k);
        copy(shared.q.rows, given.q);
        if constexpr (Corrects) copy(shared.erase.rows, given.erase);
        copies_commit();
    };
    const ChunkSteps<false>::Step own_step(given.strengths, given.log_gate, batch, head, start, time);
    copy_keys(0);
    steps.find(own_step, false);
    Tile products = own_tile(kSide), scores = products;
    for (int key = 0; key < slice.key_rows; key += kKeys) {
        const int keys = min(kKeys, slice.key_rows - key);
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
        }
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
        __syncthreads();
        if (!has_pairs(products) || slice.scores == nullptr) continue;
        multiply_decayed<kPasses>(scores, keys, shared.q, shared.k, shared.totals);
        if constexpr (Corrects) multiply_decayed<kPasses>(products, keys, shared.erase, shared.k, shared.totals);
    }
    const auto square_of = [&](Factor<T>* all) { return slice.lower_of(all, at.local, at.n); };
    if (has_pairs(products)) {
        if (slice.scores != nullptr) {
            steps.keep_pairs(scores, true);
            scores.each([](int, int, float& value) { value = as_right_factor<T>(value); });
            write_lower(scores, square_of(slice.scores));
            if constexpr (Pairs<T>::kSplit && !(Corrects && Backward)) {
                scores.each([](int, int, float& value) { value -= widen<float>(narrow<T>(value)); });
                write_lower(scores, square_of(slice.rest));
            }
        }
        if constexpr (Corrects) {
            steps.keep_pairs(products, false);
            write_tile(products, shared.products);
            if constexpr (Backward) write_lower(products, square_of(slice.products));
        }
    }
    if constexpr (Corrects) {
        steps.store(slice.steps_of(at.local, at.n));
        __syncthreads();
        invert_diagonal_blocks(shared.products, steps.beta, threadIdx.x, kSide);
        __syncthreads();
        if (threadIdx.x < kInverseThreads)
            store_inverse<T>(shared.products, steps.beta, slice.lower_of(slice.inverse, at.local, at.n));
    }
}

template <typename T, bool Gated>
struct DeltaLayout {
    Matrix<T> q, k;
    Matrix<float> products;  // as above
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ DeltaLayout(Carver carver, bool backward, int keys)
        : q(carver.matrix<T>(backward ? kSide : 0, keys)), k(carver.matrix<T>(kSide, keys)),
          products(carver.matrix<float>(kSide, kSide, 8)), steps(carver), bytes(carver.used) {}
};

// Of the delta rule, with or without gates: a block of four warps, each of which has 16 steps' pairs with all steps up to these.
template <typename T, bool Gated, bool Backward>
__global__ void __launch_bounds__(kInverseThreads, sizeof(T) == 4 ? 3
                                                   : Backward     ? 5
                                                                  : 7)
    delta_local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const DeltaLayout<T, Gated> shared(Carver(memory), Backward, min(kWidest, slice.key_rows));
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, given.sizes);
    const int batch = at.batch, head = at.head, start = at.start, time = given.sizes.time;
    const int lane = warp_lane(), row = static_cast<int>(threadIdx.x) / kWarp * kTileRows, columns = row + kTileRows;

    const auto copy_keys = [&](int key) {
        const auto copy = [&](const Matrix<T>& to, const Sequence& from) {
            copy_steps<kInverseThreads>(to, Head<T>(from, batch, head, key, given.sizes.key_dim),
                                        min(kWidest, slice.key_rows - key), start, time);
        };
        copy(shared.k, given.k);
        if constexpr (Backward) copy(shared.q, given.q);
        copies_commit();
    };
    const typename ChunkSteps<Gated>::Step own_step(given.strengths, given.log_gate, batch, head, start, time);
    copy_keys(0);
    steps.find(own_step, false);
    Tile products[2] = {Tile(row, 0, columns), Tile(row, kTileColumns, columns)},
         scores[2] = {products[0], products[1]};
    const auto each_half = [&](auto f) {
        f(products[0], scores[0]);
        if (columns > kTileColumns) f(products[1], scores[1]);
    };
    for (int key = 0; key < slice.key_rows; key += kWidest) {
        const int keys = min(kWidest, slice.key_rows - key);
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
        }
        copies_wait<0>();
        __syncthreads();
        each_half([&](Tile& product, Tile& score) {
            multiply_stored<kPasses, false, true>(product, 0, keys, shared.k, shared.k);
            if constexpr (Backward) multiply_stored<kPasses, false, true>(score, 0, keys, shared.q, shared.k);
        });
    }
    each_half([&](Tile& product, Tile& score) {
        steps.keep_pairs(product, false);
        write_tile(product, shared.products);
        if constexpr (Backward) {
            steps.keep_pairs(score, true);
            if constexpr (!kRounded<T>) score.each([](int, int, float& value) { value = as_right_factor<T>(value); });
            write_lower(score, slice.lower_of(slice.scores, at.local, at.n));
        }
    });
    steps.store(slice.steps_of(at.local, at.n));
    __syncwarp();
    invert_diagonal_blocks(shared.products, steps.beta, row + lane, lane < kTileRows ? kSide : 0);
    __syncthreads();
    store_inverse<T>(shared.products, steps.beta, slice.lower_of(slice.inverse, at.local, at.n));
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
    if (pass.values) {
        RulePass of_keys = pass;
        of_keys.values = false;
        const cudaError_t error = launch_local<T>(given.swapped(), of_keys, slice.swapped(), stream);
        return error == cudaSuccess ? launch_local<T>(given, of_keys, slice, stream) : error;
    }
    if (pass.decays)
        return with_flags(pass.corrects, pass.backward, [&](auto corrects, auto backward) {
            const DecayedLayout<T> layout(Carver(nullptr), corrects, std::min(kDecayedKeys<T>, slice.key_rows));
            return launch(decayed_local<T, corrects, backward>, grid, dim3(kTileThreads), layout.bytes, stream, given,
                          slice);
        });
    return with_flags(pass.gated, pass.backward, [&](auto gated, auto backward) {
        const DeltaLayout<T, gated> layout(Carver(nullptr), backward, std::min(kWidest, slice.key_rows));
        return launch(delta_local<T, gated, backward>, grid, dim3(kInverseThreads), layout.bytes, stream, given, slice);
    });
}

template cudaError_t launch_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                 cudaStream_t);

}  // namespace fairseq_fastweights
