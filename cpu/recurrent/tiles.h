// Tiles of a state that pass through steps in registers: S_t = S_{t-1} + k_t v_t^T, y_t = S_t^T q_t, and their
// gradients. With G the gradient of S:
//
//     G_t = G_{t+1} + q_t dy_t^T      dv_t = G_t^T k_t     dq_t = S_t dy_t     dk_t = G_t v_t
//
// Inputs and results are rescaled by decays (rescaled_spans.h), and at both ends of a span a state is multiplied by
// them. The gradients of their logs are sums of S_{t-1} * G_t: over columns those of rows, and the other way around.
//
// The elements of a state do not depend on one another. Products with everything in the other dimension are sums over a
// tile's rows; so the backward pass goes over the state twice, once with columns in the lanes of a vector (for v) and
// once, on transposed states, with rows (for q and k, and for all decays). Few keys would leave most of these lanes
// empty: their products are added up in the lanes of the columns instead, which are summed at the end.
#pragma once

#include "rescaled_spans.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Rows of a tile that fit into registers, and so few that the lanes of a vector are not for them.
constexpr int TILE = FAST_WEIGHTS_VECTOR_BYTES == 64 ? 16 : 8;
constexpr int FEW = 4;

// One side of a chunk: the rows of the state (keys), or its columns (values).
template <class real> struct Side {
    Steps<const real> write, read;  // k, q; or v, dy
    // The factors of a state before the first step of a span, and after its last one.
    Steps<const real> enter, leave;
};

// The factors from row (or lane) `first` on, where there are any.
template <bool decays, class real>
FAST_WEIGHTS_INLINE const real* factors(const Steps<const real>& steps, index_t t, index_t first) {
    return decays ? steps.at(t) + first : nullptr;
}

// Row i of a tile of `state`, times factors of its rows and lanes if `decays`.
template <bool decays, class real>
FAST_WEIGHTS_INLINE vec<real> load_row(const real* state, index_t ld, int i, const real* rows, const real* lanes) {
    const vec<real> x = load(state + i * ld);
    return decays ? x * (load(lanes) * rows[i]) : x;
}
template <bool decays, class real>
FAST_WEIGHTS_INLINE void store_row(real* state, index_t ld, int i, const real* rows, const real* lanes, vec<real> x) {
    store(state + i * ld, decays ? x * (load(lanes) * rows[i]) : x);
}

// A tile's effect on its output: none, set it (the first tile of its lanes), or add to it.
enum class Out { none, set, add };

// Takes a tile of R rows and one vector of lanes of `from` through the steps and leaves it in `to`. `out` = or += the
// outputs; `history`: S_{t-1}.
template <int R, bool decays, Out into, bool keeps, class real>
FAST_WEIGHTS_INLINE void forward_tile(Span span, const real* from, real* to, index_t ld, Side<real> rows,
                                      Side<real> lanes, index_t row, index_t lane, Steps<real> out, real* history) {
    constexpr int W = Vector<real>::lanes;
    constexpr bool reads = into != Out::none;
    vec<real> s[R];
    const real* row_in = factors<decays>(rows.enter, span.begin, row);
    const real* lane_in = factors<decays>(lanes.enter, span.begin, lane);
    UNROLL_FOR (int i = 0; i < R; ++i) s[i] = load_row<decays>(from, ld, i, row_in, lane_in);
    for (index_t t = span.begin; t < span.end; ++t) {
        const real *k = rows.write.at(t) + row, *q = reads ? rows.read.at(t) + row : nullptr;
        const vec<real> v = load_unaligned(lanes.write.at(t) + lane);
        vec<real> y[2] = {into == Out::add ? load_unaligned(out.at(t) + lane) : vec<real>{}, vec<real>{}};
        UNROLL_FOR (int i = 0; i < R; ++i) {
            if (keeps) store(history + (t * R + i) * W, s[i]);
            s[i] += v * k[i];
            if (reads) y[i % 2] += s[i] * q[i];
        }
        if (reads) store_unaligned(out.at(t) + lane, y[0] + y[1]);
    }
    const real* row_out = factors<decays>(rows.leave, span.end - 1, row);
    const real* lane_out = factors<decays>(lanes.leave, span.end - 1, lane);
    UNROLL_FOR (int i = 0; i < R; ++i) store_row<decays>(to, ld, i, row_out, lane_out, s[i]);
}

// The sums of the lanes of R vectors, take(i) being the i-th, set at or added to `sums`. As in sum_vectors, but a
// vector is asked for when it is needed, so that few are alive at a time.
template <int R, int first, int step, class real, class Take> FAST_WEIGHTS_INLINE vec<real> merged(const Take& take) {
    if constexpr (step >= R) {
        return take(first);
    } else {
        const vec<real> x = merged<R, first, 2 * step, real>(take), y = merged<R, first + step, 2 * step, real>(take);
        return folded<real, step>(x, y);
    }
}
template <int R, bool adds, class real, class Take> FAST_WEIGHTS_INLINE void put_sums(real* sums, const Take& take) {
    constexpr int W = Vector<real>::lanes;
    if constexpr (R > W) {
        put_sums<R / 2, adds>(sums, take);
        put_sums<R / 2, adds>(sums + R / 2, [&](int i) __attribute__((always_inline)) { return take(R / 2 + i); });
    } else if constexpr (R == W) {
        const vec<real> total = merged<R, 0, 1, real>(take);
        store_unaligned(sums, adds ? load_unaligned(sums) + total : total);
    } else {
        // With fewer vectors than lanes, each sum is in W / R lanes.
        real parts[W] __attribute__((aligned(64)));
        store(parts, merged<R, 0, 1, real>(take));
        for (int i = 0; i < R; ++i) {
            real sum = adds ? sums[i] : real(0);
            for (int j = i; j < W; j += R) sum += parts[j];
            sums[i] = sum;
        }
    }
}

// Takes the gradient of a tile back through the steps. `d_write` = or += dv (or dk); if `lane_logs`, `d_lane_log`
// likewise d log z (or f), and if `row_logs`, `d_row_log` that of the rows' decays, by `row_into`.
template <int R, bool decays, bool row_logs, bool lane_logs, Out into, Out row_into, class real>
FAST_WEIGHTS_INLINE void backward_tile(Span span, real* d_state, index_t ld, Side<real> rows, Side<real> lanes,
                                       index_t row, index_t lane, Steps<real> d_write, Steps<real> d_row_log,
                                       Steps<real> d_lane_log, const real* history) {
    constexpr int W = Vector<real>::lanes;
    constexpr bool adds = into == Out::add;
    vec<real> g[R];
    const real* row_in = factors<decays>(rows.leave, span.end - 1, row);
    const real* lane_in = factors<decays>(lanes.leave, span.end - 1, lane);
    UNROLL_FOR (int i = 0; i < R; ++i) g[i] = load_row<decays>(d_state, ld, i, row_in, lane_in);
    for (index_t t = span.end - 1; t >= span.begin; --t) {
        const real *k = rows.write.at(t) + row, *q = rows.read.at(t) + row;
        const vec<real> dy = load_unaligned(lanes.read.at(t) + lane);
        vec<real> dv[2] = {adds ? load_unaligned(d_write.at(t) + lane) : vec<real>{}, vec<real>{}};
        vec<real> dz[2] = {adds && lane_logs ? load(d_lane_log.at(t) + lane) : vec<real>{}, vec<real>{}};
        const auto take_row = [&](int i) __attribute__((always_inline)) {
            g[i] += dy * q[i];
            dv[i % 2] += g[i] * k[i];
            vec<real> passed{};
            if (row_logs || lane_logs) passed = g[i] * load(history + (t * R + i) * W);
            if (lane_logs) dz[i % 2] += passed;
            return passed;
        };
        if constexpr (row_logs) {
            put_sums<R, row_into == Out::add>(d_row_log.at(t) + row, take_row);
        } else {
            UNROLL_FOR (int i = 0; i < R; ++i) take_row(i);
        }
        store_unaligned(d_write.at(t) + lane, dv[0] + dv[1]);
        if (lane_logs) store(d_lane_log.at(t) + lane, dz[0] + dz[1]);
    }
    const real* row_out = factors<decays>(rows.enter, span.begin, row);
    const real* lane_out = factors<decays>(lanes.enter, span.begin, lane);
    UNROLL_FOR (int i = 0; i < R; ++i) store_row<decays>(d_state, ld, i, row_out, lane_out, g[i]);
}

// Vectors of lanes that a tile of FEW rows holds.
constexpr int WIDTH = TILE / FEW;

// `sums` of FEW rows by step, in the lanes of a vector each.
template <Out into, class real> FAST_WEIGHTS_INLINE void put_in_lanes(real* sums, index_t t, int row, vec<real> x) {
    real* place = sums + (t * FEW + row) * Vector<real>::lanes;
    store(place, into == Out::add ? load(place) + x : x);
}

// A tile of FEW rows and N vectors of lanes forwards: `dq` = or += the outputs of reading with dy, in lanes. `history`
// as above.
template <int N, bool decays, Out into, class real>
FAST_WEIGHTS_INLINE void forward_few(Span span, real* state, index_t ld, Side<real> rows, Side<real> lanes,
                                     index_t lane, real* dq, real* history) {
    constexpr int W = Vector<real>::lanes;
    vec<real> s[FEW][N];
    const real* row_in = factors<decays>(rows.enter, span.begin, 0);
    const real* lane_in = factors<decays>(lanes.enter, span.begin, lane);
    UNROLL_FOR (int i = 0; i < FEW; ++i) {
        UNROLL_FOR (int j = 0; j < N; ++j)
            s[i][j] = load_row<decays>(state + lane + j * W, ld, i, row_in, lane_in + j * W);
    }
    for (index_t t = span.begin; t < span.end; ++t) {
        const real* k = rows.write.at(t);
        vec<real> sum[FEW];
        UNROLL_FOR (int j = 0; j < N; ++j) {
            const index_t m = lane + j * W;
            const vec<real> v = load_unaligned(lanes.write.at(t) + m), dy = load_unaligned(lanes.read.at(t) + m);
            UNROLL_FOR (int i = 0; i < FEW; ++i) {
                if (decays) store(history + ((t * N + j) * FEW + i) * W, s[i][j]);
                s[i][j] += v * k[i];
                sum[i] = j == 0 ? s[i][j] * dy : sum[i] + s[i][j] * dy;
            }
        }
        UNROLL_FOR (int i = 0; i < FEW; ++i) put_in_lanes<into>(dq, t, i, sum[i]);
    }
    const real* row_out = factors<decays>(rows.leave, span.end - 1, 0);
    const real* lane_out = factors<decays>(lanes.leave, span.end - 1, lane);
    UNROLL_FOR (int i = 0; i < FEW; ++i) {
        UNROLL_FOR (int j = 0; j < N; ++j)
            store_row<decays>(state + lane + j * W, ld, i, row_out, lane_out + j * W, s[i][j]);
    }
}

// And its gradient backwards: dv and, if `lane_logs`, d log z of these lanes; `dk` and, if `row_logs`, `df` = or +=
// those of the rows, in lanes.
template <int N, bool row_logs, bool lane_logs, Out into, class real>
FAST_WEIGHTS_INLINE void backward_few(Span span, real* d_state, index_t ld, Side<real> rows, Side<real> lanes,
                                      index_t lane, Steps<real> dv, Steps<real> dz, real* dk, real* df,
                                      const real* history) {
    constexpr int W = Vector<real>::lanes;
    constexpr bool decays = row_logs || lane_logs;
    vec<real> g[FEW][N];
    const real* row_in = factors<decays>(rows.leave, span.end - 1, 0);
    const real* lane_in = factors<decays>(lanes.leave, span.end - 1, lane);
    UNROLL_FOR (int i = 0; i < FEW; ++i) {
        UNROLL_FOR (int j = 0; j < N; ++j)
            g[i][j] = load_row<decays>(d_state + lane + j * W, ld, i, row_in, lane_in + j * W);
    }
    for (index_t t = span.end - 1; t >= span.begin; --t) {
        const real *k = rows.write.at(t), *q = rows.read.at(t);
        vec<real> written[FEW], passed[FEW];
        UNROLL_FOR (int j = 0; j < N; ++j) {
            const index_t m = lane + j * W;
            const vec<real> v = load_unaligned(lanes.write.at(t) + m), dy = load_unaligned(lanes.read.at(t) + m);
            vec<real> dv_t{}, dz_t{};
            UNROLL_FOR (int i = 0; i < FEW; ++i) {
                g[i][j] += dy * q[i];
                dv_t += g[i][j] * k[i];
                written[i] = j == 0 ? g[i][j] * v : written[i] + g[i][j] * v;
                if (decays) {
                    const vec<real> here = g[i][j] * load(history + ((t * N + j) * FEW + i) * W);
                    if (lane_logs) dz_t += here;
                    if (row_logs) passed[i] = j == 0 ? here : passed[i] + here;
                }
            }
            store_unaligned(dv.at(t) + m, dv_t);
            if (lane_logs) store(dz.at(t) + m, dz_t);
        }
        UNROLL_FOR (int i = 0; i < FEW; ++i) {
            put_in_lanes<into>(dk, t, i, written[i]);
            if (row_logs) put_in_lanes<into>(df, t, i, passed[i]);
        }
    }
    const real* row_out = factors<decays>(rows.enter, span.begin, 0);
    const real* lane_out = factors<decays>(lanes.enter, span.begin, lane);
    UNROLL_FOR (int i = 0; i < FEW; ++i) {
        UNROLL_FOR (int j = 0; j < N; ++j)
            store_row<decays>(d_state + lane + j * W, ld, i, row_out, lane_out + j * W, g[i][j]);
    }
}

// Numbers of `sums` of FEW rows in lanes, for so many steps.
template <class real> constexpr index_t lanes_of_few(index_t steps) { return steps * FEW * Vector<real>::lanes; }

// The first `keys` numbers of `rows` from their lanes, of which there are those of a multiple of 16 steps.
template <class real> inline void sum_few(Steps<real> rows, const real* lanes, index_t steps, index_t keys) {
    constexpr int W = Vector<real>::lanes, at_once = W > FEW ? W / FEW : 1;
    for (index_t t = 0; t < steps; t += at_once) {
        real sums[at_once * FEW] __attribute__((aligned(64)));
        for (int i = 0; i < at_once * FEW; i += W) sum_vectors(sums + i, lanes + (t * FEW + i) * W);
        for (index_t i = 0; i < at_once && t + i < steps; ++i) {
            for (index_t e = 0; e < keys; ++e) rows.at(t + i)[e] = sums[i * FEW + e];
        }
    }
}

// n numbers in whole vectors.
template <class real> constexpr index_t vectors(index_t n) {
    return (n + Vector<real>::lanes - 1) / Vector<real>::lanes * Vector<real>::lanes;
}

// Calls work(number of rows, set or add, first row, first lane) for tiles that cover `rows` rows, up to the next
// multiple of TILE / 4, of `lanes` lanes: the tiles of the same lanes one after the other.
template <class real, class Work> FAST_WEIGHTS_INLINE void for_tiles(index_t rows, index_t lanes, const Work& work) {
    for (index_t m = 0; m < lanes; m += Vector<real>::lanes) {
        index_t i = 0;
        if (rows > TILE * 3 / 4) {
            work(Constant<TILE>(), Constant<Out::set>(), i, m);
            for (i = TILE; rows - i > TILE * 3 / 4; i += TILE) work(Constant<TILE>(), Constant<Out::add>(), i, m);
            if (rows - i > TILE / 4) {
                work(Constant<TILE / 2>(), Constant<Out::add>(), i, m);
                i += TILE / 2;
            }
        } else if (rows > TILE / 4) {
            work(Constant<TILE / 2>(), Constant<Out::set>(), i, m);
            i = TILE / 2;
        } else {
            work(Constant<TILE / 4>(), Constant<Out::set>(), i, m);
            i = TILE / 4;
        }
        for (; i < rows; i += TILE / 4) work(Constant<TILE / 4>(), Constant<Out::add>(), i, m);
    }
}

// Calls work(vectors, set or add, first lane) for tiles of FEW rows that cover `lanes` lanes.
template <class real, class Work> FAST_WEIGHTS_INLINE void for_few(index_t lanes, const Work& work) {
    constexpr int W = Vector<real>::lanes;
    index_t m = 0;
    if (lanes >= WIDTH * W) {
        work(Constant<WIDTH>(), Constant<Out::set>(), m);
        m = WIDTH * W;
    } else {
        work(Constant<1>(), Constant<Out::set>(), m);
        m = W;
    }
    for (; lanes - m >= WIDTH * W; m += WIDTH * W) work(Constant<WIDTH>(), Constant<Out::add>(), m);
    for (; m < lanes; m += W) work(Constant<1>(), Constant<Out::add>(), m);
}

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
