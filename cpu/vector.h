// Vectors of the instruction set that this file is compiled for, and rows of numbers made of them.
//
// Everything here lives in a namespace named after the instruction set, and no inline function of the standard library
// is used: the linker keeps one copy of such a function, and might keep one that this processor cannot run.
#pragma once

#include <cstdint>

#include "kernels.h"

#if defined(__AVX512F__)
#define FAST_WEIGHTS_VECTOR_BYTES 64
#elif defined(__AVX__)
#define FAST_WEIGHTS_VECTOR_BYTES 32
#else
#define FAST_WEIGHTS_VECTOR_BYTES 16  // SSE2, NEON
#endif

#define FAST_WEIGHTS_INLINE inline __attribute__((always_inline))
// A loop with a known number of passes, which the compiler writes one after another.
#define UNROLL_FOR _Pragma("GCC unroll 32") for

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

using index_t = int64_t;

template <class real> struct Vector {
    static constexpr int lanes = FAST_WEIGHTS_VECTOR_BYTES / sizeof(real);
    typedef real type __attribute__((vector_size(FAST_WEIGHTS_VECTOR_BYTES), may_alias));
    typedef real unaligned __attribute__((vector_size(FAST_WEIGHTS_VECTOR_BYTES), may_alias, aligned(sizeof(real))));
};
template <class real> using vec = typename Vector<real>::type;
typedef int32_t ivec __attribute__((vector_size(FAST_WEIGHTS_VECTOR_BYTES), may_alias));
typedef int64_t lvec __attribute__((vector_size(FAST_WEIGHTS_VECTOR_BYTES), may_alias));
template <class real> struct Index;
template <> struct Index<float> {
    typedef ivec type;
};
template <> struct Index<double> {
    typedef lvec type;
};

// The type of a tensor that holds the kernels' own numbers.
template <class real> struct Number;
template <> struct Number<float> {
    static constexpr DType dtype = kFloat32;
};
template <> struct Number<double> {
    static constexpr DType dtype = kFloat64;
};

// The kernels' own numbers from an address on, which is all that is said of them.
template <class real> inline Sequence numbers_at(const void* data) {
    return {const_cast<void*>(data), 0, 0, 0, Number<real>::dtype};
}

// Rows in scratch memory begin at multiples of this many numbers: 64 bytes, whatever the instruction set.
constexpr index_t ROW = 16;
constexpr index_t padded(index_t n) { return (n + ROW - 1) / ROW * ROW; }

template <class real> FAST_WEIGHTS_INLINE vec<real> load(const real* p) {
    return *reinterpret_cast<const vec<real>*>(p);
}
template <class real> FAST_WEIGHTS_INLINE void store(real* p, vec<real> x) { *reinterpret_cast<vec<real>*>(p) = x; }

// The same at any address.
template <class real> FAST_WEIGHTS_INLINE vec<real> load_unaligned(const real* p) {
    return *reinterpret_cast<const typename Vector<real>::unaligned*>(p);
}
template <class real> FAST_WEIGHTS_INLINE void store_unaligned(real* p, vec<real> x) {
    *reinterpret_cast<typename Vector<real>::unaligned*>(p) = x;
}

// Two vectors interleaved: the lower halves (a0 b0 a1 b1 ...) or the upper ones.
template <class real, bool upper> FAST_WEIGHTS_INLINE vec<real> interleave(vec<real> a, vec<real> b) {
    constexpr int W = Vector<real>::lanes;
    constexpr int o = upper ? W / 2 : 0;
#if defined(__clang__)
    if constexpr (W == 2) return __builtin_shufflevector(a, b, o, W + o);
    if constexpr (W == 4) return __builtin_shufflevector(a, b, o, W + o, o + 1, W + o + 1);
    if constexpr (W == 8)
        return __builtin_shufflevector(a, b, o, W + o, o + 1, W + o + 1, o + 2, W + o + 2, o + 3, W + o + 3);
    if constexpr (W == 16)
        return __builtin_shufflevector(a, b, o, W + o, o + 1, W + o + 1, o + 2, W + o + 2, o + 3, W + o + 3, o + 4,
                                       W + o + 4, o + 5, W + o + 5, o + 6, W + o + 6, o + 7, W + o + 7);
#else
    typename Index<real>::type places{};
    for (int i = 0; i < W; ++i) places[i] = o + i / 2 + (i % 2 ? W : 0);
    return __builtin_shuffle(a, b, places);
#endif
}

// dst (16, 16) = src (16, 16) transposed.
template <class real> inline void transpose_tile(real* dst, index_t ldd, const real* src, index_t lds) {
    constexpr int W = Vector<real>::lanes;
    for (index_t r = 0; r < 16; r += W) {
        for (index_t c = 0; c < 16; c += W) {
            vec<real> a[W], b[W];
            UNROLL_FOR (int i = 0; i < W; ++i) a[i] = load(src + (r + i) * lds + c);
            UNROLL_FOR (int stage = 1; stage < W; stage *= 2) {
                UNROLL_FOR (int i = 0; i < W / 2; ++i) {
                    b[2 * i] = interleave<real, false>(a[i], a[i + W / 2]);
                    b[2 * i + 1] = interleave<real, true>(a[i], a[i + W / 2]);
                }
                UNROLL_FOR (int i = 0; i < W; ++i) a[i] = b[i];
            }
            UNROLL_FOR (int i = 0; i < W; ++i) store(dst + (c + i) * ldd + r, a[i]);
        }
    }
}

// dst (cols, rows) = src (rows, cols) transposed; both sizes are multiples of 16.
template <class real>
inline void transpose(real* dst, index_t ldd, const real* src, index_t lds, index_t rows, index_t cols) {
    for (index_t r = 0; r < rows; r += 16) {
        for (index_t c = 0; c < cols; c += 16) transpose_tile(dst + c * ldd + r, ldd, src + r * lds + c, lds);
    }
}

// Row operations on n numbers, n a multiple of ROW.

template <class real> inline void fill(real* x, real value, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(x + i, vec<real>{} + value);
}

template <class real> inline void copy(real* y, const real* x, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(y + i, load(x + i));
}

// y += a
template <class real> inline void add(real* y, const real* a, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(y + i, load(y + i) + load(a + i));
}

// y = a * b
template <class real> inline void multiply(real* y, const real* a, const real* b, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(y + i, load(a + i) * load(b + i));
}

// y += a * b
template <class real> inline void multiply_add(real* y, const real* a, const real* b, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(y + i, load(y + i) + load(a + i) * load(b + i));
}

// y = s * a
template <class real> inline void scale(real* y, const real* a, real s, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(y + i, load(a + i) * s);
}

// y += s * a
template <class real> inline void scale_add(real* y, const real* a, real s, index_t n) {
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < n; i += W) store(y + i, load(y + i) + load(a + i) * s);
}

// The lanes' numbers 0, 1, 2 ...
template <class real> FAST_WEIGHTS_INLINE typename Index<real>::type lane_numbers() {
    typename Index<real>::type numbers{};
    for (int i = 0; i < Vector<real>::lanes; ++i) numbers[i] = i;
    return numbers;
}

template <class real> FAST_WEIGHTS_INLINE real sum(vec<real> x) {
    constexpr int W = Vector<real>::lanes;
#if defined(__clang__)
    real total = 0;
    for (int i = 0; i < W; ++i) total += x[i];
    return total;
#else
    UNROLL_FOR (int half = W / 2; half > 0; half /= 2) x += __builtin_shuffle(x, lane_numbers<real>() ^ half);
    return x[0];
#endif
}

// Two vectors folded into one, lanes `apart` (a power of two) onto one another: lane i is the sum of lanes i and i ^
// apart, of a where i & apart is 0 and of b where it is not.
template <class real, int has_erase_key> FAST_WEIGHTS_INLINE vec<real> folded(vec<real> a, vec<real> b) {
    constexpr int W = Vector<real>::lanes;
#if defined(__clang__)
    vec<real> sums;
    for (int i = 0; i < W; ++i) sums[i] = i & has_erase_key ? b[i] + b[i ^ has_erase_key] : a[i] + a[i ^ has_erase_key];
    return sums;
#else
    // A number that stays in its lane is a blend, which more units of a processor can do than the permutation of the
    // rest.
    typename Index<real>::type stays{}, moves{};
    for (int i = 0; i < W; ++i) {
        stays[i] = i & has_erase_key ? W + i : i;
        moves[i] = stays[i] ^ has_erase_key;
    }
    return __builtin_shuffle(a, b, stays) + __builtin_shuffle(a, b, moves);
#endif
}

// sums[i] = the sum of the lanes of vector i of x, for as many vectors as a vector has lanes.
template <int vectors, int has_erase_key, class real> FAST_WEIGHTS_INLINE vec<real> sum_from(const real* x) {
    constexpr int W = Vector<real>::lanes;
    if constexpr (has_erase_key >= vectors) {
        return load(x);
    } else {
        return folded<real, has_erase_key>(sum_from<vectors, 2 * has_erase_key>(x),
                                           sum_from<vectors, 2 * has_erase_key>(x + has_erase_key * W));
    }
}
template <class real> inline void sum_vectors(real* sums, const real* x) {
    store(sums, sum_from<Vector<real>::lanes, 1>(x));
}

template <class real> inline real dot(const real* a, const real* b, index_t n) {
    constexpr int W = Vector<real>::lanes;
    vec<real> total{};
    for (index_t i = 0; i < n; i += W) total += load(a + i) * load(b + i);
    return sum<real>(total);
}

// p and `scale`, a power of two, of which exp(y) = (1 + p) * scale; p is at most 0.42 and as exact as y is small.
FAST_WEIGHTS_INLINE vec<float> reduced_exponential(vec<float> y, vec<float>& scale) {
    constexpr float round_off = 12582912.f;  // 1.5 * 2^23: adding it leaves no fraction
    const vec<float> whole = (y * 1.44269504088896341f + round_off) - round_off;
    vec<float> r = y - whole * 0.693359375f;
    r = r - whole * -2.12194440054690583e-4f;
    vec<float> p = vec<float>{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
    scale = reinterpret_cast<const vec<float>&>(power);
    return p * (r * r) + r;
}

// exp(x) for x at most 0, to about an ulp; results below the smallest normal number become 0, NaN stays NaN.
FAST_WEIGHTS_INLINE vec<float> exponential(vec<float> x) {
    vec<float> scale;
    const vec<float> p = reduced_exponential(x > 88.f ? vec<float>{} + 88.f : x, scale);
    return x < -87.3f ? vec<float>{} : (p + 1.f) * scale;
}

FAST_WEIGHTS_INLINE vec<double> exponential(vec<double> x) {
    for (int i = 0; i < Vector<double>::lanes; ++i) x[i] = __builtin_exp(x[i]);
    return x;
}

// x = exp(x), likewise.
template <class real> inline void exponentiate(real* x, index_t n) {
    for (index_t i = 0; i < n; i += Vector<real>::lanes) store(x + i, exponential(load(x + i)));
}

// y = exp(-x) and x = exp(x), to about an ulp, for x between -64 and 64.
inline void exponentiate_small(float* x, float* y, index_t n) {
    for (index_t i = 0; i < n; i += Vector<float>::lanes) {
        constexpr float round_off = 12582912.f;
        const vec<float> given = load(x + i);
        const vec<float> whole = (given * 1.44269504088896341f + round_off) - round_off;
        vec<float> r = given - whole * 0.693359375f;
        r = r - whole * -2.12194440054690583e-4f;
        // exp(r) and exp(-r) are the sum and the difference of cosh(r) and sinh(r), whose series end here for |r| <
        // 0.35.
        const vec<float> u = r * r;
        vec<float> cosh = u * 1.3888889e-3f + 4.1666668e-2f, sinh = u * 1.9841270e-4f + 8.3333333e-3f;
        cosh = (cosh * u + 0.5f) * u + 1.f;
        sinh = ((sinh * u + 1.6666667e-1f) * u) * r + r;
        const ivec power = __builtin_convertvector(whole, ivec);
        const ivec scale = (127 + power) << 23, inverse = (127 - power) << 23;
        store(x + i, (cosh + sinh) * reinterpret_cast<const vec<float>&>(scale));
        store(y + i, (cosh - sinh) * reinterpret_cast<const vec<float>&>(inverse));
    }
}

inline void exponentiate_small(double* x, double* y, index_t n) {
    for (index_t i = 0; i < n; ++i) {
        x[i] = __builtin_exp(x[i]);
        y[i] = 1 / x[i];
    }
}

// x = 1 - exp(x) for x at most 0, to about two ulp, however close to 0; NaN stays NaN.
inline void exponentiate_to_one(float* x, index_t n) {
    for (index_t i = 0; i < n; i += Vector<float>::lanes) {
        const vec<float> given = load(x + i);
        vec<float> scale;
        const vec<float> p = reduced_exponential(given > 88.f ? vec<float>{} + 88.f : given, scale);
        store(x + i, given < -87.3f ? vec<float>{} + 1.f : (1.f - scale) - p * scale);
    }
}

inline void exponentiate_to_one(double* x, index_t n) {
    for (index_t i = 0; i < n; ++i) x[i] = -__builtin_expm1(x[i]);
}

FAST_WEIGHTS_INLINE float bits_to_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

FAST_WEIGHTS_INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

FAST_WEIGHTS_INLINE float from_bfloat16(uint16_t x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }

FAST_WEIGHTS_INLINE uint16_t to_bfloat16(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

FAST_WEIGHTS_INLINE float from_float16(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, rest = x & 0x7fffu;
    // Multiplying by 2^112 moves the exponent to where float32 has it, denormal numbers included.
    const float magnitude = bits_to_float(rest << 13) * 5.192296858534828e33f;
    const uint32_t bits = rest >= 0x7c00u ? 0x7f800000u | (rest << 13) : float_to_bits(magnitude);
    return bits_to_float(bits | sign);
}

FAST_WEIGHTS_INLINE uint16_t to_float16(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
    uint32_t half;
    if (magnitude >= 0x47800000u) {  // 2^16 and above, infinite or NaN
        half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: denormal; adding 0.5 rounds it into the lowest bits
        half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return static_cast<uint16_t>(half | (sign >> 16));
}

FAST_WEIGHTS_INLINE float from_stored(float x) { return x; }
FAST_WEIGHTS_INLINE double from_stored(double x) { return x; }

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
FAST_WEIGHTS_INLINE float from_stored(Bfloat16 x) { return from_bfloat16(x.bits); }
FAST_WEIGHTS_INLINE float from_stored(Float16 x) { return from_float16(x.bits); }
template <class real> FAST_WEIGHTS_INLINE void to_stored(float& y, real x) { y = static_cast<float>(x); }
template <class real> FAST_WEIGHTS_INLINE void to_stored(double& y, real x) { y = x; }
template <class real> FAST_WEIGHTS_INLINE void to_stored(Bfloat16& y, real x) {
    y.bits = to_bfloat16(static_cast<float>(x));
}
template <class real> FAST_WEIGHTS_INLINE void to_stored(Float16& y, real x) {
    y.bits = to_float16(static_cast<float>(x));
}

// A value as a type, for templates of a functor.
template <auto constant> struct Constant {
    static constexpr auto value = constant;
};

template <class a, class b> constexpr bool same = false;
template <class a> constexpr bool same<a, a> = true;

// Calls work(p), p being x's elements from `offset` on, as their type.
template <class Work> FAST_WEIGHTS_INLINE void with_type(const Sequence& x, index_t offset, const Work& work) {
    switch (x.dtype) {
        case kFloat32: return work(static_cast<float*>(x.data) + offset);
        case kFloat64: return work(static_cast<double*>(x.data) + offset);
        case kBFloat16: return work(static_cast<Bfloat16*>(x.data) + offset);
        case kFloat16: return work(static_cast<Float16*>(x.data) + offset);
    }
}

// Fetches n bytes that are wanted soon into the second cache: the first holds only the rows at hand.
FAST_WEIGHTS_INLINE void prefetch(const void* from, index_t bytes) {
    for (index_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Rows of n numbers, n a multiple of ROW, from and to any address: y = x, or x times `factors` if `scaled`.
template <bool scaled, class real>
FAST_WEIGHTS_INLINE void move_rows(real* y, index_t step_y, const real* x, index_t step_x, index_t rows, index_t n,
                                   const real* factors) {
    constexpr int W = Vector<real>::lanes;
    for (; rows > 0; --rows, y += step_y, x += step_x, factors += scaled ? n : 0) {
        for (index_t i = 0; i < n; i += W) {
            const vec<real> z = load_unaligned(x + i);
            store_unaligned(y + i, scaled ? z * load(factors + i) : z);
        }
    }
}

// `rows` rows of n numbers that are `step` elements apart, to rows of padded(n) numbers whose rest becomes 0, times
// `factors` (rows as these) if `scaled`. Those `ahead` elements further are fetched: rows of short heads lie too far
// apart for the processor to guess.
template <bool scaled = false, class real>
inline void load_rows(real* dst, const Sequence& x, index_t offset, index_t step, index_t rows, index_t n,
                      index_t ahead, const real* factors = nullptr) {
    const index_t ld = padded(n);
    with_type(x, offset, [=](const auto* p) {
        for (index_t r = 0; ahead != 0 && r < rows; ++r) prefetch(p + r * step + ahead, n * sizeof(*p));
        if constexpr (same<decltype(p), const real*>) {
            if (n == ld) return move_rows<scaled>(dst, ld, p, step, rows, n, factors);
        }
        for (index_t r = 0; r < rows; ++r) {
            const auto* from = p + r * step;
            real* row = dst + r * ld;
            index_t i = 0;
            for (; i + ROW <= n; i += ROW) {
                for (index_t j = 0; j < ROW; ++j) row[i + j] = static_cast<real>(from_stored(from[i + j]));
            }
            for (; i < n; ++i) row[i] = static_cast<real>(from_stored(from[i]));
            for (; i < ld; ++i) row[i] = 0;
        }
        if (scaled) multiply(dst, dst, factors, rows * ld);
    });
}

// The other way around; `src` may be used up.
template <bool scaled = false, class real>
inline void store_rows(const Sequence& x, index_t offset, index_t step, real* src, index_t rows, index_t n,
                       const real* factors = nullptr) {
    const index_t ld = padded(n);
    with_type(x, offset, [=](auto* p) {
        if constexpr (same<decltype(p), real*>) {
            if (n == ld) return move_rows<scaled>(p, step, src, ld, rows, n, factors);
        }
        if (scaled) multiply(src, src, factors, rows * ld);
        for (index_t r = 0; r < rows; ++r) {
            auto* to = p + r * step;
            const real* row = src + r * ld;
            index_t i = 0;
            for (; i + ROW <= n; i += ROW) {
                for (index_t j = 0; j < ROW; ++j) to_stored(to[i + j], row[i + j]);
            }
            for (; i < n; ++i) to_stored(to[i], row[i]);
        }
    });
}

// One number, such as a step's gate or beta.
template <class real> FAST_WEIGHTS_INLINE real load_one(const Sequence& x, index_t offset) {
    real value = 0;
    with_type(x, offset, [&](const auto* p) { value = static_cast<real>(from_stored(*p)); });
    return value;
}

template <class real> FAST_WEIGHTS_INLINE void store_one(const Sequence& x, index_t offset, real value) {
    with_type(x, offset, [=](auto* p) { to_stored(*p, value); });
}

FAST_WEIGHTS_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
FAST_WEIGHTS_INLINE double square_root(double x) { return __builtin_sqrt(x); }
FAST_WEIGHTS_INLINE float exponential(float x) { return __builtin_expf(x); }
FAST_WEIGHTS_INLINE double exponential(double x) { return __builtin_exp(x); }
FAST_WEIGHTS_INLINE float exponential_minus_one(float x) { return __builtin_expm1f(x); }
FAST_WEIGHTS_INLINE double exponential_minus_one(double x) { return __builtin_expm1(x); }

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
