// The emulator behind emulation.h. It reports, as an error of the launch with a message from `emulation_error`:
//   - threads that wait at different barriers or warp operations, or end while others wait for them;
//   - shared memory beyond the launch's size (guard pages behind it, a canary before it), misaligned vector accesses;
//   - launches that ask for more shared memory or threads than the device that it poses as has.
// Shared memory holds NaN when a block starts, and asynchronous copies arrive no sooner than their wait: a kernel that
// reads too early computes NaN. Races show as results that depend on the order in which threads run: warps go from
// barrier to barrier one after another, so that one that no barrier holds up is far ahead; run a kernel under several
// orders (`emulation_schedule`) and compare bits.
#include "cuda_runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMULATION_ASAN 1
#else
#define EMULATION_ASAN 0
#endif

namespace emulation {

Thread* current = nullptr;
uint3 block_index{};
dim3 block_dim, grid_dim;

namespace {

constexpr size_t kStackBytes = (EMULATION_ASAN ? 512 : 256) * 1024;
constexpr size_t kArenaBytes = 256 * 1024;
constexpr size_t kGuardBytes = 16 * 1024 * 1024;
constexpr int kCanaryBytes = 1024;
constexpr int kMostThreads = 1024;

int shared_limit = 227 * 1024;
int capability = 90;
int64_t schedule = 0;
std::string error;
std::map<const void*, int> shared_of_kernel;  // opt-ins by cudaFuncSetAttribute

// ---- Fibers ------------------------------------------------------------------------------------------------------

Thread threads[kMostThreads];
int thread_count = 0;
std::vector<int> order, rank;    // who runs after whom, the threads of a warp together; each thread's place in it
std::vector<int> first_of_warp;  // and the first place of each warp's
void* main_stack_pointer = nullptr;
unsigned char* stacks = nullptr;
const std::function<void()>* body = nullptr;
bool failed = false;

#if defined(__x86_64__)
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulation_switch, .-emulation_switch
)");

void* first_frame(unsigned char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // the return address of `entry`, which also aligns its stack as at a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    return top;
}
#else
ucontext_t contexts[kMostThreads + 1];  // the last is the main program's

void emulation_switch(void** from, void* to) {
    *from = *from ? *from : &contexts[kMostThreads];
    swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}

void* first_frame(unsigned char* stack, void (*entry)()) {
    ucontext_t* context = &contexts[(stack - stacks) / kStackBytes];
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = kStackBytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}
#endif

#if EMULATION_ASAN
const void* main_stack = nullptr;
size_t main_stack_bytes = 0;
#endif

unsigned char* stack_of(const Thread& thread) { return stacks + thread.number * kStackBytes; }

void switch_to_thread(void** from, Thread& next) {
    current = &next;
#if EMULATION_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_of(next), kStackBytes);
#endif
    emulation_switch(from, next.stack_pointer);
#if EMULATION_ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

[[noreturn]] void leave_for_main() {
    void* unused = nullptr;
#if EMULATION_ASAN
    __sanitizer_start_switch_fiber(nullptr, main_stack, main_stack_bytes);
#endif
    void** from = current ? &current->stack_pointer : &unused;
    emulation_switch(from, main_stack_pointer);
    __builtin_unreachable();
}

bool ready(const Thread& thread) { return !thread.done && (thread.phase == nullptr || *thread.phase != thread.seen); }

// Gives way to the next thread of this warp that can run, else to the first of the block. So warps run from barrier to
// barrier one after another, and in the opposite order of threads the other way round: whatever two of them do between
// barriers happens in both orders. Comes back when this one can run.
void give_way(bool within_warp = true) {
    Thread* self = current;
    const int start = rank[self->number], lanes = std::min(32, thread_count - self->number / 32 * 32);
    const int first = first_of_warp[self->number / 32], of_warp = within_warp ? lanes : 0;
    for (int step = 0; step < of_warp + thread_count; ++step) {
        Thread& next = threads[order[step < of_warp ? first + (start - first + step + 1) % lanes : step - of_warp]];
        if (!ready(next)) continue;
        next.phase = nullptr;
        if (&next == self) return;
        switch_to_thread(&self->stack_pointer, next);
        return;
    }
    int ended = 0, waiting = 0, first_waiting = -1;
    for (int i = 0; i < thread_count; ++i) {
        ended += threads[i].done;
        waiting += !threads[i].done;
        if (!threads[i].done && first_waiting < 0) first_waiting = i;
    }
    if (waiting == 0) leave_for_main();
    fail("barrier divergence: %d threads have ended, %d wait (the first of them is %d) and none can go on", ended,
         waiting, first_waiting);
}

void wait_for(const uint64_t* phase, uint64_t seen) {
    current->phase = phase;
    current->seen = seen;
    give_way();
}

void thread_main() {
#if EMULATION_ASAN
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (main_stack == nullptr) main_stack = bottom, main_stack_bytes = bytes;
#endif
    (*body)();
    current->done = true;
    give_way();
    __builtin_unreachable();
}

// ---- Shared memory -----------------------------------------------------------------------------------------------

unsigned char* arena = nullptr;    // kArenaBytes, with kGuardBytes that no one may touch before and behind
unsigned char* shared = nullptr;   // the block's, at the arena's end
unsigned char shown[kArenaBytes];  // the block's, as wgmma sees it
size_t shared_bytes = 0;

void handle_signal(int number, siginfo_t* info, void*) {
    const auto* address = static_cast<unsigned char*>(info->si_addr);
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (current == nullptr) {  // not in a kernel: as if there were no handler
        signal(number, SIG_DFL);
        return;
    }
    if (number == SIGILL) fail("a misaligned access");
    if (address >= arena + kArenaBytes && address < arena + kArenaBytes + kGuardBytes)
        fail("access %td bytes into shared memory, of which the launch has %zu", address - shared, shared_bytes);
    const unsigned char* stack = stack_of(*current);
    if (address >= stack && address < stack + page) fail("a thread's local arrays exceed the emulator's stack");
    fail("access to address %p, which is not mapped, or misaligned", static_cast<const void*>(address));
}

void prepare_once() {
    if (arena != nullptr) return;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    auto* mapped = static_cast<unsigned char*>(
        mmap(nullptr, kArenaBytes + 2 * kGuardBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    arena = mapped + kGuardBytes;
    mprotect(arena, kArenaBytes, PROT_READ | PROT_WRITE);
    stacks = static_cast<unsigned char*>(mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int i = 0; i < kMostThreads; ++i) mprotect(stacks + i * kStackBytes, page, PROT_NONE);
}

// Handlers are in place only while a kernel runs: the test runner has its own.
struct Handlers {
    struct sigaction before[3];
    stack_t stack_before;
    static constexpr int kSignals[3] = {SIGSEGV, SIGBUS, SIGILL};
    Handlers() {
#if !EMULATION_ASAN
        static unsigned char stack[64 * 1024];
        stack_t alternative{};
        alternative.ss_sp = stack;
        alternative.ss_size = sizeof stack;
        sigaltstack(&alternative, &stack_before);
        struct sigaction action{};
        action.sa_sigaction = handle_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before[i]);
#endif
    }
    ~Handlers() {
#if !EMULATION_ASAN
        for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before[i], nullptr);
        sigaltstack(&stack_before, nullptr);
#endif
    }
};

// ---- Blocks and warps --------------------------------------------------------------------------------------------

uint64_t block_phase = 0;
int block_arrived = 0;

struct Group {
    uint64_t phase = 0, arguments = 0;
    int arrived = 0, kind = 0;
};
constexpr int kGroupThreads = 128;
Group groups[kMostThreads / kGroupThreads];

struct Meeting {
    unsigned mask = 0, arrived = 0;
    int kind = 0;
    uint64_t phase = 0;
    Slot slots[2][32];
};
struct Warp {
    std::vector<Meeting*> meetings;  // by mask, few
    std::vector<Meeting*> spare;
};
Warp warps[kMostThreads / 32];

Meeting& meeting(unsigned mask) {
    Warp& warp = warps[current->number / 32];
    for (Meeting* m : warp.meetings)
        if (m->mask == mask) return *m;
    Meeting* fresh = warp.spare.empty() ? new Meeting : warp.spare.back();
    if (!warp.spare.empty()) warp.spare.pop_back();
    fresh->mask = mask;
    fresh->arrived = 0;
    warp.meetings.push_back(fresh);
    return *fresh;
}

void run_block() {
    for (int i = 0; i < thread_count; ++i) {
        Thread& thread = threads[i];
        thread.number = i;
        thread.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
        thread.done = false;
        thread.phase = nullptr;
        thread.open.clear();
        thread.committed.clear();
        thread.shows_memory = thread.hides_memory = thread.shows_registers = false;
        thread.accumulators.clear();
        thread.products.clear();
        thread.committed_products.clear();
#if EMULATION_ASAN
        // The frames of the thread that was here before never returned, and left their red zones.
        __asan_unpoison_memory_region(stack_of(thread), kStackBytes);
#endif
        thread.stack_pointer = first_frame(stack_of(thread), thread_main);
    }
    for (int w = 0; w < (thread_count + 31) / 32; ++w) {
        warps[w].spare.insert(warps[w].spare.end(), warps[w].meetings.begin(), warps[w].meetings.end());
        warps[w].meetings.clear();
    }
    block_arrived = 0;
    for (Group& group : groups) group.arrived = 0;
    std::memset(shown, 0xff, shared_bytes);
#if EMULATION_ASAN
    __asan_unpoison_memory_region(arena, kArenaBytes);
#endif
    std::memset(shared - kCanaryBytes, 0xff, shared_bytes + kCanaryBytes);
#if EMULATION_ASAN
    __asan_poison_memory_region(arena, shared - arena);
#endif
    switch_to_thread(&main_stack_pointer, threads[order[0]]);
    current = nullptr;
    if (failed) return;
#if EMULATION_ASAN
    __asan_unpoison_memory_region(arena, kArenaBytes);
#endif
    for (int i = 1; i <= kCanaryBytes; ++i)
        if (shared[-i] != 0xff) {
            failed = true;
            error = "a write " + std::to_string(i) + " bytes before the start of shared memory";
            return;
        }
}

}  // namespace

void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    error = text;
    error += " (block " + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ", " +
             std::to_string(block_index.z) + "; thread " + std::to_string(current->number) + " of " +
             std::to_string(thread_count) + ")";
    failed = true;
    leave_for_main();
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t bytes, const std::function<void()>& run) {
    prepare_once();
    const auto allowed = shared_of_kernel.find(kernel);
    const size_t most = allowed == shared_of_kernel.end() ? 48 * 1024 : allowed->second;
    const uint64_t count = static_cast<uint64_t>(block.x) * block.y * block.z;
    if (count == 0 || count > kMostThreads || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu ||
        grid.y > 65535 || grid.z > 65535 || bytes > most) {
        error = "launch of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " + std::to_string(grid.z) +
                ") blocks of " + std::to_string(count) + " threads with " + std::to_string(bytes) +
                " bytes of shared memory";
        return cudaErrorInvalidConfiguration;
    }
    block_dim = block;
    grid_dim = grid;
    thread_count = static_cast<int>(count);
    order.resize(thread_count);
    rank.resize(thread_count);
    first_of_warp.resize((thread_count + 31) / 32);
    for (int i = 0; i < thread_count; ++i) order[i] = schedule == 1 ? thread_count - 1 - i : i;
    if (schedule > 1) {
        std::mt19937_64 random(static_cast<uint64_t>(schedule));
        std::shuffle(order.begin(), order.end(), random);
        for (int i = 0; i < thread_count; ++i) rank[order[i]] = i;
        std::vector<int> shuffled(rank);  // warps come as the first lane of each does
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return shuffled[a / 32 * 32] < shuffled[b / 32 * 32]; });
    }
    for (int i = thread_count - 1; i >= 0; --i) rank[order[i]] = i, first_of_warp[order[i] / 32] = i;
    shared_bytes = bytes;
    shared = arena + kArenaBytes - (bytes + 15) / 16 * 16;
    body = &run;
    failed = false;
    error.clear();
    const Handlers handlers;
    const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks && !failed; ++i) {
        const uint64_t n = schedule == 1 ? blocks - 1 - i : i;
        block_index = {static_cast<unsigned>(n % grid.x), static_cast<unsigned>(n / grid.x % grid.y),
                       static_cast<unsigned>(n / grid.x / grid.y)};
        count_block(kernel);
        run_block();
    }
    current = nullptr;
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

unsigned char* dynamic_shared() { return shared; }

bool in_shared(const void* place) { return place >= shared && place < shared + shared_bytes; }

void block_barrier() {
    count_meeting();
    const uint64_t seen = block_phase;
    if (++block_arrived == thread_count) {
        bool shows = false, hides = false;
        for (int i = 0; i < thread_count; ++i) {
            shows = shows || threads[i].shows_memory;
            hides = hides || threads[i].hides_memory;
            threads[i].shows_memory = false;
        }
        if (shows && !hides) std::memcpy(shown, shared, shared_bytes);
        block_arrived = 0;
        ++block_phase;
        give_way(false);
    } else {
        wait_for(&block_phase, seen);
    }
}

void meet_warpgroup(uint64_t arguments, int kind) {
    count_meeting();
    if (thread_count % kGroupThreads) fail("a warpgroup of fewer than %d threads", kGroupThreads);
    Group& group = groups[current->number / kGroupThreads];
    if (group.arrived == 0)
        group.arguments = arguments, group.kind = kind;
    else if (group.arguments != arguments || group.kind != kind)
        fail("threads of a warpgroup meet in different operations (%d, %016llx and %d, %016llx)", group.kind,
             static_cast<unsigned long long>(group.arguments), kind, static_cast<unsigned long long>(arguments));
    const uint64_t seen = group.phase;
    if (++group.arrived == kGroupThreads) {
        group.arrived = 0;
        ++group.phase;
    } else {
        wait_for(&group.phase, seen);
    }
}

const Slot* meet(unsigned mask, int kind, const void* mine, size_t bytes) {
    count_meeting();
    const int self = lane();
    const int lanes = std::min(32, thread_count - current->number / 32 * 32);
    if (lanes < 32 && mask >> lanes) fail("mask %08x names lanes that the block does not have", mask);
    if (!(mask >> self & 1)) fail("lane %d calls with mask %08x, which leaves it out", self, mask);
    Meeting& m = meeting(mask);
    if (m.arrived == 0)
        m.kind = kind;
    else if (m.kind != kind)
        fail("lanes of one warp meet in different operations (%d and %d)", m.kind, kind);
    const uint64_t seen = m.phase;
    Slot* slots = m.slots[seen & 1];
    if (bytes) std::memcpy(slots[self].bytes, mine, bytes);
    m.arrived |= 1u << self;
    if (m.arrived == mask) {
        m.arrived = 0;
        ++m.phase;
    } else {
        wait_for(&m.phase, seen);
    }
    return slots;
}

void warp_barrier(unsigned mask) { meet(mask, 0, nullptr, 0); }

// ---- Asynchronous copies -----------------------------------------------------------------------------------------

void copy_async(void* to, const void* from, int bytes, int valid) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
        fail("an asynchronous copy of %d bytes is not aligned to them", bytes);
    accessed(__builtin_return_address(0), to, bytes);
    accessed(static_cast<char*>(__builtin_return_address(0)) - 1, from, valid);  // another instruction than the write
    std::memset(to, 0xff, bytes);
    current->open.push_back({static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), valid});
    if (valid < bytes) current->open.push_back({static_cast<unsigned char*>(to) + valid, nullptr, bytes - valid});
}

void copies_commit() {
    current->committed.emplace_back();
    current->committed.back().swap(current->open);
}

void copies_wait(int pending) {
    auto& groups = current->committed;
    while (groups.size() > static_cast<size_t>(pending)) {
        current->hides_memory = true;
        for (const Copy& copy : groups.front()) {
            if (copy.from)
                std::memcpy(copy.to, copy.from, copy.bytes);
            else
                std::memset(copy.to, 0, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

// ---- Shared memory as wgmma sees it ------------------------------------------------------------------------------

constexpr unsigned kFirstAddress = 1024;  // not 0, as on a GPU

bool has_wgmma() { return capability == 90; }

void proxy_fence() {
    current->shows_memory = true;
    current->hides_memory = false;
}

unsigned shared_address(const void* pointer) {
    return kFirstAddress + static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - shared);
}

const unsigned char* seen_by_proxy(unsigned address, int bytes) {
    if (address < kFirstAddress || address - kFirstAddress + bytes > shared_bytes)
        fail("wgmma reads %d bytes into shared memory, of which the launch has %zu",
             static_cast<int>(address - kFirstAddress), shared_bytes);
    return shown + (address - kFirstAddress);
}

}  // namespace emulation

// ---- CUDA's functions, and the tests' switches ---------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t) { return emulation::error.c_str(); }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = 132; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor: *value = emulation::capability / 10; return cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: *value = emulation::capability % 10; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = emulation::shared_limit + 1024; return cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulation::shared_limit; return cudaSuccess;
    }
    return cudaErrorInvalidValue;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value > emulation::shared_limit) {
        emulation::error = "a kernel asks for " + std::to_string(value) + " bytes of shared memory; the device has " +
                           std::to_string(emulation::shared_limit);
        return cudaErrorInvalidValue;
    }
    emulation::shared_of_kernel[kernel] = value;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
    std::memset(data, value, bytes);
    return cudaSuccess;
}

extern "C" {

// The message of the last launch that failed.
const char* emulation_error() { return emulation::error.c_str(); }

// The order in which a block's threads run: 0 ascending, 1 descending (blocks too), others a random order from it.
void emulation_schedule(int64_t seed) { emulation::schedule = seed; }

// The device to pose as: compute capability as 10 * major + minor, bytes of shared memory a block can opt in to.
void emulation_device(int capability, int shared_memory) {
    emulation::capability = capability;
    emulation::shared_limit = shared_memory;
    emulation::shared_of_kernel.clear();
}

}  // extern "C"
