// Stands in for torch's header where the binding is compiled without CUDA: there is one stream, nullptr.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
    void* stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex = -1) { return {}; }

}  // namespace c10::cuda
