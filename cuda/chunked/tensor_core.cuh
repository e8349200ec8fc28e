// Instructions of the tensor cores, and the layouts and types of their operands.
#pragma once

#include <type_traits>

#include "../common.cuh"

namespace fairseq_fastweights {

// Two neighbours, for one load or store.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
    T x, y;

    // For elements of 16 bits: a register, the first element its lower half.
    DEVICE unsigned bits() const {
        unsigned bits;
        static_assert(sizeof(bits) == sizeof(Pair), "two to a register");
        memcpy(&bits, this, sizeof(bits));
        return bits;
    }
};

template <typename T>
DEVICE Pair<T> narrow_pair(float x, float y) {
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
DEVICE void put_pair(T* to, float x, float y) {
    if constexpr (sizeof(T) == 2)
        *reinterpret_cast<unsigned*>(to) = narrow_pair<T>(x, y).bits();
    else
        *reinterpret_cast<Pair<T>*>(to) = narrow_pair<T>(x, y);
}

constexpr int kMmaRows = 16;  // of a product of a warp

DEVICE int warp_lane() { return threadIdx.x & (kWarp - 1); }

// With lane = 4 * lane_row + lane_pair (PTX: groupID and threadID_in_group), a 16 x 8 accumulator is spread over a warp
// as
//   (group, 2 member), (group, 2 member + 1), (group + 8, 2 member), (group + 8, 2 member + 1).

// An instruction, or the emulator's function; nothing before compute capability 8.0.
#if defined(FASTWEIGHTS_EMULATION)
#define FASTWEIGHTS_INSTRUCTION(emulated, ...) emulated
#elif __CUDA_ARCH__ >= 800
#define FASTWEIGHTS_INSTRUCTION(emulated, ...) __VA_ARGS__
#else
#define FASTWEIGHTS_INSTRUCTION(emulated, ...)
#endif
#define FASTWEIGHTS_FOUR(constraint, x) constraint(x[0]), constraint(x[1]), constraint(x[2]), constraint(x[3])
#define FASTWEIGHTS_MMA(shape, type)                                            \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type        \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
                 : FASTWEIGHTS_FOUR("+f", d)                                    \
                 : FASTWEIGHTS_FOUR("r", a), "r"(b[0]), "r"(b[1]))

// float32 to tf32, to nearest.
DEVICE unsigned to_tf32(float x) {
    unsigned bits = 0;
    FASTWEIGHTS_INSTRUCTION(bits = emulation::to_tf32(x), asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x)));
    return bits;
}

// d += a b, a 16 x 8 and b 8 x 8. A lane holds
//   a: (group, member), (group + 8, member), (group, member + 4), (group + 8, member + 4)
//   b: (member, group), (member + 4, group)
DEVICE void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    FASTWEIGHTS_INSTRUCTION(emulation::mma_m16n8k8_tf32(d, a, b, d), FASTWEIGHTS_MMA("m16n8k8", "tf32"));
}

// d += a b, a 16 x 16 and b 16 x 8, two elements to a register: of a the 8 x 8 quarters upper left, lower left, upper
// right, lower right, of b the upper and the lower half, each spread as an accumulator's quarter (b's transposed).
template <typename T>
DEVICE void mma_stored(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    static_assert(sizeof(T) == 2, "float16 or bfloat16");
    constexpr bool kBrain = Stored<T>::kDType == kBFloat16;
    FASTWEIGHTS_INSTRUCTION(emulation::mma_m16n8k16(d, a, b, d, kBrain),
                            if constexpr (kBrain) FASTWEIGHTS_MMA("m16n8k16", "bf16");
                            else FASTWEIGHTS_MMA("m16n8k16", "f16"));
}

DEVICE unsigned shared_address(const void* place) {
    FASTWEIGHTS_INSTRUCTION(return emulation::shared_address(place),
                                   return static_cast<unsigned>(__cvta_generic_to_shared(place)));
    return 0;
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
template <bool Transposed>
DEVICE void load_matrices(unsigned (&to)[4], const void* row) {
#define FASTWEIGHTS_LOAD(transposed)                                                             \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" transposed ".shared.b16 {%0,%1,%2,%3}, [%4];\n" \
                 : FASTWEIGHTS_FOUR("=r", to)                                                    \
                 : "r"(shared_address(row))                                                      \
                 : "memory")
    FASTWEIGHTS_INSTRUCTION(emulation::ldmatrix(to, 4, row, Transposed),
                            if constexpr (Transposed) FASTWEIGHTS_LOAD(".trans");
                            else FASTWEIGHTS_LOAD(""));
#undef FASTWEIGHTS_LOAD
}

// The transpose of an 8 x 8 matrix of 16-bit elements, a pair of neighbours of row `lane_row` in each lane.
DEVICE unsigned transpose_matrix(unsigned pair) {
    FASTWEIGHTS_INSTRUCTION(pair = emulation::movmatrix(pair),
                            asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;\n" : "+r"(pair)));
    return pair;
}

// ---- Products of a warpgroup -------------------------------------------------------------------------------------
// wgmma: the accumulators, and a left factor in registers, are laid out like those of mma.sync in each of four warps,
// 16 rows to a warp. Factors in shared memory are read asynchronously by 16-byte vectors: a proxy fence makes threads'
// writes visible to it, and results are there after a wait.

constexpr int kWarpgroupWarps = 4, kWgmmaColumns = 64;  // of a product

// An instruction of sm_90a, or the emulator's function.
#if defined(FASTWEIGHTS_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTWEIGHTS_SM90A FASTWEIGHTS_INSTRUCTION
#else
#define FASTWEIGHTS_SM90A(emulated, ...)
#endif

// True if the device has wgmma.
DEVICE bool has_wgmma() {
    FASTWEIGHTS_SM90A(return emulation::has_wgmma(), return true);
    return false;
}

// Makes this thread's writes to shared memory, and the copies that it has waited for, visible to wgmma from the next
// barrier on.
DEVICE void fence_async_proxy() {
    FASTWEIGHTS_SM90A(emulation::proxy_fence(), asm volatile("fence.proxy.async.shared::cta;\n" :: : "memory"));
}

// d += a b from `first` on: 16 rows of this warp, kWgmmaColumns columns, 16 inner indices. The left factor is in
// registers or, like the right one, given by a descriptor; a `Transposed` one is stored as (inner, row).
#define FASTWEIGHTS_WGMMA(type, left, right, turned, ...)                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                        \
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
                 "%26,%27,%28,%29,%30,%31}, " left ", " right ", 1, 1, 1" turned ";\n"                              \
                 : FASTWEIGHTS_FOUR("+f", d[first]), FASTWEIGHTS_FOUR("+f", d[first + 1]),                          \
                   FASTWEIGHTS_FOUR("+f", d[first + 2]), FASTWEIGHTS_FOUR("+f", d[first + 3]),                      \
                   FASTWEIGHTS_FOUR("+f", d[first + 4]), FASTWEIGHTS_FOUR("+f", d[first + 5]),                      \
                   FASTWEIGHTS_FOUR("+f", d[first + 6]), FASTWEIGHTS_FOUR("+f", d[first + 7])                       \
                 : __VA_ARGS__, "l"(b), "n"(RowsInner))
#define FASTWEIGHTS_WGMMA_FOR(...)                \
    if constexpr (Stored<T>::kDType == kBFloat16) \
        FASTWEIGHTS_WGMMA("bf16", __VA_ARGS__);   \
    else                                          \
        FASTWEIGHTS_WGMMA("f16", __VA_ARGS__)
template <typename T, bool RowsInner, bool Transposed, int N>
DEVICE void wgmma(float (&d)[N][4], int first, const unsigned (&a)[4], uint64_t b) {
    FASTWEIGHTS_SM90A(emulation::wgmma(d[first], kWgmmaColumns, a, b, RowsInner, Stored<T>::kDType == kBFloat16),
                      FASTWEIGHTS_WGMMA_FOR("{%32,%33,%34,%35}", "%36", ", %37", FASTWEIGHTS_FOUR("r", a)));
}
template <typename T, bool RowsInner, bool Transposed, int N>
DEVICE void wgmma(float (&d)[N][4], int first, uint64_t a, uint64_t b) {
    FASTWEIGHTS_SM90A(
        emulation::wgmma(d[first], kWgmmaColumns, a, Transposed, b, RowsInner, Stored<T>::kDType == kBFloat16),
        FASTWEIGHTS_WGMMA_FOR("%32", "%34", ", %33, %35", "l"(a), "n"(Transposed)));
}
#undef FASTWEIGHTS_WGMMA_FOR
#undef FASTWEIGHTS_WGMMA

// The type in which computed matrices are stored for products. Next to bfloat16 inputs it is bfloat16; states and their
// gradients stay in float32, but retrieved values are rounded, and so are updates of the delta rule and, with decays by
// dimension, the operands that these scale. Next to float16 it is float32, multiplied in tf32: in float16 a state above
// 65504, or its gradient under a loss scale, would overflow.
template <typename T>
constexpr bool kRounded = Stored<T>::kDType == kBFloat16;
template <typename T>
using Computed = std::conditional_t<kRounded<T>, T, float>;

// ---- Products of float32 -----------------------------------------------------------------------------------------
// In tf32 (8 bits of exponent, 10 of fraction, float32 accumulators):
//
//   Passes = 1  For numbers of 16 bits, which tf32 holds exactly.
//   Passes = 3  For float32. Each operand is a sum of two tf32 numbers, big + small; big * big + big * small +
//               small * big leaves out 2^-21 of a product.
//
// Tensor cores truncate the accumulator's low bits towards zero: errors of one sign, which would add up over a sum of
// thousands. In float32 (3 passes) each 8 terms are summed from zero and added by an ordinary addition, which rounds to
// the nearest (Ootomo and Yokota 2022); it is never contracted to a multiply-add, so that all kernels that compute a
// state compute the same bits.

enum class Rounding { kNearest, kCut, kNone };  // of one pass

template <int Passes, Rounding How, int N>
struct Operand {
    unsigned big[N], small[N];
    // In 3 passes `big` is rounded to the nearest, like to_tf32 for finite numbers but in two instructions instead of
    // four; `small` needs no rounding, since tensor cores ignore its low bits. A NaN may become 0 in `big`, but `small`
    // is then NaN, and so is every product. In one pass `kCut` makes 0 of a NaN.
    DEVICE explicit Operand(const float (&x)[N]) {
        UNROLL_FOR (int i = 0; i < N; ++i) {
            const unsigned bits = __float_as_uint(x[i]), half = Passes == 1 && How == Rounding::kNone ? 0 : 0x1000u;
            big[i] = Passes == 3                 ? (bits + half) & 0xffffe000u
                     : How == Rounding::kNearest ? to_tf32(x[i])
                                                 : bits + half;
            small[i] = Passes == 3 ? __float_as_uint(x[i] - __uint_as_float(big[i])) : 0;
        }
    }
};

// Four accumulators of a lane, (rows, 8 columns) of a warp, as the left factor of another product, in the same
// registers: the 8 inner indices are taken in the order 0, 2, 4, 6, 1, 3, 5, 7, in which a lane's two of the right
// factor are neighbours.
template <int Passes, Rounding How = Rounding::kNearest>
struct LeftOperand : Operand<Passes, How, 4> {
    DEVICE explicit LeftOperand(const float (&x)[4]) : Operand<Passes, How, 4>({x[0], x[2], x[1], x[3]}) {}

    // sums += this times b, of which the lane has b(2 lane_pair, lane_row) and b(2 lane_pair + 1, lane_row).
    template <Rounding OfRight = Rounding::kNearest>
    DEVICE void multiply(float (&sums)[4], float first, float second) const {
        const Operand<Passes, OfRight, 2> b({first, second});
        if constexpr (Passes == 1) return mma_tf32(sums, this->big, b.big);
        float parts[4] = {};
        mma_tf32(parts, this->small, b.big);
        mma_tf32(parts, this->big, b.small);
        mma_tf32(parts, this->big, b.big);
        UNROLL_FOR (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(sums[i], parts[i]);
    }
};

}  // namespace fairseq_fastweights
