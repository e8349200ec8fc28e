// One token: y = S_1^T q with S_1 the updated state, which takes the old one's place. Bound by the state's bandwidth,
// so it is read once and written once, in 16-byte accesses where its strides allow; everything else is small.
//
// A block owns 4 * Lanes columns of one head's state: Lanes neighbouring threads read neighbouring columns of a row,
// and each set of Lanes threads takes every `groups`-th row, at most kStepRows each, which stay in registers between
// the delta rule's retrieval and its update. Nothing is allocated and nothing waits for the host: a CUDA graph can hold
// it.
#include "tile.cuh"

using namespace fairseq_fastweights;

namespace {

constexpr int kStepRows = 8;
constexpr int kStepThreads = 256;

__host__ DEVICE int padded_keys(const Sizes& sizes) { return (sizes.key_dim + 3) & ~3; }

template <typename A, int Lanes, bool Delta>
__global__ void __launch_bounds__(kStepThreads) step(const RuleStep call) {
    constexpr int kColumns = 4, kBlock = Lanes * kColumns;
    using Group = Pack<A, kColumns>;
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Sizes& sizes = call.sizes;
    const int batch = blockIdx.x / sizes.heads, head = blockIdx.x % sizes.heads;
    const int lane = threadIdx.x % Lanes, group = threadIdx.x / Lanes, groups = blockDim.x / Lanes;
    const int warps = blockDim.x / kWarp, column = blockIdx.y * kBlock + lane * kColumns;
    A* const q = reinterpret_cast<A*>(memory);
    A* const k = q + padded_keys(sizes);
    A* const f = k + padded_keys(sizes);
    A* const e = call.erase.data ? f + padded_keys(sizes) : k;
    // Sums of a warp's rows, for `out` and, in the second half, for the retrieved values.
    A* const sums = f + 2 * padded_keys(sizes);
    const auto offset = [&](const Sequence& x) { return batch * x.batch + head * x.head; };

    for (int i = threadIdx.x; i < sizes.key_dim; i += blockDim.x) {
        q[i] = load_element<A>(call.q, offset(call.q) + i);
        k[i] = load_element<A>(call.k, offset(call.k) + i);
        if (Delta && call.erase.data) e[i] = load_element<A>(call.erase, offset(call.erase) + i);
        f[i] = call.log_key_decay.data
                   ? exponential(load_element<A>(call.log_key_decay, offset(call.log_key_decay) + i))
                   : A(1);
    }
    A gate = A(1), write = A(1), v[kColumns], z[kColumns];
    if (call.log_gate.data) {
        gate = load_element<A>(call.log_gate, offset(call.log_gate));
        if (call.complement) write = one_minus_exponential(gate);
        gate = exponential(gate);
    }
    if (Delta && call.beta.data) write = load_element<A>(call.beta, offset(call.beta));
    UNROLL_FOR (int c = 0; c < kColumns; ++c) {
        const bool inside = column + c < sizes.value_dim;
        v[c] = inside ? load_element<A>(call.v, offset(call.v) + column + c) : A(0);
        z[c] = inside && call.log_value_decay.data
                   ? exponential(load_element<A>(call.log_value_decay, offset(call.log_value_decay) + column + c))
                   : A(1);
    }

    A* const base = static_cast<A*>(call.state.data) + batch * call.state.batch + head * call.state.head + column;
    const bool packed = sizes.value_dim % kColumns == 0 && call.state.row % kColumns == 0 &&
                        reinterpret_cast<uintptr_t>(base) % sizeof(Group) == 0;
    // The thread's rows of the state, all loads in flight at once.
    Group state[kStepRows];
    UNROLL_FOR (int r = 0; r < kStepRows; ++r) {
        const int row = group + r * groups;
        const A* const from = base + row * call.state.row;
        state[r] = Group{};
        if (row >= sizes.key_dim) continue;
        if (packed) {
            if (column < sizes.value_dim) state[r] = *reinterpret_cast<const Group*>(from);
        } else {
            UNROLL_FOR (int c = 0; c < kColumns; ++c)
                if (column + c < sizes.value_dim) state[r].x[c] = from[c];
        }
    }
    __syncthreads();

    // Sums over the block's rows, which all threads of a column get; in the order of the warps on every run.
    const auto sum_rows = [&](A(&x)[kColumns], A* to) {
        sum_lanes<kWarp / Lanes, Lanes>(x);
        if (threadIdx.x % kWarp < Lanes) {
            Group all;
            UNROLL_FOR (int c = 0; c < kColumns; ++c) all.x[c] = x[c];
            reinterpret_cast<Group*>(to)[threadIdx.x / kWarp * Lanes + lane] = all;
        }
        __syncthreads();
        UNROLL_FOR (int c = 0; c < kColumns; ++c) x[c] = A(0);
        for (int w = 0; w < warps; ++w) {
            const Group part = reinterpret_cast<const Group*>(to)[w * Lanes + lane];
            UNROLL_FOR (int c = 0; c < kColumns; ++c) x[c] += part.x[c];
        }
    };

    // S' = f g S z, and S'^T e for the delta rule.
    A retrieved[kColumns] = {};
    UNROLL_FOR (int r = 0; r < kStepRows; ++r) {
        const int row = group + r * groups;
        if (row >= sizes.key_dim) continue;
        const A decay = gate * f[row];
        UNROLL_FOR (int c = 0; c < kColumns; ++c) {
            state[r].x[c] *= decay * z[c];
            if (Delta) retrieved[c] += e[row] * state[r].x[c];
        }
    }
    if (Delta) {
        sum_rows(retrieved, sums + warps * kBlock);
        UNROLL_FOR (int c = 0; c < kColumns; ++c) v[c] -= retrieved[c];
    }
    // S = S' + w k v^T (with the delta rule beta k (v - S'^T e)^T), y = S^T q.
    A out[kColumns] = {};
    UNROLL_FOR (int r = 0; r < kStepRows; ++r) {
        const int row = group + r * groups;
        if (row >= sizes.key_dim) continue;
        const A key = write * k[row];
        UNROLL_FOR (int c = 0; c < kColumns; ++c) {
            state[r].x[c] += key * v[c];
            out[c] += q[row] * state[r].x[c];
        }
        A* const to = base + row * call.state.row;
        if (packed) {
            if (column < sizes.value_dim) *reinterpret_cast<Group*>(to) = state[r];
        } else {
            UNROLL_FOR (int c = 0; c < kColumns; ++c)
                if (column + c < sizes.value_dim) to[c] = state[r].x[c];
        }
    }
    sum_rows(out, sums);
    if (threadIdx.x < Lanes) {
        UNROLL_FOR (int c = 0; c < kColumns; ++c)
            if (column + c < sizes.value_dim) store_element(call.out, offset(call.out) + column + c, out[c]);
    }
}

template <typename A, int Lanes, bool Delta>
cudaError_t launch_step(const RuleStep& call, cudaStream_t stream) {
    constexpr int columns = 4 * Lanes;
    const int key_dim = call.sizes.key_dim;
    // About four rows to a thread: enough loads in flight, and enough threads for small states.
    int threads = kWarp;
    while (threads < kStepThreads && threads / Lanes * 4 < key_dim) threads *= 2;
    const size_t elements = 4 * padded_keys(call.sizes) + 2 * threads / kWarp * columns;
    const dim3 grid(static_cast<unsigned>(call.sizes.batch) * call.sizes.heads,
                    (call.sizes.value_dim + columns - 1) / columns);
    return launch(step<A, Lanes, Delta>, grid, dim3(threads), elements * sizeof(A), stream, call);
}

template <bool Delta>
cudaError_t launch_step(const RuleStep& call, cudaStream_t stream) {
    const Sizes& sizes = call.sizes;
    if (!sizes_fit(sizes) || sizes.time != 1) return cudaErrorInvalidValue;
    if (sizes.batch == 0) return cudaSuccess;
    // 8 lanes of 16 bytes are a row of 128 bytes; 4 where the columns are few, or the rows too many for 32 groups.
    const bool narrow_block = sizes.value_dim <= 16 || sizes.key_dim > kStepThreads / 8 * kStepRows;
    if (call.v.dtype == kFloat64)
        return narrow_block ? launch_step<double, 4, Delta>(call, stream) : launch_step<double, 8, Delta>(call, stream);
    return narrow_block ? launch_step<float, 4, Delta>(call, stream) : launch_step<float, 8, Delta>(call, stream);
}

}  // namespace

extern "C" cudaError_t fairseq_fastweights::fastweights_step(const RuleStep* params, cudaStream_t stream) {
    return params->is_delta ? launch_step<true>(*params, stream) : launch_step<false>(*params, stream);
}
