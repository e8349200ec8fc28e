// Secondary chunking (Yang et al. 2024): decays of rows f and columns z of the state within a chunk (diagonal.h,
// delta.h), where one factor for each key and value dimension cannot be pulled out of the scores. Two steps t and s
// meet with the decays of (s, t] between them:
//
//     y_t += sum over s of <q_t, k_s * F_st> v_s * Z_st     F_st, Z_st = products of the f and z of (s, t]
//
// Within subchunks of 4 steps the pairs are taken one by one, in registers. Beyond them, on two levels h = 4 and 8: of
// each 2 h steps every t of the second half reads every s of the first, with F_st = P_t R_s,
//
//     P_t = product of the decays of (m, t], R_s = product of those of (s, m], m the first half's last step
//
// No factor exceeds 1 and nothing is divided or subtracted, so gates of 1e-6, or 0, do no harm. Doubling h makes the
// factors of the next level out of these: R_s *= P of the second half's last step (s in the first half), P_t *= P of
// the first half's last step (t in the second). After the last level P reaches from the chunk's start to t and R from s
// to its end: the decays of reading the state before the chunk and of writing the one after it.
//
// The gradient of a log decay collects, for step u, the products of all pairs with s < u <= t: again plain sums.
#pragma once

#include "../matrix.h"
#include "../rows.h"
#include "../scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Steps of the subchunks whose pairs are taken one by one.
constexpr index_t SUBCHUNK = 4;

// Decays of rows (or columns) in a chunk, and the factors of the current level; null without decays.
template <class real> struct Factors {
    index_t n = 0, ld = 0;
    real* gates = nullptr;   // exp of the logs, a slot for each chunk
    real* gate = nullptr;    // those of the chunk at hand
    real* prefix = nullptr;  // P
    real* suffix = nullptr;  // R

    void take(Scratch<real>& scratch, const Sequence& logs, index_t dim, index_t slots) {
        n = dim;
        ld = padded(dim);
        if (logs.data == nullptr) return;
        gates = scratch.take(slots * CHUNK * ld);
        scratch.take(CHUNK * ld, prefix, suffix);
    }

    void choose(index_t slot) {
        if (gates != nullptr) gate = gates + slot * CHUNK * ld;
    }

    void open(const Sequence& logs, index_t b, index_t t, index_t h, index_t rows) {
        if (gate == nullptr) return;
        load_steps(gate, logs, b, t, h, rows, n, 1);
        exponentiate(gate, rows * ld);
        if (rows < CHUNK) fill(gate + rows * ld, real(1), (CHUNK - rows) * ld);
    }

    // The factors of the first level: from a subchunk's start to t, and from s to its end.
    void begin() {
        for (index_t subchunk = 0; gate != nullptr && subchunk < CHUNK; subchunk += SUBCHUNK) {
            for (index_t m = subchunk * ld; m < (subchunk + 1) * ld; m += Vector<real>::lanes) {
                vec<real> product = load(gate + m);
                store(prefix + m, product);
                for (index_t i = 1; i < SUBCHUNK; ++i) store(prefix + i * ld + m, product *= load(gate + i * ld + m));
                product = vec<real>{} + 1;
                for (index_t i = SUBCHUNK - 1; i > 0; --i) {
                    store(suffix + i * ld + m, product);
                    product *= load(gate + i * ld + m);
                }
                store(suffix + m, product);
            }
        }
    }

    // From 2 half steps to twice as many.
    void widen(index_t half) {
        for (index_t subchunk = 0; gate != nullptr && subchunk < CHUNK; subchunk += 2 * half) {
            const real* first = prefix + (subchunk + half - 1) * ld;
            const real* second = prefix + (subchunk + 2 * half - 1) * ld;
            for (index_t i = 0; i < half; ++i) {
                multiply(suffix + (subchunk + i) * ld, suffix + (subchunk + i) * ld, second, ld);
            }
            for (index_t i = 0; i < half; ++i) {
                real* row = prefix + (subchunk + half + i) * ld;
                if (row != second) multiply(row, row, first, ld);
            }
            multiply(prefix + (subchunk + 2 * half - 1) * ld, second, first, ld);
        }
    }

    // Past all levels: the factors of reading from before the chunk and of writing to after it.
    void widen_to_chunk() {
        for (index_t half = SUBCHUNK; half < CHUNK; half *= 2) widen(half);
    }

    const real* total() const { return gate ? prefix + (CHUNK - 1) * ld : nullptr; }

    void apply_row(real* y, const real* x, const real* factor) const {
        if (gate != nullptr) {
            multiply(y, x, factor, ld);
        } else {
            copy(y, x, ld);
        }
    }
    void apply(real* y, const real* x, const real* factors) const {
        gate ? multiply(y, x, factors, CHUNK * ld) : copy(y, x, CHUNK * ld);
    }
    void apply_add(real* y, const real* x, const real* factors) const {
        gate ? multiply_add(y, x, factors, CHUNK * ld) : add(y, x, CHUNK * ld);
    }
};

// A pair of steps s <= t of a subchunk, among its PAIRS.
constexpr int PAIRS = SUBCHUNK * (SUBCHUNK + 1) / 2;
constexpr int pair(int t, int s) { return t * (t + 1) / 2 + s; }

// The rows of a subchunk's steps, one vector wide.
template <class real> struct SubchunkRows {
    vec<real> row[SUBCHUNK];
    SubchunkRows() = default;
    FAST_WEIGHTS_INLINE SubchunkRows(const real* x, index_t ld) {
        UNROLL_FOR (int i = 0; i < SUBCHUNK; ++i) row[i] = load(x + i * ld);
    }
};

// For every subchunk: scores[pair(t, s)] = <readers_t, read_s decayed from s to t>.
template <bool decays, class real>
inline void score_pairs_as(real* scores, const real* readers, const real* read, const real* gates, index_t ld) {
    for (index_t subchunk = 0; subchunk < CHUNK; subchunk += SUBCHUNK) {
        vec<real> sums[PAIRS] = {};
        for (index_t m = subchunk * ld; m < (subchunk + 1) * ld; m += Vector<real>::lanes) {
            const SubchunkRows<real> a(readers + m, ld), b(read + m, ld);
            SubchunkRows<real> g;
            if (decays) g = SubchunkRows<real>(gates + m, ld);
            UNROLL_FOR (int s = 0; s < SUBCHUNK; ++s) {
                vec<real> left = b.row[s];
                UNROLL_FOR (int t = s; t < SUBCHUNK; ++t) {
                    if (decays && t > s) left *= g.row[t];
                    sums[pair(t, s)] += a.row[t] * left;
                }
            }
        }
        UNROLL_FOR (int i = 0; i < PAIRS; ++i) *scores++ = sum<real>(sums[i]);
    }
}

// For every subchunk: out_t = sum over s <= t of scores[pair(t, s)] read_s, decayed from s to t.
template <bool decays, class real>
inline void read_pairs_as(real* out, const real* scores, const real* read, const real* gates, index_t ld) {
    for (index_t subchunk = 0; subchunk < CHUNK; subchunk += SUBCHUNK, scores += PAIRS) {
        for (index_t m = subchunk * ld; m < (subchunk + 1) * ld; m += Vector<real>::lanes) {
            const SubchunkRows<real> b(read + m, ld);
            SubchunkRows<real> g;
            if (decays) g = SubchunkRows<real>(gates + m, ld);
            UNROLL_FOR (int t = 0; t < SUBCHUNK; ++t) {
                vec<real> total{};
                UNROLL_FOR (int s = 0; s <= t; ++s) {
                    if (decays && s > 0) total *= g.row[s];
                    total += b.row[s] * scores[pair(t, s)];
                }
                store(out + t * ld + m, total);
            }
        }
    }
}

// For every subchunk: the gradients of sum over s <= t of scores[pair(t, s)] <readers_t, read_s decayed from s to t> to
// `read` and to the logs of `gates`, where step u collects the pairs with s < u <= t. `read_pairs` gives that to
// `readers`.
template <bool decays, class real>
inline void differentiate_pairs_as(const real* scores, const real* readers, const real* read, const real* gates,
                                   index_t ld, real* d_read, real* d_logs) {
    for (index_t subchunk = 0; subchunk < CHUNK; subchunk += SUBCHUNK, scores += PAIRS) {
        for (index_t m = subchunk * ld; m < (subchunk + 1) * ld; m += Vector<real>::lanes) {
            const SubchunkRows<real> a(readers + m, ld), b(read + m, ld);
            SubchunkRows<real> g;
            if (decays) g = SubchunkRows<real>(gates + m, ld);
            vec<real> d_log[SUBCHUNK] = {};
            UNROLL_FOR (int s = 0; s < SUBCHUNK; ++s) {
                vec<real> total{}, left = b.row[s], run{};
                UNROLL_FOR (int t = SUBCHUNK - 1; t >= s; --t) {
                    total += a.row[t] * scores[pair(t, s)];
                    if (decays && t > s) total *= g.row[t];
                }
                store(d_read + s * ld + m, total);
                // The sum that passes each step: the pairs of s with the steps from there on.
                vec<real> met[SUBCHUNK];
                UNROLL_FOR (int t = s + 1; decays && t < SUBCHUNK; ++t) {
                    left *= g.row[t];
                    met[t] = left * a.row[t] * scores[pair(t, s)];
                }
                UNROLL_FOR (int t = SUBCHUNK - 1; decays && t > s; --t) d_log[t] += run += met[t];
            }
            UNROLL_FOR (int t = 0; decays && t < SUBCHUNK; ++t) store(d_logs + t * ld + m, d_log[t]);
        }
    }
}

// The same for `gates` that may be null: then nothing decays.

template <class real>
inline void score_pairs(real* scores, const real* readers, const real* read, const real* gates, index_t ld) {
    gates ? score_pairs_as<true>(scores, readers, read, gates, ld)
          : score_pairs_as<false>(scores, readers, read, gates, ld);
}

template <class real>
inline void read_pairs(real* out, const real* scores, const real* read, const real* gates, index_t ld) {
    gates ? read_pairs_as<true>(out, scores, read, gates, ld) : read_pairs_as<false>(out, scores, read, gates, ld);
}

template <class real>
inline void differentiate_pairs(const real* scores, const real* readers, const real* read, const real* gates,
                                index_t ld, real* d_read, real* d_logs) {
    gates ? differentiate_pairs_as<true>(scores, readers, read, gates, ld, d_read, d_logs)
          : differentiate_pairs_as<false>(scores, readers, read, gates, ld, d_read, d_logs);
}

// Both levels fill 16 rows: of each the 8 steps in second halves, which read, and the 8 in first halves, which are
// read. Row i is step reads(i) or is_read(i).
namespace levels {
constexpr index_t half(index_t i) { return i < 8 ? SUBCHUNK : 2 * SUBCHUNK; }
constexpr index_t is_read(index_t i) { return i < 8 ? (i & 4) << 1 | (i & 3) : i & 7; }
constexpr index_t reads(index_t i) { return is_read(i) + half(i); }
// The rows that meet reader i: those from first(i) on, half(i) of them.
constexpr index_t first(index_t i) { return i & ~(half(i) - 1); }
}  // namespace levels

// The rows of the levels, and their factors.
template <class real> struct LevelRows {
    real* readers;     // q * Pf, or dy * Pz
    real* read;        // k * Rf, or v * Rz
    real* of_readers;  // the factors Pf or Pz themselves
    real* of_read;     // Rf or Rz

    void take(Scratch<real>& scratch, index_t ld) { scratch.take(CHUNK * ld, readers, read, of_readers, of_read); }

    // Fills the 8 rows of one level; `second` (q or dy) may be null.
    void gather(const Factors<real>& factors, index_t from, const real* second, const real* first) {
        const index_t ld = factors.ld;
        const bool decays = factors.gate != nullptr;
        for (index_t i = from; i < from + 8; ++i) {
            const index_t t = levels::reads(i), s = levels::is_read(i);
            if (decays) {
                copy(of_readers + i * ld, factors.prefix + t * ld, ld);
                copy(of_read + i * ld, factors.suffix + s * ld, ld);
            }
            if (second) factors.apply_row(readers + i * ld, second + t * ld, of_readers + i * ld);
            factors.apply_row(read + i * ld, first + s * ld, of_read + i * ld);
        }
    }
};

template <class real> inline void mask_levels(real* scores) {
    using index = typename Index<real>::type;
    constexpr int W = Vector<real>::lanes;
    for (index_t i = 0; i < CHUNK; ++i) {
        const int first = static_cast<int>(levels::first(i)), end = first + static_cast<int>(levels::half(i));
        for (int j = 0; j < CHUNK; j += W) {
            const index lane = lane_numbers<real>() + j;
            const index kept = (lane >= index{} + first) & (lane < index{} + end);
            store(scores + i * CHUNK + j, kept ? load(scores + i * CHUNK + j) : vec<real>{});
        }
    }
}

// A chunk's scores put together from those of its pairs and its levels: zero above the diagonal, and on it if `kept` is
// -1.
template <class real> inline void join_levels(real* scores, const real* pairs, const real* on_levels, index_t kept) {
    fill(scores, real(0), CHUNK * CHUNK);
    for (index_t subchunk = 0; subchunk < CHUNK; subchunk += SUBCHUNK, pairs += PAIRS) {
        for (int t = 0; t < SUBCHUNK; ++t) {
            for (int s = 0; s <= t + kept; ++s) scores[(subchunk + t) * CHUNK + subchunk + s] = pairs[pair(t, s)];
        }
    }
    for (index_t i = 0; i < CHUNK; ++i) {
        real* row = scores + levels::reads(i) * CHUNK;
        for (index_t j = 0, first = levels::first(i); j < levels::half(i); ++j) {
            row[levels::is_read(first + j)] = on_levels[i * CHUNK + first + j];
        }
    }
}

// And taken apart again.
template <class real> inline void part_levels(const real* scores, real* pairs, real* on_levels) {
    for (index_t subchunk = 0; subchunk < CHUNK; subchunk += SUBCHUNK, pairs += PAIRS) {
        for (int t = 0; t < SUBCHUNK; ++t) {
            for (int s = 0; s <= t; ++s) pairs[pair(t, s)] = scores[(subchunk + t) * CHUNK + subchunk + s];
        }
    }
    fill(on_levels, real(0), CHUNK * CHUNK);
    for (index_t i = 0; i < CHUNK; ++i) {
        const real* row = scores + levels::reads(i) * CHUNK;
        for (index_t j = 0, first = levels::first(i); j < levels::half(i); ++j) {
            on_levels[i * CHUNK + first + j] = row[levels::is_read(first + j)];
        }
    }
}

// `gradient` (CHUNK, ld) is that of the rows that read (`second`) or are read. It goes to the steps it belongs to,
// and, times the rows, to the log decays that these rows passed through: those of (m, t] or of (s, m].
template <class real>
inline void add_levels(const Factors<real>& factors, bool second, const real* gradient, const LevelRows<real>& rows,
                       real* d_steps, real* d_logs) {
    constexpr int W = Vector<real>::lanes;
    const index_t ld = factors.ld;
    const real* scaled_rows = second ? rows.readers : rows.read;
    const real* scales = second ? rows.of_readers : rows.of_read;
    for (index_t m = 0; m < ld; m += W) {
        for (index_t i = 0; d_steps != nullptr && i < CHUNK; ++i) {
            real* step = d_steps + (second ? levels::reads(i) : levels::is_read(i)) * ld + m;
            const vec<real> x = load(gradient + i * ld + m);
            store(step, load(step) + (factors.gate ? x * load(scales + i * ld + m) : x));
        }
        for (index_t from = 0; factors.gate && from < CHUNK; from += levels::half(from)) {
            // Backwards in time over the second half, forwards over the first: there step s is passed by s + 1.
            vec<real> run{};
            for (index_t j = 0, half = levels::half(from); j < half; ++j) {
                const index_t i = second ? from + half - 1 - j : from + j;
                const vec<real> x = load(gradient + i * ld + m) * load(scaled_rows + i * ld + m);
                real* log = d_logs + (second ? levels::reads(i) : levels::is_read(i)) * ld + m;
                if (second) run += x;
                store(log, load(log) + run);
                if (!second) run += x;
            }
        }
    }
}

// d[u] += sum over t >= u of a_t * b_t
template <class real> inline void add_suffix_sums(real* d, const real* a, const real* b, index_t rows, index_t ld) {
    for (index_t m = 0; m < ld; m += Vector<real>::lanes) {
        vec<real> run{};
        for (index_t i = (rows - 1) * ld + m; i >= 0; i -= ld) {
            run += load(a + i) * load(b + i);
            store(d + i, load(d + i) + run);
        }
    }
}

// d[u] += sum over s < u of a_s * b_s
template <class real> inline void add_prefix_sums(real* d, const real* a, const real* b, index_t rows, index_t ld) {
    for (index_t m = 0; m < ld; m += Vector<real>::lanes) {
        vec<real> run{};
        for (index_t i = m; i < rows * ld; i += ld) {
            store(d + i, load(d + i) + run);
            run += load(a + i) * load(b + i);
        }
    }
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
