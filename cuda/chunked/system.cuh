// The delta rule within a chunk, with a log gate for each step or without, and what solves its system.
//
// With B = diag(beta), D_ts and the like as in gates.cuh, G the products D_ts <k_t, k_s> for s < t, E = V - diag(D_t0) K S_0:
//
//   (I + B G) U = B E        Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        S_end = D S_0 + K^T diag(D_es) U
//
// (the WY form; Bischof & Van Loan 1987; with gates Yang et al. 2025). With repeated keys and write strengths of 1 the entries
// of T = (I + B G)^-1 stay of order 1 while the powers in a series for them grow to 1e18. So the 16 x 16 blocks on its diagonal
// are inverted here, and T follows by substitution (local.cu), in float32 whatever the inputs are: its errors reach all later
// steps.
//
// Backwards, with P = tril(D_ts Q K^T) and dS the gradient of the state at the chunk's end:
//   dU = P^T dY + diag(D_es) K dS         dR = T^T dU           (R = B E, the right side of the system)
//   dP = tril(dY U^T)                     dA = -dR U^T below the diagonal           (A = B G)
//   dV = B dR                             d beta_t = <dR_t, E_t> + <dA_t, G_t>
//   dS_0 = D dS + Q^T diag(D_t0) dY - K^T diag(D_t0) dV         dQ and dK: gradients.cu
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
