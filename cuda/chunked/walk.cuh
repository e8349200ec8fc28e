// The arguments of a walk, and a block's shared memory; see walk.cu.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

// States in float32 that walks start from or end at: of head h and walk w at h * head + w * walk, in states. Null: none.
struct WalkStates {
    float* data;
    int64_t head, walk;
    DEVICE int64_t index(int h, int w) const { return h * head + w * walk; }
};

// Keys of a warp; warps that share a strip; strips of a block; chunks that it has room for.
struct WalkShape {
    int keys_of_warp, parts, strips, stages;
    __host__ DEVICE int key_rows() const { return keys_of_warp * parts; }
};

template <typename F>
struct Walks : WalkShape {
    Slice<F> slice;
    Sequence keys;               // backwards the queries, of a rule that does not correct
    Sequence values;             // backwards the gradients of outputs
    Sequence queries, d_values;  // backwards, of a rule that corrects
    Sequence erase;              // with decays of keys, of a rule that corrects
    Sizes sizes;
    RulePass pass;
    WalkStates first, others;  // where the slice's first walk (backwards its last) starts, and the others
    WalkStates ends;           // where they end
    float* kept;               // where the forward pass keeps states; null: nowhere
    float* passed;             // of a probe: what walks make of the identity, or their gates or decays multiplied
    int length, count;         // chunks of a walk; walks of the slice
    int probe;                 // 1: only what walks make of zeros, and `passed`
    int record;                // 1: leaves the chunks' states and updates

    __host__ DEVICE int blocks_of(int columns) const { return divide_up(columns, kTileRows * strips); }
};

// Matrices of several stages, side by side or one after another.
template <typename T>
struct WalkLayout {
    Pieces<T> keys, queries, erase;
    Matrix<T> values;
    // Squares' blocks on and below the diagonal: rows begin in banks such that neither ldmatrix nor the lanes of every second row
    // wait for one another.
    Matrix<float> inverse;
    Matrix<Factor<T>> scores;
    Matrix<float> steps;   // a row for each stage
    Matrix<float> decays;  // of keys: of blocks or, where nothing corrects, of the chunk, with those of values
    float4* exchange;
    size_t bytes;

    __host__ __device__ WalkLayout(Carver carver, bool corrects, bool backward, bool decayed, const WalkShape& of)
        : keys(carver.pieces<T>(kSide, of.stages * of.key_rows())),
          queries(carver.pieces<T>(kSide, corrects && backward ? of.stages * of.key_rows() : 0)),
          erase(carver.pieces<T>(kSide, corrects && decayed ? of.stages * of.key_rows() : 0)),
          values(carver.matrix<T>(of.stages * kSide, of.strips * kTileRows)),
          inverse(carver.matrix<float>(corrects ? of.stages * kLowerRows : 0, kBlockSide)),
          scores(carver.matrix<Factor<T>>(corrects && backward ? of.stages * kLowerRows : 0, kBlockSide)),
          steps(carver.matrix<float>(of.stages, kWalkNumbers, 0)),
          decays(carver.matrix<float>(decayed ? of.stages * (corrects ? kBlocks : 1) : 0,
                                      corrects ? of.key_rows() : of.key_rows() + of.strips * kTileRows, 0)),
          exchange(carver.take<float4>(!corrects || of.parts == 1 ? 0 : of.parts * of.strips * kSide / 8 * kWarp)),
          bytes(carver.used) {}
};

constexpr int kMostWarps = 8;   // of a walk's block
constexpr int kMostStages = 4;  // 1, 2 or 4 chunks that it has room for
// Keys of a warp: of factors that are multiplied in tf32 more would not stay in registers.
template <typename T>
constexpr int kMostKeys = kRounded<T> ? 128 : 64;

template <typename T>
cudaError_t launch_walks(const Walks<Factor<T>>& w, cudaStream_t stream);

}  // namespace fairseq_fastweights
