// Gates times y, which may be normed. For channel c of a step, which is number i of a head's vector y:
//
//   out_c = r_c a(x_c + b_c) n_c     a(u) = s(u),  u s(u),  log s(u)  or  log(1 + exp(u)),   s(u) = 1 / (1 + exp(-u))
//   r_c = scale  or  -scale exp(A_c)
//   n_c = 1,  y_c,  w_i y_c / sqrt(mean(y^2) + eps)  or  w_i (y_c - mean(y)) / sqrt(variance(y) + eps)
//
// and backwards, where g is the gradient of out: dx = g r n a'(x + b), of which the sum over steps is that of b, while
// that of g out is that of A; and of n it is d = g r a. With n = w z, z = (y - m) / l, dw is the sum over steps and
// heads of d z, and dy = (d w - z mean(d w z)) / l, less mean(d w) / l where m is the mean.
//
// A thread has neighbouring channels, 16 bytes of them, of some steps; with a norm neighbouring threads, a power of
// two, have the channels of a head, and a vector's sums are taken over them. Parameters, and partial sums for their
// gradients, stay in its registers. These are added part by part, in an order that depends on the sizes alone.
#include "elementwise.cuh"

using namespace fairseq_fastweights;

namespace {

constexpr int kThreads = 256;
constexpr int kNumbers = 64;      // of a thread, in calls that are not very long
constexpr int kMostParts = 1024;  // of a call's steps

// How a call is divided: `across` threads of a block have neighbouring channels, in `blocks` blocks, the others steps,
// `share` to a block. `lanes` threads have a vector; 0 for sizes that are not taken.
struct Division {
    int V, lanes = 1, across = 1;
    unsigned rows, blocks, share, parts;

    explicit Division(const Gating& call) : V(call.x.dtype == kFloat64 ? 1 : 16 / bytes_of(call.x.dtype)) {
        const auto packs = [&](int64_t numbers) { return (numbers + V - 1) / V; };
        if (call.norm != kNoNorm)
            while (lanes < packs(call.dim)) lanes *= 2;
        const int64_t columns = call.norm == kNoNorm ? packs(call.channels()) : int64_t(call.heads) * lanes;
        while (across < columns && across < kThreads) across *= 2;
        const int64_t steps = int64_t(call.outer) * call.inner;
        if (lanes > kThreads || steps > 0x7fffffff) lanes = 0;
        rows = unsigned(steps), blocks = unsigned((columns + across - 1) / across);
        share = kThreads / across * (kNumbers / kPack<float> / (V > 1 ? V / kPack<float> : 1));
        if ((steps + share - 1) / share > kMostParts) share = unsigned((steps + kMostParts - 1) / kMostParts);
        parts = unsigned((steps + share - 1) / share);
    }
};

// The offsets of a thread's elements in a tensor, from step to step. `step` has the indices (outer, inner) of a step,
// `distance` those from a step to the thread's next.
struct StepCursor {
    int64_t at, ahead, back;

    DEVICE StepCursor(const Gating& call, const Sequence& x, int64_t first, uint2 step, uint2 distance)
        : at(first + step.x * x.batch + step.y * x.time), ahead(opaque(distance.x * x.batch + distance.y * x.time)),
          back(x.batch - call.inner * x.time) {}
    DEVICE void go_on() { at += ahead; }
    DEVICE void wrap() { at += opaque(back); }  // opaque: a branch, not an addition at each step
};

// x summed over a vector's threads, which are a power of two.
template <typename A>
DEVICE A sum_over(A x, int lanes, A* shared) {
    for (int other = (lanes < kWarp ? lanes : kWarp) / 2; other > 0; other /= 2)
        x += __shfl_xor_sync(kAllLanes, x, other);
    if (lanes <= kWarp) return x;
    const int warps = lanes / kWarp, warp = threadIdx.x / kWarp;
    if (threadIdx.x % kWarp == 0) shared[warp] = x;
    __syncthreads();
    x = A(0);
    for (int i = 0; i < warps; ++i) x += shared[warp / warps * warps + i];
    __syncthreads();
    return x;
}

// to[at ... at + count) = each channel's x summed over the rows of `across` threads, in order.
template <int V, typename A>
DEVICE void store_sums(A* shared, const A (&x)[V], int across, void* to, int64_t at, int64_t count) {
    UNROLL_FOR (int v = 0; v < V; ++v) shared[v * kThreads + threadIdx.x] = x[v];
    __syncthreads();
    for (int i = threadIdx.x; i < across * V && i < count; i += kThreads) {
        A total = A(0);
        for (int j = i / V; j < kThreads; j += across) total += shared[i % V * kThreads + j];
        static_cast<A*>(to)[at + i] = total;
    }
    __syncthreads();
}

template <int V, typename A>
DEVICE void activate(int activation, const A (&u)[V], A (&value)[V], A (&slope)[V]) {
    const auto as = [&](auto known) {
        UNROLL_FOR (int v = 0; v < V; ++v) {
            const Activated<A> a(decltype(known)::value, u[v]);
            value[v] = a.value, slope[v] = a.slope;
        }
    };
    switch (activation) {
        case kSigmoid: return as(std::integral_constant<int, kSigmoid>());
        case kSilu: return as(std::integral_constant<int, kSilu>());
        case kLogSigmoid: return as(std::integral_constant<int, kLogSigmoid>());
        default: as(std::integral_constant<int, kSoftplus>());
    }
}

// x and dx are of type T, out and d_out of type O, y and dy of T, or where O is not known of any. `whole` tells that
// all V channels of a thread exist, if one of them does, and are aligned.
template <typename T, typename O, bool Backward, bool Normed, typename A = typename Stored<T>::Compute>
__global__ void __launch_bounds__(kThreads)
    gate(const Gating call, const Division by, const bool whole, const A scale, const A eps) {
    using Y = std::conditional_t<std::is_same_v<O, Any>, Any, T>;
    constexpr int V = kPack<T>;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    A* shared = reinterpret_cast<A*>(memory);
    const int column = blockIdx.x * by.across + threadIdx.x % by.across, channels = call.heads * call.dim;
    const int head = Normed ? column / by.lanes : 0, i = (Normed ? column % by.lanes : column) * V;
    const int left = (Normed ? (head < call.heads ? call.dim : 0) : channels) - i, count = left < V ? left : V;
    const int c = head * call.dim + i;

    A bias[V] = {}, factor[V];
    UNROLL_FOR (int v = 0; v < V; ++v) factor[v] = scale;
    if (Normed && call.weight.data) {
        load_numbers(factor, call.weight, i, count);
        UNROLL_FOR (int v = 0; v < V; ++v) factor[v] *= scale;
    }
    if (!Normed && call.bias.data) load_numbers(bias, call.bias, c, count);
    if (!Normed && call.log_rate.data) {
        const int of_rate = channels / call.rates;
        UNROLL_FOR (int v = 0; v < V; ++v)
            if (v < count) factor[v] *= -exponential(load_element<A>(call.log_rate, (c + v) / of_rate));
    }

    const unsigned begin = blockIdx.y * by.share, end = begin + by.share < by.rows ? begin + by.share : by.rows;
    const unsigned distance = kThreads / by.across, inner = call.inner;
    unsigned step = begin + threadIdx.x / by.across, at = step % inner;
    const uint2 from = make_uint2(step / inner, at), to = make_uint2(distance / inner, distance % inner);
    StepCursor x_at(call, call.x, c, from, to), out_at(call, Backward ? call.d_out : call.out, c, from, to);
    StepCursor y_at(call, call.y, i + head * call.y.head, from, to), dx_at(call, call.dx, c, from, to);
    StepCursor dy_at(call, call.dy, i + head * call.dy.head, from, to);
    const bool multiplies = Normed || call.y.data, centred = call.norm == kLayerNorm;
    const A share = A(1) / A(call.dim);
    A d_bias[V] = {}, d_factor[V] = {};  // of log_rate, or of weight
    // Threads without a step or a channel take part in the block's sums, and write nothing.
    for (unsigned first = begin; first < end; first += distance, step += distance) {
        const int n = step < end ? count : 0;
        const bool full = whole && n > 0;
        A x[V], y[V], g[V], value[V], slope[V], inverse = A(1);
        load_as<T>(x, call.x, x_at.at, n, full);
        if (multiplies) {
            load_as<Y>(y, call.y, y_at.at, n, full);
        } else {
            UNROLL_FOR (int v = 0; v < V; ++v) y[v] = A(1);
        }
        if (Backward) load_as<O>(g, call.d_out, out_at.at, n, full);
        if constexpr (!Normed) {
            UNROLL_FOR (int v = 0; v < V; ++v) x[v] += bias[v];
        }
        activate(call.activation, x, value, slope);
        if (Normed) {
            if (centred) {
                A mean = A(0);
                UNROLL_FOR (int v = 0; v < V; ++v) mean += y[v];
                mean = sum_over(mean, by.lanes, shared) * share;
                UNROLL_FOR (int v = 0; v < V; ++v) y[v] = v < n ? y[v] - mean : A(0);
            }
            A squares = A(0);
            UNROLL_FOR (int v = 0; v < V; ++v) squares += y[v] * y[v];
            inverse = inverse_root(sum_over(squares, by.lanes, shared) * share + eps);
            UNROLL_FOR (int v = 0; v < V; ++v) y[v] *= inverse;
        }
        if (!Backward) {
            UNROLL_FOR (int v = 0; v < V; ++v) value[v] *= factor[v] * y[v];
            store_as<O>(call.out, out_at.at, value, n, full);
        } else {
            A dx[V], dy[V];
            UNROLL_FOR (int v = 0; v < V; ++v) {
                value[v] *= g[v];
                if (n > 0) d_factor[v] += value[v] * y[v];
                dx[v] = g[v] * factor[v] * y[v] * slope[v], dy[v] = value[v] * factor[v];
                if (n > 0) d_bias[v] += dx[v];
            }
            if (Normed) {
                A with_z = A(0), total = A(0);
                UNROLL_FOR (int v = 0; v < V; ++v) with_z += dy[v] * y[v], total += dy[v];
                with_z = sum_over(with_z, by.lanes, shared) * share;
                total = centred ? sum_over(total, by.lanes, shared) * share : A(0);
                UNROLL_FOR (int v = 0; v < V; ++v) dy[v] = (dy[v] - y[v] * with_z - total) * inverse;
            }
            store_as<T>(call.dx, dx_at.at, dx, n, full);
            if (multiplies) store_as<Y>(call.dy, dy_at.at, dy, n, full);
        }
        at += to.y;
        x_at.go_on(), y_at.go_on(), out_at.go_on(), dx_at.go_on(), dy_at.go_on();
        if (at >= inner) {
            at -= inner;
            x_at.wrap(), y_at.wrap(), out_at.wrap(), dx_at.wrap(), dy_at.wrap();
        }
    }
    if constexpr (Backward) {
        UNROLL_FOR (int v = 0; v < V; ++v) d_factor[v] *= Normed ? scale : factor[v];
        if (Normed) {
            const int64_t part = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
            if (call.d_weight) store_sums(shared, d_factor, by.lanes, call.d_weight, part * call.dim, call.dim);
        } else {
            const int first = blockIdx.x * by.across * V;
            const int64_t part = int64_t(blockIdx.y) * channels + first;
            if (call.d_bias) store_sums(shared, d_bias, by.across, call.d_bias, part, channels - first);
            if (call.d_log_rate) store_sums(shared, d_factor, by.across, call.d_log_rate, part, channels - first);
        }
    }
}

template <typename T, typename O, bool Backward>
cudaError_t launch_as(Gating call, cudaStream_t stream) {
    const Division by(call);
    bool whole = !std::is_same_v<O, Any> && (call.norm == kNoNorm ? call.heads * call.dim : call.dim) % by.V == 0;
    bool flat = true;  // steps follow one another at one distance
    for (const Sequence& x : {call.x, call.y, call.dx, call.dy, call.out, call.d_out}) {
        whole = whole && is_aligned(x, bytes_of(x.dtype));
        flat = flat && x.batch == call.inner * x.time;
    }
    if (flat) call.inner *= call.outer, call.outer = 1;
    using A = typename Stored<T>::Compute;
    const size_t shared = sizeof(A) * kThreads * (Backward ? by.V : 1);
    const auto kernel = call.norm == kNoNorm ? gate<T, O, Backward, false> : gate<T, O, Backward, true>;
    return launch(kernel, dim3(by.blocks, by.parts), dim3(kThreads), shared, stream, call, by, whole, A(call.scale),
                  A(call.eps));
}

template <bool Backward>
cudaError_t launch_gating(const Gating& call, cudaStream_t stream) {
    if (call.heads < 1 || call.dim < 1 || call.rates < 1 || Division(call).lanes == 0) return cudaErrorInvalidValue;
    if (call.outer == 0 || call.inner == 0) return cudaSuccess;
    if (call.x.dtype == kFloat64) return launch_as<double, Any, Backward>(call, stream);
    const int32_t type = call.x.dtype, out = (Backward ? call.d_out : call.out).dtype;
    if (Backward && call.dx.dtype != type) return cudaErrorInvalidValue;
    const bool likewise = !call.y.data || (call.y.dtype == type && (!Backward || call.dy.dtype == type));
    return with_type(type, cudaErrorInvalidValue, [&](auto of) {
        using T = decltype(of);
        if (likewise && out == type) return launch_as<T, T, Backward>(call, stream);
        if (likewise && out == kFloat32) return launch_as<T, float, Backward>(call, stream);
        return launch_as<T, Any, Backward>(call, stream);
    });
}

}  // namespace

extern "C" int32_t fairseq_fastweights::fastweights_gating_parts(const Gating* params) {
    const Division by(*params);
    return static_cast<int32_t>(by.parts * (params->norm == kNoNorm ? 1 : by.blocks));
}

extern "C" cudaError_t fairseq_fastweights::fastweights_gating_forward(const Gating* params, cudaStream_t stream) {
    return launch_gating<false>(*params, stream);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_gating_backward(const Gating* params, cudaStream_t stream) {
    return launch_gating<true>(*params, stream);
}
