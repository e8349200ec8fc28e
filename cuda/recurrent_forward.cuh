// The recurrent forward pass of both families: one pass over the steps with the state in registers.
//
// A stage of `steps` steps is converted into shared memory while the copies of the next are under way. Global memory is
// read and written once: inputs, outputs, and a state every `interval` steps. V is split over blocks where one
// block of kMostWarps warps does not cover it, or to occupy the device; blocks of a head then read q and k each.
#pragma once

#include "recurrent_tile.cuh"

namespace fairseq_fastweights {

// Both families' parameters in one form: `gate` is log_gate or beta.
struct ForwardCall {
    Sizes sizes;
    int32_t complement;
    Sequence q, k, v, gate, key_decay, value_decay;
    const void* initial_state;
    Sequence out;
    void* final_state;
    void* states;

    __host__ __device__ const Sequence& input(int i) const {
        return i == kQ ? q : i == kK ? k : i == kV ? v : i == kF ? key_decay : value_decay;
    }
};

struct ForwardOffsets : Offsets {
    int table, raw[kDy], rows[kDy], gate, write, out;
    __host__ __device__ ForwardOffsets(const ForwardCall& call, int steps, int keys, int values, int element) {
        table = take(kInputs * sizeof(Source));
#pragma unroll
        for (int i = 0; i < kDy; ++i) {
            const int width = i == kV || i == kZ ? values : keys;
            raw[i] = take(call.input(i).data ? steps * ((width * bytes_of(call.input(i).dtype) + 15) & ~15) : 0);
            rows[i] = take(steps * width * element);
        }
        gate = take(steps * element);
        write = take(steps * element);
        out = take(steps * values * element);
    }
};

template <class Tile, int M>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1) recurrent_forward(const ForwardCall call, const int stage) {
    using A = typename Tile::A;
    constexpr int R = Tile::kRows, C = Tile::kColumns, keys = Tile::kKeys;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Sizes& sizes = call.sizes;
    const Place<Tile> place;
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

    constexpr bool decays = M == kKey || M == kBoth;
    unsigned inputs = 1u << kQ | 1u << kK | 1u << kV;
    if (decays && call.key_decay.data) inputs |= 1u << kF;
    if (M == kBoth && call.value_decay.data) inputs |= 1u << kZ;
#pragma unroll
    for (int i = 0; i < kDy; ++i) {
        if (threadIdx.x != i || !(inputs >> i & 1)) continue;
        const bool key = i == kQ || i == kK || i == kF;
        table[i] = make_source(call.input(i), batch, head, key ? 0 : first, key ? sizes.key_dim : columns,
                               key ? keys : values, memory + at.raw[i], memory + at.rows[i], i == kF || i == kZ);
    }
    if (M == kBoth && !call.key_decay.data)
        for (int i = threadIdx.x; i < stage * keys; i += blockDim.x) rows(kF)[i] = A(1);
    const Gate<A> gate{call.gate.data, batch * call.gate.batch + head * call.gate.head, call.gate.time,
                       call.gate.dtype};
    __syncthreads();

    A gate_ahead{};
    const auto start = [&](int time) {
        const int steps = min(stage, sizes.time - time);
        copy_inputs(table, inputs, time, steps);
        if constexpr (M == kScalar || M == kDelta) gate_ahead = gate.load(time, steps);
    };
    const auto convert = [&](int time) {
        const int steps = min(stage, sizes.time - time);
        convert_inputs<A>(table, inputs, time, steps);
        if ((M == kScalar || M == kDelta) && threadIdx.x < steps) {
            gates[threadIdx.x] = M == kDelta ? gate_ahead : exponential(gate_ahead);
            writes[threadIdx.x] = M == kScalar && call.complement ? one_minus_exponential(gate_ahead) : A(1);
        }
    };

    struct Operands {
        A q[R], k[R], f[R], v[C], z[C], gate, write;
    };
    const auto load = [&](int s) {
        Operands x;
        read_keys<Tile>(x.q, rows(kQ) + s * keys, place);
        read_keys<Tile>(x.k, rows(kK) + s * keys, place);
        read_values<Tile>(x.v, rows(kV) + s * values, place);
        if constexpr (decays) read_keys<Tile>(x.f, rows(kF) + s * keys, place);
        if constexpr (M == kBoth) read_values<Tile>(x.z, rows(kZ) + s * values, place);
        if constexpr (M == kScalar || M == kDelta) x.gate = gates[s];
        if constexpr (M == kScalar) x.write = writes[s];
        return x;
    };

    A state[R][C];
    const StateSlice<Tile> slice{sizes.key_dim, sizes.value_dim, columns};
    const int64_t size = static_cast<int64_t>(sizes.key_dim) * sizes.value_dim;
    const A* const initial = static_cast<const A*>(call.initial_state);
    slice.load(state, initial ? initial + blockIdx.x * size + first : nullptr, place);
    const int kept = states_kept(sizes);
    A* saved = static_cast<A*>(call.states) + static_cast<int64_t>(blockIdx.x) * kept * size + first;
    int next_save = kept ? sizes.interval : sizes.time;

    start(0);
    for (int time = 0;; time += stage) {
        const int steps = min(stage, sizes.time - time);
        copies_wait<0>();
        __syncthreads();
        if (time > 0)
            store_rows(call.out, batch * call.out.batch + head * call.out.head + first, columns, outs, values, 1, 0,
                       time - stage, min(stage, sizes.time - time + stage));
        if (steps <= 0) break;
        convert(time);
        __syncthreads();
        if (time + stage < sizes.time) start(time + stage);
        Operands next = load(0);
        for (int s = 0; s < steps;) {
            if (time + s == next_save) {
                slice.store(state, saved, place);
                saved += size;
                next_save = sizes.time - next_save > sizes.interval ? next_save + sizes.interval : sizes.time;
            }
            for (const int stop = min(steps, next_save - time); s < stop; ++s) {
                Operands x = next;
                next = load(min(s + 1, steps - 1));  // before the store below, which might be to the same place
                if constexpr (M == kDelta) {
                    A retrieved[C] = {};
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int c = 0; c < C; ++c) retrieved[c] += x.k[r] * state[r][c];
                    sum_lanes<Tile::kKeyLanes, 1>(retrieved);
#pragma unroll
                    for (int c = 0; c < C; ++c) x.v[c] = x.gate * (x.v[c] - retrieved[c]);
                }
                A out[C] = {};
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const A key = M == kScalar ? x.write * x.k[r] : x.k[r];
#pragma unroll
                    for (int c = 0; c < C; ++c) {
                        A old = state[r][c];
                        if constexpr (M == kScalar) old *= x.gate;
                        if constexpr (decays) old *= x.f[r];
                        if constexpr (M == kBoth) old *= x.z[c];
                        state[r][c] = old + key * x.v[c];
                        out[c] += x.q[r] * state[r][c];
                    }
                }
                put_column_sums<Tile>(out, outs + s * values, place);
            }
        }
    }
    slice.store(state, static_cast<A*>(call.final_state) + blockIdx.x * size + first, place);
}

// Shared memory that leaves room for several blocks on a multiprocessor.
constexpr int kComfortable = 40 * 1024;

template <class Tile, int M>
cudaError_t launch_forward(const ForwardCall& call, cudaStream_t stream) {
    const Sizes& sizes = call.sizes;
    const int64_t heads = static_cast<int64_t>(sizes.batch) * sizes.heads;
    int warps = min(kMostWarps, (sizes.value_dim + Tile::kWarpValues - 1) / Tile::kWarpValues);
    int device = 0, processors = 1;
    if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        error != cudaSuccess)
        return error;
    const auto splits = [&] {
        return (sizes.value_dim + warps * Tile::kWarpValues - 1) / (warps * Tile::kWarpValues);
    };
    while (warps > 1 && heads * splits() < processors) warps = (warps + 1) / 2;
    int steps = min(16, sizes.time);
    const auto bytes = [&] {
        return ForwardOffsets(call, steps, Tile::kKeys, Tile::padded(warps), sizeof(typename Tile::A)).total;
    };
    while (steps > 1 && bytes() > kComfortable) steps /= 2;
    return launch(recurrent_forward<Tile, M>, dim3(static_cast<unsigned>(heads), splits()), dim3(warps * kWarp),
                  bytes(), stream, call, steps);
}

template <int M>
cudaError_t launch_forward(const ForwardCall& call, cudaStream_t stream) {
    if (!sizes_fit(call.sizes)) return cudaErrorInvalidValue;
    if (call.sizes.batch == 0) return cudaSuccess;
    return with_tile<Tile>(call.v.dtype, call.sizes.key_dim, call.sizes.value_dim, [&](auto tile) {
        return launch_forward<decltype(tile), M>(call, stream);
    });
}

}  // namespace fairseq_fastweights
