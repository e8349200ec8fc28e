// The recurrent forward pass of both families: one pass over the steps with the state in registers.
//
// A stage of `steps` steps is converted in shared memory while the next one's copies are in flight. Global memory is
// read and written once: inputs, outputs, and a state every `interval` steps. V is split over blocks where one block of
// kMostWarps warps does not cover it, or to fill the device; each block of a head reads q and k. With decays by
// dimension, time is split too where heads are few.
#pragma once

#include "../carried_states.cuh"
#include "tile.cuh"

namespace fairseq_fastweights {

// ---- Segments of time --------------------------------------------------------------------------------------------
// Long sequences of few heads, with decays by dimension: time is divided among blocks in segments, so that the device
// is full.
//
// The effect of a segment is S_end = (F Z^T) * S_start + C, with F and Z the products of its decays. A first launch
// computes F, Z and C (a sweep from zeros) for all segments at once; a second carries the state from segment to
// segment; the third computes results, each segment from its own start. The way back is the same: dS_start = (F Z^T) *
// dS_end + C', where C' comes from a sweep back through q and dy alone.
//
// The chunked kernels divide sequences of all rules (chunked/passes.cuh).

// The purpose of a launch of the forward kernel: results, or a segment's effect on a zero state, or on a zero gradient.
enum Purpose { kResults, kStateOfSegment, kGradientOfSegment };

struct TimeSegments {
    int count;     // 1: the sequence is not divided
    int length;    // in steps, of all but the last; a multiple of the interval between kept states, if any are kept
    void* states;  // (segment, head, key_dim, value_dim): C, then the segments' starts
    void* passed;  // (segment, head, key_dim + value_dim): F and Z

    DEVICE int begin(int segment) const { return segment * length; }
    DEVICE int steps(int segment, int time) const { return min(length, time - begin(segment)); }
};

constexpr int kShortestSegment = 128;

// Divides if `active` warps, or blocks, leave most of a device idle that is busy with `capacity` of them. The first
// launch costs about half of the last one, so that two segments would gain little.
inline TimeSegments find_time_segments(const Sizes& sizes, int64_t active, int64_t capacity) {
    TimeSegments segments{1, sizes.time, nullptr, nullptr};
    const int64_t wanted = capacity / active, most = sizes.time / kShortestSegment;
    const int64_t count = wanted < most ? wanted : most;
    if (count < 3) return segments;
    const int unit = kept_states(sizes) ? sizes.interval : 1;
    const int64_t length = (sizes.time + count - 1) / count, units = (length + unit - 1) / unit;
    if (units * unit >= sizes.time) return segments;
    segments.length = static_cast<int>(units * unit);
    segments.count = (sizes.time + segments.length - 1) / segments.length;
    return segments;
}

template <typename A>
size_t bytes_of_segments(const TimeSegments& segments, const Sizes& sizes) {
    if (segments.count == 1) return 0;
    const size_t of_head = static_cast<size_t>(sizes.key_dim) * sizes.value_dim + sizes.key_dim + sizes.value_dim;
    return sizeof(A) * segments.count * sizes.batch * sizes.heads * of_head;
}

template <typename A>
void place_segments(TimeSegments& segments, const Sizes& sizes, void* workspace) {
    segments.states = workspace;
    segments.passed = static_cast<A*>(workspace) + static_cast<int64_t>(segments.count) * sizes.batch * sizes.heads *
                                                       sizes.key_dim * sizes.value_dim;
}

template <typename A>
cudaError_t carry_segments(const TimeSegments& segments, const Sizes& sizes, const void* first, bool reverse,
                           cudaStream_t stream) {
    return launch_carry(segments.count, static_cast<A*>(segments.states),
                        PassedDecays<A>{static_cast<const A*>(segments.passed)}, sizes, first, reverse, stream);
}

// ---- The pass over the steps -------------------------------------------------------------------------------------

struct ForwardOffsets : Offsets {
    int table, raw[kDy], rows[kDy], gate, write, out;
    __host__ __device__ ForwardOffsets(const RuleForward& call, int steps, int keys, int values, int element) {
        table = take(kInputs * sizeof(Source));
        UNROLL_FOR (int i = 0; i < kDy; ++i) {
            const int width = has_key_dim(i) ? keys : values;
            const Sequence& input = forward_input(call, i);
            raw[i] = take(input.data ? steps * ((width * bytes_of(input.dtype) + 15) & ~15) : 0);
            rows[i] = take((i == kQ || i == kE) && !input.data ? 0 : steps * width * element);
        }
        gate = take(steps * element);
        write = take(steps * element);
        out = take(call.out.data ? steps * values * element : 0);
    }
};

// For kGradientOfSegment k and v are q and dy, and time runs backwards.
template <class Tile, int M, Purpose P>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    recurrent_forward(const RuleForward call, const int stage, const TimeSegments segments) {
    using A = typename Tile::A;
    constexpr int R = Tile::kRows, C = Tile::kColumns, keys = Tile::kKeys;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Sizes& sizes = call.sizes;
    const ThreadCoord<Tile> place;
    const int warps = blockDim.x / kWarp, values = Tile::padded(warps);
    const int first = blockIdx.y * warps * Tile::kWarpValues;
    const int columns = min(warps * Tile::kWarpValues, sizes.value_dim - first);
    const int batch = blockIdx.x / sizes.heads, head = blockIdx.x % sizes.heads;
    const ForwardOffsets at(call, stage, keys, values, sizeof(A));
    const auto rows = [&](int input) { return reinterpret_cast<A*>(memory + at.rows[input]); };
    Source* const table = reinterpret_cast<Source*>(memory + at.table);
    A* const gates = reinterpret_cast<A*>(memory + at.gate);
    A* const writes = reinterpret_cast<A*>(memory + at.write);
    A* const outs = reinterpret_cast<A*>(memory + at.out);

    constexpr bool decays = decays_keys(M), results = P == kResults, back = P == kGradientOfSegment;
    // The gradient at the first segment's start is not needed.
    const int segment = divides_time(M) ? blockIdx.z + (back ? 1 : 0) : 0;
    const int begin = segments.begin(segment), total = segments.steps(segment, sizes.time);
    const int first_step = back ? begin + total - 1 : begin;

    unsigned inputs = (results ? 1u << kQ : 0u) | 1u << kK | 1u << kV;
    if (decays && call.log_key_decay.data) inputs |= 1u << kF;
    if (M == kBoth && call.log_value_decay.data) inputs |= 1u << kZ;
    if (M == kKeyDelta && call.erase.data) inputs |= 1u << kE;
    UNROLL_FOR (int i = 0; i < kDy; ++i) {
        if (threadIdx.x != i || !(inputs >> i & 1)) continue;
        const bool key = has_key_dim(i);
        table[i] = make_source(forward_input(call, i), batch, head, key ? 0 : first, key ? sizes.key_dim : columns,
                               key ? keys : values, at.raw[i], at.rows[i], i == kF || i == kZ);
        table[i].from += first_step * table[i].stride;
        if (back) table[i].stride = -table[i].stride;
    }
    if (decays && !call.log_key_decay.data)
        for (int i = threadIdx.x; i < stage * keys; i += blockDim.x) rows(kF)[i] = A(1);
    const A* const erase_rows = M == kKeyDelta && call.erase.data ? rows(kE) : rows(kK);
    const Gate<A> gate(call.log_gate, batch, head), beta(call.beta, batch, head);
    __syncthreads();

    A gate_ahead{}, beta_ahead{};
    const auto start = [&](int time) {
        const int steps = min(stage, total - time);
        copy_inputs(table, inputs, memory, time, steps);
        if constexpr (has_gate(M)) gate_ahead = gate.load(time, steps, A(0));
        if constexpr (is_delta(M)) beta_ahead = beta.load(time, steps, A(1));
    };
    const auto convert = [&](int time) {
        const int steps = min(stage, total - time);
        convert_inputs<A>(table, inputs, memory, time, steps);
        if ((has_gate(M) || is_delta(M)) && threadIdx.x < steps) {
            gates[threadIdx.x] = exponential(gate_ahead);
            writes[threadIdx.x] = is_delta(M)                       ? beta_ahead
                                  : M == kScalar && call.complement ? one_minus_exponential(gate_ahead)
                                                                    : A(1);
        }
    };

    struct Operands {
        A q[R], k[R], e[R], f[R], v[C], z[C], gate, write;
    };
    const auto load = [&](int s) {
        Operands x;
        if constexpr (results) read_keys<Tile>(x.q, rows(kQ) + s * keys, place);
        read_keys<Tile>(x.k, rows(kK) + s * keys, place);
        read_values<Tile>(x.v, rows(kV) + s * values, place);
        if constexpr (decays) read_keys<Tile>(x.f, rows(kF) + s * keys, place);
        if constexpr (M == kBoth) read_values<Tile>(x.z, rows(kZ) + s * values, place);
        if constexpr (M == kKeyDelta) read_keys<Tile>(x.e, erase_rows + s * keys, place);
        if constexpr (has_gate(M)) x.gate = gates[s];
        if constexpr (M == kScalar || is_delta(M)) x.write = writes[s];
        return x;
    };

    A state[R][C];
    A keys_passed[R], values_passed[C];  // products of the segment's decays
    UNROLL_FOR (int r = 0; r < R; ++r) keys_passed[r] = A(1);
    UNROLL_FOR (int c = 0; c < C; ++c) values_passed[c] = A(1);
    const StateColumns<Tile> slice{sizes.key_dim, sizes.value_dim, columns};
    const int64_t size = static_cast<int64_t>(sizes.key_dim) * sizes.value_dim;
    const int64_t in_segments = static_cast<int64_t>(segment) * gridDim.x + blockIdx.x;
    A* const of_segment = segments.count > 1 ? static_cast<A*>(segments.states) + in_segments * size + first : nullptr;
    const A* initial = static_cast<const A*>(call.initial_state);
    initial = segments.count > 1 ? of_segment : initial ? initial + blockIdx.x * size + first : nullptr;
    slice.load(state, results ? initial : nullptr, place);
    // The first state that this segment keeps, and before which of its steps.
    const int kept = results ? kept_states(sizes) : 0;
    const int first_kept = kept && begin ? begin / sizes.interval - 1 : 0;
    A* saved = static_cast<A*>(call.states) + (static_cast<int64_t>(blockIdx.x) * kept + first_kept) * size + first;
    int next_save = !kept ? total : begin ? 0 : sizes.interval;

    start(0);
    for (int time = 0;; time += stage) {
        const int steps = min(stage, total - time);
        copies_wait<0>();
        __syncthreads();
        if (results && time > 0)
            store_rows(call.out, batch * call.out.batch + head * call.out.head + first, columns, outs, values, 1, 0,
                       begin + time - stage, min(stage, total - time + stage));
        if (steps <= 0) break;
        convert(time);
        __syncthreads();
        if (time + stage < total) start(time + stage);
        Operands next = load(0);
        for (int s = 0; s < steps;) {
            if (time + s == next_save) {
                slice.store(state, saved, place);
                saved += size;
                next_save = total - next_save > sizes.interval ? next_save + sizes.interval : total;
            }
            for (const int stop = min(steps, next_save - time); s < stop; ++s) {
                Operands x = next;
                next = load(min(s + 1, steps - 1));  // before the store below, which might alias
                if constexpr (is_delta(M)) {
                    A retrieved[C] = {};
                    UNROLL_FOR (int r = 0; r < R; ++r)
                        UNROLL_FOR (int c = 0; c < C; ++c) {
                            if constexpr (has_gate(M)) state[r][c] *= x.gate;
                            if constexpr (decays) state[r][c] *= x.f[r];
                            retrieved[c] += (M == kKeyDelta ? x.e[r] : x.k[r]) * state[r][c];
                        }
                    sum_lanes<Tile::kKeyLanes, 1>(retrieved);
                    UNROLL_FOR (int c = 0; c < C; ++c) x.v[c] = x.write * (x.v[c] - retrieved[c]);
                }
                A out[C] = {};
                UNROLL_FOR (int r = 0; r < R; ++r) {
                    const A key = M == kScalar ? x.write * x.k[r] : x.k[r];
                    UNROLL_FOR (int c = 0; c < C; ++c) {
                        A old = state[r][c];
                        if constexpr (M == kScalar) old *= x.gate;
                        if constexpr (back) old += key * x.v[c];
                        if constexpr (divides_time(M)) old *= x.f[r];
                        if constexpr (M == kBoth) old *= x.z[c];
                        state[r][c] = back ? old : old + key * x.v[c];
                        if constexpr (results) out[c] += x.q[r] * state[r][c];
                    }
                    if constexpr (!results) keys_passed[r] *= x.f[r];
                }
                if constexpr (results) put_column_sums<Tile>(out, outs + s * values, place);
                if constexpr (!results && M == kBoth) {
                    UNROLL_FOR (int c = 0; c < C; ++c) values_passed[c] *= x.z[c];
                }
            }
        }
    }
    if constexpr (results) {
        if (segment == segments.count - 1)
            slice.store(state, static_cast<A*>(call.final_state) + blockIdx.x * size + first, place);
    } else {
        slice.store(state, of_segment, place);
        A* const products = static_cast<A*>(segments.passed) + in_segments * (sizes.key_dim + sizes.value_dim);
        if (blockIdx.y == 0 && place.warp == 0 && place.value_lane == 0) {
            UNROLL_FOR (int r = 0; r < R; ++r)
                if (place.row(r) < sizes.key_dim) products[place.row(r)] = keys_passed[r];
        }
        if (place.key_lane == 0) {
            UNROLL_FOR (int c = 0; c < C; ++c)
                if (place.column + c < columns) products[sizes.key_dim + first + place.column + c] = values_passed[c];
        }
    }
}

// Shared memory that leaves room for several blocks on a multiprocessor.
constexpr int kComfortable = 40 * 1024;

// How a launch is laid out.
struct ForwardPlan {
    int warps, splits, stage;
};

template <class Tile>
int shared_of_forward(const RuleForward& call, const ForwardPlan& plan) {
    return ForwardOffsets(call, plan.stage, Tile::kKeys, Tile::padded(plan.warps), sizeof(typename Tile::A)).total;
}

template <class Tile>
ForwardPlan plan_forward(const RuleForward& call) {
    const Sizes& sizes = call.sizes;
    const int64_t heads = static_cast<int64_t>(sizes.batch) * sizes.heads;
    ForwardPlan plan{min(kMostWarps, (sizes.value_dim + Tile::kWarpValues - 1) / Tile::kWarpValues), 0,
                     min(16, sizes.time)};
    const int processors = multiprocessors();
    const auto split = [&] {
        plan.splits = (sizes.value_dim + plan.warps * Tile::kWarpValues - 1) / (plan.warps * Tile::kWarpValues);
        return heads * plan.splits;
    };
    while (split() < processors && plan.warps > 1) plan.warps = (plan.warps + 1) / 2;
    while (plan.stage > 1 && shared_of_forward<Tile>(call, plan) > kComfortable) plan.stage /= 2;
    return plan;
}

// Warps that keep a multiprocessor busy: two for each of its schedulers.
constexpr int kBusyWarps = 8;

template <class Tile, int M>
TimeSegments segments_of_forward(const RuleForward& call, const ForwardPlan& plan) {
    if (!divides_time(M)) return {1, call.sizes.time, nullptr, nullptr};
    const int64_t warps = static_cast<int64_t>(call.sizes.batch) * call.sizes.heads * plan.splits * plan.warps;
    return find_time_segments(call.sizes, warps, static_cast<int64_t>(kBusyWarps) * multiprocessors());
}

template <class Tile, int M, Purpose P>
cudaError_t launch_sweep(const RuleForward& call, const ForwardPlan& plan, const TimeSegments& segments,
                         cudaStream_t stream) {
    const unsigned heads = static_cast<unsigned>(call.sizes.batch) * call.sizes.heads;
    const unsigned divided = P == kResults ? segments.count : segments.count - 1;
    return launch(recurrent_forward<Tile, M, P>, dim3(heads, plan.splits, divided), dim3(plan.warps * kWarp),
                  shared_of_forward<Tile>(call, plan), stream, call, plan.stage, segments);
}

// The effect of segments on a state or, with q and d_out as k and v, on a gradient, and then the starts of all
// segments. `first`: the state before the first segment, or the gradient after the last.
template <class Tile, int M, Purpose P>
cudaError_t launch_segments(RuleForward call, const TimeSegments& segments, const void* first, cudaStream_t stream) {
    call.q = {};
    call.out = {};
    const cudaError_t error = launch_sweep<Tile, M, P>(call, plan_forward<Tile>(call), segments, stream);
    if (error != cudaSuccess) return error;
    return carry_segments<typename Tile::A>(segments, call.sizes, first, P == kGradientOfSegment, stream);
}

template <class Tile, int M>
cudaError_t launch_forward(const RuleForward& call, cudaStream_t stream) {
    const ForwardPlan plan = plan_forward<Tile>(call);
    TimeSegments segments = segments_of_forward<Tile, M>(call, plan);
    if constexpr (divides_time(M)) {
        if (segments.count > 1) {
            place_segments<typename Tile::A>(segments, call.sizes, call.workspace);
            const cudaError_t error =
                launch_segments<Tile, M, kStateOfSegment>(call, segments, call.initial_state, stream);
            if (error != cudaSuccess) return error;
        }
    }
    return launch_sweep<Tile, M, kResults>(call, plan, segments, stream);
}

template <int M>
cudaError_t launch_forward(const RuleForward& call, cudaStream_t stream) {
    if (!sizes_fit(call.sizes)) return cudaErrorInvalidValue;
    if (call.sizes.batch == 0) return cudaSuccess;
    return with_tile(call.v.dtype, call.sizes.key_dim, call.sizes.value_dim,
                     [&](auto tile) { return launch_forward<decltype(tile), M>(call, stream); });
}

template <int M>
size_t forward_workspace(const RuleForward& call) {
    size_t bytes = 0;
    if (!sizes_fit(call.sizes) || call.sizes.batch == 0) return bytes;
    with_tile(call.v.dtype, call.sizes.key_dim, call.sizes.value_dim, [&](auto tile) {
        using Chosen = decltype(tile);
        const TimeSegments segments = segments_of_forward<Chosen, M>(call, plan_forward<Chosen>(call));
        bytes = bytes_of_segments<typename Chosen::A>(segments, call.sizes);
        return cudaSuccess;
    });
    return bytes;
}

}  // namespace fairseq_fastweights
