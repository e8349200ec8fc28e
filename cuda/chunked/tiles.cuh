// Code of the stages that take all chunks at once: a block is a chunk of a head, each of its 8 warps has a tile of 64 x 64
// products, and keys and values come in parts of up to 64.
#pragma once

#include "slices.h"
#include "strips.cuh"
#include "system.cuh"

namespace fairseq_fastweights {

constexpr int kTileThreads = 256;  // 8 warps, a tile of 64 x 64 each

// This warp's tile of a (kSide, columns) matrix, up to 64 columns; of those beyond it `is_in` says no.
__device__ __forceinline__ Tile own_tile(int columns) {
    const int warp = threadIdx.x / kWarp;
    return Tile(warp / 2 * kTileRows, warp % 2 * kTileColumns, columns);
}
__device__ __forceinline__ bool is_in(const Tile& tile, int columns) { return tile.column < columns; }
// True if a pair of the tile has s <= t.
__device__ __forceinline__ bool has_pairs(const Tile& tile) { return tile.column < tile.row + kTileRows; }

// Starts to copy rows of the workspace, `stride` numbers apart, to shared memory.
template <typename F>
__device__ __forceinline__ void copy_found(const Matrix<F>& to, const F* from, int stride, int rows, int columns) {
    constexpr int kPiece = 16 / sizeof(F);
    for (Walk at(columns / kPiece); at.row < rows; at.next())
        copy_async<16>(&to(at.row, at.column * kPiece), from + at.row * stride + at.column * kPiece);
}

// Starts to copy the blocks of a square on and below the diagonal.
template <typename F>
__device__ __forceinline__ void copy_lower(const Matrix<F>& to, const F* from) {
    constexpr int kPiece = 16 / sizeof(F), kAcross = kSide / kPiece;
    for (int i = threadIdx.x; i < kSide * kAcross; i += blockDim.x) {
        const int row = i / kAcross, column = i % kAcross * kPiece;
        if (column / kTileRows <= row / kTileRows) copy_async<16>(&to(row, column), from + row * kSide + column);
    }
}

constexpr int kWidest = 64;  // keys, or values, that are taken at once

// A chunk's gates, what steps of the delta rule write of their errors, and strengths of writes, in shared memory.
template <bool Gated>
struct ChunkSteps {
    ChunkGates gates;
    float* beta;

    __host__ __device__ explicit ChunkSteps(Carver& carver)
        : gates(carver, Gated ? kSide : 0), beta(carver.take<float>(kSide)) {}

    // Ends with a barrier.
    __device__ __forceinline__ void find(const Sequence& strengths, const Sequence& log_gate, bool complement,
                                         int batch, int head, int start, int time) const {
        const int thread = threadIdx.x;
        if (thread < kSide) beta[thread] = load_step(strengths, batch, head, start, kSide, time);
        if constexpr (Gated) {
            if (thread < kSide) gates.log_gate()[thread] = load_step(log_gate, batch, head, start, kSide, time);
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

    // As the walk reads them, by the first kSide threads.
    __device__ __forceinline__ void store(float* numbers) const {
        const int step = threadIdx.x;
        if (step >= kSide) return;
        numbers[kBeta + step] = beta[step];
        numbers[kReadBeta + step] = beta[step] * from_start(step);
        numbers[kFromStart + step] = from_start(step);
        numbers[kToEnd + step] = to_end(step) * strength(step);
        if (step < kStepNumbers - kWholeGate)
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
        : local(blockIdx.x / slice.chunks), n(slice.begin + blockIdx.x % slice.chunks),
          batch((slice.first_head + local) / sizes.heads), head((slice.first_head + local) % sizes.heads),
          start(n * kSide) {}
};

// P, dP or dA. With decays of keys they are not rounded: chunks of 64 steps have more of them than those of 16 that follow one
// another, and all that is rounded adds up in the gradients of decays.
template <typename T, bool Decays>
using Pairs = SplitMatrix<T, Decays>;

// Starts to copy those of a chunk from the workspace.
template <typename T, bool Decays, typename F>
__device__ __forceinline__ void copy_pairs(const Pairs<T, Decays>& to, const F* big, const F* rest, int64_t index) {
    copy_lower(to.parts[0], big + index * kSide * kSide);
    if constexpr (Pairs<T, Decays>::kSplit) copy_lower(to.parts[1], rest + index * kSide * kSide);
}

// The writes of a chunk's steps, for a part of the values: U of the delta rule, transposed, which the walk found; else V.
template <typename T, bool Corrects>
using Written = std::conditional_t<Corrects, Factor<T>, T>;

template <typename T, bool Corrects>
__host__ __device__ Matrix<Written<T, Corrects>> matrix_of_writes(Carver& carver, int values) {
    return carver.matrix<Written<T, Corrects>>(Corrects ? values : kSide, Corrects ? kSide : values);
}

// Starts to copy `values` of them from `value` on.
template <bool Corrects, typename U, typename F>
__device__ __forceinline__ void copy_writes(const Matrix<U>& to, const Slice<F>& slice, const Place& at,
                                            const Sequence& v, const Sizes& sizes, int value, int values) {
    if constexpr (Corrects)
        copy_found(to, slice.rows_of(slice.updates, at.local, at.n) + value * kSide, kSide, values, kSide);
    else
        copy_rows(to, Head<U>(v, at.batch, at.head, value, sizes.value_dim), kSide, values, at.start, sizes.time);
}

}  // namespace fairseq_fastweights
