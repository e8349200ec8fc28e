// Tensor cores, and the instructions that move their operands: the instructions in emulation.h's list.
#include "cuda_runtime.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace emulation {

namespace {

// c plus products as a tensor core adds them up: all are aligned to the largest, the digits beyond two more than its
// last one are truncated towards zero, and then those beyond a float's. So others found it on GPUs, which differ in the
// number of extra digits (Fasi et al. 2021, Khattak and Mikaitis 2025); NVIDIA's manual leaves it open.
template <int Count>
float cut_off_sum(float c, const double (&products)[Count]) {
    double plain = c, largest = std::fabs(c);
    for (const double x : products) {
        plain += x;
        largest = std::max(largest, std::fabs(x));
    }
    if (plain - plain != 0 || largest == 0) return static_cast<float>(plain);
    // `largest` is below 2^exponent, and the last digit that is kept 2^(exponent - 26).
    uint64_t bits;
    std::memcpy(&bits, &largest, sizeof bits);
    const uint64_t exponent = (bits >> 52) - 1022, unit = (1023 + 26 - exponent) << 52;
    double digits;
    std::memcpy(&digits, &unit, sizeof digits);
    auto sum = static_cast<int64_t>(c * digits);  // towards zero
    for (const double x : products) sum += static_cast<int64_t>(x * digits);
    const int beyond = 64 - 24 - __builtin_clzll(static_cast<uint64_t>(std::llabs(sum)) | 1);
    const int64_t step = beyond > 0 ? int64_t{1} << beyond : 1;
    return static_cast<float>(static_cast<double>(sum / step * step) / digits);
}

float decoded(uint16_t bits, bool bfloat16) {
    return bfloat16 ? __bfloat162float(__ushort_as_bfloat16(bits)) : __half2float(__ushort_as_half(bits));
}

// d = a b + c of a warp; each lane brings its factors in the layout of fragments: `Depth` elements of a, half as many
// of b. at(k): the lane that holds inner index k of a row or a column, and its number there.
template <int Depth, typename At>
void multiply(float* d, const float (&mine)[Depth / 4 * 3], const float* c, int kind, At at) {
    const Slot* slots = meet(0xffffffffu, kind, mine, sizeof mine);
    const auto element = [&](int lane, int number) {
        float value;
        std::memcpy(&value, slots[lane].bytes + sizeof(float) * number, sizeof value);
        return static_cast<double>(value);
    };
    const int lane_row = lane() / 4, lane_pair = lane() % 4;
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        double products[Depth];
        for (int k = 0; k < Depth; ++k) {
            const auto [holder, of_a, of_b] = at(k, i / 2);
            products[k] = element(lane_row * 4 + holder, of_a) * element((2 * lane_pair + i % 2) * 4 + holder, of_b);
        }
        sums[i] = cut_off_sum(c[i], products);
    }
    for (int i = 0; i < 4; ++i) d[i] = sums[i];
}

struct Place {
    int lane, of_a, of_b;
};

}  // namespace

void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, const float* c, bool bfloat16) {
    float mine[12];
    for (int i = 0; i < 12; ++i) {
        const uint32_t word = i < 8 ? a[i / 2] : b[i / 2 - 4];
        const auto bits = static_cast<uint16_t>(i % 2 ? word >> 16 : word);
        mine[i] = decoded(bits, bfloat16);
    }
    multiply<16>(d, mine, c, bfloat16 ? 6 : 7, [](int k, int lower) {
        return Place{k % 8 / 2, 2 * (lower + k / 8 * 2) + k % 2, 8 + k / 8 * 2 + k % 2};
    });
}

void mma_m16n8k8_tf32(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
    float mine[6];
    for (int i = 0; i < 6; ++i) mine[i] = __uint_as_float((i < 4 ? a[i] : b[i - 4]) & ~0x1fffu);
    multiply<8>(d, mine, c, 8, [](int k, int lower) { return Place{k % 4, lower + k / 4 * 2, 4 + k / 4}; });
}

uint32_t to_tf32(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
    return (bits + 0x1000u) & ~0x1fffu;  // ties away from zero
}

void ldmatrix(uint32_t* registers, int count, const void* row, bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail("a row of ldmatrix is not aligned to 16 bytes");
    if (lane() < 8 * count) accessed(__builtin_return_address(0), row, 16);
    const Slot* slots = meet(0xffffffffu, transposed ? 9 : 10, &row, sizeof row);
    const int self = lane();
    for (int m = 0; m < count; ++m) {
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i) {
            const int r = transposed ? 2 * (self % 4) + i : self / 4;
            const int c = transposed ? self / 4 : 2 * (self % 4) + i;
            const uint16_t* source;
            std::memcpy(&source, slots[8 * m + r].bytes, sizeof source);
            pair[i] = source[c];
        }
        std::memcpy(&registers[m], pair, 4);
    }
    warp_barrier(0xffffffffu);  // rows may be written anew as soon as the instruction is done
}

uint32_t movmatrix(uint32_t pair) {
    const Slot* slots = meet(0xffffffffu, 11, &pair, sizeof pair);
    const int row = lane() / 4, column = 2 * (lane() % 4);  // of the transpose
    uint16_t elements[2];
    for (int i = 0; i < 2; ++i)
        std::memcpy(&elements[i], slots[(column + i) * 4 + row / 2].bytes + row % 2 * sizeof(uint16_t),
                    sizeof(uint16_t));
    uint32_t transposed;
    std::memcpy(&transposed, elements, sizeof transposed);
    return transposed;
}

// ---- Warpgroups --------------------------------------------------------------------------------------------------

namespace {

// The address of element (inner, column) of a factor of 16-bit elements; a left one has rows in the place of columns.
// In units of 16 bytes, 8 elements, it follows PTX's canonical layouts: rows of `width` units, 1 without swizzling, in
// which units change places by the row's number.
unsigned address_of(uint64_t descriptor, bool transposed, int inner, int column) {
    const auto bytes = [&](int bit) { return static_cast<unsigned>(descriptor >> bit & 0x3fff) << 4; };
    constexpr unsigned kWidths[] = {1, 8, 4, 2};
    const unsigned leading = bytes(16), stride = bytes(32), width = kWidths[descriptor >> 62];
    // Along a row lie columns if the factor is transposed, else inner places; rows are the other ones, 8 to a block.
    const unsigned along = transposed ? column : inner, row = transposed ? inner : column;
    unsigned address = bytes(0) + row % 8 * width * 16;
    if (width == 1)
        address += transposed ? along / 8 * stride + row / 8 * leading : along / 8 * leading + row / 8 * stride;
    else
        address += along / 8 % width * 16 + along / 8 / width * leading + row / 8 * stride;
    return (address ^ ((address >> 7 & (width - 1)) << 4)) + along % 8 * 2;
}

float read(uint64_t descriptor, bool transposed, int inner, int column, bool bfloat16) {
    uint16_t bits;
    std::memcpy(&bits, seen_by_proxy(address_of(descriptor, transposed, inner, column), 2), 2);
    return decoded(bits, bfloat16);
}

void finish(WgmmaProduct& product) {
    for (int i = 0; product.left_in_shared_memory && i < 32; ++i) {
        const int row = current->number / 32 % 4 * 16 + lane() / 4 + i / 16 * 8;
        product.left[i / 16][i % 16] = read(product.left_at, product.left_transposed, i % 16, row, product.bfloat16);
    }
    auto& all = current->accumulators;
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const auto& x) { return x.registers == product.registers; });
    const int lane_pair = lane() % 4;
    for (size_t i = 0; i < found->sums.size(); ++i) {
        const int column = static_cast<int>(i / 4 * 8 + 2 * lane_pair + i % 2);
        double products[16];
        for (int k = 0; k < 16; ++k) {
            const float right = read(product.right, product.transposed, k, column, product.bfloat16);
            products[k] = static_cast<double>(product.left[i % 4 / 2][k]) * right;
        }
        found->sums[i] = cut_off_sum(found->sums[i], products);
    }
    if (--found->products > 0) return;
    std::copy(found->sums.begin(), found->sums.end(), found->registers);
    all.erase(found);
}

void begin(const WgmmaProduct& product, int columns) {
    float* const d = product.registers;
    auto& all = current->accumulators;
    auto found = std::find_if(all.begin(), all.end(), [&](const auto& x) { return x.registers == d; });
    if (found == all.end()) found = all.insert(found, {d, std::vector<float>(d, d + columns / 2), 0});
    ++found->products;
    std::fill_n(d, columns / 2, NAN);
    current->products.push_back(product);
}

void meet_in_wgmma(int columns, uint64_t b, bool transposed, bool bfloat16, uint64_t a, bool left_transposed) {
    if (!has_wgmma()) fail("wgmma, which the device does not have");
    if (!current->shows_registers) fail("wgmma without a wgmma.fence since the last commit");
    meet_warpgroup(b ^ a << 32 ^ a >> 32, 12 + transposed + 2 * bfloat16 + 4 * left_transposed + 8 * columns);
}

}  // namespace

// The shared memory that a warpgroup's product reads, 16 bytes an eighth of a wavefront, counted for its first warp.
void count_factors(const void* by, int columns) {
    if (current->number % 128 < 8)
        for (int i = 0; i < columns / 4; ++i) accessed(by, dynamic_shared() + 16 * lane(), 16);
}

void wgmma(float* d, int columns, uint64_t a, bool left_transposed, uint64_t b, bool transposed, bool bfloat16) {
    count_factors(__builtin_return_address(0), columns + 64);
    meet_in_wgmma(columns, b, transposed, bfloat16, a, left_transposed);
    begin({{}, true, left_transposed, a, b, d, transposed, bfloat16}, columns);
}

void wgmma(float* d, int columns, const uint32_t* a, uint64_t b, bool transposed, bool bfloat16) {
    count_factors(__builtin_return_address(0), columns);
    meet_in_wgmma(columns, b, transposed, bfloat16, 0, false);
    const Slot* slots = meet(0xffffffffu, 12, a, 4 * sizeof(uint32_t));
    WgmmaProduct product{{}, false, false, 0, b, d, transposed, bfloat16};
    for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half) {
            uint16_t bits;
            const unsigned char* const registers = slots[lane() / 4 * 4 + k % 8 / 2].bytes;
            std::memcpy(&bits, registers + 4 * (half + k / 8 * 2) + k % 2 * 2, sizeof bits);
            product.left[half][k] = decoded(bits, bfloat16);
        }
    begin(product, columns);
}

void wgmma_fence() { current->shows_registers = true; }

void wgmma_commit() {
    current->shows_registers = false;
    current->committed_products.emplace_back();
    current->committed_products.back().swap(current->products);
}

void wgmma_wait(int pending) {
    auto& groups = current->committed_products;
    while (groups.size() > static_cast<size_t>(pending)) {
        for (WgmmaProduct& product : groups.front()) finish(product);
        groups.erase(groups.begin());
    }
}

}  // namespace emulation
