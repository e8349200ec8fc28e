// The delta rule within a chunk, with a log gate for each step or without, and what solves its system.
//
// With B = diag(beta), D_ts and the like as in gates.cuh, G the products D_ts <k_t, k_s> for s < t, E = V - diag(D_t0) K S_0:
//
//   (I + B G) U = B E        Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        S_end = D S_0 + K^T diag(D_es) U
//
// (the WY form; Bischof & Van Loan 1987; with gates Yang et al. 2025). With repeated keys and write strengths of 1 the entries
// of T = (I + B G)^-1 stay of order 1 while the powers in a series for them grow to 1e18. So the 16 x 16 blocks on its diagonal
// are inverted here, and T follows by substitution, in float32 by three products whatever the inputs are: its errors reach all later
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

// The inverse of the block on the diagonal of I + B G that begins at `first`, by a warp, a column to each of 16 lanes: transposed,
// above the diagonal of `products`, which has G below it.
__device__ __forceinline__ void invert_diagonal_block(const Matrix<float>& products, const float* beta, int first) {
    const int column = warp_lane();
    if (column >= kTileRows) return;
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

// After that: an entry of such a block.
__device__ __forceinline__ float entry_of_inverse(const Matrix<float>& products, int t, int s) {
    return s < t ? products(s, t) : s == t ? 1.0f : 0.0f;
}

// A factor from the right as the walk multiplies by it: in one pass it is rounded here, once.
template <typename T>
__device__ __forceinline__ float as_right_factor(float x) {
    return sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x));
}

// Columns `first` and on, 16 of them, of (I + B G)^-1: a strip whose places are the rows. After `invert_diagonal_block`
// of all, and a barrier.
__device__ __forceinline__ void find_inverse(Strip<kSide / 8>& known, const Matrix<float>& products, const float* beta,
                                             int first) {
    known.clear();
    const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
    for (int block = 0; block < kSide / 8; block += 2) {
        if (8 * block < first) continue;
        Strip<2> sums;
        sums.clear();
#pragma unroll
        for (int e = 0; e < block; ++e) {
            if (8 * e < first) continue;
            const KeptFactor<3> factor(known.value[e]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 pair =
                    *reinterpret_cast<const float2*>(&products(8 * (block + n) + group, 8 * e + 2 * member));
                factor.multiply(sums.value[n], pair.x, pair.y);
            }
        }
        sums.each([&](int place, int j, float& value) {
            const int s = 8 * block + place;
            value = (s == first + j ? 1.0f : 0.0f) - beta[s] * value;
        });
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int s = 8 * (block + e) + 2 * member;
            const KeptFactor<3> factor(sums.value[e]);
#pragma unroll
            for (int n = e; n < 2; ++n) {
                const int t = 8 * (block + n) + group;
                factor.multiply(known.value[block + n], entry_of_inverse(products, t, s),
                                entry_of_inverse(products, t, s + 1));
            }
        }
    }
}

// T - I to the workspace, by four warps, of which this is number `warp`: 16 columns each. After `invert_diagonal_block` of all blocks,
// and a barrier.
template <typename T>
__device__ __forceinline__ void store_inverse(const LowerBlocks<float>& to, const Matrix<float>& products,
                                              const float* beta, int warp) {
    Strip<kSide / 8> inverse;
    find_inverse(inverse, products, beta, warp * kTileRows);
    const int group = warp_lane() / 4, row = 2 * (warp_lane() % 4), place = place_in_inverse(group);
    // This lane's first element in the block of each row of blocks: how far the others are is known before the kernel runs.
    float* const first = &to(row, 0) + warp * kBlockSide * kBlockSide + place;
#pragma unroll
    for (int n = 0; n < kSide / 8; ++n) {
        if (8 * n < warp * kTileRows) continue;
        float* const from_here = first + (&to(8 * n, 0) - to.data);
        const bool diagonal = n / 2 == warp;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool one = diagonal && row + n % 2 * 8 + i % 2 == group + i / 2 * 8;
            from_here[i % 2 * kBlockSide + i / 2 * 8] = one ? 0.0f : as_right_factor<T>(inverse.value[n][i]);
        }
    }
}

}  // namespace fairseq_fastweights
