// Runs CUDA kernels on the host: blocks one after another, a block's threads as fibers that change at barriers and
// warp-wide operations only. cuda_runtime.h includes this. A fault of a kernel is an error with a message, not a crash:
// see emulation.cpp.
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

// Accumulators of wgmma that are in flight: their sums, while the thread's registers hold NaN.
struct Accumulators {
    float* registers;
    std::vector<float> sums;
    int products;  // still to come
};
struct WgmmaProduct {
    float left[2][16];  // this thread's two rows, unless they are in shared memory
    bool left_in_shared_memory, left_transposed;
    uint64_t left_at, right;  // descriptors
    float* registers;         // of the accumulators
    bool transposed, bfloat16;
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
    bool shows_memory;                         // a fence of proxies came since the last barrier
    bool hides_memory;                         // no such fence came after copies that it waited for
    bool shows_registers;                      // wgmma.fence came since the last commit
    std::vector<Accumulators> accumulators;
    std::vector<WgmmaProduct> products;                         // since the last commit
    std::vector<std::vector<WgmmaProduct>> committed_products;  // oldest first
};

extern Thread* current;
extern uint3 block_index;
extern dim3 block_dim, grid_dim;

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, const std::function<void()>& body);
unsigned char* dynamic_shared();
[[noreturn]] void fail(const char* format, ...);

inline int lane() { return current->number & 31; }

// For accesses.cpp: an access by an instruction; a warp's or a block's meeting; a block's beginning, null after the
// last one.
void accessed(const void* by, const void* place, int bytes);
void count_meeting();
void count_block(const void* kernel);
bool in_shared(const void* place);

void block_barrier();
// All threads of a warpgroup meet, with equal arguments.
void meet_warpgroup(uint64_t arguments, int kind);
void warp_barrier(unsigned mask);

// The values that the lanes of `mask` put in, by lane. `kind` tells operations apart: lanes must meet in the same one.
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

// ---- Warpgroups: instructions of sm_90a alone; the device has them while its compute capability is 9.0.
bool has_wgmma();
// fence.proxy.async: wgmma reads shared memory as it was at the last barrier to which threads came from such a fence,
// without copies that a thread had waited for and not fenced; NaN before the first.
void proxy_fence();
// Shared memory as a descriptor names it, and `bytes` of it as wgmma sees them.
unsigned shared_address(const void* pointer);
const unsigned char* seen_by_proxy(unsigned address, int bytes);
// wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{f16,bf16}: d += a b, a in registers or, as b, in shared memory by
// a descriptor. It happens at the wait for its group; until then `d`, `columns` / 2 registers, holds NaN.
void wgmma(float* d, int columns, const uint32_t* a, uint64_t b, bool transposed, bool bfloat16);
void wgmma(float* d, int columns, uint64_t a, bool left_transposed, uint64_t b, bool transposed, bool bfloat16);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace emulation
