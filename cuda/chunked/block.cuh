// Code that the blocks of all chunked kernels share: their shared memory, and rows of sequences on their way to it and back.
//
// Rows past the sequence's end and columns past a dimension's are zeros in shared memory: a key of 0 writes nothing.
#pragma once

#include "plan.h"
#include "products.cuh"

namespace fairseq_fastweights {

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

// Matrices of one shape, one after another.
template <typename T>
struct Stages {
    Matrix<T> first;
    int distance;

    Stages() = default;
    __host__ __device__ Stages(Carver& carver, int stages, int rows, int columns) {
        first = carver.matrix<T>(stages * rows, columns);
        distance = rows * first.stride;
    }
    __device__ __forceinline__ Matrix<T> operator[](int stage) const {
        return Matrix<T>{first.data + stage * distance, first.stride};
    }
};

// A float32 matrix for products to read where rounding it would not do: as factors, or where these are rounded as the
// sum of two, big + small, which leaves out 2^-17 of it. Not if it does not `Split`.
template <typename T, bool Split = true>
struct SplitMatrix {
    static constexpr bool kSplit = Split && kRounded<T>;
    Stages<Factor<T>> parts;

    SplitMatrix() = default;
    __host__ __device__ SplitMatrix(Carver& carver, int rows, int columns)
        : parts(carver, kSplit ? 2 : 1, rows, columns) {}

    __device__ __forceinline__ void write(Tile tile) const {
        write_tile(tile, parts[0]);
        if constexpr (kSplit) {
            tile.each([](int, int, float& value) { value -= widen<float>(narrow<Factor<T>>(value)); });
            write_tile(tile, parts[1]);
        }
    }

    __device__ __forceinline__ float get(int row, int column) const {
        float x = parts[0].get(row, column);
        if constexpr (kSplit) x += parts[1].get(row, column);
        return x;
    }

    // tile += a b, a this or its transpose, b as it is stored or its transpose.
    template <int Passes, bool Transpose, bool TransposeRight, typename Right>
    __device__ __forceinline__ void multiply(Tile& tile, int begin, int end, const Matrix<Right>& right) const {
        multiply_stored<Passes, Transpose, TransposeRight>(tile, begin, end, parts[0], right);
        if constexpr (kSplit) multiply_stored<Passes, Transpose, TransposeRight>(tile, begin, end, parts[1], right);
    }
};

// A thread's places in rows of `width`, as many threads apart as a block has: for (Walk at(width); at.row < rows;
// at.next()). Two divisions in all.
struct Walk {
    int row, column, width, rows_on, columns_on;

    __device__ __forceinline__ explicit Walk(int width) : Walk(width, threadIdx.x, blockDim.x) {}
    __device__ __forceinline__ Walk(int width, int thread, int threads)
        : row(thread / width), column(thread - row * width), width(width), rows_on(threads / width),
          columns_on(threads - rows_on * width) {}

    __device__ __forceinline__ void next() {
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

    __device__ __forceinline__ Head(const Sequence& x, int batch, int head, int column, int dim)
        : data(static_cast<T*>(x.data) + batch * x.batch + head * x.head + column), stride(x.time), dim(dim - column) {}
    __device__ __forceinline__ Head(T* data, int64_t stride, int dim) : data(data), stride(stride), dim(dim) {}

    // True if `columns` of its rows are whole pieces of 16 bytes, but for those beyond its end.
    __device__ __forceinline__ bool in_pieces(int columns) const {
        constexpr int kPiece = 16 / sizeof(T);
        return (reinterpret_cast<uintptr_t>(data) | stride * sizeof(T)) % 16 == 0 &&
               (dim % kPiece == 0 || dim >= columns);
    }
};

// Starts to copy a piece of 16 bytes; zeros if it is not there.
template <typename T>
__device__ __forceinline__ void copy_piece(T* to, const T* from, bool there) {
    copy_or_clear(to, from, there);
}
// Copies `rows` steps from `start` on, that are not in pieces, to shared memory; zeros where the tensor ends.
template <typename To, typename T>
__device__ __forceinline__ void copy_elements(const To& to, const Head<T>& from, int rows, Walk at, int start,
                                              int time) {
#pragma unroll 1
    for (; at.row < rows; at.next()) {
        const int row = at.row, column = at.column;
        to(row, column) =
            start + row < time && column < from.dim ? from.data[(start + row) * from.stride + column] : narrow<T>(0.0f);
    }
}

// The value of a (batch, time, heads) tensor at step t; 0 past its end, 1 where there is no tensor.
__device__ __forceinline__ float load_step(const Sequence& x, int batch, int head, int t, int time) {
    if (t >= time) return 0.0f;
    if (x.data == nullptr) return 1.0f;
    return load_element<float>(x.data, x.dtype, batch * x.batch + t * x.time + head * x.head);
}

// Writes a tile's elements, rows counting from step `start`.
template <typename T>
__device__ __forceinline__ void store_tile(Tile& tile, const Head<T>& to, int start, int time) {
    const bool paired = (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(T)) % (2 * sizeof(T)) == 0;
    if (paired && start + tile.row + kTileRows <= time && tile.column + 8 * tile.parts <= to.dim) {
        T* const first = to.data + (start + tile.row + warp_lane() / 4) * to.stride + tile.column + warp_lane() % 4 * 2;
        tile.each_part([&](int j) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                put_pair(first + half * 8 * to.stride + 8 * j, tile.value[j][2 * half], tile.value[j][2 * half + 1]);
        });
        return;
    }
    tile.each([&](int row, int column, float& value) {
        if (start + row < time && column < to.dim) to.data[(start + row) * to.stride + column] = narrow<T>(value);
    });
}

// Writes `rows` steps from `start` on, `columns` wide, from shared memory.
template <typename To, typename From>
__device__ __forceinline__ void store_rows(const Head<To>& to, const Matrix<From>& from, int rows, int columns,
                                           int start, int time) {
    constexpr int kPiece = 16 / sizeof(To);
    const bool aligned = (reinterpret_cast<uintptr_t>(to.data) | to.stride * sizeof(To)) % 16 == 0 &&
                         (to.dim % kPiece == 0 || to.dim >= columns);
    if (aligned) {
#pragma unroll 1
        for (Walk at(columns / kPiece); at.row < rows; at.next()) {
            const int row = at.row, column = at.column * kPiece;
            if (start + row >= time || column >= to.dim) continue;
            const auto word = [&](int i) {
                if constexpr (sizeof(To) == 4)
                    return __float_as_uint(from.get(row, column + i));
                else
                    return narrow_pair<To>(from.get(row, column + 2 * i), from.get(row, column + 2 * i + 1)).bits();
            };
            *reinterpret_cast<uint4*>(to.data + (start + row) * to.stride + column) =
                make_uint4(word(0), word(1), word(2), word(3));
        }
    } else {
#pragma unroll 1
        for (Walk at(columns); at.row < rows; at.next()) {
            const int row = at.row, column = at.column;
            if (start + row < time && column < to.dim)
                to.data[(start + row) * to.stride + column] = narrow<To>(from.get(row, column));
        }
    }
}

// Writes a number of a (batch, time, heads) tensor, whose dtype is known at run time only.
__device__ __forceinline__ void store_step(const Sequence& x, int batch, int head, int t, float value) {
    store_element(x.data, x.dtype, batch * x.batch + t * x.time + head * x.head, value);
}

}  // namespace fairseq_fastweights
