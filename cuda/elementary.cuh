// Functions of one number that gates are made of.
#pragma once

#include "packs.cuh"

namespace fairseq_fastweights {

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
