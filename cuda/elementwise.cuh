// Neighbouring numbers of a row, 16 bytes at a time where they are aligned, else one by one; and functions of one
// number that gates are made of.
#pragma once

#include "recurrent/tile.cuh"

// A loop that is not unrolled.
#define ROLLED_FOR _Pragma("unroll 1") for

namespace fairseq_fastweights {

// Numbers of a type in 16 bytes; of float64, whose kernels are to be right rather than fast, one at a time.
template <typename T>
constexpr int kPack = sizeof(T) == 8 ? 1 : 16 / sizeof(T);

__host__ DEVICE bool is_aligned(const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

// True if 16-byte vectors of any step's row are aligned. `size`: an element's, in bytes.
__host__ DEVICE bool is_aligned(const Sequence& x, int size) {
    return is_aligned(x.data) && (x.batch | x.time | x.head) * size % 16 == 0;
}

// The first `count` of N numbers, and zeros; `whole` if they are N, and aligned.
template <int N, typename T>
DEVICE Pack<T, N> load_pack(const T* from, int count, bool whole) {
    if constexpr (N * sizeof(T) % 16 == 0) {
        if (whole) return *reinterpret_cast<const Pack<T, N>*>(from);
    }
    Pack<T, N> made{};
    UNROLL_FOR (int i = 0; i < N; ++i)
        if (i < count) made.x[i] = from[i];
    return made;
}

template <int N, typename T, typename A>
DEVICE void widen_pack(A (&to)[N], const Pack<T, N>& from) {
    UNROLL_FOR (int i = 0; i < N; ++i) to[i] = widen<A>(from.x[i]);
}

// A word as numbers, two of 16 bits or one of 32; and numbers as a word.
DEVICE void widen_word(float, float* to, unsigned word) { to[0] = __uint_as_float(word); }
DEVICE void widen_word(__half, float* to, unsigned word) {
    to[0] = __half2float(__ushort_as_half(word & 0xffffu)), to[1] = __half2float(__ushort_as_half(word >> 16));
}
DEVICE void widen_word(__nv_bfloat16, float* to, unsigned word) {
    to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000u);
}
DEVICE unsigned narrow_word(float, const float* x) { return __float_as_uint(x[0]); }
DEVICE unsigned narrow_word(__half, const float* x) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    return *reinterpret_cast<const unsigned*>(&pair);
}
DEVICE unsigned narrow_word(__nv_bfloat16, const float* x) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// One instruction each, which the compiler would make several of where others follow that access the same one by one.
DEVICE uint4 load_16_bytes(const void* from) {
#ifdef FASTWEIGHTS_EMULATION
    return *static_cast<const uint4*>(from);
#else
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
#endif
}
DEVICE void store_16_bytes(void* to, uint4 x) {
#ifdef FASTWEIGHTS_EMULATION
    *static_cast<uint4*>(to) = x;
#else
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
#endif
}

// True if N numbers are loaded and stored as 16-byte vectors where they are aligned.
template <int N, typename T, typename A>
constexpr bool kInPieces = sizeof(A) == 4 && sizeof(T) <= 4 && N * sizeof(T) % 16 == 0;

// to = the first `count` of N numbers, and zeros; `whole` if they are N, and aligned.
template <int N, typename T, typename A>
DEVICE void load_wide(A (&to)[N], const T* from, int count, bool whole) {
    if constexpr (kInPieces<N, T, A>) {
        constexpr int n = 4 / sizeof(T);
        if (whole) {
            UNROLL_FOR (int i = 0; i < N; i += 4 * n) {
                const uint4 x = load_16_bytes(from + i);
                widen_word(T(), to + i, x.x), widen_word(T(), to + i + n, x.y);
                widen_word(T(), to + i + 2 * n, x.z), widen_word(T(), to + i + 3 * n, x.w);
            }
            return;
        }
    }
    UNROLL_FOR (int i = 0; i < N; ++i) to[i] = i < count ? widen<A>(from[i]) : A(0);
}

template <int N, typename T, typename A>
DEVICE void store_pack(T* to, const A (&x)[N], int count, bool whole) {
    if constexpr (kInPieces<N, T, A>) {
        constexpr int n = 4 / sizeof(T);
        if (whole) {
            UNROLL_FOR (int i = 0; i < N; i += 4 * n)
                store_16_bytes(to + i, make_uint4(narrow_word(T(), x + i), narrow_word(T(), x + i + n),
                                                  narrow_word(T(), x + i + 2 * n), narrow_word(T(), x + i + 3 * n)));
            return;
        }
    }
    UNROLL_FOR (int i = 0; i < N; ++i)
        if (i < count) to[i] = narrow<T>(x[i]);
}

// use(T()) for the type T that a dtype is stored as.
template <typename F>
DEVICE void with_stored(int32_t dtype, const F& use) {
    switch (dtype) {
        case kFloat32: return use(float());
        case kFloat16: return use(__half());
        case kBFloat16: return use(__nv_bfloat16());
        default: use(double());
    }
}

// to = the first `count` of N numbers from x[index] on, and zeros, by a dtype known at run time.
template <int N, typename A>
DEVICE void load_numbers(A (&to)[N], const Sequence& x, int64_t index, int count) {
    with_stored(x.dtype, [&](auto type) {
        using T = decltype(type);
        const T* from = static_cast<const T*>(x.data) + index;
        load_wide(to, from, count, count >= N && is_aligned(from));
    });
}

template <int N, typename A>
DEVICE void store_numbers(const Sequence& x, int64_t index, const A (&from)[N], int count) {
    with_stored(x.dtype, [&](auto type) {
        using T = decltype(type);
        T* to = static_cast<T*>(x.data) + index;
        store_pack<N>(to, from, count, count >= N && is_aligned(to));
    });
}

// A type that is known at run time.
struct Any {};

template <typename T, int N, typename A>
DEVICE void load_as(A (&to)[N], const Sequence& x, int64_t index, int count, bool whole) {
    if constexpr (std::is_same_v<T, Any>)
        load_numbers(to, x, index, count);
    else
        load_wide(to, static_cast<const T*>(x.data) + index, count, whole);
}

template <typename T, int N, typename A>
DEVICE void store_as(const Sequence& x, int64_t index, const A (&from)[N], int count, bool whole) {
    if constexpr (std::is_same_v<T, Any>)
        store_numbers(x, index, from, count);
    else
        store_pack<N>(static_cast<T*>(x.data) + index, from, count, whole);
}

// 1 / x for x from 1 on, to a unit in the last place.
DEVICE float inverse_from_one(float x) {
#ifdef FASTWEIGHTS_EMULATION
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
DEVICE double inverse_from_one(double x) { return 1.0 / x; }

// 1 / sqrt(x).
DEVICE float inverse_root(float x) {
#ifdef FASTWEIGHTS_EMULATION
    return 1.0f / sqrtf(x);
#else
    return rsqrtf(x);
#endif
}
DEVICE double inverse_root(double x) { return 1.0 / sqrt(x); }

// log(1 + x) for x from 0 to 1, to two units in the last place: the polynomial that agrees at Chebyshev's points.
DEVICE float log_one_plus(float x) {
    constexpr float c[10] = {1.0f,         -0.49999893f, 0.3332971f,   -0.24951616f, 0.19663274f,
                             -0.15269667f, 0.105436236f, -0.05637361f, 0.019542527f, -0.003176057f};
    float sum = c[9];
    UNROLL_FOR (int i = 8; i >= 0; --i) sum = fmaf(sum, x, c[i]);
    return x * sum;
}
DEVICE double log_one_plus(double x) { return log1p(x); }

// An activation of u and its derivative. sigma(u) and 1 - sigma(u) have all their digits.
template <typename A>
struct Activated {
    A value, slope;

    DEVICE Activated(int activation, A u) {
        const A e = exponential(-fabs(u)), inverse = inverse_from_one(A(1) + e);
        const A sigma = (u < A(0) ? e : A(1)) * inverse, rest = (u < A(0) ? A(1) : e) * inverse;
        switch (activation) {
            case kSigmoid: value = sigma, slope = sigma * rest; return;
            case kSilu: value = u * sigma, slope = sigma * (u * rest + A(1)); return;
            case kLogSigmoid: value = (u > A(0) ? A(0) : u) - log_one_plus(e), slope = rest; return;
            default: value = (u < A(0) ? A(0) : u) + log_one_plus(e), slope = sigma;  // kSoftplus
        }
    }
};

}  // namespace fairseq_fastweights
