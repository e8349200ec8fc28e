// The local stage with decays by dimension or erase keys, in the notation of decays.cuh, of all chunks of a slice at once: P, what
// decays scale (Q * F_.0, K * F_e., E * F_.0) and, where it corrects, T = (I + B G)^-1. A warp finds the pairs of a block of 16
// steps with those before it, of queries or, the other half of the warps, of erase keys.
#include "decays.cuh"
#include "local.cuh"
#include "rows.cuh"
#include "system.cuh"

namespace fairseq_fastweights {
namespace {

// Keys that are taken at once: so many that a block fits wherever there are tensor cores for it.
template <typename T>
constexpr int kMostLocalKeys = sizeof(T) == 4 ? 16 : 32;

// Rows of a chunk as products take them: for pairs of a block `rows` and `levels`, which queries and keys share, and
// `scaled` for those of two: queries from the block's start, keys to its end.
template <typename T, int Keys>
struct DecayedRows {
    Rows<T, Keys> rows, scaled, levels[kLevels];

    DecayedRows() = default;
    __host__ __device__ DecayedRows(Carver& carver, const DecayedRows* shares)
        : rows(carver, kSide), scaled(carver, kSide) {
        for (int i = 0; i < kLevels; ++i)
            levels[i] = shares == nullptr ? Rows<T, Keys>(carver, kSide) : shares->levels[i];
    }
    // The rows that lie so many numbers behind them.
    __device__ __forceinline__ DecayedRows behind(int numbers) const {
        DecayedRows other = *this;
        other.rows.data += numbers;
        other.scaled.data += numbers;
#pragma unroll
        for (int i = 0; i < kLevels; ++i) other.levels[i].data += numbers;
        return other;
    }
};

template <typename T, bool Corrects, int Keys>
struct DecayedLocal {
    static constexpr int kThreads = (Corrects ? 2 : 1) * kStripThreads;
    ChunkSteps<false> steps;
    DecayedRows<T, Keys> q, k, erase;
    Rows<float, Keys> totals, logs;  // of decays, by block
    Matrix<float> products;  // G, in the place of rows; and the blocks' inverses, transposed, above its diagonal
    size_t bytes;

    __host__ __device__ explicit DecayedLocal(Carver carver) : steps(carver) {
        Carver place = carver;
        q = DecayedRows<T, Keys>(carver, nullptr);
        k = DecayedRows<T, Keys>(carver, &q);
        if (Corrects) erase = DecayedRows<T, Keys>(carver, nullptr);
        totals = Rows<float, Keys>(carver, kBlocks);
        logs = Rows<float, Keys>(carver, kBlocks);
        products = place.matrix<float>(Corrects ? kSide : 0, kSide, 8);
        bytes = carver.used > place.used ? carver.used : place.used;
    }
};

// Pairs of a warp's 16 steps with those of their block, and of the blocks before it, nearest first.
struct PairsOfBlock {
    Strip<2> own, before[kBlocks - 1];

    __device__ __forceinline__ void clear() {
        own.clear();
#pragma unroll
        for (int i = 0; i < kBlocks - 1; ++i) before[i].clear();
    }

    // += <late_t, early_s decayed from s to t> for s < t, or with `diagonal` for s <= t.
    template <int Passes, typename T, int Keys>
    __device__ __forceinline__ void add(const DecayedRows<T, Keys>& late, const DecayedRows<T, Keys>& early,
                                        const Rows<float, Keys>& totals, int block, bool diagonal) {
        const int row = block * kSteps, group = warp_lane() / 4, member = warp_lane() % 4;
        if (block > 0)
            multiply_rows<Passes, false, false>(before[0], late.scaled, row, early.scaled.from(row - kSteps, 0),
                                                Keys / 16);
        if (block > 1) {
            Strip<Keys / 8> left;
            left.each_pair([&](int i, int t, float& x, float& y) {
                const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(&late.scaled(row + t, i));
                x = widen<float>(pair.x);
                y = widen<float>(pair.y);
            });
#pragma unroll
            for (int apart = 2; apart < kBlocks; ++apart) {
                if (apart > block) break;
                left.scale(&totals(block - apart + 1, 0));
                multiply_pairs<Passes, false>(before[apart - 1], left, early.scaled.from(row - apart * kSteps, 0));
            }
        }
        // Each level has the pairs that it parts. Steps of two halves are in a quarter of their own.
        const auto product = [&](Strip<2>& part, const Rows<T, Keys>& x, const Rows<T, Keys>& y) {
            part.clear();
            multiply_rows<Passes, false, false>(part, x, row, y.from(row, 0), Keys / 16);
        };
        Strip<2> part;
        product(part, late.levels[kLevels - 1], early.levels[kLevels - 1]);
        own.value[0][2] += part.value[0][2];
        own.value[0][3] += part.value[0][3];
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
            const bool same = level == kLevels - 1;
            product(part, same ? late.rows : late.levels[level], same ? early.rows : early.levels[level]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int s = 2 * member + i, apart = group ^ s;  // its highest bit tells the level
                const bool wanted = same ? diagonal && apart == 0 : s < group && apart >> level == 1;
                if (wanted) {
                    own.value[0][i] += part.value[0][i];
                    own.value[1][2 + i] += part.value[1][2 + i];
                }
            }
        }
    }

    // f(block of the steps s, its pairs).
    template <typename F>
    __device__ __forceinline__ void each(int block, F f) {
        f(block, own);
#pragma unroll
        for (int i = 0; i < kBlocks - 1; ++i)
            if (i < block) f(block - 1 - i, before[i]);
    }
};

template <typename T, bool Corrects, bool Backward, int Width>
__global__ void __launch_bounds__((DecayedLocal<T, Corrects, 16 * Width>::kThreads), sizeof(T) == 4 ? 1
                                                                                     : Corrects     ? 2
                                                                                                    : 4)
    decayed_local(const Local given, const Slice<Factor<T>> slice) {
    using F = Factor<T>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = 16 * Width;
    using Shared = DecayedLocal<T, Corrects, kKeys>;
    constexpr int kThreads = Shared::kThreads;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Shared shared{Carver(memory)};
    const Place at(slice, given.sizes);
    const int start = at.start, time = given.sizes.time, lane = warp_lane();
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0), block = warp % kBlocks,
              row = block * kSteps;
    const bool of_erase = warp >= kBlocks, there = lane < kKeys;  // the lane's key, if it has one
    const DecayedRows<T, kKeys> late = shared.q.behind(of_erase ? shared.erase.rows.data - shared.q.rows.data : 0);
    const int64_t first_row = slice.index(at.local, at.n) * kSide;
    const auto copy_keys = [&](int key) {
        const auto copy = [&](const Rows<T, kKeys>& to, const Sequence& from) {
            copy_steps<kThreads>(to, Head<T>(from, at.batch, at.head, key, given.sizes.key_dim), start, time);
        };
        copy(shared.k.rows, given.k);
        copy(shared.q.rows, given.q);
        if constexpr (Corrects) copy(shared.erase.rows, given.erase);
        copies_commit();
    };
    const ChunkSteps<false>::Step own_step(given.strengths, given.log_gate, at.batch, at.head, start, time);
    copy_keys(0);
    if constexpr (Corrects) shared.steps.find(own_step, false);
    PairsOfBlock pairs;
    pairs.clear();
    for (int key = 0; key < slice.key_rows; key += kKeys) {
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
        }
        float gates[kSteps] = {}, log = 0.0f;
        if (there)
            load_logs<T>(gates, given.log_key_decay, at.batch, at.head, key + lane, given.sizes.key_dim, start + row,
                         time);
#pragma unroll
        for (int t = 0; t < kSteps; ++t) log += gates[t];
        exponentiate(gates);
        copies_wait<0>();
        __syncthreads();
        if (there) {
            using Block = Rows<T, kKeys>;
            const auto write = [&](auto early, const DecayedRows<T, kKeys>& late) {
                const auto of = [&](const Block& rows) { return rows.from(row, 0); };
                const Block levels[kLevels] = {of(late.levels[0]), of(late.levels[1]), of(late.levels[2]),
                                               of(late.levels[3])};
                write_operands<early>(of(late.rows), of(shared.k.rows), levels, of(late.scaled), of(shared.k.scaled),
                                      gates, lane);
            };
            if (Corrects && of_erase) {
                write(std::false_type(), shared.erase);
            } else {
                write(std::true_type(), shared.q);
                shared.totals(block, lane) = product_of(gates);
                shared.logs(block, lane) = log;
            }
        }
        __syncthreads();

        // The slice's decays.
        const auto store = [&](F* all, const Rows<T, kKeys>& from) {
            constexpr int kPiece = 16 / sizeof(T), kAcross = kKeys / kPiece;
            for (int i = opaque_thread(); i < kSide * kAcross; i += kThreads) {
                const int down = i / kAcross, across = i % kAcross * kPiece;
                if (key + across < slice.key_rows)
                    *reinterpret_cast<uint4*>(reinterpret_cast<T*>(all) + (first_row + down) * slice.key_rows + key +
                                              across) = *reinterpret_cast<const uint4*>(&from(down, across));
            }
        };
        if constexpr (Corrects) {
            store(slice.written, shared.k.scaled);
            store(slice.erased, shared.erase.scaled);
            if constexpr (Backward) store(slice.queries, shared.q.scaled);
        }
        if (there && !of_erase && key + lane < slice.key_rows) {
            const auto put = [&](F* all, int t, float x) {
                (reinterpret_cast<T*>(all) + (first_row + row) * slice.key_rows + key + lane)[t * slice.key_rows] =
                    narrow<T>(x);
            };
            if constexpr (!Corrects) {
                const Column<Rows<T, kKeys>> from(shared.k.rows.from(row, 0), lane);
                float product = 1.0f;
                for (int after = block + 1; after < kBlocks; ++after) product *= shared.totals(after, lane);
#pragma unroll
                for (int s = kSteps - 1; s >= 0; --s) {
                    put(slice.written, s, from.get(s) * product);
                    product *= gates[s];
                }
            }
            if (!(Corrects && Backward) && slice.queries != nullptr) {
                const Column<Rows<T, kKeys>> from(shared.q.rows.from(row, 0), lane);
                float product = 1.0f;
                for (int before = 0; before < block; ++before) product *= shared.totals(before, lane);
#pragma unroll
                for (int t = 0; t < kSteps; ++t) put(slice.queries, t, from.get(t) * (product *= gates[t]));
            }
            float* const decays = slice.decays_of(at.local, at.n) + key + lane;
            if constexpr (Corrects) {
                decays[block * slice.key_rows] = expf(log);
            } else if (block == 0) {
                float sum = 0.0f;
                for (int of = 0; of < kBlocks; ++of) sum += shared.logs(of, lane);
                decays[0] = expf(sum);
                decays[slice.key_rows] = sum;
            }
        }
        if (slice.scores == nullptr) continue;
        pairs.add<kPasses>(late, shared.k, shared.totals, block, !of_erase);
    }
    const auto store_pairs = [&](F* all, int across, Strip<2>& part) {
        const LowerBlocks<F> to = slice.lower_of(all, at.local, at.n);
        part.each_pair([&](int s, int t, float x, float y) { put_pair(&to(row + t, across * kSteps + s), x, y); });
    };
    if (!of_erase && slice.scores != nullptr)
        pairs.each(block, [&](int across, Strip<2>& part) {
            part.each([](int, int, float& x) { x = as_right_factor<T>(x); });
            store_pairs(slice.scores, across, part);
            if constexpr (kRounded<T> && !(Corrects && Backward)) {
                Strip<2> rest = part.template rest<T>();
                store_pairs(slice.rest, across, rest);
            }
        });
    if constexpr (Corrects) {
        const Matrix<float>& products = shared.products;
        shared.steps.store(slice.steps_of(at.local, at.n));
        __syncthreads();  // nobody reads rows any more
        const float* const beta = shared.steps.numbers + kBeta;
        if (of_erase) {
            pairs.each(block, [&](int across, Strip<2>& part) {
                part.each_pair(
                    [&](int s, int t, float x, float y) { put_pair(&products(row + t, across * kSteps + s), x, y); });
                if constexpr (Backward) store_pairs(slice.products, across, part);
            });
            __syncwarp();
            invert_diagonal_block(products, beta, row);
        }
        __syncthreads();
        if (!of_erase) store_inverse<T>(slice.lower_of(slice.inverse, at.local, at.n), products, beta, warp);
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
    return with_flags(pass.corrects, pass.backward, [&](auto corrects, auto backward) {
        return with_width(std::min(kMostLocalKeys<T>, slice.key_rows), [&](auto width) {
            constexpr int kWidth = std::min<int>(width, kMostLocalKeys<T> / 16);
            using Shared = DecayedLocal<T, corrects, 16 * kWidth>;
            return launch(decayed_local<T, corrects, backward, kWidth>, dim3(slice.heads, slice.chunks),
                          dim3(Shared::kThreads), Shared(Carver(nullptr)).bytes, stream, given, slice);
        });
    });
}

template cudaError_t launch_decayed_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_decayed_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_decayed_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                         cudaStream_t);

}  // namespace fairseq_fastweights
