// The recurrent backward pass of both families.
//
// With G_t the gradient of S_t, once everything after step t and the output y_t are in:
//   G_t = (decay of step t + 1) * G_{t+1} + q_t dy_t^T      dq_t = S_t dy_t
//   diagonal  dk_t = w_t G_t v_t    dv_t = w_t G_t^T k_t    d log f_t = f_t * sum over columns of (z_t * S_{t-1} * G_t)
//             d log z_t likewise, by rows; d log g_t = g_t (<S_{t-1}, G_t> - [complement] k_t^T G_t v_t)
//   delta     S' = f_t * S_{t-1}, r_t = v_t - S'^T e_t, u_t = beta_t r_t, du_t = G_t^T k_t, dv_t = beta_t du_t,
//             d beta_t = <du_t, r_t>, dk_t = G_t u_t, de_t = -S' dv_t, dS' = G_t - e_t dv_t^T, and where it decays
//             d log f_t = sum over columns of S' * dS'; G_{t-1} = f_t * dS' + q_{t-1} dy_{t-1}^T
// so that no log decay's gradient is a difference of cumulative terms, and nothing is divided by a decay.
//
// A block goes back over the chunks before which the forward pass kept states. Within a chunk it recomputes states from
// the kept one, in spans of a few steps, and keeps those at the spans' starts (or at every `spacing`-th one's) in
// `slots` of shared memory. In a span, from the last to the first, a sweep forwards gives dq and the inputs of the
// sweep backwards: with decays, the state before every step, in more slots; for the delta family, the residuals r_t,
// which are all without decays, and a third sweep then adds the part of dk that depends on S_{t-1}. A slot is private
// to its threads: element i of thread n lies n-th in row i, so that there is neither a barrier nor a bank conflict.
//
// Without decays dq needs no G and the other gradients no S: blocks of two kinds, one for each, run through all steps,
// and kept states are not read.
//
// Sums over columns go across warps once a span, through shared memory; where a head's columns do not fit one block,
// blocks write parts to the workspace, which later launches add to, and a second kernel adds them in order. With decays
// by dimension, time is split too where heads are few (forward.cuh).
#include "forward.cuh"

namespace fairseq_fastweights {

__host__ DEVICE const Sequence& backward_input(const RuleBackward& p, int i) {
    return i == kDy ? p.d_out : forward_input(p, i);
}

// The steps between kept states.
__host__ DEVICE int steps_between_states(const Sizes& sizes) {
    return sizes.interval && sizes.interval < sizes.time ? sizes.interval : sizes.time;
}

// True if the way back needs the state before every step, for the gradients of decays.
__host__ __device__ constexpr bool needs_states(int mode) { return has_gate(mode) || decays_keys(mode); }

// How a launch is laid out: `span` steps at a time, the state at the start of every `spacing`-th span kept in `slots`.
struct BackwardPlan {
    int warps, splits, span, spacing, slots;
    int parts, first_split;  // splits of one launch, and the first of this one
    int64_t part_stride;     // elements from one split's part of a key-dimension gradient to the next's
};

template <class Tile, int M>
struct BackwardOffsets : Offsets {
    int table, raw[kInputs], rows[kInputs], gate, write, dq, dk, de, df, dg, db, dv, dz, errors, inner, outer;
    __host__ __device__ BackwardOffsets(const RuleBackward& call, const BackwardPlan& plan) {
        constexpr int element = sizeof(typename Tile::A), keys = Tile::kKeys;
        const int values = Tile::padded(plan.warps), span = plan.span;
        table = take(kInputs * sizeof(Source));
        UNROLL_FOR (int i = 0; i < kInputs; ++i) {
            const Sequence& input = backward_input(call, i);
            const bool used = i == kF ? decays_keys(M) : i == kZ ? M == kBoth : i == kE ? input.data != nullptr : true;
            const int width = has_key_dim(i) ? keys : values;
            raw[i] = take(input.data ? span * ((width * bytes_of(input.dtype) + 15) & ~15) : 0);
            rows[i] = take(used ? span * width * element : 0);
        }
        gate = take(span * element);
        write = take(span * element);
        dq = take(plan.warps * span * keys * element);
        dk = take(plan.warps * span * keys * element);
        de = take(call.erase.data ? plan.warps * span * keys * element : 0);
        df = take(decays_keys(M) ? plan.warps * span * keys * element : 0);
        dg = take(plan.warps * span * element);
        db = take(plan.warps * span * element);
        dv = take(span * values * element);
        dz = take(M == kBoth ? span * values * element : 0);
        errors = take(is_delta(M) ? span * values * element : 0);
        const int slot = plan.warps * kWarp * Tile::kElements * element;
        inner = take((M == kPlain ? 0 : needs_states(M) ? span : 1) * slot);
        outer = take(M == kPlain ? 0 : plan.slots * slot);
    }
};

template <class Tile>
DEVICE void put_slot(const typename Tile::A (&state)[Tile::kRows][Tile::kColumns], void* slots, int slot) {
    using Group = Pack<typename Tile::A, Tile::kColumns>;
    Group* const to = static_cast<Group*>(slots) + slot * Tile::kRows * blockDim.x + threadIdx.x;
    UNROLL_FOR (int r = 0; r < Tile::kRows; ++r) {
        Group group;
        UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c) group.x[c] = state[r][c];
        to[r * blockDim.x] = group;
    }
}

template <class Tile>
DEVICE void get_slot(typename Tile::A (&state)[Tile::kRows][Tile::kColumns], const void* slots, int slot) {
    using Group = Pack<typename Tile::A, Tile::kColumns>;
    const Group* const from = static_cast<const Group*>(slots) + slot * Tile::kRows * blockDim.x + threadIdx.x;
    UNROLL_FOR (int r = 0; r < Tile::kRows; ++r) {
        const Group group = from[r * blockDim.x];
        UNROLL_FOR (int c = 0; c < Tile::kColumns; ++c) state[r][c] = group.x[c];
    }
}

template <class Tile, int M>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    recurrent_backward(const RuleBackward call, const BackwardPlan plan, const TimeSegments segments) {
    using A = typename Tile::A;
    constexpr int R = Tile::kRows, C = Tile::kColumns, keys = Tile::kKeys;
    constexpr bool decays = decays_keys(M);
    FASTWEIGHTS_SHARED_MEMORY(memory);
    const Sizes& sizes = call.sizes;
    const ThreadCoord<Tile> place;
    const int warps = plan.warps, values = Tile::padded(warps), span = plan.span;
    const int first = (plan.first_split + blockIdx.y) * warps * Tile::kWarpValues;
    const int columns = min(warps * Tile::kWarpValues, sizes.value_dim - first);
    const int batch = blockIdx.x / sizes.heads, head = blockIdx.x % sizes.heads;
    const BackwardOffsets<Tile, M> at(call, plan);
    const auto part = [&](int offset) { return reinterpret_cast<A*>(memory + offset); };
    Source* const table = reinterpret_cast<Source*>(memory + at.table);

    unsigned inputs = 1u << kQ | 1u << kK | 1u << kV | 1u << kDy;
    if (decays && call.log_key_decay.data) inputs |= 1u << kF;
    if (M == kBoth && call.log_value_decay.data) inputs |= 1u << kZ;
    if (M == kKeyDelta && call.erase.data) inputs |= 1u << kE;
    const unsigned advance_inputs = inputs & ~(1u << kQ | 1u << kDy);
    UNROLL_FOR (int i = 0; i < kInputs; ++i) {
        if (threadIdx.x != i || !(inputs >> i & 1)) continue;
        const bool key = has_key_dim(i);
        table[i] = make_source(backward_input(call, i), batch, head, key ? 0 : first, key ? sizes.key_dim : columns,
                               key ? keys : values, at.raw[i], at.rows[i], i == kF || i == kZ);
    }
    if (decays && !call.log_key_decay.data)
        for (int i = threadIdx.x; i < span * keys; i += blockDim.x) part(at.rows[kF])[i] = A(1);
    const bool apart = M == kKeyDelta && call.erase.data;
    const A* const erase_rows = apart ? part(at.rows[kE]) : part(at.rows[kK]);
    const Gate<A> gate(call.log_gate, batch, head), beta(call.beta, batch, head);

    // Pipeline stages: `ask` starts the copies of the next stage, `stage` waits for them, after asking if nobody has.
    A gate_ahead{}, beta_ahead{};
    bool requested = false;
    const auto ask = [&](int time, int steps, unsigned mask) {
        copy_inputs(table, mask, memory, time, steps);
        if constexpr (has_gate(M)) gate_ahead = gate.load(time, steps, A(0));
        if constexpr (is_delta(M)) beta_ahead = beta.load(time, steps, A(1));
        requested = true;
    };
    const auto stage = [&](int time, int steps, unsigned mask) {
        if (!requested) {
            __syncthreads();  // the table is complete, and the last conversion has read the raw rows
            ask(time, steps, mask);
        }
        copies_wait<0>();
        __syncthreads();
        convert_inputs<A>(table, mask, memory, time, steps);
        if ((has_gate(M) || is_delta(M)) && threadIdx.x < steps) {
            part(at.gate)[threadIdx.x] = exponential(gate_ahead);
            part(at.write)[threadIdx.x] = is_delta(M)                       ? beta_ahead
                                          : M == kScalar && call.complement ? one_minus_exponential(gate_ahead)
                                                                            : A(1);
        }
        __syncthreads();
        requested = false;
    };

    struct Operands {
        A q[R], k[R], f[R], v[C], z[C], dy[C], gate, write;
    };
    const auto load = [&](int s) {  // operands of all sweeps; q and dy are loaded where they are used
        Operands x;
        read_keys<Tile>(x.k, part(at.rows[kK]) + s * keys, place);
        read_values<Tile>(x.v, part(at.rows[kV]) + s * values, place);
        if constexpr (decays) read_keys<Tile>(x.f, part(at.rows[kF]) + s * keys, place);
        if constexpr (M == kBoth) read_values<Tile>(x.z, part(at.rows[kZ]) + s * values, place);
        if constexpr (has_gate(M)) x.gate = part(at.gate)[s];
        if constexpr (M == kScalar || is_delta(M)) x.write = part(at.write)[s];
        return x;
    };

    A state[R][C], grad[R][C];
    const StateColumns<Tile> slice{sizes.key_dim, sizes.value_dim, columns};
    const int64_t size = static_cast<int64_t>(sizes.key_dim) * sizes.value_dim;
    const int segment = divides_time(M) ? blockIdx.z : 0;
    const auto head_state = [&](const void* states, int64_t index) {
        return states ? static_cast<const A*>(states) + index * size + first : nullptr;
    };

    // One step of the state, which delta rules have decayed already; for these x.v is u.
    const auto update = [&](Operands& x) {
        UNROLL_FOR (int r = 0; r < R; ++r) {
            const A key = M == kScalar ? x.write * x.k[r] : x.k[r];
            UNROLL_FOR (int c = 0; c < C; ++c) {
                A old = state[r][c];
                if constexpr (M == kScalar) old *= x.gate;
                if constexpr (divides_time(M)) old *= x.f[r];
                if constexpr (M == kBoth) old *= x.z[c];
                state[r][c] = old + key * x.v[c];
            }
        }
    };
    // The erase keys.
    const auto erase_keys = [&](A(&keys_read)[R], const Operands& x, int s) {
        if constexpr (M == kKeyDelta) {
            read_keys<Tile>(keys_read, erase_rows + s * keys, place);
        } else {
            UNROLL_FOR (int r = 0; r < R; ++r) keys_read[r] = x.k[r];
        }
    };
    const auto decay = [&](const Operands& x) {
        UNROLL_FOR (int r = 0; r < R; ++r)
            UNROLL_FOR (int c = 0; c < C; ++c) {
                if constexpr (has_gate(M)) state[r][c] *= x.gate;
                if constexpr (decays) state[r][c] *= x.f[r];
            }
    };
    const auto correct = [&](Operands& x, int s) {  // v becomes the error, and the state is decayed
        A retrieved[C] = {}, erase[R];
        erase_keys(erase, x, s);
        decay(x);
        UNROLL_FOR (int r = 0; r < R; ++r)
            UNROLL_FOR (int c = 0; c < C; ++c) retrieved[c] += erase[r] * state[r][c];
        sum_lanes<Tile::kKeyLanes, 1>(retrieved);
        UNROLL_FOR (int c = 0; c < C; ++c) x.v[c] -= retrieved[c];
    };
    const auto write_values = [&](const A(&x)[C], A* row) {  // the same in all key lanes
        if (place.key_lane != 0) return;
        Pack<A, C> out;
        UNROLL_FOR (int c = 0; c < C; ++c) out.x[c] = x[c];
        *reinterpret_cast<Pack<A, C>*>(row + place.column) = out;
    };

    const auto advance = [&](int steps) {
        for (int s = 0; s < steps; ++s) {
            Operands x = load(s);
            if constexpr (is_delta(M)) {
                correct(x, s);
                UNROLL_FOR (int c = 0; c < C; ++c) x.v[c] *= x.write;
            }
            update(x);
        }
    };

    // The warp's own rows of gradients that are summed over warps later.
    const auto own = [&](int offset, int s) { return part(offset) + (place.warp * span + s) * keys; };

    const auto forwards = [&](int steps) {
        if constexpr (M == kDelta) put_slot<Tile>(state, memory + at.inner, 0);
        for (int s = 0; s < steps; ++s) {
            Operands x = load(s);
            read_values<Tile>(x.dy, part(at.rows[kDy]) + s * values, place);
            if constexpr (needs_states(M)) put_slot<Tile>(state, memory + at.inner, s);
            if constexpr (is_delta(M)) {
                correct(x, s);
                write_values(x.v, part(at.errors) + s * values);
                UNROLL_FOR (int c = 0; c < C; ++c) x.v[c] *= x.write;
            }
            update(x);
            A dq[R] = {};
            UNROLL_FOR (int r = 0; r < R; ++r)
                UNROLL_FOR (int c = 0; c < C; ++c) dq[r] += state[r][c] * x.dy[c];
            put_row_sums<Tile>(dq, own(at.dq, s), place);
        }
        __syncwarp();
    };

    const auto backwards = [&](int steps) {
        for (int s = steps - 1; s >= 0; --s) {
            Operands x = load(s);
            read_keys<Tile>(x.q, part(at.rows[kQ]) + s * keys, place);
            read_values<Tile>(x.dy, part(at.rows[kDy]) + s * values, place);
            A error[C];
            if constexpr (is_delta(M)) {
                read_values<Tile>(error, part(at.errors) + s * values, place);
                UNROLL_FOR (int c = 0; c < C; ++c) x.v[c] = x.write * error[c];
            }
            A dk[R] = {}, dv[C] = {};
            UNROLL_FOR (int r = 0; r < R; ++r)
                UNROLL_FOR (int c = 0; c < C; ++c) {
                    grad[r][c] += x.q[r] * x.dy[c];
                    dk[r] += grad[r][c] * x.v[c];
                    dv[c] += grad[r][c] * x.k[r];
                }
            A d_gate = A(0), d_beta = A(0);
            if constexpr (M == kScalar) {
                get_slot<Tile>(state, memory + at.inner, s);
                A passed = A(0), written = A(0);
                UNROLL_FOR (int r = 0; r < R; ++r)
                    UNROLL_FOR (int c = 0; c < C; ++c) passed += state[r][c] * grad[r][c];
                UNROLL_FOR (int c = 0; c < C; ++c) written += dv[c] * x.v[c];
                A sum[1] = {x.gate * (call.complement ? passed - written : passed)};
                sum_lanes<kWarp, 1>(sum);
                d_gate = sum[0];
                UNROLL_FOR (int r = 0; r < R; ++r) dk[r] *= x.write;
                UNROLL_FOR (int c = 0; c < C; ++c) dv[c] *= x.write;
                UNROLL_FOR (int r = 0; r < R; ++r)
                    UNROLL_FOR (int c = 0; c < C; ++c) grad[r][c] *= x.gate;
            }
            if constexpr (divides_time(M)) {
                get_slot<Tile>(state, memory + at.inner, s);
                A df[R] = {}, dz[C] = {};
                UNROLL_FOR (int r = 0; r < R; ++r)
                    UNROLL_FOR (int c = 0; c < C; ++c) {
                        // The gradient is decayed first: the sums need the decayed one.
                        grad[r][c] *= x.f[r];
                        if constexpr (M == kBoth) grad[r][c] *= x.z[c];
                        const A passed = state[r][c] * grad[r][c];
                        df[r] += passed;
                        if constexpr (M == kBoth) dz[c] += passed;
                    }
                put_row_sums<Tile>(df, own(at.df, s), place);
                if constexpr (M == kBoth) put_column_sums<Tile>(dz, part(at.dz) + s * values, place);
            }
            if constexpr (is_delta(M)) {
                sum_lanes<Tile::kKeyLanes, 1>(dv);
                A sum[1] = {}, erase[R];
                UNROLL_FOR (int c = 0; c < C; ++c) {
                    sum[0] += dv[c] * error[c];
                    dv[c] *= x.write;
                }
                sum_lanes<Tile::kValueLanes, Tile::kKeyLanes>(sum);
                d_beta = sum[0];
                erase_keys(erase, x, s);
                UNROLL_FOR (int r = 0; r < R; ++r)
                    UNROLL_FOR (int c = 0; c < C; ++c) grad[r][c] -= erase[r] * dv[c];
                write_values(dv, part(at.dv) + s * values);
                if constexpr (needs_states(M)) {
                    get_slot<Tile>(state, memory + at.inner, s);
                    decay(x);
                    A df[R] = {}, de[R] = {};
                    UNROLL_FOR (int r = 0; r < R; ++r)
                        UNROLL_FOR (int c = 0; c < C; ++c) {
                            df[r] += state[r][c] * grad[r][c];
                            de[r] -= state[r][c] * dv[c];
                            if constexpr (has_gate(M)) grad[r][c] *= x.gate;
                            if constexpr (decays) grad[r][c] *= x.f[r];
                        }
                    if (apart) {
                        put_row_sums<Tile>(de, own(at.de, s), place);
                    } else {
                        UNROLL_FOR (int r = 0; r < R; ++r) dk[r] += de[r];
                    }
                    if constexpr (decays) {
                        put_row_sums<Tile>(df, own(at.df, s), place);
                    } else {
                        A passed[1] = {};
                        UNROLL_FOR (int r = 0; r < R; ++r) passed[0] += df[r];
                        sum_lanes<kWarp, 1>(passed);
                        d_gate = passed[0];
                    }
                }
            } else {
                put_column_sums<Tile>(dv, part(at.dv) + s * values, place);
            }
            put_row_sums<Tile>(dk, own(at.dk, s), place);
            if (threadIdx.x % kWarp == 0) {
                if constexpr (has_gate(M)) part(at.dg)[place.warp * span + s] = d_gate;
                if constexpr (is_delta(M)) part(at.db)[place.warp * span + s] = d_beta;
            }
        }
        __syncwarp();
    };

    const auto forwards_again = [&](int steps) {
        get_slot<Tile>(state, memory + at.inner, 0);
        for (int s = 0; s < steps; ++s) {
            Operands x = load(s);
            read_values<Tile>(x.v, part(at.errors) + s * values, place);
            A dv[C], dk[R] = {};
            read_values<Tile>(dv, part(at.dv) + s * values, place);
            UNROLL_FOR (int r = 0; r < R; ++r)
                UNROLL_FOR (int c = 0; c < C; ++c) dk[r] -= state[r][c] * dv[c];
            put_row_sums<Tile, true>(dk, own(at.dk, s), place);
            UNROLL_FOR (int c = 0; c < C; ++c) x.v[c] *= x.write;
            update(x);
        }
    };

    // Stores this block's part of a key-dimension gradient, onto that of earlier launches.
    const auto store_keys = [&](const Sequence& to, int offset, int time, int steps) {
        store_rows(to, batch * to.batch + head * to.head + blockIdx.y * plan.part_stride * sizes.key_dim, sizes.key_dim,
                   part(offset), keys, warps, span * keys, time, steps, plan.first_split > 0);
    };
    const auto store_values = [&](const Sequence& to, int offset, int time, int steps) {
        store_rows(to, batch * to.batch + head * to.head + first, columns, part(offset), values, 1, 0, time, steps);
    };
    const auto store = [&](int time, int steps, bool all) {
        store_keys(call.dk, at.dk, time, steps);
        store_values(call.dv, at.dv, time, steps);
        if (all) store_keys(call.dq, at.dq, time, steps);
        if (apart) store_keys(call.d_erase, at.de, time, steps);
        if (decays && call.d_log_key_decay.data) store_keys(call.d_log_key_decay, at.df, time, steps);
        if (M == kBoth) store_values(call.d_log_value_decay, at.dz, time, steps);
        const auto store_scalars = [&](const Sequence& to, int offset) {
            if (threadIdx.x >= steps) return;
            A sum = A(0);
            for (int w = 0; w < warps; ++w) sum += part(offset)[w * span + threadIdx.x];
            const int64_t index =
                batch * to.batch + head * to.head + (time + threadIdx.x) * to.time + blockIdx.y * plan.part_stride;
            if (plan.first_split > 0) sum += load_element<A>(to, index);
            store_element(to, index, sum);
        };
        if constexpr (has_gate(M)) store_scalars(call.d_log_gate, at.dg);
        if (is_delta(M) && call.d_beta.data) store_scalars(call.d_beta, at.db);
    };

    if constexpr (M == kPlain) {
        const int spans = (sizes.time + span - 1) / span;
        const auto length = [&](int p) { return min(span, sizes.time - p * span); };
        if (blockIdx.z == 0) {
            const unsigned needed = advance_inputs | 1u << kDy;
            slice.load(state, head_state(call.initial_state, blockIdx.x), place);
            for (int p = 0; p < spans; ++p) {
                stage(p * span, length(p), needed);
                if (p + 1 < spans) ask((p + 1) * span, length(p + 1), needed);
                forwards(length(p));
                __syncthreads();
                store_keys(call.dq, at.dq, p * span, length(p));
            }
            return;
        }
        slice.load(grad, head_state(call.d_final_state, blockIdx.x), place);
        for (int p = spans - 1; p >= 0; --p) {
            stage(p * span, length(p), inputs);
            if (p > 0) ask((p - 1) * span, span, inputs);
            backwards(length(p));
            __syncthreads();
            store(p * span, length(p), false);
        }
    } else {
        const int64_t in_segments = static_cast<int64_t>(segment) * gridDim.x + blockIdx.x;
        slice.load(
            grad,
            segments.count > 1 ? head_state(segments.states, in_segments) : head_state(call.d_final_state, blockIdx.x),
            place);
        const int chunk = steps_between_states(sizes), chunks = (sizes.time + chunk - 1) / chunk;
        const int last = segments.begin(segment) + segments.steps(segment, sizes.time) - 1;
        for (int n = last / chunk; n >= segments.begin(segment) / chunk; --n) {
            const int start = n * chunk, end = min(start + chunk, sizes.time);
            const int spans = (end - start + span - 1) / span;
            const auto begin = [&](int p) { return start + p * span; };
            const auto length = [&](int p) { return min(span, end - begin(p)); };
            slice.load(state,
                       n ? head_state(call.states, static_cast<int64_t>(blockIdx.x) * (chunks - 1) + n - 1)
                         : head_state(call.initial_state, blockIdx.x),
                       place);
            for (int p = 0; p < spans; ++p) {
                if (p % plan.spacing == 0) put_slot<Tile>(state, memory + at.outer, p / plan.spacing);
                if (p + 1 == spans) break;
                stage(begin(p), span, advance_inputs);
                ask(begin(p + 1), length(p + 1), p + 2 < spans ? advance_inputs : inputs);
                advance(span);
            }
            for (int p = spans - 1; p >= 0; --p) {
                if (p + 1 < spans) {
                    get_slot<Tile>(state, memory + at.outer, p / plan.spacing);
                    for (int passed = p / plan.spacing * plan.spacing; passed < p; ++passed) {
                        stage(begin(passed), span, advance_inputs);
                        advance(span);
                    }
                }
                stage(begin(p), length(p), inputs);
                if (p > 0 && (p - 1) % plan.spacing == 0) ask(begin(p - 1), span, inputs);
                forwards(length(p));
                backwards(length(p));
                if constexpr (M == kDelta) forwards_again(length(p));
                __syncthreads();
                store(begin(p), length(p), true);
            }
        }
    }
    if (call.d_initial_state && segment == 0)
        slice.store(grad, static_cast<A*>(call.d_initial_state) + blockIdx.x * size + first, place);
}

// Adds the splits' parts of one gradient, in order, and stores it: (batch, time, heads, dim), dim 1 for a gate.
template <typename A>
__global__ void __launch_bounds__(256)
    sum_parts(const Sequence to, const A* parts, const Sizes sizes, const int dim, const int splits) {
    const int64_t count = static_cast<int64_t>(sizes.batch) * sizes.time * sizes.heads * dim;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        A sum = A(0);
        for (int split = 0; split < splits; ++split) sum += parts[split * count + i];
        const int64_t row = i / dim, step = row / sizes.heads;
        const int64_t at = step / sizes.time * to.batch + step % sizes.time * to.time + row % sizes.heads * to.head;
        store_element(to, at + i % dim, sum);
    }
}

template <class Tile, int M>
bool plan_backward(const RuleBackward& call, BackwardPlan& plan) {
    const int limit = shared_memory_limit();
    const int chunk = M == kPlain ? call.sizes.time : steps_between_states(call.sizes);
    const int most_warps = min(kMostWarps, (call.sizes.value_dim + Tile::kWarpValues - 1) / Tile::kWarpValues);
    // With decays a span costs as many slots as steps: span + chunk / span is least at the root.
    int wanted = 16;
    if (needs_states(M)) {
        wanted = 4;
        while (wanted * wanted < chunk && wanted < 16) wanted *= 2;
    }
    // Fewer warps mean parts to add up; fewer slots, steps to do again. The latter is the lesser evil up to a point.
    for (const int most_spacing : {4, chunk}) {
        for (plan.warps = most_warps; plan.warps > 0; plan.warps /= 2) {
            for (plan.span = min(wanted, chunk); plan.span > 0; plan.span /= 2) {
                const int spans = (chunk + plan.span - 1) / plan.span;
                for (plan.spacing = 1; plan.spacing <= most_spacing; plan.spacing *= 2) {
                    plan.slots = M == kPlain ? 0 : (spans + plan.spacing - 1) / plan.spacing;
                    if (plan.slots > 64 || BackwardOffsets<Tile, M>(call, plan).total > limit) continue;
                    plan.splits =
                        (call.sizes.value_dim + plan.warps * Tile::kWarpValues - 1) / (plan.warps * Tile::kWarpValues);
                    // As many parts as fill the device, for they take memory: the others follow in later launches.
                    const int heads = max(1, call.sizes.batch * call.sizes.heads);
                    plan.parts = min(min(plan.splits, 4), (multiprocessors() + heads - 1) / heads);
                    plan.first_split = 0;
                    return true;
                }
            }
        }
    }
    return false;
}

template <class Tile, int M>
size_t parts_bytes(const RuleBackward& call, const BackwardPlan& plan) {
    if (plan.splits == 1) return 0;
    const int64_t rows = static_cast<int64_t>(call.sizes.batch) * call.sizes.time * call.sizes.heads;
    const int keys = 2 + (call.erase.data != nullptr) + (call.log_key_decay.data != nullptr);
    const int64_t dims = call.sizes.key_dim * keys + (call.log_gate.data != nullptr) + (call.beta.data != nullptr);
    const size_t bytes = static_cast<size_t>(plan.parts * rows * dims) * sizeof(typename Tile::A);
    return (bytes + 255) / 256 * 256;  // aligns the segments behind
}

// Segments start from states that were kept.
template <class Tile, int M>
TimeSegments segments_of_backward(const RuleBackward& call, const BackwardPlan& plan) {
    const Sizes& sizes = call.sizes;
    if (!divides_time(M) || kept_states(sizes) == 0) return {1, sizes.time, nullptr, nullptr};
    const int shared = BackwardOffsets<Tile, M>(call, plan).total;
    const int64_t resident = max(1, shared_memory_limit() / (shared + 1024));
    return find_time_segments(sizes, static_cast<int64_t>(sizes.batch) * sizes.heads * plan.parts,
                              resident * multiprocessors());
}

template <class Tile, int M>
cudaError_t launch_backward(RuleBackward call, cudaStream_t stream) {
    using A = typename Tile::A;
    const Sizes& sizes = call.sizes;
    BackwardPlan plan;
    if (!plan_backward<Tile, M>(call, plan)) return cudaErrorInvalidConfiguration;
    const int64_t heads = static_cast<int64_t>(sizes.batch) * sizes.heads, rows = heads * sizes.time;
    // Gradients that are sums over all columns, and where they go at last.
    constexpr int kSummed = 6, kOfKeys = 4;
    Sequence* const summed[kSummed] = {&call.dq,         &call.dk,    &call.d_erase, &call.d_log_key_decay,
                                       &call.d_log_gate, &call.d_beta};
    Sequence wanted[kSummed];
    A* parts[kSummed] = {};
    plan.part_stride = 0;
    if (plan.splits > 1) {
        plan.part_stride = rows;
        A* free = static_cast<A*>(call.workspace);
        for (int i = 0; i < kSummed; ++i) {
            wanted[i] = *summed[i];
            if (!wanted[i].data) continue;
            const int64_t dim = i < kOfKeys ? sizes.key_dim : 1;
            parts[i] = free;
            *summed[i] = {free, rows / sizes.batch * dim, sizes.heads * dim, dim, Stored<A>::kDType};
            free += plan.parts * rows * dim;
        }
    }
    TimeSegments segments = segments_of_backward<Tile, M>(call, plan);
    cudaError_t error = cudaSuccess;
    if constexpr (divides_time(M)) {
        if (segments.count > 1) {
            place_segments<A>(segments, sizes,
                              static_cast<unsigned char*>(call.workspace) + parts_bytes<Tile, M>(call, plan));
            RuleForward sweep{};
            sweep.sizes = sizes;
            sweep.k = call.q;
            sweep.v = call.d_out;
            sweep.log_key_decay = call.log_key_decay;
            sweep.log_value_decay = call.log_value_decay;
            error = launch_segments<Tile, M, kGradientOfSegment>(sweep, segments, call.d_final_state, stream);
            if (error != cudaSuccess) return error;
        }
    }
    for (; plan.first_split < plan.splits && error == cudaSuccess; plan.first_split += plan.parts) {
        const dim3 grid(static_cast<unsigned>(heads), min(plan.parts, plan.splits - plan.first_split),
                        M == kPlain ? 2 : segments.count);
        error = launch(recurrent_backward<Tile, M>, grid, dim3(plan.warps * kWarp),
                       BackwardOffsets<Tile, M>(call, plan).total, stream, call, plan, segments);
    }
    for (int i = 0; i < kSummed && error == cudaSuccess; ++i) {
        if (!parts[i]) continue;
        const int dim = i < kOfKeys ? sizes.key_dim : 1;
        const int64_t blocks = (rows * dim + 255) / 256;
        error = launch(sum_parts<A>, dim3(static_cast<unsigned>(blocks < 65536 ? blocks : 65536)), dim3(256), 0, stream,
                       wanted[i], static_cast<const A*>(parts[i]), sizes, dim, plan.parts);
    }
    return error;
}

template <int M>
cudaError_t launch_backward(const RuleBackward& call, cudaStream_t stream) {
    if (!sizes_fit(call.sizes)) return cudaErrorInvalidValue;
    if (call.sizes.batch == 0) return cudaSuccess;
    return with_tile(call.v.dtype, call.sizes.key_dim, call.sizes.value_dim,
                     [&](auto tile) { return launch_backward<decltype(tile), M>(call, stream); });
}

template <int M>
size_t backward_workspace(const RuleBackward& call) {
    size_t bytes = 0;
    if (!sizes_fit(call.sizes) || call.sizes.batch == 0) return bytes;
    with_tile(call.v.dtype, call.sizes.key_dim, call.sizes.value_dim, [&](auto tile) {
        using Chosen = decltype(tile);
        BackwardPlan plan;
        if (!plan_backward<Chosen, M>(call, plan)) return cudaErrorInvalidConfiguration;
        const TimeSegments segments = segments_of_backward<Chosen, M>(call, plan);
        bytes = parts_bytes<Chosen, M>(call, plan) + bytes_of_segments<typename Chosen::A>(segments, call.sizes);
        return cudaSuccess;
    });
    return bytes;
}

extern "C" size_t fastweights_backward_recurrent_workspace(const RuleBackward* params) {
    return with_mode(*params, [&](auto mode) { return backward_workspace<decltype(mode)::value>(*params); });
}

extern "C" cudaError_t fastweights_backward_recurrent(const RuleBackward* params, cudaStream_t stream) {
    return with_mode(*params, [&](auto mode) { return launch_backward<decltype(mode)::value>(*params, stream); });
}

}  // namespace fairseq_fastweights
