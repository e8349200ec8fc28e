// Code that all kernels share: conversions between storage and arithmetic types, the launch, shared memory,
// asynchronous copies. Compiled by nvcc for a GPU, and by a host compiler with FASTWEIGHTS_EMULATION for the tests'
// emulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "kernels.h"

// A device function, always inlined, and an unrolled loop.
#define DEVICE __device__ __forceinline__
#define UNROLL_FOR _Pragma("unroll") for

namespace fairseq_fastweights {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---- Storage and arithmetic --------------------------------------------------------------------------------------

// The dtype of a storage type, and the type of arithmetic on it.
template <typename T>
struct Stored {
    static constexpr int32_t kDType = std::is_same_v<T, float>    ? kFloat32
                                      : std::is_same_v<T, __half> ? kFloat16
                                      : std::is_same_v<T, double> ? kFloat64
                                                                  : kBFloat16;
    using Compute = std::conditional_t<kDType == kFloat64, double, float>;
};

__host__ DEVICE int bytes_of(int32_t dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

template <typename A, typename T>
DEVICE A widen(T x) {
    if constexpr (std::is_same_v<T, __half>)
        return static_cast<A>(__half2float(x));
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return static_cast<A>(__bfloat162float(x));
    else
        return static_cast<A>(x);
}

template <typename T, typename A>
DEVICE T narrow(A x) {
    if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(static_cast<float>(x));
    else if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return __float2bfloat16_rn(static_cast<float>(x));
    else
        return static_cast<T>(x);
}

// One element by a dtype known at run time, for elements that are used once (gates, generic paths).
template <typename A>
DEVICE A load_element(const void* data, int32_t dtype, int64_t index) {
    switch (dtype) {
        case kFloat32: return widen<A>(static_cast<const float*>(data)[index]);
        case kFloat16: return widen<A>(static_cast<const __half*>(data)[index]);
        case kBFloat16: return widen<A>(static_cast<const __nv_bfloat16*>(data)[index]);
        default: return widen<A>(static_cast<const double*>(data)[index]);
    }
}

template <typename A>
DEVICE void store_element(void* data, int32_t dtype, int64_t index, A value) {
    switch (dtype) {
        case kFloat32: static_cast<float*>(data)[index] = narrow<float>(value); break;
        case kFloat16: static_cast<__half*>(data)[index] = narrow<__half>(value); break;
        case kBFloat16: static_cast<__nv_bfloat16*>(data)[index] = narrow<__nv_bfloat16>(value); break;
        default: static_cast<double*>(data)[index] = narrow<double>(value);
    }
}

template <typename A>
DEVICE A load_element(const Sequence& x, int64_t index) {
    return load_element<A>(x.data, x.dtype, index);
}

template <typename A>
DEVICE void store_element(const Sequence& x, int64_t index, A value) {
    store_element(x.data, x.dtype, index, value);
}

// f(T()), T the type that a dtype is stored as; `otherwise` for float64, which no tensor core multiplies here.
template <typename R, typename F>
R with_type(int32_t dtype, R otherwise, F f) {
    switch (dtype) {
        case kFloat32: return f(float());
        case kFloat16: return f(__half());
        case kBFloat16: return f(__nv_bfloat16());
        default: return otherwise;
    }
}

// States that the forward pass keeps for a (batch, head).
__host__ DEVICE int kept_states(const Sizes& sizes) {
    return sizes.interval == 0 ? 0 : (sizes.time - 1) / sizes.interval;
}

// ---- Launch ------------------------------------------------------------------------------------------------------

// Bytes of dynamic shared memory that a block may ask for on the current device, after the opt-in that `launch` makes.
inline int shared_memory_limit() {
    int device = 0, bytes = 48 * 1024;
    if (cudaGetDevice(&device) == cudaSuccess)
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes;
}

inline int multiprocessors() {
    int device = 0, count = 1;
    if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

// kernel<<<grid, block, shared, stream>>>(args...), which only nvcc can parse.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   Arguments... arguments) {
    if (shared > 48 * 1024) {
        // All that the device has, not the size of this launch: another thread may be launching the same kernel with
        // more.
        const cudaError_t error = cudaFuncSetAttribute(
            reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_memory_limit());
        if (error != cudaSuccess) {
            cudaGetLastError();  // clears the error, which the next launch would return otherwise
            return error;
        }
    }
#ifdef FASTWEIGHTS_EMULATION
    (void)stream;
    return emulation::launch(reinterpret_cast<const void*>(kernel), grid, block, shared, [=] { kernel(arguments...); });
#else
    kernel<<<grid, block, shared, stream>>>(arguments...);
    return cudaGetLastError();
#endif
}

// The block's dynamic shared memory as `unsigned char* name`, aligned to 16 bytes. The only way to shared memory here:
// the emulator guards it and fills it with NaN before each block.
#ifdef FASTWEIGHTS_EMULATION
#define FASTWEIGHTS_SHARED_MEMORY(name) unsigned char* const name = emulation::dynamic_shared()
#else
#define FASTWEIGHTS_SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// x, hidden from the compiler's common subexpressions: values computed from it in a loop are computed again at each
// pass, and take no registers in between.
template <typename I>
DEVICE I opaque(I x) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(I) == 8)
        asm volatile("" : "+l"(x));
    else
        asm volatile("" : "+r"(x));
#endif
    return x;
}

// ---- Asynchronous copies -----------------------------------------------------------------------------------------

// Copies `Bytes` (4, 8 or 16; both sides aligned to that) from global to shared memory. The data may be read after
// `copies_wait` by the thread that copied, and after a barrier that follows it by others. Before compute capability 8.0
// it is an ordinary copy, done at once.
template <int Bytes>
DEVICE void copy_async(void* shared, const void* global) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "the sizes that cp.async takes");
#if defined(FASTWEIGHTS_EMULATION)
    emulation::copy_async(shared, global, Bytes, Bytes);
#elif __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    if constexpr (Bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(global) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(address), "l"(global), "n"(Bytes) : "memory");
#else
    if constexpr (Bytes == 16)
        *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
    else if constexpr (Bytes == 8)
        *static_cast<uint2*>(shared) = *static_cast<const uint2*>(global);
    else
        *static_cast<unsigned*>(shared) = *static_cast<const unsigned*>(global);
#endif
}

// Copies 16 bytes likewise if they are `there`; else they become zeros.
DEVICE void copy_or_clear(void* shared, const void* global, bool there) {
#if defined(FASTWEIGHTS_EMULATION)
    emulation::copy_async(shared, global, 16, there ? 16 : 0);
#elif __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(there ? 16 : 0)
                 : "memory");
#else
    *static_cast<uint4*>(shared) = there ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
#endif
}

// Commits the copies that this thread issued since the last call, as a group.
DEVICE void copies_commit() {
#if defined(FASTWEIGHTS_EMULATION)
    emulation::copies_commit();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most `Pending` of this thread's latest groups are still under way.
template <int Pending>
DEVICE void copies_wait() {
#if defined(FASTWEIGHTS_EMULATION)
    emulation::copies_wait(Pending);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
#endif
}

}  // namespace fairseq_fastweights
