// Gates, and what they multiply, which may be normed. For channel c of a step, which is number i of a head's vector y:
//
//   out_c = r_c a(x_c + b_c) n_c     a(u) = s(u),  u s(u),  log s(u)  or  log(1 + exp(u)),   s(u) = 1 / (1 + exp(-u))
//   r_c = scale  or  -scale exp(A_c)
//   n_c = 1,  y_c,  w_i y_c / sqrt(mean(y^2) + eps)  or  w_i (y_c - mean(y)) / sqrt(variance(y) + eps)
//
// and backwards, where g is the gradient of out: dx = g r n a'(x + b), of which the sum over steps is that of b, while that of
// g out is that of A; and of n it is d = g r a. With n = w z, z = (y - m) / l, dw is the sum over steps and heads of d z, and
// dy = (d w - z mean(d w z)) / l, less mean(d w) / l where m is the mean.
//
// Without a norm a thread has a channel, of some steps; with one neighbouring lanes, at most a warp, have a vector. Sums for
// parameters are taken part by part, in an order that depends on the sizes alone.
#include "elementary.cuh"

using namespace fairseq_fastweights;

namespace {

constexpr int kThreads = 256;
constexpr int kSteps = 16;        // of a thread, without a norm, in calls that are not very long
constexpr int kMostParts = 4096;  // of a call

// How a call is divided: `across` threads of a block have neighbouring numbers, the others steps, `share` to a block.
struct Division {
    int across;
    int64_t rows, share, parts;

    __host__ __device__ explicit Division(const Gating& call) : across(1) {
        const bool normed = call.norm != kNoNorm;
        const int numbers = normed ? call.dim : call.heads * call.dim;
        while (across < numbers && across < (normed ? kWarp : kThreads)) across *= 2;
        rows = int64_t(call.outer) * call.inner * (normed ? call.heads : 1);
        share = int64_t(kThreads / across) * kSteps;
        if ((rows + share - 1) / share > kMostParts) share = (rows + kMostParts - 1) / kMostParts;
        parts = (rows + share - 1) / share;
    }
};

DEVICE int64_t place(const Gating& call, const Sequence& x, int64_t step) {
    return step / call.inner * x.batch + step % call.inner * x.time;
}

template <typename A>
DEVICE A load(const Sequence& x, int64_t index) {
    return load_element<A>(x.data, x.dtype, index);
}
template <typename A>
DEVICE void store(const Sequence& x, int64_t index, A value) {
    store_element(x.data, x.dtype, index, value);
}

// to[0 ... across] = the sums over the rows of threads of what each has, in order.
template <typename A>
__device__ void store_sums(A* shared, A value, int across, void* to, int64_t first, int64_t count) {
    shared[threadIdx.x] = value;
    __syncthreads();
    if (int(threadIdx.x) < across && int64_t(threadIdx.x) < count) {
        A total = A(0);
        for (int i = threadIdx.x; i < kThreads; i += across) total += shared[i];
        static_cast<A*>(to)[first + threadIdx.x] = total;
    }
    __syncthreads();
}

template <typename A, bool Backward>
__global__ void __launch_bounds__(kThreads) gate_channels(const Gating call) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Division by(call);
    const int channels = call.heads * call.dim, first = blockIdx.x * by.across, c = first + threadIdx.x % by.across;
    const int64_t begin = blockIdx.y * by.share, end = begin + by.share < by.rows ? begin + by.share : by.rows;
    A d_bias = A(0), d_rate = A(0);
    if (c < channels) {
        const A bias = call.bias.data ? load<A>(call.bias, c) : A(0);
        const A rate = call.log_rate.data ? -exponential(load<A>(call.log_rate, c / (channels / call.rates))) : A(1);
        const A factor = A(call.scale) * rate;
        for (int64_t step = begin + threadIdx.x / by.across; step < end; step += kThreads / by.across) {
            const Activated<A> a(call.activation, load<A>(call.x, place(call, call.x, step) + c) + bias);
            const A y = call.y.data ? load<A>(call.y, place(call, call.y, step) + c) : A(1);
            if (!Backward) {
                store(call.out, place(call, call.out, step) + c, factor * a.value * y);
                continue;
            }
            const A g = load<A>(call.d_out, place(call, call.d_out, step) + c) * factor, dx = g * y * a.slope;
            store(call.dx, place(call, call.dx, step) + c, dx);
            if (call.y.data) store(call.dy, place(call, call.dy, step) + c, g * a.value);
            d_bias += dx, d_rate += g * y * a.value;
        }
    }
    if (!Backward) return;
    A* shared = reinterpret_cast<A*>(memory);
    const int64_t at = int64_t(blockIdx.y) * channels + first;
    if (call.d_bias) store_sums(shared, d_bias, by.across, call.d_bias, at, channels - first);
    if (call.d_log_rate) store_sums(shared, d_rate, by.across, call.d_log_rate, at, channels - first);
}

template <typename A>
DEVICE A sum_over(A x, int lanes) {
    for (int other = lanes / 2; other > 0; other /= 2) x += __shfl_xor_sync(kAllLanes, x, other);
    return x;
}

template <typename A, bool Backward>
__global__ void __launch_bounds__(kThreads) gate_heads(const Gating call) {
    const Division by(call);
    const int lanes = by.across, lane = threadIdx.x % lanes, n = call.dim;
    const int64_t number = int64_t(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
    // Lanes without a row go along with the last one, as whole warps shuffle, and write nothing.
    const bool inside = number < by.rows;
    const int64_t row = inside ? number : by.rows - 1, step = row / call.heads;
    const int head = row % call.heads;
    const int64_t x = place(call, call.x, step) + int64_t(head) * n, y = place(call, call.y, step) + head * call.y.head;
    A mean = A(0), squares = A(0);
    if (call.norm == kLayerNorm) {
        for (int i = lane; i < n; i += lanes) mean += load<A>(call.y, y + i);
        mean = sum_over(mean, lanes) / A(n);
    }
    for (int i = lane; i < n; i += lanes) {
        const A centred = load<A>(call.y, y + i) - mean;
        squares += centred * centred;
    }
    const A inverse = A(1) / sqrt(sum_over(squares, lanes) / A(n) + A(call.eps)), scale = A(call.scale);
    const auto z = [&](int i) { return (load<A>(call.y, y + i) - mean) * inverse; };
    const auto weight = [&](int i) { return call.weight.data ? load<A>(call.weight, i) : A(1); };
    if (!Backward) {
        const int64_t out = place(call, call.out, step) + int64_t(head) * n;
        for (int i = lane; inside && i < n; i += lanes) {
            const Activated<A> a(call.activation, load<A>(call.x, x + i));
            store(call.out, out + i, scale * a.value * weight(i) * z(i));
        }
        return;
    }
    const int64_t out = place(call, call.d_out, step) + int64_t(head) * n;
    const int64_t dx = place(call, call.dx, step) + int64_t(head) * n;
    const int64_t dy = place(call, call.dy, step) + head * call.dy.head;
    const auto d = [&](int i) {
        return load<A>(call.d_out, out + i) * scale * Activated<A>(call.activation, load<A>(call.x, x + i)).value *
               weight(i);
    };
    A with_z = A(0), total = A(0);
    for (int i = lane; i < n; i += lanes) with_z += d(i) * z(i), total += d(i);
    with_z = sum_over(with_z, lanes) / A(n);
    total = call.norm == kLayerNorm ? sum_over(total, lanes) / A(n) : A(0);
    if (!inside) return;
    for (int i = lane; i < n; i += lanes) {
        const A g = load<A>(call.d_out, out + i) * scale, dz = d(i);
        const Activated<A> a(call.activation, load<A>(call.x, x + i));
        store(call.dx, dx + i, g * weight(i) * z(i) * a.slope);
        store(call.dy, dy + i, (dz - z(i) * with_z - total) * inverse);
    }
    if (call.moments && lane == 0) {
        static_cast<A*>(call.moments)[2 * row] = mean;
        static_cast<A*>(call.moments)[2 * row + 1] = inverse;
    }
}

// The gradient of the norm's weight, from the moments that the vectors had.
template <typename A>
__global__ void __launch_bounds__(kThreads) gate_weights(const Gating call) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Division by(call);
    const int first = blockIdx.x * by.across, i = first + threadIdx.x % by.across, n = call.dim;
    const int64_t begin = blockIdx.y * by.share, end = begin + by.share < by.rows ? begin + by.share : by.rows;
    const A* moments = static_cast<const A*>(call.moments);
    A total = A(0);
    for (int64_t row = begin + threadIdx.x / by.across; i < n && row < end; row += kThreads / by.across) {
        const int64_t step = row / call.heads, head = row % call.heads;
        const Activated<A> a(call.activation, load<A>(call.x, place(call, call.x, step) + head * n + i));
        const A z = (load<A>(call.y, place(call, call.y, step) + head * call.y.head + i) - moments[2 * row]) *
                    moments[2 * row + 1];
        total += load<A>(call.d_out, place(call, call.d_out, step) + head * n + i) * A(call.scale) * a.value * z;
    }
    store_sums(reinterpret_cast<A*>(memory), total, by.across, call.d_weight, int64_t(blockIdx.y) * n + first,
               n - first);
}

template <typename A, bool Backward>
cudaError_t launch_as(const Gating& call, cudaStream_t stream) {
    const Division by(call);
    const int numbers = call.norm == kNoNorm ? call.heads * call.dim : call.dim;
    const dim3 block(kThreads), parts((numbers + by.across - 1) / by.across, unsigned(by.parts));
    const size_t shared = Backward ? kThreads * sizeof(A) : 0;
    if (call.norm == kNoNorm) return launch(gate_channels<A, Backward>, parts, block, shared, stream, call);
    const int64_t in_block = kThreads / by.across, blocks = (by.rows + in_block - 1) / in_block;
    if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
    const cudaError_t error = launch(gate_heads<A, Backward>, dim3(unsigned(blocks)), block, 0, stream, call);
    if (error != cudaSuccess || !Backward || !call.d_weight) return error;
    return launch(gate_weights<A>, parts, block, shared, stream, call);
}

template <bool Backward>
cudaError_t launch_gating(const Gating& call, cudaStream_t stream) {
    if (call.heads < 1 || call.dim < 1 || call.rates < 1) return cudaErrorInvalidValue;
    if (call.outer == 0 || call.inner == 0) return cudaSuccess;
    return call.x.dtype == kFloat64 ? launch_as<double, Backward>(call, stream)
                                    : launch_as<float, Backward>(call, stream);
}

}  // namespace

extern "C" int32_t fairseq_fastweights::fastweights_gating_parts(const Gating* params) {
    return static_cast<int32_t>(Division(*params).parts);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_gating_forward(const Gating* params, cudaStream_t stream) {
    return launch_gating<false>(*params, stream);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_gating_backward(const Gating* params, cudaStream_t stream) {
    return launch_gating<true>(*params, stream);
}
