// Code of the chunk-parallel kernels (intra_chunk.cu, outputs.cu, gradients.cu): a block computes a chunk of a head,
// each of its four warps 16 of the chunk's steps, and the pairs of these steps stay in the warp's registers
// (fragments.cuh). Strides of shared memory are compile-time constants.
#pragma once

#include "gates.cuh"

namespace fairseq_fastweights {

constexpr int kChunkThreads = kChunk / kMmaRows * kWarp;

// The first of this warp's steps. The shuffle tells the compiler that it is the same in all lanes.
DEVICE int first_own_step() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarp, 0) * kMmaRows; }

// f(an integral_constant) with the number of 16-key tiles that a block takes at once: 1, 2 or 4.
template <typename Function>
auto with_width(int keys, Function f) {
    if (keys <= 16) return f(std::integral_constant<int, 1>());
    if (keys <= 32) return f(std::integral_constant<int, 2>());
    return f(std::integral_constant<int, 4>());
}

// Up to kChunk rows in shared memory, of float32 with `Longer` numbers of padding. In core matrices the columns are
// padded so that eight lanes copy to different banks.
template <typename T, int Columns, int Longer = 4>
struct Rows : MmaMatrix<T, sizeof(T) == 4 ? Columns + Longer : 8 * kChunk + 8 * 64 / Columns> {
    static constexpr int kColumns = Columns;

    Rows() = default;
    __host__ __device__ Rows(SharedAllocator& allocator, int rows) {
        this->data = allocator.take<T>((sizeof(T) == 4 ? rows : (rows > 0) * Columns / 8) * this->stride());
    }
};

// Starts to copy up to `rows` rows, kChunk at most, that are `stride` numbers apart; zeros beyond `rows_there` and
// `columns_there`.
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

// Waits for all copies of all threads but the last `Behind` commit groups, and lets wgmma see them.
template <int Behind = 0>
DEVICE void arrive() {
    if (Behind == 0) copies_commit();
    copies_wait<Behind>();
    if (has_wgmma()) fence_async_proxy();
    __syncthreads();
}

// use(first) for each `part` of `all` keys or values, once it has arrived. The copies of the first part were started
// before, with `Behind` commit groups after them; copy(first) starts those of the others.
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

// sums += left right, with this warp's 16 rows of the left factor, from `row` on, in shared memory too, over 16
// `blocks` inner indices. A `Transposed` left factor is stored as (inner, row).
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

// This lane's partial sums of two steps, rows r and r + 8 of its fragment.
using PerStep = float[2];
// The sums over lanes, handed to one lane for each step: done(column, sum).
template <typename Function>
DEVICE void sum_steps(const PerStep& parts, Function done) {
    UNROLL_FOR (int half = 0; half < 2; ++half) {
        float sum = parts[half] + __shfl_xor_sync(kAllLanes, parts[half], 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (warp_lane() % 4 == 0) done(warp_lane() / 4 + 8 * half, sum);
    }
}

// f(fragment, first column) for all 16 `across` columns of a part of the values: at once if the part has its full
// width, else 16 at a time.
template <int N, typename Function>
DEVICE void each_columns(Fragment<N>& all, int across, Function f) {
    if (across == N / 2) return f(all, 0);
    UNROLL_FOR (int n = 0; n < N / 2 - 1; ++n)
        if (n < across) f(all.template part<2>(2 * n), 16 * n);
}

// The updates of a chunk's steps for a part of the values: U of delta rules, transposed, from state passing; else V.
template <typename T, bool IsDelta>
using UpdateRows = Rows<std::conditional_t<IsDelta, Computed<T>, T>, kChunk>;

// The chunk of a head that a block computes: `local` counts the slice's heads, `start` is the chunk's first step. Its
// methods start copies from a key and a value on.
template <typename C>
struct ChunkCoord {
    const Slice<C>& slice;
    const Sizes& sizes;
    int local, n, batch, head, start;
    bool recompute_addresses;  // addresses are computed at each use: more instructions, fewer registers

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
    // Rows that state passing stored, of the chunk's steps for each value.
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
    // Rows of a state, of keys for each value or, `Transposed`, of values for each key.
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
