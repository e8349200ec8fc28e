// Rescaled spans: a state is multiplied by its decays twice a span of steps, and not at every step. With F_t the
// product of f over the steps (a, t] of a span that begins with a, and Z_t that of z,
//
//     S_t = (F_t Z_t^T) * S~_t,    S~_t = S~_{t-1} + (k_t / F_t) (v_t / Z_t)^T,    S~_{a-1} = (f_a z_a^T) * S_{a-1}
//     y_t = Z_t * (S~_t^T (F_t * q_t)).
//
// G, the gradient of S, is G~_t / (F_t Z_t^T), which goes backwards alike: dq_t = F_t * (S~_t (Z_t * dy_t)), the others
// likewise; d log f_t is the row sums of S~_{t-1} * G~_t, and d log z_t its column sums.
//
// A span ends before any F or Z leaves [e^-20, e^20]. A strong decay is that of a span's first step, which F leaves
// out: so none is too strong. F is the exponential of a sum, not a product of exponentials: of decays near 1 these
// would lose their difference from 1 at every step.
#pragma once

#include "../gates.h"
#include "../scratch.h"
#include "access.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// The largest sum of the logs in F and in Z. Numbers of 1e-20 to 1e20 have room beside both; and halving all decays for
// a whole chunk stays below it.
constexpr int LARGEST_SUM = 20;

// Steps [begin, end), a span if anything decays.
struct Span {
    index_t begin, end;
};

// The decays of one side of a state, f or z, in a chunk: rows of `ld` numbers by step. If nothing decays, one row of
// ones.
template <class real> struct Scales {
    index_t ld = 0;
    real* scale = nullptr;    // F; before that the sums of logs that it is the exponential of
    real* enter = nullptr;    // f, at the first steps of spans
    real* inverse = nullptr;  // 1 / F; before that logs that are not read where they lie

    static Scales at(real* memory, index_t ld) { return {ld, memory, memory + CHUNK * ld, memory + 2 * CHUNK * ld}; }
    static constexpr index_t room(index_t ld) { return 3 * CHUNK * ld; }

    Steps<const real> entering() const { return {enter, ld}; }
    Steps<const real> leaving() const { return {scale, ld}; }

    // The factors F and 1 / F; null for 1.
    const real* times() const { return ld > 0 ? scale : nullptr; }
    const real* over() const { return ld > 0 ? inverse : nullptr; }

    // Sums the logs of the steps after `first`, which begins a span, and says where it has to end, at most at `rows`.
    index_t sum_from(Steps<const real> logs, index_t first, index_t rows) {
        constexpr real largest = LARGEST_SUM;
        bool small = true;
        for (index_t m = 0; m < ld; m += Vector<real>::lanes) {
            vec<real> sum{}, high{};
            store(scale + first * ld + m, sum);
            for (index_t t = first + 1; t < rows; ++t) {
                const vec<real> x = load_unaligned(logs.at(t) + m);
                high = x > high ? x : high;
                sum += x;
                store(scale + t * ld + m, sum);
            }
            // If no log is above 0, the last sum is the lowest; NaN stays.
            const auto inside = (sum >= -largest) & (high <= real(0));
            for (int i = 0; i < Vector<real>::lanes; ++i) small = small && inside[i] != 0;
        }
        for (index_t i = (first + 1) * ld; !small && i < rows * ld; ++i) {
            if (!(scale[i] >= -largest && scale[i] <= largest)) return i / ld;
        }
        return rows;
    }

    void begin(Steps<const real> logs, index_t first) {
        for (index_t m = 0; m < ld; m += Vector<real>::lanes) {
            store(enter + first * ld + m, load_unaligned(logs.at(first) + m));
        }
        exponentiate(enter + first * ld, ld);
    }

    void finish(index_t rows) { exponentiate_small(scale, inverse, rows * ld); }
};

// All decays of chunks of one head; a gate is that of every key.
template <class real> class Decays {
public:
    // With `slots` for as many chunks: `open` fills one, which stays until it is opened again.
    Decays(const RuleCall& p, Scratch<real>& scratch, index_t slots)
        : gated(p.log_gate.data != nullptr), of_keys(gated || p.log_key_decay.data != nullptr),
          of_values(p.log_value_decay.data != nullptr), p_(p), Kp(padded(p.key_dim)), Vp(padded(p.columns)),
          key_logs_(p.log_key_decay, p.key_dim), value_logs_(p.log_value_decay, p.columns) {
        f_slots = scratch.take(of_keys ? slots * Scales<real>::room(Kp) : 0);
        z_slots = scratch.take(of_values ? slots * Scales<real>::room(Vp) : 0);
        ends = scratch.take(slots * CHUNK);
        ones = scratch.take(Kp > Vp ? Kp : Vp);
        if (ones) fill(ones, real(1), Kp > Vp ? Kp : Vp);
    }

    // `direction` is that in which chunks are opened, 0 if their steps have been fetched.
    void open(index_t b, index_t t, index_t h, index_t rows, index_t slot, index_t direction) {
        find(b, t, h, rows, slot);
        Steps<const real> f_logs{f.inverse, Kp}, z_logs;
        for (index_t i = 0; gated && i < rows; ++i) {
            fill(f.inverse + i * Kp, load_one<real>(p_.log_gate, place(p_.log_gate, b, t + i, h)), Kp);
        }
        key_logs_.copies = f.inverse, value_logs_.copies = z.inverse;
        if (of_keys && !gated) f_logs = key_logs_.read(b, t, h, rows, direction);
        if (of_values) z_logs = value_logs_.read(b, t, h, rows, direction);
        for (index_t first = 0; first < rows;) {
            const index_t end = minimum(f.sum_from(f_logs, first, rows), z.sum_from(z_logs, first, rows));
            f.begin(f_logs, first);
            z.begin(z_logs, first);
            ends[slot * CHUNK + count] = static_cast<real>(end);
            spans[count++] = {first, end};
            first = end;
        }
        f.finish(rows);
        z.finish(rows);
    }

    void reopen(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        find(b, t, h, rows, slot);
        for (index_t first = 0; first < rows;) {
            const index_t end = static_cast<index_t>(ends[slot * CHUNK + count]);
            spans[count++] = {first, end};
            first = end;
        }
    }

    const bool gated, of_keys, of_values;
    Scales<real> f, z;
    Gates<real> gates;
    Span spans[CHUNK];
    index_t count = 0;

private:
    void find(index_t b, index_t t, index_t h, index_t rows, index_t slot) {
        f = of_keys ? Scales<real>::at(f_slots + slot * Scales<real>::room(Kp), Kp) : Scales<real>{0, ones, ones};
        z = of_values ? Scales<real>::at(z_slots + slot * Scales<real>::room(Vp), Vp) : Scales<real>{0, ones, ones};
        if (gated) gates.load(p_, b, t, h, rows);
        count = 0;
    }

    const RuleCall& p_;
    const index_t Kp, Vp;
    Access<real> key_logs_, value_logs_;
    real *f_slots, *z_slots, *ends, *ones;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
