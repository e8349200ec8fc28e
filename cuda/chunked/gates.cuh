// The scalar gates of a chunk: products of the gates between any two of its steps, by sums of their logs alone.
//
// D_ts is the product of the gates of the steps (s, t], D_t0 of those from the chunk's start through t, D_es of those
// after s to the chunk's end, D of all; w_s is the write factor, 1 or 1 - g_s. Without the delta rule, from S_0:
//   Y = diag(D_t0) Q S_0 + P V,   P_ts = D_ts <q_t, k_s> w_s for s <= t        S_end = D S_0 + K^T diag(D_es w_s) V
//
// D_ts without division: the chunk is halved down to single steps. With m the middle that separates s from t, D_ts =
// D_tm D_ms, at the level that is the highest bit in which t and s differ. Nothing is subtracted, and no factor exceeds
// 1. Products over a whole chunk are exponentials of sums: products of rounded factors would drift over thousands of
// steps with gates near 1.
//
// The delta rule within a chunk: with B = diag(beta), G the products D_ts <k_t, k_s> for s < t, R = V - diag(D_t0) K
// S_0
//
//   (I + B G) U = B R        Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        S_end = D S_0 + K^T diag(D_es) U
//
// (the WY form; Bischof & Van Loan 1987; with gates Yang et al. 2025). With repeated keys and beta = 1 the entries of T
// = (I + B G)^-1 stay of order 1 while the powers in a series for them grow to 1e18. So the 16 x 16 blocks on its
// diagonal are inverted directly, and T follows by substitution, in float32 (three tf32 passes) whatever the inputs
// are: its errors reach all later steps.
//
// Backwards, with P = tril(D_ts Q K^T) and dS the gradient of the state at the chunk's end:
//   dU = P^T dY + diag(D_es) K dS         X = T^T dU            (the gradient of the right-hand side, B R)
//   dP = tril(dY U^T)                     dA = -X U^T below the diagonal           (A = B G)
//   dV = B X                              d beta_t = <X_t, R_t> + <dA_t, G_t>
//   dS_0 = D dS + Q^T diag(D_t0) dY - K^T diag(D_t0) dV         dQ and dK: gradients.cu
#pragma once

#include "fragments.cuh"
#include "workspace.cuh"

namespace fairseq_fastweights {

// A chunk's gates and beta by step (StepNumbers, GateNumbers in workspace.cuh), in shared memory: the intra-chunk
// kernel computes and stores them, the last kernel loads them. Without gates there is only beta.
template <bool Gated>
struct ChunkGates {
    float* numbers;

    ChunkGates() = default;
    __host__ __device__ explicit ChunkGates(SharedAllocator& allocator)
        : numbers(allocator.take<float>(step_numbers(Gated))) {}
    DEVICE float beta(int t) const { return numbers[kBeta + t]; }
    DEVICE float from_start(int t) const { return Gated ? numbers[kFromStart + t] : 1.0f; }
    DEVICE float to_end(int t) const { return Gated ? numbers[kToChunkEnd + t] : 1.0f; }
    DEVICE float whole() const { return Gated ? numbers[kWholeGate] : 1.0f; }
    DEVICE float write_factor(int s) const { return Gated ? numbers[kWriteFactor + s] : 1.0f; }
    DEVICE const float* write_factors() const { return numbers + kWriteFactor; }

    // A step's beta and log gate. Loaded before any copy starts, since the load would wait behind the copies.
    struct Step {
        float beta, log_gate;

        DEVICE Step(const Sequence& betas, const Sequence& gates, int batch, int head, int start, int time) {
            const int step = start + static_cast<int>(threadIdx.x) % kChunk;
            beta = load_step(betas, batch, head, step, time);
            log_gate = Gated ? load_step(gates, batch, head, step, time) : 0.0f;
        }
    };

    // Computes them for the chunk's steps, of which each group of kChunk threads has all. Ends with a barrier.
    DEVICE void compute(const Step& own, bool complement) const {
        const int thread = threadIdx.x, step = thread % kChunk, part = thread / kChunk, parts = blockDim.x / kChunk;
        // Log gates through this step, and after it: within ever larger halves around it.
        float before = own.log_gate, after = 0.0f;
        if constexpr (Gated) {
            UNROLL_FOR (int level = 0; level < kGateLevels; ++level) {
                const int half = 1 << level;
                const bool late = step & half;
                if ((level & (parts - 1)) == part)
                    numbers[kLevelGates + level * kChunk + step] = expf(late ? before : after);
                float other = __shfl_xor_sync(kAllLanes, before + after, half % kWarp);
                if (half == kWarp) {  // the other warp's
                    float* const halves = numbers + kWholeLog + 1;
                    if (thread < kChunk && warp_lane() == 0) halves[step / kWarp] = other;
                    __syncthreads();
                    other = halves[1 - step / kWarp];
                }
                (late ? before : after) += other;
            }
        }
        if (thread < kChunk) {
            const float from_chunk = expf(before), to_chunk = expf(after),
                        write = complement ? -expm1f(own.log_gate) : 1.0f;
            numbers[kBeta + step] = own.beta;
            numbers[kReadBeta + step] = own.beta * from_chunk;
            numbers[kFromStart + step] = from_chunk;
            numbers[kToEnd + step] = to_chunk * write;
            if constexpr (Gated) {
                numbers[kWriteFactor + step] = write;
                numbers[kToChunkEnd + step] = to_chunk;
            }
            if (step == kChunk - 1) {
                numbers[kWholeGate] = from_chunk;
                numbers[kWholeLog] = before;
            }
        }
        __syncthreads();
    }

    // To the workspace, after `compute`.
    DEVICE void store(float* to) const {
        for (int i = 4 * threadIdx.x; i < step_numbers(Gated); i += 4 * blockDim.x)
            *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(numbers + i);
    }
    // Starts to copy the numbers that the last kernel reads.
    DEVICE void copy(const float* from) const {
        for (int i = 4 * threadIdx.x; i < (Gated ? kGateNumbers : kChunk); i += 4 * blockDim.x)
            copy_async<16>(numbers + i, from + i);
    }

    // Fragment row j is step t = row + j, its columns are the steps s: pairs with s <= t are multiplied by D_ts, others
    // become 0.
    DEVICE void mask_and_decay(Fragment<kChunk / 8>& pairs, int row) const {
        if constexpr (!Gated) return pairs.each([&](int s, int j, float& x) { x = s <= row + j ? x : 0.0f; });
        const int last = row / kSubchunk, near = min(warp_lane() / 8 ^ warp_lane() % 4, 2);
        UNROLL_FOR (int block = 0; block < kSubchunks; ++block) {
            Fragment<2>& part = pairs.template part<2>(2 * block);
            if (block > last) {
                part.clear();
                continue;
            }
            const bool own = block == last;
            const float *const of_near = numbers + kLevelGates + (own ? near : 4 + (block ^ last) / 2) * kChunk,
                               *const of_far = own ? numbers + kLevelGates + 3 * kChunk : of_near;
            part.each_pair([&](int s, int t, float& x, float& y) {
                const float* const left = s / 8 == t / 8 ? of_near : of_far;
                const float2 to_middle = *reinterpret_cast<const float2*>(left + block * kSubchunk + s);
                x *= to_middle.x * left[row + t];
                y *= own && s + 1 == t ? 1.0f : to_middle.y * left[row + t];
            });
            if (own) part.each([](int s, int t, float& x) { x = s <= t ? x : 0.0f; });
        }
    }
};

// Sums by step for the gradients of log gates, in shared memory. The gradient of log g_u collects all that passes
// through step u, written before it and read at or after it,
//   sum over s < u <= t of P_ts <dy_t, v_s>  (delta rules: of P_ts dP_ts and G_ts (B dA)_ts),
// and likewise writes before the chunk and reads after it, and D <S_0, dS>: sums of products over a range, without a
// subtraction, which keeps it exact where gates are so strong that it almost vanishes. Where w = 1 - g, g <k_u, (dK /
// w)_u> is subtracted.
struct GateSums {
    float* sums;

    GateSums() = default;
    __host__ __device__ explicit GateSums(SharedAllocator& allocator)
        : sums(allocator.take<float>((kSubchunks + 3) * kChunk + kSubchunks)) {}
    DEVICE float* within_chunk(int warp) const { return sums + warp * kChunk; }
    DEVICE float* read() const { return sums + kSubchunks * kChunk; }
    DEVICE float* written() const { return read() + kChunk; }
    DEVICE float* write_factor() const { return written() + kChunk; }
    DEVICE float* passing() const { return write_factor() + kChunk; }  // by warp: <S_0, dS>

    // For each step u of the chunk the sum over s < u <= t of pairs (t, s), of this warp's steps t, from `row` on: a
    // running sum over s in each row, then the sum over the rows with t >= u.
    DEVICE void add_within_chunk(const Fragment<kChunk / 8>& pairs, int row) const {
        const int lane_row = warp_lane() / 4, lane_pair = warp_lane() % 4;
        float before[2] = {0.0f, 0.0f};
        UNROLL_FOR (int n = 0; n < kChunk / 8; ++n) {
            float sums[2] = {};
            const int u = 8 * n + 2 * lane_pair;
            if (8 * n < row + kMmaRows) {
                UNROLL_FOR (int half = 0; half < 2; ++half) {
                    const float x = pairs.value[n][2 * half], pair = x + pairs.value[n][2 * half + 1];
                    const float other = __shfl_xor_sync(kAllLanes, pair, 1), two = pair + other;
                    const float others = __shfl_xor_sync(kAllLanes, two, 2);
                    const float sum =
                        before[half] + ((lane_pair & 2) ? others : 0.0f) + ((lane_pair & 1) ? other : 0.0f);
                    before[half] += two + others;
                    const int t = row + lane_row + 8 * half;
                    if (u <= t) sums[0] += sum;
                    if (u < t) sums[1] += sum + x;
                }
                UNROLL_FOR (int distance = 4; distance < kWarp; distance *= 2)
                    for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
            }
            if (lane_row == 0)
                *reinterpret_cast<float2*>(within_chunk(row / kMmaRows) + u) = make_float2(sums[0], sums[1]);
        }
    }

    // This warp's part of <S_0, dS>, summed over threads.
    DEVICE void put_passing(float sum) const {
        for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        if (warp_lane() == 0) passing()[threadIdx.x / kWarp] = sum;
    }

    // After a barrier: the gradient of the log gate of step u, without the part of the write factor.
    DEVICE float of(int u, float whole) const {
        float sum = 0.0f, passed = 0.0f;
        UNROLL_FOR (int warp = 0; warp < kSubchunks; ++warp) sum += within_chunk(warp)[u], passed += passing()[warp];
#pragma unroll 8
        for (int step = 0; step < kChunk; ++step) sum += (step >= u ? read() : written())[step];
        return sum + passed * whole;
    }
};

}  // namespace fairseq_fastweights
