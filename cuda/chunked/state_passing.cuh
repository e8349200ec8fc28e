// The arguments of a walk, and a block's shared memory; see state_passing.cu.
#pragma once

#include "fragments.cuh"
#include "workspace.cuh"

namespace fairseq_fastweights {

// States in float32 that walks start from or end at: of head h and walk w at h * head + w * walk, in states. Null: none.
struct BoundaryStates {
    float* data;
    int64_t head, walk;
    DEVICE int64_t index(int h, int w) const { return h * head + w * walk; }
};

// Keys of a warp; warps that share a strip; strips of a block; chunks that it has room for.
struct StatePassingShape {
    int keys_of_warp, key_parts, value_tiles, stages;
    __host__ DEVICE int key_rows() const { return keys_of_warp * key_parts; }
};

template <typename C>
struct StatePassing : StatePassingShape {
    Slice<C> slice;
    Sequence keys;               // backwards the queries, of a rule that does not correct
    Sequence values;             // backwards the gradients of outputs
    Sequence queries, d_values;  // backwards, of delta rules
    Sequence erase;              // with decays of keys, of delta rules
    Sizes sizes;
    RulePass pass;
    BoundaryStates first, others;  // where the slice's first walk (backwards its last) starts, and the others
    BoundaryStates ends;           // where they end
    float* kept;                   // where the forward pass keeps states; null: nowhere
    float* passed;                 // of a probe: what walks make of the identity, or their gates or decays multiplied
    int length, count;             // chunks of a walk; walks of the slice
    int probe;                     // 1: only what walks make of zeros, and `passed`
    int record;                    // 1: leaves the chunks' states and updates

    __host__ DEVICE int blocks_of(int columns) const { return divide_up(columns, kMmaRows * value_tiles); }
};

// Matrices of several stages, side by side or one after another.
template <typename T>
struct StatePassingLayout {
    MmaMatrix<T> keys, queries, erase;
    Matrix<T> values;
    // Squares' blocks on and below the diagonal: rows begin in banks such that neither ldmatrix nor the lanes of every second row
    // wait for one another.
    Matrix<float> inverse;
    Matrix<Computed<T>> scores;
    Matrix<float> steps;   // a row for each stage
    Matrix<float> decays;  // of keys: of blocks or, without the delta rule, of the chunk, with those of values
    float4* exchange;
    size_t bytes;

    __host__ __device__ StatePassingLayout(SharedAllocator allocator, bool is_delta, bool backward, bool decayed,
                                           const StatePassingShape& of)
        : keys(allocator.pieces<T>(kChunk, of.stages * of.key_rows())),
          queries(allocator.pieces<T>(kChunk, is_delta && backward ? of.stages * of.key_rows() : 0)),
          erase(allocator.pieces<T>(kChunk, is_delta && decayed ? of.stages * of.key_rows() : 0)),
          values(allocator.matrix<T>(of.stages * kChunk, of.value_tiles * kMmaRows)),
          inverse(allocator.matrix<float>(is_delta ? of.stages * kLowerRows : 0, kSubchunk)),
          scores(allocator.matrix<Computed<T>>(is_delta && backward ? of.stages * kLowerRows : 0, kSubchunk)),
          steps(allocator.matrix<float>(of.stages, kStatePassingNumbers, 0)),
          decays(allocator.matrix<float>(decayed ? of.stages * (is_delta ? kSubchunks : 1) : 0,
                                         is_delta ? of.key_rows() : of.key_rows() + of.value_tiles * kMmaRows, 0)),
          exchange(allocator.take<float4>(
              !is_delta || of.key_parts == 1 ? 0 : of.key_parts * of.value_tiles * kChunk / 8 * kWarp)),
          bytes(allocator.used) {}
};

constexpr int kMostWarps = 8;   // of a walk's block
constexpr int kMostStages = 4;  // 1, 2 or 4 chunks that it has room for
// Keys of a warp: of factors that are multiplied in tf32 more would not stay in registers.
template <typename T>
constexpr int kMostKeys = kRounded<T> ? 128 : 64;

template <typename T>
cudaError_t launch_state_passing(const StatePassing<Computed<T>>& w, cudaStream_t stream);

}  // namespace fairseq_fastweights
