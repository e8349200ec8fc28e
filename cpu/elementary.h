// Functions of one number that gates and feature maps are made of, for vectors.
#pragma once

#include "vector.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// exp(x) for x of any sign, infinite where that is; NaN stays NaN.
template <class V> FAST_WEIGHTS_INLINE V exponential_of_any(V x) {
    constexpr float e8 = 2980.957987041728f;  // exp(8)
    return x > 80 ? exponential(x - 8) * e8 : exponential(x);
}
template <> FAST_WEIGHTS_INLINE vec<double> exponential_of_any(vec<double> x) { return exponential(x); }

// log(1 + e) for e from 0 to 1, to about an ulp: 2 artanh(e / (2 + e)), whose series ends here.
FAST_WEIGHTS_INLINE vec<float> log_one_plus(vec<float> e) {
    const vec<float> z = e / (e + 2.f), u = z * z;
    vec<float> p = u * (1.f / 15) + 1.f / 13;
    p = p * u + 1.f / 11;
    p = p * u + 1.f / 9;
    p = p * u + 1.f / 7;
    p = p * u + 1.f / 5;
    p = p * u + 1.f / 3;
    return 2.f * (z * (u * p) + z);
}
FAST_WEIGHTS_INLINE vec<double> log_one_plus(vec<double> e) {
    for (int i = 0; i < Vector<double>::lanes; ++i) e[i] = __builtin_log1p(e[i]);
    return e;
}

// sigma(u) = 1 / (1 + exp(-u)), 1 - sigma(u), both with all their digits, and log(1 + exp(-|u|)).
template <class real> struct Logistic {
    vec<real> e, value, complement;
    FAST_WEIGHTS_INLINE explicit Logistic(vec<real> u) : e(exponential(u < 0 ? u : -u)) {
        const vec<real> one = vec<real>{} + 1, inverse = one / (one + e);
        value = (u < 0 ? e : one) * inverse, complement = (u < 0 ? one : e) * inverse;
    }
    FAST_WEIGHTS_INLINE vec<real> log() const { return log_one_plus(e); }
};

// An activation of u, and its derivative.
template <Activation activation, class real> struct Activated {
    vec<real> value, slope;
    FAST_WEIGHTS_INLINE explicit Activated(vec<real> u) {
        const Logistic<real> sigma(u);
        const vec<real> zero{};
        switch (activation) {
            case kSigmoid: value = sigma.value, slope = sigma.value * sigma.complement; return;
            case kSilu: value = u * sigma.value, slope = sigma.value * (u * sigma.complement + 1); return;
            case kLogSigmoid: value = (u > 0 ? zero : u) - sigma.log(), slope = sigma.complement; return;
            case kSoftplus: value = (u < 0 ? zero : u) + sigma.log(), slope = sigma.value; return;
        }
    }
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
