// Products that are a walk's alone, with left factors in a warp's registers as those of strips.cuh: of what a walk is given, by T, and
// of a state that decays from block to block.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

// A walk's inputs as left factors: numbers of 16 bits as they are stored or, where products take no such, a strip.
template <typename T, int N, bool Stored>
struct GivenStrip {
    unsigned bits[N / 2][4];

    // From rows of places, in shared memory: columns `column` and on.
    __device__ __forceinline__ void load(const Matrix<T>& from, int column) {
        const int lane = warp_lane(), low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
#pragma unroll
        for (int e = 0; e < N / 2; ++e) load_matrices<true>(bits[e], &from(16 * e + third + low, column + second));
    }
    // The 8 M places from 8 `first` on.
    template <int M>
    __device__ __forceinline__ const GivenStrip<T, M, true>& part(int first) const {
        return reinterpret_cast<const GivenStrip<T, M, true>&>(bits[first / 2]);
    }
    __device__ __forceinline__ Strip<N> widened() const {
        Strip<N> strip;
#pragma unroll
        for (int e = 0; e < N / 2; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* const two = &strip.value[2 * e + i / 2][i % 2 * 2];
                if constexpr (kRounded<T>) {  // the upper half of a float: an instruction each
                    two[0] = __uint_as_float(bits[e][i] << 16);
                    two[1] = __uint_as_float(bits[e][i] & 0xffff0000u);
                } else {
                    const Pair<T> pair = Pair<T>::of_bits(bits[e][i]);
                    two[0] = widen<float>(pair.x);
                    two[1] = widen<float>(pair.y);
                }
            }
        return strip;
    }
};
template <typename T, int N>
struct GivenStrip<T, N, false> {
    Strip<N> strip;
    __device__ __forceinline__ void load(const Matrix<T>& from, int column) { strip.load(from, column); }
    template <int M>
    __device__ __forceinline__ const GivenStrip<T, M, false>& part(int first) const {
        return reinterpret_cast<const GivenStrip<T, M, false>&>(strip.value[first]);
    }
    __device__ __forceinline__ const Strip<N>& widened() const { return strip; }
};

// sums += left right, as `multiply_kept`.
template <int Passes, bool RowsInner, Part Which = Part::kAll, int N, int M, typename T,
          template <typename> class Right>
__device__ __forceinline__ void multiply_given(Strip<N>& sums, const GivenStrip<T, M, true>& left,
                                               const Right<T>& right) {
    const int lane = warp_lane(), low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
#pragma unroll
    for (int e = 0; e < M / 2; ++e)
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            if (Which == Part::kLower && (RowsInner ? e < n : e > n)) continue;
            unsigned b[4];
            load_matrices<RowsInner>(b, RowsInner ? &right(16 * e + second + low, 16 * n + third)
                                                  : &right(16 * n + third + low, 16 * e + second));
            mma_stored<T>(sums.value[2 * n], left.bits[e], {b[0], b[1]});
            mma_stored<T>(sums.value[2 * n + 1], left.bits[e], {b[2], b[3]});
        }
}
template <int Passes, bool RowsInner, Part Which = Part::kAll, int N, int M, typename T, typename F,
          template <typename> class Right>
__device__ __forceinline__ void multiply_given(Strip<N>& sums, const GivenStrip<T, M, false>& left,
                                               const Right<F>& right) {
    multiply_kept<Passes, RowsInner, Which>(sums, left.strip, right);
}

// The same begun, as `start` of strips.cuh.
template <int Passes, bool RowsInner, int N, int M, typename T>
__device__ __forceinline__ void start_given(bool grouped, Strip<N>& sums, const GivenStrip<T, M, true>& left,
                                            const Pieces<T>& right) {
    if constexpr (N % 8 == 0 && M % 8 == 0) {
        if (grouped) return start_in_group<T, RowsInner>(sums, left.bits, right);
    }
    multiply_given<Passes, RowsInner>(sums, left, right);
}
template <int Passes, bool RowsInner, int N, int M, typename T>
__device__ __forceinline__ void start_given(bool grouped, Strip<N>& sums, const GivenStrip<T, M, false>& left,
                                            const Pieces<T>& right) {
    start<Passes, RowsInner>(grouped, sums, left.strip, right);
}

// Four accumulators as a left factor in tf32, in the order of KeptFactor. In one pass tensor cores leave out the digits that are
// rounded here: half of the last one that stays is added. That makes 0 of a NaN, which `multiply_by_inverse` adds by itself.
template <int Passes>
struct LeftFactor : KeptFactor<Passes> {
    using KeptFactor<Passes>::KeptFactor;
};
template <>
struct LeftFactor<1> {
    unsigned big[4];

    __device__ __forceinline__ explicit LeftFactor(const float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) big[i] = __float_as_uint(x[i / 2 + i % 2 * 2]) + 0x1000u;
    }
    __device__ __forceinline__ void multiply(float (&sums)[4], float first, float second) const {
        mma_tf32(sums, big, {__float_as_uint(first), __float_as_uint(second)});
    }
};

// found = left T' or, with `RowsInner`, left T, of which `inverse` has T - I: the ones of T are added in float32.
template <int Passes, bool RowsInner>
__device__ __forceinline__ void multiply_by_inverse(Strip<kSide / 8>& found, const Strip<kSide / 8>& left,
                                                    const LowerBlocks<float>& inverse) {
    const int lane = warp_lane();
    found = left;
#pragma unroll
    for (int e = 0; e < kSide / 8; e += 2) {  // the inner places of a block
        const LeftFactor<Passes> first(left.value[e]), second(left.value[e + 1]);
        if constexpr (RowsInner) {
            const int member = lane % 4, place = place_in_inverse(lane / 4);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n <= e + half; ++n) {
                    const float* const pair = &inverse(8 * (e + half) + 2 * member, 8 * n + place);
                    (half ? second : first).multiply(found.value[n], pair[0], pair[inverse.stride]);
                }
        } else {
            const int row = lane % 8, piece = lane / 8 * 4;
#pragma unroll
            for (int n = e; n < kSide / 8; n += 2) {
                unsigned b[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) load_matrices<false>(b[i], &inverse(8 * (n + i) + row, 8 * e + piece));
                const auto numbers = [&](int i, int j) { return __uint_as_float(b[i][j]); };
#pragma unroll
                for (int i = 0; i < 2; ++i) first.multiply(found.value[n + i], numbers(i, 0), numbers(i, 1));
#pragma unroll
                for (int i = n == e; i < 2; ++i) second.multiply(found.value[n + i], numbers(i, 2), numbers(i, 3));
            }
        }
    }
}

// f(block, its rows of keys, its decays) for a chunk's blocks in the order of the walk.
template <bool Reverse, typename F>
__device__ __forceinline__ void each_block(const Matrix<float>& decays, F f) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
        const int block = Reverse ? kBlocks - 1 - i : i;
        f(block, &decays(block, 0));
    }
}

// read += state' keys' where keys are decayed within blocks: the state passes the blocks before each, 16 keys at a time.
template <int Passes, bool Reverse, int N, typename T>
__device__ __forceinline__ void read_blocks(Strip<kSide / 8>& read, Strip<N>& state, const Pieces<T>& keys,
                                            const Matrix<float>& decays) {
#pragma unroll
    for (int e = 0; e < N; e += 2) {
        Strip<2> left = state.template part<2>(e);
        each_block<Reverse>(decays, [&](int block, const float* by) {
            const Pieces<T> rows = keys.from(kTileRows * block, 8 * e);
            Strip<2>& sums = read.template part<2>(2 * block);
            multiply_kept<Passes, false>(sums, left, rows);
            if constexpr (Reverse && kRounded<T>) multiply_kept<Passes, false>(sums, left.template rest<T>(), rows);
            left.scale(by + 8 * e);
        });
    }
}

// The sum of the parts that the warps of a strip have, in the same order in all of them.
__device__ __forceinline__ void sum_parts_of(Strip<kSide / 8>& x, float4* exchange, int strip, int strips, int part,
                                             int parts) {
    const int lane = warp_lane();
    const auto place = [&](int p, int n) -> float4& {
        return exchange[((p * strips + strip) * (kSide / 8) + n) * kWarp + lane];
    };
#pragma unroll
    for (int n = 0; n < kSide / 8; ++n)
        place(part, n) = make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
    __syncthreads();
    x.clear();
    for (int p = 0; p < parts; ++p)
#pragma unroll
        for (int n = 0; n < kSide / 8; ++n) {
            const float4 four = place(p, n);
            x.value[n][0] += four.x, x.value[n][1] += four.y, x.value[n][2] += four.z, x.value[n][3] += four.w;
        }
}

}  // namespace fairseq_fastweights
