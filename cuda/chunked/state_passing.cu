// The inter-chunk pass (state passing): the only kernel that computes a head's chunks one after another. It carries
// states, backwards their gradients, and stores each chunk's state and updates for the chunk-parallel kernels. In the
// notation of gates.cuh and gradients.cu, everything transposed, so that the result of a product is the left factor of
// the next in the same warp's registers (fragments.cuh):
//
//   R'  = V' - (S' K') diag(D_t0)      U' = (R' B) T'            S'  <- D S' + (U' diag(D_es)) K
//   dU' = dY' P + (dS' K') diag(D_es)  X' = dU' T     dV' = X' B
//                                                    dS' <- D dS' + (dY' diag(D_t0)) Q - (X' B diag(D_t0)) K
//
// and without the delta rule, where U is V and w are the write factors, the same product from either end:
//
//   S'  <- D S' + (V' diag(D_es w_s)) K                dS' <- D dS' + (dY' diag(D_t0)) Q
//
// With decays of keys, in the notation of secondary_chunking.cuh, D is diag(F_e0) and there are no other gates: keys
// are K * F_e., queries Q * F_.0 and erase keys E * F_.0, all from the intra-chunk kernel. For delta rules these are
// decayed within subchunks of 16 steps only, and the state from subchunk to subchunk, in float32: keys rounded after
// the decays of 64 steps near 1 would not be those of the chunk's system, and the part that is not erased would add up
// over thousands of steps. With decays of values, V' is (V * Z_e.)', dY' is (dY * Z_.0)', and columns of states are
// scaled too.
//
// A block has one head, for the whole slice, a segment of it, or the steps between two kept states, and some value
// columns, 16 to a warp, whose part of the state stays in the warp's registers. More keys than these hold are divided
// among warps, which for delta rules add up their parts of the retrieved values. Otherwise there is one barrier a
// chunk. A block of four value tiles uses wgmma for products with the state's keys, where there is one; not for delta
// rules with decays of keys, which add to the state 16 steps at a time.
//
// dS collects without bound the directions that queries read and no key erases, while K dS stays small: so dS is split
// into two bfloat16 for that product, not rounded. So are operands scaled by gates, except U of the delta rule.
#include "state_passing.cuh"

namespace fairseq_fastweights {
namespace {

// Starts to copy `Columns` columns from `first` on, and `Rows` rows from `start` on, to a matrix with `columns`
// columns; zeros from row `end` on. Copied by `Warps` warps or, with 0, by `warps`. `All`: all are there, and aligned.
template <int Columns, int Rows, int Warps, bool All = false, typename To, typename T>
DEVICE void copy_columns(const To& to, const Head<T>& from, int first, int columns, int warp, int warps, int start,
                         int end) {
    constexpr int kPack = 16 / sizeof(T), kAcross = Columns / kPack, kDown = kWarp / kAcross;
    constexpr int kLeastOn = kDown * (Warps > 0 ? Warps : 1), kMost = (Rows + kLeastOn - 1) / kLeastOn;
    constexpr bool kWhole = Warps > 0 && kMost * kLeastOn == Rows;  // the same number for all lanes
    // So many at a time: in float32 there are no registers for more.
    constexpr int kAtOnce = Warps > 0 || (sizeof(T) == 2 && kMost < 4) ? kMost : sizeof(T) == 2 ? 4 : 1;
    const int lane = warp_lane(), own = first + lane % kAcross * kPack, nth = lane / kAcross;
    // Neighbouring lanes have rows r and r + 4, which lie in different banks.
    const int row = warp * kDown + (kDown == 8 ? nth % 2 * 4 + nth / 2 : nth);
    if (Warps > 0) warps = Warps;
    const int stride = static_cast<int>(from.stride);  // 32 bits, to save registers
    if (!All && !(from.is_aligned(columns) && from.stride == stride))
        return copy_elements<Columns>(to.from(0, first), Head<T>(from.data + first, from.stride, from.dim - first),
                                      Rows, start, end, warp * kWarp + lane, warps * kWarp);
    const int rows_there = own < from.dim ? end - start - row : 0, rows_on = warps * kDown;
    const T* piece = from.data + own + static_cast<int64_t>(start + row) * stride;
    T* const place = &to(row, own);
    for (int down = 0; down < Rows;) {
        UNROLL_FOR (int i = 0; i < kAtOnce; ++i, down += rows_on, piece += static_cast<int64_t>(rows_on) * stride)
            if (kWhole || row + down < Rows)
                copy_or_clear(place + (&to(down, 0) - to.data), piece, All || down < rows_there);
        if (kAtOnce == kMost) return;
    }
}

// Starts to copy contiguous rows of the workspace.
template <int Rows, int Columns, int Warps, typename C>
DEVICE void copy_rows(const Matrix<C>& to, C* from, int warp, int warps) {
    copy_columns<Columns, Rows, Warps, true>(to, Head<C>(from, Columns, Columns), 0, Columns, warp, warps, 0, Rows);
}

// f(float& x, the number in memory) for a fragment's elements in a sequence or a state that begins at `rows`: inner
// index p is row `start` + p, and there are no rows from `end` on.
template <int N, typename T, typename Function>
DEVICE void each_element(Fragment<N>& x, const Head<T>& rows, int start, int end, Function f) {
    const int lane_row = warp_lane() / 4, first = start + warp_lane() % 4 * 2;
    T* row = rows.data + first * rows.stride + lane_row;
    UNROLL_FOR (int n = 0; n < N; ++n, row += 8 * rows.stride)
        UNROLL_FOR (int i = 0; i < 4; ++i)
            if (first + 8 * n + i % 2 < end && lane_row + i / 2 * 8 < rows.dim)
                f(x.value[n][i], row[i % 2 * rows.stride + i / 2 * 8]);
}

// Writes a fragment to a sequence's steps likewise.
template <int N, typename T>
DEVICE void store_steps(Fragment<N>& x, const Head<T>& to, int start, int end) {
    if constexpr (sizeof(T) == 2)
        if (to.dim >= kMmaRows && (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(T)) % 8 == 0) {
            const int first = start + warp_lane() / 4;
            UNROLL_FOR (int n = 0; n < N; ++n) {
                const auto transposed = [&](int i) {
                    return transpose_matrix(narrow_pair<T>(x.value[n][i], x.value[n][i + 1]).bits());
                };
                const uint2 four = neighbours_of(transposed(0), transposed(2));
                if (first + 8 * n < end)
                    *reinterpret_cast<uint2*>(to.data + (first + 8 * n) * to.stride + first_of_four()) = four;
            }
            return;
        }
    each_element(x, to, start, end, [](float from, T& number) { number = narrow<T>(from); });
}

// solved = left T' or, with `RowsInner`, left T, of which `inverse` has T - I: the ones of T are added in float32,
// which also keeps a NaN of the left factor that truncation to tf32 would lose.
template <int Passes, bool RowsInner>
DEVICE void multiply_by_inverse(Fragment<kChunk / 8>& solved, const Fragment<kChunk / 8>& left,
                                const LowerTriangle<float>& inverse) {
    const int lane = warp_lane();
    solved = left;
    UNROLL_FOR (int e = 0; e < kChunk / 8; e += 2) {  // the inner indices of a subchunk
        const LeftOperand<Passes, Rounding::kCut> first(left.value[e]), second(left.value[e + 1]);
        UNROLL_FOR (int n = RowsInner ? 0 : e; n < (RowsInner ? e + 2 : kChunk / 8); ++n) {
            unsigned b[4];
            if constexpr (RowsInner) {
                UNROLL_FOR (int i = 0; i < 4; ++i)
                    b[i] = __float_as_uint(
                        inverse(8 * (e + i / 2) + lane % 4 * 2 + i % 2, 8 * n + place_in_inverse(lane / 4)));
            } else {
                load_matrices<false>(b, &inverse(8 * n + lane % 8, 8 * e + lane / 8 * 4));
            }
            const auto number = [&](int i) { return __uint_as_float(b[i]); };
            if (!RowsInner || n <= e) first.template multiply<Rounding::kNone>(solved.value[n], number(0), number(1));
            if (RowsInner || n > e) second.template multiply<Rounding::kNone>(solved.value[n], number(2), number(3));
        }
    }
}

// retrieved += state' keys' with keys decayed within subchunks: the state is decayed by the subchunks before each, 16
// keys at a time.
template <int Passes, bool Reverse, int N, typename T>
DEVICE void read_blocks(Fragment<kChunk / 8>& retrieved, Fragment<N>& state, const MmaMatrix<T>& keys,
                        const Matrix<float>& decays) {
    UNROLL_FOR (int e = 0; e < N; e += 2) {
        Fragment<2> left = state.template part<2>(e);
        UNROLL_FOR (int i = 0; i < kSubchunks; ++i) {
            const int block = Reverse ? kSubchunks - 1 - i : i;
            multiply_fragment<Passes, false, Part::kAll, false, Reverse>(retrieved.template part<2>(2 * block), left,
                                                                         keys.from(kMmaRows * block, 8 * e));
            left.scale(&decays(block, 8 * e));
        }
    }
}

// The sum over the warps that share a value tile, in the same order in all of them.
DEVICE void sum_parts_of(Fragment<kChunk / 8>& x, float4* exchange, int value_tile, int value_tiles, int part,
                         int parts) {
    const int lane = warp_lane();
    const auto place = [&](int p, int n) -> float4& {
        return exchange[((p * value_tiles + value_tile) * (kChunk / 8) + n) * kWarp + lane];
    };
    UNROLL_FOR (int n = 0; n < kChunk / 8; ++n)
        place(part, n) = make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
    __syncthreads();
    x.clear();
    for (int p = 0; p < parts; ++p)
        UNROLL_FOR (int n = 0; n < kChunk / 8; ++n) {
            const float4 four = place(p, n);
            x.value[n][0] += four.x, x.value[n][1] += four.y, x.value[n][2] += four.z, x.value[n][3] += four.w;
        }
}

// True if copies by producer warps may pay off: measured for these only, others took as long or longer.
template <typename T, int Keys, bool IsDelta>
constexpr bool kMayHaveProducers = sizeof(T) == 2 && Keys <= 64 && IsDelta;

// `Keys`: those of a warp. `Warpgroup`: a block has four value tiles, a warpgroup for each part of the keys. `Backward`
// is for delta rules; for others `pass.backward` says at which end it begins.
template <typename T, int Keys, bool Warpgroup, bool IsDelta, bool Backward, bool Decays>
__global__ void __launch_bounds__(kMostWarps* kWarp) pass_states(const StatePassing<Computed<T>> w) {
    using C = Computed<T>;
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kStepTiles = kChunk / 8;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Slice<C>& slice = w.slice;
    const bool reverse = IsDelta ? Backward : w.pass.backward;
    const int key_parts = w.key_parts, value_tiles = Warpgroup ? kWarpgroupWarps : w.value_tiles,
              warps = value_tiles * key_parts;
    int warp = static_cast<int>(threadIdx.x) / kWarp;
    // The shuffle tells the compiler that the warp's index is uniform: wgmma in divergent code would be serialized.
    if constexpr (sizeof(T) == 2) warp = __shfl_sync(kAllLanes, warp, 0);
    // Producer warps, if there are any, only copy.
    const bool producer = kMayHaveProducers<T, Keys, IsDelta> && warp >= warps;
    const bool copies =
        !kMayHaveProducers<T, Keys, IsDelta> || producer || static_cast<int>(blockDim.x) == warps * kWarp;
    if (producer) warp -= warps;
    const int thread = warp * kWarp + warp_lane();
    const StatePassingLayout<T> shared(SharedAllocator(memory), IsDelta, Backward, Decays,
                                       {Keys, key_parts, value_tiles, w.stages});
    const int value_tile = warp % value_tiles, key_part = warp / value_tiles, first_key = key_part * Keys;
    const int blocks = gridDim.x / slice.heads, block = blockIdx.x % blocks, head_index = blockIdx.x / blocks;
    const int batch = (slice.first_head + head_index) / w.sizes.heads,
              head = (slice.first_head + head_index) % w.sizes.heads;
    const int of_values = w.blocks_of(w.sizes.value_dim);
    const bool of_identity = IsDelta && block >= of_values;  // the image of the identity, for a probe
    const int first = (of_identity ? block - of_values : block) * value_tiles * kMmaRows,
              column = first + value_tile * kMmaRows;
    const int keys = w.sizes.key_dim, columns = of_identity ? keys : w.sizes.value_dim, time = w.sizes.time;
    // The slice's last segment (backwards its first) needs no probe.
    const int segment = blockIdx.y + (reverse && w.probe ? 1 : 0);
    const int begin = slice.begin + segment * w.length, end = min(slice.begin + slice.chunks, begin + w.length);

    const auto nth = [&](int i) { return reverse ? end - 1 - i : begin + i; };
    const bool gated = !Decays && w.pass.gated;
    const bool warpgroup = Warpgroup && has_wgmma();  // products are wgmma
    const auto of_stage = [&](const MmaMatrix<T>& all, int stage) { return all.from(0, stage * Keys * key_parts); };

    // A warp copies some steps of the keys that it multiplies by. Values and the operands of all warps are copied by
    // the first keys' warpgroup, if there are such; else each warp copies its own value columns.
    constexpr int kWarps = Warpgroup ? kWarpgroupWarps : 0, kDecayRows = IsDelta ? kSubchunks : 1;
    const auto fetch = [&](int n, int stage) {
        const int start = n * kChunk;
        const auto fetch_keys = [&](const MmaMatrix<T>& to, const Sequence& x) {
            copy_columns<Keys, kChunk, kWarps>(of_stage(to, stage), Head<T>(x, batch, head, 0, keys), first_key,
                                               Keys * key_parts, value_tile, value_tiles, start, time);
        };
        fetch_keys(shared.keys, w.keys);
        if constexpr (Backward) fetch_keys(shared.queries, w.queries);
        if constexpr (IsDelta && Decays) fetch_keys(shared.erase, w.erase);
        if (!Warpgroup || key_part == 0)
            copy_columns<Warpgroup ? kWgmmaColumns : kMmaRows, kChunk, kWarps>(
                shared.values.from(stage * kChunk, 0), Head<T>(w.values, batch, head, first, of_identity ? 0 : columns),
                Warpgroup ? 0 : value_tile * kMmaRows, value_tiles * kMmaRows, Warpgroup ? value_tile : key_part,
                key_parts, start, time);
        if constexpr (Decays) {
            const Matrix<float> to = shared.decays.from(stage * kDecayRows, 0);
            const Head<float> decays(slice.decays_of(head_index, n), slice.key_rows, slice.key_rows);
            copy_columns<Keys, kDecayRows, kWarps>(to, decays, first_key, Keys, value_tile, value_tiles, 0, kSubchunks);
            const int i = 4 * thread;
            if (!IsDelta && w.pass.decays_values && i < value_tiles * kMmaRows && first + i < slice.columns)
                copy_async<16>(&to(0, Keys * key_parts + i), slice.value_decays_of(head_index, n) + first + i);
        }
        if (Warpgroup && key_part > 0) return;
        if constexpr (Backward)
            copy_rows<kLowerRows, kSubchunk, kWarps>(shared.scores.from(stage * kLowerRows, 0),
                                                     slice.lower_of(slice.scores, head_index, n).data, warp, warps);
        if constexpr (IsDelta)
            copy_rows<kLowerRows, kSubchunk, kWarps>(shared.inverse.from(stage * kLowerRows, 0),
                                                     slice.lower_of(slice.inverse, head_index, n).data, warp, warps);
        if (IsDelta || gated)
            copy_rows<kStatePassingNumbers / 4, 4, kWarps>(Matrix<float>{&shared.steps(stage, 0), 4},
                                                           slice.steps_of(head_index, n), warp, warps);
    };

    const bool records = w.record && column < slice.columns, records_steps = records && key_part == 0;
    const int64_t state_floats = static_cast<int64_t>(keys) * columns;
    const int interval = w.sizes.interval / kChunk;
    // The chunk before which the next state is kept.
    int next_kept = reverse || w.kept == nullptr ? end : max(1, (begin + interval - 1) / interval) * interval;

    const auto rows_of_state = [&](float* state) { return Head<float>(state + column, columns, columns - column); };
    float passed_log = 0.0f;  // without the delta rule
    Fragment<Keys / 8> state;
    state.clear();
    if (of_identity) {
        state.each([&](int place, int j, float& x) { x = first_key + place == column + j ? 1.0f : 0.0f; });
    } else if (!w.probe) {
        const BoundaryStates& start = segment == (reverse ? w.count - 1 : 0) ? w.first : w.others;
        if (start.data != nullptr)
            each_element(state, rows_of_state(start.data + start.index(head_index, segment) * state_floats), first_key,
                         keys, [](float& x, float from) { x = from; });
    }
    // So many chunks are in flight while one is computed.
    const int ahead = w.stages - 1, chunks = end - begin;
    const auto arrive = [&] {  // waits for the oldest of these
        if (copies) {
            if (ahead > 1)
                copies_wait<kMostStages - 2>();
            else
                copies_wait<0>();
            if (warpgroup) fence_async_proxy();
        }
        __syncthreads();
    };
    for (int i = -ahead; i < chunks; ++i) {
        if (ahead > 0 && i >= 0) arrive();
        if (ahead == 0 && i > 0) __syncthreads();
        if (copies) {
            if (i + ahead < chunks) fetch(nth(i + ahead), (i + ahead) & ahead);
            copies_commit();
        }
        if (i < 0) continue;
        if (ahead == 0) arrive();
        if (producer) continue;
        const int n = nth(i), stage = i & ahead;
        const MmaMatrix<T> k = of_stage(shared.keys, stage).from(0, first_key),
                           erase = IsDelta && Decays ? of_stage(shared.erase, stage).from(0, first_key) : k;
        const float* const steps = &shared.steps(stage, 0);
        const Matrix<float> decays = shared.decays.from(stage * kDecayRows, first_key);
        const Matrix<T> values = shared.values.from(stage * kChunk, 0);
        const auto lower = [&](const auto& all) {
            return LowerTriangle<typename std::decay_t<decltype(all)>::Element>{&all(stage * kLowerRows, 0),
                                                                                all.stride()};
        };
        if (records)
            state.store(slice.state_of(reverse ? slice.d_states : slice.states, head_index, n) +
                            column * slice.key_rows + first_key,
                        slice.key_rows, slice.key_rows - first_key);
        if (!Backward && n == next_kept) {
            const int64_t kept = static_cast<int64_t>(head_index) * kept_states(w.sizes) + n / interval - 1;
            store_steps(state, rows_of_state(w.kept + kept * state_floats), first_key, opaque(keys));
            next_kept += interval;
        }
        // V', backwards dY'; write_v_or_dout: state += (v_or_dout diag(by)) right.
        Fragment<kStepTiles, T> v_or_dout;
        const auto write_v_or_dout = [&](const float* by, const MmaMatrix<T>& right) {
            if (gated) {
                Fragment<kStepTiles> scaled = v_or_dout.widened();
                scaled.scale(by);
                return multiply<kPasses, true, true>(warpgroup, state, scaled, right);
            }
            multiply<kPasses, true>(warpgroup, state, v_or_dout, right);
        };
        if constexpr (!IsDelta) {
            v_or_dout.load(values, value_tile * kMmaRows);
            if constexpr (Decays) state.scale(&decays(0, 0));
            if (Decays && w.pass.decays_values)
                state.each(
                    [&](int, int j, float& x) { x *= shared.decays(stage, Keys * key_parts + column - first + j); });
            if (gated) {
                passed_log += steps[kWholeLog];
                state.scale(steps[kWholeGate]);
            }
            write_v_or_dout(steps + (reverse ? kFromStart : kToEnd), k);
            continue;
        }
        // S' K' of the erase keys; backwards dS' K' of the keys. Values are loaded while wgmma runs.
        Fragment<kStepTiles> retrieved, solved;
        retrieved.clear();
        const MmaMatrix<T>&read_keys = Backward ? k : erase, &write_keys = Backward ? erase : k;
        if constexpr (Decays)
            read_blocks<kPasses, Backward>(retrieved, state, read_keys, decays);
        else
            start<kPasses, false, Backward>(warpgroup, retrieved, state, read_keys);
        v_or_dout.load(values, value_tile * kMmaRows);
        finish(warpgroup, retrieved);
        if (key_parts > 1) sum_parts_of(retrieved, shared.exchange, value_tile, value_tiles, key_part, key_parts);
        const auto inverse = lower(shared.inverse);
        if constexpr (Backward) {
            // dU' = dY' P + (dS' K') diag(D_es),  X' = dU' T
            if (gated) retrieved.scale(steps + kToEnd);
            multiply_fragment<kPasses, true, Part::kLower>(retrieved, v_or_dout, lower(shared.scores));
            multiply_by_inverse<kPasses, true>(solved, retrieved, inverse);
        } else {
            // R' B = V' B - (S' K') diag(beta D_t0),  U' = (R' B) T'
            Fragment<kStepTiles> residuals = v_or_dout.widened();
            residuals.scale(steps + kBeta);
            retrieved.scale(steps + kReadBeta);
            residuals.each_with(retrieved, [](float& x, float y) { x -= y; });
            multiply_by_inverse<kPasses, false>(solved, residuals, inverse);
        }
        if (records_steps)
            solved.store(slice.rows_of(Backward ? slice.d_rhs : slice.updates, head_index, n) + column * kChunk, kChunk,
                         kChunk);
        if (gated) state.scale(steps[kWholeGate]);
        const MmaMatrix<T> q = of_stage(shared.queries, stage).from(0, first_key);
        if constexpr (Backward) {
            if (records_steps) {
                Fragment<kStepTiles> dv = solved;  // X' B
                dv.scale(steps + kBeta);
                store_steps(dv, Head<T>(w.d_values, batch, head, column, columns), n * kChunk, time);
            }
            if constexpr (!Decays) write_v_or_dout(steps + kFromStart, q);
            solved.scale(steps + kReadBeta);  // -X' B diag(D_t0)
            solved.scale(-1.0f);
        } else if (gated) {
            solved.scale(steps + kToEnd);
        }
        if constexpr (!Decays) {
            multiply<kPasses, true>(warpgroup, state, solved, write_keys);
        } else {  // the state is decayed from subchunk to subchunk
            UNROLL_FOR (int j = 0; j < kSubchunks; ++j) {
                const int block = Backward ? kSubchunks - 1 - j : j, row = kMmaRows * block;
                state.scale(&decays(block, 0));
                if constexpr (Backward)
                    multiply_fragment<kPasses, true>(state, v_or_dout.template part<2>(2 * block), q.from(row, 0));
                multiply_fragment<kPasses, true>(state, solved.template part<2>(2 * block), write_keys.from(row, 0));
            }
        }
    }
    if (producer) return;
    const int64_t index = static_cast<int64_t>(segment) * slice.heads + head_index;
    if (!IsDelta && w.probe && w.passed != nullptr && block == 0) {
        const int numbers = Decays ? keys + columns : 1;
        for (int i = thread; i < numbers; i += warps * kWarp) {
            float log = passed_log;
            for (int n = begin; Decays && n < end; ++n)
                log += i < keys               ? slice.decays_of(head_index, n)[slice.key_rows + i]
                       : w.pass.decays_values ? slice.value_decays_of(head_index, n)[slice.columns + i - keys]
                                              : 0.0f;
            w.passed[index * numbers + i] = expf(log);
        }
    }
    if (w.ends.data == nullptr || !(w.probe || segment == (reverse ? 0 : w.count - 1))) return;
    float* const to =
        of_identity ? w.passed + index * state_floats : w.ends.data + w.ends.index(head_index, segment) * state_floats;
    store_steps(state, rows_of_state(to), first_key, keys);
}

template <typename T, bool IsDelta, bool Backward, bool Decays>
cudaError_t launch_kernel(const StatePassing<Computed<T>>& w, cudaStream_t stream) {
    const auto with = [&](auto keys, auto fours) {
        const int identity = IsDelta && w.probe ? w.blocks_of(w.sizes.key_dim) : 0;
        const dim3 grid(static_cast<unsigned>(w.slice.heads) * (w.blocks_of(w.sizes.value_dim) + identity),
                        w.count - w.probe);
        const size_t shared = StatePassingLayout<T>(SharedAllocator(nullptr), IsDelta, Backward, Decays, w).bytes;
        // Producer warps, as many again, where a multiprocessor has at most one block.
        const int warps = w.value_tiles * w.key_parts, requested = RequestedPlan().threads;
        const bool fit = kMayHaveProducers<T, keys, IsDelta> && w.key_parts == 1 && 2 * warps <= kMostWarps;
        const bool alone = static_cast<int64_t>(grid.x) * grid.y <= multiprocessors();
        const int producers = fit && (requested > 0 ? requested > warps * kWarp : alone) ? warps : 0;
        return launch(pass_states<T, keys, fours, IsDelta, Backward, Decays>, grid, dim3((warps + producers) * kWarp),
                      shared, stream, w);
    };
    const auto with_keys = [&](auto keys) {
        if constexpr (keys >= 64 && sizeof(T) == 2 && (!IsDelta || (kRounded<T> && !Decays)))
            if (w.value_tiles == kWarpgroupWarps) return with(keys, std::true_type());
        return with(keys, std::false_type());
    };
    switch (w.keys_of_warp) {
        case 16: return with_keys(std::integral_constant<int, 16>());
        case 32: return with_keys(std::integral_constant<int, 32>());
        case 64: return with_keys(std::integral_constant<int, 64>());
        default: return with_keys(std::integral_constant<int, kMostKeys<T>>());
    }
}

}  // namespace

template <typename T>
cudaError_t launch_state_passing(const StatePassing<Computed<T>>& w, cudaStream_t stream) {
    return with_flags(w.pass.decays, w.pass.backward, [&](auto decays, auto backward) {
        return w.pass.is_delta ? launch_kernel<T, true, backward, decays>(w, stream)
                               : launch_kernel<T, false, false, decays>(w, stream);
    });
}

template cudaError_t launch_state_passing<float>(const StatePassing<float>&, cudaStream_t);
template cudaError_t launch_state_passing<__half>(const StatePassing<float>&, cudaStream_t);
template cudaError_t launch_state_passing<__nv_bfloat16>(const StatePassing<__nv_bfloat16>&, cudaStream_t);

}  // namespace fairseq_fastweights
