// A step of the delta rule on learned features, behind its projections:
//
//     k = phi(k'),  q = phi(q'),  beta = sigma(b)       (features.h)
//     S += beta k (v - S^T k)^T,  y = S^T q             (../recurrent/step.h)
//
// A task has a head of a row.
#pragma once

#include "../elementary.h"
#include "../recurrent/step.h"
#include "features.h"

namespace fairseq_fastweights {
namespace FAST_WEIGHTS_ISA {

template <class real> class DeltaTask {
public:
    using Memory = Scratch<real>;

    DeltaTask(const DeltaStep& p, Scratch<real>& scratch, bool)
        : p_(p), sizes_(sizes(p)), rows_(sizes_, scratch), map_(scratch, p.dim, p.features, true, p.eps) {
        x_ = scratch.take(p.dim), beta_ = scratch.take(1);
    }

    void forward(index_t task) {
        const index_t b = task / p_.heads, h = task % p_.heads;
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
    void backward(index_t) {}

private:
    static RuleStep sizes(const DeltaStep& p) {
        RuleStep of;
        of.key_dim = p.features, of.columns = p.value_dim, of.corrects = true;
        return of;
    }

    const DeltaStep& p_;
    const RuleStep sizes_;
    StepRows<real> rows_;
    LearnedMap<real> map_;
    real *x_, *beta_;
};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fairseq_fastweights
