// How passes of chunks side by side divide their work, what it should take, and the launches of a walk.
//
// None of the numbers here was fitted to a measurement of these kernels: see `WalkCosts`.
#pragma once

#include <algorithm>

#include "walk.cuh"

namespace fairseq_fastweights {

// Cycles of an H200, predicted: a prototype's local stage took 3,500 cycles of a multiprocessor for a chunk, and its walk
// without outputs 2,500 (64 keys) and 3,500 (128) for a chunk of 64 steps with one block on a multiprocessor; others are
// these by the ratio of their products.
struct WalkCosts {
    double local;          // of a multiprocessor for a chunk, and for each 64 keys
    double chain, of_key;  // of a chunk of a walk, and for each key of a warp
    double tile;           // of the last stage: of a multiprocessor for a chunk, and for each 64 keys and 64 values
};
constexpr WalkCosts kForwardCosts{3000, 1500, 16, 3500}, kBackwardCosts{4500, 2600, 34, 12000};
constexpr double kFreeWarps = 8;     // of a multiprocessor, that do not slow one another down
constexpr double kClearMargin = 1.2;  // by which these must be predicted to be faster than blocks that do all in one chain

struct WalkPlan {
    int keys, parts, strips, blocks, stages;  // keys of a warp; warps that share a strip; strips of a block
    int slice, segment;                       // chunks of a slice, and of a segment of it; 0: there is no plan
    int key_part, value_part;                 // that the last stage takes at once
    size_t shared, last_shared;               // bytes of the walk's block, and of the last stage's
    size_t bytes;                             // of the workspace
    double cycles;
    int segments_of(int chunks) const { return (chunks + segment - 1) / segment; }
};

// Cycles of a launch of so many walks' blocks, of so many chunks each.
inline double cycles_of_walks(const WalkPlan& plan, const Device& device, const WalkCosts& costs, int64_t blocks, int chunks) {
    const int warps = plan.strips * plan.parts;
    int at_once = static_cast<int>((static_cast<size_t>(device.limit) + 1024) / (plan.shared + 1024));
    if (at_once > 8 / warps) at_once = 8 / warps > 0 ? 8 / warps : 1;  // 255 registers to a thread
    const int64_t wave = static_cast<int64_t>(at_once) * device.processors, rest = blocks % wave;
    const auto together = [&](double n) { return n * warps > kFreeWarps ? n * warps / kFreeWarps : 1.0; };
    const double waves = blocks / wave * together(at_once) +
                         (rest == 0 ? 0 : together((rest + device.processors - 1) / device.processors));
    return kLaunch + chunks * waves * (costs.chain + costs.of_key * plan.keys);
}

// Bytes of the workspace: a slice, where it has segments what these carry, and backwards a state between slices.
template <typename F>
size_t walk_bytes(const Sizes& sizes, const WalkPlan& plan, bool backward) {
    const size_t heads = static_cast<size_t>(sizes.batch) * sizes.heads, segments = plan.segments_of(plan.slice);
    const size_t state = static_cast<size_t>(sizes.key_dim) * sizes.value_dim * sizeof(float);
    size_t bytes = 0;
    lay_out<F>(sizes, 0, plan.slice, backward, nullptr, bytes);
    if (segments > 1) bytes += up_to_256(heads * segments * (state + sizes.key_dim * sizes.key_dim * sizeof(float)));
    return bytes + (backward ? up_to_256(heads * state) : 0);
}

// The plan that should take the fewest cycles. measure(keys, values) gives the bytes of the last stage's block.
template <typename T, typename Measure>
WalkPlan find_walk(const Sizes& sizes, const Device& device, bool backward, Measure measure) {
    const WalkCosts& costs = backward ? kBackwardCosts : kForwardCosts;
    WalkPlan best{};
    const int64_t heads = static_cast<int64_t>(sizes.batch) * sizes.heads;
    const int chunks = (sizes.time + kSide - 1) / kSide;
    const bool keeps = kept_states(sizes) > 0;
    if (heads == 0 || chunks == 0 || !device.asked.allows_walk()) return best;
    if (keeps && sizes.interval % kSide != 0) return best;

    WalkPlan plan{};
    plan.keys = 16;
    while (plan.keys < 128 && plan.keys < sizes.key_dim) plan.keys *= 2;
    plan.parts = 1;
    while (plan.keys * plan.parts < sizes.key_dim) plan.parts *= 2;
    if (plan.parts > 4) return best;
    for (int widest = kWidest; widest >= 16 && plan.last_shared == 0; widest /= 2) {
        plan.key_part = widest < round_up(sizes.key_dim, 16) ? widest : round_up(sizes.key_dim, 16);
        plan.value_part = widest < round_up(sizes.value_dim, 16) ? widest : round_up(sizes.value_dim, 16);
        const size_t bytes = measure(plan.key_part, plan.value_part);
        if (bytes <= static_cast<size_t>(device.limit)) plan.last_shared = bytes;
    }
    if (plan.last_shared == 0) return best;

    // Slices as long as leave the workspace a part of the bytes of inputs and outputs, backwards with their gradients, in
    // whole intervals between states that are kept.
    const int whole = backward ? (keeps ? sizes.interval / kSide : chunks) : 1;
    size_t of_chunk = 0;
    lay_out<Factor<T>>(sizes, 0, 1, backward, nullptr, of_chunk);
    const double budget = 2.0 * heads * sizes.time * (sizes.key_dim + sizes.value_dim) * sizeof(T) * (backward ? 0.6 : 1.0);
    int most = static_cast<int>(budget / of_chunk) / whole * whole;
    if (most < whole) most = whole;
    if (device.asked.slice > 0) most = round_up(device.asked.slice, whole);
    const int slices = (chunks + most - 1) / most;
    plan.slice = round_up((chunks + slices - 1) / slices, whole);
    if (plan.slice > chunks) plan.slice = chunks;

    const int strips = round_up(sizes.value_dim, 16) / 16;
    for (plan.strips = 4; plan.strips >= 1; plan.strips /= 2) {
        if (plan.strips * plan.parts > kMostWarps || (plan.strips > 1 && plan.strips >= 2 * strips)) continue;
        if (device.asked.columns > 0 && device.asked.columns != plan.strips * 16) continue;
        plan.blocks = (strips + plan.strips - 1) / plan.strips;
        for (plan.stages = 2; plan.stages >= 1; --plan.stages) {
            if (device.asked.stages > 0 && device.asked.stages != plan.stages) continue;
            plan.shared = WalkLayout<T>(Carver(nullptr), backward, plan.stages, plan.keys * plan.parts, plan.strips, plan.parts).bytes;
            if (plan.shared > static_cast<size_t>(device.limit)) continue;
            const int identity = (sizes.key_dim + 16 * plan.strips - 1) / (16 * plan.strips);
            for (int count = 1; count <= plan.slice; count *= 2) {
                if (device.asked.segments > 0 && count != 1) break;
                if (count > 1 && plan.slice < 4 * count) break;
                const int divided = device.asked.segments > 0 ? std::min(device.asked.segments, plan.slice) : count;
                plan.segment = (plan.slice + divided - 1) / divided;
                const int segments = plan.segments_of(plan.slice);
                double cycles = cycles_of_walks(plan, device, costs, heads * segments * plan.blocks, plan.segment);
                if (segments > 1)
                    cycles += cycles_of_walks(plan, device, costs, heads * (segments - 1) * (plan.blocks + identity), plan.segment) +
                              kCarry + kCarryOver * segments;
                if (backward) {
                    const int length = whole < plan.slice ? whole : plan.slice, walks = (plan.slice + length - 1) / length;
                    cycles += cycles_of_walks(plan, device, kForwardCosts, heads * walks * plan.blocks, length);
                }
                const double side_by_side = static_cast<double>(heads) * plan.slice / device.processors;
                const double keys = (sizes.key_dim + 63) / 64, values = (sizes.value_dim + 63) / 64;
                cycles += 2 * kLaunch + side_by_side * (costs.local * (2 + keys) / 3 + costs.tile * keys * values);
                plan.cycles = cycles * slices * (device.asked.walk > 0 ? 1e-3 : kClearMargin);
                if (plan.cycles < best.cycles || best.slice == 0) {
                    best = plan;
                    best.bytes = walk_bytes<Factor<T>>(sizes, plan, backward);
                }
            }
        }
    }
    return best;
}

// What a plan says to those who ask.
inline ChunkedPlan describe_walk(const WalkPlan& plan, const Sizes& sizes, int limit) {
    const int at_once = static_cast<int>((static_cast<size_t>(limit) + 1024) / (plan.shared + 1024));
    return {kSide, plan.strips * 16, plan.blocks, plan.stages, plan.strips * plan.parts * kWarp,
            plan.segments_of(plan.slice), at_once < 4 ? at_once : 4, static_cast<int64_t>(plan.shared), plan.cycles};
}

template <typename T, bool Backward>
cudaError_t launch_walks(const WalkPlan& plan, Walks<Factor<T>>& w, cudaStream_t stream) {
    const auto with = [&](auto keys) {
        const int identity = w.probe ? (w.sizes.key_dim + 16 * w.strips - 1) / (16 * w.strips) : 0;
        const dim3 grid(static_cast<unsigned>(w.slice.heads) * (w.blocks + identity), w.count - w.probe);
        const size_t shared = WalkLayout<T>(Carver(nullptr), Backward, w.stages, plan.keys * plan.parts, w.strips, plan.parts).bytes;
        return launch(walk<T, decltype(keys)::value, Backward>, grid, dim3(w.strips * plan.parts * kWarp), shared, stream, w);
    };
    switch (plan.keys) {
        case 16: return with(std::integral_constant<int, 16>());
        case 32: return with(std::integral_constant<int, 32>());
        case 64: return with(std::integral_constant<int, 64>());
        default: return with(std::integral_constant<int, 128>());
    }
}

// The walk of a slice that leaves results, `first` being the state that it starts from; in segments where there are several.
template <typename T, bool Backward>
cudaError_t launch_walk(const WalkPlan& plan, Walks<Factor<T>>& w, const void* first, unsigned char* room, cudaStream_t stream) {
    w.length = plan.segment;
    w.count = plan.segments_of(w.slice.chunks);
    w.first = {static_cast<float*>(const_cast<void*>(first)), 1, 0};
    if (w.count > 1) {
        Segments segments{w.count, w.length, w.slice.heads, 0, w.sizes.key_dim * w.sizes.value_dim,
                          w.sizes.key_dim * w.sizes.key_dim, nullptr, nullptr};
        segments.place(room);
        Walks<Factor<T>> probe = w;
        probe.probe = 1;
        probe.record = 0;
        probe.kept = nullptr;
        probe.passed = segments.passed;
        const WalkStates all{segments.states, 1, w.slice.heads};
        probe.ends = all;
        cudaError_t error = launch_walks<T, Backward>(plan, probe, stream);
        if (error == cudaSuccess) error = launch_carry_transformed(segments, w.sizes, first, Backward, stream);
        if (error != cudaSuccess) return error;
        w.first = w.others = all;
    }
    return launch_walks<T, Backward>(plan, w, stream);
}

}  // namespace fairseq_fastweights
