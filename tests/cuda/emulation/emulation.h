// Runs CUDA kernels on the host: blocks one after another, a block's threads as fibers that change at barriers and
// warp-wide operations only. cuda_runtime.h includes this. What a wrong kernel does here is an error with a message,
// not a crash: see emulation.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

namespace emulation {

struct Copy {
    unsigned char* to;
    const unsigned char* from;
    int bytes;
};

struct Thread {
    uint3 index;
    int number;
    bool done;
    const uint64_t* phase;  // waits until *phase is no longer `seen`; null: may run
    uint64_t seen;
    void* stack_pointer;
    std::vector<Copy> open;                    // asynchronous copies since the last commit
    std::vector<std::vector<Copy>> committed;  // oldest first
};

extern Thread* current;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, const std::function<void()>& body);
unsigned char* dynamic_shared();
[[noreturn]] void fail(const char* format, ...);

inline int lane() { return current->number & 31; }

void block_barrier();
void warp_barrier(unsigned mask);

// What every lane of `mask` put in, by lane. `kind` tells operations apart: lanes must meet in the same one.
constexpr int kSlotBytes = 48;
struct Slot {
    alignas(16) unsigned char bytes[kSlotBytes];
};
const Slot* meet(unsigned mask, int kind, const void* mine, size_t bytes);

template <typename T>
T shuffle(unsigned mask, T value, int source, int kind) {
    static_assert(sizeof(T) <= kSlotBytes, "too large for a shuffle");
    const Slot* slots = meet(mask, kind, &value, sizeof(T));
    if (!(mask >> source & 1)) fail("a shuffle reads lane %d, which its mask %08x leaves out", source, mask);
    T result;
    std::memcpy(&result, slots[source].bytes, sizeof(T));
    return result;
}

// cp.async: the bytes arrive at the wait, and until then `to` holds NaN. Of `bytes`, the last bytes - valid are zeros.
void copy_async(void* to, const void* from, int bytes, int valid);
void copies_commit();
void copies_wait(int pending);

// The warp's tensor core instructions with the fragments of the PTX manual. d may be c.
// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32
void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, const float* c, bool bfloat16);
// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32; operands' low 13 bits are ignored, as the hardware does
void mma_m16n8k8_tf32(float* d, const uint32_t* a, const uint32_t* b, const float* c);
// cvt.rna.tf32.f32
uint32_t to_tf32(float x);
// ldmatrix.sync.aligned.m8n8.x{count}{.trans}.shared.b16
void ldmatrix(uint32_t* registers, int count, const void* row, bool transposed);
// movmatrix.sync.aligned.m8n8.trans.b16
uint32_t movmatrix(uint32_t pair);

}  // namespace emulation
