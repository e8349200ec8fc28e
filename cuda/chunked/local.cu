// The local stage, of all chunks of a slice at once: what gates and strengths make of a chunk's steps; of the delta rule, in the
// notation of system.cuh, also T = (I + B G)^-1, backwards P = tril(D_ts Q K^T) as well. Four of a block's warps have 16 columns
// of T each. With decays by dimension it is in decayed_local.cu.
#include <algorithm>

#include "inverse.cuh"
#include "stages.cuh"

namespace fairseq_fastweights {
namespace {

// Blocks of a multiprocessor that registers are held down for.
template <typename T, bool Backward>
constexpr int kLocalBlocks = sizeof(T) == 4 ? 1
                             : Backward     ? 3
                                            : 4;

template <typename T, bool Gated>
struct LocalLayout {
    Matrix<T> q, k;
    Matrix<float> products;  // G; and the blocks' inverses, transposed, above its diagonal
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ LocalLayout(Carver carver, bool backward, int keys)
        : products(carver.matrix<float>(kSide, kSide, 8)), steps(carver) {
        k = carver.matrix<T>(kSide, keys);
        q = carver.matrix<T>(backward ? kSide : 0, keys);
        bytes = carver.used;
    }
};

template <typename T, bool Gated, bool Backward>
__global__ void __launch_bounds__(kTileThreads, kLocalBlocks<T, Backward>)
    local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const LocalLayout<T, Gated> shared(Carver(memory), Backward, min(kWidest, slice.key_rows));
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, given.sizes);
    const int batch = at.batch, head = at.head, start = at.start, time = given.sizes.time;

    const auto copy_keys = [&](int key) {
        const auto copy = [&](const Matrix<T>& to, const Sequence& from) {
            copy_steps(to, Head<T>(from, batch, head, key, given.sizes.key_dim), min(kWidest, slice.key_rows - key),
                       start, time);
        };
        copy(shared.k, given.k);
        if constexpr (Backward) copy(shared.q, given.q);
        copies_commit();
    };
    const typename ChunkSteps<Gated>::Step own_step(given.strengths, given.log_gate, batch, head, start, time);
    copy_keys(0);
    steps.find(own_step, false);
    Tile products = own_tile(kSide), scores = products;
    for (int key = 0; key < slice.key_rows; key += kWidest) {
        const int keys = min(kWidest, slice.key_rows - key);
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
        }
        copies_wait<0>();
        __syncthreads();
        if (!has_pairs(products)) continue;
        multiply_stored<kPasses, false, true>(products, 0, keys, shared.k, shared.k);
        if constexpr (Backward) multiply_stored<kPasses, false, true>(scores, 0, keys, shared.q, shared.k);
    }
    if (has_pairs(products)) {
        if constexpr (Backward) {
            steps.keep_pairs(scores, true);
            scores.each([](int, int, float& value) { value = as_right_factor<T>(value); });
            write_lower(scores, slice.lower_of(slice.scores, at.local, at.n));
        }
        steps.keep_pairs(products, false);
        write_tile(products, shared.products);
    }
    const int thread = threadIdx.x, warp = thread / kWarp;
    steps.store(slice.steps_of(at.local, at.n));
    __syncthreads();
    invert_diagonal_blocks(shared.products, steps.beta, thread, kSide);
    __syncthreads();
    if (warp < kSide / kTileRows)
        store_inverse<T>(shared.products, steps.beta, slice.lower_of(slice.inverse, at.local, at.n), warp);
}

// For a rule that does not correct: a block of kSide threads.
template <typename F>
__global__ void __launch_bounds__(kSide)
    gates_local(const Sizes sizes, const Sequence log_gate, const bool complement, const Slice<F> slice) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    Carver carver(memory);
    const ChunkSteps<true> steps(carver);
    const Place at(slice, sizes);
    steps.find({Sequence{}, log_gate, at.batch, at.head, at.start, sizes.time}, complement);
    steps.store(slice.steps_of(at.local, at.n));
}

}  // namespace

template <typename T>
cudaError_t launch_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice, cudaStream_t stream) {
    const dim3 grid(slice.heads, slice.chunks);
    if (pass.decays) return launch_decayed_local<T>(given, pass, slice, stream);
    if (!pass.corrects) {
        if (!pass.gated) return cudaSuccess;
        Carver carver(nullptr);
        ChunkSteps<true>{carver};
        return launch(gates_local<Factor<T>>, grid, dim3(kSide), carver.used, stream, given.sizes, given.log_gate,
                      given.complement, slice);
    }
    return with_flags(pass.gated, pass.backward, [&](auto gated, auto backward) {
        const int keys = std::min(kWidest, slice.key_rows);
        return launch(local<T, gated, backward>, grid, dim3(kTileThreads),
                      LocalLayout<T, gated>(Carver(nullptr), backward, keys).bytes, stream, given, slice);
    });
}

template cudaError_t launch_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                 cudaStream_t);

}  // namespace fairseq_fastweights
