// Code that the recurrent kernels share: a head's state in the registers of a block, rows of the inputs on their way to
// shared memory, rows of results on their way out, and sums over lanes.
//
// A block owns the columns of one head's (key_dim, value_dim) state that its warps cover; a warp owns all rows of
// kWarpValues columns, so that sums over keys, which every step of the delta rule waits for, never leave a warp. Within
// a warp, kKeyLanes lanes share the rows and kValueLanes lanes the columns; a thread holds Rows x Columns elements.
// Each value that a thread reads from shared memory is used Columns (keys) or Rows (values) times, which balances the
// shared memory's bandwidth against the multipliers'. Rows and columns beyond key_dim and value_dim hold zeros and
// are never stored, so that the inner loops need no masks.
#pragma once

#include <type_traits>

#include "../common.cuh"

namespace fairseq_fastweights {

constexpr int kMostWarps = 8;   // of a block: 255 registers for each thread
constexpr int kMostDim = 512;   // of keys and of values
constexpr int kMostSteps = 32;  // of a stage: a thread of a warp loads one step's gate

// The decay of the state at a step: none, a scalar, one for each row, or for each row and column; and with the delta
// rule none, a scalar, or one for each row, with an optional erase key.
enum Mode { kPlain, kScalar, kKey, kBoth, kDelta, kGatedDelta, kKeyDelta };

__host__ __device__ constexpr bool is_delta(int mode) { return mode >= kDelta; }
__host__ __device__ constexpr bool has_gate(int mode) { return mode == kScalar || mode == kGatedDelta; }
__host__ __device__ constexpr bool decays_keys(int mode) { return mode == kKey || mode == kBoth || mode == kKeyDelta; }
// The effect of a span of steps on a state is another decay, and not a matrix.
__host__ __device__ constexpr bool divides_time(int mode) { return mode == kKey || mode == kBoth; }

// use(an integral_constant of the mode) for a call's rule and gates.
template <typename Params, typename Use>
auto with_mode(const Params& p, const Use& use) {
    if (p.is_delta) {
        if (p.log_key_decay.data || p.erase.data) return use(std::integral_constant<int, kKeyDelta>());
        return p.log_gate.data ? use(std::integral_constant<int, kGatedDelta>())
                               : use(std::integral_constant<int, kDelta>());
    }
    if (p.log_gate.data) return use(std::integral_constant<int, kScalar>());
    if (p.log_value_decay.data) return use(std::integral_constant<int, kBoth>());
    return p.log_key_decay.data ? use(std::integral_constant<int, kKey>()) : use(std::integral_constant<int, kPlain>());
}

template <typename A_, int KeyLanes, int Rows, int Columns>
struct RegisterTile {
    using A = A_;
    static constexpr int kKeyLanes = KeyLanes;
    static constexpr int kRows = Rows;
    static constexpr int kColumns = Columns;
    static constexpr int kElements = Rows * Columns;
    static constexpr int kValueLanes = kWarp / KeyLanes;
    static constexpr int kKeys = KeyLanes * Rows;
    static constexpr int kWarpValues = kValueLanes * Columns;
    static constexpr int kRowVector = Rows < 4 ? Rows : 4;  // neighbouring rows of a thread
    // The length of a block's rows of values in shared memory: they are moved by fours.
    __host__ __device__ static constexpr int padded(int warps) { return (warps * kWarpValues + 3) & ~3; }
};

template <typename A, int N>
struct alignas(N * sizeof(A) % 16 == 0 ? 16 : N * sizeof(A) & -(N * sizeof(A))) Pack {
    A x[N];
};

DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float one_minus_exponential(float x) { return -expm1f(x); }
DEVICE double one_minus_exponential(double x) { return -expm1(x); }

// A thread's coordinates. Its row r is row(r) of the state, its columns are column .. column + Columns - 1 of the
// block's.
template <class Tile>
struct ThreadCoord {
    int warp, key_lane, value_lane, column;
    __device__ ThreadCoord() {
        const int lane = threadIdx.x % kWarp;
        warp = threadIdx.x / kWarp;
        key_lane = lane % Tile::kKeyLanes;
        value_lane = lane / Tile::kKeyLanes;
        column = warp * Tile::kWarpValues + value_lane * Tile::kColumns;
    }
    // Lanes take turns by kRowVector rows: reads of neighbouring lanes are contiguous, without bank conflicts.
    __device__ int row(int r) const {
        constexpr int group = Tile::kRowVector;
        return r / group * (Tile::kKeyLanes * group) + key_lane * group + r % group;
    }
};

template <class Tile>
DEVICE void read_keys(typename Tile::A (&x)[Tile::kRows], const typename Tile::A* row, const ThreadCoord<Tile>& place) {
    using Group = Pack<typename Tile::A, Tile::kRowVector>;
    UNROLL_FOR (int r = 0; r < Tile::kRows; r += Tile::kRowVector) {
        const Group group = *reinterpret_cast<const Group*>(row + place.row(r));
        UNROLL_FOR (int i = 0; i < Tile::kRowVector; ++i) x[r + i] = group.x[i];
    }
}

template <class Tile>
DEVICE void read_values(typename Tile::A (&x)[Tile::kColumns], const typename Tile::A* row,
                        const ThreadCoord<Tile>& place) {
    using Group = Pack<typename Tile::A, Tile::kColumns>;
    const Group group = *reinterpret_cast<const Group*>(row + place.column);
    UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c) x[c] = group.x[c];
}

// ---- Sums over lanes ---------------------------------------------------------------------------------------------

// Sums x over the Lanes lanes that differ by Stride, 2 Stride, ... Every lane gets all sums.
template <int Lanes, int Stride, int N, typename A>
DEVICE void sum_lanes(A (&x)[N]) {
    UNROLL_FOR (int offset = Stride; offset < Lanes * Stride; offset *= 2) {
        UNROLL_FOR (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(kAllLanes, x[i], offset);
    }
}

// The same, with the sums dealt out: each lane ends with sums [first, first + kept) in x[0 .. kept), and with `first`
// returned. Half as many are in play after each exchange, N - 1 shuffles rather than N log2(Lanes). Where there are
// more lanes than sums, several lanes hold the same.
template <int Lanes, int N>
constexpr int kKept = Lanes < N ? N / Lanes : 1;

template <int Lanes, int Stride, int N, int Live = N, typename A>
DEVICE int deal_sums(A (&x)[N], int lane) {
    if constexpr (Lanes == 1) {
        return 0;
    } else if constexpr (Live == 1) {
        x[0] += __shfl_xor_sync(kAllLanes, x[0], Stride);
        return deal_sums<Lanes / 2, 2 * Stride, N, 1>(x, lane / 2);
    } else {
        constexpr int half = Live / 2;
        const bool upper = lane & 1;
        UNROLL_FOR (int i = 0; i < half; ++i) {
            const A sent = upper ? x[i] : x[half + i];
            const A mine = upper ? x[half + i] : x[i];
            x[i] = mine + __shfl_xor_sync(kAllLanes, sent, Stride);
        }
        return (upper ? half : 0) + deal_sums<Lanes / 2, 2 * Stride, N, half>(x, lane / 2);
    }
}

// Sums over rows, one for each column, to row[column]: for results with a value dimension.
template <class Tile>
DEVICE void put_column_sums(typename Tile::A (&x)[Tile::kColumns], typename Tile::A* row,
                            const ThreadCoord<Tile>& place) {
    const int first = deal_sums<Tile::kKeyLanes, 1, Tile::kColumns>(x, place.key_lane);
    if (Tile::kKeyLanes <= Tile::kColumns || place.key_lane < Tile::kColumns) {
        UNROLL_FOR (int i = 0; i < kKept<Tile::kKeyLanes, Tile::kColumns>; ++i) row[place.column + first + i] = x[i];
    }
}

// Sums over the warp's columns, one for each row, added to or put into row[key]: for results with a key dimension.
template <class Tile, bool Add = false>
DEVICE void put_row_sums(typename Tile::A (&x)[Tile::kRows], typename Tile::A* row, const ThreadCoord<Tile>& place) {
    const int first = deal_sums<Tile::kValueLanes, Tile::kKeyLanes, Tile::kRows>(x, place.value_lane);
    if (Tile::kValueLanes <= Tile::kRows || place.value_lane < Tile::kRows) {
        UNROLL_FOR (int i = 0; i < kKept<Tile::kValueLanes, Tile::kRows>; ++i) {
            typename Tile::A& to = row[place.row(first + i)];
            to = Add ? to + x[i] : x[i];
        }
    }
}

// ---- States ------------------------------------------------------------------------------------------------------

// One head's state in memory: (key_dim, value_dim), from the block's first column on.
template <class Tile>
struct StateColumns {
    using A = typename Tile::A;
    using Group = Pack<A, Tile::kColumns>;
    int key_dim, value_dim, columns;  // columns: how many of the block's exist

    __device__ bool whole(const A* at) const {
        return value_dim % Tile::kColumns == 0 && reinterpret_cast<uintptr_t>(at) % sizeof(Group) == 0;
    }
    __device__ void load(A (&state)[Tile::kRows][Tile::kColumns], const A* at, const ThreadCoord<Tile>& place) const {
        const bool packed = at != nullptr && whole(at);
        UNROLL_FOR (int r = 0; r < Tile::kRows; ++r) {
            const int row = place.row(r);
            const A* from = at + static_cast<int64_t>(row) * value_dim + place.column;
            const bool inside = at != nullptr && row < key_dim;
            if (packed) {
                Group group{};
                if (inside && place.column < columns) group = *reinterpret_cast<const Group*>(from);
                UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c) state[r][c] = group.x[c];
            } else {
                UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c)
                    state[r][c] = inside && place.column + c < columns ? from[c] : A(0);
            }
        }
    }
    __device__ void store(const A (&state)[Tile::kRows][Tile::kColumns], A* at, const ThreadCoord<Tile>& place) const {
        const bool packed = whole(at);
        UNROLL_FOR (int r = 0; r < Tile::kRows; ++r) {
            const int row = place.row(r);
            A* to = at + static_cast<int64_t>(row) * value_dim + place.column;
            if (row >= key_dim) continue;
            if (packed) {
                Group group;
                UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c) group.x[c] = state[r][c];
                if (place.column < columns) *reinterpret_cast<Group*>(to) = group;
            } else {
                UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c)
                    if (place.column + c < columns) to[c] = state[r][c];
            }
        }
    }
};

// ---- Rows in -----------------------------------------------------------------------------------------------------

// Inputs by their place in a stage.
enum Input { kQ, kK, kV, kF, kZ, kE, kDy, kInputs };

__host__ __device__ constexpr bool has_key_dim(int input) {
    return input == kQ || input == kK || input == kF || input == kE;
}

template <typename Params>
__host__ DEVICE const Sequence& forward_input(const Params& p, int i) {
    return i == kQ   ? p.q
           : i == kK ? p.k
           : i == kV ? p.v
           : i == kF ? p.log_key_decay
           : i == kZ ? p.log_value_decay
                     : p.erase;
}

// One input of a block: rows of `dim` elements, `stride` bytes from step to step. Asynchronous copies of `granule`
// bytes bring them into `raw` while the block computes on the stage before; then they are converted once, into rows of
// `padded` numbers, with zeros behind the last. If addresses and strides allow no granule of at least 4 bytes (granule
// 0), the conversion reads global memory itself.
//
// `raw` and `rows` are offsets into the block's shared memory, whose address is passed beside a Source: a pointer
// loaded from memory would be generic, and slow to read.
struct Source {
    const unsigned char* from;
    int64_t stride;
    int32_t raw, rows;
    int32_t dtype, dim, padded, granule;
    bool logarithm;  // converted to its exponential

    __device__ int raw_stride() const { return (padded * bytes_of(dtype) + 15) & ~15; }
};

__host__ DEVICE int shift_for(int count) {
    int shift = 0;
    while ((1 << shift) < count) ++shift;
    return shift;
}

DEVICE Source make_source(const Sequence& sequence, int batch, int head, int first, int dim, int padded, int raw,
                          int rows, bool logarithm) {
    const int size = bytes_of(sequence.dtype);
    const auto* const from = static_cast<const unsigned char*>(sequence.data) +
                             (batch * sequence.batch + head * sequence.head + first) * size;
    const int64_t stride = sequence.time * size;
    const uint64_t all = reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(stride) | uint64_t(dim * size);
    const int granule = all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 0;
    return {from, stride, raw, rows, sequence.dtype, dim, padded, granule, logarithm};
}

template <int Bytes>
DEVICE void copy_rows(const Source& source, unsigned char* memory, int time, int steps) {
    const int count = source.dim * bytes_of(source.dtype) / Bytes;
    const int shift = shift_for(count), raw_stride = source.raw_stride();
    for (int i = threadIdx.x; i < steps << shift; i += blockDim.x) {
        const int step = i >> shift, granule = i & ((1 << shift) - 1);
        if (granule < count)
            copy_async<Bytes>(memory + source.raw + step * raw_stride + granule * Bytes,
                              source.from + (time + step) * source.stride + granule * Bytes);
    }
}

DEVICE void copy_rows(const Source& source, unsigned char* memory, int time, int steps) {
    if (source.granule == 16) copy_rows<16>(source, memory, time, steps);
    if (source.granule == 8) copy_rows<8>(source, memory, time, steps);
    if (source.granule == 4) copy_rows<4>(source, memory, time, steps);
}

// Starts the copies of all inputs of `mask`. Not unrolled: copies of the body would only cost instruction cache and
// compile time.
DEVICE void copy_inputs(const Source* table, unsigned mask, unsigned char* memory, int time, int steps) {
#pragma unroll 1
    for (int i = 0; i < kInputs; ++i)
        if (mask >> i & 1) copy_rows(table[i], memory, time, steps);
    copies_commit();
}

// use(T()) for the type T of a tensor's rows, of those that come with arithmetic in A.
template <typename A, typename F>
DEVICE void with_row_type(int32_t dtype, const F& use) {
    if (dtype == kFloat32) use(float());
    if constexpr (sizeof(A) == 8) {
        if (dtype == kFloat64) use(double());
    } else {
        if (dtype == kFloat16) use(__half());
        if (dtype == kBFloat16) use(__nv_bfloat16());
    }
}

template <typename T, typename A>
DEVICE void convert_rows(const Source& source, unsigned char* memory, int time, int steps) {
    const int count = source.padded / 4, shift = shift_for(count), raw_stride = source.raw_stride();
    for (int i = threadIdx.x; i < steps << shift; i += blockDim.x) {
        const int step = i >> shift, first = 4 * (i & ((1 << shift) - 1));
        if (first >= source.padded) continue;
        Pack<T, 4> in{};
        if (source.granule) {
            in = *reinterpret_cast<const Pack<T, 4>*>(memory + source.raw + step * raw_stride + first * sizeof(T));
        } else {
            const T* from = reinterpret_cast<const T*>(source.from + (time + step) * source.stride) + first;
            UNROLL_FOR (int j = 0; j < 4; ++j)
                if (first + j < source.dim) in.x[j] = from[j];
        }
        Pack<A, 4> out;
        UNROLL_FOR (int j = 0; j < 4; ++j) {
            A x = widen<A>(in.x[j]);
            if (source.logarithm) x = exponential(x);
            out.x[j] = first + j < source.dim ? x : A(0);
        }
        *reinterpret_cast<Pack<A, 4>*>(reinterpret_cast<A*>(memory + source.rows) + step * source.padded + first) = out;
    }
}

template <typename A>
DEVICE void convert_inputs(const Source* table, unsigned mask, unsigned char* memory, int time, int steps) {
#pragma unroll 1
    for (int i = 0; i < kInputs; ++i)
        if (mask >> i & 1)
            with_row_type<A>(table[i].dtype,
                             [&](auto type) { convert_rows<decltype(type), A>(table[i], memory, time, steps); });
}

// A scalar for each step (log_gate or beta), one step to a thread: loaded with a stage's copies, put down with its
// conversion.
template <typename A>
struct Gate {
    const void* data;
    int64_t first, stride;
    int32_t dtype;

    __device__ Gate(const Sequence& x, int batch, int head)
        : data(x.data), first(batch * x.batch + head * x.head), stride(x.time), dtype(x.dtype) {}
    // `absent`: the value if there is no tensor.
    __device__ A load(int time, int steps, A absent) const {
        const int step = threadIdx.x;
        return data && step < steps ? load_element<A>(data, dtype, first + (time + step) * stride) : absent;
    }
};

// ---- Rows out ----------------------------------------------------------------------------------------------------

template <typename T, typename A>
DEVICE void store_rows_as(const Sequence& sequence, int64_t first, int dim, const A* rows, int padded, int parts,
                          int part_stride, int time, int steps, bool add) {
    T* const base = static_cast<T*>(sequence.data) + first;
    const bool packed =
        dim % 4 == 0 && sequence.time % 4 == 0 && reinterpret_cast<uintptr_t>(base) % sizeof(Pack<T, 4>) == 0;
    const int count = (dim + 3) / 4, shift = shift_for(count);
    for (int i = threadIdx.x; i < steps << shift; i += blockDim.x) {
        const int step = i >> shift, at = 4 * (i & ((1 << shift) - 1));
        if (at >= dim) continue;
        A sums[4] = {};
        for (int part = 0; part < parts; ++part) {
            const auto in = *reinterpret_cast<const Pack<A, 4>*>(rows + part * part_stride + step * padded + at);
            UNROLL_FOR (int j = 0; j < 4; ++j) sums[j] += in.x[j];
        }
        T* const to = base + (time + step) * sequence.time + at;
        if (add) {
            UNROLL_FOR (int j = 0; j < 4; ++j)
                if (at + j < dim) sums[j] += widen<A>(to[j]);
        }
        Pack<T, 4> out;
        UNROLL_FOR (int j = 0; j < 4; ++j) out.x[j] = narrow<T>(sums[j]);
        if (packed) {
            *reinterpret_cast<Pack<T, 4>*>(to) = out;
        } else {
            UNROLL_FOR (int j = 0; j < 4; ++j)
                if (at + j < dim) to[j] = out.x[j];
        }
    }
}

// Sums `parts` sets of rows, `part_stride` apart, and stores them as steps time .. time + steps - 1 of `sequence`, from
// its element `first` on (which counts batch, head and column); with `add`, onto what is there.
template <typename A>
DEVICE void store_rows(const Sequence& sequence, int64_t first, int dim, const A* rows, int padded, int parts,
                       int part_stride, int time, int steps, bool add = false) {
    with_row_type<A>(sequence.dtype, [&](auto type) {
        store_rows_as<decltype(type)>(sequence, first, dim, rows, padded, parts, part_stride, time, steps, add);
    });
}

// ---- The host's side ---------------------------------------------------------------------------------------------

// Offsets into shared memory, taken one after another, each aligned to 16 bytes.
struct Offsets {
    int total = 0;
    __host__ __device__ int take(int bytes) {
        const int at = total;
        total += (bytes + 15) & ~15;
        return at;
    }
};

// Calls `use` with the tile for a head of this shape; the wider ones first ask for fewer columns where there are few.
template <typename Use>
cudaError_t with_tile(int32_t dtype, int key_dim, int value_dim, const Use& use) {
    if (dtype == kFloat64) {
        if (key_dim <= 16) return use(RegisterTile<double, 4, 4, 2>());
        if (key_dim <= 64) return use(RegisterTile<double, 8, 8, 2>());
        return use(RegisterTile<double, 32, 16, 1>());
    }
    if (key_dim <= 4) return use(RegisterTile<float, 1, 4, 2>());
    if (key_dim <= 16)
        return value_dim <= 16 ? use(RegisterTile<float, 4, 4, 2>()) : use(RegisterTile<float, 4, 4, 4>());
    if (key_dim <= 32) return use(RegisterTile<float, 8, 4, 4>());
    if (key_dim <= 64) return use(RegisterTile<float, 8, 8, 4>());
    if (key_dim <= 256) return use(RegisterTile<float, 32, 8, 4>());
    return use(RegisterTile<float, 32, 16, 2>());
}

inline bool sizes_fit(const Sizes& sizes) {
    return sizes.batch >= 0 && sizes.time >= 1 && sizes.heads >= 1 && sizes.key_dim >= 1 && sizes.value_dim >= 1 &&
           sizes.key_dim <= kMostDim && sizes.value_dim <= kMostDim && sizes.interval >= 0;
}

}  // namespace fairseq_fastweights
