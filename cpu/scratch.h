// Scratch memory of a thread.
#pragma once

#include <cstddef>
#include <new>

#include "vector.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Scratch memory of one thread: counted first, then taken piece by piece.
template <class real> class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { ::operator delete(memory_, std::align_val_t(64)); }

    // The first time around every piece is null; `allocate` then makes them real for the second.
    real* take(index_t n) {
        real* piece = memory_ ? memory_ + taken_ : nullptr;
        taken_ += padded(n);
        return piece;
    }
    // The same for several pieces.
    template <class... Pieces> void take(index_t n, Pieces*&... pieces) { ((pieces = take(n)), ...); }
    void allocate() {
        memory_ = static_cast<real*>(::operator new(static_cast<size_t>(taken_) * sizeof(real), std::align_val_t(64)));
        for (index_t i = 0; i < taken_; ++i) memory_[i] = 0;
        taken_ = 0;
    }

private:
    real* memory_ = nullptr;
    index_t taken_ = 0;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
