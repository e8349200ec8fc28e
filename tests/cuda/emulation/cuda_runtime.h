// Stands in for CUDA's header where the kernels are compiled for the host: the parts that they use, on top of emulation.h.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __CUDA_ARCH__ 900
#define __host__
#define __device__
#define __global__
#define __restrict__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define EMULATED_VECTORS(name, type)                                                            \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                    \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 { type x, y, z, w; }; \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                            \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(double, double)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(uint, unsigned)
EMULATED_VECTORS(ushort, unsigned short)
#undef EMULATED_VECTORS

#include "cuda_runtime_api.h"
#include "emulation.h"

#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_dim)
#define gridDim (emulation::grid_dim)

inline void __syncthreads() { emulation::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::warp_barrier(mask); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const int self = emulation::lane(), source = self ^ lanes;
    return emulation::shuffle(mask, value, (source & ~(width - 1)) > (self & ~(width - 1)) ? self : source, 2);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int self = emulation::lane();
    const bool inside = (self & (width - 1)) >= static_cast<int>(by);
    return emulation::shuffle(mask, value, inside ? self - static_cast<int>(by) : self, 4);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
    return emulation::shuffle(mask, value, source, 1);
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// CUDA has these without a namespace.
template <typename T>
constexpr T min(T x, T y) {
    return y < x ? y : x;
}
template <typename T>
constexpr T max(T x, T y) {
    return x < y ? y : x;
}
