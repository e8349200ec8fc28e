// Feature maps of queries and keys, whose vectors may be divided by their sum or by their length:
//
//     y = r phi(x)      phi_i = x_i,  max(x_i, 0) + exp(min(x_i, 0)),  max(x_i, 0)  or, for block j of 1 ... nu,
//                               z_i z_{i - j},  z = [max(x, 0), max(-x, 0)], indices modulo its size
//     r = scale,  scale / (sum_i phi_i + eps)  or  scale / sqrt(sum_i phi_i^2 + eps)
//
// and backwards, where g is the gradient of y and n the divisor of r: d_phi = r g, less r (g . phi) / n after a sum, or less
// r (g . phi) phi / n^2 after a length; of z_i in block j they are d_phi_i z_{i - j} + d_phi_{i + j} z_{i + j}. A sum that
// has underflowed divides nothing.
#pragma once

#include "rows.h"
#include "scratch.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {

FAST_WEIGHTS_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
FAST_WEIGHTS_INLINE double square_root(double x) { return __builtin_sqrt(x); }
template <class real> constexpr real SMALLEST_NORMAL = same<real, float> ? __FLT_MIN__ : __DBL_MIN__;

// max(x, 0) and min(x, 0); NaN stays NaN.
template <class real> FAST_WEIGHTS_INLINE real positive(real x) { return x < 0 ? real(0) : x; }
template <class V> FAST_WEIGHTS_INLINE V positive_lanes(V x) { return x < 0 ? V{} : x; }
template <class V> FAST_WEIGHTS_INLINE V negative_lanes(V x) { return x > 0 ? V{} : x; }

template <class real> class FeatureTask {
public:
    FeatureTask(const Features& p, Scratch<real>& scratch, bool backward)
        : p_(p), ld_x_(padded(p.dim)), ld_(padded(p.features())) {
        x_ = scratch.take(p.heads * ld_x_), y_ = scratch.take(p.heads * ld_);
        z_ = scratch.take(2 * p.dim + p.nu), dz_ = scratch.take(2 * p.dim + p.nu);
        if (backward) dy_ = scratch.take(p.heads * ld_);
    }

    // The heads of one step.
    void forward(index_t task) {
        const index_t b = task / p_.time, t = task % p_.time;
        load_rows(x_, p_.x, place(p_.x, b, t, 0), p_.x.head, p_.heads, p_.dim, 0);
        for (index_t h = 0; h < p_.heads; ++h) {
            real* y = y_ + h * ld_;
            map(x_ + h * ld_x_, y);
            scale(y, y, factor(y).r, ld_);
        }
        store_rows(p_.y, place(p_.y, b, t, 0), p_.y.head, y_, p_.heads, p_.features());
    }

    void backward(index_t task) {
        const index_t b = task / p_.time, t = task % p_.time;
        load_rows(x_, p_.x, place(p_.x, b, t, 0), p_.x.head, p_.heads, p_.dim, 0);
        load_rows(dy_, p_.dy, place(p_.dy, b, t, 0), p_.dy.head, p_.heads, p_.features(), 0);
        for (index_t h = 0; h < p_.heads; ++h) {
            real *x = x_ + h * ld_x_, *phi = y_ + h * ld_, *g = dy_ + h * ld_;
            if (p_.normalization != Normalization::none) {
                map(x, phi);
                const Factor f = factor(phi);
                const real shared = dot(g, phi, ld_);
                scale(g, g, f.r, ld_);
                if (p_.normalization == Normalization::length) {
                    scale_add(g, phi, -f.r * shared * f.inverse * f.inverse, ld_);
                } else if (f.divides) {
                    const vec<real> less = vec<real>{} + f.r * shared * f.inverse;
                    for (index_t i = 0; i < ld_; i += W) store(g + i, load(g + i) - less);
                }
            } else {
                scale(g, g, static_cast<real>(p_.scale), ld_);
            }
            differentiate(x, g);
        }
        store_rows(p_.dx, place(p_.dx, b, t, 0), p_.dx.head, x_, p_.heads, p_.dim);
    }

private:
    static constexpr int W = Vector<real>::lanes;

    // r, and the inverse of its divisor, if anything is divided.
    struct Factor {
        real r, inverse;
        bool divides;
    };

    Factor factor(const real* phi) const {
        const real whole = static_cast<real>(p_.scale), eps = static_cast<real>(p_.eps);
        if (p_.normalization == Normalization::none) return {whole, 1, false};
        if (p_.normalization == Normalization::length) {
            const real inverse = 1 / square_root(dot(phi, phi, ld_) + eps);
            return {whole * inverse, inverse, true};
        }
        vec<real> sums{};
        for (index_t i = 0; i < ld_; i += W) sums += load(phi + i);
        const real total = sum<real>(sums) + eps;
        // Also where it is NaN, which stays: a comparison with it is false.
        if (total < SMALLEST_NORMAL<real> && -total < SMALLEST_NORMAL<real>) return {whole, 1, false};
        return {whole / total, 1 / total, true};
    }

    // phi(x), and zeros beyond its end, which add nothing to sums.
    void map(const real* x, real* y) {
        switch (p_.map) {
            case Map::identity: return copy(y, x, ld_);
            case Map::relu:
                for (index_t i = 0; i < ld_; i += W) store(y + i, positive_lanes(load(x + i)));
                return;
            case Map::elu:
                for (index_t i = 0; i < ld_; i += W)
                    store(y + i, positive_lanes(load(x + i)) + exponential(negative_lanes(load(x + i))));
                for (index_t i = p_.dim; i < ld_; ++i) y[i] = 0;
                return;
            case Map::dpfp:
                open(x);
                const real* z = z_ + p_.nu;
                for (index_t j = 1; j <= p_.nu; ++j) {
                    real* __restrict block = y + (j - 1) * 2 * p_.dim;
                    for (index_t i = 0; i < 2 * p_.dim; ++i) block[i] = z[i] * z[i - j];
                }
                for (index_t i = p_.features(); i < ld_; ++i) y[i] = 0;
        }
    }

    // x = the gradient of x, from that of phi.
    void differentiate(real* x, const real* g) {
        switch (p_.map) {
            case Map::identity: return copy(x, g, ld_);
            case Map::relu:
                for (index_t i = 0; i < ld_; i += W) store(x + i, load(x + i) <= 0 ? vec<real>{} : load(g + i));
                return;
            case Map::elu:
                for (index_t i = 0; i < ld_; i += W) {
                    const vec<real> at = load(x + i), from = load(g + i);
                    store(x + i, at > 0 ? from : from * exponential(at));
                }
                return;
            case Map::dpfp:
                open(x);
                const real* z = z_ + p_.nu;
                real* dz = dz_ + p_.nu;
                for (index_t i = -p_.nu; i < 2 * p_.dim; ++i) dz[i] = 0;
                for (index_t j = 1; j <= p_.nu; ++j) {
                    const real* block = g + (j - 1) * 2 * p_.dim;
                    for (index_t i = 0; i < 2 * p_.dim; ++i) dz[i] += block[i] * z[i - j];
                    for (index_t i = 0; i < 2 * p_.dim; ++i) dz[i - j] += block[i] * z[i];
                }
                for (index_t i = -p_.nu; i < 0; ++i) dz[i + 2 * p_.dim] += dz[i];
                for (index_t i = 0; i < p_.dim; ++i) { x[i] = x[i] > 0 ? dz[i] : x[i] < 0 ? -dz[i + p_.dim] : real(0); }
        }
    }

    // z, with its last nu numbers once more before it.
    void open(const real* x) {
        real* z = z_ + p_.nu;
        for (index_t i = 0; i < p_.dim; ++i) {
            z[i] = positive(x[i]);
            z[i + p_.dim] = positive(-x[i]);
        }
        for (index_t i = -p_.nu; i < 0; ++i) z[i] = z[i + 2 * p_.dim];
    }

    const Features& p_;
    const index_t ld_x_, ld_;
    // Of each head: x, then its gradient; phi, then y; and the gradient of y. Of one head z and its gradient.
    real *x_, *y_, *dy_ = nullptr, *z_, *dz_;
};

template <class real, void (FeatureTask<real>::*run)(index_t)>
void feature_tasks(const Features& p, index_t begin, index_t end, bool backward) {
    Scratch<real> scratch;
    { FeatureTask<real> counted(p, scratch, backward); }
    scratch.allocate();
    FeatureTask<real> task(p, scratch, backward);
    for (index_t number = begin; number < end; ++number) (task.*run)(number);
}

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
