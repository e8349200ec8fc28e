// Code that the blocks of all chunked kernels share: their shared memory, and rows of sequences on their way to it and back.
//
// Rows past the sequence's end and columns past a dimension's are zeros in shared memory: a key of 0 writes nothing.
#pragma once

#include "plan.h"
#include "tensor_core.cuh"

namespace fairseq_fastweights {

// Rows of `stride` elements.
template <typename T>
struct Matrix {
    using Element = T;
    T* data;
    int stride;
    DEVICE T& operator()(int row, int column) const { return data[row * stride + column]; }
    DEVICE float get(int row, int column) const { return widen<float>(data[row * stride + column]); }
    DEVICE Matrix from(int row, int column) const { return {&(*this)(row, column), stride}; }
};

// Takes shared memory apart, in pieces aligned to 16 bytes; with a null base it counts what is needed.
struct Carver {
    unsigned char* base;
    int used;  // bytes; of a size_t kernels would keep both halves in registers
    __host__ __device__ explicit Carver(unsigned char* base) : base(base), used(0) {}

    template <typename T>
    __host__ __device__ T* take(int count) {
#ifdef __CUDA_ARCH__
        T* piece = reinterpret_cast<T*>(base + used);  // without a doubt: the compiler sees that it is shared memory
#else
        T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
#endif
        used += (count * static_cast<int>(sizeof(T)) + 15) & ~15;
        return piece;
    }

    // A matrix whose rows are 16 bytes longer than its columns: rows start in different banks, aligned for ldmatrix.
    // Rows that are `longer` by 8 floats are for floats of which a warp reads 4 rows of 8 columns, or pairs, at once.
    template <typename T>
    __host__ __device__ Matrix<T> matrix(int rows, int columns, int longer = 16 / static_cast<int>(sizeof(T))) {
        const int stride = columns + longer;
        return Matrix<T>{take<T>(rows * stride), stride};
    }
};

// A thread's places in rows of `width`, as many threads apart as a block has: for (Walk at(width); at.row < rows;
// at.next()). Two divisions in all.
struct Walk {
    int row, column, width, rows_on, columns_on;

    DEVICE explicit Walk(int width, int thread = threadIdx.x, int threads = blockDim.x)
        : row(thread / width), column(thread - row * width), width(width), rows_on(threads / width),
          columns_on(threads - rows_on * width) {}

    DEVICE void next() {
        row += rows_on;
        column += columns_on;
        if (column >= width) {
            column -= width;
            ++row;
        }
    }
};

// ---- Rows of sequences -------------------------------------------------------------------------------------------

// One head of a (batch, time, heads, dim) tensor, from a column on. `dim` counts the columns left.
template <typename T>
struct Head {
    T* data;
    int64_t stride;  // of time
    int dim;

    DEVICE Head(const Sequence& x, int batch, int head, int column, int dim)
        : data(static_cast<T*>(x.data) + batch * x.batch + head * x.head + column), stride(x.time), dim(dim - column) {}
    DEVICE Head(T* data, int64_t stride, int dim) : data(data), stride(stride), dim(dim) {}

    // True if `columns` of its rows are whole pieces of 16 bytes, but for those beyond its end.
    DEVICE bool in_pieces(int columns) const {
        constexpr int kPiece = 16 / sizeof(T);
        return (reinterpret_cast<uintptr_t>(data) | stride * sizeof(T)) % 16 == 0 &&
               (dim % kPiece == 0 || dim >= columns);
    }
};

// Copies `rows` steps from `start` on, that are not in pieces, to shared memory; zeros where the tensor ends.
template <typename To, typename T>
DEVICE void copy_elements(const To& to, const Head<T>& from, int rows, Walk at, int start, int time) {
#pragma unroll 1
    for (; at.row < rows; at.next()) {
        const int row = at.row, column = at.column;
        to(row, column) =
            start + row < time && column < from.dim ? from.data[(start + row) * from.stride + column] : narrow<T>(0.0f);
    }
}

// The value of a (batch, time, heads) tensor at step t; 0 past its end, 1 where there is no tensor.
DEVICE float load_step(const Sequence& x, int batch, int head, int t, int time) {
    if (t >= time) return 0.0f;
    if (x.data == nullptr) return 1.0f;
    return load_element<float>(x.data, x.dtype, batch * x.batch + t * x.time + head * x.head);
}

// Writes a number of a (batch, time, heads) tensor, whose dtype is known at run time only.
DEVICE void store_step(const Sequence& x, int batch, int head, int t, float value) {
    store_element(x.data, x.dtype, batch * x.batch + t * x.time + head * x.head, value);
}

}  // namespace fairseq_fastweights
