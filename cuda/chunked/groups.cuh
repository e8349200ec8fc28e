// Products of a warpgroup, four warps at once: wgmma, which sm_90a has. Its left factor and its accumulators lie in the
// registers of the four warps as those of mma.sync do in each, 16 rows to a warp; its right factor is read from shared memory
// in pieces of 16 bytes, asynchronously: what it reads is to be shown to it (`show_to_groups`), and what it adds to is there
// after `groups_wait`.
#pragma once

#include "block.cuh"

namespace fairseq_fastweights {

constexpr int kGroupWarps = 4, kGroupColumns = 64;  // of a product

// The same of instructions that sm_90a has.
#if defined(FASTWEIGHTS_EMULATION)
#define FASTWEIGHTS_OF_GROUPS(emulated, ...) emulated
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTWEIGHTS_OF_GROUPS(emulated, ...) __VA_ARGS__
#else
#define FASTWEIGHTS_OF_GROUPS(emulated, ...)
#endif

DEVICE bool has_groups() {
    bool has = false;
    FASTWEIGHTS_OF_GROUPS(has = emulation::has_wgmma(), has = true);
    return has;
}

// Before a barrier: what this thread wrote to shared memory, also by copies that it has waited for, is there for wgmma.
DEVICE void show_to_groups() {
    FASTWEIGHTS_OF_GROUPS(emulation::proxy_fence(), asm volatile("fence.proxy.async.shared::cta;\n" :: : "memory"));
}

// A matrix in shared memory whose 8 x 8 parts, of elements of 16 bits, are 128 bytes in a row, as wgmma takes them without
// swizzling: a column of pieces of 16 bytes each follows the other, with a gap of one, so that pieces of a row lie in
// different banks. ldmatrix and elements by themselves are read off it as well as off rows. Numbers of 32 bits lie in rows as in
// a Matrix: off pieces they were read in ways that spilled registers.
template <typename T>
struct Pieces {
    using Element = T;
    static constexpr int kPiece = 16 / sizeof(T);
    static constexpr bool kInRows = sizeof(T) == 4;
    T* data;
    int distance;  // from one column of pieces, or one row, to the next

    __host__ __device__ Pieces(T* data, int distance) : data(data), distance(distance) {}
    __host__ __device__ Pieces(Carver& carver, int rows, int columns)
        : distance(kInRows ? columns + kPiece : (rows + 1) * kPiece) {
        data = carver.take<T>(kInRows ? rows * distance : columns / kPiece * distance);
    }
    DEVICE T& operator()(int row, int column) const {
        if constexpr (kInRows) return data[row * distance + column];
        return data[column / kPiece * distance + row * kPiece + column % kPiece];
    }
    // From a row on, and a column that begins a piece.
    DEVICE Pieces from(int row, int column) const { return {&(*this)(row, column), distance}; }

    // As wgmma reads 16 inner places and some columns from the first on; rows are the inner places, or they are the columns.
    template <bool RowsInner>
    DEVICE uint64_t descriptor(int inner, int column) const {
        const uint64_t eight_rows = 8, eight_columns = distance / kPiece;  // in units of 16 bytes, as all here
        const uint64_t whole = (shared_address(data) & 0x3ffff) >> 4 | (RowsInner ? eight_rows : eight_columns) << 16 |
                               (RowsInner ? eight_columns : eight_rows) << 32;
        return whole + (RowsInner ? inner + column / 8 * eight_columns : column + inner / 8 * eight_columns);
    }
};

// d += a b from `first` on: 16 rows of this warp and kGroupColumns columns, 16 inner places.
template <typename T, bool RowsInner, int N>
DEVICE void multiply_in_group(float (&d)[N][4], int first, const unsigned (&a)[4], uint64_t right) {
    constexpr bool kBrain = Stored<T>::kDType == kBFloat16;
#define FASTWEIGHTS_WGMMA(type)                                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                        \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
                 "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, %37;\n"                                \
                 : FASTWEIGHTS_FOUR("+f", d[first]), FASTWEIGHTS_FOUR("+f", d[first + 1]),                          \
                   FASTWEIGHTS_FOUR("+f", d[first + 2]), FASTWEIGHTS_FOUR("+f", d[first + 3]),                      \
                   FASTWEIGHTS_FOUR("+f", d[first + 4]), FASTWEIGHTS_FOUR("+f", d[first + 5]),                      \
                   FASTWEIGHTS_FOUR("+f", d[first + 6]), FASTWEIGHTS_FOUR("+f", d[first + 7])                       \
                 : FASTWEIGHTS_FOUR("r", a), "l"(right), "n"(RowsInner))
    FASTWEIGHTS_OF_GROUPS(emulation::wgmma(d[first], kGroupColumns, a, right, RowsInner, kBrain),
                          if constexpr (kBrain) FASTWEIGHTS_WGMMA("bf16");
                          else FASTWEIGHTS_WGMMA("f16"));
#undef FASTWEIGHTS_WGMMA
}

}  // namespace fairseq_fastweights
