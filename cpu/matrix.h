// Products of small matrices in scratch memory.
#pragma once

#include "vector.h"

#if defined(__GNUC__) && !defined(__clang__)
// About loops that would have to run 2^60 times.
#pragma GCC diagnostic ignored "-Waggressive-loop-optimizations"
#endif

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

enum class Into { set, add, add_to_rest };

// What `Into::add_to_rest` leaves of the product's place before it adds: all of it times `whole`, its rows times `rows`
// and its columns times `columns`, where these are not null.
template <class real> struct Rest {
    real whole = 1;
    const real *rows = nullptr, *columns = nullptr;
};

// What is known to be zero in the left factor: nothing, the part above its diagonal, the part below it, or all but the
// blocks of 8 x 8 on its diagonal.
enum class Shape { full, lower, upper, blocks };

// A tile of MR rows and NV vectors, in registers. `a` is read as a[row * row_step + p * inner_step].
template <int MR, int NV, bool transposed, Into into, class real>
FAST_WEIGHTS_INLINE void tile(real* c, index_t ldc, const real* a, index_t lda, const real* b, index_t ldb,
                              index_t first, index_t last, const Rest<real>& rest) {
    constexpr int W = Vector<real>::lanes;
    vec<real> sum[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
        const real factor = rest.rows ? rest.rows[i] : rest.whole;
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) {
            sum[i][j] = into == Into::set ? vec<real>{} : load(c + i * ldc + j * W);
            if (into == Into::add_to_rest) {
                sum[i][j] *= rest.columns ? load(rest.columns + j * W) * factor : vec<real>{} + factor;
            }
        }
    }
    for (index_t p = first; p < last; ++p) {
        vec<real> row[NV];
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) row[j] = load(b + p * ldb + j * W);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const real factor = transposed ? a[p * lda + i] : a[i * lda + p];
#pragma GCC unroll 4
            for (int j = 0; j < NV; ++j) sum[i][j] += row[j] * factor;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, sum[i][j]);
    }
}

template <int MR, int NV, bool transposed, Into into, Shape shape, class real>
FAST_WEIGHTS_INLINE void tiles(index_t& i, index_t rows, index_t inner, real* c, index_t ldc, const real* a,
                               index_t lda, const real* b, index_t ldb, const Rest<real>& rest) {
    for (; i + MR <= rows; i += MR) {
        const Rest<real> here{rest.whole, rest.rows ? rest.rows + i : nullptr, rest.columns};
        const index_t first = shape == Shape::upper ? i : shape == Shape::blocks ? i / 8 * 8 : 0;
        const index_t last = shape == Shape::lower && i + MR < inner ? i + MR
                             : shape == Shape::blocks                ? first + 8
                                                                     : inner;
        tile<MR, NV, transposed, into>(c + i * ldc, ldc, a + (transposed ? i : i * lda), lda, b, ldb, first, last,
                                       here);
    }
}

// c (rows, cols) = or += a b, with a (rows, inner), or (inner, rows) if it comes transposed, and b (inner, cols).
// cols is a multiple of ROW; no other size need be.
template <bool transposed, Into into, Shape shape = Shape::full, class real>
inline void product(index_t rows, index_t cols, index_t inner, real* c, index_t ldc, const real* a, index_t lda,
                    const real* b, index_t ldb, const Rest<real>& rest = {}) {
    constexpr int W = Vector<real>::lanes;
    // As many sums as it takes to keep two multiply-add units with a latency of four busy, and no more than there are
    // registers for.
    constexpr int wide = FAST_WEIGHTS_VECTOR_BYTES == 64 ? 8 : 4;
    constexpr int narrow = FAST_WEIGHTS_VECTOR_BYTES == 64 && shape != Shape::blocks ? 16 : 8;
    index_t j = 0;
    for (; j + 2 * W <= cols; j += 2 * W) {
        index_t i = 0;
        const Rest<real> here{rest.whole, rest.rows, rest.columns ? rest.columns + j : nullptr};
        tiles<wide, 2, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        if (wide > 4) tiles<4, 2, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        tiles<1, 2, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
    }
    for (; j < cols; j += W) {
        index_t i = 0;
        const Rest<real> here{rest.whole, rest.rows, rest.columns ? rest.columns + j : nullptr};
        tiles<narrow, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        if (narrow > 8) tiles<8, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        tiles<4, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        tiles<1, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
    }
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
