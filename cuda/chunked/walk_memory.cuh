// A walk's reads and writes of a chunk, by addresses of which all that is the same in each chunk is found before.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

constexpr int kMostStride = 1 << 24;  // of a sequence's steps, for offsets of 32 bits

// A lane's pieces of 16 bytes of `Columns` columns and up to `Rows` rows of a sequence: of one column, in rows of one distance from
// one another. They are copied by `Warps` warps or, with 0, as many as are said.
template <int Columns, int Rows, int Warps, typename T>
struct PieceCopies {
    static constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = kWarp / kAcross;
    static constexpr int kLeastOn = kDown * (Warps > 0 ? Warps : 1), kMost = (Rows + kLeastOn - 1) / kLeastOn;
    static constexpr bool kWhole = Warps > 0 && kMost* kLeastOn == Rows;  // all lanes have as many
    // So many at a time: in float32 registers would not do for more.
    static constexpr int kTogether = Warps > 0 || (sizeof(T) == 2 && kMost < 4) ? kMost : sizeof(T) == 2 ? 4 : 1;

    const T* column;  // the first row's
    int stride, row, place, rows_on;
    bool there, in_pieces;

    // For columns `first` and on, by the warp of number `warp`, to matrices such as `to`. `in_pieces` says if this can be done,
    // where rows have `columns`.
    template <typename To>
    __device__ __forceinline__ PieceCopies(const To& to, const Head<T>& from, int first, int columns, int warp,
                                           int warps)
        : stride(static_cast<int>(from.stride)), row(warp * kDown + warp_lane() / kAcross),
          rows_on((Warps > 0 ? Warps : warps) * kDown) {
        const int own = first + warp_lane() % kAcross * kPiece;
        column = from.data + own;
        place = static_cast<int>(&to(row, own) - to.data);
        there = own < from.dim;
        in_pieces = from.in_pieces(columns) && from.stride < kMostStride;
    }

    // Rows `start` and on; zeros from row `end` on.
    template <typename To>
    __device__ __forceinline__ void copy(const To& to, int start, int end) const {
        const int rows_there = there ? end - start - row : 0;
        const T* piece = column + static_cast<int64_t>(start + row) * stride;
        T* const first = to.data + place;
        for (int down = 0; down < Rows;) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i, down += rows_on, piece += static_cast<int64_t>(rows_on) * stride)
                if (kWhole || row + down < Rows)
                    copy_or_clear(first + (&to(down, 0) - to.data), piece, down < rows_there);
            if (kTogether == kMost) return;
        }
    }
};

// Starts to copy `Count` numbers of the workspace, by `Threads` threads or, with 0, as many as are said, to rows of 16 numbers that
// are `stride` apart.
template <int Count, int Threads, typename F>
__device__ __forceinline__ void copy_numbers(F* to, int stride, const F* from, int thread, int threads) {
    constexpr int kPiece = 16 / sizeof(F), kLeastOn = kPiece * (Threads > 0 ? Threads : kWarp);
    constexpr int kMost = (Count + kLeastOn - 1) / kLeastOn, kTogether = Threads > 0 ? kMost : kMost > 5 ? 5 : kMost;
    constexpr bool kWhole = Threads > 0 && kMost * kLeastOn == Count;
    const int first = thread * kPiece, on = (Threads > 0 ? Threads : threads) * kPiece;
    to += first / 16 * stride + first % 16;
    from += first;
    for (int begin = 0; begin < Count; begin += kTogether * on) {
#pragma unroll
        for (int i = begin, n = 0; n < kTogether; ++n, i += on)
            if (kWhole || first + i < Count) copy_async<16>(to + i / 16 * stride, from + i);
        if (kTogether == kMost) return;
    }
}

// A strip's columns in those of a sequence, a row for each place, in pairs of 16 bits; see Strip::store_steps.
template <typename T>
struct StepStore {
    T* column;  // this lane's, of the first row
    int stride;
    bool paired;  // true if this can be done

    __device__ __forceinline__ explicit StepStore(const Head<T>& to)
        : column(to.data + 2 * (warp_lane() % 4)), stride(static_cast<int>(to.stride)),
          paired(sizeof(T) == 2 && to.dim >= kTileRows && to.stride < kMostStride &&
                 (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(T)) % (2 * sizeof(T)) == 0) {}

    // To rows `start` and on, those before row `end`.
    template <int N>
    __device__ __forceinline__ void store(const Strip<N>& x, int start, int end) const {
        if constexpr (sizeof(T) == 2) {
            const int first = start + warp_lane() / 4;
            T* row = column + static_cast<int64_t>(first) * stride;
#pragma unroll
            for (int n = 0; n < N; ++n, row += static_cast<int64_t>(8) * stride)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned pair =
                        transpose_matrix(narrow_pair<T>(x.value[n][2 * half], x.value[n][2 * half + 1]).bits());
                    if (first + 8 * n < end) *reinterpret_cast<unsigned*>(row + 8 * half) = pair;
                }
        }
    }
};

// f(float& x, the state's number or null, where that would be beyond it) for a strip's part of a (key_dim, value_dim) state.
template <int N, typename F>
__device__ __forceinline__ void each_of_state(Strip<N>& state, float* numbers, int first_key, int keys, int column,
                                              int columns, F f) {
    const int group = warp_lane() / 4, member = warp_lane() % 4;
    const int keys_left = keys - first_key - 2 * member, columns_left = columns - column - group;
    numbers += static_cast<int64_t>(first_key + 2 * member) * columns + column + group;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            float* const row = numbers + static_cast<int64_t>(8 * n + odd) * columns;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                f(state.value[n][2 * half + odd],
                  8 * n + odd < keys_left && 8 * half < columns_left ? row + 8 * half : nullptr);
        }
}
template <int N>
__device__ __forceinline__ void load_state(Strip<N>& state, float* from, int first_key, int keys, int column,
                                           int columns) {
    each_of_state(state, from, first_key, keys, column, columns,
                  [](float& x, const float* number) { x = number != nullptr ? *number : 0.0f; });
}
template <int N>
__device__ __forceinline__ void store_state(Strip<N>& state, float* to, int first_key, int keys, int column,
                                            int columns) {
    each_of_state(state, to, first_key, keys, column, columns, [](float x, float* number) {
        if (number != nullptr) *number = x;
    });
}

}  // namespace fairseq_fastweights
