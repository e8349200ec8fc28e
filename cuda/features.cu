// Feature maps of queries and keys, whose vectors may be divided by their sum or by their length:
//
//   y = r phi(x)   phi_i = x_i,  max(x_i, 0) + exp(min(x_i, 0)),  max(x_i, 0)  or, for block j of 1 ... nu,
//                          z_i z_{i - j},  z = [max(x, 0), max(-x, 0)], indices modulo its size
//                  or random features, exp(l_i - m) + exp(log_epsilon - m),  l = [s + x, s - x],
//                          s = -(|c source|^2 + log(2 dim)) / 2,  m = 0 or the largest of all l and log_epsilon
//   r = scale,  scale / (sum_i phi_i + eps)  or  scale / sqrt(sum_i phi_i^2 + eps)
//
// and backwards, where g is the gradient of y and n the divisor of r: d_phi = r g, less r (g . phi) / n after a sum, or
// less r (g . phi) phi / n^2 after a length; of z_i in block j they are d_phi_i z_{i - j} + d_phi_{i + j} z_{i + j}.
// Nothing goes back through m, which a normalisation takes out again. A sum that has underflowed divides nothing.
//
// Neighbouring lanes, as many as there are features but at most a warp, take a vector together. phi is computed once
// for the sums and once for the result: from memory it would take longer to come.
#include "recurrent/tile.cuh"

using namespace fairseq_fastweights;

namespace {

constexpr int kFeatureThreads = 256;

// max(x, 0) and min(x, 0); NaN stays NaN.
template <typename A>
DEVICE A positive(A x) {
    return x < A(0) ? A(0) : x;
}
template <typename A>
DEVICE A negative(A x) {
    return x > A(0) ? A(0) : x;
}

DEVICE bool underflowed(float x) { return fabsf(x) < 1.17549435e-38f; }
DEVICE bool underflowed(double x) { return fabs(x) < 2.2250738585072014e-308; }

// A row's vector, and its constants for all lanes.
template <typename A, bool Random>
struct Row {
    const Features& call;
    int64_t x, y, dy, dx, source, d_source;  // where it begins
    A base = A(0), epsilon = A(0);           // of random features: s - m and exp(log_epsilon - m)

    // Computes the constants of random features.
    DEVICE void prepare(int lane, int lanes) {
        if (!Random) return;
        A squares = A(0), largest = A(0);
        for (int i = lane; i < call.source_dim; i += lanes) {
            const A value = load_element<A>(call.source, source + i);
            squares += value * value;
        }
        for (int i = lane; i < call.dim; i += lanes) largest = larger(largest, input(i) < A(0) ? -input(i) : input(i));
        for (int other = lanes / 2; other > 0; other /= 2) {
            squares += __shfl_xor_sync(kAllLanes, squares, other);
            largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, other));
        }
        base = A(-0.5) * (A(call.source_scale * call.source_scale) * squares + A(log(2.0 * call.dim)));
        const A log_epsilon = A(call.log_epsilon);
        if (!call.stabilized) {
            epsilon = exponential(log_epsilon);
            return;
        }
        // The largest of all l is its s + |x|. The difference is taken of these terms, not of rounded sums.
        const bool is_epsilon = base + largest < log_epsilon;
        epsilon = is_epsilon ? A(1) : exponential(log_epsilon - (base + largest));
        base = is_epsilon ? base - log_epsilon : -largest;
    }
    // NaN stays NaN.
    static DEVICE A larger(A x, A y) { return y <= x ? x : y; }
    DEVICE A exponential_of(int i) const {
        return exponential(base + (i < call.dim ? input(i) : -input(i - call.dim)));
    }
    DEVICE A input(int i) const { return load_element<A>(call.x, x + i); }
    DEVICE A gradient(int i) const { return load_element<A>(call.dy, dy + i); }
    DEVICE A z(int i) const { return positive(i < call.dim ? input(i) : -input(i - call.dim)); }
    DEVICE A phi(int i) const {
        if (call.map == kDpfp) {
            const int size = 2 * call.dim, block = i / size, at = i - block * size, other = at - block - 1;
            return z(at) * z(other < 0 ? other + size : other);
        }
        if (Random) return exponential_of(i) + epsilon;
        const A value = input(i);
        if (call.map == kElu) return positive(value) + exponential(negative(value));
        return call.map == kRelu ? positive(value) : value;
    }
};

// r; and the terms that are subtracted from each gradient, and times its feature, after both were multiplied by r.
template <typename A>
struct Factor {
    A r, less, less_by_feature;

    __device__ Factor(const Features& call, A total, A shared) : r(A(call.scale)), less(0), less_by_feature(0) {
        if (call.normalization == kSum) {
            total += A(call.eps);
            if (underflowed(total)) return;
            r = r / total;
            less = r * shared / total;
        } else if (call.normalization == kLength) {
            const A inverse = A(1) / sqrt(total + A(call.eps));
            r = r * inverse;
            less_by_feature = r * shared * inverse * inverse;
        }
    }
};

template <typename A, bool Backward, bool Random>
__global__ void __launch_bounds__(kFeatureThreads, Random && sizeof(A) == 8 ? 2 : 4)
    map_features(const Features call, int lanes) {
    const int lane = threadIdx.x % lanes;
    const int features = Random ? 2 * call.dim : call.map == kDpfp ? 2 * call.dim * call.nu : call.dim;
    const unsigned rows = unsigned(call.batch) * call.time * call.heads;  // below 2^31
    const unsigned number = blockIdx.x * (kFeatureThreads / lanes) + threadIdx.x / lanes;
    // Lanes without a row go along with the last one, as whole warps shuffle, and write nothing.
    const bool inside = number < rows;
    const unsigned row = inside ? number : rows - 1, step = row / call.heads;
    const unsigned head = row % call.heads, time = step % call.time, batch = step / call.time;
    const auto begin = [&](const Sequence& x) { return batch * x.batch + time * x.time + head * x.head; };
    Row<A, Random> of{call,           begin(call.x),      begin(call.y),       begin(call.dy),
                      begin(call.dx), begin(call.source), begin(call.d_source)};
    of.prepare(lane, lanes);

    A total = A(0), shared = A(0);
    if (call.normalization != kNone) {
        for (int i = lane; i < features; i += lanes) {
            const A phi = of.phi(i);
            total += call.normalization == kSum ? phi : phi * phi;
            if (Backward) shared += phi * of.gradient(i);
        }
        for (int other = lanes / 2; other > 0; other /= 2) {
            total += __shfl_xor_sync(kAllLanes, total, other);
            if (Backward) shared += __shfl_xor_sync(kAllLanes, shared, other);
        }
    }
    const Factor<A> factor(call, total, shared);
    if (!inside && !Random) return;
    if (!Backward) {
        for (int i = lane; inside && i < features; i += lanes) store_element(call.y, of.y + i, factor.r * of.phi(i));
        return;
    }
    const auto d_phi = [&](int i) {
        const A d = factor.r * of.gradient(i) - factor.less;
        return call.normalization == kLength ? d - factor.less_by_feature * of.phi(i) : d;
    };
    if constexpr (Random) {
        A log_scale = A(0);
        for (int i = lane; i < call.dim; i += lanes) {
            const A up = d_phi(i) * of.exponential_of(i), down = d_phi(i + call.dim) * of.exponential_of(i + call.dim);
            if (inside) store_element(call.dx, of.dx + i, up - down);
            log_scale += up + down;
        }
        for (int other = lanes / 2; other > 0; other /= 2) log_scale += __shfl_xor_sync(kAllLanes, log_scale, other);
        const A by = -A(call.source_scale * call.source_scale) * log_scale;
        for (int i = lane; inside && i < call.source_dim; i += lanes) {
            const A value = load_element<A>(call.source, of.source + i);
            store_element(call.d_source, of.d_source + i, by * value);
        }
    } else {
        for (int i = lane; i < call.dim; i += lanes) {
            const A x = of.input(i);
            A d = A(0);
            if (call.map == kDpfp) {
                const int size = 2 * call.dim, at = x < A(0) ? i + call.dim : i;
                for (int j = 1; j <= call.nu; ++j) {
                    const int before = at - j < 0 ? at - j + size : at - j,
                              after = at + j < size ? at + j : at + j - size;
                    const int block = (j - 1) * size;
                    d += d_phi(block + at) * of.z(before) + d_phi(block + after) * of.z(after);
                }
                d = x > A(0) ? d : x < A(0) ? -d : A(0);
            } else {
                d = d_phi(i);
                if (call.map == kElu) d = x > A(0) ? d : d * exponential(x);
                if (call.map == kRelu) d = x <= A(0) ? A(0) : d;
            }
            store_element(call.dx, of.dx + i, d);
        }
    }
}

template <bool Backward>
cudaError_t launch_features(const Features& call, cudaStream_t stream) {
    const int64_t rows = int64_t(call.batch) * call.time * call.heads;
    if (call.dim < 1 || call.nu < 1 || call.nu > 2 * call.dim) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    if (rows > 0x7fffffff) return cudaErrorInvalidValue;
    int lanes = 1;
    while (lanes < kWarp && lanes < call.dim) lanes *= 2;
    const int64_t in_block = kFeatureThreads / lanes, blocks = (rows + in_block - 1) / in_block;
    const dim3 grid(static_cast<unsigned>(blocks)), block(kFeatureThreads);
    const auto run = [&](auto wide, auto narrow) {
        return launch(call.x.dtype == kFloat64 ? wide : narrow, grid, block, 0, stream, call, lanes);
    };
    if (call.map == kRandom) return run(map_features<double, Backward, true>, map_features<float, Backward, true>);
    return run(map_features<double, Backward, false>, map_features<float, Backward, false>);
}

}  // namespace

extern "C" cudaError_t fairseq_fastweights::fastweights_features_forward(const Features* params, cudaStream_t stream) {
    return launch_features<false>(*params, stream);
}

extern "C" cudaError_t fairseq_fastweights::fastweights_features_backward(const Features* params, cudaStream_t stream) {
    return launch_features<true>(*params, stream);
}
