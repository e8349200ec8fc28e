// Products of matrices in shared memory on tensor cores, a warp at a time.
//
// A warp computes a tile of 16 rows and up to 32 columns. Where the elements of A and B come from is a pair of
// functions, a(row, inner) and b(inner, column): a product may transpose, scale or mask its operands as it loads them.
// They return float, or an element of a 16-bit type as it is stored. The multiplications are m16n8k8 in tf32 (8 bits of
// exponent, 10 of fraction, float32 accumulators):
//
//   Passes = 1  For float16 and bfloat16 inputs, both of which tf32 holds exactly.
//   Passes = 3  For float32. Each operand is a sum of two tf32 numbers, big + small; big * big + big * small +
//               small * big leaves out 2^-21 of a product.
//
// `multiply_stored` is the product of two matrices as they are stored. Where both are of the same 16-bit type it is exact
// as well, at the full rate (m16n8k16), its operands loaded by ldmatrix: half the reads of shared memory, and a sixth of
// the instructions.
#pragma once

#include <cstddef>

#include "tensor_core.cuh"

namespace fairseq_fastweights {

constexpr int kTileRows = 16;
constexpr int kTileColumns = 32;
constexpr int kTileParts = kTileColumns / 8;

// An accumulator. `parts` says how many of the tile's groups of 8 columns the matrix has, all or half of them; it is the
// same in all lanes.
struct Tile {
    float value[kTileParts][4];
    int row, column, parts;  // the tile's place in the matrix

    __device__ __forceinline__ Tile(int row, int column, int columns)
        : row(row), column(column), parts(columns - column >= kTileColumns ? kTileParts : kTileParts / 2) {
#pragma unroll
        for (int j = 0; j < kTileParts; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) value[j][i] = 0.0f;
    }

    // f(j) for the groups of 8 columns that there are.
    template <typename F>
    __device__ __forceinline__ void each_part(F f) {
#pragma unroll
        for (int j = 0; j < kTileParts / 2; ++j) f(j);
        if (parts == kTileParts) {
#pragma unroll
            for (int j = kTileParts / 2; j < kTileParts; ++j) f(j);
        }
    }

    // f(row, column, float& value) for each of this lane's elements, with their places in the matrix.
    template <typename F>
    __device__ __forceinline__ void each(F f) {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
        each_part([&](int j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) f(row + group + i / 2 * 8, column + 8 * j + 2 * member + i % 2, value[j][i]);
        });
    }

    // f(row, column, float& value, float& other) with the elements of another tile of the same place.
    template <typename F>
    __device__ __forceinline__ void each_with(Tile& other, F f) {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
        each_part([&](int j) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                f(row + group + i / 2 * 8, column + 8 * j + 2 * member + i % 2, value[j][i], other.value[j][i]);
        });
    }

    // f(row, first column, float& x, float& y) for each of this lane's pairs of neighbouring elements.
    template <typename F>
    __device__ __forceinline__ void each_pair(F f) {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
        each_part([&](int j) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                f(row + group + 8 * half, column + 8 * j + 2 * member, value[j][2 * half], value[j][2 * half + 1]);
        });
    }
};

template <int Passes>
struct Operand;
template <>
struct Operand<1> {
    unsigned big;
    template <typename T>
    __device__ __forceinline__ explicit Operand(T x) {
        if constexpr (sizeof(T) == 2)
            big = __float_as_uint(widen<float>(x));  // which tf32 holds exactly
        else
            big = to_tf32(x);
    }
};
template <>
struct Operand<3> {
    unsigned big, small;
    // `big` to nearest, as to_tf32 rounds finite numbers, in two instructions instead of four; `small` cut off where tensor
    // cores ignore the bits, in none. A NaN may become 0 in `big`; the rest of it is a NaN still, and so is every product
    // with that.
    __device__ __forceinline__ explicit Operand(float x) {
        big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
        small = __float_as_uint(x - __uint_as_float(big));
    }
};

// tile += a b over the 8 inner places from `inner` on, for a tile of `Parts` groups of 8 columns: known to the compiler, so
// that all operands are on their way before the first is waited for.
//
// Tensor cores cut off what an accumulator has no room for, towards zero: errors of one sign, which would add up over a
// sum of thousands. In float32 (3 passes) each 8 places are summed from zero and added by an ordinary addition, which
// rounds to the nearest (Ootomo and Yokota 2022); it is never contracted to a multiply-add, so that all kernels that
// compute a state compute the same bits.
template <int Passes, int Parts, typename A, typename B>
__device__ __forceinline__ void multiply_eight(Tile& tile, int inner, A a, B b) {
    const int group = warp_lane() / 4, member = warp_lane() % 4;
    const int row = tile.row + group, column = tile.column + group;
    unsigned a_big[4], a_small[4], b_big[Parts][2], b_small[Parts][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Operand<Passes> x(a(row + i % 2 * 8, inner + member + i / 2 * 4));
        a_big[i] = x.big;
        if constexpr (Passes == 3) a_small[i] = x.small;
    }
#pragma unroll
    for (int j = 0; j < Parts; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Operand<Passes> x(b(inner + member + 4 * i, column + 8 * j));
            b_big[j][i] = x.big;
            if constexpr (Passes == 3) b_small[j][i] = x.small;
        }
    if constexpr (Passes == 3) {
#pragma unroll
        for (int first = 0; first < Parts; first += 2) {  // two at a time: all would hold 16 registers
            float sums[2][4] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j) mma_tf32(sums[j], a_small, b_big[first + j]);
#pragma unroll
            for (int j = 0; j < 2; ++j) mma_tf32(sums[j], a_big, b_small[first + j]);
#pragma unroll
            for (int j = 0; j < 2; ++j) mma_tf32(sums[j], a_big, b_big[first + j]);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) tile.value[first + j][i] = __fadd_rn(tile.value[first + j][i], sums[j][i]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < Parts; ++j) mma_tf32(tile.value[j], a_big, b_big[j]);
    }
}

// tile += a b over `begin` <= inner < `end`, both multiples of 8.
template <int Passes, typename A, typename B>
__device__ __forceinline__ void multiply(Tile& tile, int begin, int end, A a, B b) {
    if (tile.parts == kTileParts) {
#pragma unroll 1
        for (int inner = begin; inner < end; inner += 8) multiply_eight<Passes, kTileParts>(tile, inner, a, b);
    } else {
#pragma unroll 1
        for (int inner = begin; inner < end; inner += 8) multiply_eight<Passes, kTileParts / 2>(tile, inner, a, b);
    }
}

// Four accumulators of a lane, (rows, 8 columns) of a warp, as the left factor of another product. They stay where they are:
// the 8 inner places are taken in the order 0, 2, 4, 6, 1, 3, 5, 7, in which a lane's two of the right factor are neighbours.
template <int Passes>
struct KeptFactor {
    unsigned big[4], small[4];

    __device__ __forceinline__ explicit KeptFactor(const float (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Operand<Passes> part(x[i / 2 + i % 2 * 2]);
            big[i] = part.big;
            if constexpr (Passes == 3) small[i] = part.small;
        }
    }

    // sums += this times b, of which the lane has b(2 member, group) and b(2 member + 1, group). Rounds as `multiply_eight`.
    __device__ __forceinline__ void multiply(float (&sums)[4], float first, float second) const {
        const Operand<Passes> x(first), y(second);
        const unsigned b_big[2] = {x.big, y.big};
        if constexpr (Passes == 3) {
            const unsigned b_small[2] = {x.small, y.small};
            float parts[4] = {};
            mma_tf32(parts, small, b_big);
            mma_tf32(parts, big, b_small);
            mma_tf32(parts, big, b_big);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(sums[i], parts[i]);
        } else {
            mma_tf32(sums, big, b_big);
        }
    }
    // Likewise with numbers that tf32 holds exactly.
    __device__ __forceinline__ void multiply_exact(float (&sums)[4], float first, float second) const {
        mma_tf32(sums, big, {__float_as_uint(first), __float_as_uint(second)});
    }
};

// ---- Matrices in shared memory -----------------------------------------------------------------------------------

// Rows of `stride` elements.
template <typename T>
struct Matrix {
    using Element = T;
    T* data;
    int stride;
    __device__ __forceinline__ T& operator()(int row, int column) const { return data[row * stride + column]; }
    __device__ __forceinline__ float get(int row, int column) const {
        return widen<float>(data[row * stride + column]);
    }
};

// `Count` numbers from shared memory, 16 bytes at a time where there are as many.
template <int Count>
__device__ __forceinline__ void load_row(float (&to)[Count], const float* from) {
    if constexpr (Count % 4 == 0) {
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) to[i] = from[i];
    }
}

// A tile's elements to a matrix in shared memory, two at a time.
template <typename T>
__device__ __forceinline__ void write_tile(Tile& tile, const Matrix<T>& to) {
    tile.each_pair([&](int row, int column, float x, float y) { put_pair(&to(row, column), x, y); });
}

// `multiply_stored` of a tile of `Parts` groups of 8 columns.
template <int Parts, bool TransposeLeft, bool TransposeRight, typename T>
__device__ __forceinline__ void multiply_stored_parts(Tile& tile, int begin, int end, const Matrix<T>& left,
                                                      const Matrix<T>& right) {
    // Lane l names row l % 8 of the 8 x 8 matrix l / 8. For a these are the quarters upper left, lower left, upper right,
    // lower right; for b the upper and lower half of one group of 8 columns, then of the next.
    const int lane = warp_lane(), low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
    end = opaque(end);  // counts of the loop's rounds are not kept for products of the same length
#pragma unroll 2
    for (int inner = begin; inner < end; inner += 16) {
        unsigned a[4], b[Parts / 2][4];
        load_matrices<TransposeLeft>(a, TransposeLeft ? &left(inner + third + low, tile.row + second)
                                                      : &left(tile.row + second + low, inner + third));
#pragma unroll
        for (int j = 0; j < Parts / 2; ++j) {
            const int column = tile.column + 16 * j + third;
            load_matrices<!TransposeRight>(
                b[j], TransposeRight ? &right(column + low, inner + second) : &right(inner + second + low, column));
        }
#pragma unroll
        for (int j = 0; j < Parts; ++j) mma_stored<T>(tile.value[j], a, {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
    }
}

// tile += a b over `begin` <= inner < `end`, both multiples of 16; a is `left`, or its transpose, b `right` or its own.
template <int Passes, bool TransposeLeft, bool TransposeRight, typename Left, typename Right>
__device__ __forceinline__ void multiply_stored(Tile& tile, int begin, int end, const Matrix<Left>& left,
                                                const Matrix<Right>& right) {
    if constexpr (sizeof(Left) == 2 && std::is_same<Left, Right>::value) {
        if (tile.parts == kTileParts)
            multiply_stored_parts<kTileParts, TransposeLeft, TransposeRight>(tile, begin, end, left, right);
        else
            multiply_stored_parts<kTileParts / 2, TransposeLeft, TransposeRight>(tile, begin, end, left, right);
    } else {
        multiply<Passes>(
            tile, begin, end, [&](int row, int inner) { return TransposeLeft ? left(inner, row) : left(row, inner); },
            [&](int inner, int column) { return TransposeRight ? right(column, inner) : right(inner, column); });
    }
}

}  // namespace fairseq_fastweights
