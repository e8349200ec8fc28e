// The walk: the only stage that goes through a head's chunks one after another. It carries states, backwards their gradients,
// and leaves for the other stages each chunk's state and what depends on it. In the notation of gates.cuh and gradients.cu,
// everything transposed, so that what a product makes is the left factor of the next in the same warp's registers (strips.cuh):
//
//   E'  = V' - (S' K') diag(D_t0)      U' = (E' B) T'            S'  <- D S' + (U' diag(D_es)) K
//   dU' = dY' P + (dS' K') diag(D_es)  dR' = dU' T    dV' = dR' B
//                                                    dS' <- D dS' + (dY' diag(D_t0)) Q - (dR' B diag(D_t0)) K
//
// and of rules that do not correct, whose U is V and w the strengths of writes, which are one and the same, from either end:
//
//   S'  <- D S' + (V' diag(D_es w_s)) K                dS' <- D dS' + (dY' diag(D_t0)) Q
//
// With decays of keys, in the notation of levels.cuh, D is diag(F_e0) and no other gates are there: keys are K * F_e.,
// queries Q * F_.0, and keys whose errors are read, here and in -(dR' B) K, are E * F_.0, all from the local stage. Of a rule that
// corrects these are decayed within blocks of 16 steps, and the state from block to block, in float32: keys that are rounded after
// the decays of 64 steps near 1 would not be those of the system, and what is not erased so adds up over thousands of steps. With
// decays of values, Z there, V' is (V * Z_e.)', dY' is (dY * Z_.0)', and columns of states are scaled too.
//
// A block is a walk of one head (the whole slice, a segment of it, or the steps between two states that were kept) and some
// value columns, 16 to a warp, whose part of the state stays in its registers. Of more keys than these hold each warp takes a
// part; if a rule corrects, they exchange what they make of a chunk's steps. But for that there is one barrier a chunk. Where a
// block's strips are four, the products with a state's keys are the warpgroup's, if it has such; not those of rules
// that correct and have decays of keys, which add to a state 16 steps at a time.
//
// dS collects what queries read in directions that no key erases, without bound, and K dS remains small: so dS is split in two
// for that product, not rounded. So is what gates scale, but for U of the delta rule.
#include "walk.cuh"

#include "walk_parts.cuh"

namespace fairseq_fastweights {
namespace {

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
    const int parts = w.parts, strips = Fours ? kGroupWarps : w.strips, warps = strips * parts;
    int warp = static_cast<int>(threadIdx.x) / kWarp;
    // Lanes have the same number, as the compiler sees so: a warpgroup's products in ways that lanes part on follow one another.
    if constexpr (sizeof(T) == 2) warp = __shfl_sync(kAllLanes, warp, 0);
    // Some warps only copy for the others, if there are such.
    const bool copier = kMayHaveCopiers<T, Keys, Corrects> && warp >= warps;
    const bool copies = !kMayHaveCopiers<T, Keys, Corrects> || copier || static_cast<int>(blockDim.x) == warps * kWarp;
    if (copier) warp -= warps;
    const int thread = warp * kWarp + warp_lane();
    const WalkLayout<T> shared(Carver(memory), Corrects, Backward, Decays, {Keys, parts, strips, w.stages});
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

    const auto nth = [&](int i) { return reverse ? end - 1 - i : begin + i; };
    const bool gated = !Decays && w.pass.gated;
    const bool grouped = Fours && in_groups();  // products are the warpgroup's
    const auto of_stage = [&](const Pieces<T>& all, int stage) { return all.from(0, stage * Keys * parts); };

    // A warp copies a part of the steps of the keys that it multiplies by. Values, and what is for all warps, are copied by a
    // warpgroup, where there is one, of the first keys; else a warp copies of its own columns.
    constexpr int kWarps = Fours ? kGroupWarps : 0, kDecayRows = Corrects ? kBlocks : 1;
    const auto fetch = [&](int n, int stage) {
        const int start = n * kSide;
        const auto fetch_keys = [&](const Pieces<T>& to, const Sequence& x) {
            copy_columns<Keys, kSide, kWarps>(of_stage(to, stage), Head<T>(x, batch, head, 0, keys), first_key,
                                              Keys * parts, strip, strips, start, time);
        };
        fetch_keys(shared.keys, w.keys);
        if constexpr (Backward) fetch_keys(shared.queries, w.queries);
        if constexpr (Corrects && Decays) fetch_keys(shared.erase, w.erase);
        if (!Fours || part == 0)
            copy_columns<Fours ? kGroupColumns : kTileRows, kSide, kWarps>(
                shared.values.from(stage * kSide, 0),
                Head<T>(w.values, batch, head, first, transformation ? 0 : columns), Fours ? 0 : strip * kTileRows,
                strips * kTileRows, Fours ? strip : part, parts, start, time);
        if constexpr (Decays) {
            const Matrix<float> to = shared.decays.from(stage * kDecayRows, 0);
            const Head<float> decays(slice.decays_of(head_index, n), slice.key_rows, slice.key_rows);
            copy_columns<Keys, kDecayRows, kWarps>(to, decays, first_key, Keys, strip, strips, 0, kBlocks);
            const int i = 4 * thread;
            if (!Corrects && w.pass.values && i < strips * kTileRows && first + i < slice.columns)
                copy_async<16>(&to(0, Keys * parts + i), slice.value_decays_of(head_index, n) + first + i);
        }
        if (Fours && part > 0) return;
        if constexpr (Backward)
            copy_rows<kLowerRows, kBlockSide, kWarps>(shared.scores.from(stage * kLowerRows, 0),
                                                      slice.lower_of(slice.scores, head_index, n).data, warp, warps);
        if constexpr (Corrects)
            copy_rows<kLowerRows, kBlockSide, kWarps>(shared.inverse.from(stage * kLowerRows, 0),
                                                      slice.lower_of(slice.inverse, head_index, n).data, warp, warps);
        if (Corrects || gated)
            copy_rows<kWalkNumbers / 4, 4, kWarps>(Matrix<float>{&shared.steps(stage, 0), 4},
                                                   slice.steps_of(head_index, n), warp, warps);
    };

    const bool records = w.record && column < slice.columns, records_steps = records && part == 0;
    const int64_t state_floats = static_cast<int64_t>(keys) * columns;
    const int interval = w.sizes.interval / kSide;
    // The chunk whose state is kept next.
    int next_kept = reverse || w.kept == nullptr ? end : max(1, (begin + interval - 1) / interval) * interval;

    const auto rows_of_state = [&](float* state) { return Head<float>(state + column, columns, columns - column); };
    float passed_log = 0.0f;  // of a rule that does not correct
    Strip<Keys / 8> state;
    state.clear();
    if (transformation) {
        state.each([&](int place, int j, float& x) { x = first_key + place == column + j ? 1.0f : 0.0f; });
    } else if (!w.probe) {
        const WalkStates& start = number == (reverse ? w.count - 1 : 0) ? w.first : w.others;
        if (start.data != nullptr)
            each_place(state, rows_of_state(start.data + start.index(head_index, number) * state_floats), first_key,
                       keys, [](float& x, float from) { x = from; });
    }
    // So many chunks are on their way while one is worked on.
    const int ahead = w.stages - 1, chunks = end - begin;
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
            if (i + ahead < chunks) fetch(nth(i + ahead), (i + ahead) & ahead);
            copies_commit();
        }
        if (i < 0) continue;
        if (ahead == 0) arrive();
        if (copier) continue;
        const int n = nth(i), stage = i & ahead;
        const Pieces<T> k = of_stage(shared.keys, stage).from(0, first_key),
                        erase = Corrects && Decays ? of_stage(shared.erase, stage).from(0, first_key) : k;
        const float* const steps = &shared.steps(stage, 0);
        const Matrix<float> decays = shared.decays.from(stage * kDecayRows, first_key);
        const Matrix<T> values = shared.values.from(stage * kSide, 0);
        const auto lower = [&](const auto& all) {
            return LowerBlocks<typename std::decay_t<decltype(all)>::Element>{&all(stage * kLowerRows, 0),
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
        Strip<kSteps, T> given;
        const auto add_given = [&](const float* by, const Pieces<T>& right) {
            if (gated) {
                Strip<kSteps> scaled = given.widened();
                scaled.scale(by);
                return multiply<kPasses, true, true>(grouped, state, scaled, right);
            }
            multiply<kPasses, true>(grouped, state, given, right);
        };
        if constexpr (!Corrects) {
            given.load(values, strip * kTileRows);
            if constexpr (Decays) state.scale(&decays(0, 0));
            if (Decays && w.pass.values)
                state.each([&](int, int j, float& x) { x *= shared.decays(stage, Keys * parts + column - first + j); });
            if (gated) {
                passed_log += steps[kWholeLog];
                state.scale(steps[kWholeGate]);
            }
            add_given(steps + (reverse ? kFromStart : kToEnd), k);
            continue;
        }
        Strip<kSteps> read, found;
        read.clear();
        const Pieces<T>&read_keys = Backward ? k : erase, &write_keys = Backward ? erase : k;
        if constexpr (Decays)
            read_blocks<kPasses, Backward>(read, state, read_keys, decays);
        else
            start<kPasses, false, Backward>(grouped, read, state, read_keys);
        given.load(values, strip * kTileRows);
        finish(grouped, read);
        if (parts > 1) sum_parts_of(read, shared.exchange, strip, strips, part, parts);
        const auto inverse = lower(shared.inverse);
        if constexpr (Backward) {
            if (gated) read.scale(steps + kToEnd);
            multiply_kept<kPasses, true, Part::kLower>(read, given, lower(shared.scores));
            multiply_by_inverse<kPasses, true>(found, read, inverse);
        } else {
            Strip<kSteps> errors = given.widened();
            errors.scale(steps + kBeta);
            read.scale(steps + kReadBeta);
            errors.each_with(read, [](float& x, float y) { x -= y; });
            multiply_by_inverse<kPasses, false>(found, errors, inverse);
        }
        if (records_steps)
            found.store(slice.rows_of(Backward ? slice.d_right : slice.updates, head_index, n) + column * kSide, kSide,
                        kSide);
        if (gated) state.scale(steps[kWholeGate]);
        const Pieces<T> q = of_stage(shared.queries, stage).from(0, first_key);
        if constexpr (Backward) {
            if (records_steps) {
                Strip<kSteps> by_strength = found;
                by_strength.scale(steps + kBeta);
                store_steps(by_strength, Head<T>(w.d_values, batch, head, column, columns), n * kSide, time);
            }
            if constexpr (!Decays) add_given(steps + kFromStart, q);
            found.scale(steps + kReadBeta);
            found.scale(-1.0f);
        } else if (gated) {
            found.scale(steps + kToEnd);
        }
        if constexpr (!Decays) {
            multiply<kPasses, true>(grouped, state, found, write_keys);
        } else {
            UNROLL_FOR (int j = 0; j < kBlocks; ++j) {
                const int block = Backward ? kBlocks - 1 - j : j, row = kTileRows * block;
                state.scale(&decays(block, 0));
                if constexpr (Backward)
                    multiply_kept<kPasses, true>(state, given.template part<2>(2 * block), q.from(row, 0));
                multiply_kept<kPasses, true>(state, found.template part<2>(2 * block), write_keys.from(row, 0));
            }
        }
    }
    if (copier) return;
    const int64_t index = static_cast<int64_t>(number) * slice.heads + head_index;
    if (!Corrects && w.probe && w.passed != nullptr && block == 0) {
        const int numbers = Decays ? keys + columns : 1;
        for (int i = thread; i < numbers; i += warps * kWarp) {
            float log = passed_log;
            for (int n = begin; Decays && n < end; ++n)
                log += i < keys        ? slice.decays_of(head_index, n)[slice.key_rows + i]
                       : w.pass.values ? slice.value_decays_of(head_index, n)[slice.columns + i - keys]
                                       : 0.0f;
            w.passed[index * numbers + i] = expf(log);
        }
    }
    if (w.ends.data == nullptr || !(w.probe || number == (reverse ? 0 : w.count - 1))) return;
    float* const to = transformation ? w.passed + index * state_floats
                                     : w.ends.data + w.ends.index(head_index, number) * state_floats;
    store_steps(state, rows_of_state(to), first_key, keys);
}

template <typename T, bool Corrects, bool Backward, bool Decays>
cudaError_t launch_kernel(const Walks<Factor<T>>& w, cudaStream_t stream) {
    const auto with = [&](auto keys, auto fours) {
        const int identity = Corrects && w.probe ? w.blocks_of(w.sizes.key_dim) : 0;
        const dim3 grid(static_cast<unsigned>(w.slice.heads) * (w.blocks_of(w.sizes.value_dim) + identity),
                        w.count - w.probe);
        const size_t shared = WalkLayout<T>(Carver(nullptr), Corrects, Backward, Decays, w).bytes;
        // As many warps again copy for the others, where multiprocessors have a block at most.
        const int warps = w.strips * w.parts, asked = AskedPlan().threads;
        const bool fit = kMayHaveCopiers<T, keys, Corrects> && w.parts == 1 && 2 * warps <= kMostWarps;
        const bool alone = static_cast<int64_t>(grid.x) * grid.y <= multiprocessors();
        const int copiers = fit && (asked > 0 ? asked > warps * kWarp : alone) ? warps : 0;
        return launch(walk<T, keys, fours, Corrects, Backward, Decays>, grid, dim3((warps + copiers) * kWarp), shared,
                      stream, w);
    };
    const auto with_keys = [&](auto keys) {
        if constexpr (keys >= 64 && sizeof(T) == 2 && (!Corrects || (kRounded<T> && !Decays)))
            if (w.strips == kGroupWarps) return with(keys, std::true_type());
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
