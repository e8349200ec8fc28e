// The local stage, of all chunks of a slice at once: what gates and strengths make of a chunk's steps; of the delta rule, in the
// notation of system.cuh, also T = (I + B G)^-1, backwards P = tril(D_ts Q K^T) as well. With decays by dimension or erase keys it is
// in decayed_local.cu.
#include "local.cuh"

#include "rows.cuh"
#include "system.cuh"

namespace fairseq_fastweights {
namespace {

// A part of the keys, of `Width` times 16.
template <typename T, bool Gated, bool Backward, int Width>
struct LocalParts {
    Rows<T, 16 * Width> k, q;
    Matrix<float> products;  // G; and the inverses of blocks, transposed, above its diagonal
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ explicit LocalParts(Carver carver)
        : k(carver, kSide), q(carver, Backward ? kSide : 0), products(carver.matrix<float>(kSide, kSide, 8)),
          steps(carver) {
        bytes = carver.used;
    }
};

template <typename T, bool Gated, bool Backward, int Width>
__global__ void __launch_bounds__(kStripThreads, sizeof(T) == 4 ? 2
                                                 : Backward     ? 4
                                                                : 6)
    local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = 16 * Width;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const LocalParts<T, Gated, Backward, Width> shared{Carver(memory)};
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, given.sizes);
    const int start = at.start, time = given.sizes.time, row = own_row();
    const auto copy_keys = [&](int key) {
        const auto copy = [&](const Rows<T, kKeys>& to, const Sequence& x) {
            copy_steps(to, Head<T>(x, at.batch, at.head, key, given.sizes.key_dim), start, time);
        };
        copy(shared.k, given.k);
        if constexpr (Backward) copy(shared.q, given.q);
        copies_commit();
    };

    const typename ChunkSteps<Gated>::Step own_step(given.strengths, given.log_gate, at.batch, at.head, start, time);
    copy_keys(0);
    steps.find(own_step, false);
    Strip<kSide / 8> products, scores;
    products.clear(), scores.clear();
    for (int key = 0; key < slice.key_rows; key += kKeys) {
        if (key > 0) {
            __syncthreads();
            copy_keys(key);
        }
        copies_wait<0>();
        __syncthreads();
        multiply_rows<kPasses, false, false>(products, shared.k, row, shared.k, Width);
        if constexpr (Backward) multiply_rows<kPasses, false, false>(scores, shared.q, row, shared.k, Width);
    }
    steps.template keep_pairs<false>(products, row);
    products.write(Matrix<float>{&shared.products(row, 0), shared.products.stride});
    __syncwarp();
    invert_diagonal_block(shared.products, steps.numbers + kBeta, row);
    steps.store(slice.steps_of(at.local, at.n));
    if constexpr (Backward) {
        steps.template keep_pairs<true>(scores, row);
        scores.each([](int, int, float& x) { x = as_right_factor<T>(x); });
        const LowerBlocks<Factor<T>> to = slice.lower_of(slice.scores, at.local, at.n);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
            if (block * kTileRows <= row)
                scores.template part<2>(2 * block).store(&to(row, block * kTileRows), to.stride, kTileRows);
    }
    __syncthreads();
    store_inverse<T>(slice.lower_of(slice.inverse, at.local, at.n), shared.products, steps.numbers + kBeta,
                     row / kTileRows);
}

// For a rule that does not correct.
template <typename F>
__global__ void __launch_bounds__(kStripThreads)
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
    if (pass.decays) return launch_decayed_local<T>(given, pass, slice, stream);
    const dim3 grid(slice.heads, slice.chunks);
    if (pass.corrects)
        return with_flags(pass.gated, pass.backward, [&](auto gated, auto backward) {
            return with_width(slice.key_rows, [&](auto width) {
                return launch(local<T, gated, backward, width>, grid, dim3(kStripThreads),
                              LocalParts<T, gated, backward, width>(Carver(nullptr)).bytes, stream, given, slice);
            });
        });
    if (!pass.gated) return cudaSuccess;
    Carver carver(nullptr);
    ChunkSteps<true>{carver};
    return launch(gates_local<Factor<T>>, grid, dim3(kStripThreads), carver.used, stream, given.sizes, given.log_gate,
                  given.complement, slice);
}

template cudaError_t launch_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                 cudaStream_t);

}  // namespace fairseq_fastweights
