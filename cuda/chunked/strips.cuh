// Products whose left factor stays in a warp's registers, for what goes from product to product in a chain.
//
// A strip is 16 value columns of a matrix that is taken transposed: (16, 8 N), spread over a warp as the accumulators of N
// products side by side are. As accumulators and left factors of the tensor cores' instructions lie in the same lanes, what
// one product made is the left factor of the next without a barrier; only right factors come from shared memory, as the
// tensors lie there.
#pragma once

#include "groups.cuh"

namespace fairseq_fastweights {

template <int N>
struct Strip {
    float value[N][4];

    __device__ __forceinline__ void clear() {
        each([](int, int, float& x) { x = 0.0f; });
    }

    // The 8 M places from 8 `first` on.
    template <int M>
    __device__ __forceinline__ Strip<M>& part(int first) {
        return reinterpret_cast<Strip<M>&>(value[first]);
    }

    // f(inner place, column of the strip, float& value) for this lane's elements, groups of 8 places one after another.
    template <typename F>
    __device__ __forceinline__ void each(F f) {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) f(8 * n + 2 * member + i % 2, group + i / 2 * 8, value[n][i]);
    }

    // f(first inner place, column, float& x, float& y) for pairs of neighbouring places.
    template <typename F>
    __device__ __forceinline__ void each_pair(F f) {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                f(8 * n + 2 * member, group + 8 * half, value[n][2 * half], value[n][2 * half + 1]);
    }

    // f(float& value, other value) with the elements of another strip.
    template <typename F>
    __device__ __forceinline__ void each_with(const Strip& other, F f) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) f(value[n][i], other.value[n][i]);
    }

    // Each place's elements times a number of its own, in shared memory.
    __device__ __forceinline__ void scale(const float* by_place) {
        each_pair([&](int place, int, float& x, float& y) {
            const float2 by = *reinterpret_cast<const float2*>(by_place + place);
            x *= by.x;
            y *= by.y;
        });
    }

    // The rest that rounding to T leaves out.
    template <typename T>
    __device__ __forceinline__ Strip rest() const {
        Strip<N> left = *this;
        left.each_pair([](int, int, float& x, float& y) {
            const Pair<T> pair = narrow_pair<T>(x, y);
            x -= widen<float>(pair.x);
            y -= widen<float>(pair.y);
        });
        return left;
    }

    // From rows of places, in shared memory: columns `column` and on.
    template <typename T>
    __device__ __forceinline__ void load(const Matrix<T>& from, int column) {
        if constexpr (sizeof(T) == 2) {
            const int lane = warp_lane(), low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
#pragma unroll
            for (int j = 0; j < N / 2; ++j) {
                unsigned four[4];
                load_matrices<true>(four, &from(16 * j + third + low, column + second));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Pair<T> pair = Pair<T>::of_bits(four[i]);
                    value[2 * j + i / 2][i % 2 * 2] = widen<float>(pair.x);
                    value[2 * j + i / 2][i % 2 * 2 + 1] = widen<float>(pair.y);
                }
            }
        } else {
            each([&](int place, int j, float& x) { x = from.get(place, column + j); });
        }
    }

    // To rows of `stride` places each in global memory, a row for each column that is below `rows`; only places below `places`, a
    // multiple of 4. Two lanes exchange pairs of 16 bits, so that each writes four neighbours, and four lanes the 32 bytes that
    // memory takes at once.
    template <typename F, typename Stride>
    __device__ __forceinline__ void store(F* to, Stride stride, int places, int rows = kTileRows) {
        if constexpr (sizeof(F) == 2) {
            static_assert(N % 2 == 0, "two groups of places are exchanged");
            const int group = warp_lane() / 4, member = warp_lane() % 4, odd = member % 2;
            const int first = 8 * odd + member / 2 * 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                F* const row = to + (group + 8 * half) * stride + first;
                const int left = group + 8 * half < rows ? places - first : 0;
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    const float *const x = &value[n][2 * half], *const y = &value[n + 1][2 * half];
                    const unsigned one = narrow_pair<F>(x[0], x[1]).bits(), two = narrow_pair<F>(y[0], y[1]).bits();
                    const unsigned other = __shfl_xor_sync(kAllLanes, odd ? one : two, 1);
                    if (8 * n < left)
                        *reinterpret_cast<uint2*>(row + 8 * n) = make_uint2(odd ? other : one, odd ? two : other);
                }
            }
            return;
        }
        each_pair([&](int place, int j, float& x, float& y) {
            if (place < places && j < rows) put_pair(to + j * stride + place, x, y);
        });
    }

    // To rows of a sequence, `to` beginning at the strip's first place: column j is step `start` + j.
    template <typename T>
    __device__ __forceinline__ void store_rows(const Head<T>& to, int places, int start, int time) {
        T* const first = to.data + start * to.stride;
        if ((reinterpret_cast<uintptr_t>(first) | to.stride * sizeof(T)) % 8 == 0 && min(places, to.dim) % 4 == 0)
            return store(first, to.stride, min(places, to.dim), time - start);
        each([&](int place, int j, float& x) {
            if (place < min(places, to.dim) && start + j < time) first[j * to.stride + place] = narrow<T>(x);
        });
    }

    // Adds this lane's part of the sums over places of value * by(column, place), of its two columns.
    template <typename By>
    __device__ __forceinline__ void dot(float (&sums)[2], const By& by) const {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto pair =
                    *reinterpret_cast<const Pair<typename By::Element>*>(&by(group + 8 * half, 8 * n + 2 * member));
                sums[half] += value[n][2 * half] * widen<float>(pair.x) + value[n][2 * half + 1] * widen<float>(pair.y);
            }
    }

    // To rows of places in shared memory, a row for each column.
    template <typename To>
    __device__ __forceinline__ void write(const To& to) {
        each_pair([&](int place, int j, float x, float y) { put_pair(&to(j, place), x, y); });
    }

    // To rows of a sequence, `to` beginning at the strip's first column: place p is step `start` + p.
    template <typename T>
    __device__ __forceinline__ void store_steps(const Head<T>& to, int start, int time) {
        each([&](int place, int j, float& x) {
            if (start + place < time && j < to.dim) to.data[(start + place) * to.stride + j] = narrow<T>(x);
        });
    }
};

// 16 places of a strip, from 16 e on, as a left factor.
template <typename T, int N>
__device__ __forceinline__ void narrow_places(unsigned (&a)[4], const Strip<N>& from, int e) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float* const pair = &from.value[2 * e + i / 2][i % 2 * 2];
        a[i] = narrow_pair<T>(pair[0], pair[1]).bits();
    }
}

// Which of a square right factor there is, in 16 x 16 blocks: all of it, or those (row, column) with row >= column.
enum class Part { kAll, kLower };

// sums += left right. With `RowsInner` rows of `right` are the inner places, without they are the columns. Beside bfloat16 the left factor is rounded to it; else all is
// multiplied in tf32, in one pass with a right factor that is exact in it or, with `Rounds`, is rounded to it.
template <int Passes, bool RowsInner, Part Which = Part::kAll, bool Rounds = false, int N, int M, typename Right>
__device__ __forceinline__ void multiply_kept(Strip<N>& sums, const Strip<M>& left, const Right& right) {
    using T = typename Right::Element;
    const int lane = warp_lane();
    if constexpr (kRounded<T>) {
        const int low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
#pragma unroll
        for (int e = 0; e < M / 2; ++e) {
            unsigned a[4];
            narrow_places<T>(a, left, e);
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                if (Which == Part::kLower && (RowsInner ? e < n : e > n)) continue;
                unsigned b[4];
                load_matrices<RowsInner>(b, RowsInner ? &right(16 * e + second + low, 16 * n + third)
                                                      : &right(16 * n + third + low, 16 * e + second));
                mma_stored<T>(sums.value[2 * n], a, {b[0], b[1]});
                mma_stored<T>(sums.value[2 * n + 1], a, {b[2], b[3]});
            }
        }
    } else {
        const int group = lane / 4, member = lane % 4;
#pragma unroll
        for (int e = 0; e < M; ++e) {
            const KeptFactor<Passes> factor(left.value[e]);
            const int inner = 8 * e + 2 * member;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (Which == Part::kLower && (RowsInner ? e < n : e > n)) continue;
                const int column = 8 * n + group;
                Pair<T> pair;
                if constexpr (RowsInner)
                    pair = {right(inner, column), right(inner + 1, column)};
                else
                    pair = *reinterpret_cast<const Pair<T>*>(&right(column, inner));
                const float first = widen<float>(pair.x), second = widen<float>(pair.y);
                if constexpr (Passes == 1 && !Rounds)
                    factor.multiply_exact(sums.value[n], first, second);
                else
                    factor.multiply(sums.value[n], first, second);
            }
        }
    }
}

// sums += pairs right, as `multiply_kept`, but that beside bfloat16 pairs are taken as two of them, big + small.
template <int Passes, bool RowsInner, int N, int M, typename Right>
__device__ __forceinline__ void multiply_pairs(Strip<N>& sums, Strip<M>& pairs, const Right& right) {
    using F = typename Right::Element;
#pragma unroll
    for (int e = 0; e < M / 2; ++e) {
        Strip<2>& part = pairs.template part<2>(2 * e);
        const Right factor = RowsInner ? right.from(16 * e, 0) : right.from(0, 16 * e);
        multiply_kept<Passes, RowsInner, Part::kAll, sizeof(F) == 4>(sums, part, factor);
        if constexpr (kRounded<F>) multiply_kept<Passes, RowsInner>(sums, part.template rest<F>(), factor);
    }
}

// A warpgroup's product begun, with this warp's rows of the left factor in `a`.
template <typename T, bool RowsInner, int N, int M>
__device__ __forceinline__ void start_in_group(Strip<N>& sums, const unsigned (&a)[M][4], const Pieces<T>& right) {
    groups_begin();
#pragma unroll
    for (int e = 0; e < M; ++e)
#pragma unroll
        for (int n = 0; n < N; n += kGroupColumns / 8)
            multiply_in_group<T, RowsInner>(sums.value, n, a[e], right.template descriptor<RowsInner>(16 * e, 8 * n));
    groups_commit();
}

// The same as `multiply_kept`, of all of the right factor, begun: by the warpgroup, if the block's strips are `grouped` by
// fours, else by each warp. Until `finish` nobody may touch the sums, but for products that add to them too.
template <int Passes, bool RowsInner, int N, int M, typename T>
__device__ __forceinline__ void start(bool grouped, Strip<N>& sums, const Strip<M>& left, const Pieces<T>& right) {
    if constexpr (kRounded<T> && N % 8 == 0 && M % 8 == 0) {
        if (grouped) {
            unsigned a[M / 2][4];
#pragma unroll
            for (int e = 0; e < M / 2; ++e) narrow_places<T>(a[e], left, e);
            return start_in_group<T, RowsInner>(sums, a, right);
        }
    }
    multiply_kept<Passes, RowsInner>(sums, left, right);
}
template <int N>
__device__ __forceinline__ void finish(bool grouped, Strip<N>& sums) {
    if (!grouped) return;
    groups_wait();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    sums.each([](int, int, float& x) { asm volatile("" : "+f"(x)::"memory"); });  // not read before
#endif
}

}  // namespace fairseq_fastweights
