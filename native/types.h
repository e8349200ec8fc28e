// The structs that kernels of cpu/ and cuda/ have in common: pointers, sizes and strides of a call. No torch here, so
// that kernels compile without it. `Int` is the type that kernels compute indices in: int64_t on CPUs, int32_t on GPUs.
#pragma once

#include <cstdint>

namespace fairseq_fastweights {

enum DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat64 = 3 };

// A (batch, time, heads[, dim]) tensor. Strides count elements, and the last dimension is contiguous. `data` is null
// where an optional tensor is absent. Each of its heads serves as many heads of the call in turn as `sharing` says.
struct Sequence {
    void* data = nullptr;
    int64_t batch = 0, time = 0, head = 0;
    int32_t dtype = kFloat32, sharing = 1;
};

enum FeatureMap : int32_t { kIdentity = 0, kElu = 1, kRelu = 2, kDpfp = 3, kRandom = 4 };
enum Normalization : int32_t { kNone = 0, kSum = 1, kLength = 2 };

// A feature map, whose vectors may be divided by a sum or a length: x is (batch, time, heads, dim), y has features()
// numbers in the place of dim. Backwards y is not used, forwards dy and dx are not. For kRandom x has the projections
// of `source`, (batch, time, heads, source_dim), which is multiplied by source_scale, exp(log_epsilon) is added to each
// feature, and if `stabilized` each vector is divided by its largest exponential.
template <typename Int>
struct FeaturesOf {
    Int batch = 0, time = 0, heads = 0, dim = 0, nu = 1;
    FeatureMap map = kIdentity;
    Normalization normalization = kNone;
    double eps = 0, scale = 1;
    Sequence x, y, dy, dx;
    Int source_dim = 0, stabilized = 0;
    double source_scale = 1, log_epsilon = 0;
    Sequence source, d_source;

    int64_t features() const { return int64_t{dim} * (map == kDpfp ? 2 * nu : map == kRandom ? 2 : 1); }
};

enum Activation : int32_t { kSigmoid = 0, kSilu = 1, kLogSigmoid = 2, kSoftplus = 3 };
enum Norm : int32_t { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };

// Gates x, (outer, inner, channels), channels = heads * dim, and their optional factor y, as x or, with a norm, (outer,
// inner, heads, dim). bias (channels) and log_rate (rates), each for as many channels in turn, come without a norm,
// weight (dim) with one; each may be absent, and all are contiguous. Kernels put down parts of the sums over steps for
// these: float, or double where x is; null where they are not wanted.
template <typename Int>
struct GatingOf {
    Int outer = 0, inner = 0, heads = 1, dim = 0, rates = 1;
    Activation activation = kSigmoid;
    Norm norm = kNoNorm;
    double eps = 0, scale = 1;
    Sequence x, y, bias, log_rate, weight;
    Sequence out, d_out, dx, dy;
    void* d_bias = nullptr;
    void* d_log_rate = nullptr;
    void* d_weight = nullptr;

    int64_t channels() const { return int64_t{heads} * dim; }
};

// A short convolution of x, (batch, time, channels); `before`, `last` and their gradients are (batch, width - 1,
// channels), weight (channels, width) and bias (channels), contiguous. before, bias, starts, lengths (of rows that
// padding follows), d_last and d_before may be absent. dw and db are parts of sums as above.
template <typename Int>
struct ConvolutionOf {
    Int batch = 0, time = 0, channels = 0, width = 1;
    Sequence x, y, before, last, weight, bias;
    const bool* starts = nullptr;
    const int64_t* lengths = nullptr;
    Sequence d_y, d_last, dx, d_before;
    void* dw = nullptr;
    void* db = nullptr;
};

}  // namespace fairseq_fastweights
