// The table of kernels for one instruction set. It is compiled once for each, with FAST_WEIGHTS_ISA as its name.
#include "delta.h"
#include "diagonal.h"
#include "march.h"
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

// Small states go step by step through registers (stepped.h, small_sum.h, small_delta.h), larger ones by products of a
// chunk's matrices. With decays the limit is a size. Without, what a chunk copies, scores and masks is as keys + values,
// and what it spares as keys * values: their quotient decides. All measured between 16 x 16 and 64 x 128, at 1,024 steps
// and fewer. Sizes are those of the whole call, whose way its blocks of columns then take too; few keys go step by step in
// any case.
constexpr int64_t LARGEST_DECAYED_FORWARD = by_width(64 * 64, 32 * 32, 32 * 32);
constexpr int64_t LARGEST_DECAYED_BACKWARD = by_width(32 * 32, 32 * 16, 32 * 16);
constexpr int64_t SUM = by_width(30, 14, 10);
// Gates stay with the products: near 1 they are rounded away if a state is multiplied by one 4,096 times, unless the
// compiler makes one operation of that and of what is added; a chunk multiplies by 16 at once.

// The delta rule's with so few keys, or, backwards, with twice as many and so small a state.
constexpr int64_t COLUMN = 16, LARGEST_WIDE_COLUMN = by_width(32 * 64, 0, 0);

bool has_decays(const Problem& p) { return p.log_key_decay.data || p.log_value_decay.data; }

bool is_stepped(const Problem& p, int64_t largest_decayed) {
    if (p.keys <= FEW) return true;
    if (has_decays(p)) return p.keys * p.columns <= largest_decayed;
    return !p.log_gate.data && (p.keys + p.columns) * SUM >= p.keys * p.columns;
}

template <class real> void diagonal_forward_as(const Problem& p, index_t begin, index_t end) {
    if (is_stepped(p, LARGEST_DECAYED_FORWARD)) {
        return march_forward<real, SteppedChunk<real>>(p, begin, end);
    }
    if (p.log_gate.data) return march_forward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? march_forward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : march_forward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

template <class real> void diagonal_backward_as(const Problem& p, index_t begin, index_t end) {
    if (is_stepped(p, LARGEST_DECAYED_BACKWARD)) {
        return p.log_gate.data || has_decays(p) ? march_intervals_backward<real, DecayedInterval<real>>(p, begin, end)
                                                : march_intervals_backward<real, SumInterval<real>>(p, begin, end);
    }
    if (p.log_gate.data) return march_backward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? march_backward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : march_backward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

void diagonal_forward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? diagonal_forward_as<double>(p, begin, end) : diagonal_forward_as<float>(p, begin, end);
}

void diagonal_backward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? diagonal_backward_as<double>(p, begin, end)
                              : diagonal_backward_as<float>(p, begin, end);
}

template <class real> void delta_forward_as(const Problem& p, index_t begin, index_t end) {
    p.keys <= COLUMN ? march_forward<real, ColumnChunk<real>>(p, begin, end)
                     : march_forward<real, DeltaChunk<real>>(p, begin, end);
}

template <class real> void delta_backward_as(const Problem& p, index_t begin, index_t end) {
    const bool wide = p.keys <= LARGEST_COLUMN && p.keys * p.columns <= LARGEST_WIDE_COLUMN;
    p.keys <= COLUMN || wide ? march_intervals_backward<real, ColumnInterval<real>>(p, begin, end)
                             : march_backward<real, DeltaChunk<real>>(p, begin, end);
}

void delta_forward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? delta_forward_as<double>(p, begin, end) : delta_forward_as<float>(p, begin, end);
}

void delta_backward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? delta_backward_as<double>(p, begin, end) : delta_backward_as<float>(p, begin, end);
}

void diagonal_step_any(const Step& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? diagonal_step<double>(p, begin, end) : diagonal_step<float>(p, begin, end);
}

void delta_step_any(const Step& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? delta_step<double>(p, begin, end) : delta_step<float>(p, begin, end);
}

}  // namespace

extern const Kernels table;
const Kernels table = {FAST_WEIGHTS_STRING(FAST_WEIGHTS_ISA), diagonal_forward, diagonal_backward, delta_forward,
                       delta_backward, diagonal_step_any, delta_step_any};

}  // namespace FAST_WEIGHTS_ISA
}  // namespace fast_weights
