// A step of the delta rule on learned features, behind its projections:
//
//     k = phi(k'),  q = phi(q'),  beta = sigma(b)       (features.h)
//     S += beta k (v - S^T k)^T,  y = S^T q             (../recurrent/step.h)
//
// A work item is a head of a row.
#pragma once

#include "../elementary.h"
#include "../recurrent/step.h"
#include "features.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

template <class real> class DeltaStepKernel {
public:
    DeltaStepKernel(const DeltaStep& p, Scratch<real>& scratch, bool)
        : p_(p), rows_(scratch, true, p.features, p.value_dim), map_(scratch, p.dim, p.features, true, p.eps) {
        x_ = scratch.take(p.dim), beta_ = scratch.take(1);
    }

    void forward(index_t item) {
        const index_t b = item / p_.heads, h = item % p_.heads;
        map_.open(p_.weight, p_.bias, h);
        load_rows(x_, p_.q, place(p_.q, b, 0, h), 0, 1, p_.dim, 0);
        map_.map(rows_.q, x_);
        load_rows(x_, p_.k, place(p_.k, b, 0, h), 0, 1, p_.dim, 0);
        map_.map(rows_.k, x_);
        copy(rows_.erase, rows_.k, padded(p_.features));
        load_rows(rows_.v, p_.v, place(p_.v, b, 0, h), 0, 1, p_.value_dim, 0);
        fill(rows_.f, real(1), padded(p_.features)), fill(rows_.z, real(1), padded(p_.value_dim));
        load_rows(beta_, p_.beta, b * p_.beta.time + h, 0, 1, 1, 0);
        rows_.beta = Activated<kSigmoid, real>(load(beta_)).value[0];
        const index_t index = (b * p_.heads + h) * p_.features * p_.value_dim;
        step_state(rows_, static_cast<real*>(p_.state) + index, p_.value_dim, p_.features, p_.value_dim);
        store_rows(p_.out, place(p_.out, b, 0, h), 0, rows_.out, 1, p_.value_dim);
    }

private:
    const DeltaStep& p_;
    StepRows<real> rows_;
    LearnedMap<real> map_;
    real *x_, *beta_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
