// Decays by dimension, backwards, in the notation of secondary_chunking.cuh.
//
// With dS the gradient of the state at the end and dP_ts = <dy_t, v_s * Z_ts>, without the delta rule
//   dq_t = F_t0 * (S_0 (dy_t * Z_t0)) + sum over s <= t of dP_ts (k_s * F_ts)
//   dk_s = F_es * (dS (v_s * Z_es)) + sum over t >= s of dP_ts (q_t * F_ts)
//   dv_s = Z_es * (dS^T (k_s * F_es)) + sum over t >= s of P_ts (dy_t * Z_ts)
//   dS_0 = (F_e0 Z_e0^T) * dS + sum over t of (q_t * F_t0) (dy_t * Z_t0)^T
// and for delta rules
//   dU = P^T dY + (K * F_e.) dS          (I + B G)^T X = dU              dV = B X
//   dP = dY U^T for s <= t               dG = -X U^T for s < t           d beta_t = <x_t, (R - G U)_t>
//   d(Q * F_.0) = dY S_0^T               d(B E * F_.0) = -X S_0^T        d(K * F_e.) = U dS^T
//   dS_0 = diag(F_e0) dS + (Q * F_.0)^T dY - (E * F_.0)^T dV
// and from these the gradients of queries and keys, then those of B E and keys, which are added.
//
// Keys and values have the same equations, with dy in the place of q, v in that of k and P in that of dP: `late`,
// `early` and `weights` here. With w the weights of the pairs that a level separates, mirrored, dL = w L has the
// gradients of its rows:
//   d late_t += F_tm * dL_t in second halves        d early_s += F_ms * dL_s in first ones
// The gradient of log f_u collects all that passes through step u, element by element: l_t * dL_t over the t >= u of
// its half if that is a second one, over the s < u if it is a first one. To reads of S_0 the whole chunk is a second
// half, to writes that are left at the end a first one, and the row sums of (F_e0 Z_e0^T) * S_0 * dS pass all of it.
// Nothing is subtracted.
#pragma once

#include "chunk_parallel.cuh"
#include "secondary_chunking.cuh"

namespace fairseq_fastweights {

// Pairs of this warp's 16 steps, from `row` on, with those before them, as the intra-chunk kernel stored them: high +
// low half.
template <typename C>
DEVICE Fragment<kChunk / 8> load_pairs(const ChunkCoord<C>& at, int row, C* high, C* low) {
    Fragment<kChunk / 8> pairs;
    pairs.each_pair([&](int s, int j, float& x, float& y) {
        const auto add = [&](C* numbers) {
            const C* const from = &at.slice.lower_of(numbers, at.local, at.n)(row, 0);
            const auto pair =
                *reinterpret_cast<const Pair<C>*>(from + (s / kSubchunk * kSubchunk + j) * kSubchunk + s % kSubchunk);
            x += widen<float>(pair.x), y += widen<float>(pair.y);
        };
        x = y = 0.0f;
        if (s / kSubchunk * kSubchunk > row) return;
        add(high);
        if constexpr (sizeof(C) == 2) add(low);
    });
    return pairs;
}

// Tensor cores truncate operands to tf32. Numbers times this are truncated nearly to the nearest; NaNs stay NaN.
constexpr float kToNearest = 1.0f + 1.0f / 2048;

// Shared memory for a part of the keys: the rows of a level, in tf32 unless inputs are float32, and products on their
// way from fragments to columns and back. Level 5 has the rows in `rows` and the products in `others`, level 4 the
// reverse, and the other levels have both in the warp's own part of `rows`. So one barrier before the products of
// levels 5 and 4 is enough. Rows are padded by 8, so that pairs of four rows lie in different banks.
template <int Keys>
struct LevelRows {
    using Floats = Rows<float, Keys, 8>;
    Floats rows, others, totals, passing;  // totals: decays by subchunk; passing: sums from subchunk to subchunk

    LevelRows() = default;
    __host__ __device__ explicit LevelRows(SharedAllocator& allocator)
        : rows(allocator, kChunk), others(allocator, kChunk), totals(allocator, kSubchunks),
          passing(allocator, kSubchunks * kSubchunks) {}
};

// Gradients of a warp's subchunk of 16 steps: a lane has a dimension, `column`, if it is `there`.
template <typename T, int Keys>
struct SubchunkGradients {
    static constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    using Floats = typename LevelRows<Keys>::Floats;
    const LevelRows<Keys>& shared;
    const int block, row, column;
    const bool there;
    float gates[kSubchunk], late[kSubchunk] = {}, early[kSubchunk], d_late[kSubchunk], d_early[kSubchunk] = {},
                            d_log[kSubchunk] = {};
    float scale[kSubchunk], columns_found[kSubchunk];
    float to_earlier = 0.0f, to_later,
          to_half = 0.0f;  // sums for earlier and later subchunks, and for the other one of its half

    // With the decays of dimensions from `first` on. Ends with a barrier.
    template <typename C>
    DEVICE SubchunkGradients(const LevelRows<Keys>& shared, int row, const ChunkCoord<C>& at, const Sequence& logs,
                             int first, int dim)
        : shared(shared), block(row / kSubchunk), row(row), column(warp_lane() % Keys), there(warp_lane() < Keys) {
        const float log =
            load_gates<T>(gates, logs, at.batch, at.head, first + column, dim, at.start + row, at.sizes.time);
        if (there) shared.totals(block, column) = expf(log);
        __syncthreads();
    }

    DEVICE void find_columns(Fragment<Keys / 8>& fragment, const Floats& by) {
        __syncwarp();
        fragment.write(by.from(row, 0));
        __syncwarp();
        if (there) load_column(columns_found, by.from(row, 0), column);
    }
    // A fragment from columns.
    DEVICE Fragment<Keys / 8> fragment_of(const PerSubchunk& columns) const {
        __syncwarp();
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t)
            if (there) shared.rows(row + t, column) = columns[t];
        __syncwarp();
        Fragment<Keys / 8> fragment;
        fragment.each_pair([&](int place, int t, float& x, float& y) {
            const auto pair = *reinterpret_cast<const Pair<float>*>(&shared.rows(row + t, place));
            x = pair.x, y = pair.y;
        });
        return fragment;
    }

    // Adds `scale` times the loaded columns to the gradients of `count` steps from `first` on, a second half (`Late`)
    // or a first one. Returns their sum, which passes the steps of the same half in other subchunks.
    template <bool Late>
    DEVICE float add_half(int first = 0, int count = kSubchunk) {
        float sum = 0.0f;
        UNROLL_FOR (int i = 0; i < count; ++i) {
            const int t = first + (Late ? count - 1 - i : i);
            const float x = scale[t] * columns_found[t], before = sum;
            sum += (Late ? late : early)[t] * x;
            (Late ? d_late : d_early)[t] += x;
            d_log[t] += Late ? sum : before;
        }
        return sum;
    }

    // Rows of a subchunk in the order 0, 4, 1, 5, 2, 6, 3, 7 of each 8, so that four lanes read from different banks.
    struct MixedRows {
        using Element = float;
        const Floats& rows;
        int first;
        static DEVICE int row_of(int place) { return place / 8 * 8 + place % 8 / 2 + place % 2 * 4; }
        DEVICE float operator()(int place, int column) const { return rows(first + row_of(place), column); }
    };
    template <int Level>
    DEVICE void add_level(const Rows<float, kChunk>& weights) {
        const Floats& x = Level == kSubchunkLevels ? shared.others : shared.rows;
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t) gates[t] = __uint_as_float(opaque(__float_as_uint(gates[t])));
        scale_to_middle<Level>(scale, gates, shared.totals, column, block);
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t) {
            const float of_step = (is_late<Level>(block, t) ? late[t] : early[t]) * scale[t];
            if (there) x(row + t, column) = kPasses == 1 ? of_step * kToNearest : of_step;
        }
        Fragment<Keys / 8> sums;
        sums.clear();
        const auto add = [&](int other) {
            Fragment<2> pairs;
            pairs.each([&](int place, int t, float& weight) {
                const int s = MixedRows::row_of(place);
                const bool parted = Level >= kSubchunkLevels || parts(Level, t, s);
                weight = parted ? weights(row + t, other * kSubchunk + s) : 0.0f;
            });
            multiply_fragment<kPasses, true>(sums, pairs, MixedRows{x, other * kSubchunk});
        };
        if constexpr (Level < kSubchunkLevels) {
            __syncwarp();
            add(block);
            find_columns(sums, shared.rows);
            UNROLL_FOR (int first = 0; first < kSubchunk; first += 2 << Level) {
                add_half<false>(first, 1 << Level);
                add_half<true>(first + (1 << Level), 1 << Level);
            }
        } else {
            __syncthreads();
#pragma unroll 1
            for (int other = 0; other < kSubchunks; ++other)
                if (parts(Level - kSubchunkLevels, block, other)) add(other);
            find_columns(sums, Level == kSubchunkLevels ? shared.rows : shared.others);
            const float sum = is_late<Level>(block, 0) ? add_half<true>() : add_half<false>();
            if (Level > kSubchunkLevels && block % (kSubchunks - 1) == 0) to_half += sum;
        }
    }

    // The gradients of `early` and of logs through writes to the end state, before all others.
    DEVICE void begin(Fragment<Keys / 8>& writes) {
        find_columns(writes, shared.rows);
        scale_to_end(scale, gates, between(shared.totals, column, block, kSubchunks));
        to_later = add_half<false>();
    }
    // The gradients of `late` through reads and pairs, and those of `early` and logs through pairs.
    DEVICE void add(Fragment<Keys / 8>& reads, const Rows<float, kChunk>& weights) {
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t) {  // pairs of a step with itself
            const float weight = weights(row + t, row + t);
            d_late[t] = weight * early[t];
            d_early[t] += weight * late[t];
        }
        find_columns(reads, shared.rows);
        scale_from_start(scale, gates, between(shared.totals, column, block, 0));
        to_earlier += add_half<true>();
        each_level<0, kLevels>([&](auto i) { add_level<kLevels - 1 - decltype(i)::value>(weights); });
    }
    // Adds to d_log the sums that pass this subchunk from others; `whole` is this thread's part of the row's sum of S_0
    // * dS. Has a barrier.
    DEVICE void add_passing(float whole) {
        whole *= between(shared.totals, column, block, 0) * shared.totals(block, column) *
                 between(shared.totals, column, block, kSubchunks);
        for (int to = 0; there && to < kSubchunks; ++to) {
            const float passed = to < block ? to_earlier : to > block ? to_later : 0.0f;
            shared.passing(to * kSubchunks + block, column) = whole + passed + (to == (block ^ 1) ? to_half : 0.0f);
        }
        __syncthreads();
        float sum = 0.0f;
        for (int from = 0; from < kSubchunks; ++from) sum += shared.passing(block * kSubchunks + from, column);
        UNROLL_FOR (int t = 0; t < kSubchunk; ++t) d_log[t] += sum;
    }
};

}  // namespace fairseq_fastweights
