// Stands in for CUDA's header: storage and conversions, no arithmetic.
#pragma once

#include "cuda_runtime.h"

struct __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

// To the nearest, ties to even, as the hardware rounds.
inline __half __float2half_rn(float value) {
    const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7fffu)};
    if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (rest < 0x38800000u) {  // subnormal: adding 0.5 puts its last digit where a float's last digit is
        const uint32_t shifted = __float_as_uint(__uint_as_float(rest) + 0.5f) - __float_as_uint(0.5f);
        return {static_cast<uint16_t>(sign | shifted)};
    }
    const uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}
inline float __half2float(__half value) {
    const uint32_t sign = (value.bits & 0x8000u) << 16, exponent = value.bits >> 10 & 31u, digits = value.bits & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(digits) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | digits << 13);
    return __uint_as_float(sign | (exponent + 112u) << 23 | digits << 13);
}
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
