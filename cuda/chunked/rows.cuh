// Code of the last stages without decays by dimension: a block is a chunk of a head, each of its four warps has 16 of its steps,
// and what a warp finds of their pairs stays in its registers (strips.cuh). Distances in shared memory are known to the compiler,
// which makes of most addresses a constant: by count, what these stages waited for was arithmetic on addresses.
#pragma once

#include "gates.cuh"

namespace fairseq_fastweights {

constexpr int kStripThreads = kSide / kTileRows * kWarp;

// Which chunk of which head a block is: `local` counts the slice's heads, `start` is the chunk's first step.
struct Place {
    int local, n, batch, head, start;

    template <typename F>
    DEVICE Place(const Slice<F>& slice, const Sizes& sizes)
        : local(blockIdx.x), n(slice.begin + blockIdx.y), batch((slice.first_head + local) / sizes.heads),
          head((slice.first_head + local) % sizes.heads), start(n * kSide) {}
};

// The first of this warp's steps: lanes have the same number, as the compiler sees so.
DEVICE int own_row() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0) * kTileRows; }

// f(an integral_constant) with the widest part of the keys that a block takes at once, in units of 16: 1, 2 or 4.
template <typename F>
auto with_width(int keys, F f) {
    if (keys <= 16) return f(std::integral_constant<int, 1>());
    if (keys <= 32) return f(std::integral_constant<int, 2>());
    return f(std::integral_constant<int, 4>());
}

// A matrix in shared memory whose rows are 16 bytes longer than its columns.
template <typename T, int Columns>
struct Rows {
    using Element = T;
    static constexpr int kColumns = Columns, stride = Columns + 16 / sizeof(T);
    T* data;

    Rows() = default;
    __host__ __device__ explicit Rows(T* data) : data(data) {}
    __host__ __device__ Rows(Carver& carver, int rows) : data(carver.take<T>(rows * stride)) {}
    DEVICE T& operator()(int row, int column) const { return data[row * stride + column]; }
    DEVICE float get(int row, int column) const { return widen<float>((*this)(row, column)); }
    DEVICE Rows from(int row, int column) const { return Rows(&(*this)(row, column)); }
};

// Starts to copy up to `rows` rows, kSide at most, `stride` numbers apart, of which so many are there, and so many of their columns;
// zeros for others.
template <int Threads = kStripThreads, typename T, int Columns, typename Stride>
DEVICE void copy_pieces(const Rows<T, Columns>& to, const T* from, Stride stride, int rows, int rows_there,
                        int columns_there) {
    constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = Threads / kAcross;
    const int column = threadIdx.x % kAcross * kPiece, first = threadIdx.x / kAcross;
    const int there = column < columns_there ? rows_there - first : 0;
    const T* piece = from + first * stride + column;
    T* const place = &to(first, column);
    UNROLL for (int row = 0; row < kSide;
                row += kDown, piece += kDown * stride) if ((rows == kSide && kDown <= kSide) || first + row < rows)
        copy_or_clear(place + row * to.stride, piece, row < there);
}

// Starts to copy a chunk's steps from `start` on; zeros where the tensor ends.
template <int Threads = kStripThreads, typename T, int Columns>
DEVICE void copy_steps(const Rows<T, Columns>& to, const Head<T>& from, int start, int time) {
    if (!from.in_pieces(Columns)) return copy_elements<Columns>(to, from, kSide, start, time);
    copy_pieces<Threads>(to, from.data + start * from.stride, from.stride, kSide, time - start, from.dim);
}

// This thread's part of the sum of x * y over `rows` rows.
template <typename T, int Columns>
DEVICE float dot_of(const Rows<T, Columns>& x, const Rows<T, Columns>& y, int rows) {
    const int row = own_row();
    if (row >= rows) return 0.0f;
    Strip<Columns / 8> own;
    own.each_pair([&](int i, int j, float& a, float& b) { a = x.get(row + j, i), b = x.get(row + j, i + 1); });
    float sums[2] = {};
    own.dot(sums, y.from(row, 0));
    return sums[0] + sums[1];
}

// Takes what a product's left factor is, and does nothing with it.
struct Unseen {
    DEVICE void operator()(int, int, float, float) const {}
};

// sums += left right, where 16 rows of the left factor, from `row` on, are in shared memory as well, over 16 `blocks` inner
// places. With `RowsInner` rows of `right` are the inner places, without they are the columns; of a `Turned` left factor places
// are (inner, row). see(column of the strip, inner place, x, y) for this lane's pairs of the left factor.
template <int Passes, bool Turned, bool RowsInner, int N, typename Left, typename Right, typename See = Unseen>
DEVICE void multiply_rows(Strip<N>& sums, const Left& left, int row, const Right& right, int blocks, See see = See()) {
    using A = typename Left::Element;
    using B = typename Right::Element;
    // Lane l names row l % 8 of the 8 x 8 matrix l / 8.
    const int lane = warp_lane(), low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
    const auto add = [&](int e) {
        const Left own = Turned ? left.from(16 * e, row) : left.from(row, 16 * e);
        GivenStrip<A, 2> part;
        if constexpr (sizeof(A) == 2)
            load_matrices<Turned>(part.value[0], Turned ? &own(third + low, second) : &own(second + low, third));
        else
            part.each([&](int place, int j, float& x) { x = Turned ? own(place, j) : own(j, place); });
        Strip<2> seen = part.widened();
        seen.each_pair([&](int place, int j, float x, float y) { see(j, 16 * e + place, x, y); });
        multiply_kept<Passes, RowsInner, Part::kAll, sizeof(B) == 4>(
            sums, part, RowsInner ? right.from(16 * e, 0) : right.from(0, 16 * e));
    };
    if constexpr (kInHalves<GivenStrip<A, 2>, B>) {
        UNROLL for (int e = 0; e < kSide / 16; ++e) {
            if (e >= blocks) break;
            add(e);
        }
    } else {
#pragma unroll 1
        for (int e = 0; e < blocks; ++e) add(e);
    }
}

// This lane's part of numbers of two steps, its strip's columns: of each half of the 16.
using OfSteps = float[2];
// The sums of the parts, handed to one lane for each step: done(column, sum).
template <typename F>
DEVICE void sum_steps(const OfSteps& parts, F done) {
    UNROLL for (int half = 0; half < 2; ++half) {
        float sum = parts[half] + __shfl_xor_sync(kAllLanes, parts[half], 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (warp_lane() % 4 == 0) done(warp_lane() / 4 + 8 * half, sum);
    }
}

// f(strip, first column) for all 16 `across` columns of a part of the values: at once if it is as wide as can be, else 16 at a time.
template <int N, typename F>
DEVICE void each_columns(Strip<N>& all, int across, F f) {
    if (across == N / 2) return f(all, 0);
    UNROLL for (int n = 0; n < N / 2 - 1; ++n) if (n < across) f(all.template part<2>(2 * n), 16 * n);
}

// The writes of a chunk's steps, for a part of the values: U of the delta rule, transposed, which the walk found; else V.
template <typename T, bool Corrects>
using Written = std::conditional_t<Corrects, Factor<T>, T>;
template <typename T, bool Corrects>
using WrittenRows = Rows<Written<T, Corrects>, kSide>;
template <bool Corrects>
__host__ __device__ constexpr int rows_of_writes(int values) {
    return Corrects ? values : kSide;
}

// Starts to copy `values` of them from `value` on.
template <bool Corrects, int Threads = kStripThreads, typename U, typename F>
DEVICE void copy_writes(const Rows<U, kSide>& to, const Slice<F>& slice, const Place& at, const Sequence& v,
                        const Sizes& sizes, int value, int values) {
    if constexpr (Corrects)
        copy_pieces<Threads>(to, slice.rows_of(slice.updates, at.local, at.n) + value * kSide, kSide, values, values,
                             kSide);
    else
        copy_steps<Threads>(to, Head<U>(v, at.batch, at.head, value, sizes.value_dim), at.start, sizes.time);
}

}  // namespace fairseq_fastweights
