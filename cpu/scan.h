// The selective scan (Gu & Dao 2023, Eq. 2), for some channels of one row of the batch. For each channel and each n
//
//     a = exp(delta A[n])      h[n] = a h[n] + w B[n],  w = delta u      y = D u + sum_n h[n] C[n]
//
// and backwards, where g[n] is the gradient of h[n], first that of the steps after this one:
//
//     g[n] += dy C[n]                  dC[n] = sum over channels of dy h[n]       dB[n] = sum over channels of g[n] w
//     du = D dy + delta sum_n g[n] B[n]                                           dD += dy u
//     d_delta = u sum_n g[n] B[n] + sum_n a g[n] h_before[n] A[n]                 dA[n] += a g[n] h_before[n] delta
//     g[n] = a g[n]
//
// Channels are the lanes of vectors; B and C, which they share, are the same in all lanes. The a and h of an interval
// are computed again and kept, for as many vectors of channels as are worked on together, so that they stay in the
// cache.
#pragma once

#include "intervals.h"
#include "scratch.h"

namespace fairseq_fastweights::FAST_WEIGHTS_ISA {

// Calls work(i, Constant) for the vectors of n numbers that begin at i: several together, whose exponentials overlap.
constexpr int TOGETHER = 2;
template <class real, class Work> FAST_WEIGHTS_INLINE void for_vectors(index_t n, const Work& work) {
    constexpr int W = Vector<real>::lanes;
    index_t i = 0;
    for (; i + TOGETHER * W <= n; i += TOGETHER * W) work(i, Constant<TOGETHER>{});
    for (; i < n; i += W) work(i, Constant<1>{});
}

template <class real> class ScanKernel {
public:
    // For up to `steps` steps at a time.
    ScanKernel(const Scan& p, Scratch<real>& scratch, bool backward, index_t steps) : p_(p), N_(p.states) {
        const index_t most = padded(minimum(Scan::CHANNELS_PER_ITEM, p.channels)), Np = padded(N_);
        scratch.take(steps * most, u_, delta_, w_, y_);
        scratch.take(steps * Np, B_, C_);
        scratch.take(Np * most, A_, h_);  // of a step, a row for each channel
        D_ = scratch.take(most);
        if (!backward) return;
        scratch.take(steps * most, du_, d_delta_);
        scratch.take(steps * Np, dB_, dC_);
        scratch.take(N_ * most, g_, dA_);
        dD_ = scratch.take(most);
        scratch.take(Np * W, sums_B_, sums_C_);
        kept_a_ = scratch.take(steps * N_ * TOGETHER * W);
        kept_h_ = scratch.take((steps + 1) * N_ * TOGETHER * W);
    }

    void forward(index_t item) {
        open(item);
        load_columns(h_, p_.initial_state, state());
        for (index_t t = 0; t < p_.time; t += CHUNK) {
            if (p_.interval > 0 && t > 0 && t % p_.interval == 0) store_rows(kept(t), 0, p_.channels, h_, N_, count_);
            const index_t rows = minimum(CHUNK, p_.time - t);
            read_steps(t, rows);
            for (index_t r = 0; r < rows; ++r) multiply(y_ + r * ld_, D_, u_ + r * ld_, ld_);
            for_vectors<real>(ld_, [&](index_t i, auto count) __attribute__((always_inline)) {
                for (index_t r = 0; r < rows; ++r) advance<count.value, true>(i, r, h_ + i, h_ + i, ld_, nullptr);
            });
            store_rows(p_.out, of_channels(p_.out, t), p_.out.time, y_, rows, count_);
        }
        store_columns(p_.final_state, h_, state());
    }

    void backward(index_t item) {
        open(item);
        load_columns(g_, p_.d_final_state, state());
        fill(dA_, real(0), N_ * ld_);
        fill(dD_, real(0), ld_);
        for (index_t t = (p_.time - 1) / p_.interval * p_.interval; t >= 0; t -= p_.interval) {
            const index_t rows = minimum(p_.interval, p_.time - t);
            t > 0 ? load_rows(h_, kept(t), 0, p_.channels, N_, count_, 0) : load_columns(h_, p_.initial_state, state());
            read_steps(t, rows);
            load_rows(y_, p_.d_out, of_channels(p_.d_out, t), p_.d_out.time, rows, count_, 0);
            for (index_t r = rows - 1; r >= 0; --r) multiply_add(dD_, y_ + r * ld_, u_ + r * ld_, ld_);
            fill(dB_, real(0), rows * padded(N_));
            fill(dC_, real(0), rows * padded(N_));
            for_vectors<real>(ld_, [&](index_t i, auto count)
                                       __attribute__((always_inline)) { recompute_and_go_back<count.value>(i, rows); });
            store_rows(p_.du, of_channels(p_.du, t), p_.du.time, du_, rows, count_);
            store_rows(p_.d_delta, of_channels(p_.d_delta, t), p_.d_delta.time, d_delta_, rows, count_);
            store_rows(p_.dB, place(p_.dB, b_, t, channel_block_), p_.dB.time, dB_, rows, N_);
            store_rows(p_.dC, place(p_.dC, b_, t, channel_block_), p_.dC.time, dC_, rows, N_);
        }
        store_columns(p_.dA, dA_, state());
        for (index_t c = 0; c < count_; ++c) static_cast<real*>(p_.dD)[b_ * p_.channels + first_ + c] = dD_[c];
        if (p_.d_initial_state != nullptr) store_columns(p_.d_initial_state, g_, state());
    }

    // One step, on a state that is changed where it lies.
    void step(index_t item) {
        begin(item);
        read_steps(0, 1);
        load_skip();
        multiply(y_, D_, u_, ld_);
        const index_t Np = padded(N_), place_of_state = b_ * p_.state_batch + first_ * p_.state_channel;
        const Sequence A = numbers_at<real>(p_.A), state = numbers_at<real>(p_.state);
        load_rows(A_, A, first_ * N_, N_, count_, N_, 0);
        load_rows(h_, state, place_of_state, p_.state_channel, count_, N_, 0);
        for (index_t c = 0; c < count_; ++c) {
            const real delta = delta_[c], w = w_[c];
            vec<real> y{};
            for (index_t n = 0; n < Np; n += W) {
                real* h = h_ + c * Np + n;
                store(h, exponential(load(A_ + c * Np + n) * delta) * load(h) + load(B_ + n) * w);
                y += load(h) * load(C_ + n);
            }
            y_[c] += sum<real>(y);
        }
        store_rows(state, place_of_state, p_.state_channel, h_, count_, N_);
        store_rows(p_.out, of_channels(p_.out, 0), 0, y_, 1, count_);
    }

private:
    static constexpr int W = Vector<real>::lanes;

    void begin(index_t item) {
        b_ = item / p_.channel_blocks(), channel_block_ = item % p_.channel_blocks(),
        first_ = channel_block_ * Scan::CHANNELS_PER_ITEM;
        count_ = minimum(Scan::CHANNELS_PER_ITEM, p_.channels - first_), ld_ = padded(count_);
    }

    void load_skip() {
        for (index_t c = 0; c < ld_; ++c) {
            D_[c] = p_.D != nullptr && c < count_ ? static_cast<const real*>(p_.D)[first_ + c] : real(0);
        }
    }

    void open(index_t item) {
        begin(item);
        load_skip();
        load_columns(A_, p_.A, first_ * N_);
    }

    // The place of the channels of step t.
    index_t of_channels(const Sequence& x, index_t t) const { return place(x, b_, t, 0) + first_; }

    // The place of the first channel's state among those of all, (batch, channels, states).
    index_t state() const { return (b_ * p_.channels + first_) * N_; }

    // The state that was kept before step t, from the first channel on: (batch, kept, states, channels).
    Sequence kept(index_t t) const {
        const index_t all = (p_.time + p_.interval - 1) / p_.interval - 1, number = b_ * all + t / p_.interval - 1;
        return numbers_at<real>(static_cast<real*>(p_.kept) + number * N_ * p_.channels + first_);
    }

    // Rows for each n from (channels, states), `offset` numbers from `src` on, or zeros from null; zeros beyond the
    // channels.
    void load_columns(real* dst, const void* src, index_t offset) const {
        const real* from = static_cast<const real*>(src) + (src == nullptr ? 0 : offset);
        for (index_t n = 0; n < N_; ++n) {
            for (index_t c = 0; c < ld_; ++c) {
                dst[n * ld_ + c] = src != nullptr && c < count_ ? from[c * N_ + n] : real(0);
            }
        }
    }

    void store_columns(void* dst, const real* src, index_t offset) const {
        real* to = static_cast<real*>(dst) + offset;
        for (index_t c = 0; c < count_; ++c) {
            for (index_t n = 0; n < N_; ++n) to[c * N_ + n] = src[n * ld_ + c];
        }
    }

    void read_steps(index_t t, index_t rows) {
        load_rows(u_, p_.u, of_channels(p_.u, t), p_.u.time, rows, count_, 0);
        load_rows(delta_, p_.delta, of_channels(p_.delta, t), p_.delta.time, rows, count_, 0);
        load_rows(B_, p_.B, place(p_.B, b_, t, 0), p_.B.time, rows, N_, 0);
        load_rows(C_, p_.C, place(p_.C, b_, t, 0), p_.C.time, rows, N_, 0);
        multiply(w_, delta_, u_, rows * ld_);
    }

    // From the states before step r of R vectors of channels to those after it, rows of `step` numbers; either reads
    // them or keeps a.
    template <int R, bool reads>
    FAST_WEIGHTS_INLINE void advance(index_t i, index_t r, const real* before, real* after, index_t step,
                                     real* kept_a) {
        const real *A = A_ + i, *B = B_ + r * padded(N_), *C = C_ + r * padded(N_);
        real* row = y_ + r * ld_ + i;
        vec<real> delta[R], w[R], y[R];
        for (int j = 0; j < R; ++j) {
            delta[j] = load(delta_ + r * ld_ + i + j * W), w[j] = load(w_ + r * ld_ + i + j * W);
            if (reads) y[j] = load(row + j * W);
        }
        for (index_t n = 0; n < N_; ++n) {
            for (int j = 0; j < R; ++j) {
                const vec<real> a = exponential(delta[j] * load(A + n * ld_ + j * W));
                const vec<real> h = a * load(before + n * step + j * W) + w[j] * B[n];
                store(after + n * step + j * W, h);
                if (reads) y[j] += h * C[n];
                if (!reads) store(kept_a + n * step + j * W, a);
            }
        }
        for (int j = 0; reads && j < R; ++j) store(row + j * W, y[j]);
    }

    template <int R> FAST_WEIGHTS_INLINE void recompute_and_go_back(index_t i, index_t rows) {
        const index_t step = R * W, size = N_ * step;
        for (index_t n = 0; n < N_; ++n) {
            for (int j = 0; j < R; ++j) store(kept_h_ + n * step + j * W, load(h_ + n * ld_ + i + j * W));
        }
        for (index_t r = 0; r < rows; ++r) {
            advance<R, false>(i, r, kept_h_ + r * size, kept_h_ + (r + 1) * size, step, kept_a_ + r * size);
        }
        for (index_t r = rows - 1; r >= 0; --r) go_back<R>(i, r, kept_h_ + r * size, kept_a_ + r * size);
    }

    template <int R> FAST_WEIGHTS_INLINE void go_back(index_t i, index_t r, const real* before, const real* kept_a) {
        const index_t step = R * W, row = r * ld_ + i, Np = padded(N_);
        const real *A = A_ + i, *B = B_ + r * Np, *C = C_ + r * Np, *after = before + N_ * step;
        vec<real> delta[R], w[R], dy[R], from_B[R], from_a[R];
        for (int j = 0; j < R; ++j) {
            delta[j] = load(delta_ + row + j * W), w[j] = load(w_ + row + j * W), dy[j] = load(y_ + row + j * W);
            from_B[j] = from_a[j] = vec<real>{};
        }
        for (index_t n = 0; n < N_; ++n) {
            vec<real> sum_B{}, sum_C{};
            for (int j = 0; j < R; ++j) {
                const index_t at = n * ld_ + j * W, at_kept = n * step + j * W;
                vec<real> g = load(g_ + i + at) + dy[j] * C[n];
                sum_C += dy[j] * load(after + at_kept);
                sum_B += g * w[j];
                from_B[j] += g * B[n];
                g *= load(kept_a + at_kept);
                store(g_ + i + at, g);
                const vec<real> d_log = g * load(before + at_kept);
                from_a[j] += d_log * load(A + at);
                store(dA_ + i + at, load(dA_ + i + at) + d_log * delta[j]);
            }
            store(sums_B_ + n * W, sum_B);
            store(sums_C_ + n * W, sum_C);
        }
        for (int j = 0; j < R; ++j) {
            store(du_ + row + j * W, dy[j] * load(D_ + i + j * W) + delta[j] * from_B[j]);
            store(d_delta_ + row + j * W, load(u_ + row + j * W) * from_B[j] + from_a[j]);
        }
        for (index_t n = 0; n < N_; n += W) {
            store(dB_ + r * Np + n, load(dB_ + r * Np + n) + sum_from<W, 1>(sums_B_ + n * W));
            store(dC_ + r * Np + n, load(dC_ + r * Np + n) + sum_from<W, 1>(sums_C_ + n * W));
        }
    }

    const Scan& p_;
    const index_t N_;
    index_t b_, channel_block_, first_, count_, ld_;
    // A row of channels, or of states, for each step; and one of channels for each state.
    real *u_, *delta_, *w_, *y_, *B_, *C_, *A_, *D_, *h_;
    real *du_, *d_delta_, *dB_, *dC_, *dA_, *dD_, *g_;
    // A vector for each state, whose lanes are to be added up; and the a and h of an interval.
    real *sums_B_, *sums_C_, *kept_a_, *kept_h_;
};

}  // namespace fairseq_fastweights::FAST_WEIGHTS_ISA
