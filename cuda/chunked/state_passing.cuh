// The arguments of state passing, and a block's shared memory; see state_passing.cu.
#pragma once

#include "fragments.cuh"
#include "workspace.cuh"

namespace fairseq_fastweights {

// States in float32 at the ends of segments: of head h and segment s at h * head + s * segment, in states. Null: none.
struct BoundaryStates {
    float* data;
    int64_t head, walk;
    DEVICE int64_t index(int h, int w) const { return h * head + w * walk; }
};

// Keys of a warp; warps that share a value tile; value tiles of a block; pipeline stages, chunks that it has room for.
struct StatePassingShape {
    int keys_of_warp, key_parts, value_tiles, stages;
    __host__ DEVICE int key_rows() const { return keys_of_warp * key_parts; }
};

template <typename C>
struct StatePassing : StatePassingShape {
    Slice<C> slice;
    Sequence keys;               // backwards the queries, without the delta rule
    Sequence values;             // backwards the gradients of outputs
    Sequence queries, d_values;  // backwards, for delta rules
    Sequence erase;              // with decays of keys, for delta rules
    Sizes sizes;
    RulePass pass;
    BoundaryStates first, others;  // starts of the slice's first segment (backwards its last), and of others
    BoundaryStates ends;           // ends of segments
    float* kept;                   // kept states of the forward pass, or null
    float* passed;                 // of a probe: the transitions, images of the identity or products of decays
    int length, count;             // chunks of a segment; segments of the slice
    int probe;                     // 1: only the ends from zeros, and `passed`
    int record;                    // 1: stores the chunks' states and updates

    __host__ DEVICE int blocks_of(int columns) const { return divide_up(columns, kMmaRows * value_tiles); }
};

// Matrices of all pipeline stages, side by side or one after another.
template <typename T>
struct StatePassingLayout {
    MmaMatrix<T> keys, queries, erase;
    Matrix<T> values;
    // Lower triangles in 16 x 16 blocks: rows are padded so that neither ldmatrix nor lanes with every second row
    // conflict.
    Matrix<float> inverse;
    Matrix<Computed<T>> scores;
    Matrix<float> steps;   // a row for each pipeline stage
    Matrix<float> decays;  // of keys by subchunk or, without the delta rule, of the chunk, with those of values
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

constexpr int kMostWarps = 8;   // of a block
constexpr int kMostStages = 4;  // 1, 2 or 4 pipeline stages
// Keys of a warp: with tf32 factors more would not stay in registers.
template <typename T>
constexpr int kMostKeys = kRounded<T> ? 128 : 64;

template <typename T>
cudaError_t launch_state_passing(const StatePassing<Computed<T>>& w, cudaStream_t stream);

}  // namespace fairseq_fastweights
