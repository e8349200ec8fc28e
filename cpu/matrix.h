// Products of small matrices in scratch memory.
#pragma once

#include "vector.h"

#if defined(__GNUC__) && !defined(__clang__)
// About loops that would have to run 2^60 times.
#pragma GCC diagnostic ignored "-Waggressive-loop-optimizations"
#endif

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

enum class Into { set, add, add_to_decayed };

// The factors of c before `Into::add_to_decayed` adds to it: all of it times `whole`, its rows times `rows` and its
// columns times `columns`, where these are not null.
template <class real> struct DecayFactors {
    real whole = 1;
    const real *rows = nullptr, *columns = nullptr;
};

// The part of the left factor that counts: all of it, its lower or its upper triangle with the diagonal, or the blocks
// of 4 x 4 (two) and of 8 x 8 (one) on its diagonal. The other elements, which may not be finite, are not read.
enum class Shape { full, lower, upper, blocks };

// To a tile's sums, the products with the part of the left factor's diagonal block, from `diagonal` on, that counts.
template <int MR, int NV, bool transposed, Shape shape, class real>
FAST_WEIGHTS_INLINE void add_triangle(vec<real> (&sum)[MR][NV], const real* a, index_t lda, const real* b, index_t ldb,
                                      index_t diagonal) {
    UNROLL_FOR (int d = 0; d < MR; ++d) {
        const index_t p = diagonal + d;
        vec<real> row[NV];
        UNROLL_FOR (int j = 0; j < NV; ++j) row[j] = load(b + p * ldb + j * Vector<real>::lanes);
        UNROLL_FOR (int i = 0; i < MR; ++i) {
            if (shape == Shape::lower ? i < d : i > d) continue;
            const real factor = transposed ? a[p * lda + i] : a[i * lda + p];
            UNROLL_FOR (int j = 0; j < NV; ++j) sum[i][j] += row[j] * factor;
        }
    }
}

// A tile of MR rows and NV vectors, in registers: the products with the inner indices from `first` to `last`, those
// from `diagonal` on being a triangle of `shape`.
template <int MR, int NV, bool transposed, Into into, Shape shape, class real>
FAST_WEIGHTS_INLINE void tile(real* c, index_t ldc, const real* a, index_t lda, const real* b, index_t ldb,
                              index_t first, index_t last, index_t diagonal, const DecayFactors<real>& factors) {
    constexpr int W = Vector<real>::lanes;
    vec<real> sum[MR][NV];
    UNROLL_FOR (int i = 0; i < MR; ++i) {
        const real factor = factors.rows ? factors.rows[i] : factors.whole;
        UNROLL_FOR (int j = 0; j < NV; ++j) {
            sum[i][j] = into == Into::set ? vec<real>{} : load(c + i * ldc + j * W);
            if (into == Into::add_to_decayed) {
                sum[i][j] *= factors.columns ? load(factors.columns + j * W) * factor : vec<real>{} + factor;
            }
        }
    }
    // In the order of the inner index, whatever the tile's size, so that a number does not depend on its neighbours.
    if (shape == Shape::upper) add_triangle<MR, NV, transposed, shape>(sum, a, lda, b, ldb, diagonal);
    for (index_t p = first; p < last; ++p) {
        vec<real> row[NV];
        UNROLL_FOR (int j = 0; j < NV; ++j) row[j] = load(b + p * ldb + j * W);
        UNROLL_FOR (int i = 0; i < MR; ++i) {
            const real factor = transposed ? a[p * lda + i] : a[i * lda + p];
            UNROLL_FOR (int j = 0; j < NV; ++j) sum[i][j] += row[j] * factor;
        }
    }
    if (shape == Shape::lower) add_triangle<MR, NV, transposed, shape>(sum, a, lda, b, ldb, diagonal);
    UNROLL_FOR (int i = 0; i < MR; ++i) {
        UNROLL_FOR (int j = 0; j < NV; ++j) store(c + i * ldc + j * W, sum[i][j]);
    }
}

template <int MR, int NV, bool transposed, Into into, Shape shape, class real>
FAST_WEIGHTS_INLINE void tiles(index_t& i, index_t rows, index_t inner, real* c, index_t ldc, const real* a,
                               index_t lda, const real* b, index_t ldb, const DecayFactors<real>& factors) {
    for (; i + MR <= rows; i += MR) {
        const DecayFactors<real> here{factors.whole, factors.rows ? factors.rows + i : nullptr, factors.columns};
        const index_t block = i < 8 ? 4 : 8;
        const index_t first = shape == Shape::upper ? i + MR : shape == Shape::blocks ? i / block * block : 0;
        const index_t last = shape == Shape::lower ? i : shape == Shape::blocks ? first + block : inner;
        tile<MR, NV, transposed, into, shape>(c + i * ldc, ldc, a + (transposed ? i : i * lda), lda, b, ldb, first,
                                              last, i, here);
    }
}

// c (rows, cols) = or += a b, with a (rows, inner), or (inner, rows) if it comes transposed, and b (inner, cols).
// cols is a multiple of ROW; no other size need be. Of a shape that is not full, rows and inner are the same, of blocks
// CHUNK.
template <bool transposed, Into into, Shape shape = Shape::full, class real>
inline void product(index_t rows, index_t cols, index_t inner, real* c, index_t ldc, const real* a, index_t lda,
                    const real* b, index_t ldb, const DecayFactors<real>& factors = {}) {
    constexpr int W = Vector<real>::lanes;
    // As many sums as it takes to keep two multiply-add units with a latency of four busy, and no more than there are
    // registers for.
    constexpr int wide = FAST_WEIGHTS_VECTOR_BYTES == 64 ? 8 : 4;
    constexpr int narrow = FAST_WEIGHTS_VECTOR_BYTES == 64 && shape != Shape::blocks ? 16 : 8;
    index_t j = 0;
    for (; j + 2 * W <= cols; j += 2 * W) {
        index_t i = 0;
        const DecayFactors<real> here{factors.whole, factors.rows, factors.columns ? factors.columns + j : nullptr};
        if (shape == Shape::blocks) {
            tiles<4, 2, transposed, into, shape>(i, 8, inner, c + j, ldc, a, lda, b + j, ldb, here);
        }
        tiles<wide, 2, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        if (wide > 4) tiles<4, 2, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        tiles<1, 2, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
    }
    for (; j < cols; j += W) {
        index_t i = 0;
        const DecayFactors<real> here{factors.whole, factors.rows, factors.columns ? factors.columns + j : nullptr};
        if (shape == Shape::blocks) {
            tiles<4, 1, transposed, into, shape>(i, 8, inner, c + j, ldc, a, lda, b + j, ldb, here);
        }
        tiles<narrow, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        if (narrow > 8) tiles<8, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        tiles<4, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
        tiles<1, 1, transposed, into, shape>(i, rows, inner, c + j, ldc, a, lda, b + j, ldb, here);
    }
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
