// Code of the stages that take all chunks at once: a block is a chunk of a head, each of its four warps has 16 of its steps,
// and what a warp finds of their pairs stays in its registers (fragments.cuh). Distances in shared memory are known to the compiler.
#pragma once

#include "gates.cuh"

namespace fairseq_fastweights {

constexpr int kChunkThreads = kChunk / kMmaRows * kWarp;

// The first of this warp's steps: lanes have the same number, as the compiler sees so.
DEVICE int first_own_step() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0) * kMmaRows; }

// f(an integral_constant) with the widest part of the keys that a block takes at once, in units of 16: 1, 2 or 4.
template <typename Function>
auto with_width(int keys, Function f) {
    if (keys <= 16) return f(std::integral_constant<int, 1>());
    if (keys <= 32) return f(std::integral_constant<int, 2>());
    return f(std::integral_constant<int, 4>());
}

// Up to kChunk rows in shared memory; of 32 bits they are `Longer` than columns. Columns of pieces have such gaps that what eight lanes
// copy lies in different banks.
template <typename T, int Columns, int Longer = 4>
struct Rows : MmaMatrix<T, sizeof(T) == 4 ? Columns + Longer : 8 * kChunk + 8 * 64 / Columns> {
    static constexpr int kColumns = Columns;

    Rows() = default;
    __host__ __device__ Rows(SharedAllocator& allocator, int rows) {
        this->data = allocator.take<T>((sizeof(T) == 4 ? rows : (rows > 0) * Columns / 8) * this->stride());
    }
};

// Starts to copy up to `rows` rows, kChunk at most, `stride` numbers apart, of which so many are there, and so many of their columns;
// zeros for others.
template <typename T, int Columns, typename Stride>
DEVICE void copy_aligned(const Rows<T, Columns>& to, const T* from, Stride stride, int rows, int rows_there,
                         int columns_there) {
    constexpr int kPack = 16 / sizeof(T), kAcross = Columns / kPack, kDown = kChunkThreads / kAcross;
    const int column = threadIdx.x % kAcross * kPack, first = threadIdx.x / kAcross;
    const int there = column < columns_there ? rows_there - first : 0;
    const T* piece = from + first * stride + column;
    T* const place = &to(first, column);
    UNROLL_FOR (int row = 0; row < kChunk; row += kDown, piece += kDown * stride)
        if ((rows == kChunk && kDown <= kChunk) || first + row < rows)
            copy_or_clear(place + (&to(row, 0) - to.data), piece, row < there);
}

// Waits for all copies of all threads, but for the last `Behind` groups.
template <int Behind = 0>
DEVICE void arrive() {
    if (Behind == 0) copies_commit();
    copies_wait<Behind>();
    if (has_wgmma()) fence_async_proxy();
    __syncthreads();
}

// use(first) for each `part` of `all` keys or values once it is there. The first is on its way, with `Behind` groups of copies begun
// after it, others copy(first) starts to copy.
template <int Behind, typename Copy, typename Use>
DEVICE void each_part(int all, int part, Copy copy, Use use) {
    for (int first = 0; first < all; first += part) {
        if (first > 0) {
            __syncthreads();
            copy(first);
            arrive();
        } else {
            arrive<Behind>();
        }
        use(first);
    }
}

// sums += left right, where 16 rows of the left factor, from `row` on, this warp's own, are in shared memory as well, over 16 `blocks`
// inner places; of a `Turned` left factor places are (inner, row).
template <int Passes, bool Transposed, bool RowsInner, bool Split = false, int N, typename Left, typename Right>
DEVICE void multiply_rows(Fragment<N>& sums, const Left& left, int row, const Right& right, int blocks) {
    using A = typename Left::Element;
    using B = typename Right::Element;
    if constexpr (sizeof(A) == 2 && sizeof(B) == 2 && N % 8 == 0)
        if (has_wgmma()) {
            start_wgmma<RowsInner, Transposed, kChunk / 16>(
                sums, right, blocks, 1, [&](int e, int) { return left.template descriptor<Transposed>(16 * e, 0); });
            return finish(true, sums);
        }
    // Lane l names row l % 8 of the 8 x 8 matrix l / 8.
    const int lane = warp_lane(), matrix_row = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
#pragma unroll(kIn16Bits<Fragment<2, A>, B> ? kChunk / 16 : 1)
    for (int e = 0; e < kChunk / 16; ++e) {
        if (e >= blocks) break;
        const auto own = Transposed ? left.from(16 * e, row) : left.from(row, 16 * e);
        Fragment<2, A> part;
        if constexpr (sizeof(A) == 2)
            load_matrices<Transposed>(part.value[0],
                                      Transposed ? &own(third + matrix_row, second) : &own(second + matrix_row, third));
        else
            part.each([&](int place, int j, float& x) { x = Transposed ? own(place, j) : own(j, place); });
        multiply<Passes, RowsInner, Split>(false, sums, part,
                                           RowsInner ? right.from(16 * e, 0) : right.from(0, 16 * e));
    }
}

// This lane's part of numbers of two steps, its fragment's columns: of each half of the 16.
using PerStep = float[2];
// The sums of the parts, handed to one lane for each step: done(column, sum).
template <typename Function>
DEVICE void sum_steps(const PerStep& parts, Function done) {
    UNROLL_FOR (int half = 0; half < 2; ++half) {
        float sum = parts[half] + __shfl_xor_sync(kAllLanes, parts[half], 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (warp_lane() % 4 == 0) done(warp_lane() / 4 + 8 * half, sum);
    }
}

// f(fragment, first column) for all 16 `across` columns of a part of the values: at once if it is as wide as can be, else 16 at a time.
template <int N, typename Function>
DEVICE void each_columns(Fragment<N>& all, int across, Function f) {
    if (across == N / 2) return f(all, 0);
    UNROLL_FOR (int n = 0; n < N / 2 - 1; ++n)
        if (n < across) f(all.template part<2>(2 * n), 16 * n);
}

// The writes of a chunk's steps, for a part of the values: U of the delta rule, transposed, which the walk found; else V.
template <typename T, bool IsDelta>
using UpdateRows = Rows<std::conditional_t<IsDelta, Computed<T>, T>, kChunk>;

// The chunk of a head that a block has: `local` counts the slice's heads, `start` is the chunk's first step. Its functions
// start to copy from a key and a value on.
template <typename C>
struct ChunkCoord {
    const Slice<C>& slice;
    const Sizes& sizes;
    int local, n, batch, head, start;
    bool
        recompute_addresses;  // addresses of sequences are found each time: they take instructions, and no registers meanwhile

    DEVICE ChunkCoord(const Slice<C>& slice, const Sizes& sizes, bool recompute_addresses = false)
        : slice(slice), sizes(sizes), local(blockIdx.x), n(slice.begin + blockIdx.y),
          batch((slice.first_head + local) / sizes.heads), head((slice.first_head + local) % sizes.heads),
          start(n * kChunk), recompute_addresses(recompute_addresses) {}

    template <typename T>
    DEVICE Head<T> part_of(const Sequence& x, int first, int dim) const {
        return Head<T>(x, recompute_addresses ? opaque(batch) : batch, recompute_addresses ? opaque(head) : head, first,
                       dim);
    }
    template <typename T, int Columns>
    DEVICE void copy(const Rows<T, Columns>& to, const Sequence& x, int first, int dim) const {
        const Head<T> from = part_of<T>(x, first, dim);
        if (!from.is_aligned(Columns)) return copy_elements<Columns>(to, from, kChunk, start, sizes.time);
        copy_aligned(to, from.data + start * from.stride, from.stride, kChunk, sizes.time - start, from.dim);
    }
    // Rows that the walk left, one of the chunk's steps for each value.
    DEVICE void copy_transposed(const Rows<C, kChunk>& to, C* all, int value, int values) const {
        copy_aligned(to, slice.rows_of(all, local, n) + value * kChunk, kChunk, values, values, kChunk);
    }
    template <bool IsDelta, typename U>
    DEVICE void copy_updates(const Rows<U, kChunk>& to, const Sequence& v, int value, int values) const {
        if constexpr (IsDelta)
            copy_transposed(to, slice.updates, value, values);
        else
            copy(to, v, value, sizes.value_dim);
    }
    // Rows of a state, of keys for each value or, `Turned`, of values for each key.
    template <bool Transposed = false, int Columns>
    DEVICE void copy_state(const Rows<C, Columns>& to, C* all, int key, int value, int rows) const {
        const int down = Transposed ? key : value, across = Transposed ? value : key;
        const int height = Transposed ? slice.key_rows : slice.columns,
                  width = Transposed ? slice.columns : slice.key_rows;
        copy_aligned(to, slice.state_of(all, local, n) + down * width + across, width, rows, height - down,
                     width - across);
    }
};

}  // namespace fairseq_fastweights
