// The local stage with decays by dimension or erase keys, in the notation of levels.cuh, of all chunks of a slice at once: P, what
// decays scale (Q * F_.0, K * F_e., E * F_.0) and, where it corrects, T = (I + B G)^-1. A warp finds the pairs of a block of 16
// steps with each other and with those of earlier blocks, of queries and of erase keys; a lane has a key.
#include "levels.cuh"
#include "local.cuh"
#include "rows.cuh"
#include "system.cuh"

namespace fairseq_fastweights {
namespace {

constexpr int kLaneKeys = kWarp;  // taken at once, a key to a lane

template <typename T, bool Corrects>
struct DecayedLocal {
    using Keys = Rows<T, kLaneKeys>;
    static constexpr int kReaders = Corrects ? 2 : 1,  // queries, and erase keys
        kAtOnce = sizeof(T) == 4 ? 2 : 6 - kReaders;   // blocks of a multiprocessor
    ChunkSteps<false> steps;
    Matrix<float> products;  // G, in the place of rows; and the blocks' inverses, transposed, above its diagonal
    Keys k, late[kReaders];  // as given, then decayed to their block's end, and from its start
    Keys levels[kReaders];   // of a block, one after another
    Rows<float, kLaneKeys> totals, logs;  // of decays, by block
    size_t bytes;

    __host__ __device__ explicit DecayedLocal(Carver carver)
        : steps(carver), products(Carver(carver).matrix<float>(Corrects ? kSide : 0, kSide, 8)), k(carver, kSide) {
        for (int i = 0; i < kReaders; ++i) late[i] = Keys(carver, kSide), levels[i] = Keys(carver, kSide);
        totals = Rows<float, kLaneKeys>(carver, kBlocks), logs = Rows<float, kLaneKeys>(carver, kBlocks);
        bytes = carver.used;  // more than G takes
    }
};

// Pairs of a warp's 16 steps: with those of their block, then of the blocks before it, nearest first.
using PairsOfBlock = Strip<kSide / 8>;

// += <late_t, early_s> of the pairs of one block that `Level` parts, or with -1 those of a step with itself.
template <int Level, int Passes, typename M>
DEVICE void add_level(PairsOfBlock& pairs, const M& late, const M& early) {
    const int t = warp_lane() / 4, s = warp_lane() % 4 * 2;  // the same in both halves
    Strip<2> part;
    part.clear();
#pragma unroll 1
    for (int key = 0; key < kLaneKeys; key += 16)
        multiply_rows<Passes, false, false>(part, late.from(0, key), 0, early.from(0, key), 1);
    UNROLL for (int i = 0; i < 2; ++i) {
        if (Level < 0 ? t == s + i : s + i < t && parts(Level, t, s + i)) {
            pairs.value[0][i] += part.value[0][i];
            pairs.value[1][2 + i] += part.value[1][2 + i];
        }
        if (Level == kLevelsOfBlock - 1) pairs.value[0][2 + i] += part.value[0][2 + i];
    }
}

// += <late_t, early_s decayed from s to t> of steps s of earlier blocks. `reading`: the warp's, decayed from their block's start;
// `written` has all, decayed to theirs' ends. As the walk, that takes these rows, it scales one of them in float32: of others, rounded
// behind more blocks, the system would be another than the walk's, and what is then not erased adds up.
template <int Passes, typename M>
DEVICE void add_earlier(PairsOfBlock& pairs, const M& reading, const M& written, const Rows<float, kLaneKeys>& totals,
                        int block) {
#pragma unroll 1
    for (int key = 0; key < kLaneKeys; key += 16) {
        Strip<2> left;
        left.each_pair([&](int place, int t, float& x, float& y) {
            x = reading.get(t, key + place), y = reading.get(t, key + place + 1);
        });
        UNROLL for (int apart = 1; apart < kBlocks; ++apart) {
            if (apart > block) break;
            multiply_pairs<Passes, false>(pairs.template part<2>(2 * apart), left,
                                          written.from((block - apart) * kSteps, key));
            left.scale(&totals(block - apart, key));
        }
    }
}

template <typename T, bool Corrects, bool Backward>
__global__ void __launch_bounds__(kStripThreads, (DecayedLocal<T, Corrects>::kAtOnce))
    decayed_local(const Local given, const Slice<Factor<T>> slice) {
    using F = Factor<T>;
    using Shared = DecayedLocal<T, Corrects>;
    using Keys = typename Shared::Keys;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kReaders = Shared::kReaders;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Shared shared{Carver(memory)};
    const Place at(slice, given.sizes);
    const int start = at.start, time = given.sizes.time, row = own_row(), block = row / kSteps, lane = warp_lane();
    const auto own = [&](const Keys& rows) { return rows.from(row, 0); };
    const ChunkSteps<false>::Step own_step(given.strengths, given.log_gate, at.batch, at.head, start, time);
    PairsOfBlock pairs[kReaders];
    UNROLL for (int i = 0; i < kReaders; ++i) pairs[i].clear();
    for (int key = 0; key < slice.key_rows; key += kLaneKeys) {
        const auto copy = [&](const Keys& to, const Sequence& from) {
            copy_steps(to, Head<T>(from, at.batch, at.head, key, given.sizes.key_dim), start, time);
        };
        if (key > 0) __syncthreads();
        copy(shared.k, given.k);
        copy(shared.late[0], given.q);
        if constexpr (Corrects) copy(shared.late[1], given.erase);
        copies_commit();
        float gates[kSteps], scale[kSteps], log = 0.0f;
        load_logs<T>(gates, given.log_key_decay, at.batch, at.head, key + lane, given.sizes.key_dim, start + row, time);
        UNROLL for (int t = 0; t < kSteps; ++t) log += gates[t];
        exponentiate(gates);
        shared.totals(block, lane) = expf(log);
        shared.logs(block, lane) = log;
        copies_wait<0>();
        __syncthreads();
        float* const decays = slice.decays_of(at.local, at.n) + key + lane;
        if (key + lane < slice.key_rows) {
            if constexpr (Corrects) {
                decays[block * slice.key_rows] = shared.totals(block, lane);
            } else if (block == 0) {
                for (int of = 1; of < kBlocks; ++of) log += shared.logs(of, lane);
                decays[0] = expf(log);
                decays[slice.key_rows] = log;
            }
        }
        // The warp's rows of x, scaled, and from there to the workspace, if it has a place for them.
        const auto put = [&](const Keys& to, const Keys& x, int t) {
            to(row + t, lane) = narrow<T>(x.get(row + t, lane) * scale[t]);
        };
        const auto write = [&](const Keys& to, const Keys& x, F* all) {
            UNROLL for (int t = 0; t < kSteps; ++t) put(to, x, t);
            __syncwarp();
            constexpr int kPiece = 16 / sizeof(T), kAcross = kLaneKeys / kPiece;
            const int across = lane % kAcross * kPiece;
            if (all != nullptr && key + across < slice.key_rows)
                UNROLL for (int t = row + lane / kAcross; t < row + kSteps; t += kWarp / kAcross) *
                    reinterpret_cast<uint4*>(reinterpret_cast<T*>(all) +
                                             (slice.index(at.local, at.n) * kSide + t) * slice.key_rows + key +
                                             across) = *reinterpret_cast<const uint4*>(&to(t, across));
            __syncwarp();
        };
        if constexpr (!Corrects) {
            scale_to_end(scale, gates, between(shared.totals, lane, block, kBlocks));
            write(shared.levels[0], shared.k, slice.written);
        }
        if (!(Corrects && Backward) && slice.queries != nullptr) {
            scale_from_start(scale, gates, between(shared.totals, lane, block, 0));
            write(shared.levels[0], shared.late[0], slice.queries);
        }
        if (slice.scores == nullptr) continue;

        add_level<-1, kPasses>(pairs[0], own(shared.late[0]), own(shared.k));
        each_level<0, kLevelsOfBlock>([&](auto of) {
            constexpr int level = decltype(of)::value;
            scale_to_middle<level>(scale, gates, shared.totals, lane, block);
            // Rows of erase keys are multiplied by those of keys among the queries'.
            UNROLL for (int t = 0; t < kSteps; ++t)
                UNROLL for (int i = 0; i < kReaders; ++i) if (is_late<level>(block, t) || i == 0)
                    put(shared.levels[i], is_late<level>(block, t) ? shared.late[i] : shared.k, t);
            __syncwarp();
            UNROLL for (int i = 0; i < kReaders; ++i)
                add_level<level, kPasses>(pairs[i], own(shared.levels[i]), own(shared.levels[0]));
            __syncwarp();
        });
        scale_to_end(scale, gates, 1.0f);
        write(shared.k, shared.k, Corrects ? slice.written : nullptr);
        scale_from_start(scale, gates, 1.0f);
        write(shared.late[0], shared.late[0], Corrects && Backward ? slice.queries : nullptr);
        if constexpr (Corrects) write(shared.late[1], shared.late[1], slice.erased);
        __syncthreads();
        UNROLL for (int i = 0; i < kReaders; ++i)
            add_earlier<kPasses>(pairs[i], own(shared.late[i]), shared.k, shared.totals, block);
    }
    if (slice.scores == nullptr) return;
    // `first` is the block of the warp's steps with each other; those with earlier blocks are `back` numbers before each other.
    const auto store = [&](auto* first, int stride, int back, PairsOfBlock& from) {
        from.each_pair([&](int place, int t, float x, float y) {
            const int apart = place / kSteps;
            if (apart <= block) put_pair(first + t * stride + place % kSteps - apart * back, x, y);
        });
    };
    const auto store_pairs = [&](F* all, PairsOfBlock from) {
        store(&slice.lower_of(all, at.local, at.n)(row, row), kSteps, kSteps * kSteps, from);
    };
    pairs[0].each([](int, int, float& x) { x = as_right_factor<T>(x); });
    store_pairs(slice.scores, pairs[0]);
    if constexpr (kRounded<T> && !(Corrects && Backward)) store_pairs(slice.rest, pairs[0].template rest<T>());
    if constexpr (Corrects) {
        const Matrix<float>& products = shared.products;
        const float* const beta = shared.steps.numbers + kBeta;
        shared.steps.find(own_step, false);  // a barrier: nobody reads rows any more
        shared.steps.store(slice.steps_of(at.local, at.n));
        store(&products(row, row), products.stride, kSteps, pairs[1]);
        __syncwarp();
        invert_diagonal_block(products, beta, row);
        __syncthreads();
        store_inverse<T>(slice.lower_of(slice.inverse, at.local, at.n), products, beta, block);
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
        return launch(decayed_local<T, corrects, backward>, dim3(slice.heads, slice.chunks), dim3(kStripThreads),
                      DecayedLocal<T, corrects>(Carver(nullptr)).bytes, stream, given, slice);
    });
}

template cudaError_t launch_decayed_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_decayed_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_decayed_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                         cudaStream_t);

}  // namespace fairseq_fastweights
