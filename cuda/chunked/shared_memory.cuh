// Shared memory of the chunked kernels, and copies of sequences to it and back.
//
// Rows past the sequence's end and columns past a dimension's are zeros in shared memory: a key of 0 writes nothing.
#pragma once

#include "plan.h"
#include "tensor_core.cuh"

namespace fairseq_fastweights {

// A matrix in shared memory, row-major or `InCoreMatrices`: 8 x 8 parts of 16-bit elements, 128 bytes each, one after
// another down the rows (wgmma's layout without swizzling). Each column of core matrices is padded, so that the 16-byte
// vectors of a row lie in different banks. ldmatrix and single elements work in both layouts.
template <typename T, bool InCoreMatrices = false, int Stride = 0>
struct Matrix {
    using Element = T;
    static constexpr int kPack = 16 / sizeof(T);
    T* data;
    int distance = Stride;  // from row to row, or from one column of core matrices to the next; `Stride` if not 0
    __host__ DEVICE int stride() const { return Stride > 0 ? Stride : distance; }

    DEVICE T& operator()(int row, int column) const {
        if constexpr (InCoreMatrices) return data[column / kPack * stride() + row * kPack + column % kPack];
        return data[row * stride() + column];
    }
    DEVICE float get(int row, int column) const { return widen<float>((*this)(row, column)); }
    // From a row and a column on; in core matrices a multiple of 8.
    DEVICE Matrix from(int row, int column) const { return {&(*this)(row, column), distance}; }

    // wgmma's descriptor of 16 inner indices and the columns from `column` on. With `RowsInner` rows are the inner
    // dimension, else columns.
    template <bool RowsInner>
    DEVICE uint64_t descriptor(int inner, int column) const {
        const uint64_t eight_rows = 8, eight_columns = stride() / kPack;  // in units of 16 bytes, as all here
        const uint64_t whole = (shared_address(data) & 0x3ffff) >> 4 | (RowsInner ? eight_rows : eight_columns) << 16 |
                               (RowsInner ? eight_columns : eight_rows) << 32;
        return whole + (RowsInner ? inner + column / 8 * eight_columns : column + inner / 8 * eight_columns);
    }
};

template <typename T, int Stride = 0>
using MmaMatrix = Matrix<T, sizeof(T) == 2, Stride>;

// Hands out parts of shared memory, aligned to 16 bytes; with a null base it only counts bytes.
struct SharedAllocator {
    unsigned char* base;
    int used;  // bytes; a size_t would take two registers
    __host__ __device__ explicit SharedAllocator(unsigned char* base) : base(base), used(0) {}

    template <typename T>
    __host__ __device__ T* take(int count) {
#ifdef __CUDA_ARCH__
        T* piece = reinterpret_cast<T*>(base + used);  // never null: the compiler sees shared memory
#else
        T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
#endif
        used += (count * static_cast<int>(sizeof(T)) + 15) & ~15;
        return piece;
    }

    // A matrix in shared memory, row-major or `InCoreMatrices`: 8 x 8 parts of 16-bit elements, 128 bytes each, one
    // after another down the rows (wgmma's layout without swizzling). Each column of core matrices is padded, so that
    // the 16-byte vectors of a row lie in different banks. ldmatrix and single elements work in both layouts.
    template <typename T>
    __host__ __device__ Matrix<T> matrix(int rows, int columns, int longer = 16 / static_cast<int>(sizeof(T))) {
        return {take<T>(rows * (columns + longer)), columns + longer};
    }
    // In core matrices if elements have 16 bits: 32-bit elements read this way made registers spill.
    template <typename T>
    __host__ __device__ MmaMatrix<T> pieces(int rows, int columns) {
        if constexpr (sizeof(T) == 4) return matrix<T>(rows, columns);
        return {take<T>(columns * (rows + 1)), 8 * (rows + 1)};
    }
};

// One head of a (batch, time, heads, dim) tensor, from a column on. `dim` counts the columns left.
template <typename T>
struct Head {
    T* data;
    int64_t stride;  // of time
    int dim;

    DEVICE Head(const Sequence& x, int batch, int head, int column, int dim)
        : data(static_cast<T*>(x.data) + batch * x.batch + head * x.head + column), stride(x.time), dim(dim - column) {}
    DEVICE Head(T* data, int64_t stride, int dim) : data(data), stride(stride), dim(dim) {}

    // True if `columns` of its columns can be copied 16 bytes at a time, except those beyond its end.
    DEVICE bool is_aligned(int columns) const {
        constexpr int kPack = 16 / sizeof(T);
        return (reinterpret_cast<uintptr_t>(data) | stride * sizeof(T)) % 16 == 0 &&
               (dim % kPack == 0 || dim >= columns);
    }
};

// Copies `rows` unaligned steps from `start` on to shared memory; zeros where the tensor ends.
template <int Columns, typename To, typename T>
DEVICE void copy_elements(const To& to, const Head<T>& from, unsigned rows, int start, int time,
                          unsigned thread = threadIdx.x, unsigned threads = blockDim.x) {
#pragma unroll 1
    for (unsigned i = thread; i < rows * Columns; i += threads) {
        const int row = i / Columns, column = i % Columns;
        to(row, column) =
            start + row < time && column < from.dim ? from.data[(start + row) * from.stride + column] : narrow<T>(0.0f);
    }
}

// The value of a (batch, time, heads) tensor at step t; 0 past its end, 1 where there is no tensor.
DEVICE float load_step(const Sequence& x, int batch, int head, int t, int time) {
    if (t >= time) return 0.0f;
    if (x.data == nullptr) return 1.0f;
    return load_element<float>(x, batch * x.batch + t * x.time + head * x.head);
}

// Writes a number of a (batch, time, heads) tensor, whose dtype is known at run time only.
DEVICE void store_step(const Sequence& x, int batch, int head, int t, float value) {
    store_element(x, batch * x.batch + t * x.time + head * x.head, value);
}

}  // namespace fairseq_fastweights
