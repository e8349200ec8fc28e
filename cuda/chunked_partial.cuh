// Gradients that are sums over a head's value columns, where those are divided among blocks: the blocks of a head
// follow one another in launches of their own, each adding to what the ones before it left in the workspace, in
// float32, and the last writes the gradient. (Side by side they would need a part for each: for wide states several
// times the memory of all inputs and gradients. Time is divided instead where heads alone do not fill the device.)
#pragma once

#include "chunked_block.cuh"

namespace fairseq_fastweights {

// What has been added up of one gradient: (batch, head, time, dim), contiguous; nothing where one block has a whole
// head.
struct Partial {
    float* data;
    int blocks, heads, time, dim;

    __host__ __device__ Partial(float* data, const Plan& plan, const Sizes& sizes, int dim)
        : data(data), blocks(plan.blocks), heads(sizes.batch * sizes.heads), time(sizes.time), dim(dim) {}

    __host__ __device__ int64_t size() const { return blocks > 1 ? static_cast<int64_t>(heads) * time * dim : 0; }
    __device__ __forceinline__ float* of(int head) const { return data + static_cast<int64_t>(head) * time * dim; }
};

// A tile of a gradient (rows counting from step `start`) as block `block` of a head finds it.
template <typename T>
__device__ __forceinline__ void store_rows(Tile& tile, const Sequence& x, const Partial& partial, int batch, int head,
                                           int head_index, int block, int start, int time) {
    if (block > 0) {
        const float* const before = partial.of(head_index) + static_cast<int64_t>(start) * partial.dim;
        tile.each([&](int row, int column, float& value) {
            if (start + row < time && column < partial.dim) value += before[row * partial.dim + column];
        });
    }
    if (block == partial.blocks - 1)
        store_tile(tile, Head<T>(x, batch, head, 0, partial.dim), start, time);
    else
        store_tile(tile, Head<float>(partial.of(head_index), partial.dim, partial.dim), start, time);
}

// The same for one element, of a (batch, time, heads) gradient too; its dtype is known at run time only.
__device__ __forceinline__ void store_step(const Sequence& x, const Partial& partial, int batch, int head,
                                           int head_index, int block, int t, float value, int column = 0) {
    float* const before = partial.of(head_index) + static_cast<int64_t>(t) * partial.dim + column;
    if (block > 0) value += *before;
    if (block == partial.blocks - 1)
        store_element(x.data, x.dtype, batch * x.batch + t * x.time + head * x.head + column, value);
    else
        *before = value;
}

}  // namespace fairseq_fastweights
