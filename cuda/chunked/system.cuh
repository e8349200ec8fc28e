// The delta rule within a chunk, with a log gate for each step or without, and the local stage, which solves its system.
//
// With B = diag(beta), D_ts and the like as in gates.cuh, G the products D_ts <k_t, k_s> for s < t, E = V - diag(D_t0) K S_0:
//
//   (I + B G) U = B E        Y = diag(D_t0) Q S_0 + tril(D_ts Q K^T) U        S_end = D S_0 + K^T diag(D_es) U
//
// (the WY form; Bischof & Van Loan 1987; with gates Yang et al. 2025). With repeated keys and write strengths of 1 the entries
// of T = (I + B G)^-1 stay of order 1 while the powers in a series for them grow to 1e18. So the 16 x 16 blocks on its diagonal
// are inverted here, and T follows by substitution, in float32 by three products whatever the inputs are: its errors reach all later
// steps.
//
// Backwards, with P = tril(D_ts Q K^T) and dS the gradient of the state at the chunk's end:
//   dU = P^T dY + diag(D_es) K dS         dR = T^T dU           (R = B E, the right side of the system)
//   dP = tril(dY U^T)                     dA = -dR U^T below the diagonal           (A = B G)
//   dV = B dR                             d beta_t = <dR_t, E_t> + <dA_t, G_t>
//   dS_0 = D dS + Q^T diag(D_t0) dY - K^T diag(D_t0) dV         dQ and dK: gradients.cu
#pragma once

#include "slices.h"
#include "tensor_core.cuh"

namespace fairseq_fastweights {

// The local stage is given this: backwards d_out in the place of `out`.
inline RuleForward given_to_local(const RuleForward& p) { return p; }
inline RuleForward given_to_local(const RuleBackward& p) {
    return {p.sizes,         p.complement,      p.corrects,      p.q,    p.k, p.v, p.erase, p.beta, p.log_gate,
            p.log_key_decay, p.log_value_decay, p.initial_state, p.d_out};
}

template <typename T>
cudaError_t launch_local(RuleForward given, RulePass pass, const Slice<Factor<T>>& slice, cudaStream_t stream);

}  // namespace fairseq_fastweights
