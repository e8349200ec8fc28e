// Decays by dimension in the stages that take all chunks at once: a chunk of 64 steps is 4 blocks of 16.
//
// Pairs of steps of one block are parted by halving it, as in decays.cuh. For t of block I and s of an earlier block J,
//   F_ts = F_tI G_{I-1} ... G_{J+1} F_Js
// with F_tI from before I's start to t, F_Js from s to J's end, and G a block's decays multiplied. So what blocks hand on
// goes through them as a state does, an accumulator times G from block to block, and no factor exceeds 1.
#pragma once

#include "decays.cuh"
#include "rows.cuh"

namespace fairseq_fastweights {

static_assert(kBlocks * kSteps == kSide, "blocks are those of decays.cuh");

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

}  // namespace fairseq_fastweights
