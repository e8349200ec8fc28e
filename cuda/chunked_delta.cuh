// The delta rule within a chunk. With B = diag(beta), G the products <k_t, k_s> for s < t, E = V - K S_0:
//
//   (I + B G) U = B E        Y = Q S_0 + tril(Q K^T) U        S_end = S_0 + K^T U
//
// (the WY form; Bischof & Van Loan 1987). (I + B G)^-1 is formed once for all value columns. It is found by forward
// substitution in its 16 x 16 diagonal blocks and then from halves, [T1 0; -T2 A T1 T2]: with repeated keys and write
// strengths of 1 the inverse's entries stay of order 1 while the powers in a series for it grow to 1e18. It is computed
// to float32's digits whatever the inputs are, because its errors reach all later steps.
#pragma once

#include "chunked_block.cuh"

namespace fairseq_fastweights {

template <typename T>
struct DeltaChunk {
    Matrix<Factor<T>> state;
    Matrix<float> products, inverse, error;
    Matrix<Factor<T>> update;
    float* beta;

    __host__ __device__ DeltaChunk(Carver& carver, const Plan& plan)
        : state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns, 8)),
          products(carver.matrix<float>(plan.chunk, plan.chunk)), inverse(carver.matrix<float>(plan.chunk, plan.chunk)),
          error(carver.matrix<float>(plan.chunk, plan.columns, 8)),
          update(carver.matrix<Factor<T>>(plan.chunk, plan.columns, 8)), beta(carver.take<float>(plan.chunk)) {}

    // `products` = G, its upper triangle and diagonal 0, and `inverse`, from `beta` and the chunk's keys. A barrier
    // before; none after.
    template <int Passes>
    __device__ __forceinline__ void find_inverse(const Matrix<T>& k, const Plan& plan) const {
        find_products<Passes>(k, plan);
        __syncthreads();
        invert(plan.chunk);
    }

    // The same, and `error` = E and `update` = U from `state` and the chunk's values.
    template <int Passes>
    __device__ __forceinline__ void solve(const Matrix<T>& k, const Matrix<T>& v, const Plan& plan) const {
        const int chunk = plan.chunk, key_rows = plan.key_rows;
        find_products<Passes>(k, plan);
        for_each_tile(chunk, plan.columns, [&](Tile& tile) {
            multiply_stored<Passes, false, false>(tile, 0, key_rows, k, state);
            tile.each([&](int t, int j, float& value) { error(t, j) = v.get(t, j) - value; });
        });
        __syncthreads();
        invert(chunk);
        __syncthreads();
        for_each_tile(chunk, plan.columns, [&](Tile& tile) {
            multiply<Passes>(
                tile, 0, tile.row + kTileRows, [&](int t, int s) { return inverse(t, s); },
                [&](int s, int j) { return beta[s] * error(s, j); });
            write_tile(tile, update);
        });
    }

    // exact += K^T U, and `state` is a copy of that. A barrier before and after.
    template <int Passes, int Places>
    __device__ __forceinline__ void advance(StateTiles<Places>& exact, const Matrix<T>& k, const Plan& plan) const {
        exact.each(plan.key_rows, plan.columns, [&](Tile& tile) {
            multiply_stored<Passes, true, false>(tile, 0, plan.chunk, k, update);
            write_tile(tile, state);
        });
    }

private:
    template <int Passes>
    __device__ __forceinline__ void find_products(const Matrix<T>& k, const Plan& plan) const {
        for_each_tile(plan.chunk, plan.chunk, [&](Tile& tile) {
            if (tile.column >= tile.row + kTileRows) return;
            multiply_stored<Passes, false, true>(tile, 0, plan.key_rows, k, k);
            tile.each([&](int t, int s, float& value) { value = s < t ? value : 0.0f; });
            write_tile(tile, products);
        });
    }

    // (I + B G)^-1 in the blocks on and below the diagonal; above them `inverse` holds what was needed on the way.
    __device__ __forceinline__ void invert(int chunk) const {
        constexpr int kBlock = 16;
        if (static_cast<int>(threadIdx.x) < chunk) {  // a column of a diagonal block to a thread
            const int column = threadIdx.x % kBlock, first = threadIdx.x - column;
            float x[kBlock];
#pragma unroll
            for (int i = 0; i < kBlock; ++i) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < i; ++j) sum += products(first + i, first + j) * x[j];
                x[i] = (i == column ? 1.0f : 0.0f) - beta[first + i] * sum;
                inverse(first + i, first + column) = x[i];
            }
        }
        for (int size = kBlock; size < chunk; size *= 2) {
            // All pairs of neighbours of this size at once: row i of the product belongs to pair i / size.
            __syncthreads();
            for_each_tile(chunk / 2, size, [&](Tile& tile) {
                const int before = tile.row / size * size, upper = 2 * before;  // row i: upper + i - before
                multiply<3>(
                    tile, 0, size,
                    [&](int i, int j) {
                        const int t = upper + size + i - before;
                        return beta[t] * products(t, upper + j);
                    },
                    [&](int i, int j) { return i >= j ? inverse(upper + i, upper + j) : 0.0f; });
                tile.each([&](int i, int j, float& value) { inverse(upper + i - before, upper + size + j) = value; });
            });
            __syncthreads();
            for_each_tile(chunk / 2, size, [&](Tile& tile) {
                const int before = tile.row / size * size, upper = 2 * before, lower = upper + size;
                multiply<3>(
                    tile, 0, tile.row - before + kTileRows,
                    [&](int i, int j) { return inverse(lower + i - before, lower + j); },
                    [&](int i, int j) { return inverse(upper + i, lower + j); });
                tile.each([&](int i, int j, float& value) { inverse(lower + i - before, upper + j) = -value; });
            });
        }
    }
};

}  // namespace fairseq_fastweights
