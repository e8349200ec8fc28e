// The local stage, of all chunks of a slice at once: what gates and strengths make of a chunk's steps; of the delta rule, in the
// notation of delta.cuh, also T = (I + B G)^-1, backwards P = tril(D_ts Q K^T) as well. Four of a block's warps have 16 columns
// of T each.
//
// T is found by substitution from the inverses of its blocks on the diagonal, in float32 by three products whatever the inputs
// are: its errors reach all later steps.
#include <algorithm>

#include "stages.cuh"

namespace fairseq_fastweights {
namespace {

// As the walk multiplies by it: in one pass it is rounded here, once.
template <typename T>
__device__ __forceinline__ float as_right_factor(float x) {
    return sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x));
}

template <typename T, bool Gated>
struct LocalLayout {
    Matrix<T> q, k;
    Matrix<float> products;  // G; and the blocks' inverses, transposed, above its diagonal
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ LocalLayout(Carver carver, bool backward, int keys)
        : q(carver.matrix<T>(backward ? kSide : 0, keys)), k(carver.matrix<T>(kSide, keys)),
          products(carver.matrix<float>(kSide, kSide, 8)), steps(carver) {
        bytes = carver.used;
    }
};

// Columns `first` and on, 16 of them, of (I + B G)^-1: a strip whose places are the rows. After `invert_diagonal_blocks`
// and a barrier.
__device__ __forceinline__ void find_inverse(Strip<kSide / 8>& known, const Matrix<float>& products, const float* beta,
                                             int first) {
    known.clear();
    const int group = warp_lane() / 4, member = warp_lane() % 4;
#pragma unroll
    for (int block = 0; block < kSide / 8; block += 2) {
        if (8 * block < first) continue;
        Strip<2> sums;
        sums.clear();
#pragma unroll
        for (int e = 0; e < block; ++e) {
            if (8 * e < first) continue;
            const KeptFactor<3> factor(known.value[e]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 pair =
                    *reinterpret_cast<const float2*>(&products(8 * (block + n) + group, 8 * e + 2 * member));
                factor.multiply(sums.value[n], pair.x, pair.y);
            }
        }
        sums.each([&](int place, int j, float& value) {
            const int s = 8 * block + place;
            value = (s == first + j ? 1.0f : 0.0f) - beta[s] * value;
        });
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int s = 8 * (block + e) + 2 * member;
            const KeptFactor<3> factor(sums.value[e]);
#pragma unroll
            for (int n = e; n < 2; ++n) {
                const int t = 8 * (block + n) + group;
                factor.multiply(known.value[block + n], entry_of_inverse(products, t, s),
                                entry_of_inverse(products, t, s + 1));
            }
        }
    }
}

template <typename T, bool Gated, bool Backward>
__global__ void __launch_bounds__(kTileThreads)
    delta_local(const Sizes sizes, const Sequence q, const Sequence k, const Sequence strengths,
                const Sequence log_gate, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const int widest = slice.key_rows < kWidest ? slice.key_rows : kWidest;
    const LocalLayout<T, Gated> shared(Carver(memory), Backward, widest);
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, sizes);
    const int batch = at.batch, head = at.head, start = at.start, time = sizes.time;
    const int64_t index = slice.index(at.local, at.n);

    Tile products = own_tile(kSide), scores = products;
    for (int key = 0; key < slice.key_rows; key += kWidest) {
        const int keys = min(kWidest, slice.key_rows - key);
        if (key > 0) __syncthreads();
        copy_rows(shared.k, Head<T>(k, batch, head, key, sizes.key_dim), kSide, keys, start, time);
        if constexpr (Backward)
            copy_rows(shared.q, Head<T>(q, batch, head, key, sizes.key_dim), kSide, keys, start, time);
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        if (!has_pairs(products)) continue;
        multiply_stored<kPasses, false, true>(products, 0, keys, shared.k, shared.k);
        if constexpr (Backward) multiply_stored<kPasses, false, true>(scores, 0, keys, shared.q, shared.k);
    }
    steps.find(strengths, log_gate, false, batch, head, start, time);
    if (has_pairs(products)) {
        steps.keep_pairs(products, false);
        write_tile(products, shared.products);
        if constexpr (Backward) {
            steps.keep_pairs(scores, true);
            scores.each([](int, int, float& value) { value = as_right_factor<T>(value); });
            write_tile(scores, Matrix<Factor<T>>{slice.scores + index * kSide * kSide, kSide});
        }
    }
    const int thread = threadIdx.x, warp = thread / kWarp;
    steps.store(slice.steps + index * kStepNumbers);
    __syncthreads();
    invert_diagonal_blocks(shared.products, steps.beta, thread, kSide);
    __syncthreads();
    if (warp >= kSide / kTileRows) return;
    Strip<kSide / 8> inverse;
    find_inverse(inverse, shared.products, steps.beta, warp * kTileRows);
    float* const to = slice.inverse + index * kSide * kSide + warp * kTileRows;
    inverse.each([&](int t, int s, float& value) {
        if (t >= warp * kTileRows) to[t * kSide + s] = as_right_factor<T>(value);
    });
}

// For a rule that does not correct: a block of kSide threads.
template <typename F>
__global__ void __launch_bounds__(kSide)
    gates_local(const Sizes sizes, const Sequence log_gate, const bool complement, const Slice<F> slice) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    Carver carver(memory);
    const ChunkSteps<true> steps(carver);
    const Place at(slice, sizes);
    steps.find(Sequence{}, log_gate, complement, at.batch, at.head, at.start, sizes.time);
    steps.store(slice.steps + slice.index(at.local, at.n) * kStepNumbers);
}

}  // namespace

template <typename T>
cudaError_t launch_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(slice.heads) * slice.chunks);
    if (!pass.corrects) {
        if (!pass.gated) return cudaSuccess;
        Carver carver(nullptr);
        ChunkSteps<true>{carver};
        return launch(gates_local<Factor<T>>, grid, dim3(kSide), carver.used, stream, given.sizes, given.log_gate,
                      given.complement, slice);
    }
    return with_flags(pass.gated, pass.backward, [&](auto gated, auto backward) {
        const size_t bytes = LocalLayout<T, gated>(Carver(nullptr), backward, std::min(kWidest, slice.key_rows)).bytes;
        return launch(delta_local<T, gated, backward>, grid, dim3(kTileThreads), bytes, stream, given.sizes, given.q,
                      given.k, given.strengths, given.log_gate, slice);
    });
}

template cudaError_t launch_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                 cudaStream_t);

}  // namespace fairseq_fastweights
