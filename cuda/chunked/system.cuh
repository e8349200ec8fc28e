// The system of a chunk of the delta rule, (I + B G) U = B E in the notation of delta.cuh: what solves it.
#pragma once

#include "gates.cuh"

namespace fairseq_fastweights {

// The tile's pairs (t, s) with s < t, or with s <= t, times the gates between the two.
template <bool Gated>
__device__ __forceinline__ void keep_pairs_before(Tile& tile, const ChunkGates& gates, bool diagonal) {
    if constexpr (Gated) {
        Tile between(tile.row, tile.column, tile.column + 8 * tile.parts);
        gates.find_between(between);
        tile.each_with(between, [](int t, int s, float& value, float& gate) { value = s <= t ? value * gate : 0.0f; });
    }
    const int least = diagonal ? 0 : 1;
    tile.each([&](int t, int s, float& value) { value = s + least <= t ? value : 0.0f; });
}

// The inverses of the 16 x 16 blocks on the diagonal of I + B G, a column to each of the first `chunk` threads: transposed,
// above the diagonal of `products`, which has G below it.
__device__ __forceinline__ void invert_diagonal_blocks(const Matrix<float>& products, const float* beta, int thread,
                                                       int chunk) {
    if (thread >= chunk) return;
    const int column = thread % kTileRows, first = thread - column;
    float x[kTileRows] = {};
#pragma unroll
    for (int j = 0; j < kTileRows; ++j) {
        // A known number goes at once into all sums that wait for it, which do not wait for one another.
        x[j] = (j == column ? 1.0f : 0.0f) - beta[first + j] * x[j];
#pragma unroll
        for (int i = j + 1; i < kTileRows; ++i) x[i] += products(first + i, first + j) * x[j];
    }
#pragma unroll
    for (int i = 1; i < kTileRows; ++i)
        if (i > column) products(first + column, first + i) = x[i];
}

// After `invert_diagonal_blocks`: an entry of such a block.
__device__ __forceinline__ float entry_of_inverse(const Matrix<float>& products, int t, int s) {
    return s < t ? products(s, t) : s == t ? 1.0f : 0.0f;
}

}  // namespace fairseq_fastweights
