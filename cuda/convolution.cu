// The short causal convolution of each channel, with its SiLU:
//
//   u_t = b + sum_j w_{R - j} x_{t - j},  j = 0 ... R      y_t = silu(u_t)
//
// where x_{-R} ... x_{-1} are given, and a document that begins at or before t takes nothing from before its beginning: j is
// at most `reach(t)`. What the next call is given are the last R inputs of a row, those before the document's beginning 0.
// Backwards, where g is the gradient of y:
//
//   d_t = g_t silu'(u_t)      dx_s = sum_j w_{R - j} d_{s + j}      dw_{R - j} = sum_t d_t x_{t - j}      db = sum_t d_t
//
// A thread has a channel of a row of the batch, for a run of steps; neighbours read neighbouring channels. The first kernel of
// the backward pass leaves d, and each run's part of dw and db; the second one makes dx of it.
#include "elementary.cuh"

using namespace fairseq_fastweights;

namespace {

constexpr int kThreads = 128;
constexpr int kRun = 32;  // steps

__host__ DEVICE int64_t runs(int64_t steps) { return (steps + kRun - 1) / kRun; }

// The work of a thread.
template <typename A>
struct Channel {
    const Convolution& call;
    const int R;
    int64_t c, b, run;

    // For `steps` steps. Threads beyond the last channel do nothing.
    __device__ Channel(const Convolution& p, int64_t steps) : call(p), R(p.width - 1) {
        const int64_t blocks = (p.channels + kThreads - 1) / kThreads, number = blockIdx.x / blocks;
        c = blockIdx.x % blocks * kThreads + threadIdx.x;
        b = number / runs(steps), run = number % runs(steps);
    }
    __device__ bool inside() const { return c < call.channels; }

    __device__ int64_t place(const Sequence& x, int64_t t) const { return b * x.batch + t * x.time + c; }
    __device__ A load(const Sequence& x, int64_t t) const { return load_element<A>(x.data, x.dtype, place(x, t)); }
    __device__ void store(const Sequence& x, int64_t t, A value) const {
        store_element(x.data, x.dtype, place(x, t), value);
    }
    __device__ A& d(int64_t t) const { return static_cast<A*>(call.d)[(t * call.batch + b) * call.channels + c]; }

    __device__ A input(int64_t t) const {
        if (t >= 0) return load(call.x, t);
        return call.before.data ? load(call.before, t + R) : A(0);
    }
    __device__ A weight(int j) const {
        return load_element<A>(call.weight.data, call.weight.dtype, c * call.width + R - j);
    }
    __device__ bool begins(int64_t t) const { return call.starts && call.starts[b * call.time + t]; }

    // How far step t sees.
    __device__ int reach(int64_t t) const {
        int j = 0;
        while (j < R && (j > t || !begins(t - j))) ++j;
        return j;
    }
    __device__ Activated<A> output(int64_t t, int reach) const {
        A u = call.bias.data ? load_element<A>(call.bias.data, call.bias.dtype, c) : A(0);
        for (int j = reach; j >= 0; --j) u += weight(j) * input(t - j);
        return Activated<A>(kSilu, u);
    }
    __device__ int64_t length() const { return call.lengths ? call.lengths[b] : call.time; }
    // True if the next call is given input t, one of the last R: no document has begun after it.
    __device__ bool is_kept(int64_t t) const {
        for (int64_t s = t < 0 ? 0 : t + 1; s < length(); ++s)
            if (begins(s)) return false;
        return true;
    }
};

template <typename A>
__global__ void __launch_bounds__(kThreads, 8) convolve(const Convolution call) {
    const Channel<A> of(call, call.time + 1);  // a row without steps has a run too, for what the next call is given
    if (!of.inside()) return;
    for (int64_t t = of.run * kRun; t < (of.run + 1) * kRun && t < call.time; ++t)
        of.store(call.y, t, of.output(t, of.reach(t)).value);
    for (int j = 0; of.run == 0 && j < of.R; ++j) {
        const int64_t t = of.length() - of.R + j;
        of.store(call.last, j, of.is_kept(t) ? of.input(t) : A(0));
    }
}

template <typename A>
__global__ void __launch_bounds__(kThreads, 8) differentiate(const Convolution call) {
    const Channel<A> of(call, call.time);
    if (!of.inside()) return;
    const int64_t begin = of.run * kRun, end = begin + kRun < call.time ? begin + kRun : call.time;
    A total = A(0);
    for (int64_t t = begin; t < end; ++t) {
        const A slope = of.output(t, of.reach(t)).slope, d = of.load(call.d_y, t) * slope;
        of.d(t) = d, total += d;
    }
    const int64_t part = (of.b * runs(call.time) + of.run) * call.channels + of.c;
    static_cast<A*>(call.db)[part] = total;
    for (int j = 0; j <= of.R; ++j) {
        A sum = A(0);
        for (int64_t t = begin; t < end; ++t) sum += j <= of.reach(t) ? of.d(t) * of.input(t - j) : A(0);
        static_cast<A*>(call.dw)[part * call.width + of.R - j] = sum;
    }
}

template <typename A>
__global__ void __launch_bounds__(kThreads, 8) differentiate_inputs(const Convolution call) {
    const Channel<A> of(call, int64_t(call.time) + call.width - 1);
    if (!of.inside()) return;
    const int64_t begin = of.run * kRun - of.R, end = begin + kRun < call.time ? begin + kRun : call.time;
    for (int64_t s = begin; s < end; ++s) {
        A total = A(0);
        for (int j = s < 0 ? int(-s) : 0; j <= of.R && s + j < call.time; ++j)
            total += j <= of.reach(s + j) ? of.weight(j) * of.d(s + j) : A(0);
        const int64_t j = s - of.length() + of.R;
        if (call.d_last.data && j >= 0 && j < of.R && of.is_kept(s)) total += of.load(call.d_last, j);
        if (s >= 0) of.store(call.dx, s, total);
        if (s < 0 && call.d_before.data) of.store(call.d_before, s + of.R, total);
    }
}

// For so many steps of each row, by a kernel for float64 or another one.
cudaError_t launch_on(void (*wide)(Convolution), void (*narrow)(Convolution), const Convolution& call, int64_t steps,
                      cudaStream_t stream) {
    const int64_t blocks = (call.channels + kThreads - 1) / kThreads * call.batch * runs(steps);
    if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
    if (blocks == 0) return cudaSuccess;
    return launch(call.x.dtype == kFloat64 ? wide : narrow, dim3(unsigned(blocks)), dim3(kThreads), 0, stream, call);
}

}  // namespace

extern "C" int32_t fairseq_fastweights::fastweights_convolution_parts(const Convolution* params) {
    return static_cast<int32_t>(params->batch * runs(params->time));
}

extern "C" cudaError_t fairseq_fastweights::fastweights_convolution_forward(const Convolution* params,
                                                                            cudaStream_t stream) {
    if (params->width < 1) return cudaErrorInvalidValue;
    return launch_on(convolve<double>, convolve<float>, *params, int64_t(params->time) + 1, stream);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_convolution_backward(const Convolution* params,
                                                                             cudaStream_t stream) {
    if (params->width < 1) return cudaErrorInvalidValue;
    const cudaError_t error = launch_on(differentiate<double>, differentiate<float>, *params, params->time, stream);
    if (error != cudaSuccess) return error;
    const int64_t steps = int64_t(params->time) + params->width - 1;
    return launch_on(differentiate_inputs<double>, differentiate_inputs<float>, *params, steps, stream);
}
