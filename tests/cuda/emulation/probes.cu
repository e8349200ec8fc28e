// Small kernels, most of them wrong in one way each, for the tests of the emulator.
#include "common.cuh"

using namespace fairseq_fastweights;

namespace {

enum Probe {
    kRight,
    kMissingBarrier,
    kDivergentBarrier,
    kDivergentWarp,
    kBeyondShared,
    kBeforeShared,
    kMisaligned,
    kMissingWait,
    kUninitialised,
    kAbsentLane,
    kOvertaken,
};

__global__ void probe(float* out, const float* in, int which) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    float* const shared = reinterpret_cast<float*>(memory);
    const int self = threadIdx.x, last = blockDim.x - 1;
    switch (which) {
        case kRight:
            copy_async<4>(shared + self, in + self);
            copies_commit();
            copies_wait<0>();
            __syncthreads();
            out[self] = __shfl_xor_sync(kAllLanes, shared[last - self], 1);
            break;
        case kMissingBarrier:
            shared[self] = in[self];
            out[self] = shared[last - self];
            break;
        case kDivergentBarrier:
            if (self < 10) __syncthreads();
            break;
        case kDivergentWarp:
            if (self % 2)
                __syncwarp();
            else
                out[self] = __shfl_xor_sync(kAllLanes, in[self], 1);
            break;
        case kBeyondShared: out[self] = shared[self + 1]; break;
        case kBeforeShared: shared[self - 1] = in[self]; break;
        case kMisaligned: *reinterpret_cast<float4*>(shared + 1) = make_float4(0, 0, 0, 0); break;
        case kMissingWait:
            copy_async<4>(shared + self, in + self);
            copies_commit();
            out[self] = shared[self];
            copies_wait<0>();
            break;
        case kUninitialised: out[self] = shared[self]; break;
        case kAbsentLane:
            if (self < 16) out[self] = __shfl_xor_sync(0xffffu, in[self], 16);
            break;
        case kOvertaken:
            shared[self] = in[self];
            __syncthreads();
            out[self] = shared[last - self];
            __syncwarp();
            __syncwarp();
            shared[self] = -1;  // another warp may have got this far before it has been read
            break;
    }
}

// d = a b + c with the fragments that the PTX manual gives for m16n8k16 and, of tf32, m16n8k8. a is (16, k), b (k, 8).
__global__ void multiply(float* d, const float* a, const float* b, const float* c, int kind) {
    const int group = threadIdx.x / 4, member = threadIdx.x % 4;
    const auto bits = [&](float x) {
        return kind == 0 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    };
    const auto pair = [&](float low, float high) {
        return static_cast<uint32_t>(bits(low)) | static_cast<uint32_t>(bits(high)) << 16;
    };
    uint32_t left[4], right[2];
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        const int row = group + i % 2 * 8;
        if (kind == 2) {
            left[i] = emulation::to_tf32(a[row * 8 + member + i / 2 * 4]);
        } else {
            const float* at = a + row * 16 + 2 * member + i / 2 * 8;
            left[i] = pair(at[0], at[1]);
        }
        sums[i] = c[(group + i / 2 * 8) * 8 + 2 * member + i % 2];
    }
    for (int i = 0; i < 2; ++i) {
        if (kind == 2) {
            right[i] = emulation::to_tf32(b[(member + i * 4) * 8 + group]);
        } else {
            const float* at = b + (2 * member + i * 8) * 8 + group;
            right[i] = pair(at[0], at[8]);
        }
    }
    if (kind == 2)
        emulation::mma_m16n8k8_tf32(sums, left, right, sums);
    else
        emulation::mma_m16n8k16(sums, left, right, sums, kind == 1);
    for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + 2 * member + i % 2] = sums[i];
}

__global__ void transpose(unsigned* out, const unsigned* in) {
    out[threadIdx.x] = emulation::movmatrix(in[threadIdx.x]);
}

// Through shared memory, numbers of neighbours `stride` numbers apart.
template <typename T>
__global__ void move(T* out, const T* in, int stride) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    T* const shared = reinterpret_cast<T*>(memory);
    const int own = threadIdx.x * stride;
    shared[own] = in[own];
    __syncthreads();
    out[threadIdx.x] = shared[own];
}

enum GroupFault {
    kNone,
    kNotShown,
    kShownTooEarly,
    kNoFence,
    kNoCommit,
    kNoWait,
    kReplaced,
    kThreeWarps,
};

// A product of a warpgroup: d (64, 64) += a (64, 16) b (16, 64), all of it as the registers and shared memory have it.
// With `of_left`, that is not 0, a is in shared memory too.
__global__ void multiply_in_group(float* d, const unsigned* a, const unsigned char* b, int bytes, uint64_t of_left,
                                  int left_transposed, uint64_t descriptor, int transposed, int fault) {
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const int self = threadIdx.x;
    for (int i = 4 * self; i < bytes; i += 4 * blockDim.x) copy_async<4>(memory + i, b + i);
    copies_commit();
    if (fault == kShownTooEarly) emulation::proxy_fence();
    copies_wait<0>();
    if (fault != kNotShown && fault != kShownTooEarly) emulation::proxy_fence();
    __syncthreads();
    float sums[32];
    unsigned left[4];
    for (int i = 0; i < 32; ++i) sums[i] = d[32 * self + i];
    for (int i = 0; i < 4; ++i) left[i] = a[4 * self + i];
    if (fault != kNoFence) emulation::wgmma_fence();
    const uint64_t start = emulation::shared_address(memory) >> 4, right = start + descriptor;
    if (fault != kThreeWarps || self >= kWarp) {
        if (of_left != 0)
            emulation::wgmma(sums, 64, start + of_left, left_transposed != 0, right, transposed != 0, true);
        else
            emulation::wgmma(sums, 64, left, right, transposed != 0, true);
    }
    if (fault != kNoCommit) emulation::wgmma_commit();
    if (fault == kReplaced) {
        __syncthreads();
        for (int i = self; i < bytes; i += blockDim.x) memory[i] = 0;
        emulation::proxy_fence();
        __syncthreads();
    }
    if (fault != kNoWait) emulation::wgmma_wait(0);
    for (int i = 0; i < 32; ++i) d[32 * self + i] = sums[i];
    if (fault == kNoWait) emulation::wgmma_wait(0);
}

}  // namespace

extern "C" int run_multiply_in_group(float* d, const unsigned* a, const unsigned char* b, int bytes, uint64_t of_left,
                                     int left_transposed, uint64_t descriptor, int transposed, int fault) {
    return launch(multiply_in_group, dim3(1), dim3(128), bytes, nullptr, d, a, b, bytes, of_left, left_transposed,
                  descriptor, transposed, fault);
}

extern "C" int run_move(void* out, const void* in, int stride, int wide) {
    const auto run = [&](auto number) {
        using T = decltype(number);
        return launch(move<T>, dim3(1), dim3(32), 32 * stride * sizeof(T), nullptr, static_cast<T*>(out),
                      static_cast<const T*>(in), stride);
    };
    return wide ? run(float4()) : run(float());
}

extern "C" int run_transpose(unsigned* out, const unsigned* in) {
    return launch(transpose, dim3(1), dim3(32), 0, nullptr, out, in);
}

extern "C" int run_probe(float* out, const float* in, int threads, int which) {
    return launch(probe, dim3(1), dim3(threads), threads * sizeof(float), nullptr, out, in, which);
}

extern "C" int run_multiply(float* d, const float* a, const float* b, const float* c, int kind) {
    return launch(multiply, dim3(1), dim3(32), 0, nullptr, d, a, b, c, kind);
}
