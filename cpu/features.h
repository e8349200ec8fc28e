// Feature maps of queries and keys, whose vectors may be divided by their sum or by their length:
//
//     y = r phi(x)      phi_i = x_i,  max(x_i, 0) + exp(min(x_i, 0)),  max(x_i, 0)  or, for block j of 1 ... nu,
//                               z_i z_{i - j},  z = [max(x, 0), max(-x, 0)], indices modulo its size
//                       or random features, exp(l_i - m) + exp(log_epsilon - m),  l = [s + x, s - x],
//                               s = -(|c source|^2 + log(2 dim)) / 2,  m = 0 or the largest of all l and log_epsilon
//     r = scale,  scale / (sum_i phi_i + eps)  or  scale / sqrt(sum_i phi_i^2 + eps)
//
// and backwards, where g is the gradient of y and n the divisor of r: d_phi = r g, less r (g . phi) / n after a sum, or
// less r (g . phi) phi / n^2 after a length; of z_i in block j they are d_phi_i z_{i - j} + d_phi_{i + j} z_{i + j}.
// Nothing goes back through m, which a normalisation takes out again. A sum that has underflowed divides nothing.
#pragma once

#include "elementary.h"
#include "rows.h"
#include "scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real> constexpr real SMALLEST_NORMAL = same<real, float> ? __FLT_MIN__ : __DBL_MIN__;

// max(x, 0) and min(x, 0); NaN stays NaN.
template <class real> FAST_WEIGHTS_INLINE real positive(real x) { return x < 0 ? real(0) : x; }
template <class V> FAST_WEIGHTS_INLINE V positive_lanes(V x) { return x < 0 ? V{} : x; }
template <class V> FAST_WEIGHTS_INLINE V negative_lanes(V x) { return x > 0 ? V{} : x; }

template <class real> class FeatureKernel {
public:
    FeatureKernel(const Features& p, Scratch<real>& scratch, bool backward)
        : p_(p), ld_x_(padded(p.dim)), ld_(padded(p.features())) {
        x_ = scratch.take(p.heads * ld_x_), y_ = scratch.take(p.heads * ld_);
        z_ = scratch.take(2 * p.dim + p.nu), dz_ = scratch.take(2 * p.dim + p.nu);
        if (backward) dy_ = scratch.take(p.heads * ld_);
        if (p.map == kRandom) source_ = scratch.take(p.heads * padded(p.source_dim));
    }

    // The heads of one step.
    void forward(index_t item) {
        const index_t b = item / p_.time, t = item % p_.time;
        read(b, t);
        for (index_t h = 0; h < p_.heads; ++h) {
            real* y = y_ + h * ld_;
            map(x_ + h * ld_x_, y, h);
            scale(y, y, factor(y).r, ld_);
        }
        store_rows(p_.y, place(p_.y, b, t, 0), p_.y.head, y_, p_.heads, p_.features());
    }

    void backward(index_t item) {
        const index_t b = item / p_.time, t = item % p_.time;
        read(b, t);
        load_rows(dy_, p_.dy, place(p_.dy, b, t, 0), p_.dy.head, p_.heads, p_.features(), 0);
        for (index_t h = 0; h < p_.heads; ++h) {
            real *x = x_ + h * ld_x_, *phi = y_ + h * ld_, *g = dy_ + h * ld_;
            if (p_.normalization != kNone) {
                map(x, phi, h);
                const Factor f = factor(phi);
                const real shared = dot(g, phi, ld_);
                scale(g, g, f.r, ld_);
                if (p_.normalization == kLength) {
                    scale_add(g, phi, -f.r * shared * f.inverse * f.inverse, ld_);
                } else if (f.divides) {
                    const vec<real> less = vec<real>{} + f.r * shared * f.inverse;
                    for (index_t i = 0; i < ld_; i += W) store(g + i, load(g + i) - less);
                }
            } else {
                scale(g, g, static_cast<real>(p_.scale), ld_);
            }
            differentiate(x, g, h);
        }
        store_rows(p_.dx, place(p_.dx, b, t, 0), p_.dx.head, x_, p_.heads, p_.dim);
        if (p_.map != kRandom) return;
        store_rows(p_.d_source, place(p_.d_source, b, t, 0), p_.d_source.head, source_, p_.heads, p_.source_dim);
    }

private:
    static constexpr int W = Vector<real>::lanes;

    void read(index_t b, index_t t) {
        load_rows(x_, p_.x, place(p_.x, b, t, 0), p_.x.head, p_.heads, p_.dim, 0);
        if (p_.map != kRandom) return;
        load_rows(source_, p_.source, place(p_.source, b, t, 0), p_.source.head, p_.heads, p_.source_dim, 0);
    }

    // r, and the inverse of its divisor, if anything is divided.
    struct Factor {
        real r, inverse;
        bool divides;
    };

    Factor factor(const real* phi) const {
        const real whole = static_cast<real>(p_.scale), eps = static_cast<real>(p_.eps);
        if (p_.normalization == kNone) return {whole, 1, false};
        if (p_.normalization == kLength) {
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

    // phi(x) of head h, and zeros beyond its end, which add nothing to sums.
    void map(const real* x, real* y, index_t h) {
        switch (p_.map) {
            case kIdentity: return copy(y, x, ld_);
            case kRandom: return map_random(x, y, h);
            case kRelu:
                for (index_t i = 0; i < ld_; i += W) store(y + i, positive_lanes(load(x + i)));
                return;
            case kElu:
                for (index_t i = 0; i < ld_; i += W)
                    store(y + i, positive_lanes(load(x + i)) + exponential(negative_lanes(load(x + i))));
                for (index_t i = p_.dim; i < ld_; ++i) y[i] = 0;
                return;
            case kDpfp:
                open(x);
                const real* z = z_ + p_.nu;
                for (index_t j = 1; j <= p_.nu; ++j) {
                    real* __restrict block = y + (j - 1) * 2 * p_.dim;
                    for (index_t i = 0; i < 2 * p_.dim; ++i) block[i] = z[i] * z[i - j];
                }
                for (index_t i = p_.features(); i < ld_; ++i) y[i] = 0;
        }
    }

    void map_random(const real* x, real* y, index_t h) {
        const Exponents l(*this, x, h);
        const vec<real> epsilon = exponential_of_any(vec<real>{} + l.epsilon);
        for (index_t i = 0; i < ld_x_; i += W) {
            store(z_ + i, exponential_of_any(l.base + load(x + i)) + epsilon);
            store(dz_ + i, exponential_of_any(l.base - load(x + i)) + epsilon);
        }
        for (index_t i = 0; i < p_.dim; ++i) y[i] = z_[i], y[p_.dim + i] = dz_[i];
        for (index_t i = 2 * p_.dim; i < ld_; ++i) y[i] = 0;
    }

    // s - m, and log_epsilon - m, of head h of a step.
    struct Exponents {
        real base, epsilon;
        Exponents(const FeatureKernel& item, const real* x, index_t h) {
            const Features& p = item.p_;
            const index_t ld = padded(p.source_dim);
            const real* source = item.source_ + h * ld;
            const double c = p.source_scale;
            base = static_cast<real>(-0.5 * (c * c * dot(source, source, ld) + __builtin_log(2 * p.dim)));
            epsilon = static_cast<real>(p.log_epsilon);
            if (!p.stabilized) return;
            real largest = 0;  // of |x|; NaN stays NaN
            for (index_t i = 0; i < p.dim; ++i) {
                const real size = x[i] < 0 ? -x[i] : x[i];
                largest = size <= largest ? largest : size;
            }
            const real m = base + largest < epsilon ? epsilon : base + largest;
            // The largest of all l is its s + |x|. The difference is taken of these terms, not of rounded sums.
            base = m == epsilon ? base - m : -largest;
            epsilon -= m;
        }
    };

    // x = the gradient of x, from that of phi; that of the source, of random features, takes its place too.
    void differentiate(real* x, const real* g, index_t h) {
        switch (p_.map) {
            case kIdentity: return copy(x, g, ld_);
            case kRandom: return differentiate_random(x, g, h);
            case kRelu:
                for (index_t i = 0; i < ld_; i += W) store(x + i, load(x + i) <= 0 ? vec<real>{} : load(g + i));
                return;
            case kElu:
                for (index_t i = 0; i < ld_; i += W) {
                    const vec<real> at = load(x + i), from = load(g + i);
                    store(x + i, at > 0 ? from : from * exponential(at));
                }
                return;
            case kDpfp:
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

    void differentiate_random(real* x, const real* g, index_t h) {
        const Exponents l(*this, x, h);
        for (index_t i = 0; i < ld_x_; i += W) {
            store(z_ + i, exponential_of_any(l.base + load(x + i)));
            store(dz_ + i, exponential_of_any(l.base - load(x + i)));
        }
        real total = 0;
        for (index_t i = 0; i < p_.dim; ++i) {
            const real up = g[i] * z_[i], down = g[p_.dim + i] * dz_[i];
            x[i] = up - down, total += up + down;
        }
        const index_t ld = padded(p_.source_dim);
        const double c = p_.source_scale;
        scale(source_ + h * ld, source_ + h * ld, static_cast<real>(-c * c * total), ld);
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
    // For each head: x, then its gradient; phi, then y; the gradient of y; the source, then its gradient. For one head
    // z and its gradient, or the exponentials of both signs.
    real *x_, *y_, *dy_ = nullptr, *source_ = nullptr, *z_, *dz_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
