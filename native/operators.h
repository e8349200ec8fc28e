// The operators whose argument code is the same for CPUs and GPUs: feature maps, gates and short convolutions. Their
// schemas, shape functions and derivatives are in fairseq_fastweights/ops/kernels.py.
//
// `Device` has the rest:
//     Features, Gating, Convolution     the structs of its kernels.h
//     Guard(x)                          makes the device of x the current one
//     check(x, nu)                      refuses features that its kernels do not take
//     size(x, dimension)                the size of x there, as its structs hold it
//     run(p, x, backward)               runs the kernel of a struct
//     parts(p)                          how many parts of the sums for parameters its backward kernel leaves,
//     rates(p)                          how many numbers each of those for log_rate has,
//     total(parts, x)                   and their sum, the gradient of x
//     lengths(x, sizes, time)           lengths of rows, checked or clamped
#pragma once

#include <tuple>
#include <utility>

#include "arguments.h"

namespace fairseq_fastweights {

// Feature maps of x, (batch, time, heads, dim). `map` and `normalization` are numbers of the enumerations in types.h.
template <class Device>
auto features_of(const Tensor& x, int64_t map, int64_t nu, int64_t normalization, double eps, double scale) {
    if (x.dim() != 4) fail("x has shape ", x.sizes(), "; it must be (batch, time, heads, dim)");
    if (map < 0 || map > kDpfp) fail("map is ", map, "; it must be from 0 to ", int(kDpfp));
    if (normalization < 0 || normalization > kLength) {
        fail("normalization is ", normalization, "; it must be from 0 to ", int(kLength));
    }
    if (map == kDpfp && (nu < 1 || nu >= 2 * x.size(3))) {
        fail("nu is ", nu, "; it must be from 1 to ", 2 * x.size(3) - 1);
    }
    Device::check(x, nu);
    typename Device::Features p;
    p.batch = Device::size(x, 0), p.time = Device::size(x, 1), p.heads = Device::size(x, 2);
    p.dim = Device::size(x, 3), p.nu = map == kDpfp ? nu : 1;
    p.map = FeatureMap(map), p.normalization = Normalization(normalization), p.eps = eps, p.scale = scale;
    p.x = sequence("x", x);
    return p;
}

// Random features of `source`, of which x are the projections: both (batch, time, heads, dim).
template <class Device>
auto random_features_of(const Tensor& x, const Tensor& source, double source_scale, double log_epsilon, bool stabilized,
                        int64_t normalization, double eps) {
    auto p = features_of<Device>(x, kIdentity, 1, normalization, eps, 1);
    check_sizes("source", source, {p.batch, p.time, p.heads, source.size(-1)});
    check_device("source", source, x);
    p.map = kRandom, p.source = sequence("source", source), p.source_dim = Device::size(source, 3);
    p.source_scale = source_scale, p.log_epsilon = log_epsilon, p.stabilized = stabilized;
    return p;
}

template <class Device>
Tensor map(typename Device::Features& p, const Tensor& x, ScalarType dtype) {
    const Tensor y = new_empty(x, {p.batch, p.time, p.heads, p.features()}, dtype);
    p.y = sequence("y", y);
    Device::run(p, x, false);
    return y;
}

// The gradient of x; that of a source, of which x are projections, goes where p says.
template <class Device>
Tensor differentiate_map(typename Device::Features& p, const Tensor& x, const Tensor& d_out) {
    check_sizes("d_out", d_out, {p.batch, p.time, p.heads, p.features()});
    check_device("d_out", d_out, x);
    const Tensor dy = last_contiguous(d_out), dx = gradient_like(x);
    p.dy = sequence("d_out", dy), p.dx = sequence("dx", dx);
    Device::run(p, x, true);
    return dx;
}

template <class Device>
Tensor map_features(const Tensor& x, int64_t map_, int64_t nu, int64_t normalization, double eps, double scale,
                    ScalarType dtype) {
    const typename Device::Guard guard(x);
    auto p = features_of<Device>(x, map_, nu, normalization, eps, scale);
    return map<Device>(p, x, dtype);
}

template <class Device>
Tensor map_features_backward(const Tensor& d_out, const Tensor& x, int64_t map_, int64_t nu, int64_t normalization,
                             double eps, double scale) {
    const typename Device::Guard guard(x);
    auto p = features_of<Device>(x, map_, nu, normalization, eps, scale);
    return differentiate_map<Device>(p, x, d_out);
}

template <class Device>
Tensor random_features(const Tensor& x, const Tensor& source, double source_scale, double log_epsilon, bool stabilized,
                       int64_t normalization, double eps, ScalarType dtype) {
    const typename Device::Guard guard(x);
    auto p = random_features_of<Device>(x, source, source_scale, log_epsilon, stabilized, normalization, eps);
    return map<Device>(p, x, dtype);
}

template <class Device>
std::tuple<Tensor, Tensor> random_features_backward(const Tensor& d_out, const Tensor& x, const Tensor& source,
                                                    double source_scale, double log_epsilon, bool stabilized,
                                                    int64_t normalization, double eps) {
    const typename Device::Guard guard(x);
    auto p = random_features_of<Device>(x, source, source_scale, log_epsilon, stabilized, normalization, eps);
    const Tensor d_source = gradient_like(source);
    p.d_source = sequence("d_source", d_source);
    return {differentiate_map<Device>(p, x, d_out), d_source};
}

// A call of gates, and the contiguous copies that it reads. `activation` and `norm` are numbers of the enumerations in
// types.h.
template <class Device>
struct GatingCall {
    optional<Tensor> bias, log_rate, weight;
    typename Device::Gating p;

    GatingCall(const Tensor& x, const optional<Tensor>& b, const optional<Tensor>& A, const optional<Tensor>& y,
               const optional<Tensor>& w, int64_t activation, int64_t norm, double eps, double scale)
        : bias(b), log_rate(A), weight(w) {
        if (x.dim() != 3 || x.size(2) < 1) fail("x has shape ", x.sizes(), "; it must be (outer, inner, channels)");
        if (activation < 0 || activation > kSoftplus) {
            fail("activation is ", activation, "; it must be from 0 to ", int(kSoftplus));
        }
        if (norm < 0 || norm > kLayerNorm) fail("norm is ", norm, "; it must be from 0 to ", int(kLayerNorm));
        p.outer = Device::size(x, 0), p.inner = Device::size(x, 1), p.dim = Device::size(x, 2);
        p.activation = Activation(activation), p.norm = Norm(norm), p.eps = eps, p.scale = scale;
        p.x = sequence("x", x, 3);
        if (p.norm == kNoNorm) {
            if (w) fail("weight was given without a norm");
            if (y) check_sizes("y", *y, x.sizes());
        } else {
            if (!y || b || A) fail("a norm is of y alone, without bias and log_rate");
            p.dim = y->dim() == 4 && y->size(3) ? Device::size(*y, 3) : 1, p.heads = x.size(2) / p.dim;
            check_sizes("y", *y, {p.outer, p.inner, p.heads, p.dim});
        }
        if (y) check_device("y", *y, x), p.y = sequence("y", *y, y->dim());
        p.bias = parameters("bias", bias, {p.channels()}, x), p.weight = parameters("weight", weight, {p.dim}, x);
        p.rates = A && A->dim() == 1 && A->size(0) ? Device::size(*A, 0) : 1;
        p.log_rate = parameters("log_rate", log_rate, {p.rates}, x);
        if (p.channels() % p.rates) fail("log_rate has ", p.rates, " numbers for ", p.channels(), " channels");
    }
};

template <class Device>
Tensor gate(const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& log_rate, const optional<Tensor>& y,
            const optional<Tensor>& weight, int64_t activation, int64_t norm, double eps, double scale,
            ScalarType dtype) {
    const typename Device::Guard guard(x);
    GatingCall<Device> call(x, bias, log_rate, y, weight, activation, norm, eps, scale);
    const Tensor out = new_empty(x, x.sizes(), dtype);
    call.p.out = sequence("out", out, 3);
    Device::run(call.p, x, false);
    return out;
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gate_backward(const Tensor& d_out, const Tensor& x,
                                                                 const optional<Tensor>& bias,
                                                                 const optional<Tensor>& log_rate,
                                                                 const optional<Tensor>& y,
                                                                 const optional<Tensor>& weight, int64_t activation,
                                                                 int64_t norm, double eps, double scale) {
    const typename Device::Guard guard(x);
    GatingCall<Device> call(x, bias, log_rate, y, weight, activation, norm, eps, scale);
    auto& p = call.p;
    check_sizes("d_out", d_out, x.sizes());
    check_device("d_out", d_out, x);
    const Tensor g = last_contiguous(d_out), dx = gradient_like(x), dy = y ? gradient_like(*y) : nothing(x);
    // The gradient of an absent input is an empty tensor.
    const auto room = [&](const optional<Tensor>& of, int64_t size, void*& where) {
        const Tensor made = of ? new_empty(x, {Device::parts(p), size}, state_type(x)) : nothing(x);
        where = of ? made.data_ptr() : nullptr;
        return made;
    };
    const Tensor d_bias = room(bias, p.channels(), p.d_bias), d_rate = room(log_rate, Device::rates(p), p.d_log_rate);
    const Tensor d_weight = room(weight, p.dim, p.d_weight);
    p.d_out = sequence("d_out", g, 3), p.dx = sequence("dx", dx, 3);
    if (y) p.dy = sequence("dy", dy, y->dim());
    Device::run(p, x, true);
    const auto total = [](const Tensor& parts, const optional<Tensor>& of) {
        return of ? Device::total(parts, *of) : parts;
    };
    return {dx, total(d_bias, bias), total(d_rate, log_rate), dy, total(d_weight, weight)};
}

// A short convolution of x, (time, batch, channels), and the contiguous copies that it reads.
template <class Device>
struct ConvolutionCall {
    optional<Tensor> weight, bias, starts, lengths;
    typename Device::Convolution p;

    ConvolutionCall(const Tensor& x, const Tensor& w, const optional<Tensor>& b, const optional<Tensor>& before,
                    const optional<Tensor>& given_lengths, const optional<Tensor>& given_starts)
        : weight(w), bias(b), starts(given_starts) {
        if (x.dim() != 3) fail("x has shape ", x.sizes(), "; it must be (time, batch, channels)");
        p.time = Device::size(x, 0), p.batch = Device::size(x, 1), p.channels = Device::size(x, 2);
        p.width = w.dim() == 2 && w.size(1) ? Device::size(w, 1) : 1;
        p.weight = parameters("weight", weight, {p.channels, p.width}, x);
        p.bias = parameters("bias", bias, {p.channels}, x);
        p.x = time_first("x", x);
        if (before) p.before = edge("before", *before, x);
        p.starts = flags_of(starts, {p.batch, p.time}, x);
        if (given_lengths) {
            check_sizes("lengths", *given_lengths, {p.batch});
            check_device("lengths", *given_lengths, x);
            if (given_lengths->scalar_type() != ScalarType::Long) {
                fail("lengths is of type ", given_lengths->scalar_type());
            }
            lengths = Device::lengths(*given_lengths, p.time);
            p.lengths = static_cast<const int64_t*>(lengths->data_ptr());
        }
    }

    static Sequence time_first(const char* name, const Tensor& x) {
        Sequence made = sequence(name, x, 3);
        std::swap(made.batch, made.time);
        return made;
    }

    // The steps that come before x, or the last of both.
    Sequence edge(const char* name, const Tensor& steps, const Tensor& x) const {
        check_sizes(name, steps, {p.batch, p.width - 1, p.channels});
        check_device(name, steps, x);
        return sequence(name, steps, 3);
    }
};

template <class Device>
std::tuple<Tensor, Tensor> short_convolution(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                             const optional<Tensor>& before, const optional<Tensor>& lengths,
                                             const optional<Tensor>& starts) {
    const typename Device::Guard guard(x);
    ConvolutionCall<Device> call(x, weight, bias, before, lengths, starts);
    auto& p = call.p;
    const Tensor y = new_empty(x, x.sizes(), x.scalar_type());
    const Tensor last = new_empty(x, {p.batch, p.width - 1, p.channels}, state_type(x));
    p.y = call.time_first("y", y), p.last = sequence("last", last, 3);
    Device::run(p, x, false);
    return {y, last};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> short_convolution_backward(const Tensor& d_y, const optional<Tensor>& d_last,
                                                                      const Tensor& x, const Tensor& weight,
                                                                      const optional<Tensor>& bias,
                                                                      const optional<Tensor>& before,
                                                                      const optional<Tensor>& lengths,
                                                                      const optional<Tensor>& starts) {
    const typename Device::Guard guard(x);
    ConvolutionCall<Device> call(x, weight, bias, before, lengths, starts);
    auto& p = call.p;
    check_sizes("d_y", d_y, x.sizes());
    check_device("d_y", d_y, x);
    const Tensor g = last_contiguous(d_y), dx = gradient_like(x);
    const Tensor d_before = before ? gradient_like(*before) : nothing(x);
    const optional<Tensor> d_after = contiguous_of(d_last);
    p.d_y = call.time_first("d_y", g), p.dx = call.time_first("dx", dx);
    if (d_after) p.d_last = call.edge("d_last", *d_after, x);
    if (before) p.d_before = sequence("d_before", d_before, 3);
    const int64_t parts = Device::parts(p);
    const Tensor dw = new_empty(x, {parts, p.channels, p.width}, state_type(x));
    const Tensor db = new_empty(x, {parts, p.channels}, state_type(x));
    p.dw = dw.data_ptr(), p.db = db.data_ptr();
    Device::run(p, x, true);
    return {dx, Device::total(dw, weight), bias ? Device::total(db, *bias) : nothing(x), d_before};
}

#define FAST_WEIGHTS_OPERATORS_OF(m, Device)                                                     \
    m.impl("map_features", FAST_WEIGHTS_OPERATOR(map_features<Device>));                         \
    m.impl("map_features_backward", FAST_WEIGHTS_OPERATOR(map_features_backward<Device>));       \
    m.impl("random_features", FAST_WEIGHTS_OPERATOR(random_features<Device>));                   \
    m.impl("random_features_backward", FAST_WEIGHTS_OPERATOR(random_features_backward<Device>)); \
    m.impl("gate", FAST_WEIGHTS_OPERATOR(gate<Device>));                                         \
    m.impl("gate_backward", FAST_WEIGHTS_OPERATOR(gate_backward<Device>));                       \
    m.impl("short_convolution", FAST_WEIGHTS_OPERATOR(short_convolution<Device>));               \
    m.impl("short_convolution_backward", FAST_WEIGHTS_OPERATOR(short_convolution_backward<Device>))

}  // namespace fairseq_fastweights
