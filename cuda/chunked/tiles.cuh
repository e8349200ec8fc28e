// Code of the stages that take all chunks at once: a block is a chunk of a head, each of its 8 warps has a tile of 64 x 64
// products, and keys and values come in parts of up to 64.
#pragma once

#include "slices.h"
#include "strips.cuh"
#include "system.cuh"

namespace fairseq_fastweights {

constexpr int kTileThreads = 256;  // 8 warps, a tile of 64 x 64 each

// This warp's tile of a (kSide, columns) matrix, up to 64 columns.
__device__ __forceinline__ Tile own_tile(int columns) {
    const int warp = threadIdx.x / kWarp;
    return Tile(warp / 2 * kTileRows, warp % 2 * kTileColumns, columns);
}
// True if a pair of the tile has s <= t.
__device__ __forceinline__ bool has_pairs(const Tile& tile) { return tile.column < tile.row + kTileRows; }

constexpr int kWidest = 64;  // keys, or values, that are taken at once

// Starts to copy a chunk's steps, from `start` on, `columns` wide, to shared memory; zeros where the tensor ends.
template <typename T>
__device__ __forceinline__ void copy_steps(const Matrix<T>& to, const Head<T>& from, int columns, int start, int time) {
    if (!from.in_pieces(columns)) return copy_elements(to, from, kSide, Walk(columns), start, time);
    constexpr int kPiece = 16 / sizeof(T), kAcross = kWidest / kPiece, kDown = kTileThreads / kAcross;
    const int column = threadIdx.x % kAcross * kPiece, first = threadIdx.x / kAcross;
    if (column >= columns) return;
#pragma unroll
    for (int row = first; row < kSide; row += kDown)
        copy_piece(&to(row, column), from.data + (start + row) * from.stride + column,
                   start + row < time && column < from.dim);
}

// A tile's elements of a square's blocks on and below the diagonal, to the workspace.
template <typename F>
__device__ __forceinline__ void write_lower(Tile& tile, const LowerBlocks<F>& to) {
    tile.each_pair([&](int row, int column, float x, float y) {
        if (to.has(row, column)) put_pair(&to(row, column), x, y);
    });
}

// A chunk's gates, what steps of the delta rule write of their errors, and strengths of writes, in shared memory.
template <bool Gated>
struct ChunkSteps {
    ChunkGates gates;
    float* beta;

    __host__ __device__ explicit ChunkSteps(Carver& carver)
        : gates(carver, Gated ? kSide : 0), beta(carver.take<float>(kSide)) {}

    // A step's strength and log gate. They are loaded before copies are begun, behind which they would have to wait.
    struct Step {
        float strength, log_gate;

        __device__ __forceinline__ Step(const Sequence& strengths, const Sequence& log_gate, int batch, int head,
                                        int start, int time)
            : strength(load_step(strengths, batch, head, start, kSide, time)),
              log_gate(Gated ? load_step(log_gate, batch, head, start, kSide, time) : 0.0f) {}
    };

    // Takes each thread's step. Ends with a barrier.
    __device__ __forceinline__ void find(const Step& own, bool complement) const {
        const int thread = threadIdx.x;
        if (thread < kSide) beta[thread] = own.strength;
        if constexpr (Gated) {
            if (thread < kSide) gates.log_gate()[thread] = own.log_gate;
            __syncthreads();
            gates.find_blocks(complement);
            __syncthreads();
            gates.find_chunk();
        }
        __syncthreads();
    }
    __device__ __forceinline__ float from_start(int t) const { return Gated ? gates.from_chunk()[t] : 1.0f; }
    __device__ __forceinline__ float to_end(int t) const { return Gated ? gates.to_chunk()[t] : 1.0f; }
    __device__ __forceinline__ float strength(int s) const { return Gated ? gates.write()[s] : 1.0f; }

    // As the other stages read them.
    __device__ __forceinline__ void store(float* numbers) const {
        const int step = threadIdx.x;
        if constexpr (Gated)
            for (int i = 4 * step; i < kSide * kWithinRow; i += 4 * blockDim.x) {
                const int t = i / kWithinRow, s = i % kWithinRow, there = s < kGateBlock;
                float four[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = there && s + j <= t % kGateBlock ? gates.within(t, s + j) : 0.0f;
                *reinterpret_cast<float4*>(numbers + kWithin + i) = make_float4(four[0], four[1], four[2], four[3]);
            }
        if (step >= kSide) return;
        if constexpr (Gated) {
            numbers[kStrength + step] = gates.write()[step];
            numbers[kToChunkEnd + step] = gates.to_chunk()[step];
            numbers[kFromBlock + step] = gates.start()[step];
            numbers[kToBlockEnd + step] = gates.end()[step];
            if (step < kBlocks) numbers[kOfBlock + step] = gates.block()[step];
        }
        numbers[kBeta + step] = beta[step];
        numbers[kReadBeta + step] = beta[step] * from_start(step);
        numbers[kFromStart + step] = from_start(step);
        numbers[kToEnd + step] = to_end(step) * strength(step);
        if (step < kWalkNumbers - kWholeGate)
            numbers[kWholeGate + step] = Gated ? (step == 0 ? gates.whole() : gates.whole_log()) : step == 0;
    }
    __device__ __forceinline__ void keep_pairs(Tile& tile, bool diagonal) const {
        keep_pairs_before<Gated>(tile, gates, diagonal);
    }
};

// Which chunk of which head a block is: `local` counts the slice's heads, `start` is the chunk's first step.
struct Place {
    int local, n, batch, head, start;

    template <typename F>
    __device__ __forceinline__ Place(const Slice<F>& slice, const Sizes& sizes)
        : local(blockIdx.x), n(slice.begin + blockIdx.y), batch((slice.first_head + local) / sizes.heads),
          head((slice.first_head + local) % sizes.heads), start(n * kSide) {}
};

}  // namespace fairseq_fastweights
