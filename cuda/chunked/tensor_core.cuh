// Instructions of the tensor cores, and how what they multiply is stored.
#pragma once

#include <type_traits>

#include "../common.cuh"

namespace fairseq_fastweights {

// Neighbours, read and written at once.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
    T x, y;

    // For elements of 16 bits: a register, the first element its lower half.
    __device__ __forceinline__ unsigned bits() const {
        static_assert(sizeof(T) == 2, "two to a register");
        union {
            Pair pair;
            unsigned bits;
        } same{*this};
        return same.bits;
    }
    __device__ __forceinline__ static Pair of_bits(unsigned bits) {
        static_assert(sizeof(T) == 2, "two to a register");
        union {
            unsigned bits;
            Pair pair;
        } same{bits};
        return same.pair;
    }
};

template <typename T>
__device__ __forceinline__ Pair<T> narrow_pair(float x, float y) {
    if constexpr (Stored<T>::kDType == kBFloat16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);  // one instruction
        return {pair.x, pair.y};
    } else if constexpr (Stored<T>::kDType == kFloat16) {
        const __half2 pair = __floats2half2_rn(x, y);
        return {pair.x, pair.y};
    } else {
        return {narrow<T>(x), narrow<T>(y)};
    }
}

// Writes neighbours at once: of a Pair the compiler writes each element of 16 bits by itself.
template <typename T>
__device__ __forceinline__ void put_pair(T* to, float x, float y) {
    if constexpr (sizeof(T) == 2)
        *reinterpret_cast<unsigned*>(to) = narrow_pair<T>(x, y).bits();
    else
        *reinterpret_cast<Pair<T>*>(to) = narrow_pair<T>(x, y);
}

// threadIdx.x for what would otherwise be computed from it once, and kept in registers from one use to the next.
__device__ __forceinline__ int opaque_thread() { return opaque(static_cast<int>(threadIdx.x)); }
__device__ __forceinline__ int warp_lane() { return threadIdx.x & (kWarp - 1); }

// With lane = 4 * group + member, every 16 x 8 accumulator is spread over a warp as
//   (group, 2 member), (group, 2 member + 1), (group + 8, 2 member), (group + 8, 2 member + 1).

// float32 to tf32, to nearest.
__device__ __forceinline__ unsigned to_tf32(float x) {
#if defined(FASTWEIGHTS_EMULATION)
    return emulation::to_tf32(x);
#elif __CUDA_ARCH__ >= 800
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
    return bits;
#else
    return __float_as_uint(x);
#endif
}

// d += a b, a 16 x 8 and b 8 x 8. A lane holds
//   a: (group, member), (group + 8, member), (group, member + 4), (group + 8, member + 4)
//   b: (member, group), (member + 4, group)
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if defined(FASTWEIGHTS_EMULATION)
    emulation::mma_m16n8k8_tf32(d, a, b, d);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// d += a b, a 16 x 16 and b 16 x 8, two elements to a register: of a the 8 x 8 quarters upper left, lower left, upper
// right, lower right, of b the upper and the lower half, each spread as an accumulator's quarter (b's transposed).
template <typename T>
__device__ __forceinline__ void mma_stored(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    static_assert(sizeof(T) == 2, "float16 or bfloat16");
#if defined(FASTWEIGHTS_EMULATION)
    emulation::mma_m16n8k16(d, a, b, d, Stored<T>::kDType == kBFloat16);
#elif __CUDA_ARCH__ >= 800
    if constexpr (Stored<T>::kDType == kBFloat16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
template <bool Transposed>
__device__ __forceinline__ void load_matrices(unsigned (&registers)[4], const void* row) {
#if defined(FASTWEIGHTS_EMULATION)
    emulation::ldmatrix(registers, 4, row, Transposed);
#elif __CUDA_ARCH__ >= 750
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
    if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                     : "r"(address)
                     : "memory");
#endif
}

// The transpose of an 8 x 8 matrix of 16-bit elements, a pair of neighbours of row `group` in each lane.
__device__ __forceinline__ unsigned transpose_matrix(unsigned pair) {
#if defined(FASTWEIGHTS_EMULATION)
    return emulation::movmatrix(pair);
#elif __CUDA_ARCH__ >= 750
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(pair));
    return transposed;
#else
    return pair;
#endif
}

// The type in which a matrix that is computed here is stored for products. Beside bfloat16 inputs it is rounded to
// bfloat16, to be multiplied as they are; states and their gradients are in float32 all the same. What is read off them is
// rounded, and what is written to them with the delta rule, where it depends on that, and with decays by dimension,
// which scale it. Beside float16 it stays float32, multiplied in tf32: in float16 a state above 65504, or its gradient
// under a loss scale, would overflow.
template <typename T>
constexpr bool kRounded = Stored<T>::kDType == kBFloat16;
template <typename T>
using Factor = std::conditional_t<kRounded<T>, T, float>;

}  // namespace fairseq_fastweights
