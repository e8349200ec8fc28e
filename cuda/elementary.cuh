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

DEVICE float log_one_plus(float x) { return log1pf(x); }
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
