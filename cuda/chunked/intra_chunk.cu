// The intra-chunk kernel, for all chunks of a slice at once: gates and beta by step; for delta rules, in the notation
// of gates.cuh, T = (I + B G)^-1 and, backwards, P = tril(D_ts Q K^T).
//
// With decays by dimension or erase keys, in the notation of secondary_chunking.cuh: P, the decayed operands (Q * F_.0,
// K * F_e., E * F_.0) and, for delta rules, T. A warp computes the pairs of a subchunk of 16 steps with each other and
// with those of earlier subchunks, for queries and for erase keys; a lane has a key.
#include "chunk_parallel.cuh"
#include "secondary_chunking.cuh"

namespace fairseq_fastweights {
namespace {

template <typename T>
constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;

// Shared memory for a part of the keys, 16 `Width` of them. Gated rules without the delta rule and decays need only
// gates.
template <typename T, bool IsDelta, bool Gated, bool Decays, bool Backward, int Width>
struct IntraChunkLayout {
    using Keys = Rows<T, 16 * Width>;
    static constexpr int kReaders = Decays ? 1 + IsDelta : Backward,
                         kAtOnce = sizeof(T) == 4 ? 2 : 6 - kReaders * (Decays ? 1 : 2);  // blocks on a multiprocessor
    ChunkGates<Gated> steps;
    Matrix<float> products;  // G, in the memory of k and others; later the inverses of its diagonal blocks
    Keys k, readers[2];      // queries, and with decays erase keys; decayed to and from subchunks' ends
    Keys levels[2];          // rows of one level at a time
    Rows<float, 16 * Width> totals, logs;  // of decays, by subchunk
    size_t bytes;

    __host__ __device__ explicit IntraChunkLayout(SharedAllocator allocator) : steps(allocator) {
        SharedAllocator square = allocator;
        products = square.matrix<float>(IsDelta ? kChunk : 0, kChunk, 8);
        k = {allocator, IsDelta || Decays ? kChunk : 0};
        for (int i = 0; i < kReaders; ++i)
            readers[i] = {allocator, kChunk}, levels[i] = {allocator, Decays ? kChunk : 0};
        totals = {allocator, Decays ? kSubchunks : 0}, logs = {allocator, Decays ? kSubchunks : 0};
        bytes = allocator.used > square.used ? allocator.used : square.used;
    }
};

// Pairs of a warp's 16 steps with those of each subchunk; with decays only earlier ones, and the warp's own last.
using Pairs = Fragment<kChunk / 8>;
constexpr int kOwn = kChunk / 8 - 2;

// += <late_t, early_s> of the pairs of a subchunk that `Level` separates, or with -1 of each step with itself.
template <int Level, typename T, int Columns>
DEVICE void add_level(Pairs& pairs, const Rows<T, Columns>& late, const Rows<T, Columns>& early, int row) {
    const int t = warp_lane() / 4, s = warp_lane() % 4 * 2;  // the same in both halves
    Fragment<2> part;
    part.clear();
#pragma unroll 1
    for (int key = 0; key < Columns; key += 16)
        multiply_rows<kPasses<T>, false, false>(part, late.from(0, key), row, early.from(row, key), 1);
    UNROLL_FOR (int i = 0; i < 2; ++i) {
        if (Level < 0 ? t == s + i : s + i < t && parts(Level, t, s + i)) {
            pairs.value[kOwn][i] += part.value[0][i];
            pairs.value[kOwn + 1][2 + i] += part.value[1][2 + i];
        }
        if (Level == kSubchunkLevels - 1) pairs.value[kOwn][2 + i] += part.value[0][2 + i];
    }
}

// += <late_t, early_s decayed from s to t> of steps s of earlier subchunks. `reading` is decayed from its subchunks'
// starts, `written` to their ends. One of them is scaled in float32, as in state passing, which takes the same rows:
// rounding after the decays of more subchunks would make another system than the one that state passing applies, and
// the part that is not erased would add up.
template <typename T, int Columns, typename M>
DEVICE void add_earlier(Pairs& pairs, const Rows<T, Columns>& reading, const Rows<T, Columns>& written, const M& totals,
                        int row) {
#pragma unroll 1
    for (int key = 0; key < Columns; key += 16) {
        Fragment<2> left;
        left.each_pair([&](int place, int t, float& x, float& y) {
            x = reading.get(row + t, key + place), y = reading.get(row + t, key + place + 1);
        });
        UNROLL_FOR (int earlier = kSubchunks - 2; earlier >= 0; --earlier) {
            if (earlier * kSubchunk >= row) continue;
            multiply<kPasses<T>, false, true>(false, pairs.part<2>(2 * earlier), left,
                                              written.from(earlier * kSubchunk, key));
            left.scale(&totals(earlier, key));
        }
    }
}

// Adds the pairs of a part of the keys, from `key` on, whose copies are under way, and stores the decayed operands.
template <typename T, bool IsDelta, bool Backward, typename Shared>
DEVICE void add_decayed(Pairs (&pairs)[2], const Shared& shared, const RuleForward& given,
                        const ChunkCoord<Computed<T>>& at, int key) {
    const Slice<Computed<T>>& slice = at.slice;
    using Keys = typename Shared::Keys;
    const int row = first_own_step(), block = row / kSubchunk, lane = warp_lane();
    float gates[kSubchunk], scale[kSubchunk] = {};
    float log = load_gates<T>(gates, given.log_key_decay, at.batch, at.head, key + lane, given.sizes.key_dim,
                              at.start + row, given.sizes.time);
    shared.totals(block, lane) = expf(log);
    shared.logs(block, lane) = log;
    copies_wait<0>();
    __syncthreads();
    float* const decays = slice.decays_of(at.local, at.n) + key + lane;
    if (key + lane < slice.key_rows) {
        if constexpr (IsDelta) {
            decays[block * slice.key_rows] = shared.totals(block, lane);
        } else if (block == 0) {
            for (int of = 1; of < kSubchunks; ++of) log += shared.logs(of, lane);
            decays[0] = expf(log);
            decays[slice.key_rows] = log;
        }
    }
    // The warp's rows of x times `scale`, and from there to the workspace, unless `all` is null.
    const auto put = [&](const Keys& to, const Keys& x, int t) {
        to(row + t, lane) = narrow<T>(x.get(row + t, lane) * scale[t]);
    };
    const auto write = [&](const Keys& to, const Keys& x, Computed<T>* all) {
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t) put(to, x, t);
        __syncwarp();
        constexpr int kPack = 16 / sizeof(T), kAcross = Keys::kColumns / kPack;
        const int across = lane % kAcross * kPack;
        if (all != nullptr && key + across < slice.key_rows)
            UNROLL_FOR (int t = row + lane / kAcross; t < row + kSubchunk; t += kWarp / kAcross)
                *reinterpret_cast<uint4*>(reinterpret_cast<T*>(all) +
                                          (slice.index(at.local, at.n) * kChunk + t) * slice.key_rows + key + across) =
                    *reinterpret_cast<const uint4*>(&to(t, across));
        __syncwarp();
    };
    const Keys &k = shared.k, *const late = shared.readers, *const levels = shared.levels;
    if constexpr (!IsDelta) {
        scale_to_end(scale, gates, between(shared.totals, lane, block, kSubchunks));
        write(levels[0], k, slice.decayed_k);
    }
    if (slice.scores == nullptr) return;
    if constexpr (!(IsDelta && Backward)) {
        scale_from_start(scale, gates, between(shared.totals, lane, block, 0));
        write(levels[0], late[0], slice.decayed_q);
    }
    add_level<-1>(pairs[0], late[0], k, row);
    each_level<0, kSubchunkLevels>([&](auto of) {
        constexpr int level = decltype(of)::value;
        scale_to_middle<level>(scale, gates, shared.totals, lane, block);
        // Queries and erase keys of second halves meet the same keys of first halves, which stand among the queries'
        // rows.
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t)
            UNROLL_FOR (int i = 0; i < Shared::kReaders; ++i)
                if (is_late<level>(block, t) || i == 0) put(levels[i], is_late<level>(block, t) ? late[i] : k, t);
        __syncwarp();
        UNROLL_FOR (int i = 0; i < Shared::kReaders; ++i) add_level<level>(pairs[i], levels[i], levels[0], row);
        __syncwarp();
    });
    scale_to_end(scale, gates, 1.0f);
    write(k, k, IsDelta ? slice.decayed_k : nullptr);
    scale_from_start(scale, gates, 1.0f);
    write(late[0], late[0], IsDelta && Backward ? slice.decayed_q : nullptr);
    if constexpr (IsDelta) write(late[1], late[1], slice.decayed_erase);
    __syncthreads();
    UNROLL_FOR (int i = 0; i < Shared::kReaders; ++i) add_earlier(pairs[i], late[i], k, shared.totals, row);
}

// A right factor of state passing: in one tf32 pass it is rounded here, once.
template <typename T>
DEVICE float as_right_factor(float x) {
    return sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x));
}

// T - I to the workspace, by four warps, 16 columns each. This warp has written 16 rows of `products` = G; the inverses
// of the diagonal blocks of I + B G replace these blocks.
template <typename T>
DEVICE void store_inverse(const LowerTriangle<float>& to, const Matrix<float>& products, const float* beta) {
    __syncwarp();
    // Two lanes have the same column.
    const int first = first_own_step(), column = warp_lane() % kMmaRows, half = warp_lane() / kMmaRows * 8;
    const Matrix<float> block = products.from(first, first);
    float x[kMmaRows] = {};
    UNROLL_FOR (int j = 0; j < kMmaRows; ++j) {
        // Forward substitution by columns: a known x[j] is added at once to all sums that need it, which are
        // independent.
        x[j] = (j == column ? 1.0f : 0.0f) - beta[first + j] * x[j];
        UNROLL_FOR (int i = j + 1; i < kMmaRows; ++i) x[i] += block(i, j) * x[j];
    }
    __syncwarp();
    UNROLL_FOR (int i = 0; i < 8; ++i) block(i + half, column) = half == 0 ? x[i] : x[i + 8];
    __syncthreads();
    // Block substitution; the fragment's columns are the rows of T.
    const int lane_row = warp_lane() / 4, below = 2 * (warp_lane() % 4);
    Fragment<kChunk / 8> inverse;
    inverse.clear();
    UNROLL_FOR (int row = 0; row < kChunk; row += kMmaRows) {
        if (row < first) continue;
        Fragment<2> sums;
        sums.clear();
        UNROLL_FOR (int inner = 0; inner < row; inner += kMmaRows)
            if (inner >= first)
                multiply_fragment<3, false>(sums, inverse.template part<2>(inner / 8), products.from(row, inner));
        sums.each([&](int t, int j, float& x) { x = (row + t == first + j ? 1.0f : 0.0f) - beta[row + t] * x; });
        multiply_fragment<3, false, Part::kLower>(inverse.template part<2>(row / 8), sums, products.from(row, row));
    }
    // This lane's first element; the offsets of the others are compile-time constants.
    float* const own = &to(below, 0) + first * kSubchunk + place_in_inverse(lane_row);
    inverse.each([&](int t, int j, float& x) {
        const int row = (t - below) / kMmaRows * kMmaRows;
        if (row < first) return;
        own[(&to(row, 0) - to.data) + (t - below - row) * kSubchunk + j - lane_row] =
            t == first + j ? 0.0f : as_right_factor<T>(x);
    });
}

template <typename T, bool IsDelta, bool Gated, bool Decays, bool Backward, int Width>
__global__ void __launch_bounds__(kChunkThreads,
                                  (IntraChunkLayout<T, IsDelta, Gated, Decays, Backward, Width>::kAtOnce))
    intra_chunk(const RuleForward given, const Slice<Computed<T>> slice) {
    using Shared = IntraChunkLayout<T, IsDelta, Gated, Decays, Backward, Width>;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Shared shared{SharedAllocator(memory)};
    const ChunkGates<Gated>& steps = shared.steps;
    const ChunkCoord at(slice, given.sizes);
    const int start = at.start, time = given.sizes.time, row = first_own_step();
    const typename ChunkGates<Gated>::Step own_step(given.beta, given.log_gate, at.batch, at.head, start, time);
    const bool scored = IsDelta ? Decays || Backward : slice.scores != nullptr;  // P is wanted
    const auto copy_keys = [&](int key) {
        const auto copy = [&](const auto& to, const Sequence& x) { at.copy(to, x, key, given.sizes.key_dim); };
        copy(shared.k, given.k);
        if (scored) copy(shared.readers[0], given.q);
        if constexpr (IsDelta && Decays) copy(shared.readers[1], given.erase.data ? given.erase : given.k);
        copies_commit();
    };
    const auto compute_gates = [&] {
        steps.compute(own_step, !IsDelta && given.complement);
        steps.store(slice.steps_of(at.local, at.n));
    };
    if constexpr (IsDelta && !Decays) copy_keys(0);  // in flight while the gates are computed
    if constexpr (!Decays) compute_gates();
    if constexpr (IsDelta || Decays) {
        Pairs pairs[2];  // of queries, and of erase keys
        pairs[0].clear(), pairs[1].clear();
        for (int key = 0; key < slice.key_rows; key += 16 * Width) {
            if (key > 0) __syncthreads();
            if (Decays || key > 0) copy_keys(key);
            if constexpr (Decays) {
                add_decayed<T, IsDelta, Backward>(pairs, shared, given, at, key);
            } else {
                arrive();
                multiply_rows<kPasses<T>, false, false>(pairs[1], shared.k, row, shared.k, Width);
                if (scored) multiply_rows<kPasses<T>, false, false>(pairs[0], shared.readers[0], row, shared.k, Width);
            }
        }
        if constexpr (!Decays)
            UNROLL_FOR (Pairs& of : pairs) steps.mask_and_decay(of, row);
        const auto store = [&](const auto& to, Pairs from) {
            UNROLL_FOR (int block = 0; block < kSubchunks; ++block) {
                const bool own = Decays && block == kSubchunks - 1;
                const int first = own ? row : block * kSubchunk;
                if (own || first < row + !Decays)
                    from.part<2>(2 * block).store(&to(row, first), &to(1, 0) - &to(0, 0), kSubchunk);
            }
        };
        const auto square = [&](auto* all) { return slice.lower_of(all, at.local, at.n); };
        if (scored) {
            pairs[0].each([](int, int, float& x) { x = as_right_factor<T>(x); });
            store(square(slice.scores), pairs[0]);
            if constexpr (kRounded<T> && Decays && !(IsDelta && Backward))
                store(square(slice.scores_low), pairs[0].template low_half<T>());
        }
        if constexpr (IsDelta) {
            Decays ? compute_gates() : __syncthreads();  // a barrier: products take the memory of k
            store(shared.products, pairs[1]);
            store_inverse<T>(square(slice.inverse), shared.products, steps.numbers + kBeta);
        }
    }
}

}  // namespace

template <typename T>
cudaError_t launch_intra_chunk(RuleForward given, RulePass pass, const Slice<Computed<T>>& slice, cudaStream_t stream) {
    if (pass.decays_values) {
        pass.decays_values = false;
        RuleForward turned = given;  // values in the place of keys
        turned.sizes.key_dim = given.sizes.value_dim;
        turned.q = given.out;
        turned.k = given.v;
        turned.log_key_decay = given.log_value_decay;
        const cudaError_t error = launch_intra_chunk<T>(turned, pass, slice.swapped(), stream);
        if (error != cudaSuccess) return error;
    }
    return with_rule(pass, [&](auto is_delta, auto gated, auto decays, auto) {
        const auto run = [&](auto width) {
            const auto of_pass = [&](auto backward) {
                using Shared = IntraChunkLayout<T, is_delta, gated, decays, backward, width>;
                return launch(intra_chunk<T, is_delta, gated, decays, backward, width>, dim3(slice.heads, slice.chunks),
                              dim3(kChunkThreads), Shared(SharedAllocator(nullptr)).bytes, stream, given, slice);
            };
            if constexpr (is_delta)
                if (pass.backward) return of_pass(std::true_type());
            return of_pass(std::false_type());
        };
        if constexpr (is_delta && !decays)
            return with_width(slice.key_rows, run);
        else if constexpr (decays || gated)
            return run(std::integral_constant<int, kWarp / 16>());  // of decays a lane has a key
        return cudaSuccess;
    });
}

template cudaError_t launch_intra_chunk<float>(RuleForward, RulePass, const Slice<float>&, cudaStream_t);
template cudaError_t launch_intra_chunk<__half>(RuleForward, RulePass, const Slice<float>&, cudaStream_t);
template cudaError_t launch_intra_chunk<__nv_bfloat16>(RuleForward, RulePass, const Slice<__nv_bfloat16>&,
                                                       cudaStream_t);

}  // namespace fairseq_fastweights
