// The table of kernels for one instruction set. It is compiled once for each, with FAST_WEIGHTS_ISA as its name.
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
#include "sweep.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {
namespace {

#define FAST_WEIGHTS_STRING_(name) #name
#define FAST_WEIGHTS_STRING(name) FAST_WEIGHTS_STRING_(name)

bool has_decays(const Problem& p) { return p.log_key_decay.data || p.log_value_decay.data; }

template <class real> void diagonal_forward_as(const Problem& p, index_t begin, index_t end) {
    if (is_diagonal_recurrent(p)) return sweep_forward<real, SteppedChunk<real>>(p, begin, end);
    if (p.log_gate.data) return sweep_forward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? sweep_forward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : sweep_forward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

template <class real> void diagonal_backward_as(const Problem& p, index_t begin, index_t end) {
    const bool recurrent = is_diagonal_recurrent(p);
    if (recurrent && (p.log_gate.data || has_decays(p))) {
        return sweep_intervals_backward<real, DecayedInterval<real>>(p, begin, end);
    }
    if (recurrent) return sweep_intervals_backward<real, SumInterval<real>>(p, begin, end);
    if (p.log_gate.data) return sweep_backward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? sweep_backward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : sweep_backward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

template <class real> void delta_forward_as(const Problem& p, index_t begin, index_t end) {
    is_delta_recurrent(p, false) ? sweep_forward<real, ColumnChunk<real>>(p, begin, end)
                                 : sweep_forward<real, DeltaChunk<real>>(p, begin, end);
}

template <class real> void delta_backward_as(const Problem& p, index_t begin, index_t end) {
    is_delta_recurrent(p, true) ? sweep_intervals_backward<real, ColumnInterval<real>>(p, begin, end)
                                : sweep_backward<real, DeltaChunk<real>>(p, begin, end);
}

template <class real> void rule_forward_as(const Problem& p, index_t begin, index_t end) {
    p.corrects ? delta_forward_as<real>(p, begin, end) : diagonal_forward_as<real>(p, begin, end);
}

template <class real> void rule_backward_as(const Problem& p, index_t begin, index_t end) {
    p.corrects ? delta_backward_as<real>(p, begin, end) : diagonal_backward_as<real>(p, begin, end);
}

void rule_forward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? rule_forward_as<double>(p, begin, end) : rule_forward_as<float>(p, begin, end);
}

void rule_backward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? rule_backward_as<double>(p, begin, end) : rule_backward_as<float>(p, begin, end);
}

void rule_step_any(const Step& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? rule_step<double>(p, begin, end) : rule_step<float>(p, begin, end);
}

void scan_forward(const Scan& p, index_t begin, index_t end) {
    p.u.type == Type::float64 ? scan_tasks<double, &ScanTask<double>::forward>(p, begin, end, false, CHUNK)
                              : scan_tasks<float, &ScanTask<float>::forward>(p, begin, end, false, CHUNK);
}

void scan_backward(const Scan& p, index_t begin, index_t end) {
    p.u.type == Type::float64 ? scan_tasks<double, &ScanTask<double>::backward>(p, begin, end, true, p.interval)
                              : scan_tasks<float, &ScanTask<float>::backward>(p, begin, end, true, p.interval);
}

void scan_step(const Scan& p, index_t begin, index_t end) {
    p.u.type == Type::float64 ? scan_tasks<double, &ScanTask<double>::step>(p, begin, end, false, 1)
                              : scan_tasks<float, &ScanTask<float>::step>(p, begin, end, false, 1);
}

template <class Task, class Call> void tasks_as(const Call& p, index_t begin, index_t end, bool backward) {
    typename Task::Memory scratch;
    { Task counted(p, scratch, backward); }
    scratch.allocate();
    Task task(p, scratch, backward);
    for (index_t number = begin; number < end; ++number) backward ? task.backward(number) : task.forward(number);
}

template <template <class> class Task, bool backward, class Call> void tasks(const Call& p, index_t begin,
                                                                             index_t end) {
    p.x.type == Type::float64 ? tasks_as<Task<double>>(p, begin, end, backward)
                              : tasks_as<Task<float>>(p, begin, end, backward);
}

}  // namespace

extern const Kernels table;
const Kernels table = {FAST_WEIGHTS_STRING(FAST_WEIGHTS_ISA),
                       rule_forward,
                       rule_backward,
                       rule_step_any,
                       scan_forward,
                       scan_backward,
                       scan_step,
                       tasks<FeatureTask, false, Features>,
                       tasks<FeatureTask, true, Features>,
                       tasks<GatingTask, false, Gating>,
                       tasks<GatingTask, true, Gating>,
                       tasks<ConvolutionTask, false, Convolution>,
                       tasks<ConvolutionTask, true, Convolution>};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
