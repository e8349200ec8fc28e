// Gates times y, which may be normed. For channel c of a step, which is number i of a head's vector y:
//
//     out_c = r_c a(x_c + b_c) n_c   a(u) = s(u),  u s(u),  log s(u)  or  log(1 + exp(u)),  s(u) = 1 / (1 + exp(-u))
//     r_c = scale  or  -scale exp(A_c)
//     n_c = 1,  y_c,  w_i y_c / sqrt(mean(y^2) + eps)  or  w_i (y_c - mean(y)) / sqrt(variance(y) + eps)
//
// and backwards, where g is the gradient of out: dx = g r n a'(x + b), of which the sum over steps is that of b, while
// that of g out is that of A; and of n it is d = g r a. With n = w z, z = (y - m) / l, dw is the sum over steps and
// heads of d z, and dy = (d w - z mean(d w z)) / l, less mean(d w) / l where m is the mean. Each work item has its part
// of these sums.
//
// Without a norm some steps lie side by side, so that a few channels fill vectors; with one each head has a row.
#pragma once

#include "elementary.h"
#include "rows.h"
#include "scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real> class GatingKernel {
public:
    GatingKernel(const Gating& p, Scratch<real>& scratch, bool backward)
        : p_(p), normed_(p.norm != kNoNorm), rows_(normed_ ? p.heads : 1),
          ld_(padded(normed_ ? p.dim : p.together() * p.channels())), all_(rows_ * ld_) {
        scratch.take(all_, x_, y_, out_, bias_, rate_);
        weight_ = scratch.take(ld_);
        if (backward) {
            scratch.take(all_, g_, d_bias_, d_log_rate_);
            d_weight_ = scratch.take(ld_);
        }
        if (x_ != nullptr) load_parameters();
    }

    void forward(index_t item) {
        with_activation([&](auto activation) {
            for_steps(item, [&](index_t step, index_t count) {
                read_inputs(step, count);
                for (index_t r = 0; normed_ && r < rows_; ++r) {
                    normalize(y_ + r * ld_);
                    multiply(y_ + r * ld_, y_ + r * ld_, weight_, ld_);
                }
                for (index_t i = 0; i < all_; i += W) {
                    const vec<real> gate = activated<activation.value>(i).value * load(rate_ + i);
                    store(out_ + i, p_.y.data ? gate * load(y_ + i) : gate);
                }
                write(p_.out, p_.dim, step, count, out_);
            });
        });
    }

    void backward(index_t item) {
        fill(d_bias_, real(0), all_), fill(d_log_rate_, real(0), all_), fill(d_weight_, real(0), ld_);
        with_activation([&](auto activation) {
            for_steps(item, [&](index_t step, index_t count) {
                read_inputs(step, count);
                read(g_, p_.d_out, p_.dim, step, count);
                for (index_t r = 0; normed_ && r < rows_; ++r) differentiate_normed<activation.value>(r * ld_);
                if (!normed_) differentiate_plain<activation.value>();
                write(p_.dx, p_.dim, step, count, out_);
                if (p_.y.data) write(p_.dy, p_.dy.head, step, count, y_);
            });
        });
        store_sums(item);
    }

private:
    static constexpr int W = Vector<real>::lanes;

    // Calls work(step, count) for the steps of a work item, as many at a time as lie side by side.
    template <class Work> void for_steps(index_t item, const Work& work) const {
        const index_t together = p_.together(), end = minimum((item + 1) * p_.share(), p_.steps());
        for (index_t step = item * p_.share(); step < end; step += together) work(step, minimum(together, end - step));
    }

    void load_parameters() {
        const real whole = static_cast<real>(p_.scale);
        fill(rate_, whole, all_);
        if (normed_) {
            for (index_t i = 0; i < p_.dim; ++i) weight_[i] = p_.weight.data ? load_one<real>(p_.weight, i) : real(1);
            return;
        }
        const index_t channels = p_.channels(), channels_per_rate = channels / p_.rates;
        for (index_t c = 0; p_.bias.data && c < channels; ++c) bias_[c] = load_one<real>(p_.bias, c);
        for (index_t rate = 0; p_.log_rate.data && rate < p_.rates; ++rate) {
            const real factor = -whole * exponential(load_one<real>(p_.log_rate, rate));
            for (index_t c = rate * channels_per_rate; c < (rate + 1) * channels_per_rate; ++c) rate_[c] = factor;
        }
        for (index_t i = channels; i < p_.together() * channels; ++i) {
            bias_[i] = bias_[i - channels], rate_[i] = rate_[i - channels];
        }
    }

    // True if the channels of all steps lie in one piece.
    bool in_one_piece(const Sequence& x) const {
        return x.time == p_.channels() && (p_.outer == 1 || x.batch == p_.inner * p_.channels());
    }
    index_t offset(const Sequence& x, index_t step) const { return place(x, step / p_.inner, step % p_.inner, 0); }

    // Calls work(offset in x, offset in a row, numbers) for the channels of steps that lie side by side.
    template <class Work> void for_pieces(const Sequence& x, index_t step, index_t count, const Work& work) const {
        const index_t channels = p_.channels();
        if (in_one_piece(x)) return work(step * channels, 0, count * channels);
        for (index_t i = 0; i < count; ++i) work(offset(x, step + i), i * channels, channels);
    }

    // `head`: elements from head to head in x.
    void read(real* row, const Sequence& x, index_t head, index_t step, index_t count) const {
        if (normed_) return load_rows(row, x, offset(x, step), head, rows_, p_.dim, 0);
        for_pieces(x, step, count, [&](index_t from, index_t to, index_t n) {
            with_type(x, from, [&](const auto* p) __attribute__((always_inline)) {
                for (index_t i = 0; i < n; ++i) row[to + i] = static_cast<real>(from_stored(p[i]));
            });
        });
        for (index_t i = count * p_.channels(); i < ld_; ++i) row[i] = 0;
    }

    void write(const Sequence& x, index_t head, index_t step, index_t count, real* row) const {
        if (normed_) return store_rows(x, offset(x, step), head, row, rows_, p_.dim);
        for_pieces(x, step, count, [&](index_t to, index_t from, index_t n) {
            with_type(x, to, [&](auto* p) __attribute__((always_inline)) {
                for (index_t i = 0; i < n; ++i) to_stored(p[i], row[from + i]);
            });
        });
    }

    void read_inputs(index_t step, index_t count) {
        read(x_, p_.x, p_.dim, step, count);
        if (p_.y.data) read(y_, p_.y, p_.y.head, step, count);
    }

    template <class Work> void with_activation(const Work& work) const {
        switch (p_.activation) {
            case kSigmoid: return work(Constant<kSigmoid>{});
            case kSilu: return work(Constant<kSilu>{});
            case kLogSigmoid: return work(Constant<kLogSigmoid>{});
            case kSoftplus: return work(Constant<kSoftplus>{});
        }
    }

    // a(x + b) and its derivative.
    template <Activation activation> FAST_WEIGHTS_INLINE Activated<activation, real> activated(index_t i) const {
        return Activated<activation, real>(load(x_ + i) + load(bias_ + i));
    }

    // y = z, and 1 / l.
    real normalize(real* y) const {
        const real n = static_cast<real>(p_.dim);
        if (p_.norm == kLayerNorm) {
            vec<real> sums{};
            for (index_t i = 0; i < ld_; i += W) sums += load(y + i);
            const real mean = sum<real>(sums) / n;
            for (index_t i = 0; i < p_.dim; ++i) y[i] -= mean;
        }
        const real inverse = 1 / square_root(dot(y, y, ld_) / n + static_cast<real>(p_.eps));
        scale(y, y, inverse, ld_);
        return inverse;
    }

    // out_ = dx and y_ = dy.
    template <Activation activation> void differentiate_plain() {
        const bool sums = p_.d_bias != nullptr || p_.d_log_rate != nullptr;
        for (index_t i = 0; i < all_; i += W) {
            const Activated<activation, real> a = activated<activation>(i);
            const vec<real> g = load(g_ + i) * load(rate_ + i), gn = p_.y.data ? g * load(y_ + i) : g,
                            dx = gn * a.slope;
            store(out_ + i, dx);
            if (p_.y.data) store(y_ + i, g * a.value);
            if (!sums) continue;
            store(d_bias_ + i, load(d_bias_ + i) + dx);
            store(d_log_rate_ + i, load(d_log_rate_ + i) + gn * a.value);
        }
    }

    // The same for the head that begins at `row`.
    template <Activation activation> void differentiate_normed(index_t row) {
        const real n = static_cast<real>(p_.dim);
        real *z = y_ + row, *d = g_ + row;
        const real inverse = normalize(z);
        vec<real> with_z{}, sums{};
        for (index_t i = 0; i < ld_; i += W) {
            const Activated<activation, real> a = activated<activation>(row + i);
            const vec<real> w = load(weight_ + i), g = load(d + i) * load(rate_ + i), dn = g * a.value, dz = dn * w;
            store(out_ + row + i, g * a.slope * w * load(z + i));
            store(d_weight_ + i, load(d_weight_ + i) + dn * load(z + i));
            store(d + i, dz);
            with_z += dz * load(z + i), sums += dz;
        }
        const real shared = sum<real>(with_z) / n, mean = p_.norm == kLayerNorm ? sum<real>(sums) / n : real(0);
        for (index_t i = 0; i < ld_; i += W) store(z + i, (load(d + i) - load(z + i) * shared - mean) * inverse);
    }

    void store_sums(index_t item) {
        const index_t channels = p_.channels(), channels_per_rate = channels / p_.rates;
        if (p_.d_weight != nullptr) copy_numbers(static_cast<real*>(p_.d_weight) + item * p_.dim, d_weight_, p_.dim);
        if (normed_) return;
        for (index_t first = channels; first < p_.together() * channels; first += channels) {
            for (index_t c = 0; c < channels; ++c) {
                d_bias_[c] += d_bias_[first + c], d_log_rate_[c] += d_log_rate_[first + c];
            }
        }
        if (p_.d_bias != nullptr) copy_numbers(static_cast<real*>(p_.d_bias) + item * channels, d_bias_, channels);
        if (p_.d_log_rate == nullptr) return;
        real* sums = static_cast<real*>(p_.d_log_rate) + item * p_.rates;
        for (index_t rate = 0; rate < p_.rates; ++rate) sums[rate] = 0;
        for (index_t c = 0; c < channels; ++c) sums[c / channels_per_rate] += d_log_rate_[c];
    }
    static void copy_numbers(real* to, const real* from, index_t n) {
        for (index_t i = 0; i < n; ++i) to[i] = from[i];
    }

    const Gating& p_;
    const bool normed_;
    const index_t rows_, ld_, all_;
    real *x_, *y_, *out_, *bias_, *rate_, *weight_;
    real *g_, *d_bias_, *d_log_rate_, *d_weight_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
