// Counts the memory accesses of kernels, by kernel and instruction: their warps' wavefronts of shared memory and
// sectors of global memory. The compiler calls the hooks at the end for each access, since it is told to look for races
// of threads (-fsanitize=thread, for the kernels alone and without its runtime); the emulator reports the accesses of
// the instructions that it emulates.
//
// Lanes access memory together if they do so by the same instruction for the same time since their warp last met. In a
// wavefront shared memory gives each of its 32 banks one word; 8 bytes to a lane are two halves of a warp, 16 are four
// quarters. A sector is 32 bytes.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "cuda_runtime.h"

namespace emulation {

namespace {

struct Access {
    uintptr_t by;
    int warp, step, time, lane;  // step: between two of its warp's meetings
    uintptr_t place;
    int bytes;
    bool shared;
};
struct Sums {
    int64_t accesses, asked,
        needed;  // asked: wavefronts or sectors; needed: those of the same bytes without conflicts or gaps
    bool shared;
};

bool counting = false;
std::vector<std::pair<uintptr_t, uintptr_t>> watched;
std::vector<Access> of_block;
int steps[1024];
std::map<std::pair<int, uintptr_t>, std::pair<int, int>>
    times;  // by thread and instruction: the step, and how often in it
uintptr_t kernel = 0;
std::map<uintptr_t, int64_t> blocks;
std::map<std::pair<uintptr_t, uintptr_t>, Sums> sums;  // by kernel and instruction
std::vector<std::array<int64_t, 7>> listed;

// Adds those of a warp's lanes at once, [begin, end).
void add(Sums& sum, const Access* begin, const Access* end) {
    sum.shared = begin->shared;
    ++sum.accesses;
    if (begin->shared) {
        const int lanes = begin->bytes <= 4 ? 32 : begin->bytes == 8 ? 16 : 8;
        for (int first = 0; first < 32; first += lanes) {
            std::set<uintptr_t> words;
            for (const Access* x = begin; x < end; ++x)
                for (uintptr_t at = x->place / 4; x->lane / lanes * lanes == first && 4 * at < x->place + x->bytes;
                     ++at)
                    words.insert(at);
            int of_bank[32] = {}, most = 0;
            for (const uintptr_t word : words) most = std::max(most, ++of_bank[word % 32]);
            sum.asked += most;
            sum.needed += !words.empty();
        }
        return;
    }
    std::set<uintptr_t> sectors, bytes;
    for (const Access* x = begin; x < end; ++x)
        for (uintptr_t at = x->place; at < x->place + x->bytes; ++at) sectors.insert(at / 32), bytes.insert(at);
    sum.asked += static_cast<int64_t>(sectors.size());
    sum.needed += static_cast<int64_t>(bytes.size() + 31) / 32;
}

}  // namespace

void accessed(const void* by, const void* place, int bytes) {
    if (!counting || current == nullptr || bytes == 0) return;
    const auto at = reinterpret_cast<uintptr_t>(place), from = reinterpret_cast<uintptr_t>(by);
    const bool shared = in_shared(place);
    const auto holds = [&](const auto& range) { return at >= range.first && at < range.second; };
    if (!shared && std::none_of(watched.begin(), watched.end(), holds)) return;
    auto& [step, time] = times.try_emplace({current->number, from}, -1, 0).first->second;
    if (step != steps[current->number]) step = steps[current->number], time = 0;
    of_block.push_back({from, current->number / 32, step, time++, lane(), at, bytes, shared});
}

void count_meeting() {
    if (counting) ++steps[current->number];
}

void count_block(const void* of_kernel) {
    if (!counting) return;
    const auto key = [](const Access& x) { return std::tie(x.by, x.warp, x.step, x.time); };
    std::sort(of_block.begin(), of_block.end(), [&](const Access& x, const Access& y) { return key(x) < key(y); });
    for (auto begin = of_block.begin(); begin != of_block.end();) {
        const auto end = std::find_if(begin, of_block.end(), [&](const Access& x) { return key(x) != key(*begin); });
        add(sums[{kernel, begin->by}], &*begin, &*begin + (end - begin));
        begin = end;
    }
    of_block.clear();
    times.clear();
    std::fill(std::begin(steps), std::end(steps), 0);
    kernel = reinterpret_cast<uintptr_t>(of_kernel);
    if (of_kernel != nullptr) ++blocks[kernel];
}

}  // namespace emulation

extern "C" {

// Starts counting accesses of shared memory and of watched memory; stops, and returns the number of instructions.
void emulation_count() {
    emulation::counting = true;
    emulation::sums.clear(), emulation::blocks.clear(), emulation::watched.clear();
}
void emulation_watch(const void* data, int64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(data);
    emulation::watched.emplace_back(begin, begin + bytes);
}
int64_t emulation_counted() {
    emulation::count_block(nullptr);
    emulation::counting = false;
    emulation::listed.clear();
    for (const auto& [key, sum] : emulation::sums)
        emulation::listed.push_back({static_cast<int64_t>(key.first), static_cast<int64_t>(key.second),
                                     emulation::blocks[key.first], sum.accesses, sum.asked, sum.needed, sum.shared});
    return static_cast<int64_t>(emulation::listed.size());
}
// Of instruction i: kernel, address, blocks of the kernel, accesses of warps, wavefronts or sectors, the fewest
// possible, and 1 if they are of shared memory.
void emulation_count_of(int64_t i, int64_t* to) {
    std::copy_n(emulation::listed[static_cast<size_t>(i)].begin(), 7, to);
}

#define FROM_HERE __builtin_return_address(0)
#define HOOKS(bytes)                                                                         \
    void __tsan_read##bytes(void* p) { emulation::accessed(FROM_HERE, p, bytes); }           \
    void __tsan_write##bytes(void* p) { emulation::accessed(FROM_HERE, p, bytes); }          \
    void __tsan_unaligned_read##bytes(void* p) { emulation::accessed(FROM_HERE, p, bytes); } \
    void __tsan_unaligned_write##bytes(void* p) { emulation::accessed(FROM_HERE, p, bytes); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { emulation::accessed(FROM_HERE, p, static_cast<int>(bytes)); }
void __tsan_write_range(void* p, size_t bytes) { emulation::accessed(FROM_HERE, p, static_cast<int>(bytes)); }
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

}  // extern "C"
