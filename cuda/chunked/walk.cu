// The walk: the only stage that goes through a head's chunks one after another. It carries states, backwards their gradients,
// and leaves for the stages that take all chunks at once each chunk's state and what depends on it. In the notation of
// system.cuh and gradients.cu, everything transposed, so that what a product makes is the left factor of the next in the same
// warp's registers (strips.cuh):
//
//   E'  = V' - (S' K') diag(D_t0)      U' = (E' B) T'            S'  <- D S' + (U' diag(D_es)) K
//   dU' = dY' P + (dS' K') diag(D_es)  dR' = dU' T    dV' = dR' B
//                                                    dS' <- D dS' + (dY' diag(D_t0)) Q - (dR' B diag(D_t0)) K
//
// and of rules that do not correct, whose U is V and w the strengths of writes,
//
//   S'  <- D S' + (V' diag(D_es w_s)) K                dS' <- D dS' + (dY' diag(D_t0)) Q
//
// which are one and the same, from either end.
//
// With decays of keys, in the notation of decays.cuh, D is diag(F_e0) and no other gates are there: keys are K * F_e.,
// queries Q * F_.0, and keys whose errors are read, here and in -(dR' B) K, are E * F_.0, all from the local stage. Of a rule that
// corrects these are decayed within blocks of 16 steps, and the state from block to block, in float32: keys that are rounded after
// the decays of 64 steps near 1 would not be those of the system, and what is not erased so adds up over thousands of steps.
//
// With decays of values, Z in the notation of decays.cuh, V' is (V * Z_e.)', dY' is (dY * Z_.0)', and columns of states are scaled too.
//
// A block is a walk of one head (the whole slice, a segment of it, or the steps between two states that were kept) and some
// value columns, 16 to a warp, whose part of the state stays in its registers. Of more keys than these hold each warp takes a
// part; if a rule corrects, they exchange through shared memory what they make of a chunk's steps. But for that there is one
// barrier a chunk.
//
// Where a block's strips are four, the products with a state's keys are the warpgroup's, if it has such (groups.cuh); not those of
// rules that correct and have decays of keys, which add to a state 16 steps at a time.
//
// dS collects what queries read in directions that no key erases, without bound, and K dS remains small: so dS is split in two
// for that product, not rounded. So is what gates scale, but for U of the delta rule.
#include "walk.cuh"

#include "tiles.cuh"

namespace fairseq_fastweights {
namespace {

// A strip's part of a state in float32: `from` and `to` (key_dim, value_dim).
template <int N>
__device__ __forceinline__ void load_state(Strip<N>& state, const float* from, int first_key, int keys, int column,
                                           int columns) {
    state.each([&](int place, int j, float& x) {
        const int key = first_key + place;
        x = key < keys && column + j < columns ? from[static_cast<int64_t>(key) * columns + column + j] : 0.0f;
    });
}
template <int N>
__device__ __forceinline__ void store_state(Strip<N>& state, float* to, int first_key, int keys, int column,
                                            int columns) {
    state.each([&](int place, int j, float& x) {
        const int key = first_key + place;
        if (key < keys && column + j < columns) to[static_cast<int64_t>(key) * columns + column + j] = x;
    });
}

// f(block, its rows of keys, its decays) for a chunk's blocks in the order of the walk.
template <bool Reverse, typename F>
__device__ __forceinline__ void each_block(const Matrix<float>& decays, F f) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        const int block = Reverse ? kBlocks - 1 - i : i;
        f(block, &decays(block, 0));
    }
}

// read += state' keys' where keys are decayed within blocks: the state passes the blocks before each, 16 keys at a time.
template <int Passes, bool Reverse, int N, typename T>
__device__ __forceinline__ void read_blocks(Strip<kSide / 8>& read, Strip<N>& state, const Pieces<T>& keys,
                                            const Matrix<float>& decays) {
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        Strip<2> left = state.template part<2>(e);
        each_block<Reverse>(decays, [&](int block, const float* by) {
            const Pieces<T> rows = keys.from(kTileRows * block, 8 * e);
            Strip<2>& sums = read.template part<2>(2 * block);
            multiply_kept<Passes, false>(sums, left, rows);
            if constexpr (Reverse && kRounded<T>) multiply_kept<Passes, false>(sums, left.template rest<T>(), rows);
            left.scale(by + 8 * e);
        });
    }
}

// The sum of the parts that the warps of a strip have, in the same order in all of them.
__device__ __forceinline__ void sum_parts_of(Strip<kSide / 8>& x, float4* exchange, int strip, int strips, int part,
                                             int parts) {
    const int lane = warp_lane();
    const auto place = [&](int p, int n) -> float4& {
        return exchange[((p * strips + strip) * (kSide / 8) + n) * kWarp + lane];
    };
#pragma unroll
    for (int n = 0; n < kSide / 8; ++n)
        place(part, n) = make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
    __syncthreads();
    x.clear();
    for (int p = 0; p < parts; ++p)
#pragma unroll
        for (int n = 0; n < kSide / 8; ++n) {
            const float4 four = place(p, n);
            x.value[n][0] += four.x, x.value[n][1] += four.y, x.value[n][2] += four.z, x.value[n][3] += four.w;
        }
}

// Starts to copy `Columns` columns of `rows` steps, from `first` on, by `warps` warps, of which this is number `warp`: a lane has one
// column, and steps of one distance from one another.
template <int Columns, typename To, typename T>
__device__ __forceinline__ void copy_columns(const To& to, const Head<T>& from, int first, int warp, int warps,
                                             int rows, int start, int time) {
    constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = kWarp / kAcross;
    constexpr int kTogether = sizeof(T) == 2 ? 4 : 1;  // in float32 registers would not do
    const int column = first + warp_lane() % kAcross * kPiece, begin = warp * kDown + warp_lane() / kAcross;
    const T* piece = from.data + (start + begin) * from.stride + column;
    const int64_t on = warps * kDown * from.stride;
    const int there = column < from.dim ? time - start : 0;
#pragma unroll kTogether
    for (int row = begin; row < rows; row += warps * kDown, piece += on)
        copy_piece(&to(row, column), piece, row < there);
}

// True of walks whose copies are a part of the chain that counts, by measurement: others took as long with warps that only copy, or longer.
template <typename T, int Keys, bool Corrects>
constexpr bool kMayHaveCopiers = sizeof(T) == 2 && Keys <= 64 && Corrects;

// `Keys`: those of a warp. `Fours`: the block's strips are four, a warpgroup's for each part of the keys. `Backward` is of rules
// that correct; of others `pass.backward` says where a walk begins.
template <typename T, int Keys, bool Fours, bool Corrects, bool Backward, bool Decays>
__global__ void __launch_bounds__(kMostWarps* kWarp) walk(const Walks<Factor<T>> w) {
    using F = Factor<T>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kSteps = kSide / 8;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Slice<F>& slice = w.slice;
    const bool reverse = Corrects ? Backward : w.pass.backward;
    const int parts = w.parts, strips = Fours ? kGroupWarps : w.strips, threads = strips * parts * kWarp;
    int warp = static_cast<int>(threadIdx.x) / kWarp, thread = threadIdx.x;
    // Lanes have the same number, as the compiler sees so: a warpgroup's products in ways that lanes part on follow one another.
    if constexpr (sizeof(T) == 2) warp = __shfl_sync(kAllLanes, warp, 0);
    bool copier = false, copies = true;  // some warps only copy for the others, if there are such
    if constexpr (kMayHaveCopiers<T, Keys, Corrects>) {
        const int warps = strips * parts;
        copier = warp >= warps;
        copies = copier || static_cast<int>(blockDim.x) == threads;
        if (copier) warp -= warps;
        thread = warp * kWarp + warp_lane();
    }
    const WalkLayout<T> shared(Carver(memory), Corrects, Backward, Decays, w.stages, Keys * parts, strips, parts);
    const int strip = warp % strips, part = warp / strips, first_key = part * Keys;
    const int blocks = gridDim.x / slice.heads, block = blockIdx.x % blocks, head_index = blockIdx.x / blocks;
    const int batch = (slice.first_head + head_index) / w.sizes.heads,
              head = (slice.first_head + head_index) % w.sizes.heads;
    const int of_values = w.blocks_of(w.sizes.value_dim);
    const bool transformation = Corrects && block >= of_values;  // of a probe
    const int first = (transformation ? block - of_values : block) * strips * kTileRows,
              column = first + strip * kTileRows;
    const int keys = w.sizes.key_dim, columns = transformation ? keys : w.sizes.value_dim, time = w.sizes.time;
    // Nobody asks what the slice's last segment makes of zeros, or backwards its first.
    const int number = blockIdx.y + (reverse && w.probe ? 1 : 0);
    const int begin = slice.begin + number * w.length, end = min(slice.begin + slice.chunks, begin + w.length);

    const bool grouped = Fours && has_groups();
    const auto of_stage = [&](const Pieces<T>& all, int n) { return all.from(0, (n & (w.stages - 1)) * Keys * parts); };
    const auto fetch = [&](int n) {
        const int stage = n & (w.stages - 1), start = n * kSide;
        // A warp copies a part of the steps of the keys, and of the columns, that it multiplies by.
        const auto copy_keys = [&](const Pieces<T>& to, const Sequence& x) {
            const Head<T> from(x, batch, head, 0, keys);
            if (from.in_pieces(Keys * parts))
                copy_columns<Keys>(of_stage(to, n), from, first_key, strip, strips, kSide, start, time);
            else
                copy_elements(of_stage(to, n), from, kSide, Walk(Keys * parts, thread, threads), start, time);
        };
        copy_keys(shared.keys, w.keys);
        if constexpr (Backward) {
            copy_keys(shared.queries, w.queries);
            copy_lower(shared.scores[stage], slice.scores + slice.index(head_index, n) * kSide * kSide, thread,
                       threads);
        }
        const Head<T> values(w.values, batch, head, first, transformation ? 0 : columns);
        if (values.in_pieces(strips * kTileRows))
            copy_columns<kTileRows>(shared.values[stage], values, strip * kTileRows, part, parts, kSide, start, time);
        else
            copy_elements(shared.values[stage], values, kSide, Walk(strips * kTileRows, thread, threads), start, time);
        if constexpr (Decays) {
            if constexpr (Corrects) copy_keys(shared.erase, w.erase);
            copy_columns<Keys>(shared.decays[stage],
                               Head<float>(slice.decays_of(head_index, n), slice.key_rows, slice.key_rows), first_key,
                               strip, strips, Corrects ? kBlocks : 1, 0, kBlocks);
            const int i = 4 * thread;
            if (!Corrects && w.pass.values && i < strips * kTileRows && first + i < slice.columns)
                copy_async<16>(&shared.decays[stage](1, i), slice.value_decays_of(head_index, n) + first + i);
        }
        if constexpr (Corrects)
            copy_lower(shared.inverse[stage], slice.inverse + slice.index(head_index, n) * kSide * kSide, thread,
                       threads);
        else if (!w.pass.gated)
            return;
        for (int i = 4 * thread; i < kWalkNumbers; i += 4 * threads)
            copy_async<16>(shared.steps[stage].data + i, slice.steps_of(head_index, n) + i);
    };
    const auto nth = [&](int i) { return reverse ? end - 1 - i : begin + i; };

    float passed_log = 0.0f;  // of a rule that does not correct
    Strip<Keys / 8> state;
    state.clear();
    if (transformation) {
        state.each([&](int place, int j, float& x) { x = first_key + place == column + j ? 1.0f : 0.0f; });
    } else if (!w.probe) {
        const WalkStates& from = number == (reverse ? w.count - 1 : 0) ? w.first : w.others;
        if (from.data != nullptr)
            load_state(state, from.data + from.index(head_index, number) * keys * columns, first_key, keys, column,
                       columns);
    }
    const int64_t state_floats = static_cast<int64_t>(keys) * columns;
    const int chunks = end - begin;
    // So many chunks are on their way while one is worked on.
    const int ahead = w.stages - 1;
    const auto arrive = [&] {  // the first of those that are on their way
        if (copies) {
            if (ahead > 1)
                copies_wait<kMostStages - 2>();
            else
                copies_wait<0>();
            if (grouped) show_to_groups();
        }
        __syncthreads();
    };
    for (int i = -ahead; i < chunks; ++i) {
        if (ahead > 0 && i >= 0) arrive();
        if (ahead == 0 && i > 0) __syncthreads();
        if (copies) {
            if (i + ahead < chunks) fetch(nth(i + ahead));
            copies_commit();
        }
        if (i < 0) continue;
        if (ahead == 0) arrive();
        if (copier) continue;
        const int n = nth(i), stage = n & ahead;
        const Pieces<T> k = of_stage(shared.keys, n).from(0, first_key),
                        erase = Corrects && Decays ? of_stage(shared.erase, n).from(0, first_key) : k;
        const float* const steps = shared.steps[stage].data;
        const Matrix<float> all_decays = shared.decays[stage], decays{all_decays.data + first_key, all_decays.stride};
        const bool records = w.record && column < slice.columns;
        if (records) {
            F* const to =
                slice.state_of(reverse ? slice.d_states : slice.states, head_index, n) + column * slice.key_rows;
            state.store(to + first_key, slice.key_rows, slice.key_rows - first_key);
        }
        if (!reverse && w.kept != nullptr) {
            const int interval = w.sizes.interval / kSide;
            if (n > 0 && n % interval == 0)
                store_state(state,
                            w.kept + (static_cast<int64_t>(head_index) * kept_states(w.sizes) + n / interval - 1) *
                                         state_floats,
                            first_key, keys, column, columns);
        }
        if constexpr (!Corrects) {
            Strip<kSteps> given;
            given.load(shared.values[stage], strip * kTileRows);
            if (Decays || !w.pass.gated) {
                if constexpr (Decays) state.scale(decays.data);
                if (Decays && w.pass.values) {
                    const float* const by = &all_decays(1, strip * kTileRows);
                    state.each([&](int, int j, float& x) { x *= by[j]; });
                }
                start<kPasses, true, true>(grouped, state, given, k);
                finish(grouped, state);
            } else {
                const float whole = steps[kWholeGate];
                passed_log += steps[kWholeLog];
                state.each([&](int, int, float& x) { x *= whole; });
                given.scale(steps + (reverse ? kFromStart : kToEnd));
                start<kPasses, true>(grouped, state, given, k);
                if constexpr (kRounded<T>) start<kPasses, true>(grouped, state, given.template rest<T>(), k);
                finish(grouped, state);
            }
        } else {
            Strip<kSteps> read;
            read.clear();
            const Pieces<T>& read_keys = Backward ? k : erase;
            if constexpr (Decays) {
                read_blocks<kPasses, Backward>(read, state, read_keys, decays);
            } else {
                start<kPasses, false>(grouped, read, state, read_keys);
                if constexpr (Backward && kRounded<T>)
                    start<kPasses, false>(grouped, read, state.template rest<T>(), read_keys);
            }
            Strip<kSteps> given, found;
            given.load(shared.values[stage], strip * kTileRows);
            found.clear();
            finish(grouped, read);
            if (parts > 1) sum_parts_of(read, shared.exchange, strip, strips, part, parts);
            if constexpr (Backward) {
                if (w.pass.gated) read.scale(steps + kToEnd);
                multiply_kept<kPasses, true, Part::kLower>(read, given, shared.scores[stage]);
                multiply_kept<kPasses, true, Part::kLower>(found, read, shared.inverse[stage]);
            } else {
                given.scale(steps + kBeta);
                read.scale(steps + kReadBeta);
#pragma unroll
                for (int a = 0; a < kSteps; ++a)
#pragma unroll
                    for (int b = 0; b < 4; ++b) given.value[a][b] -= read.value[a][b];
                multiply_kept<kPasses, false, Part::kLower>(found, given, shared.inverse[stage]);
            }
            if (records && part == 0)
                found.store(slice.rows_of(Backward ? slice.d_right : slice.updates, head_index, n) + column * kSide,
                            kSide, kSide);
            if (!Decays && w.pass.gated) {
                const float whole = steps[kWholeGate];
                state.each([&](int, int, float& x) { x *= whole; });
            }
            const Pieces<T> q = of_stage(shared.queries, n).from(0, first_key);
            if constexpr (Backward) {
                if (records && part == 0) {
                    Strip<kSteps> d_values = found;
                    d_values.scale(steps + kBeta);
                    d_values.store_steps(Head<T>(w.d_values, batch, head, column, columns), n * kSide, time);
                }
                if (w.pass.gated) given.scale(steps + kFromStart);
                if constexpr (!Decays) {
                    start<kPasses, true>(grouped, state, given, q);
                    finish(grouped, state);
                    if (kRounded<T> && w.pass.gated) {
                        start<kPasses, true>(grouped, state, given.template rest<T>(), q);
                        finish(grouped, state);
                    }
                }
                found.scale(steps + kReadBeta);
                found.each([](int, int, float& x) { x = -x; });
            } else if (w.pass.gated) {
                found.scale(steps + kToEnd);
            }
            const Pieces<T>& write_keys = Backward ? erase : k;
            if constexpr (!Decays) {
                start<kPasses, true>(grouped, state, found, write_keys);
                finish(grouped, state);
                continue;
            }
            each_block<Backward>(decays, [&](int block, const float* by) {
                const auto add = [&](Strip<kSteps>& left, const Pieces<T>& right) {
                    multiply_kept<kPasses, true>(state, left.template part<2>(2 * block),
                                                 right.from(kTileRows * block, 0));
                };
                state.scale(by);
                if constexpr (Backward) add(given, q);
                add(found, write_keys);
            });
        }
    }
    if (copier) return;
    if constexpr (!Corrects && Decays) {
        if (w.probe && block == 0)
            for (int i = thread; i < keys + columns; i += threads) {
                float log = 0.0f;
                for (int n = begin; n < end; ++n)
                    log += i < keys        ? slice.decays_of(head_index, n)[slice.key_rows + i]
                           : w.pass.values ? slice.value_decays_of(head_index, n)[slice.columns + i - keys]
                                           : 0.0f;
                w.passed[(static_cast<int64_t>(number) * slice.heads + head_index) * (keys + columns) + i] = expf(log);
            }
    } else if (!Corrects && w.probe && w.passed != nullptr && block == 0 && thread == 0) {
        w.passed[static_cast<int64_t>(number) * slice.heads + head_index] = expf(passed_log);
    }
    const bool ends = w.probe || number == (reverse ? 0 : w.count - 1);
    if (!ends || w.ends.data == nullptr) return;
    if (transformation)
        store_state(state, w.passed + (static_cast<int64_t>(number) * slice.heads + head_index) * keys * keys,
                    first_key, keys, column, keys);
    else
        store_state(state, w.ends.data + w.ends.index(head_index, number) * state_floats, first_key, keys, column,
                    columns);
}

template <typename T, bool Corrects, bool Backward, bool Decays>
cudaError_t launch_kernel(const Walks<Factor<T>>& w, cudaStream_t stream) {
    const auto with = [&](auto keys, auto fours) {
        const int identity = Corrects && w.probe ? w.blocks_of(w.sizes.key_dim) : 0;
        const dim3 grid(static_cast<unsigned>(w.slice.heads) * (w.blocks_of(w.sizes.value_dim) + identity),
                        w.count - w.probe);
        const size_t shared = WalkLayout<T>(Carver(nullptr), Corrects, Backward, Decays, w.stages,
                                            w.keys_of_warp * w.parts, w.strips, w.parts)
                                  .bytes;
        // As many warps again copy for the others, where multiprocessors have a block at most.
        const int warps = w.strips * w.parts;
        const bool fit = kMayHaveCopiers<T, keys, Corrects> && w.parts == 1 && 2 * warps <= kMostWarps;
        const bool alone = static_cast<int64_t>(grid.x) * grid.y <= multiprocessors();
        const int copiers = fit && (w.asked_threads > 0 ? w.asked_threads > warps * kWarp : alone) ? warps : 0;
        return launch(walk<T, keys, fours, Corrects, Backward, Decays>, grid, dim3((warps + copiers) * kWarp), shared,
                      stream, w);
    };
    const auto with_many = [&](auto keys) {
        if constexpr (sizeof(T) == 2 && (Corrects ? kRounded<T> && !Decays : true))
            if (w.strips == kGroupWarps) return with(keys, std::true_type());
        return with(keys, std::false_type());
    };
    switch (w.keys_of_warp) {
        case 16: return with(std::integral_constant<int, 16>(), std::false_type());
        case 32: return with(std::integral_constant<int, 32>(), std::false_type());
        case 64: return with_many(std::integral_constant<int, 64>());
        default: return with_many(std::integral_constant<int, kMostKeys<T>>());
    }
}

}  // namespace

template <typename T>
cudaError_t launch_walks(const Walks<Factor<T>>& w, cudaStream_t stream) {
    return with_flags(w.pass.decays, w.pass.backward, [&](auto decays, auto backward) {
        return w.pass.corrects ? launch_kernel<T, true, backward, decays>(w, stream)
                               : launch_kernel<T, false, false, decays>(w, stream);
    });
}

template cudaError_t launch_walks<float>(const Walks<float>&, cudaStream_t);
template cudaError_t launch_walks<__half>(const Walks<float>&, cudaStream_t);
template cudaError_t launch_walks<__nv_bfloat16>(const Walks<__nv_bfloat16>&, cudaStream_t);

}  // namespace fairseq_fastweights
