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

constexpr int kWidest = 64;  // keys, or values, that are taken at once

// Starts to copy a chunk's steps, from `start` on, `columns` wide, to shared memory; zeros where the tensor ends. A thread has one
// column of pieces of 16 bytes, as below, which is found without a division.
template <int Threads = kTileThreads, typename T>
__device__ __forceinline__ void copy_steps(const Matrix<T>& to, const Head<T>& from, int columns, int start, int time) {
    if (!from.in_pieces(columns)) return copy_elements(to, from, kSide, Walk(columns), start, time);
    constexpr int kPiece = 16 / sizeof(T), kAcross = kWidest / kPiece, kDown = Threads / kAcross;
    const int column = threadIdx.x % kAcross * kPiece, first = threadIdx.x / kAcross;
    if (column >= columns) return;
    const int there = column < from.dim ? time - start - first : 0;
    const T* piece = from.data + (start + first) * from.stride + column;
    const int64_t on = kDown * from.stride;
#pragma unroll
    for (int row = 0; row < kSide; row += kDown, piece += on)
        copy_or_clear(&to(first + row, column), piece, row < there);
}

// Starts to copy rows of the workspace, `stride` numbers apart, to shared memory.
template <typename F>
__device__ __forceinline__ void copy_found(const Matrix<F>& to, const F* from, int stride, int rows, int columns) {
    constexpr int kPiece = 16 / sizeof(F), kAcross = kWidest / kPiece, kDown = kTileThreads / kAcross;
    const int column = threadIdx.x % kAcross * kPiece, first = threadIdx.x / kAcross;
    if (column >= columns) return;
#pragma unroll
    for (int row = 0; row < kSide; row += kDown)
        if (first + row < rows) copy_async<16>(&to(first + row, column), from + (first + row) * stride + column);
}

// Starts to copy a square's blocks on and below the diagonal to where they are in the square.
template <typename F>
__device__ __forceinline__ void copy_lower(const Matrix<F>& to, const LowerBlocks<F>& from) {
    constexpr int kPiece = 16 / sizeof(F), kAcross = kTileRows / kPiece, kDown = kTileThreads / kAcross;
    const int column = threadIdx.x % kAcross * kPiece, first = threadIdx.x / kAcross;
#pragma unroll
    for (int row = first; row < kLowerRows; row += kDown) {
        const int block = row / kTileRows, down = (block >= 1) + (block >= 3) + (block >= 6),
                  across = block - down * (down + 1) / 2;
        copy_async<16>(&to(down * kTileRows + row % kTileRows, across * kTileRows + column),
                       from.data + row * kTileRows + column);
    }
}

// A tile's elements of these blocks, to the workspace.
template <typename F>
__device__ __forceinline__ void write_lower(Tile& tile, const LowerBlocks<F>& to) {
    tile.each_pair([&](int row, int column, float x, float y) {
        if (to.has(row, column)) put_pair(&to(row, column), x, y);
    });
}

// Which chunk of which head a block is: `local` counts the slice's heads, `start` is the chunk's first step.
struct Place {
    int local, n, batch, head, start;

    template <typename F>
    __device__ __forceinline__ Place(const Slice<F>& slice, const Sizes& sizes)
        : local(blockIdx.x), n(slice.begin + blockIdx.y), batch((slice.first_head + local) / sizes.heads),
          head((slice.first_head + local) % sizes.heads), start(n * kSide) {}
};

// P, dP or dA with decays by dimension. They are not rounded: all that is rounded adds up in the gradients of decays.
template <typename T>
using Pairs = SplitMatrix<T>;

// Starts to copy those of a chunk from the workspace.
template <typename T, typename F>
__device__ __forceinline__ void copy_pairs(const Pairs<T>& to, F* big, F* rest, int64_t index) {
    const auto copy = [&](int part, F* from) {
        copy_lower(to.parts[part], LowerBlocks<F>{from + index * kLower, kTileRows});
    };
    copy(0, big);
    if constexpr (Pairs<T>::kSplit) copy(1, rest);
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
        copy_steps(to, Head<U>(v, at.batch, at.head, value, sizes.value_dim), values, at.start, sizes.time);
}

}  // namespace fairseq_fastweights
