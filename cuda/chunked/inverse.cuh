// T = (I + B G)^-1 of the delta rule, in the notation of system.cuh: by substitution from the inverses of its blocks on the diagonal, in
// float32 by three products whatever the inputs are: its errors reach all later steps.
#pragma once

#include "tiles.cuh"

namespace fairseq_fastweights {

// As the walk multiplies by it: in one pass it is rounded here, once.
template <typename T>
__device__ __forceinline__ float as_right_factor(float x) {
    return sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x));
}

// Columns `first` and on, 16 of them, of (I + B G)^-1: a strip whose places are the rows. After `invert_diagonal_blocks`
// and a barrier.
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

// A warp's 16 columns of T - I, to the workspace.
template <typename T>
__device__ __forceinline__ void store_inverse(const Matrix<float>& products, const float* beta,
                                              const LowerBlocks<float>& found, int warp) {
    Strip<kSide / 8> inverse;
    find_inverse(inverse, products, beta, warp * kTileRows);
    const int group = warp_lane() / 4, row = 2 * (warp_lane() % 4), place = place_in_inverse(group);
    // This lane's first element in the block of each row of blocks: how far the others are is known before the kernel runs.
    float* const first = &found(row, 0) + warp * kBlockSide * kBlockSide + place;
#pragma unroll
    for (int n = 0; n < kSide / 8; ++n) {
        if (8 * n < warp * kTileRows) continue;
        float* const to = first + (&found(8 * n, 0) - found.data);
        const bool diagonal = n / 2 == warp;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool one = diagonal && row + n % 2 * 8 + i % 2 == group + i / 2 * 8;
            to[i % 2 * kBlockSide + i / 2 * 8] = one ? 0.0f : as_right_factor<T>(inverse.value[n][i]);
        }
    }
}

}  // namespace fairseq_fastweights
