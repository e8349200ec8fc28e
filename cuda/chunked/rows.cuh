// Code of the last stages without decays by dimension: a block is a chunk of a head, each of its four warps has 16 of its steps,
// and what a warp finds of their pairs stays in its registers (strips.cuh). Distances in shared memory are known to the compiler,
// which makes of most addresses a constant: by count, what these stages waited for was arithmetic on addresses.
#pragma once

#include "tiles.cuh"

namespace fairseq_fastweights {

constexpr int kStripThreads = kSide / kTileRows * kWarp;

// The first of this warp's steps: lanes have the same number, as the compiler sees so.
__device__ __forceinline__ int own_row() {
    return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0) * kTileRows;
}

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
    __device__ __forceinline__ T& operator()(int row, int column) const { return data[row * stride + column]; }
    __device__ __forceinline__ float get(int row, int column) const { return widen<float>((*this)(row, column)); }
    __device__ __forceinline__ Rows from(int row, int column) const { return Rows(&(*this)(row, column)); }
};

// Starts to copy up to `rows` rows, kSide at most, `stride` numbers apart, of which so many are there, and so many of their columns;
// zeros for others.
template <int Threads = kStripThreads, typename T, int Columns, typename Stride>
__device__ __forceinline__ void copy_pieces(const Rows<T, Columns>& to, const T* from, Stride stride, int rows,
                                            int rows_there, int columns_there) {
    constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = Threads / kAcross;
    const int column = threadIdx.x % kAcross * kPiece, first = threadIdx.x / kAcross;
    const int there = column < columns_there ? rows_there - first : 0;
    const T* piece = from + first * stride + column;
    T* const place = &to(first, column);
#pragma unroll
    for (int row = 0; row < kSide; row += kDown, piece += kDown * stride)
        if ((rows == kSide && kDown <= kSide) || first + row < rows)
            copy_piece(place + row * to.stride, piece, row < there);
}

// Starts to copy a chunk's steps from `start` on; zeros where the tensor ends.
template <int Threads = kStripThreads, typename T, int Columns>
__device__ __forceinline__ void copy_steps(const Rows<T, Columns>& to, const Head<T>& from, int start, int time) {
    if (!from.in_pieces(Columns)) return copy_elements(to, from, kSide, Walk(Columns), start, time);
    copy_pieces<Threads>(to, from.data + start * from.stride, from.stride, kSide, time - start, from.dim);
}

// This thread's part of the sum of x * y over `rows` rows.
template <typename T, int Columns>
__device__ __forceinline__ float dot_of(const Rows<T, Columns>& x, const Rows<T, Columns>& y, int rows) {
    constexpr int kPiece = 16 / sizeof(T), kAcross = Columns / kPiece, kDown = kStripThreads / kAcross;
    struct alignas(16) Piece {
        T numbers[kPiece];
    };
    const int column = threadIdx.x % kAcross * kPiece;
    float sum = 0.0f;
#pragma unroll 2
    for (int row = threadIdx.x / kAcross; row < rows; row += kDown) {
        const Piece a = *reinterpret_cast<const Piece*>(&x(row, column)),
                    b = *reinterpret_cast<const Piece*>(&y(row, column));
#pragma unroll
        for (int i = 0; i < kPiece; ++i) sum += widen<float>(a.numbers[i]) * widen<float>(b.numbers[i]);
    }
    return sum;
}

// Takes what a product's left factor is, and does nothing with it.
struct Unseen {
    __device__ __forceinline__ void operator()(int, int, float, float) const {}
};

// sums += left right, where 16 rows of the left factor, from `row` on, are in shared memory as well, over 16 `blocks` inner
// places. With `RowsInner` rows of `right` are the inner places, without they are the columns; of a `Turned` left factor places
// are (inner, row). see(column of the strip, inner place, x, y) for this lane's pairs of the left factor.
template <int Passes, bool Turned, bool RowsInner, int N, typename Left, typename Right, typename See = Unseen>
__device__ __forceinline__ void multiply_rows(Strip<N>& sums, const Left& left, int row, const Right& right, int blocks,
                                              See see = See()) {
    using A = typename Left::Element;
    using B = typename Right::Element;
    constexpr bool kSees = !std::is_same<See, Unseen>::value;
    const int lane = warp_lane(), group = lane / 4, member = lane % 4;
    if constexpr (sizeof(A) == 2 && std::is_same<A, B>::value) {
        // Lane l names row l % 8 of the 8 x 8 matrix l / 8.
        const int low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
        const Left first = Turned ? left.from(third + low, row + second) : left.from(row + second + low, third);
        const Right of_lane = RowsInner ? right.from(second + low, third) : right.from(third + low, second);
#pragma unroll
        for (int e = 0; e < kSide / 16; ++e) {
            if (e >= blocks) break;
            unsigned a[4];
            load_matrices<Turned>(a, Turned ? &first(16 * e, 0) : &first(0, 16 * e));
            if constexpr (kSees) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Pair<A> pair = Pair<A>::of_bits(a[i]);
                    see(group + i % 2 * 8, 16 * e + 2 * member + i / 2 * 8, widen<float>(pair.x), widen<float>(pair.y));
                }
            }
#pragma unroll
            for (int n = 0; n < N / 2; ++n) {
                unsigned b[4];
                load_matrices<RowsInner>(b, RowsInner ? &of_lane(16 * e, 16 * n) : &of_lane(16 * n, 16 * e));
                mma_stored<A>(sums.value[2 * n], a, {b[0], b[1]});
                mma_stored<A>(sums.value[2 * n + 1], a, {b[2], b[3]});
            }
        }
    } else {
#pragma unroll 1
        for (int inner = 0; inner < 16 * blocks; inner += 16) {
            Strip<2> part;
            part.each_pair([&](int place, int j, float& x, float& y) {
                x = Turned ? left.get(inner + place, row + j) : left.get(row + j, inner + place);
                y = Turned ? left.get(inner + place + 1, row + j) : left.get(row + j, inner + place + 1);
                if constexpr (kSees) see(j, inner + place, x, y);
            });
            multiply_kept<Passes, RowsInner, Part::kAll, false, sizeof(B) == 4>(
                sums, part, RowsInner ? right.from(inner, 0) : right.from(0, inner));
        }
    }
}

// This lane's part of numbers of two steps, its strip's columns: of each half of the 16.
using OfSteps = float[2];
// The sums of the parts, handed to one lane for each step: done(column, sum).
template <typename F>
__device__ __forceinline__ void sum_steps(const OfSteps& parts, F done) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = parts[half] + __shfl_xor_sync(kAllLanes, parts[half], 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (warp_lane() % 4 == 0) done(warp_lane() / 4 + 8 * half, sum);
    }
}

// f(strip, first column) for all 16 `across` columns of a part of the values: at once if it is as wide as can be, else 16 at a time.
template <int N, typename F>
__device__ __forceinline__ void each_columns(Strip<N>& all, int across, F f) {
    if (across == N / 2) return f(all, 0);
#pragma unroll
    for (int n = 0; n < N / 2 - 1; ++n)
        if (n < across) f(all.template part<2>(2 * n), 16 * n);
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
__device__ __forceinline__ void copy_writes(const Rows<U, kSide>& to, const Slice<F>& slice, const Place& at,
                                            const Sequence& v, const Sizes& sizes, int value, int values) {
    if constexpr (Corrects)
        copy_pieces<Threads>(to, slice.rows_of(slice.updates, at.local, at.n) + value * kSide, kSide, values, values,
                             kSide);
    else
        copy_steps<Threads>(to, Head<U>(v, at.batch, at.head, value, sizes.value_dim), at.start, sizes.time);
}

// What a chunk's local stage left by step, in shared memory; without gates there is nothing but beta.
template <bool Gated>
struct FoundSteps {
    float* numbers;

    FoundSteps() = default;
    __host__ __device__ explicit FoundSteps(Carver& carver)
        : numbers(carver.take<float>(Gated ? kGateNumbers : kSide)) {}
    // Starts to copy them.
    __device__ __forceinline__ void copy(const float* from) const {
        for (int i = 4 * threadIdx.x; i < (Gated ? kGateNumbers : kSide); i += 4 * kStripThreads)
            copy_async<16>(numbers + i, from + i);
    }
    __device__ __forceinline__ float beta(int t) const { return numbers[kBeta + t]; }
    __device__ __forceinline__ float from_start(int t) const { return Gated ? numbers[kFromStart + t] : 1.0f; }
    __device__ __forceinline__ float to_end(int t) const { return Gated ? numbers[kToChunkEnd + t] : 1.0f; }
    __device__ __forceinline__ float whole() const { return Gated ? numbers[kWholeGate] : 1.0f; }
    __device__ __forceinline__ float strength(int s) const { return Gated ? numbers[kStrength + s] : 1.0f; }
    __device__ __forceinline__ const float* strengths() const { return numbers + kStrength; }

    // Of a strip whose columns are the steps t of block `row` / 16 and whose places are steps s: the pairs with s < t or, with
    // `Diagonal`, with s <= t, times D_ts; 0 for others.
    template <bool Diagonal>
    __device__ __forceinline__ void keep_pairs(Strip<kSide / 8>& pairs, int row) const {
        const int group = warp_lane() / 4, member = warp_lane() % 4, last = row / kGateBlock;
        if constexpr (!Gated) {
            pairs.each([&](int s, int j, float& x) { x = s + !Diagonal <= row + j ? x : 0.0f; });
            return;
        }
        float from_block[2], middle = 1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) from_block[half] = numbers[kFromBlock + row + group + 8 * half];
#pragma unroll
        for (int block = kBlocks - 1; block >= 0; --block) {
            if (block < last - 1) middle *= numbers[kOfBlock + block + 1];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int s = 8 * part + 2 * member;
                float (&value)[4] = pairs.value[2 * block + part];
                if (block > last) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) value[i] = 0.0f;
                } else if (block == last) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int t = group + 8 * half;
                        const float2 gates =
                            *reinterpret_cast<const float2*>(numbers + kWithin + (row + t) * kWithinRow + s);
                        value[2 * half] = s + !Diagonal <= t ? value[2 * half] * gates.x : 0.0f;
                        value[2 * half + 1] = s + 1 + !Diagonal <= t ? value[2 * half + 1] * gates.y : 0.0f;
                    }
                } else {
                    const float2 to_end =
                        *reinterpret_cast<const float2*>(numbers + kToBlockEnd + block * kGateBlock + s);
                    const float x = to_end.x * middle, y = to_end.y * middle;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        value[2 * half] *= x * from_block[half];
                        value[2 * half + 1] *= y * from_block[half];
                    }
                }
            }
        }
    }
};

// Sums by step of what the gates let through, in shared memory. The gradient of log g_u collects whatever passes through step u:
// what was written before it and is read at or after it,
//   sum over s < u <= t of P_ts <dy_t, v_s> (with the delta rule of P_ts dP_ts and G_ts (B dA)_ts, in the notation of system.cuh),
// and likewise writes before the chunk and reads after it, and D <S_0, dS>: sums of products over a range, without a subtraction,
// which keeps it exact where gates are so strong that it almost vanishes. Where w = 1 - g, it loses g <k_u, (dK / w)_u>.
struct GateSums {
    float* sums;

    GateSums() = default;
    __host__ __device__ explicit GateSums(Carver& carver) : sums(carver.take<float>((kBlocks + 3) * kSide + kBlocks)) {}
    __device__ __forceinline__ float* inside(int warp) const { return sums + warp * kSide; }
    __device__ __forceinline__ float* read() const { return sums + kBlocks * kSide; }
    __device__ __forceinline__ float* written() const { return read() + kSide; }
    __device__ __forceinline__ float* strength() const { return written() + kSide; }
    __device__ __forceinline__ float* passing() const { return strength() + kSide; }  // by warp: <S_0, dS>

    // For each step u of the chunk the sum over s < u <= t of pairs (t, s), of this warp's steps t, from `row` on. Of a row the
    // sums over s < u are found from place to place, and then those of all rows with t >= u added.
    __device__ __forceinline__ void add_inside(const Strip<kSide / 8>& pairs, int row) const {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
        float before[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < kSide / 8; ++n) {
            float first = 0.0f, second = 0.0f;
            const int u = 8 * n + 2 * member;
            if (8 * n < row + kTileRows) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float x = pairs.value[n][2 * half], pair = x + pairs.value[n][2 * half + 1];
                    const float other = __shfl_xor_sync(kAllLanes, pair, 1), two = pair + other;
                    const float others = __shfl_xor_sync(kAllLanes, two, 2);
                    const float sum = before[half] + ((member & 2) ? others : 0.0f) + ((member & 1) ? other : 0.0f);
                    before[half] += two + others;
                    const int t = row + group + 8 * half;
                    if (u <= t) first += sum;
                    if (u < t) second += sum + x;
                }
#pragma unroll
                for (int distance = 4; distance < kWarp; distance *= 2) {
                    first += __shfl_xor_sync(kAllLanes, first, distance);
                    second += __shfl_xor_sync(kAllLanes, second, distance);
                }
            }
            if (group == 0) *reinterpret_cast<float2*>(inside(row / kTileRows) + u) = make_float2(first, second);
        }
    }

    // This warp's part of <S_0, dS>, from this thread's.
    __device__ __forceinline__ void put_passing(float sum) const {
        for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        if (warp_lane() == 0) passing()[threadIdx.x / kWarp] = sum;
    }

    // After a barrier: the gradient of the log gate of step u, but for what its write loses.
    __device__ __forceinline__ float of(int u, float whole) const {
        float sum = 0.0f, passed = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kBlocks; ++warp) sum += inside(warp)[u], passed += passing()[warp];
#pragma unroll 8
        for (int step = 0; step < kSide; ++step) sum += (step >= u ? read() : written())[step];
        return sum + passed * whole;
    }
};

}  // namespace fairseq_fastweights
