// A step of Gated DeltaNet behind its projections:
//
//     u = silu(sum_i w_i x_{t - i})                                  of each channel of q, k and v
//     q = q / |q| / sqrt(key_dim),  k = k / |k|                      1e-6 is added to the squares
//     beta = max_beta sigma(b),  f = exp(-exp(A_log) softplus(a + dt_bias))
//     S = f S + beta k (v - f S^T k)^T,  y = S^T q                   (../recurrent/step.h)
//     out = w y / rms(y) silu(g)
//
// A work item is a row.
#pragma once

#include "../elementary.h"
#include "../recurrent/step.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real> class GatedDeltaStepKernel {
public:
    GatedDeltaStepKernel(const GatedDeltaStep& p, Scratch<real>& scratch, bool)
        : p_(p), rows_(scratch, true, p.key_dim, p.value_dim) {
        scratch.take(p.channels(), x_, u_);
        conv_ = scratch.take(p.channels() * p.width);
        scratch.take(p.heads, beta_, decay_, rate_, bias_);
        norm_ = scratch.take(p.value_dim), gate_ = scratch.take(p.heads * padded(p.value_dim));
        if (norm_ == nullptr) return;
        load_rows(conv_, p.conv, 0, 0, 1, p.channels() * p.width, 0);
        load_rows(rate_, p.rate, 0, 0, 1, p.heads, 0);
        load_rows(bias_, p.bias, 0, 0, 1, p.heads, 0);
        load_rows(norm_, p.norm, 0, 0, 1, p.value_dim, 0);
    }

    void forward(index_t b) {
        const index_t keys = p_.q_heads * p_.key_dim, values = keys + p_.k_heads * p_.key_dim;
        convolve(b);
        load_rows(beta_, p_.beta, b * p_.beta.time, 0, 1, p_.heads, 0);
        load_rows(decay_, p_.decay, b * p_.decay.time, 0, 1, p_.heads, 0);
        load_rows(gate_, p_.gate, b * p_.gate.time, p_.value_dim, p_.heads, p_.value_dim, 0);
        for (index_t i = 0; i < padded(p_.heads); i += W) {
            store(beta_ + i, Activated<kSigmoid, real>(load(beta_ + i)).value * static_cast<real>(p_.max_beta));
            const vec<real> step = Activated<kSoftplus, real>(load(decay_ + i) + load(bias_ + i)).value;
            store(decay_ + i, exponential(-exponential_of_any(load(rate_ + i)) * step));
        }
        for (index_t h = 0; h < p_.heads; ++h) {
            take(rows_.q, u_ + h * p_.q_heads / p_.heads * p_.key_dim, p_.key_dim);
            take(rows_.k, u_ + keys + h * p_.k_heads / p_.heads * p_.key_dim, p_.key_dim);
            take(rows_.v, u_ + values + h * p_.v_heads / p_.heads * p_.value_dim, p_.value_dim);
            to_length(rows_.q, 1 / square_root(static_cast<real>(p_.key_dim)));
            to_length(rows_.k, 1);
            copy(rows_.erase, rows_.k, padded(p_.key_dim));
            fill(rows_.f, decay_[h], padded(p_.key_dim));
            rows_.beta = beta_[h];
            fill(rows_.z, real(1), padded(p_.value_dim));
            real* state = static_cast<real*>(p_.state) + b * p_.state_batch + h * p_.state_head;
            step_state(rows_, state, p_.state_key, p_.key_dim, p_.value_dim);
            write(b, h);
        }
    }

private:
    static constexpr int W = Vector<real>::lanes;

    // u_ = silu of the convolution; the oldest input makes room for this one.
    void convolve(index_t b) {
        const index_t channels = p_.channels(), past = p_.width - 1;
        real* before = static_cast<real*>(p_.before) + b * past * channels;
        load_rows(x_, p_.x, b * p_.x.time, 0, 1, channels, 0);
        for (index_t c = 0; c < channels; ++c) {
            const real* w = conv_ + c * p_.width;
            real u = w[past] * x_[c];
            for (index_t i = 0; i < past; ++i) u += w[i] * before[i * channels + c];
            u_[c] = u;
        }
        for (index_t i = 0; i < padded(channels); i += W) store(u_ + i, Activated<kSilu, real>(load(u_ + i)).value);
        if (past == 0) return;
        __builtin_memmove(before, before + channels, (past - 1) * channels * sizeof(real));
        for (index_t c = 0; c < channels; ++c) before[(past - 1) * channels + c] = x_[c];
    }

    // The rest of a row is 0 again: 0 times an infinite number of the head before may have left NaN there.
    static void take(real* row, const real* from, index_t n) {
        for (index_t i = 0; i < n; ++i) row[i] = from[i];
        for (index_t i = n; i < padded(n); ++i) row[i] = 0;
    }

    void to_length(real* x, real length) const {
        const index_t n = padded(p_.key_dim);
        scale(x, x, length / square_root(dot(x, x, n) + static_cast<real>(1e-6)), n);
    }

    void write(index_t b, index_t h) {
        const index_t n = padded(p_.value_dim);
        real* y = rows_.out;
        take(y, y, p_.value_dim);
        const real mean = dot(y, y, n) / static_cast<real>(p_.value_dim);
        const real inverse = 1 / square_root(mean + static_cast<real>(p_.eps));
        for (index_t i = 0; i < n; i += W) {
            const vec<real> gate = Activated<kSilu, real>(load(gate_ + h * n + i)).value;
            store(y + i, load(y + i) * inverse * load(norm_ + i) * gate);
        }
        store_rows(p_.out, b * p_.out.time + h * p_.value_dim, 0, y, 1, p_.value_dim);
    }

    const GatedDeltaStep& p_;
    StepRows<real> rows_;
    real *x_, *u_, *conv_, *beta_, *decay_, *rate_, *bias_, *norm_, *gate_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
