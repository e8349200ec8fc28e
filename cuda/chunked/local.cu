// The local stage, of all chunks of a slice at once: what gates and strengths make of a chunk's steps; of the delta rule, in the
// notation of system.cuh, also T = (I + B G)^-1, backwards P = tril(D_ts Q K^T) as well. With decays by dimension or erase keys it is
// in decayed_local.cu.
#include "local.cuh"

#include "rows.cuh"
#include "system.cuh"

namespace fairseq_fastweights {
namespace {

// A part of the keys, of `Width` times 16; 0 for a rule that does not correct, of which gates are found alone.
template <typename T, bool Gated, bool Backward, int Width>
struct LocalParts {
    static constexpr int kRows = Width > 0 ? kSide : 0, kBlocksAtOnce = sizeof(T) == 4 ? 2 : Backward ? 4 : 6;
    Rows<T, 16 * Width> k, q;
    Matrix<float> products;  // G; in the end the inverses of blocks on its diagonal
    ChunkSteps<Gated> steps;
    size_t bytes;

    __host__ __device__ explicit LocalParts(Carver carver)
        : k(carver, kRows), q(carver, Backward ? kRows : 0), products(carver.matrix<float>(kRows, kSide, 8)),
          steps(carver) {
        bytes = carver.used;
    }
};

template <typename T, bool Gated, bool Backward, int Width>
__global__ void __launch_bounds__(kStripThreads, (LocalParts<T, Gated, Backward, Width>::kBlocksAtOnce))
    local(const Local given, const Slice<Factor<T>> slice) {
    constexpr int kPasses = sizeof(T) == 4 ? 3 : 1, kKeys = 16 * Width;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const LocalParts<T, Gated, Backward, Width> shared{Carver(memory)};
    const ChunkSteps<Gated>& steps = shared.steps;
    const Place at(slice, given.sizes);
    const int start = at.start, time = given.sizes.time, row = own_row();
    const typename ChunkSteps<Gated>::Step own_step(given.strengths, given.log_gate, at.batch, at.head, start, time);
    const auto find_steps = [&] {
        steps.find(own_step, Width == 0 && given.complement);
        steps.store(slice.steps_of(at.local, at.n));
    };
    if constexpr (Width == 0) {
        find_steps();
    } else {
        const auto copy_keys = [&](int key) {
            const auto copy = [&](const Rows<T, kKeys>& to, const Sequence& x) {
                copy_steps(to, Head<T>(x, at.batch, at.head, key, given.sizes.key_dim), start, time);
            };
            copy(shared.k, given.k);
            if constexpr (Backward) copy(shared.q, given.q);
            copies_commit();
        };
        copy_keys(0);
        find_steps();
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
        products.write(shared.products.from(row, 0));
        __syncwarp();
        const float* const beta = steps.numbers + kBeta;
        invert_diagonal_block(shared.products, beta, row);
        if constexpr (Backward) {
            steps.template keep_pairs<true>(scores, row);
            scores.each([](int, int, float& x) { x = as_right_factor<T>(x); });
            const LowerBlocks<Factor<T>> to = slice.lower_of(slice.scores, at.local, at.n);
            UNROLL for (int first = 0; first < kSide; first += kTileRows) if (first <= row)
                scores.template part<2>(first / 8)
                    .store(&to(row, first), to.stride, kTileRows);
        }
        __syncthreads();
        store_inverse<T>(slice.lower_of(slice.inverse, at.local, at.n), shared.products, beta, row / kTileRows);
    }
}

}  // namespace

template <typename T>
cudaError_t launch_local(const Local& given, const RulePass& pass, const Slice<Factor<T>>& slice, cudaStream_t stream) {
    if (pass.decays) return launch_decayed_local<T>(given, pass, slice, stream);
    if (!pass.corrects && !pass.gated) return cudaSuccess;
    const auto run = [&](auto gated, auto backward, auto width) {
        return launch(local<T, gated, backward, width>, dim3(slice.heads, slice.chunks), dim3(kStripThreads),
                      LocalParts<T, gated, backward, width>(Carver(nullptr)).bytes, stream, given, slice);
    };
    if (!pass.corrects) return run(std::true_type(), std::false_type(), std::integral_constant<int, 0>());
    return with_flags(pass.gated, pass.backward, [&](auto gated, auto backward) {
        return with_width(slice.key_rows, [&](auto width) { return run(gated, backward, width); });
    });
}

template cudaError_t launch_local<float>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__half>(const Local&, const RulePass&, const Slice<float>&, cudaStream_t);
template cudaError_t launch_local<__nv_bfloat16>(const Local&, const RulePass&, const Slice<__nv_bfloat16>&,
                                                 cudaStream_t);

}  // namespace fairseq_fastweights
