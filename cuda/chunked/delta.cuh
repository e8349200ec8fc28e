// The delta rule within a chunk, with a log gate for each step or without. With B = diag(beta), D_ts the product of the
// gates of (s, t], D_t0 of those from the chunk's start to and with t, D_es of those from after s to its end, D of all,
// G the products D_ts <k_t, k_s> for s < t, E = V - diag(D_t0) K S_0:
//
//   (I + B G) U = B E        Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        S_end = D S_0 + K^T diag(D_es) U
//
// (the WY form; Bischof & Van Loan 1987; with gates Yang et al. 2025). (I + B G)^-1 is formed once for all value
// columns. It is found by forward substitution in its 16 x 16 diagonal blocks and then from halves, [T1 0; -T2 A T1 T2]: with repeated keys and write
// strengths of 1 the inverse's entries stay of order 1 while the powers in a series for it grow to 1e18. It is computed
// to float32's digits whatever the inputs are, because its errors reach all later steps.
#pragma once

#include "gates.cuh"

namespace fairseq_fastweights {

template <typename T, bool Gated>
struct DeltaChunk {
    Matrix<Factor<T>> state;
    Matrix<float> products, inverse, error;
    Matrix<Factor<T>> update;
    ChunkGates gates;
    float *beta, *read_beta;  // beta_t, and D_t0 beta_t

    __host__ __device__ DeltaChunk(Carver& carver, const Plan& plan)
        : state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns, 8)),
          products(carver.matrix<float>(plan.chunk, plan.chunk)), inverse(carver.matrix<float>(plan.chunk, plan.chunk)),
          error(carver.matrix<float>(plan.chunk, plan.columns, 8)),
          update(carver.matrix<Factor<T>>(plan.chunk, plan.columns, 8)), gates(carver, Gated ? plan.chunk : 0),
          beta(carver.take<float>(plan.chunk)), read_beta(Gated ? carver.take<float>(plan.chunk) : beta) {}

    // After `beta`, the gates' logs and a barrier; ends with another where there are gates.
    __device__ __forceinline__ void find_gates() const {
        if constexpr (!Gated) return;
        gates.find_blocks(false);
        __syncthreads();
        gates.find_chunk();
        if (static_cast<int>(threadIdx.x) < gates.chunk)
            read_beta[threadIdx.x] = beta[threadIdx.x] * gates.from_chunk()[threadIdx.x];
        __syncthreads();
    }

    // Of the tile's pairs (t, s) those with s < t, or with s <= t, times the gates between the two.
    __device__ __forceinline__ void keep_pairs(Tile& tile, bool diagonal) const {
        if constexpr (Gated) {
            Tile between(tile.row, tile.column, tile.column + 8 * tile.parts);
            gates.find_between(between);
            tile.each_with(between,
                           [](int t, int s, float& value, float& gate) { value = s <= t ? value * gate : 0.0f; });
        }
        const int least = diagonal ? 0 : 1;
        tile.each([&](int t, int s, float& value) { value = s + least <= t ? value : 0.0f; });
    }

    // Rows of a tile times what the gates leave of the state from the chunk's start to the row's step.
    __device__ __forceinline__ void keep_read(Tile& tile) const {
        if constexpr (Gated) tile.each([&](int t, int, float& value) { value *= gates.from_chunk()[t]; });
    }

    // `products` = G, its upper triangle and diagonal 0, and `inverse`, from `beta` and the chunk's keys. `find_gates` or a
    // barrier before; none after.
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
            keep_read(tile);
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

    // exact = D exact + K^T diag(D_es) U, and `state` is a copy of that. A barrier before and after.
    template <int Passes, int Places>
    __device__ __forceinline__ void advance(StateTiles<Places>& exact, const Matrix<T>& k, const Plan& plan) const {
        if constexpr (Gated) exact.scale(gates.whole());
        exact.each(plan.key_rows, plan.columns, [&](Tile& tile) {
            if constexpr (Gated)
                multiply_stored<Passes, true, false>(tile, 0, plan.chunk, k, update, gates.to_chunk());
            else
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
            keep_pairs(tile, false);
            write_tile(tile, products);
        });
    }

    // (I + B G)^-1 in the blocks on and below the diagonal; above them `inverse` holds what was needed on the way.
    __device__ __forceinline__ void invert(int chunk) const {
        constexpr int kBlock = 16;
        if (const int thread = thread_anew(); thread < chunk) {  // a column of a diagonal block to a thread
            const int column = thread % kBlock, first = thread - column;
            float x[kBlock] = {};
#pragma unroll
            for (int j = 0; j < kBlock; ++j) {
                // What is known goes at once into all sums that wait for it, which do not wait for one another.
                x[j] = (j == column ? 1.0f : 0.0f) - beta[first + j] * x[j];
#pragma unroll
                for (int i = j + 1; i < kBlock; ++i) x[i] += products(first + i, first + j) * x[j];
            }
#pragma unroll
            for (int i = 0; i < kBlock; ++i) inverse(first + i, first + column) = x[i];
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
