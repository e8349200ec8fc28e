// Which algorithm takes a call: steps through registers (recurrent/), or products of a chunk's matrices (chunked/).
#pragma once

#include "recurrent/delta.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// A number for vectors of 64 bytes, of 32 or of 16: there are fewer and shorter registers for a state each time.
constexpr int64_t by_width(int64_t widest, int64_t wide, int64_t narrow) {
    return FAST_WEIGHTS_VECTOR_BYTES == 64 ? widest : FAST_WEIGHTS_VECTOR_BYTES == 32 ? wide : narrow;
}

// Small states go step by step, larger ones by chunks. Without decays, a chunk's copies, scores and masks grow as keys
// + values and the work that it saves as keys * values: their quotient decides. With decays the size decides, and the
// cost of the chunks' products: least with one gate for all, most with decays of keys and values. All measured between
// 16 x 16 and 128 x 128. Sizes are those of the whole call, so that all its value blocks take the same algorithm; few
// keys always go step by step.
constexpr int64_t SUM = by_width(32, 14, 11);
constexpr int64_t LARGEST_GATED = by_width(32 * 64, 16 * 16, 0);
constexpr int64_t LARGEST_OF_ONE_SIDE = by_width(64 * 64, 32 * 32, 32 * 16);
constexpr int64_t LARGEST_OF_BOTH_SIDES = by_width(64 * 128, 32 * 64, 32 * 32);

inline bool is_diagonal_recurrent(const RuleCall& p) {
    const index_t size = p.key_dim * p.value_dim;
    if (p.key_dim <= FEW) return true;
    if (p.log_gate.data) return size <= LARGEST_GATED;
    if (p.log_key_decay.data && p.log_value_decay.data) return size <= LARGEST_OF_BOTH_SIDES;
    if (p.log_key_decay.data || p.log_value_decay.data) return size <= LARGEST_OF_ONE_SIDE;
    return (p.key_dim + p.value_dim) * SUM >= size;
}

// The delta rule alone, without decays or an erase key of its own, goes step by step with so few keys, or, backwards,
// with twice as many and so small a state.
constexpr int COLUMN = 16, LARGEST_WIDE_COLUMN = by_width(32 * 64, 0, 0);

inline bool is_plain(const RuleCall& p) {
    return !p.log_gate.data && !p.log_key_decay.data && !p.erase.data && p.beta.data;
}

inline bool is_delta_recurrent(const RuleCall& p, bool backward) {
    const bool wide = p.key_dim <= LARGEST_COLUMN && p.key_dim * p.value_dim <= LARGEST_WIDE_COLUMN;
    return is_plain(p) && (p.key_dim <= COLUMN || (backward && wide));
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
