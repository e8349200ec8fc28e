// The scalar gates of a chunk: products of the gates between any two of its steps, by sums of their logs alone.
//
// D_ts is the product of the gates of the steps (s, t], D_t0 of those from the chunk's start to and with t, D_es of those from
// after s to its end, D of all; w_s is the strength of a write, 1 or 1 - g_s. From S_0 a rule that does not correct makes
//   Y = diag(D_t0) Q S_0 + P V,   P_ts = D_ts <q_t, k_s> w_s for s <= t        S_end = D S_0 + K^T diag(D_es w_s) V
//
// The chunk is cut into blocks of 16 steps. The product over the steps in (s, t] is, within a block, an entry of a
// table, and otherwise what is left of s's block, times whole blocks, times the start of t's: nothing is subtracted,
// and no factor exceeds 1. Products over a whole chunk are exponentials of sums: products of rounded factors would
// drift over thousands of steps with gates near 1.
#pragma once

#include "slices.h"
#include "strips.cuh"

namespace fairseq_fastweights {

constexpr int kGateBlock = 16;

// A chunk's numbers by step (StepNumbers, GateNumbers in slices.h), in shared memory: the local stage finds them, the last one
// reads what that left. Without gates there is nothing but beta.
template <bool Gated>
struct ChunkSteps {
    float* numbers;

    ChunkSteps() = default;
    __host__ __device__ explicit ChunkSteps(Carver& carver) : numbers(carver.take<float>(step_numbers(Gated))) {}
    __device__ __forceinline__ float beta(int t) const { return numbers[kBeta + t]; }
    __device__ __forceinline__ float from_start(int t) const { return Gated ? numbers[kFromStart + t] : 1.0f; }
    __device__ __forceinline__ float to_end(int t) const { return Gated ? numbers[kToChunkEnd + t] : 1.0f; }
    __device__ __forceinline__ float whole() const { return Gated ? numbers[kWholeGate] : 1.0f; }
    __device__ __forceinline__ float strength(int s) const { return Gated ? numbers[kStrength + s] : 1.0f; }
    __device__ __forceinline__ const float* strengths() const { return numbers + kStrength; }

    // A step's beta and log gate. They are loaded before copies are begun, behind which they would have to wait.
    struct Step {
        float beta, log_gate;

        __device__ __forceinline__ Step(const Sequence& strengths, const Sequence& log_gate, int batch, int head,
                                        int start, int time)
            : beta(of(strengths, batch, head, start, time)),
              log_gate(Gated ? of(log_gate, batch, head, start, time) : 0.0f) {}

    private:
        __device__ __forceinline__ static float of(const Sequence& x, int batch, int head, int start, int time) {
            return load_step(x, batch, head, start + static_cast<int>(threadIdx.x) % kSide, time);
        }
    };

    // Finds them of the steps that each kSide threads have, of which there may be several times as many. Ends with a barrier.
    __device__ __forceinline__ void find(const Step& own, bool complement) const {
        const int thread = threadIdx.x, step = thread % kSide, part = thread / kSide;
        if constexpr (!Gated) {
            if (thread < kSide) {
                numbers[kBeta + step] = numbers[kReadBeta + step] = own.beta;
                numbers[kFromStart + step] = numbers[kToEnd + step] = 1.0f;
                if (thread < kWalkNumbers - kWholeGate) numbers[kWholeGate + thread] = thread == 0;
            }
            __syncthreads();
            return;
        }
        const int parts = blockDim.x / kSide, column = step % kGateBlock, block = step / kGateBlock;
        float* const within = numbers + kWithin + block * kGateBlock * kWithinRow + column;
        float* const block_logs = numbers + kWithin + kGateBlock;  // beside the first row
        float before = 0.0f, after = 0.0f;                         // logs to and with this step, and behind it
#pragma unroll
        for (int i = 0; i < kGateBlock; ++i) {
            const float log = __shfl_sync(kAllLanes, own.log_gate, (warp_lane() & kGateBlock) + i);
            if (i <= column)
                before += log;
            else
                after += log;
            if ((i & (parts - 1)) == part) within[i * kWithinRow] = i < column ? 0.0f : expf(after);
        }
        if (part == 0 && column == kGateBlock - 1) block_logs[block] = before;
        __syncthreads();
        if (part == 0) {
            const float write = complement ? -expm1f(own.log_gate) : 1.0f;
            numbers[kBeta + step] = own.beta;
            numbers[kStrength + step] = write;
            numbers[kFromBlock + step] = expf(before);
            numbers[kToBlockEnd + step] = expf(after);
            float earlier = 0.0f, later = 0.0f;
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                if (i < block) earlier += block_logs[i];
                if (i > block) later += block_logs[i];
            }
            const float from_chunk = expf(earlier + before), to_chunk = expf(after + later);
            numbers[kReadBeta + step] = own.beta * from_chunk;
            numbers[kFromStart + step] = from_chunk;
            numbers[kToChunkEnd + step] = to_chunk;
            numbers[kToEnd + step] = to_chunk * write;
            if (step < kBlocks) numbers[kOfBlock + step] = expf(block_logs[step]);
            if (step == kSide - 1) {
                numbers[kWholeGate] = from_chunk;
                numbers[kWholeLog] = earlier + before;
            }
        }
        __syncthreads();
    }

    // To the workspace, after `find`.
    __device__ __forceinline__ void store(float* to) const {
        for (int i = 4 * threadIdx.x; i < step_numbers(Gated); i += 4 * blockDim.x)
            *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(numbers + i);
    }
    // Starts to copy what the last stage reads from there.
    __device__ __forceinline__ void copy(const float* from) const {
        for (int i = 4 * threadIdx.x; i < (Gated ? kGateNumbers : kSide); i += 4 * blockDim.x)
            copy_async<16>(numbers + i, from + i);
    }

    // Takes a strip whose columns are the steps t of block `row` / 16, and whose places are steps s: the pairs with s < t or, with
    // `Diagonal`, with s <= t, times D_ts; 0 for others.
    template <bool Diagonal>
    __device__ __forceinline__ void keep_pairs(Strip<kSide / 8>& pairs, int row) const {
        const int group = warp_lane() / 4, member = warp_lane() % 4, last = row / kGateBlock;
        if constexpr (!Gated) {
            pairs.each([&](int s, int j, float& x) { x = s + !Diagonal <= row + j ? x : 0.0f; });
            return;
        }
        float from_block[2], middle = 1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) from_block[half] = numbers[kFromBlock + row + group + 8 * half];
#pragma unroll
        for (int block = kBlocks - 1; block >= 0; --block) {
            if (block < last - 1) middle *= numbers[kOfBlock + block + 1];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int s = 8 * part + 2 * member;
                float (&value)[4] = pairs.value[2 * block + part];
                if (block > last) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) value[i] = 0.0f;
                } else if (block == last) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int t = group + 8 * half;
                        const float2 gates =
                            *reinterpret_cast<const float2*>(numbers + kWithin + (row + t) * kWithinRow + s);
                        value[2 * half] = s + !Diagonal <= t ? value[2 * half] * gates.x : 0.0f;
                        value[2 * half + 1] = s + 1 + !Diagonal <= t ? value[2 * half + 1] * gates.y : 0.0f;
                    }
                } else {
                    const float2 to_end =
                        *reinterpret_cast<const float2*>(numbers + kToBlockEnd + block * kGateBlock + s);
                    const float x = to_end.x * middle, y = to_end.y * middle;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        value[2 * half] *= x * from_block[half];
                        value[2 * half + 1] *= y * from_block[half];
                    }
                }
            }
        }
    }
};

// Sums by step of what the gates let through, in shared memory. The gradient of log g_u collects whatever passes through step u:
// what was written before it and is read at or after it,
//   sum over s < u <= t of P_ts <dy_t, v_s> (with the delta rule of P_ts dP_ts and G_ts (B dA)_ts, in the notation of system.cuh),
// and likewise writes before the chunk and reads after it, and D <S_0, dS>: sums of products over a range, without a subtraction,
// which keeps it exact where gates are so strong that it almost vanishes. Where w = 1 - g, it loses g <k_u, (dK / w)_u>.
struct GateSums {
    float* sums;

    GateSums() = default;
    __host__ __device__ explicit GateSums(Carver& carver) : sums(carver.take<float>((kBlocks + 3) * kSide + kBlocks)) {}
    __device__ __forceinline__ float* inside(int warp) const { return sums + warp * kSide; }
    __device__ __forceinline__ float* read() const { return sums + kBlocks * kSide; }
    __device__ __forceinline__ float* written() const { return read() + kSide; }
    __device__ __forceinline__ float* strength() const { return written() + kSide; }
    __device__ __forceinline__ float* passing() const { return strength() + kSide; }  // by warp: <S_0, dS>

    // For each step u of the chunk the sum over s < u <= t of pairs (t, s), of this warp's steps t, from `row` on. Of a row the
    // sums over s < u are found from place to place, and then those of all rows with t >= u added.
    __device__ __forceinline__ void add_inside(const Strip<kSide / 8>& pairs, int row) const {
        const int group = warp_lane() / 4, member = warp_lane() % 4;
        float before[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < kSide / 8; ++n) {
            float first = 0.0f, second = 0.0f;
            const int u = 8 * n + 2 * member;
            if (8 * n < row + kTileRows) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float x = pairs.value[n][2 * half], pair = x + pairs.value[n][2 * half + 1];
                    const float other = __shfl_xor_sync(kAllLanes, pair, 1), two = pair + other;
                    const float others = __shfl_xor_sync(kAllLanes, two, 2);
                    const float sum = before[half] + ((member & 2) ? others : 0.0f) + ((member & 1) ? other : 0.0f);
                    before[half] += two + others;
                    const int t = row + group + 8 * half;
                    if (u <= t) first += sum;
                    if (u < t) second += sum + x;
                }
#pragma unroll
                for (int distance = 4; distance < kWarp; distance *= 2) {
                    first += __shfl_xor_sync(kAllLanes, first, distance);
                    second += __shfl_xor_sync(kAllLanes, second, distance);
                }
            }
            if (group == 0) *reinterpret_cast<float2*>(inside(row / kTileRows) + u) = make_float2(first, second);
        }
    }

    // This warp's part of <S_0, dS>, from this thread's.
    __device__ __forceinline__ void put_passing(float sum) const {
        for (int distance = kWarp / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        if (warp_lane() == 0) passing()[threadIdx.x / kWarp] = sum;
    }

    // After a barrier: the gradient of the log gate of step u, but for what its write loses.
    __device__ __forceinline__ float of(int u, float whole) const {
        float sum = 0.0f, passed = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kBlocks; ++warp) sum += inside(warp)[u], passed += passing()[warp];
#pragma unroll 8
        for (int step = 0; step < kSide; ++step) sum += (step >= u ? read() : written())[step];
        return sum + passed * whole;
    }
};

}  // namespace fairseq_fastweights
