// How a chunked pass divides its work: plan, predicted cost, and the launches that both passes have in common.
#pragma once

#include <algorithm>
#include <cmath>

#include "../carried_states.cuh"
#include "state_passing.cuh"

namespace fairseq_fastweights {

// Cycles of an H200, fitted to the times of each kernel in 12 shapes of the benchmarks, in bfloat16
// (docs/gpu-history.md). `parts` are keys times values over 64 * 64; for chunk-parallel kernels a multiprocessor's
// cycles for a chunk.
struct Costs {
    double local, local_of_keys;           // for a chunk, and for each 64 keys (with decays of values, keys and values)
    double chain, of_key;                  // of state passing, for a chunk, and for each key of a warp
    double last, last_of_part, of_values;  // of the last kernel, for each part, and for each 64 values
};
constexpr Costs kCosts[7][2] = {
    // forwards, backwards
    {{0, 0, 600, 37, 1700, 2000, 0}, {0, 0, 600, 30, 4100, 5600, 0}},               // sum
    {{380, 0, 650, 37, 3400, 2100, 0}, {380, 0, 750, 27, 11000, 8700, 0}},          // gated
    {{2400, 900, 2700, 18, 1600, 2000, 0}, {3700, 2300, 400, 85, 7200, 6400, 0}},   // delta
    {{4000, 860, 2800, 17, 3100, 2100, 0}, {5900, 2300, 480, 93, 17000, 9200, 0}},  // gated delta
    // Decays of keys alone were not measured: where both sides have a cost, half of that of keys and values.
    {{1600, 7000, 320, 40, 1800, 2100, 0}, {2300, 9900, 320, 30, 20000, 12000, 0}},
    {{7200, 15000, 2000, 27, 1750, 2100, 0}, {6900, 20000, 4900, 70, 44000, 31000, 0}},      // delta rules
    {{3200, 7000, 320, 40, 1100, 2050, 5700}, {4600, 9900, 320, 30, 22000, 23000, 19000}}};  // and of values
constexpr const Costs& costs_of(const RulePass& pass, bool backward) {
    return kCosts[pass.decays_values ? 6 : pass.decays ? 4 + pass.is_delta : 2 * pass.is_delta + pass.gated][backward];
}
constexpr double kStatePassingStart = 3900;  // of state passing, before the first chunk
constexpr double kFreeWarps = 4.5;           // of a multiprocessor that do not slow one another down
constexpr double kCarryMatrix = 2300;        // for each segment, where its transition is a matrix of 64 keys
// Times as long as in bfloat16: by float32 or float16; without and with the delta rule; forwards and backwards.
constexpr double kOtherTypes[2][2][2] = {{{2.3, 2.0}, {2.7, 2.8}}, {{1.1, 1.3}, {1.3, 1.7}}};
// A pass's memory beyond inputs, outputs and gradients, in parts of their bytes: the workspace, the kept states and,
// forwards, the final ones. Heads of less than 64 keys or values may have as much as those of 64, since matrices of a
// chunk's steps are as large as theirs, but no more than kMostPart. A workspace may always have kLeastPart.
constexpr double kPart = 0.5, kMostPart = 2, kLeastPart = 0.25;
constexpr int kMostChunks = 65535;  // of a slice: the grid's second dimension

struct PassPlan : StatePassingShape {
    RulePass pass;
    int heads, slice, segment;   // a slice's heads and chunks (0: there is no plan); a segment's chunks
    int key_part, value_part;    // that the last kernel takes at once
    size_t shared, last_shared;  // bytes of a block of state passing, and of the last kernel
    size_t bytes;                // of the workspace
    double cycles;
    int segments_of(int chunks) const { return divide_up(chunks, segment); }
};

// The transition of a segment: the floats by which it multiplies a state (a matrix, decays of keys and values, a gate
// or, for 0, nothing).
inline int passed_floats(const RulePass& pass, const Sizes& sizes) {
    if (pass.is_delta) return sizes.key_dim * sizes.key_dim;
    return pass.decays ? sizes.key_dim + sizes.value_dim : pass.gated;
}

// Bytes of the workspace: a slice, the states and transitions of its segments, and backwards a state between slices of
// time.
template <typename C>
size_t workspace_bytes(const Sizes& sizes, const PassPlan& plan) {
    const size_t state = sizeof(float) * plan.heads * sizes.key_dim * sizes.value_dim,
                 passed = sizeof(float) * plan.heads * passed_floats(plan.pass, sizes),
                 segments = plan.segments_of(plan.slice);
    size_t bytes = 0;
    lay_out<C>(sizes, 0, plan.heads, 0, plan.slice, plan.pass, nullptr, bytes);
    if (segments > 1) bytes += up_to_256(segments * (state + passed));
    return bytes + (plan.pass.backward && plan.slice * kChunk < sizes.time ? up_to_256(state) : 0);
}

// Bytes that a slice may take.
template <typename T>
double room_for_slices(const Sizes& sizes, const Device& device, const RulePass& pass) {
    const double heads = static_cast<double>(sizes.batch) * sizes.heads, state = sizes.key_dim * sizes.value_dim;
    // Bytes of inputs, outputs and gradients, with so many keys and values at least.
    const auto passed = [&](int least) {
        const double keys = std::max(sizes.key_dim, least), values = std::max(sizes.value_dim, least);
        return 2 * heads * sizes.time * sizeof(T) *
               ((pass.decays ? 3 : 2) * keys + (pass.decays_values ? 3 : 2) * values + (pass.is_delta || pass.gated));
    };
    // Kept states, and the final ones or those between slices; with few heads also the states and transitions of
    // segments.
    double carried = heads * (kept_states(sizes) + 1) * state;
    if (4 * heads <= device.processors)
        carried += std::min<double>(device.processors, heads * sizes.time / (4 * kChunk)) *
                   (state + passed_floats(pass, sizes));
    const double gradients = pass.backward ? 0 : passed(1) / 2;  // that are not there yet
    return std::max(kLeastPart * passed(1),
                    std::min(kPart * passed(64), kMostPart * passed(1)) + gradients - sizeof(float) * carried);
}

// The largest slice for which there is room: fewer chunks, in whole intervals between kept states; where one interval
// is too much, fewer heads.
template <typename T>
void find_slices(PassPlan& plan, const Sizes& sizes, const Device& device) {
    const int heads = sizes.batch * sizes.heads, chunks = divide_up(sizes.time, kChunk),
              requested = device.requested.slice;
    const int whole = plan.pass.backward ? std::min(chunks, interval_of(sizes, kChunk) / kChunk) : 1;
    size_t of_chunk = 0;
    lay_out<Computed<T>>(sizes, 0, 1, 0, 1, plan.pass, nullptr, of_chunk);
    const double room = room_for_slices<T>(sizes, device, plan.pass) / of_chunk;  // chunks of all heads
    const int fit = std::min(room / heads, static_cast<double>(kMostChunks));
    const int most = requested > 0 ? round_up(requested, whole) : std::max(whole, fit / whole * whole);
    plan.slice = std::min(chunks, round_up(divide_up(chunks, divide_up(chunks, most)), whole));
    const int fewest = std::min(heads, device.processors / 2);  // or the device would not be full
    plan.heads = requested > 0 ? heads : std::clamp(static_cast<int>(room / plan.slice), fewest, heads);
    plan.heads = divide_up(heads, divide_up(heads, plan.heads));
}

// Cycles of a slice. `length`: chunks between kept states.
inline double cycles_of_slice(const PassPlan& plan, const Sizes& sizes, const Device& device, int length) {
    const auto [is_delta, gated, decays, of_both, backward] = plan.pass;
    const Costs& costs = costs_of(plan.pass, backward);
    const int warps = plan.value_tiles * plan.key_parts, segments = plan.segments_of(plan.slice);
    const int at_once = std::min(static_cast<int>((static_cast<size_t>(device.limit) + 1024) / (plan.shared + 1024)),
                                 kMostWarps / warps);  // a thread may take 255 registers
    // A launch of state passing with so many blocks of so many chunks each; blocks of a head's columns.
    const auto walks = [&](const Costs& of, int64_t blocks, int chunks) {
        const int64_t wave = static_cast<int64_t>(at_once) * device.processors, rest = blocks % wave;
        const auto together = [&](int64_t n) { return std::max(1.0, n * warps / kFreeWarps); };
        const double waves = blocks / wave * together(at_once) +
                             (rest == 0 ? 0 : together((rest + device.processors - 1) / device.processors));
        return kLaunch + waves * (kStatePassingStart + chunks * (of.chain + of.of_key * plan.keys_of_warp));
    };
    const auto blocks_of = [&](int columns) { return int64_t{plan.heads} * divide_up(columns, 16 * plan.value_tiles); };
    const int64_t of_values = blocks_of(sizes.value_dim), of_identity = is_delta ? blocks_of(sizes.key_dim) : 0;
    double cycles = walks(costs, of_values * segments, plan.segment);
    if (segments > 1)
        cycles += kCarry + (is_delta ? kCarryMatrix * sizes.key_dim / 64 : kCarryOver) * segments +
                  walks(costs, (of_values + of_identity) * (segments - 1), plan.segment);
    if (backward)
        cycles +=
            walks(costs_of(plan.pass, false), of_values * divide_up(plan.slice, length), std::min(length, plan.slice));
    const double chunks = std::max(1.0, static_cast<double>(plan.heads) * plan.slice / device.processors);
    const double keys = sizes.key_dim / 64.0, values = sizes.value_dim / 64.0;
    const int sides = of_both ? 2 : 1;  // launches of the intra-chunk kernel, and backwards of the last one
    if (is_delta || gated || decays)
        cycles += sides * kLaunch + chunks * (costs.local + costs.local_of_keys * (of_both ? keys + values : keys));
    return cycles + (backward ? sides : 1) * kLaunch +
           chunks * (costs.last + costs.last_of_part * keys * values + costs.of_values * std::ceil(values));
}

// The plan with the fewest predicted cycles. `Last` is the last kernel, a block of which has bytes<T>(pass, keys,
// values) of shared memory if it takes so many at once.
template <typename T, typename Last>
PassPlan find_plan(const Sizes& sizes, const Device& device, const RulePass& pass) {
    PassPlan best{}, plan{};
    plan.pass = pass;
    const int heads = sizes.batch * sizes.heads, chunks = divide_up(sizes.time, kChunk);
    if (heads == 0 || (kept_states(sizes) > 0 && sizes.interval % kChunk != 0)) return best;

    plan.keys_of_warp = 16;
    while (plan.keys_of_warp < kMostKeys<T> && plan.keys_of_warp < sizes.key_dim) plan.keys_of_warp *= 2;
    plan.key_parts = divide_up(sizes.key_dim, plan.keys_of_warp);
    if (plan.key_parts > kMostWarps) return best;
    for (int widest = kWidest; widest >= 16 && plan.last_shared == 0; widest /= 2) {
        plan.key_part = std::min(widest, round_up(sizes.key_dim, 16));
        plan.value_part = std::min(widest, round_up(sizes.value_dim, 16));
        if (pass.decays_values) plan.key_part = plan.value_part = std::max(plan.key_part, plan.value_part);
        const size_t bytes = Last::template bytes<T>(pass, plan.key_part, plan.value_part);
        if (bytes <= static_cast<size_t>(device.limit)) plan.last_shared = bytes;
    }
    if (plan.last_shared == 0) return best;
    find_slices<T>(plan, sizes, device);
    const int slices = divide_up(chunks, plan.slice) * divide_up(heads, plan.heads);

    const auto weigh = [&](int segments) {
        plan.segment = divide_up(plan.slice, segments);
        plan.cycles = slices * (kRounded<T> ? 1 : kOtherTypes[sizeof(T) == 2][pass.is_delta][pass.backward]) *
                      cycles_of_slice(plan, sizes, device, interval_of(sizes, kChunk) / kChunk);
        if (best.slice != 0 && plan.cycles >= best.cycles) return;
        best = plan;
        best.bytes = workspace_bytes<Computed<T>>(sizes, plan);
    };
    for (plan.value_tiles = 4; plan.value_tiles >= 1; plan.value_tiles /= 2) {
        if (plan.value_tiles * plan.key_parts > kMostWarps ||
            16 * plan.value_tiles >= 2 * round_up(sizes.value_dim, 16))
            continue;
        if (device.requested.columns > 0 && device.requested.columns != plan.value_tiles * 16) continue;
        for (plan.stages = kMostStages; plan.stages >= 1; plan.stages /= 2) {
            if (device.requested.stages > 0 && device.requested.stages != plan.stages) continue;
            plan.shared =
                StatePassingLayout<T>(SharedAllocator(nullptr), pass.is_delta, pass.backward, pass.decays, plan).bytes;
            if (plan.shared > static_cast<size_t>(device.limit)) continue;
            if (device.requested.segments > 0)
                weigh(std::min(device.requested.segments, plan.slice));
            else
                for (int count = 1; count == 1 || plan.slice >= 4 * count; count *= 2) weigh(count);
        }
    }
    return best;
}

// State `index` of contiguous ones; null stays null.
inline float* nth_state(const void* states, const Sizes& sizes, int64_t index) {
    float* const all = static_cast<float*>(const_cast<void*>(states));
    return all == nullptr ? nullptr : all + index * sizes.key_dim * sizes.value_dim;
}

// The arguments of state passing that all launches for a slice share.
template <typename T, typename C, typename Params>
StatePassing<C> state_passing_of(const Params& p, const PassPlan& plan, const Slice<C>& slice) {
    StatePassing<C> w{{plan}, slice};
    w.sizes = p.sizes;
    w.keys = plan.pass.decays ? slice.template sequence_of<T>(slice.decayed_k, slice.key_rows, p.sizes) : p.k;
    if (plan.pass.decays && plan.pass.is_delta)
        w.erase = slice.template sequence_of<T>(slice.decayed_erase, slice.key_rows, p.sizes);
    w.values = plan.pass.decays_values ? slice.template sequence_of<T>(slice.decayed_v, slice.columns, p.sizes) : p.v;
    w.record = 1;
    w.pass = plan.pass;
    return w;
}

// State passing of a slice from `first` on, a state for each of its heads, with results; in segments if the plan has
// several, whose states and transitions are in `room`.
template <typename T>
cudaError_t pass_states_of_slice(const PassPlan& plan, StatePassing<Computed<T>>& w, float* first, unsigned char* room,
                                 cudaStream_t stream) {
    w.length = plan.segment;
    w.count = plan.segments_of(w.slice.chunks);
    w.first = {first, 1, 0};
    if (w.count > 1) {
        Sizes sizes = w.sizes;
        sizes.batch = 1, sizes.heads = w.slice.heads;
        float* const states = reinterpret_cast<float*>(room);  // the segments' ends from zeros, then their starts
        float* const passed = nth_state(states, sizes, int64_t{w.count} * w.slice.heads);
        const BoundaryStates all{states, 1, w.slice.heads};
        StatePassing<Computed<T>> probe = w;
        probe.probe = 1, probe.record = 0;
        probe.kept = nullptr;
        probe.passed = passed_floats(plan.pass, sizes) == 0 ? nullptr : passed;
        probe.ends = all;
        cudaError_t error = launch_state_passing<T>(probe, stream);
        if (error != cudaSuccess) return error;
        const auto carry = [&](const auto& by) {
            return launch_carry(w.count, states, by, sizes, first, plan.pass.backward, stream);
        };
        error = plan.pass.is_delta ? carry(PassedMatrices{probe.passed})
                : plan.pass.decays ? carry(PassedDecays<float>{probe.passed})
                                   : carry(PassedGates{probe.passed});
        if (error != cudaSuccess) return error;
        w.first = w.others = all;
    }
    return launch_state_passing<T>(w, stream);
}

template <typename Params>
RulePass pass_of(const Params& p) {
    const bool values = p.log_value_decay.data != nullptr;
    return {p.is_delta != 0, p.log_gate.data != nullptr,
            values || p.erase.data != nullptr || p.log_key_decay.data != nullptr, values,
            std::is_same<Params, RuleBackward>::value};
}

// The public answers about a pass whose last kernel is `Last`.
template <typename Last>
ChunkedPlan plan_of_pass(const Sizes& sizes, int32_t dtype, const RulePass& pass, int limit) {
    return with_type(dtype, ChunkedPlan{}, [&](auto zero) {
        const PassPlan plan = find_plan<decltype(zero), Last>(sizes, Device{limit}, pass);
        if (plan.slice == 0) return ChunkedPlan{};
        const int columns = plan.value_tiles * 16, threads = plan.value_tiles * plan.key_parts * kWarp,
                  segments = plan.segments_of(plan.slice);
        const int64_t shared = plan.shared;
        return ChunkedPlan{columns,    divide_up(sizes.value_dim, columns), plan.stages, threads, segments, shared,
                           plan.cycles};
    });
}
template <typename Last, typename Params>
size_t workspace_of_pass(const Params& p) {
    return with_type(p.v.dtype, size_t{0},
                     [&](auto zero) { return find_plan<decltype(zero), Last>(p.sizes, Device(), pass_of(p)).bytes; });
}

// Runs a pass: the intra-chunk kernel, then Last::run(arguments, plan, state passing, the workspace behind the slice,
// stream), for slices of the same heads in the order of time or, backwards, in reverse.
template <typename Last, typename Params>
cudaError_t run_pass(const Params& p, cudaStream_t stream) {
    if (p.sizes.batch == 0) return cudaSuccess;
    return with_type(p.v.dtype, cudaErrorInvalidValue, [&](auto zero) {
        using T = decltype(zero);
        const PassPlan plan = find_plan<T, Last>(p.sizes, Device(), pass_of(p));
        if (plan.slice == 0) return cudaErrorInvalidValue;
        const int heads = p.sizes.batch * p.sizes.heads, chunks = divide_up(p.sizes.time, kChunk);
        const int slices = divide_up(chunks, plan.slice);
        unsigned char* const workspace = static_cast<unsigned char*>(p.workspace);
        for (int i = 0; i < divide_up(heads, plan.heads) * slices; ++i) {
            const int head = i / slices * plan.heads,
                      begin = (plan.pass.backward ? slices - 1 - i % slices : i % slices) * plan.slice;
            size_t bytes = 0;
            const auto slice = lay_out<Computed<T>>(p.sizes, head, std::min(plan.heads, heads - head), begin,
                                                    std::min(plan.slice, chunks - begin), plan.pass, workspace, bytes);
            cudaError_t error = launch_intra_chunk<T>(intra_chunk_inputs(p), plan.pass, slice, stream);
            if (error == cudaSuccess)
                error = Last::template run<T>(p, plan, state_passing_of<T>(p, plan, slice), workspace + bytes, stream);
            if (error != cudaSuccess) return error;
        }
        return cudaSuccess;
    });
}

}  // namespace fairseq_fastweights
