// The local stage with decays by dimension or erase keys, in the notation of decays.cuh: P, what decays scale (Q * F_.0, K * F_e.,
// E * F_.0), and of a rule that corrects the inverse of its system, as in local.cu.
#include <algorithm>

#include "blocks.cuh"
#include "local.cuh"

namespace fairseq_fastweights {
namespace {

// Keys that are taken at once: so many that a block fits wherever there are tensor cores for it.
template <typename T>
constexpr int kLocalKeys = sizeof(T) == 4 ? 16 : 32;

template <typename T>
struct LocalLayout {
    DecayedRows<T> q, k, erase;
    Matrix<float> totals, logs;  // of decays, by block
    Matrix<float> products;      // G; and the blocks' inverses, transposed, above its diagonal
    ChunkSteps<false> steps;
    size_t bytes;

    __host__ __device__ LocalLayout(Carver carver, bool corrects, int keys)
        : q(carver, keys), k(carver, keys), totals(carver.matrix<float>(kTotals, keys, 0)),
          logs(carver.matrix<float>(kBlocks, keys, 0)), products(carver.matrix<float>(corrects ? kSide : 0, kSide, 8)),
          steps(carver) {
        q.levels = k.levels = Stages<T>(carver, kLevels, kSide, keys);
        if (corrects) {
            erase = DecayedRows<T>(carver, keys);
            erase.levels = Stages<T>(carver, kLevels, kSide, keys);
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

template <typename T, bool Corrects, bool Backward>
__global__ void __launch_bounds__(kTileThreads, sizeof(T) == 4 ? 1 : 2)
    decayed_local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = kLocalKeys<T>;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const LocalLayout<T> shared(Carver(memory), Corrects, min(kKeys, slice.key_rows));
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
    const ChunkSteps<false>::Step own_step(given.strengths, Sequence{}, batch, head, start, time);
    copy_keys(0);
    shared.steps.find(own_step, false);
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
    if (has_pairs(products)) {
        const auto square_of = [&](Factor<T>* all) { return slice.lower_of(all, at.local, at.n); };
        const auto keep = [](Tile& tile, int least) {
            tile.each([&](int t, int s, float& value) { value = s + least <= t ? value : 0.0f; });
        };
        if (slice.scores != nullptr) {
            keep(scores, 0);
            scores.each([](int, int, float& value) { value = as_right_factor<T>(value); });
            write_lower(scores, square_of(slice.scores));
            if constexpr (Pairs<T>::kSplit && !(Corrects && Backward)) {
                scores.each([](int, int, float& value) { value -= widen<float>(narrow<T>(value)); });
                write_lower(scores, square_of(slice.rest));
            }
        }
        if constexpr (Corrects) {
            keep(products, 1);
            write_tile(products, shared.products);
            if constexpr (Backward) write_lower(products, square_of(slice.products));
        }
    }
    if constexpr (Corrects) {
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        const float* const beta = shared.steps.numbers + kBeta;
        shared.steps.store(slice.steps_of(at.local, at.n));
        __syncthreads();
        if (warp < kBlocks) invert_diagonal_block(shared.products, beta, warp * kTileRows);
        __syncthreads();
        if (warp < kBlocks)
            store_inverse<T>(slice.lower_of(slice.inverse, at.local, at.n), shared.products, beta, warp);
    }
}

}  // namespace

template <typename T>
cudaError_t launch_decayed_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice,
                                 cudaStream_t stream) {
    if (pass.values) {
        RulePass of_keys = pass;
        of_keys.values = false;
        const cudaError_t error = launch_decayed_local<T>(given.swapped(), of_keys, slice.swapped(), stream);
        return error == cudaSuccess ? launch_decayed_local<T>(given, of_keys, slice, stream) : error;
    }
    const int keys = std::min(kLocalKeys<T>, slice.key_rows);
    return with_flags(pass.corrects, pass.backward, [&](auto corrects, auto backward) {
        return launch(decayed_local<T, corrects, backward>, dim3(slice.heads, slice.chunks), dim3(kTileThreads),
                      LocalLayout<T>(Carver(nullptr), corrects, keys).bytes, stream, given, slice);
    });
}

template cudaError_t launch_decayed_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_decayed_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_decayed_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                         cudaStream_t);

}  // namespace fairseq_fastweights
