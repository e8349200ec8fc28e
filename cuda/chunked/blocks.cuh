// Decays by dimension in the stages that take all chunks at once: a chunk of 64 steps is 4 blocks of 16.
//
// Pairs of steps of one block are parted by halving it, as in decays.cuh. For t of block I and s of an earlier block J,
//   F_ts = F_tI G_{I-1} ... G_{J+1} F_Js
// with F_tI from before I's start to t, F_Js from s to J's end, and G a block's decays multiplied. So what blocks hand on
// goes through them as a state does, an accumulator times G from block to block, and no factor exceeds 1.
//
// In the same way the gradient of a log of block I is that of decays_gradient.cuh: what `reads` are there is all that reached
// the block's start, `writes` is all that comes back to its end, and what passes it is
//   sum over sources before it, sinks after it (S_0 and dS are such, too) of source * sink * the decays between but for G_I
#pragma once

#include "decays_gradient.cuh"
#include "rows.cuh"

namespace fairseq_fastweights {

static_assert(kBlocks * kSteps == kSide, "blocks are those of decays.cuh");

// The rows of a block of a chunk.
template <typename T>
__device__ __forceinline__ Matrix<T> block_of(const Matrix<T>& rows, int block) {
    return {rows.data + block * kSteps * rows.stride, rows.stride};
}

// A key dimension of a block, one to a thread of those that there are.
struct BlockColumn {
    int block, column;

    __device__ __forceinline__ explicit BlockColumn(int keys) : block(threadIdx.x / keys), column(threadIdx.x % keys) {}
    __device__ __forceinline__ bool there() const { return block < kBlocks; }
};

// Rows of a chunk as products take them: for pairs of a block `rows` and `levels`, which queries and keys may share, and
// `scaled` for those of two: queries from the block's start, keys to its end.
template <typename T>
struct DecayedRows {
    Matrix<T> rows, scaled;
    Stages<T> levels;

    DecayedRows() = default;
    __host__ __device__ DecayedRows(Carver& carver, int keys)
        : rows(carver.matrix<T>(kSide, keys)), scaled(carver.matrix<T>(kSide, keys)) {}
    __device__ __forceinline__ Stages<T> levels_of(int block) const {
        Stages<T> of = levels;
        of.first = block_of(levels.first, block);
        return of;
    }
};

// The products of decays that blocks multiply a key dimension by: G_0 to G_3, and G_1 G_2.
constexpr int kTotals = kBlocks + 1;

// tile += <late_t, early_s decayed from s to t> for s <= t; nothing that counts for others. By a warp.
template <int Passes, typename T>
__device__ __forceinline__ void multiply_decayed(Tile& tile, int keys, const DecayedRows<T>& late,
                                                 const DecayedRows<T>& early, const Matrix<float>& totals) {
    const int block = tile.row / kSteps;
#pragma unroll
    for (int half = 0; half < kTileColumns / kSteps; ++half) {
        const int column = tile.column + half * kSteps, other = column / kSteps;
        if (other > block) continue;
        const auto add = [&](const Tile& part) {
#pragma unroll
            for (int j = 0; j < kSteps / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) tile.value[half * (kSteps / 8) + j][i] += part.value[j][i];
        };
        if (other < block) {
            Tile part(tile.row, column, column + kSteps);
            if (other + 1 == block)
                multiply_stored<Passes, false, true>(part, 0, keys, late.scaled, early.scaled);
            else
                multiply_stored<Passes, false, true>(part, 0, keys, late.scaled, early.scaled,
                                                     &totals(other + 3 == block ? kBlocks : other + 1, 0));
            add(part);
            continue;
        }
#pragma unroll 1
        for (int level = 0; level <= kLevels; ++level) {
            const bool same = level == kLevels;
            Tile part(tile.row, column, column + kSteps);
            multiply_stored<Passes, false, true>(part, 0, keys, late.levels[same ? 0 : level].either(late.rows, same),
                                                 early.levels[same ? 0 : level].either(early.rows, same));
            const int least = same ? 0 : 1 << level, end = same ? 1 : 2 << level;
            part.each([&](int t, int s, float& value) {
                const int apart = t ^ s;  // its highest bit tells the level
                if (s > t || apart < least || apart >= end) value = 0.0f;
            });
            add(part);
        }
    }
}

// tile, which has what is read of the chunk's start, += pairs written, with decays of its columns: of what is read at the start of
// its block. f(block) before the decays of each block before it.
template <int Passes, typename T, typename F>
__device__ __forceinline__ void pass_blocks(Tile& tile, const SplitMatrix<T>& pairs, const Matrix<T>& written,
                                            const Matrix<float>& totals, F f) {
#pragma unroll 1
    for (int from = 0; from < tile.row / kSteps; ++from) {
        f(from);
        tile.each([&](int, int i, float& x) { x *= totals(from, i); });
        pairs.template multiply<Passes, false, false>(tile, from * kSteps, (from + 1) * kSteps, written);
    }
}

// The pairs of this warp's steps, from `row` on, as the local stage left them: `rest` is what rounding left out.
template <typename F>
__device__ __forceinline__ void load_pairs(Strip<kSide / 8>& pairs, const LowerBlocks<F>& big,
                                           const LowerBlocks<F>& rest, int row) {
    pairs.each_pair([&](int s, int j, float& x, float& y) {
        x = y = 0.0f;
        if (!big.has(row, s)) return;
        const auto add = [&](const LowerBlocks<F>& from) {
            const Pair<F> pair = *reinterpret_cast<const Pair<F>*>(&from(row + j, s));
            x += widen<float>(pair.x);
            y += widen<float>(pair.y);
        };
        add(big);
        if constexpr (sizeof(F) == 2) add(rest);
    });
}

// sums += pairs right, as `multiply_kept`, but that beside bfloat16 pairs are taken as two of them, big + small.
template <int Passes, bool RowsInner, int N, int M, typename Right>
__device__ __forceinline__ void multiply_pairs(Strip<N>& sums, Strip<M>& pairs, const Right& right) {
    using F = typename Right::Element;
#pragma unroll
    for (int e = 0; e < M / 2; ++e) {
        Strip<2>& part = pairs.template part<2>(2 * e);
        const Right factor = RowsInner ? right.from(16 * e, 0) : right.from(0, 16 * e);
        multiply_kept<Passes, RowsInner, Part::kAll, false, sizeof(F) == 4>(sums, part, factor);
        if constexpr (kRounded<F>) multiply_kept<Passes, RowsInner>(sums, part.template rest<F>(), factor);
    }
}

// A part of the values of a chunk, where they decay: V * Z_e. by block, Z of blocks, what is read of blocks' starts, and P of
// pairs of one block.
template <typename T>
struct BlockValues {
    Rows<T, kSide> written;
    Rows<float, kSide> totals, reads;
    Rows<float, kSteps> weights;

    BlockValues() = default;
    __host__ __device__ explicit BlockValues(Carver& carver)
        : written(carver, kSide), totals(carver, kBlocks), reads(carver, kSide), weights(carver, kSide) {}

    // store(t, value dimension, the output) with the decays of what was read of the chunk's start, `reading`, and of P V, for the
    // warp's block of steps; load(logs, value dimension).
    template <int Passes, typename Load, typename Store>
    __device__ __forceinline__ void add_writes(Strip<kWidest / 8>& reading, Strip<kSide / 8>& scores, int values,
                                               const Rows<T, kSide>& v, int row, Load load, Store store) const {
        const int block = row / kSteps;
        float gates[kSteps], early[kSteps];
        const auto each_own = [&](auto f) {  // of the warp's value dimensions, those of this lane
#pragma unroll 1
            for (int column = warp_lane(); column < values; column += kWarp) {
                load(gates, column);
                exponentiate(gates);
                load_column(early, v.from(row, 0), column);
                f(column);
            }
        };
        each_own([&](int column) {
            write_written(written.from(row, 0), early, gates, column);
            totals(block, column) = product_of(gates);
        });
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
            if (n == block) scores.template part<2>(2 * n).write(weights.from(row, 0));
        __syncthreads();
#pragma unroll
        for (int from = 0; from < kBlocks - 1; ++from) {
            if (from >= block) break;
            reading.scale(&totals(from, 0));
            each_columns(reading, values / 16, [&](auto& part, int first) {
                multiply_pairs<Passes, true>(part, scores.template part<2>(2 * from),
                                             written.from(from * kSteps, first));
            });
        }
        reading.write(reads.from(row, 0));
        __syncwarp();
        each_own([&](int column) {
            write_outputs(reads.from(row, 0), weights.from(row, 0), early, gates, column,
                          [&](int t, float x) { store(row + t, column, x); });
        });
    }
};

// Gradients of queries, keys, erase keys and logs in a part of the keys, from what products with states make of them.
template <typename T>
struct DecayGradient {
    Matrix<float> weights, erase_weights;  // (t, s % 16): dP and dG of pairs of one block, mirrored
    Matrix<float> totals;                  // G by block
    Matrix<T> reading, written, reading_erase;
    Matrix<float> reads, writes, erase_reads;
    // Sums over steps of source * sink: from before block I to those of a later one, from those of a block to dS, then parts
    // of the sums of S_0 * dS, and by block all that passes it.
    Matrix<float> masses;
    enum { kToState = kBlocks * (kBlocks - 1) / 2, kWhole = kToState + kBlocks, kPassing = kWhole + kBlocks };

    // Matrices that are kept throughout, and those that take the place of states when these have been read.
    __host__ __device__ void keep(Carver& carver, bool corrects, int keys) {
        weights = carver.matrix<float>(kSide, kSteps, 0);
        erase_weights = carver.matrix<float>(corrects ? kSide : 0, kSteps, 0);
        totals = carver.matrix<float>(kBlocks, keys, 0);
    }
    __host__ __device__ void replace(Carver& carver, bool corrects, int keys) {
        const int of_erase = corrects ? kSide : 0;
        reading = carver.matrix<T>(kSide, keys);
        written = carver.matrix<T>(kSide, keys);
        reading_erase = carver.matrix<T>(of_erase, keys);
        reads = carver.matrix<float>(kSide, keys);
        writes = carver.matrix<float>(kSide, keys);
        erase_reads = carver.matrix<float>(of_erase, keys);
        masses = carver.matrix<float>(kPassing + kBlocks, keys, 0);
    }

    // The tile's pairs of one block.
    __device__ __forceinline__ static void keep_weights(Tile& tile, const Matrix<float>& to) {
        tile.each([&](int t, int s, float& value) {
            if (s <= t && s / kSteps == t / kSteps) to(t, s % kSteps) = to(s, t % kSteps) = value;
        });
    }
    // Weights from a square in shared memory.
    __device__ __forceinline__ void keep_weights(const SplitMatrix<T>& from) const {
        for (int i = threadIdx.x; i < kSide * kSteps; i += kTileThreads) {
            const int t = i / kSteps, s = t / kSteps * kSteps + i % kSteps;
            weights(t, s % kSteps) = s <= t ? from.get(t, s) : from.get(s, t);
        }
    }

    // Factors of a block's key dimension, and its part `whole` of the sum of S_0 * dS. A barrier before and after.
    template <bool Corrects>
    __device__ __forceinline__ void write_factors(const BlockColumn& at, const float (&gates)[kSteps],
                                                  const Matrix<T>& q, const Matrix<T>& k, const Matrix<T>& erase,
                                                  float whole) const {
        float x[kSteps];
        load_column(x, block_of(q, at.block), at.column);
        write_reading(block_of(reading, at.block), x, gates, at.column);
        load_column(x, block_of(k, at.block), at.column);
        write_written(block_of(written, at.block), x, gates, at.column);
        if constexpr (Corrects) {
            load_column(x, block_of(erase, at.block), at.column);
            write_reading(block_of(reading_erase, at.block), x, gates, at.column);
        }
        totals(at.block, at.column) = product_of(gates);
        masses(kWhole + at.block, at.column) = whole;
    }

    // E * F_.0.
    __device__ __forceinline__ float from_start(int t, int i) const {
        float x = reading_erase.get(t, i);
        for (int before = 0; before < t / kSteps; ++before) x *= totals(before, i);
        return x;
    }

    // A tile of the gradients of `late` * F_.0, from the chunk's start to their block's. `adds`: to the masses of others.
    template <int Passes>
    __device__ __forceinline__ void pass_to_readers(Tile& tile, const SplitMatrix<T>& pairs, const Matrix<T>& late,
                                                    bool adds) const {
        const int block = tile.row / kSteps;
        pass_blocks<Passes>(tile, pairs, written, totals, [&](int from) {
            tile.sum_columns([&](int t, int i, float x) { return x * late.get(t, i); },
                             [&](int i, float sum) {
                                 float& to = masses(block * (block - 1) / 2 + from, i);
                                 to = adds ? to + sum : sum;
                             });
        });
    }
    // A tile of the gradients of keys * F_e., from the chunk's end to their block's.
    template <int Passes, bool Corrects>
    __device__ __forceinline__ void pass_to_writers(Tile& tile, const SplitMatrix<T>& d_scores,
                                                    const SplitMatrix<T>& d_system) const {
        const int block = tile.row / kSteps;
        tile.sum_columns([&](int s, int i, float x) { return x * written.get(s, i); },
                         [&](int i, float sum) { masses(kToState + block, i) = sum; });
#pragma unroll 1
        for (int to = kBlocks - 1; to > block; --to) {
            tile.each([&](int, int i, float& x) { x *= totals(to, i); });
            d_scores.template multiply<Passes, true, false>(tile, to * kSteps, (to + 1) * kSteps, reading);
            if constexpr (Corrects)
                d_system.template multiply<Passes, true, false>(tile, to * kSteps, (to + 1) * kSteps, reading_erase);
        }
    }

    // The gradients of a block's key dimension: of queries in `reading`, of keys in `writes`, of erase keys in
    // `erase_reads`, of logs in `reads`. `same`: the erase keys are the keys. A barrier before and after.
    template <bool Corrects>
    __device__ __forceinline__ void differentiate(const BlockColumn& at, const float (&gates)[kSteps],
                                                  const Matrix<T>& q, const Matrix<T>& k, const Matrix<T>& erase,
                                                  bool same) const {
        const int block = at.block, i = at.column;
        float sum = 0.0f, between = 1.0f;
        for (int part = 0; part < kBlocks; ++part) sum += masses(kWhole + part, i);
        for (int from = 0; from < block; ++from) sum = sum * totals(from, i) + masses(kToState + from, i);
        for (int to = block + 1; to < kBlocks; ++to) sum *= totals(to, i);
        for (int to = block + 1; to < kBlocks; ++to) {
            sum += between * masses(to * (to - 1) / 2 + block, i);
            between *= totals(to, i);
        }
        float* const passing = &masses(kPassing + block, 0);
        passing[i] = sum;
        const auto of = [&](const auto& rows) { return block_of(rows, block); };
        differentiate_column(WeightedPairs<T, T>{of(q), of(k), of(weights), of(reads), of(writes), of(reading),
                                                 of(reads), passing, false},
                             gates, i);
        if constexpr (Corrects)
            differentiate_column<true>(WeightedPairs<T, float>{of(erase), of(k), of(erase_weights), of(erase_reads),
                                                               of(writes), of(erase_reads), of(reads), passing, same},
                                       gates, i);
    }
};

}  // namespace fairseq_fastweights
