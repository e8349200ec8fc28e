// What a walk reads and writes of a chunk, by addresses that are found before its first chunk and go on from one to the next.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

// A lane's pieces of 16 bytes of `Columns` columns of a chunk's `Rows` rows: of one column, in rows of one distance from one
// another. They are copied by `Warps` warps or, with 0, as many as are said.
template <int Columns, int Rows, int Warps, typename T>
struct PieceCopies {
    static constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = kWarp / kAcross;
    static constexpr bool kWhole = Warps > 0 && Rows % (Warps * kDown) == 0;     // all lanes have as many
    static constexpr int kTogether = Warps > 0 ? Rows : sizeof(T) == 2 ? 4 : 1;  // in float32 registers would not do

    const T* piece;   // of the next chunk
    int down_on, on;  // to the lane's next piece, and to the same one of the chunk after
    int row, place, rows_on;
    bool there, in_pieces;

    // From row `start` of `from` on, columns `first` and on, for the warp of number `warp`, to matrices as `to`; a chunk is `chunk_on`
    // rows behind another. `in_pieces` says if this can be done, where rows have `columns`.
    template <typename To>
    __device__ __forceinline__ PieceCopies(const To& to, const Head<T>& from, int64_t start, int chunk_on, int first,
                                           int columns, int warp, int warps)
        : row(warp * kDown + warp_lane() / kAcross), rows_on((Warps > 0 ? Warps : warps) * kDown) {
        const int column = first + warp_lane() % kAcross * kPiece, stride = static_cast<int>(from.stride);
        piece = from.data + (start + row) * from.stride + column;
        down_on = rows_on * stride;
        on = chunk_on * stride;
        place = static_cast<int>(&to(row, column) - to.data);
        there = column < from.dim;
        in_pieces = from.in_pieces(columns) && from.stride < (1 << 24);
    }

    // Copies the next chunk; zeros from row `end` on.
    template <typename To>
    __device__ __forceinline__ void copy(const To& to, int end) {
        const int rows_there = there ? end - row : 0;
        const T* next = piece;
        T* const first = to.data + place;
#pragma unroll kTogether
        for (int down = 0; down < Rows; down += rows_on, next += down_on)
            if (kWhole || row + down < Rows) copy_or_clear(first + (&to(down, 0) - to.data), next, down < rows_there);
        piece += on;
    }
};

// A thread's pieces of 16 bytes of `Count` numbers of the workspace in a row, copied by `Threads` threads or, with 0, as many as
// are said.
template <int Count, int Threads, typename F>
struct RowCopies {
    static constexpr int kPiece = 16 / sizeof(F), kTogether = Threads > 0 ? Count : 4;
    const F* piece;  // of the next chunk
    int first, numbers_on;

    __device__ __forceinline__ RowCopies(const F* from, int thread, int threads)
        : piece(from + thread * kPiece), first(thread * kPiece),
          numbers_on((Threads > 0 ? Threads : threads) * kPiece) {}

    // Copies the next chunk, `on` behind which is the one after, to rows of 16 numbers that are `stride` apart.
    __device__ __forceinline__ void copy(F* to, int stride, int on) {
        to += first / 16 * stride + first % 16;
#pragma unroll kTogether
        for (int i = 0; i < Count; i += numbers_on)
            if ((Threads > 0 && Count % (Threads * kPiece) == 0) || first + i < Count)
                copy_async<16>(to + i / 16 * stride, piece + i);
        piece += on;
    }
};

// A strip's rows in the workspace, one for each column, of which this lane writes at and behind `first`; see Strip::store.
template <typename F>
struct RowStore {
    F* first;        // of the next chunk
    int stride, on;  // from row to row, and from chunk to chunk

    __device__ __forceinline__ RowStore(F* to, int stride, int on) : stride(stride), on(on) {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
        first = to + group * stride + (sizeof(F) == 2 ? member % 2 * 8 + member / 2 * 4 : 2 * member);
    }

    // Of the next chunk the places below `places`, a multiple of 16.
    template <int N>
    __device__ __forceinline__ void store(const Strip<N>& x, int places) {
        static_assert(N % 2 == 0, "16 places are there or not");
        const bool odd = warp_lane() % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            F* const row = first + static_cast<int64_t>(8 * half) * stride;
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                const float *const a = &x.value[n][2 * half], *const b = &x.value[n + 1][2 * half];
                if constexpr (sizeof(F) == 2) {
                    const unsigned low = narrow_pair<F>(a[0], a[1]).bits(), high = narrow_pair<F>(b[0], b[1]).bits();
                    const unsigned other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
                    if (8 * n < places)
                        *reinterpret_cast<uint2*>(row + 8 * n) = make_uint2(odd ? other : low, odd ? high : other);
                } else if (8 * n < places) {
                    put_pair(row + 8 * n, a[0], a[1]);
                    put_pair(row + 8 * n + 8, b[0], b[1]);
                }
            }
        }
        first += on;
    }
};

// A strip's columns in those of a sequence, a row for each place: of 16 bits in pairs; see Strip::store_steps.
template <typename T>
struct StepStore {
    T* first;  // this lane's, of the next chunk
    int stride, on;
    bool paired;  // true if this can be done

    __device__ __forceinline__ StepStore(const Head<T>& to, int64_t start, int chunk_on)
        : stride(static_cast<int>(to.stride)), on(chunk_on * stride),
          paired(sizeof(T) == 2 && to.dim >= kTileRows && to.stride < (1 << 24) &&
                 (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(T)) % (2 * sizeof(T)) == 0) {
        first = to.data + (start + warp_lane() / 4) * to.stride + 2 * (warp_lane() % 4);
    }

    // Of the next chunk, the places before `end`.
    template <int N>
    __device__ __forceinline__ void store(const Strip<N>& x, int end) {
        if constexpr (sizeof(T) == 2) {
            const int places = end - warp_lane() / 4;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                T* const row = first + static_cast<int64_t>(8 * n) * stride;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const unsigned pair =
                        transpose_matrix(narrow_pair<T>(x.value[n][2 * half], x.value[n][2 * half + 1]).bits());
                    if (8 * n < places) *reinterpret_cast<unsigned*>(row + 8 * half) = pair;
                }
            }
        }
        first += on;
    }
};

}  // namespace fairseq_fastweights
