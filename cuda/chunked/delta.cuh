// The delta rule within a chunk, with a log gate for each step or without. With B = diag(beta), D_ts the product of the
// gates of (s, t], D_t0 of those from the chunk's start to and with t, D_es of those from after s to its end, D of all,
// G the products D_ts <k_t, k_s> for s < t, E = V - diag(D_t0) K S_0:
//
//   (I + B G) U = B E        Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        S_end = D S_0 + K^T diag(D_es) U
//
// (the WY form; Bischof & Van Loan 1987; with gates Yang et al. 2025). The system is solved by substitution, 16 steps at a
// time: the 16 x 16 blocks on its diagonal are inverted, and what they solve goes into the blocks below. With repeated keys
// and write strengths of 1 the inverses' entries stay of order 1 while the powers in a series for them grow to 1e18. The
// inverses are computed in float32 whatever the inputs are, because their errors reach all later steps.
#pragma once

#include "system.cuh"

namespace fairseq_fastweights {

template <typename T, bool Gated>
struct DeltaChunk {
    Matrix<Factor<T>> state;
    Matrix<float> products, error;  // G; and the blocks' inverses, transposed, above its diagonal
    Matrix<Factor<T>> update;
    ChunkGates gates;
    float *beta, *read_beta;  // beta_t, and D_t0 beta_t

    __host__ __device__ DeltaChunk(Carver& carver, const Plan& plan)
        : state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns, 8)),
          products(carver.matrix<float>(plan.chunk, plan.chunk, 8)),
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

    // The tile's pairs (t, s) with s < t, or with s <= t, times the gates between the two.
    __device__ __forceinline__ void keep_pairs(Tile& tile, bool diagonal) const {
        keep_pairs_before<Gated>(tile, gates, diagonal);
    }

    // Rows of a tile times what the gates leave of the state from the chunk's start to the row's step.
    __device__ __forceinline__ void keep_read(Tile& tile) const {
        if constexpr (Gated) tile.each([&](int t, int, float& value) { value *= gates.from_chunk()[t]; });
    }

    // `products` = G, from the chunk's keys. `find_gates` or a barrier before; none after, as with all that follow.
    template <int Passes>
    __device__ __forceinline__ void find_products(const Matrix<T>& k, const Plan& plan) const {
        for_each_tile(plan.chunk, plan.chunk, [&](Tile& tile) {
            if (tile.column >= tile.row + kTileRows) return;
            multiply_stored<Passes, false, true>(tile, 0, plan.key_rows, k, k);
            keep_pairs(tile, false);
            write_tile(tile, products);
        });
    }

    // `error` = E, from `state` and the chunk's keys and values.
    template <int Passes>
    __device__ __forceinline__ void find_error(const Matrix<T>& k, const Matrix<T>& v, const Plan& plan) const {
        for_each_tile(plan.chunk, plan.columns, [&](Tile& tile) {
            multiply_stored<Passes, false, false>(tile, 0, plan.key_rows, k, state);
            keep_read(tile);
            tile.each([&](int t, int j, float& value) { error(t, j) = v.get(t, j) - value; });
        });
    }

    // After `products`.
    __device__ __forceinline__ void invert_blocks(int chunk) const {
        invert_diagonal_blocks(products, beta, opaque_thread(), chunk);
    }

    // `update` = U, from `error`. After `invert_blocks`.
    template <int Passes>
    __device__ __forceinline__ void solve(const Plan& plan) const {
        for_each_strip(plan, [&](auto steps, int column) {
            substitute<Passes, decltype(steps)::value>(
                column, [&](int t, int j) { return -error(t, j); },
                [&](int t, int j, float value) { update(t, j) = narrow<Factor<T>>(value); });
        });
    }

    // `right` = -(I + B G)^-T right, and where factors are rounded `copy` is a copy of that. After `invert_blocks`.
    template <int Passes>
    __device__ __forceinline__ void solve_transposed(const Matrix<float>& right, const Matrix<T>& copy,
                                                     const Plan& plan) const {
        for_each_strip(plan, [&](auto steps, int column) {
            substitute_transposed<Passes, decltype(steps)::value>(
                column, [&](int t, int j) { return right(t, j); },
                [&](int t, int j, float value) {
                    right(t, j) = value;
                    if constexpr (kRounded<T>) copy(t, j) = narrow<T>(value);
                });
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
    // f(an integral_constant with the steps, first column) for each 16 columns, dealt out to the block's warps.
    template <typename F>
    __device__ __forceinline__ static void for_each_strip(const Plan& plan, F f) {
        for (int i = threadIdx.x / kWarp; i < plan.columns / kTileRows; i += blockDim.x / kWarp) {
            if (plan.chunk == 64)
                f(std::integral_constant<int, 64>(), i * kTileRows);
            else if (plan.chunk == 32)
                f(std::integral_constant<int, 32>(), i * kTileRows);
            else
                f(std::integral_constant<int, 16>(), i * kTileRows);
        }
    }

    // f(step, column, float& value) for each of this lane's elements of 8 steps and 16 columns, which lie in the registers
    // as their transpose's would.
    template <typename F>
    __device__ __forceinline__ static void each_of(float (&values)[4], int step, int column, int lane, F f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f(step + 2 * (lane % 4) + i % 2, column + lane / 4 + i / 2 * 8, values[i]);
    }

    // A block's right sides, from(step, column).
    template <typename From>
    __device__ __forceinline__ static void load_block(float (&sums)[2][4], int step, int column, int lane, From from) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
            each_of(sums[n], step + 8 * n, column, lane, [&](int t, int j, float& value) { value = from(t, j); });
    }

    // Hands `to` (step, column, value) of U, where `from` gives -E, from the first block to the last. What is known of the
    // 16 columns stays in registers. Places are found anew in each block: kept, they would hold some 30 more.
    template <int Passes, int Steps, typename From, typename To>
    __device__ __forceinline__ void substitute(int column, From from, To to) const {
        float known[Steps / 8][4] = {};
#pragma unroll
        for (int block = 0; block < Steps / 8; block += 2) {
            const int lane = opaque_thread() % kWarp, group = lane / 4, member = lane % 4;
            float sums[2][4];
            load_block(sums, 8 * block, column, lane, from);
#pragma unroll
            for (int e = 0; e < block; ++e) {
                const KeptFactor<Passes> factor(known[e]);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 pair =
                        *reinterpret_cast<const float2*>(&products(8 * (block + n) + group, 8 * e + 2 * member));
                    factor.multiply(sums[n], pair.x, pair.y);
                }
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                each_of(sums[e], 8 * (block + e), column, lane, [&](int s, int, float& value) { value *= -beta[s]; });
                const int s = 8 * (block + e) + 2 * member;
                const KeptFactor<Passes> factor(sums[e]);
#pragma unroll
                for (int n = e; n < 2; ++n) {
                    const int t = 8 * (block + n) + group;
                    factor.multiply(known[block + n], inverse(t, s), inverse(t, s + 1));
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) each_of(known[block + n], 8 * (block + n), column, lane, to);
        }
    }

    // Likewise -dR, with (I + (B G)^T) dR = dU, where `from` gives dU, from the last block to the first.
    template <int Passes, int Steps, typename From, typename To>
    __device__ __forceinline__ void substitute_transposed(int column, From from, To to) const {
        float known[Steps / 8][4] = {};
#pragma unroll
        for (int block = Steps / 8 - 2; block >= 0; block -= 2) {
            const int lane = opaque_thread() % kWarp, group = lane / 4, member = lane % 4;
            float sums[2][4];
            load_block(sums, 8 * block, column, lane, from);
#pragma unroll
            for (int e = block + 2; e < Steps / 8; ++e) {
                const int s = 8 * e + 2 * member;
                const KeptFactor<Passes> factor(known[e]);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int t = 8 * (block + n) + group;
                    factor.multiply(sums[n], products(s, t), products(s + 1, t));
                }
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                each_of(sums[e], 0, 0, lane, [](int, int, float& value) { value = -value; });
                const int s = 8 * (block + e) + 2 * member;
                const KeptFactor<Passes> factor(sums[e]);
#pragma unroll
                for (int n = 0; n <= e; ++n) {
                    const int t = 8 * (block + n) + group;
                    factor.multiply(known[block + n], inverse(s, t), inverse(s + 1, t));
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n)
                each_of(known[block + n], 8 * (block + n), column, lane, [&](int t, int j, float& value) {
                    to(t, j, value);
                    value *= beta[t];  // as the blocks before it need it
                });
        }
    }

    // For a block on the diagonal.
    __device__ __forceinline__ float inverse(int t, int s) const { return entry_of_inverse(products, t, s); }
};

}  // namespace fairseq_fastweights
