// The table of kernels for one instruction set and one type of numbers. It is compiled once for each pair, with
// FAST_WEIGHTS_ISA and FAST_WEIGHTS_NUMBERS (float32, also for tensors of 16 bits, or float64) as their names.
#include <type_traits>

#include "choice.h"
#include "chunked/delta.h"
#include "chunked/diagonal.h"
#include "convolution.h"
#include "features.h"
#include "gating.h"
#include "recurrent/decay_backward.h"
#include "recurrent/delta.h"
#include "recurrent/diagonal_forward.h"
#include "recurrent/step.h"
#include "recurrent/sum_backward.h"
#include "scan.h"
#include "steps/delta.h"
#include "steps/gated_delta.h"
#include "steps/window.h"
#include "sweep.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {
namespace {

#define FAST_WEIGHTS_STRING_(name) #name
#define FAST_WEIGHTS_STRING(name) FAST_WEIGHTS_STRING_(name)

namespace types {
using float32 = float;
using float64 = double;
}  // namespace types
using real = types::FAST_WEIGHTS_NUMBERS;

bool has_decays(const RuleCall& p) { return p.log_key_decay.data || p.log_value_decay.data; }

void diagonal_forward(const RuleCall& p, index_t begin, index_t end) {
    if (is_diagonal_recurrent(p)) return sweep_forward<real, SteppedChunk<real>>(p, begin, end);
    if (p.log_gate.data) return sweep_forward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? sweep_forward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : sweep_forward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

void diagonal_backward(const RuleCall& p, index_t begin, index_t end) {
    const bool recurrent = is_diagonal_recurrent(p);
    if (recurrent && (p.log_gate.data || has_decays(p))) {
        return sweep_intervals_backward<real, DecayedInterval<real>>(p, begin, end);
    }
    if (recurrent) return sweep_intervals_backward<real, SumInterval<real>>(p, begin, end);
    if (p.log_gate.data) return sweep_backward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? sweep_backward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : sweep_backward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

void delta_forward(const RuleCall& p, index_t begin, index_t end) {
    is_delta_recurrent(p, false) ? sweep_forward<real, ColumnChunk<real>>(p, begin, end)
                                 : sweep_forward<real, DeltaChunk<real>>(p, begin, end);
}

void delta_backward(const RuleCall& p, index_t begin, index_t end) {
    is_delta_recurrent(p, true) ? sweep_intervals_backward<real, ColumnInterval<real>>(p, begin, end)
                                : sweep_backward<real, DeltaChunk<real>>(p, begin, end);
}

void rule_forward(const RuleCall& p, index_t begin, index_t end) {
    p.is_delta ? delta_forward(p, begin, end) : diagonal_forward(p, begin, end);
}

void rule_backward(const RuleCall& p, index_t begin, index_t end) {
    p.is_delta ? delta_backward(p, begin, end) : diagonal_backward(p, begin, end);
}

// Runs work items one after another, in the same scratch memory: it is counted first, by a kernel that is not used.
template <class Kernel, void (Kernel::*run)(index_t), class Call, class... Options>
void run_items(const Call& p, index_t begin, index_t end, Options... options) {
    Scratch<real> scratch;
    { Kernel counted(p, scratch, options...); }
    scratch.allocate();
    Kernel kernel(p, scratch, options...);
    for (index_t item = begin; item < end; ++item) (kernel.*run)(item);
}

void scan_forward(const Scan& p, index_t begin, index_t end) {
    run_items<ScanKernel<real>, &ScanKernel<real>::forward>(p, begin, end, false, CHUNK);
}

void scan_backward(const Scan& p, index_t begin, index_t end) {
    run_items<ScanKernel<real>, &ScanKernel<real>::backward>(p, begin, end, true, p.interval);
}

void scan_step(const Scan& p, index_t begin, index_t end) {
    run_items<ScanKernel<real>, &ScanKernel<real>::step>(p, begin, end, false, 1);
}

template <class Kernel, class Call> void run_forward(const Call& p, index_t begin, index_t end) {
    run_items<Kernel, &Kernel::forward>(p, begin, end, false);
}

template <class Kernel, class Call> void run_backward(const Call& p, index_t begin, index_t end) {
    run_items<Kernel, &Kernel::backward>(p, begin, end, true);
}

}  // namespace

extern const Kernels FAST_WEIGHTS_NUMBERS;
const Kernels FAST_WEIGHTS_NUMBERS = {FAST_WEIGHTS_STRING(FAST_WEIGHTS_ISA),
                                      rule_forward,
                                      rule_backward,
                                      rule_step<real>,
                                      scan_forward,
                                      scan_backward,
                                      scan_step,
                                      run_forward<FeatureKernel<real>, Features>,
                                      run_backward<FeatureKernel<real>, Features>,
                                      run_forward<GatingKernel<real>, Gating>,
                                      run_backward<GatingKernel<real>, Gating>,
                                      run_forward<ConvolutionKernel<real>, Convolution>,
                                      run_backward<ConvolutionKernel<real>, Convolution>,
                                      run_forward<DeltaStepKernel<real>, DeltaStep>,
                                      run_forward<WindowStepKernel<real>, WindowStep>,
                                      run_forward<GatedDeltaStepKernel<real>, GatedDeltaStep>};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
