// Functions of one number that gates are made of.
#pragma once

#include "recurrent/tile.cuh"

namespace fairseq_fastweights {

DEVICE float log_one_plus(float x) { return log1pf(x); }
DEVICE double log_one_plus(double x) { return log1p(x); }

// An activation of u and its derivative. sigma(u) and 1 - sigma(u) have all their digits.
template <typename A>
struct Activated {
    A value, slope;

    DEVICE Activated(int activation, A u) {
        const A e = exponential(u < A(0) ? u : -u), inverse = A(1) / (A(1) + e);
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
