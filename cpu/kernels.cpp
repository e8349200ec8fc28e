// The table of kernels for one instruction set. It is compiled once for each, with FAST_WEIGHTS_ISA as its name.
#include "delta.h"
#include "diagonal.h"
#include "march.h"
#include "scan.h"
#include "small_decay.h"
#include "small_delta.h"
#include "small_sum.h"
#include "step.h"
#include "stepped.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {
namespace {

#define FAST_WEIGHTS_STRING_(name) #name
#define FAST_WEIGHTS_STRING(name) FAST_WEIGHTS_STRING_(name)

// A number for vectors of 64 bytes, of 32 or of 16: there are fewer and shorter registers for a state each time.
constexpr int64_t by_width(int64_t widest, int64_t wide, int64_t narrow) {
    return FAST_WEIGHTS_VECTOR_BYTES == 64 ? widest : FAST_WEIGHTS_VECTOR_BYTES == 32 ? wide : narrow;
}

// Small states go step by step through registers (stepped.h, small_sum.h, small_decay.h, small_delta.h), larger ones by
// products of a chunk's matrices. Without decays, what a chunk copies, scores and masks is as keys + values, and what it
// spares as keys * values: their quotient decides. With them, it is the size that does, and how much their chunks' products
// cost: least with one gate for all, most with decays of keys and values. All measured between 16 x 16 and 128 x 128. Sizes
// are those of the whole call, whose way its blocks of columns then take too; few keys go step by step in any case.
constexpr int64_t SUM = by_width(32, 14, 11);
constexpr int64_t LARGEST_GATED = by_width(32 * 64, 16 * 16, 0);
constexpr int64_t LARGEST_OF_ONE_SIDE = by_width(64 * 64, 32 * 32, 32 * 16);
constexpr int64_t LARGEST_OF_BOTH_SIDES = by_width(64 * 128, 32 * 64, 32 * 32);

// The delta rule's with so few keys, or, backwards, with twice as many and so small a state.
constexpr int64_t COLUMN = 16, LARGEST_WIDE_COLUMN = by_width(32 * 64, 0, 0);

bool is_stepped(const Problem& p) {
    const index_t size = p.keys * p.columns;
    if (p.keys <= FEW) return true;
    if (p.log_gate.data) return size <= LARGEST_GATED;
    if (p.log_key_decay.data && p.log_value_decay.data) return size <= LARGEST_OF_BOTH_SIDES;
    if (p.log_key_decay.data || p.log_value_decay.data) return size <= LARGEST_OF_ONE_SIDE;
    return (p.keys + p.columns) * SUM >= size;
}

bool has_decays(const Problem& p) { return p.log_key_decay.data || p.log_value_decay.data; }

template <class real> void diagonal_forward_as(const Problem& p, index_t begin, index_t end) {
    if (is_stepped(p)) return march_forward<real, SteppedChunk<real>>(p, begin, end);
    if (p.log_gate.data) return march_forward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? march_forward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : march_forward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

template <class real> void diagonal_backward_as(const Problem& p, index_t begin, index_t end) {
    const bool stepped = is_stepped(p);
    if (stepped && (p.log_gate.data || has_decays(p))) {
        return march_intervals_backward<real, DecayedInterval<real>>(p, begin, end);
    }
    if (stepped) return march_intervals_backward<real, SumInterval<real>>(p, begin, end);
    if (p.log_gate.data) return march_backward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? march_backward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : march_backward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

// Whether it is the delta rule alone: no decays, no erase key apart.
bool is_plain(const Problem& p) { return !p.log_gate.data && !p.log_key_decay.data && !p.erase.data && p.beta.data; }

template <class real> void delta_forward_as(const Problem& p, index_t begin, index_t end) {
    p.keys <= COLUMN&& is_plain(p) ? march_forward<real, ColumnChunk<real>>(p, begin, end)
                                   : march_forward<real, DeltaChunk<real>>(p, begin, end);
}

template <class real> void delta_backward_as(const Problem& p, index_t begin, index_t end) {
    const bool wide = p.keys <= LARGEST_COLUMN && p.keys * p.columns <= LARGEST_WIDE_COLUMN;
    (p.keys <= COLUMN || wide) && is_plain(p) ? march_intervals_backward<real, ColumnInterval<real>>(p, begin, end)
                                              : march_backward<real, DeltaChunk<real>>(p, begin, end);
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

}  // namespace

extern const Kernels table;
const Kernels table = {FAST_WEIGHTS_STRING(FAST_WEIGHTS_ISA),
                       rule_forward,
                       rule_backward,
                       rule_step_any,
                       scan_forward,
                       scan_backward,
                       scan_step};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
