// Parts of a walk: its copies of a chunk, its writes of strips, and the products that are its alone.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

// Starts to copy `Columns` columns from `first` on, and `Rows` rows from `start` on, to a matrix whose rows have `columns`; zeros from row
// `end` on. They are copied by `Warps` warps or, with 0, as many as are said. With `All` of pieces they are, and all there.
template <int Columns, int Rows, int Warps, bool All = false, typename To, typename T>
DEVICE void copy_columns(const To& to, const Head<T>& from, int first, int columns, int warp, int warps, int start,
                         int end) {
    constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = kWarp / kAcross;
    constexpr int kLeastOn = kDown * (Warps > 0 ? Warps : 1), kMost = (Rows + kLeastOn - 1) / kLeastOn;
    constexpr bool kWhole = Warps > 0 && kMost * kLeastOn == Rows;  // all lanes have as many
    // So many at a time: in float32 registers would not do for more.
    constexpr int kTogether = Warps > 0 || (sizeof(T) == 2 && kMost < 4) ? kMost : sizeof(T) == 2 ? 4 : 1;
    const int lane = warp_lane(), own = first + lane % kAcross * kPiece, nth = lane / kAcross;
    const int row =
        warp * kDown + (kDown == 8 ? nth % 2 * 4 + nth / 2 : nth);  // a row and the fourth from it: other banks
    if (Warps > 0) warps = Warps;
    const int stride = static_cast<int>(from.stride);  // of 32 bits: registers are few
    if (!All && !(from.in_pieces(columns) && from.stride == stride))
        return copy_elements<Columns>(to.from(0, first), Head<T>(from.data + first, from.stride, from.dim - first),
                                      Rows, start, end, warp * kWarp + lane, warps * kWarp);
    const int rows_there = own < from.dim ? end - start - row : 0, rows_on = warps * kDown;
    const T* piece = from.data + own + static_cast<int64_t>(start + row) * stride;
    T* const place = &to(row, own);
    for (int down = 0; down < Rows;) {
        UNROLL_FOR (int i = 0; i < kTogether; ++i, down += rows_on, piece += static_cast<int64_t>(rows_on) * stride)
            if (kWhole || row + down < Rows)
                copy_or_clear(place + (&to(down, 0) - to.data), piece, All || down < rows_there);
        if (kTogether == kMost) return;
    }
}

// Starts to copy rows of the workspace that lie one after another.
template <int Rows, int Columns, int Warps, typename F>
DEVICE void copy_rows(const Matrix<F>& to, F* from, int warp, int warps) {
    copy_columns<Columns, Rows, Warps, true>(to, Head<F>(from, Columns, Columns), 0, Columns, warp, warps, 0, Rows);
}

// f(float& x, the sequence's number) with a strip's columns and those of a sequence or a state, `rows` beginning at the first of
// them: place p is row `start` + p, and there are no rows from `end` on.
template <int N, typename T, typename F>
DEVICE void each_place(Strip<N>& x, const Head<T>& rows, int start, int end, F f) {
    const int group = warp_lane() / 4, first = start + warp_lane() % 4 * 2;
    T* row = rows.data + first * rows.stride + group;
    UNROLL_FOR (int n = 0; n < N; ++n, row += 8 * rows.stride)
        UNROLL_FOR (int i = 0; i < 4; ++i)
            if (first + 8 * n + i % 2 < end && group + i / 2 * 8 < rows.dim)
                f(x.value[n][i], row[i % 2 * rows.stride + i / 2 * 8]);
}

// Writes a strip to a sequence's steps likewise.
template <int N, typename T>
DEVICE void store_steps(Strip<N>& x, const Head<T>& to, int start, int end) {
    if constexpr (sizeof(T) == 2)
        if (to.dim >= kTileRows && (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(T)) % 8 == 0) {
            const int first = start + warp_lane() / 4;
            UNROLL_FOR (int n = 0; n < N; ++n) {
                const auto transposed = [&](int i) {
                    return transpose_matrix(narrow_pair<T>(x.value[n][i], x.value[n][i + 1]).bits());
                };
                const uint2 four = neighbours_of(transposed(0), transposed(2));
                if (first + 8 * n < end)
                    *reinterpret_cast<uint2*>(to.data + (first + 8 * n) * to.stride + first_of_four()) = four;
            }
            return;
        }
    each_place(x, to, start, end, [](float from, T& number) { number = narrow<T>(from); });
}

// found = left T' or, with `RowsInner`, left T, of which `inverse` has T - I: the ones of T are added in float32, and with them
// a NaN of the left factor that was cut off.
template <int Passes, bool RowsInner>
DEVICE void multiply_by_inverse(Strip<kSide / 8>& found, const Strip<kSide / 8>& left,
                                const LowerBlocks<float>& inverse) {
    const int lane = warp_lane();
    found = left;
    UNROLL_FOR (int e = 0; e < kSide / 8; e += 2) {  // the inner places of a block
        const KeptFactor<Passes, Rounding::kCut> first(left.value[e]), second(left.value[e + 1]);
        UNROLL_FOR (int n = RowsInner ? 0 : e; n < (RowsInner ? e + 2 : kSide / 8); ++n) {
            unsigned b[4];
            if constexpr (RowsInner) {
                UNROLL_FOR (int i = 0; i < 4; ++i)
                    b[i] = __float_as_uint(
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

// read += state' keys' where keys are decayed within blocks: the state passes the blocks before each, 16 keys at a time.
template <int Passes, bool Reverse, int N, typename T>
DEVICE void read_blocks(Strip<kSide / 8>& read, Strip<N>& state, const Pieces<T>& keys, const Matrix<float>& decays) {
    UNROLL_FOR (int e = 0; e < N; e += 2) {
        Strip<2> left = state.template part<2>(e);
        UNROLL_FOR (int i = 0; i < kBlocks; ++i) {
            const int block = Reverse ? kBlocks - 1 - i : i;
            multiply_kept<Passes, false, Part::kAll, false, Reverse>(read.template part<2>(2 * block), left,
                                                                     keys.from(kTileRows * block, 8 * e));
            left.scale(&decays(block, 8 * e));
        }
    }
}

// The sum of the parts that the warps of a strip have, in the same order in all of them.
DEVICE void sum_parts_of(Strip<kSide / 8>& x, float4* exchange, int strip, int strips, int part, int parts) {
    const int lane = warp_lane();
    const auto place = [&](int p, int n) -> float4& {
        return exchange[((p * strips + strip) * (kSide / 8) + n) * kWarp + lane];
    };
    UNROLL_FOR (int n = 0; n < kSide / 8; ++n)
        place(part, n) = make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
    __syncthreads();
    x.clear();
    for (int p = 0; p < parts; ++p)
        UNROLL_FOR (int n = 0; n < kSide / 8; ++n) {
            const float4 four = place(p, n);
            x.value[n][0] += four.x, x.value[n][1] += four.y, x.value[n][2] += four.z, x.value[n][3] += four.w;
        }
}

}  // namespace fairseq_fastweights
