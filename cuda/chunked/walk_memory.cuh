// A walk's reads and writes of a chunk, by addresses of which all that is the same in each chunk is found before.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

// A lane's pieces of 16 bytes of `Columns` columns and up to `Rows` rows of a sequence: of one column, in rows of one distance from
// one another. They are copied by `Warps` warps or, with 0, as many as are said.
template <int Columns, int Rows, int Warps, typename T>
struct PieceCopies {
    static constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = kWarp / kAcross;
    static constexpr int kLeastOn = kDown * (Warps > 0 ? Warps : 1), kMost = (Rows + kLeastOn - 1) / kLeastOn;
    static constexpr bool kWhole = Warps > 0 && kMost* kLeastOn == Rows;  // all lanes have as many
    // So many at a time: in float32 registers would not do for more.
    static constexpr int kTogether = Warps > 0 || (sizeof(T) == 2 && kMost < 4) ? kMost : sizeof(T) == 2 ? 4 : 1;

    Head<T> all;                                 // from the first column on
    const T* column;                             // this lane's, of the first row
    int stride, first, row, place, warp, warps;  // a stride of 32 bits: registers are few
    bool there, in_pieces;

    // For columns `first` and on, by the warp of number `warp`, to matrices such as `to`, whose rows have `columns`.
    template <typename To>
    DEVICE PieceCopies(const To& to, const Head<T>& from, int first, int columns, int warp, int warps)
        : all(from.data + first, from.stride, from.dim - first), stride(static_cast<int>(from.stride)), first(first),
          row(warp * kDown + warp_lane() / kAcross), warp(warp), warps(Warps > 0 ? Warps : warps) {
        const int own = first + warp_lane() % kAcross * kPiece;
        column = from.data + own;
        place = static_cast<int>(&to(row, own) - to.data);
        there = own < from.dim;
        in_pieces = from.in_pieces(columns) && from.stride == stride;
    }

    // Rows `start` and on; zeros from row `end` on.
    template <typename To>
    DEVICE void copy(const To& to, int start, int end) const {
        if (in_pieces)
            copy_pieces<false>(to, start, end);
        else
            copy_elements(to.from(0, first), all, Rows, Walk(Columns, warp * kWarp + warp_lane(), warps * kWarp), start,
                          end);
    }

    // The same of what is in pieces, with `All` of rows and columns that are all there.
    template <bool All, typename To>
    DEVICE void copy_pieces(const To& to, int start, int end) const {
        const int rows_there = there ? end - start - row : 0, rows_on = warps * kDown;
        const T* piece = column + static_cast<int64_t>(start + row) * stride;
        T* const first = to.data + place;
        for (int down = 0; down < Rows;) {
            UNROLL for (int i = 0; i < kTogether;
                        ++i, down += rows_on,
                        piece += static_cast<int64_t>(rows_on) * stride) if (kWhole || row + down < Rows)
                copy_or_clear(first + (&to(down, 0) - to.data), piece, All || down < rows_there);
            if (kTogether == kMost) return;
        }
    }
};

// Starts to copy rows of the workspace that lie one after another.
template <int Rows, int Columns, int Warps, typename F>
DEVICE void copy_rows(const Matrix<F>& to, F* from, int warp, int warps) {
    PieceCopies<Columns, Rows, Warps, F>(to, Head<F>(from, Columns, Columns), 0, Columns, warp, warps)
        .template copy_pieces<true>(to, 0, Rows);
}

// f(float& x, the sequence's number) with a strip's columns and those of a sequence or a state, `rows` beginning at the first of
// them: place p is row `start` + p, and there are no rows from `end` on.
template <int N, typename T, typename F>
DEVICE void each_place(Strip<N>& x, const Head<T>& rows, int start, int end, F f) {
    const int group = warp_lane() / 4, first = start + warp_lane() % 4 * 2;
    T* row = rows.data + first * rows.stride + group;
    UNROLL for (int n = 0; n < N; ++n, row += 8 * rows.stride)
        UNROLL for (int i = 0; i < 4; ++i) if (first + 8 * n + i % 2 < end && group + i / 2 * 8 < rows.dim)
            f(x.value[n][i], row[i % 2 * rows.stride + i / 2 * 8]);
}

// Writes a strip to a sequence's steps likewise.
template <int N, typename T>
DEVICE void store_steps(Strip<N>& x, const Head<T>& to, int start, int end) {
    const int group = warp_lane() / 4, twice = warp_lane() % 4 * 2;
    if constexpr (sizeof(T) == 2) {
        T* const first = to.data + (start + group) * to.stride + twice;
        if (to.dim >= kTileRows && (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(T)) % 4 == 0)
            return x.each_pair([&](int place, int j, float one, float two) {
                const unsigned pair = transpose_matrix(narrow_pair<T>(one, two).bits());
                T* const at = first + (place - twice) * to.stride + (j - group);
                if (start + (place - twice) + group < end) *reinterpret_cast<unsigned*>(at) = pair;
            });
    }
    each_place(x, to, start, end, [](float from, T& number) { number = narrow<T>(from); });
}

}  // namespace fairseq_fastweights
