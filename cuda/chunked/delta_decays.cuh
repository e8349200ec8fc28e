// The delta rule with decays of keys (Kimi delta attention), with an erase key that is not the key (two-gate rules), or
// with both: what a chunk of 16 steps computes, forwards and backwards.
//
// With the steps of a chunk as rows, F_ts the products of the decays of the steps (s, t], t0 from before the chunk's
// start and es to its end, E the erase keys, B = diag(beta), and S_0 the state before the chunk:
//
//   (I + B G) U = B R,   R = V - (E * F_.0) S_0,   G_ts = <e_t, k_s * F_ts> for s < t
//   Y = (Q * F_.0) S_0 + P U,                      P_ts = <q_t, k_s * F_ts> for s <= t
//   S_end = diag(F_e0) S_0 + (K * F_e.)^T U
//
// G and P are found as decays.cuh finds such products: pairs of steps are parted at the middles of the chunk,
// of its halves and so on, so that no factor exceeds 1 and nothing is divided. The system is solved by substitution in
// float32, a value column to a thread, which is exact however alike the keys are. U_t = beta_t * (what is left of R_t by
// the steps before t): that takes the place of R, for the gradient of beta_t.
//
// Absent decays are gates of 1, and where there is no erase key the key is read in its place.
#pragma once

#include "decays.cuh"

namespace fairseq_fastweights {

template <typename T>
struct DecayedDelta {
    Matrix<T> q, k, erase, v;
    Matrix<T> reading_queries, reading_erase;  // q_t * F_t0, e_t * F_t0
    Matrix<T> written;                         // k_s * F_es
    Matrix<float> products;                    // G, mirrored
    Matrix<Factor<T>> scores;                  // P
    Matrix<float> error;                       // R
    Matrix<Factor<T>> update;                  // U
    Matrix<Factor<T>> state;
    float *total, *beta;             // F_e0, beta_t
    int levels;                      // where the next two begin, that are free when scores and products are found
    Stages<T> of_erase, of_queries;  // levels: of keys and erase keys, and of queries alone

    __host__ __device__ DecayedDelta(Carver& carver, const Plan& plan)
        : q(carver.matrix<T>(kSteps, plan.key_rows)), k(carver.matrix<T>(kSteps, plan.key_rows)),
          erase(carver.matrix<T>(kSteps, plan.key_rows)), v(carver.matrix<T>(kSteps, plan.columns)),
          reading_queries(carver.matrix<T>(kSteps, plan.key_rows)),
          reading_erase(carver.matrix<T>(kSteps, plan.key_rows)), written(carver.matrix<T>(kSteps, plan.key_rows)),
          products(carver.matrix<float>(kSteps, kSteps, 0)), scores(carver.matrix<Factor<T>>(kSteps, kSteps)),
          error(carver.matrix<float>(kSteps, plan.columns, 8)),
          update(carver.matrix<Factor<T>>(kSteps, plan.columns, 8)),
          state(carver.matrix<Factor<T>>(plan.key_rows, plan.columns, 8)), total(carver.take<float>(plan.key_rows)),
          beta(carver.take<float>(kSteps)), levels(carver.used), of_erase(carver, kLevels, kSteps, plan.key_rows),
          of_queries(carver, kLevels, kSteps, plan.key_rows) {}

    // At the start of a kernel, for what `find_scores` does not write.
    __device__ __forceinline__ void clear_scores() const {
        const int t = threadIdx.x / kSteps, s = threadIdx.x % kSteps;
        scores(t, s) = narrow<Factor<T>>(0.0f);
        static_assert(kDecayThreads == kSteps * kSteps, "an element to a thread");
    }

    // Factors of products in a key dimension: for its keys and erase keys, or for its queries. A barrier before and after.
    __device__ __forceinline__ void write_keys(const float (&gates)[kSteps], int column) const {
        write_operands(erase, k, of_erase, reading_erase, written, gates, column);
        total[column] = product_of(gates);
    }
    __device__ __forceinline__ void write_queries(const float (&gates)[kSteps], int column) const {
        write_operands<false>(q, k, of_queries, reading_queries, written, gates, column);
    }

    // G, P and R, dealt out to warps; R from `state`.
    template <int Passes>
    __device__ __forceinline__ void find_products(Deal& deal, const Plan& plan) const {
        deal.each(kLevels, [&](int level) {
            weigh_pairs<Passes, true>(products, erase, k, of_erase, of_erase, plan.key_rows, level);
        });
    }
    template <int Passes>
    __device__ __forceinline__ void find_scores(Deal& deal, const Plan& plan) const {
        deal.each(kLevels + 1, [&](int level) {
            weigh_pairs<Passes, false>(scores, q, k, of_queries, of_erase, plan.key_rows, level);
        });
    }
    template <int Passes>
    __device__ __forceinline__ void find_error(Deal& deal, const Plan& plan) const {
        deal.tiles(plan.columns, [&](Tile& tile) {
            multiply_stored<Passes, false, false>(tile, 0, plan.key_rows, reading_erase, state);
            tile.each([&](int t, int j, float& value) { error(t, j) = v.get(t, j) - value; });
        });
    }

    // U. A barrier before and after. A step's sum is taken when its turn comes: to subtract each U_s from all later steps'
    // at once would keep the weights of all of them in registers.
    __device__ __forceinline__ void solve(const Plan& plan) const {
        const int column = threadIdx.x;
        if (column >= plan.columns) return;
        const Column<float> left(error, column);
        const Column<Factor<T>> to(update, column);
        float u[kSteps];
#pragma unroll
        for (int t = 0; t < kSteps; ++t) {
            float x = left.get(t), weights[4];
#pragma unroll
            for (int s = 0; s < t; ++s) {
                if (s % 4 == 0) load_row(weights, &products(t, s));
                x -= weights[s % 4] * u[s];
            }
            left.set(t, x);
            u[t] = beta[t] * x;
            to.set(t, u[t]);
        }
    }

    // state = diag(F_e0) state + (K * F_e.)^T U. A barrier before and after.
    template <int Passes, typename State, typename F>
    __device__ __forceinline__ void advance(State& exact, const Plan& plan, F f) const {
        pass_chunk<Passes>(exact, total, nullptr, written, update, plan, f);
    }
};

}  // namespace fairseq_fastweights
