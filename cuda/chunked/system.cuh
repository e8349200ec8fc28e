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

// The block on the diagonal of `products`, of G, that begins at `first` becomes the inverse of that of I + B G, by a warp, a
// column to two lanes.
DEVICE void invert_diagonal_block(const Matrix<float>& products, const float* beta, int first) {
    const int column = warp_lane() % kTileRows, half = warp_lane() / kTileRows * 8;
    const Matrix<float> block = products.from(first, first);
    float x[kTileRows] = {};
    UNROLL for (int j = 0; j < kTileRows; ++j) {
        // A known number goes at once into all sums that wait for it, which do not wait for one another.
        x[j] = (j == column ? 1.0f : 0.0f) - beta[first + j] * x[j];
        UNROLL for (int i = j + 1; i < kTileRows; ++i) x[i] += block(i, j) * x[j];
    }
    __syncwarp();
    UNROLL for (int i = 0; i < 8; ++i) block(i + half, column) = half == 0 ? x[i] : x[i + 8];
}

// A factor from the right as the walk multiplies by it: in one pass it is rounded here, once.
template <typename T>
DEVICE float as_right_factor(float x) {
    return sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x));
}

// T - I to the workspace, by four warps, of which this is number `warp`: 16 columns each, a strip whose places are the rows. After
// `invert_diagonal_block` of all blocks, and a barrier.
template <typename T>
DEVICE void store_inverse(const LowerBlocks<float>& to, const Matrix<float>& products, const float* beta, int warp) {
    const int first = warp * kTileRows, group = warp_lane() / 4, below = 2 * (warp_lane() % 4);
    Strip<kSide / 8> inverse;
    inverse.clear();
    UNROLL for (int row = 0; row < kSide; row += kTileRows) {
        if (row < first) continue;
        Strip<2> sums;
        sums.clear();
        UNROLL for (int inner = 0; inner < row; inner += kTileRows) if (inner >= first)
            multiply_kept<3, false>(sums, inverse.template part<2>(inner / 8), products.from(row, inner));
        sums.each([&](int t, int j, float& x) { x = (row + t == first + j ? 1.0f : 0.0f) - beta[row + t] * x; });
        multiply_kept<3, false, Part::kLower>(inverse.template part<2>(row / 8), sums, products.from(row, row));
    }
    // This lane's first element in the first row of blocks: how far the others are is known before the kernel runs.
    float* const own = &to(below, 0) + first * kBlockSide + place_in_inverse(group);
    inverse.each([&](int t, int j, float& x) {
        const int row = (t - below) / kTileRows * kTileRows;
        if (row < first) return;
        own[(&to(row, 0) - to.data) + (t - below - row) * kBlockSide + j - group] =
            t == first + j ? 0.0f : as_right_factor<T>(x);
    });
}

}  // namespace fairseq_fastweights
