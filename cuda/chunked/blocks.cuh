// Decays by dimension in the stages that take all chunks at once: a chunk of 64 steps is 4 blocks of 16.
//
// Pairs of steps of one block are parted by halving it, as in decays.cuh. For t of block I and s of an earlier block J,
//   F_ts = F_tI G_{I-1} ... G_{J+1} F_Js
// with F_tI from before I's start to t, F_Js from s to J's end, and G a block's decays multiplied. So what blocks hand on
// goes through them as a state does, an accumulator times G from block to block, and no factor exceeds 1.
//
// In the same way the gradient of a log of block I is that of decays_gradient.cuh: what `reads` are there is all that reached
// the block's start, `writes` is all that comes back to its end, and what passes it is
//   sum over sources before it, sinks after it (S_0 and dS are such, too) of source * sink * the decays between but for G_I
#pragma once

#include "decays_gradient.cuh"
#include "rows.cuh"

namespace fairseq_fastweights {

static_assert(kBlocks * kSteps == kSide, "blocks are those of decays.cuh");

// Pairs of a chunk's steps in shared memory: the blocks (t, s) of 16 x 16 below the diagonal, with `Diagonal` those on it as
// well, one after another. Beside bfloat16 they are two of them, big + small.
template <typename F, bool Diagonal>
struct BlockPairs {
    static constexpr int kParts = sizeof(F) == 2 ? 2 : 1,
                         kDown = kBlocks * (kBlocks + (Diagonal ? 1 : -1)) / 2 * kSteps;
    Rows<F, kSteps> first;

    BlockPairs() = default;
    __host__ __device__ explicit BlockPairs(Carver& carver) : first(carver, kParts * kDown) {}
    __device__ __forceinline__ Rows<F, kSteps> block(int part, int down, int across) const {
        return first.from(part * kDown + (down * (down + (Diagonal ? 1 : -1)) / 2 + across) * kSteps, 0);
    }
    __device__ __forceinline__ float get(int t, int s) const {
        float x = 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) x += block(part, t / kSteps, s / kSteps).get(t % kSteps, s % kSteps);
        return x;
    }

    // Starts to copy a chunk's.
    template <int Threads>
    __device__ __forceinline__ void copy(const F* big, const F* rest) const {
        static_assert(Diagonal, "as the local stage left them");
        constexpr int kPiece = 16 / sizeof(F), kAcross = kSteps / kPiece;
        for (int i = threadIdx.x; i < kParts * kLower / kPiece; i += Threads) {
            const int piece = i % (kLower / kPiece);
            copy_async<16>(&first(i / kAcross, i % kAcross * kPiece), (i == piece ? big : rest) + piece * kPiece);
        }
    }
    __device__ __forceinline__ void write(Strip<2> pairs, int down, int across) const {
        pairs.write(block(0, down, across));
        if constexpr (kParts == 2) pairs.template rest<F>().write(block(1, down, across));
    }
    // sums += a block or, with `Turned`, its transpose, times rows of 16 steps.
    template <int Passes, bool Turned, int N, typename Right>
    __device__ __forceinline__ void multiply(Strip<N>& sums, int down, int across, const Right& right) const {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            multiply_rows<Passes, Turned, true>(sums, block(part, down, across), 0, right, 1);
    }
};

// The sums over a strip's steps of its values times by(step, place), handed to one lane for each place: done(place, sum).
template <int N, typename By, typename F>
__device__ __forceinline__ void sum_places(const Strip<N>& strip, const By& by, F done) {
    const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int place = 8 * n + 2 * member;
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto pair = *reinterpret_cast<const Pair<typename By::Element>*>(&by(group + 8 * half, place));
            x += strip.value[n][2 * half] * widen<float>(pair.x);
            y += strip.value[n][2 * half + 1] * widen<float>(pair.y);
        }
#pragma unroll
        for (int distance = 4; distance < kWarp; distance *= 2) {
            x += __shfl_xor_sync(kAllLanes, x, distance);
            y += __shfl_xor_sync(kAllLanes, y, distance);
        }
        if (group == 0) done(place, x), done(place + 1, y);
    }
}

// A part of the keys, as gradients take it with its decays. A warp has a block of 16 steps, of which a strip is its keys from
// `column` on, and a lane one of these.
template <typename T, int Keys>
struct DecayFactors {
    Rows<float, Keys> totals;  // G by block
    // Sums over steps of source * sink: from before block I to those of a later one, from those of a block to dS, then parts
    // of the sums of S_0 * dS.
    Rows<float, Keys> masses;
    Rows<T, Keys> reading, written, reading_erase;
    enum { kToState = kBlocks * (kBlocks - 1) / 2, kWhole = kToState + kBlocks, kMasses = kWhole + kBlocks };

    // Factors of a key, of whose sum of S_0 * dS `whole` is a part. A barrier before and after.
    template <bool Corrects>
    __device__ __forceinline__ void write(int row, int key, const float (&gates)[kSteps], const Rows<T, Keys>& q,
                                          const Rows<T, Keys>& k, const Rows<T, Keys>& erase, float whole) const {
        float x[kSteps];
        load_column(x, q.from(row, 0), key);
        write_reading(reading.from(row, 0), x, gates, key);
        load_column(x, k.from(row, 0), key);
        write_written(written.from(row, 0), x, gates, key);
        if constexpr (Corrects) {
            load_column(x, erase.from(row, 0), key);
            write_reading(reading_erase.from(row, 0), x, gates, key);
        }
        totals(row / kSteps, key) = product_of(gates);
        masses(kWhole + row / kSteps, key) = whole;
    }

    // The gradients of `late` * F_.0, from the chunk's start to their block's. `Adds`: to the masses of others.
    template <int Passes, bool Adds, int N, typename P>
    __device__ __forceinline__ void pass_to_readers(Strip<N>& reads, const P& pairs, const Rows<T, Keys>& late, int row,
                                                    int column) const {
        const int block = row / kSteps;
#pragma unroll 1
        for (int from = 0; from < block; ++from) {
            float* const to = &masses(block * (block - 1) / 2 + from, column);
            sum_places(reads, late.from(row, column),
                       [&](int place, float sum) { to[place] = Adds ? to[place] + sum : sum; });
            reads.scale(&totals(from, column));
            pairs.template multiply<Passes, false>(reads, block, from, written.from(from * kSteps, column));
        }
    }
    // The gradients of keys * F_e., from the chunk's end to their block's.
    template <int Passes, bool Corrects, int N, typename P, typename Q>
    __device__ __forceinline__ void pass_to_writers(Strip<N>& writes, const P& d_scores, const Q& d_system, int row,
                                                    int column) const {
        const int block = row / kSteps;
        float* const to_state = &masses(kToState + block, column);
        sum_places(writes, written.from(row, column), [&](int place, float sum) { to_state[place] = sum; });
#pragma unroll 1
        for (int to = kBlocks - 1; to > block; --to) {
            writes.scale(&totals(to, column));
            d_scores.template multiply<Passes, true>(writes, to, block, reading.from(to * kSteps, column));
            if constexpr (Corrects)
                d_system.template multiply<Passes, true>(writes, to, block, reading_erase.from(to * kSteps, column));
        }
    }

    // After a barrier: the gradient of what passes all of a block, of a key.
    __device__ __forceinline__ float passing(int block, int key) const {
        float sum = 0.0f, between = 1.0f;
        for (int part = 0; part < kBlocks; ++part) sum += masses(kWhole + part, key);
        for (int from = 0; from < block; ++from) sum = sum * totals(from, key) + masses(kToState + from, key);
        for (int to = block + 1; to < kBlocks; ++to) sum *= totals(to, key);
        for (int to = block + 1; to < kBlocks; ++to) {
            sum += between * masses(to * (to - 1) / 2 + block, key);
            between *= totals(to, key);
        }
        return sum;
    }
};

}  // namespace fairseq_fastweights
