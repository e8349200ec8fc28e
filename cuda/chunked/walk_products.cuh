// Products that are a walk's alone, with left factors as those of strips.cuh: by T, and of a state that decays from block to block.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

// found = left T' or, with `RowsInner`, left T, of which `inverse` has T - I: the ones of T are added in float32, and with them
// a NaN of the left factor that was cut off.
template <int Passes, bool RowsInner>
DEVICE void multiply_by_inverse(Strip<kSide / 8>& found, const Strip<kSide / 8>& left,
                                const LowerBlocks<float>& inverse) {
    const int lane = warp_lane();
    found = left;
    UNROLL for (int e = 0; e < kSide / 8; e += 2) {  // the inner places of a block
        const KeptFactor<Passes, Rounding::kCut> first(left.value[e]), second(left.value[e + 1]);
        UNROLL for (int n = RowsInner ? 0 : e; n < (RowsInner ? e + 2 : kSide / 8); ++n) {
            unsigned b[4];
            if constexpr (RowsInner) {
                UNROLL for (int i = 0; i < 4; ++i) b[i] = __float_as_uint(
                    inverse(8 * (e + i / 2) + lane % 4 * 2 + i % 2, 8 * n + place_in_inverse(lane / 4)));
            } else {
                load_matrices<false>(b, &inverse(8 * n + lane % 8, 8 * e + lane / 8 * 4));
            }
            const auto number = [&](int i) { return __uint_as_float(b[i]); };
            if (!RowsInner || n <= e) first.template multiply<Rounding::kNone>(found.value[n], number(0), number(1));
            if (RowsInner || n > e) second.template multiply<Rounding::kNone>(found.value[n], number(2), number(3));
        }
    }
}

// f(block, its rows of keys, its decays) for a chunk's blocks in the order of the walk.
template <bool Reverse, typename F>
DEVICE void each_block(const Matrix<float>& decays, F f) {
    UNROLL for (int i = 0; i < kBlocks; ++i) {
        const int block = Reverse ? kBlocks - 1 - i : i;
        f(block, &decays(block, 0));
    }
}

// read += state' keys' where keys are decayed within blocks: the state passes the blocks before each, 16 keys at a time.
template <int Passes, bool Reverse, int N, typename T>
DEVICE void read_blocks(Strip<kSide / 8>& read, Strip<N>& state, const Pieces<T>& keys, const Matrix<float>& decays) {
    UNROLL for (int e = 0; e < N; e += 2) {
        Strip<2> left = state.template part<2>(e);
        each_block<Reverse>(decays, [&](int block, const float* by) {
            const Pieces<T> rows = keys.from(kTileRows * block, 8 * e);
            Strip<2>& sums = read.template part<2>(2 * block);
            multiply_kept<Passes, false, Part::kAll, false, Reverse>(sums, left, rows);
            left.scale(by + 8 * e);
        });
    }
}

// The sum of the parts that the warps of a strip have, in the same order in all of them.
DEVICE void sum_parts_of(Strip<kSide / 8>& x, float4* exchange, int strip, int strips, int part, int parts) {
    const int lane = warp_lane();
    const auto place = [&](int p, int n) -> float4& {
        return exchange[((p * strips + strip) * (kSide / 8) + n) * kWarp + lane];
    };
    UNROLL for (int n = 0; n < kSide / 8; ++n) place(part, n) =
        make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
    __syncthreads();
    x.clear();
    for (int p = 0; p < parts; ++p) UNROLL for (int n = 0; n < kSide / 8; ++n) {
            const float4 four = place(p, n);
            x.value[n][0] += four.x, x.value[n][1] += four.y, x.value[n][2] += four.z, x.value[n][3] += four.w;
        }
}

}  // namespace fairseq_fastweights
