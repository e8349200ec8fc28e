// The scalar gates of a chunk: products of the gates between any two of its steps, by sums of their logs alone.
//
// D_ts is the product of the gates of the steps (s, t], D_t0 of those from the chunk's start to and with t, D_es of those from
// after s to its end, D of all; w_s is the strength of a write, 1 or 1 - g_s. From S_0 a rule that does not correct makes
//   Y = diag(D_t0) Q S_0 + P V,   P_ts = D_ts <q_t, k_s> w_s for s <= t        S_end = D S_0 + K^T diag(D_es w_s) V
//
// The chunk is cut into blocks of 16 steps. The product over the steps in (s, t] is, within a block, an entry of a
// table, and otherwise what is left of s's block, times whole blocks, times the start of t's: nothing is subtracted,
// and no factor exceeds 1. Products over a whole chunk are exponentials of sums: products of rounded factors would
// drift over thousands of steps with gates near 1.
#pragma once

#include "block.cuh"

namespace fairseq_fastweights {

constexpr int kGateBlock = 16;

// Arrays by step, one after another in memory, so that a kernel holds one pointer to all of them.
struct ChunkGates {
    float* steps;
    int chunk;
    Matrix<float> within;  // (t, s % 16) for t >= s of one block

    __host__ __device__ ChunkGates(Carver& carver, int chunk)
        : steps(carver.take<float>(10 * chunk + 2)), chunk(chunk),
          within{carver.take<float>(chunk * (kGateBlock + 1)), kGateBlock + 1} {}

    __device__ __forceinline__ float* log_gate() const { return steps; }
    __device__ __forceinline__ float* write() const { return steps + chunk; }
    // Logs from the block's start to and with the step, and from after it to the block's end; their exponentials.
    __device__ __forceinline__ float* start_log() const { return steps + 2 * chunk; }
    __device__ __forceinline__ float* end_log() const { return steps + 3 * chunk; }
    __device__ __forceinline__ float* start() const { return steps + 4 * chunk; }
    __device__ __forceinline__ float* end() const { return steps + 5 * chunk; }
    // Products from the chunk's start to and with the step, and from after it to the chunk's end.
    __device__ __forceinline__ float* from_chunk() const { return steps + 6 * chunk; }
    __device__ __forceinline__ float* to_chunk() const { return steps + 7 * chunk; }
    // By block: all its gates.
    __device__ __forceinline__ float* block_log() const { return steps + 8 * chunk; }
    __device__ __forceinline__ float* block() const { return steps + 9 * chunk; }
    // All the chunk's gates multiplied, and the log of that.
    __device__ __forceinline__ float& whole() const { return steps[10 * chunk]; }
    __device__ __forceinline__ float& whole_log() const { return steps[10 * chunk + 1]; }

    // After `log_gate`, and a barrier. The products from one step on are found by as many threads as there are.
    __device__ __forceinline__ void find_blocks(bool complement) const {
        const int thread = opaque_thread(), s = thread % chunk, part = thread / chunk;
        const int parts = min(static_cast<int>(blockDim.x) / chunk, kGateBlock);
        if (part >= parts) return;
        const int column = s % kGateBlock, first = s - column;
        float logs[kGateBlock];  // all at once: what is stored in between could be what is loaded, to the compiler
#pragma unroll
        for (int i = 0; i < kGateBlock; ++i) logs[i] = log_gate()[first + i];
        float before = 0.0f, after = 0.0f;
#pragma unroll
        for (int i = 0; i < kGateBlock; ++i) {
            if (i <= column) before += logs[i];
            if (i > column) after += logs[i];
            if (i >= column && (i & (parts - 1)) == part) within(first + i, column) = expf(after);
        }
        if (part > 0) return;
        write()[s] = complement ? -expm1f(log_gate()[s]) : 1.0f;
        start_log()[s] = before;
        start()[s] = expf(before);
        end_log()[s] = after;
        end()[s] = expf(after);
        if (column == kGateBlock - 1) {
            block_log()[s / kGateBlock] = before;
            block()[s / kGateBlock] = expf(before);
        }
    }

    // After `find_blocks`, and a barrier.
    __device__ __forceinline__ void find_chunk() const {
        const int s = opaque_thread();
        if (s >= chunk) return;
        const int mine = s / kGateBlock, blocks = chunk / kGateBlock;
        float before = 0.0f, after = 0.0f;
        for (int i = 0; i < mine; ++i) before += block_log()[i];
        for (int i = mine + 1; i < blocks; ++i) after += block_log()[i];
        from_chunk()[s] = expf(before + start_log()[s]);
        to_chunk()[s] = expf(end_log()[s] + after);
        if (s == chunk - 1) {
            whole_log() = before + start_log()[s];
            whole() = expf(before + start_log()[s]);
        }
    }

    // The gates in (s, t], multiplied, for the tile's elements (t, s); 0 for s > t. After `find_blocks` and a barrier.
    __device__ __forceinline__ void find_between(Tile& tile) const {
        static_assert(kTileRows == kGateBlock && kTileColumns % kGateBlock == 0,
                      "16 columns of a tile lie in one block");
        constexpr int kParts = kGateBlock / 8;
        const int group = warp_lane() / 4, member = warp_lane() % 4, last = tile.row / kGateBlock;
#pragma unroll
        for (int half = 0; half < kTileParts / kParts; ++half) {
            const int first = tile.column / kGateBlock + half;
            if (first > last) continue;  // zeros, as a tile begins
            float middle = 1.0f;
            for (int i = first + 1; i < last; ++i) middle *= block()[i];
#pragma unroll
            for (int part = 0; part < kParts; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int t = group + i / 2 * 8, s = 8 * part + 2 * member + i % 2;  // in their blocks
                    float& product = tile.value[half * kParts + part][i];
                    if (first == last)
                        product = s <= t ? within(tile.row + t, s) : 0.0f;
                    else
                        product = end()[first * kGateBlock + s] * middle * start()[tile.row + t];
                }
        }
    }
};

}  // namespace fairseq_fastweights
