// The short causal convolution of each channel, with its SiLU:
//
//   u_t = b + sum_j w_{R - j} x_{t - j},  j = 0 ... R      y_t = silu(u_t)
//
// where x_{-R} ... x_{-1} are the convolution's state, and inputs before the beginning of t's document do not count: j
// is at most the reach of t. The next call's state is the last R inputs of a row, zeros before the document's
// beginning. Backwards, where g is the gradient of y:
//
//   d_t = g_t silu'(u_t)   dx_s = sum_j w_{R - j} d_{s + j}   dw_{R - j} = sum_t d_t x_{t - j}   db = sum_t d_t
//
// A thread has neighbouring channels, 16 bytes of them, of a row of the batch, for a run of steps. Weights, the inputs
// that a step sees, and backwards the gradients of weights and of those inputs, stay in its registers; for widths that
// no kernel is compiled for they are in shared memory, of one channel. A run begins with the R inputs before it, and
// backwards ends with the R steps after it, which have a part in the gradients of its inputs. Each run leaves its part
// of dw and db.
#include "elementwise.cuh"

using namespace fairseq_fastweights;

namespace {

constexpr int kThreads = 128, kGenericThreads = 32;
constexpr int kMostRun = 32, kLeastRun = 8;  // steps
constexpr int kEnoughThreads = 32768;        // for runs of more steps than the least
constexpr int kAtOnce = 4;                   // steps loaded before the first is used; backwards half as many

// `width` numbers for each of a thread's V channels.
template <typename A, int Width, int V>
struct Taps {
    A x[Width][V];
    DEVICE Taps(A*&, int) {}
    DEVICE A& operator()(int j, int v) { return x[j][v]; }
};
template <typename A, int V>
struct Taps<A, 0, V> {
    A* x;
    DEVICE Taps(A*& shared, int width) : x(shared + threadIdx.x) { shared += width * V * kGenericThreads; }
    DEVICE A& operator()(int j, int v) { return x[(j * V + v) * kGenericThreads]; }
};

// The work of a thread. `Width` is 0 for a width that is known at run time.
template <typename T, int Width>
struct Channels {
    using A = typename Stored<T>::Compute;
    static constexpr int V = Width == 0 ? 1 : kPack<T>;
    const Convolution& call;
    const bool whole;  // all V channels, of all threads, and aligned
    unsigned part;
    int64_t b, c;
    const bool* flags;  // of the row, where there are documents
    int count, begin, end;
    bool inside;
    int reach;
    Taps<A, Width, V> weights, window;  // window(j) is x_{t - j}, or 0 where t does not see it
    A bias[V];

    DEVICE Channels(const Convolution& p, int run, bool whole, A*& shared)
        : call(p), whole(whole), reach(R()), weights(shared, p.width), window(shared, p.width) {
        const unsigned number = blockIdx.x * blockDim.x + threadIdx.x, across = (p.channels + V - 1) / V;
        part = number / across, c = int64_t(number % across) * V, b = part % p.batch;
        flags = p.starts ? p.starts + b * p.time : nullptr;
        const int64_t first = int64_t(part / p.batch) * run;
        inside = first < (p.time > 0 ? p.time : 1);
        begin = int(first), end = int(first + run < p.time ? first + run : p.time);
        count = int(p.channels - c < V ? p.channels - c : V);
    }
    DEVICE int R() const { return (Width == 0 ? call.width : Width) - 1; }

    // Loads the parameters, and the window before the first step.
    DEVICE void start() {
        if constexpr (Width == 0) {
            for (int i = 0; i <= R(); ++i) weights(R() - i, 0) = load_element<A>(call.weight, c * call.width + i);
        } else {
            A numbers[V * Width];
            load_numbers(numbers, call.weight, c * Width, count * Width);
            UNROLL_FOR (int i = 0; i < V * Width; ++i) weights(Width - 1 - i % Width, i / Width) = numbers[i];
        }
        load_numbers(bias, call.bias, c, call.bias.data ? count : 0);
        UNROLL_FOR (int j = 0; j <= R(); ++j)
            UNROLL_FOR (int v = 0; v < V; ++v) window(j, v) = A(0);
        ROLLED_FOR(int t = begin - R(); t < begin; ++t) {
            A x[V];
            input(x, t);
            push(x, begins(t));
        }
    }
    DEVICE int64_t place(const Sequence& x, int64_t t) const { return b * x.batch + t * x.time + c; }
    DEVICE T* row(const Sequence& x, int64_t t) const { return static_cast<T*>(x.data) + place(x, t); }

    DEVICE void input(A (&x)[V], int t) const {
        if (t >= 0)
            load_wide(x, row(call.x, t), count, whole);
        else
            load_numbers(x, call.before, place(call.before, t + R()), call.before.data ? count : 0);
    }
    // The next `steps` of N rows, and zeros; goes on to the row after them.
    template <int N>
    DEVICE void load(Pack<T, V> (&x)[N], const T*& from, int64_t stride, int steps) const {
        if (whole) {
            UNROLL_FOR (int i = 0; i < N; ++i, from += stride) x[i] = load_pack<V>(from, 0, i < steps);
        } else {
            UNROLL_FOR (int i = 0; i < N; ++i, from += stride) x[i] = load_pack<V>(from, i < steps ? count : 0, false);
        }
    }

    // True if a document begins at t.
    DEVICE bool begins(int t) const { return flags && unsigned(t) < unsigned(call.time) && flags[t]; }

    // Goes on to the next step, whose input is x, and at which a document may begin.
    DEVICE void push(const A (&x)[V], bool begins) {
        reach = reach < R() ? reach + 1 : R();
        if (begins) {
            const A zero = A(opaque(0));  // a branch, not a selection for each number
            reach = 0;
            UNROLL_FOR (int j = 0; j < R(); ++j)
                UNROLL_FOR (int v = 0; v < V; ++v) window(j, v) = zero;
        }
        UNROLL_FOR (int j = R(); j > 0; --j)
            UNROLL_FOR (int v = 0; v < V; ++v) window(j, v) = window(j - 1, v);
        UNROLL_FOR (int v = 0; v < V; ++v) window(0, v) = x[v];
    }
    DEVICE Activated<A> output(int v) {
        A u = bias[v];
        UNROLL_FOR (int j = R(); j >= 0; --j) u += weights(j, v) * window(j, v);
        return Activated<A>(kSilu, u);
    }
    DEVICE int length() const { return call.lengths ? int(call.lengths[b]) : call.time; }
    // True if input t, one of the last R, belongs to the next call's state: no document has begun after it.
    DEVICE bool is_kept(int t) const {
        for (int s = t < 0 ? 0 : t + 1; s < length(); ++s)
            if (begins(s)) return false;
        return true;
    }
};

template <typename A>
DEVICE A* shared_taps() {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    return reinterpret_cast<A*>(memory);
}

template <typename T, int Width>
__global__ void __launch_bounds__(kThreads, 3) convolve(const Convolution call, int run, bool whole) {
    using Work = Channels<T, Width>;
    using A = typename Work::A;
    constexpr int V = Work::V;
    A* shared = shared_taps<A>();
    Work of(call, run, whole, shared);
    if (!of.inside) return;
    of.start();
    const T* x_row = of.row(call.x, of.begin);
    T* y_row = of.row(call.y, of.begin);
    for (int t = of.begin; t < of.end; t += kAtOnce) {
        Pack<T, V> x[kAtOnce];
        of.load(x, x_row, call.x.time, of.end - t);
        UNROLL_FOR (int i = 0; i < kAtOnce; ++i, y_row += call.y.time) {
            A wide[V], y[V];
            widen_pack(wide, x[i]);
            of.push(wide, of.begins(t + i));
            UNROLL_FOR (int v = 0; v < V; ++v) y[v] = of.output(v).value;
            if (t + i < of.end) store_pack<V>(y_row, y, of.count, whole);
        }
    }
    ROLLED_FOR(int j = 0; of.begin == 0 && j < of.R(); ++j) {
        const int t = of.length() - of.R() + j;
        A x[V] = {};
        if (of.is_kept(t)) of.input(x, t);
        store_numbers(call.last, of.place(call.last, j), x, of.count);
    }
}

template <typename T, int Width>
__global__ void __launch_bounds__(kThreads) differentiate(const Convolution call, int run, bool whole) {
    using Work = Channels<T, Width>;
    using A = typename Work::A;
    constexpr int V = Work::V;
    A* shared = shared_taps<A>();
    Work of(call, run, whole, shared);
    Taps<A, Width, V> dw(shared, call.width), dx(shared, call.width);  // dx(j) is the part of dx_{t - j} so far
    if (!of.inside) return;
    of.start();
    const int R = of.R(), stop = of.end + R, first = of.begin == 0 ? -R : of.begin;
    A db[V] = {};
    UNROLL_FOR (int j = 0; j <= of.R(); ++j)
        UNROLL_FOR (int v = 0; v < V; ++v) dw(j, v) = dx(j, v) = A(0);
    const int kept = call.d_last.data ? of.length() - R : stop;  // the first input of the next call's state
    const T *x_row = of.row(call.x, of.begin), *g_row = of.row(call.d_y, of.begin);
    T* dx_row = of.row(call.dx, int64_t(of.begin) - R);
    for (int t = of.begin; t < stop; t += kAtOnce / 2) {
        Pack<T, V> x[kAtOnce / 2], g[kAtOnce / 2];
        const int steps = (stop < call.time ? stop : call.time) - t;
        of.load(x, x_row, call.x.time, steps), of.load(g, g_row, call.d_y.time, steps);
        UNROLL_FOR (int i = 0; i < kAtOnce / 2; ++i, dx_row += call.dx.time) {
            A wide[V], d[V];
            widen_pack(wide, x[i]), widen_pack(d, g[i]);
            of.push(wide, of.begins(t + i));
            UNROLL_FOR (int v = 0; v < V; ++v) d[v] *= of.output(v).slope;
            UNROLL_FOR (int j = of.R(); j > 0; --j)
                UNROLL_FOR (int v = 0; v < V; ++v) dx(j, v) = dx(j - 1, v);
            UNROLL_FOR (int v = 0; v < V; ++v) dx(0, v) = of.weights(0, v) * d[v];
            UNROLL_FOR (int j = 1; j <= of.R(); ++j)
                UNROLL_FOR (int v = 0; v < V; ++v)
                    if (j <= of.reach) dx(j, v) += of.weights(j, v) * d[v];
            if (t + i < of.end) {
                UNROLL_FOR (int j = 0; j <= of.R(); ++j)
                    UNROLL_FOR (int v = 0; v < V; ++v) dw(j, v) += d[v] * of.window(j, v);
                UNROLL_FOR (int v = 0; v < V; ++v) db[v] += d[v];
            }
            const int s = t + i - R;
            if (s < first || s >= of.end) continue;
            A made[V];
            UNROLL_FOR (int v = 0; v < V; ++v) made[v] = dx(of.R(), v);
            if (s >= kept && s < kept + R && of.is_kept(s)) {
                A more[V];
                load_numbers(more, call.d_last, of.place(call.d_last, s - kept), of.count);
                UNROLL_FOR (int v = 0; v < V; ++v) made[v] += more[v];
            }
            if (s >= 0)
                store_pack<V>(dx_row, made, of.count, whole);
            else if (call.d_before.data)
                store_numbers(call.d_before, of.place(call.d_before, s + R), made, of.count);
        }
    }
    const int64_t at = int64_t(of.part) * call.channels + of.c;
    store_pack<V>(static_cast<A*>(call.db) + at, db, of.count, false);
    A* to = static_cast<A*>(call.dw) + at * call.width;
    if constexpr (Width == 0) {
        for (int i = 0; i <= R; ++i) to[i] = dw(R - i, 0);
    } else {
        A numbers[V * Width];
        UNROLL_FOR (int i = 0; i < V * Width; ++i) numbers[i] = dw(Width - 1 - i % Width, i / Width);
        store_pack<V * Width>(to, numbers, of.count * Width, of.count == V && is_aligned(to));
    }
}

// How a call is divided: steps of a run, as many as leave enough threads, and runs of all rows.
struct Division {
    int64_t across, parts;
    int run = kMostRun;

    explicit Division(const Convolution& call) {
        const bool generic = call.width < 2 || call.width > 4 || call.x.dtype == kFloat64;
        const int channels = generic ? 1 : 16 / bytes_of(call.x.dtype);
        across = (int64_t(call.channels) + channels - 1) / channels;
        const auto runs = [&] { return call.time > run ? (int64_t(call.time) + run - 1) / run : 1; };
        while (run > kLeastRun && across * call.batch * runs() < kEnoughThreads) run /= 2;
        parts = call.batch * runs();
    }
};

template <typename T, int Width>
cudaError_t launch_as(const Convolution& call, bool backward, cudaStream_t stream) {
    const Division by(call);
    const int threads = Width == 0 ? kGenericThreads : kThreads;
    const int64_t blocks = (by.across * by.parts + threads - 1) / threads;
    if (blocks * threads > 0xffffffff) return cudaErrorInvalidValue;
    const size_t taps = Width == 0 ? sizeof(typename Stored<T>::Compute) * call.width * threads : 0;
    constexpr int size = sizeof(T);
    const bool whole = call.channels % kPack<T> == 0 && is_aligned(call.x, size) && is_aligned(call.y, size) &&
                       is_aligned(call.d_y, size) && is_aligned(call.dx, size);
    return launch(backward ? differentiate<T, Width> : convolve<T, Width>, dim3(unsigned(blocks)), dim3(threads),
                  taps * (backward ? 4 : 2), stream, call, by.run, Width > 0 && whole);
}

cudaError_t launch_any(const Convolution& call, bool backward, cudaStream_t stream) {
    const auto other = [&](const Sequence& x) { return x.data && x.dtype != call.x.dtype; };
    if (call.width < 1 || int64_t(call.time) + call.width + kMostRun > 0x7fffffff) return cudaErrorInvalidValue;
    if (other(call.y) || other(call.d_y) || other(call.dx)) return cudaErrorInvalidValue;
    if (call.batch == 0 || call.channels == 0) return cudaSuccess;
    const auto run = [&](auto type) {
        using T = decltype(type);
        switch (call.width) {
            case 2: return launch_as<T, 2>(call, backward, stream);
            case 3: return launch_as<T, 3>(call, backward, stream);
            case 4: return launch_as<T, 4>(call, backward, stream);
            default: return launch_as<T, 0>(call, backward, stream);
        }
    };
    return call.x.dtype == kFloat64 ? launch_as<double, 0>(call, backward, stream)
                                    : with_type(call.x.dtype, cudaErrorInvalidValue, run);
}

}  // namespace

extern "C" int32_t fairseq_fastweights::fastweights_convolution_parts(const Convolution* params) {
    return static_cast<int32_t>(Division(*params).parts);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_convolution_forward(const Convolution* params,
                                                                            cudaStream_t stream) {
    return launch_any(*params, false, stream);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_convolution_backward(const Convolution* params,
                                                                             cudaStream_t stream) {
    return launch_any(*params, true, stream);
}
