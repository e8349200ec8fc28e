// The bindings' use of torch. On CPUs it is of the stable ABI from torch 2.10 on: a library that was compiled with
// 2.10's runs in 2.10 and in every later one. tools/native_build.py then defines TORCH_TARGET_VERSION. For an older
// torch, and for CUDA, the same names are ATen's, and the library is for that torch alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#ifdef TORCH_TARGET_VERSION

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#define FAST_WEIGHTS_OPERATORS STABLE_TORCH_LIBRARY_IMPL
#define FAST_WEIGHTS_OPERATOR TORCH_BOX

// torch before 2.13 has it by this name alone.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace fairseq_fastweights {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::copy_;
using torch::stable::get_num_threads;
using torch::stable::parallel_for;
using torch::stable::Tensor;
using Shape = torch::headeronly::IntHeaderOnlyArrayRef;

inline Tensor to(const Tensor& x, ScalarType type) { return torch::stable::to(x, type); }

// The dispatcher hands kernels of CPUs nothing else.
inline bool on_same_device(const Tensor&, const Tensor&) { return true; }

// The functions of torch/csrc/stable/ops.h look an operator up by its name at each call, as long as a small step takes.
inline Tensor new_empty(const Tensor& x, Shape sizes, ScalarType type) {
    auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
    AtenTensorHandle made = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_aten_new_empty(x.get(), sizes.data(), sizes.size(), &code, nullptr, nullptr, 0, nullptr, &made));
    return Tensor(made);
}

// Without a dispatcher's call, which counts in a step; torch's deterministic mode does not fill it with NaN.
inline Tensor unfilled_like(const Tensor& x) {
    if (!x.is_contiguous()) return torch::stable::empty_like(x);
    const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(x.scalar_type()));
    const Shape sizes = x.sizes();
    AtenTensorHandle made = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), x.strides().data(), code,
                                                           aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
}

inline Tensor new_like(const Tensor& x) {
    return x.is_contiguous() ? new_empty(x, x.sizes(), x.scalar_type()) : torch::stable::empty_like(x);
}

}  // namespace fairseq_fastweights

#else

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#define FAST_WEIGHTS_OPERATORS TORCH_LIBRARY_IMPL
#define FAST_WEIGHTS_OPERATOR

namespace fairseq_fastweights {

using at::get_num_threads;
using at::parallel_for;
using at::ScalarType;
using at::Tensor;
using Shape = at::IntArrayRef;

inline Tensor contiguous(const Tensor& x) { return x.contiguous(); }
inline Tensor to(const Tensor& x, ScalarType type) { return x.to(type); }
inline bool on_same_device(const Tensor& x, const Tensor& like) { return x.device() == like.device(); }
inline Tensor copy_(Tensor& x, const Tensor& from) { return x.copy_(from); }
inline Tensor new_empty(const Tensor& x, Shape sizes, ScalarType type) {
    return at::empty(sizes, x.options().dtype(type));
}
inline Tensor unfilled_like(const Tensor& x) { return at::empty_like(x); }
inline Tensor new_like(const Tensor& x) { return at::empty_like(x); }

}  // namespace fairseq_fastweights

#endif

namespace fairseq_fastweights {

// As torch prints sizes: [2, 3].
template <class Part> void write(std::ostream& out, const Part& part) {
    if constexpr (std::is_same_v<Part, Shape>) {
        out << "[";
        for (size_t i = 0; i < part.size(); ++i) out << (i ? ", " : "") << part[i];
        out << "]";
    } else {
        out << part;
    }
}

// Raises RuntimeError in Python, with these parts of a text.
template <class... Parts> [[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    (write(text, parts), ...);
    throw std::runtime_error(text.str());
}

}  // namespace fairseq_fastweights
