// The table of kernels for one instruction set. It is compiled once for each, with FAST_WEIGHTS_ISA as its name.
#include "delta.h"
#include "diagonal.h"
#include "march.h"
#include "step.h"
#include "stepped.h"

namespace fast_weights {
namespace FAST_WEIGHTS_ISA {
namespace {

#define FAST_WEIGHTS_STRING_(name) #name
#define FAST_WEIGHTS_STRING(name) FAST_WEIGHTS_STRING_(name)

// Up to these sizes of state decays go step by step through registers (stepped.h); beyond them, the products of matrices
// that halving chunks leads to (levels.h) are faster, backwards sooner: measured between 16 x 16 and 64 x 128. Narrower
// vectors have fewer registers besides. The size is that of the whole call, whose way its blocks of columns then take too.
constexpr bool WIDE = FAST_WEIGHTS_VECTOR_BYTES == 64;
constexpr int64_t LARGEST_STEPPED_FORWARD = WIDE ? 64 * 64 : 32 * 32;
constexpr int64_t LARGEST_STEPPED_BACKWARD = WIDE ? 32 * 32 : 32 * 16;

bool has_decays(const Problem& p) { return p.log_key_decay.data || p.log_value_decay.data; }

// Few keys go step by step in any case.
bool is_stepped(const Problem& p, int64_t largest) {
    return p.keys <= FEW || (has_decays(p) && p.keys * p.columns <= largest);
}

template <class real> void diagonal_forward_as(const Problem& p, index_t begin, index_t end) {
    if (is_stepped(p, LARGEST_STEPPED_FORWARD)) return march_forward<real, SteppedChunk<real>>(p, begin, end);
    if (p.log_gate.data) return march_forward<real, DiagonalChunk<real, Decay::shared>>(p, begin, end);
    has_decays(p) ? march_forward<real, DiagonalChunk<real, Decay::separate>>(p, begin, end)
                  : march_forward<real, DiagonalChunk<real, Decay::none>>(p, begin, end);
}

template <class real> void diagonal_backward_as(const Problem& p, index_t begin, index_t end) {
    if (is_stepped(p, LARGEST_STEPPED_BACKWARD)) return march_backward<real, SteppedChunk<real>>(p, begin, end);
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

void delta_forward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? march_forward<double, DeltaChunk<double>>(p, begin, end)
                              : march_forward<float, DeltaChunk<float>>(p, begin, end);
}

void delta_backward(const Problem& p, index_t begin, index_t end) {
    p.v.type == Type::float64 ? march_backward<double, DeltaChunk<double>>(p, begin, end)
                              : march_backward<float, DeltaChunk<float>>(p, begin, end);
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
