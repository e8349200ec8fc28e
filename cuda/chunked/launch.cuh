// The launches of a chunked pass: what segments make of a state, the state carried from one to the next, and the results.
//
// A Pass is a struct that names them: `kernel<T, Outputs, Places>()`, `plan<T>(sizes, device)`, `launches(plan, sizes,
// dtype)`, and `carry(segments, sizes, first, reverse, stream)`.
#pragma once

#include "checkpoints.cuh"

namespace fairseq_fastweights {

// The plan and the segments of a launch, and about how many cycles it takes.
template <class Pass, typename T>
struct Division {
    Plan plan;
    double cycles;
    Segments segments;
    explicit Division(const Sizes& sizes, const Device& device = Device())
        : plan(Pass::template plan<T>(sizes, device)), cycles(0),
          segments(find_segments(plan, sizes, Pass::launches(plan, sizes, Stored<T>::kDType), device, cycles)) {}
};

// launch(first, results): where time is divided, kernels of the first launch, with their grid, and the state's way.
template <class Pass, typename T, typename Params, typename Results>
cudaError_t launch_segments(const Division<Pass, T>& of, const Params& p, const void* first, bool reverse,
                            cudaStream_t stream, const Results& launch_kernel) {
    return with_places(of.plan, [&](auto places) {
        constexpr int kPlaces = decltype(places)::value;
        cudaError_t error = cudaSuccess;
        if (of.segments.count > 1) {
            const dim3 grid(static_cast<unsigned>(of.segments.heads) * of.segments.first_of_head,
                            of.segments.count - 1);
            error = launch_kernel(Pass::template kernel<T, false, kPlaces>(), grid, 0);
            if (error == cudaSuccess) error = Pass::carry(of.segments, p.sizes, first, reverse, stream);
        }
        const int launches = reverse ? of.plan.blocks : 1;  // whose blocks of columns follow one another
        const dim3 grid(static_cast<unsigned>(of.segments.heads) * (reverse ? 1 : of.plan.blocks), of.segments.count);
        for (int i = 0; i < launches && error == cudaSuccess; ++i)
            error = launch_kernel(Pass::template kernel<T, true, kPlaces>(), grid, i);
        return error;
    });
}

template <class Pass, typename T>
cudaError_t launch_pass(const RuleForward& p, cudaStream_t stream) {
    Division<Pass, T> of(p.sizes);
    if (of.plan.chunk == 0) return cudaErrorInvalidValue;
    if (of.segments.count > 1) of.segments.place(p.workspace);
    return launch_segments(of, p, p.initial_state, false, stream, [&](auto kernel, dim3 grid, int) {
        return launch(kernel, grid, dim3(of.plan.threads), of.plan.shared, stream, p, of.plan, of.segments);
    });
}

template <class Pass, typename T>
cudaError_t launch_pass(const RuleBackward& p, cudaStream_t stream) {
    Division<Pass, T> of(p.sizes);
    if (of.plan.chunk == 0) return cudaErrorInvalidValue;
    if (of.segments.count > 1) of.segments.place(p.workspace);
    Checkpoints checkpoints = find_checkpoints(of.plan, p.sizes, of.segments);
    checkpoints.place(p.workspace, of.segments);
    return launch_segments(of, p, p.d_final_state, true, stream, [&](auto kernel, dim3 grid, int block) {
        return launch(kernel, grid, dim3(of.plan.threads), of.plan.shared, stream, p, of.plan, of.segments, checkpoints,
                      block);
    });
}

template <class Pass, typename Params>
cudaError_t run(const Params& p, cudaStream_t stream) {
    return with_type(p.v.dtype, cudaErrorInvalidValue,
                     [&](auto zero) { return launch_pass<Pass, decltype(zero)>(p, stream); });
}

template <class Pass>
size_t workspace(const RuleForward& p) {
    return with_type(p.v.dtype, size_t{0},
                     [&](auto zero) { return Division<Pass, decltype(zero)>(p.sizes).segments.bytes(); });
}
template <class Pass>
size_t workspace(const RuleBackward& p) {
    return with_type(p.v.dtype, size_t{0}, [&](auto zero) {
        const Division<Pass, decltype(zero)> of(p.sizes);
        return of.segments.bytes() + find_checkpoints(of.plan, p.sizes, of.segments).bytes;
    });
}

// The plan with blocks of `limit` bytes of shared memory.
template <class Pass>
ChunkedPlan describe(const Sizes& sizes, int32_t dtype, int limit) {
    return with_type(dtype, ChunkedPlan{}, [&](auto zero) {
        const Division<Pass, decltype(zero)> of(sizes, Device(limit));
        const Plan& plan = of.plan;
        if (plan.chunk == 0) return ChunkedPlan{};
        return ChunkedPlan{plan.chunk,
                           plan.columns,
                           plan.blocks,
                           plan.stages,
                           plan.threads,
                           of.segments.count,
                           plan.blocks_at_once(limit),
                           0,
                           static_cast<int64_t>(plan.shared),
                           of.cycles};
    });
}

}  // namespace fairseq_fastweights
