// The CPU kernels as torch operators. Their schemas, shape functions and derivatives are in
// fairseq_fastweights/ops/kernels.py, which also makes last dimensions contiguous.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../native/operators.h"
#include "binding.h"

namespace fairseq_fastweights {
namespace {

// Heads of a work item: as many as have their states in a core's second-level cache, but so few that every thread gets
// several items.
int64_t heads_together(const RuleCall& p, int64_t bytes_of_number) {
    const int64_t state = p.key_dim * p.columns * bytes_of_number;
    int64_t group = std::clamp<int64_t>((256 << 10) / std::max<int64_t>(state, 1), 1, p.heads);
    const int64_t work_items = 3 * int64_t{get_num_threads()};
    while (group > 1 && p.batch * ((p.heads + group - 1) / group) < work_items) group = (group + 1) / 2;
    return group;
}

int64_t kept_states(const RuleCall& p) { return p.interval ? (p.time + p.interval - 1) / p.interval - 1 : 0; }

// The sums over `count` parts, each (rows, sharing, dim), and over the heads that share a row, in this order: (rows,
// dim).
template <class T> void add_up(const T* parts, T* sums, int64_t count, int64_t rows, int64_t sharing, int64_t dim) {
    parallel_for(0, rows, std::max<int64_t>(1, (1 << 15) / (count * sharing * dim + 1)),
                 [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                         T* sum = sums + row * dim;
                         std::fill_n(sum, dim, T(0));
                         for (int64_t share = row * sharing; share < (row + 1) * sharing; ++share) {
                             for (int64_t i = 0; i < count; ++i) {
                                 const T* part = parts + (i * rows * sharing + share) * dim;
                                 for (int64_t j = 0; j < dim; ++j) sum[j] += part[j];
                             }
                         }
                     }
                 });
}

// The gradient of `x`, whose dimension `rows_dim` and those before are rows, that contiguous `parts` of the type of
// states add up to.
Tensor sum_of(const Tensor& parts, const Tensor& x, int64_t sharing, int64_t dim) {
    const int64_t rows = dim ? x.numel() / dim : 0;
    const Tensor sum = new_empty(x, x.sizes(), parts.scalar_type());
    const auto add = [&](auto zero) {
        using T = decltype(zero);
        add_up(static_cast<const T*>(parts.data_ptr()), static_cast<T*>(sum.data_ptr()), parts.size(0), rows, sharing,
               dim);
    };
    parts.scalar_type() == ScalarType::Double ? add(double{}) : add(float{});
    Tensor made = new_like(x);
    copy_(made, sum);
    return made;
}

// Blocks of value columns that a call is divided into where its heads are fewer than the threads. Each block repeats
// the products of keys alone. Calls that take no longer than starting threads stay whole.
struct ValueBlocks {
    int64_t count = 1, width;

    explicit ValueBlocks(const RuleCall& p) : width(p.value_dim) {
        const int64_t heads = p.batch * p.heads, threads = int64_t{get_num_threads()};
        if (heads == 0 || heads >= threads || p.time * p.key_dim * p.value_dim < 1 << 18) return;
        const int64_t wanted = std::min((threads + heads - 1) / heads, (p.value_dim + 15) / 16);
        width = ((p.value_dim + wanted - 1) / wanted + 15) / 16 * 16;
        count = (p.value_dim + width - 1) / width;
    }

    // Room for the gradient of `x`, to which all blocks, and `sharing` heads each, add: like x, or a part for each of
    // them.
    Tensor room(const Tensor& x, int64_t sharing = 1) const {
        if (count * sharing == 1) return new_like(x);
        const Shape own = x.sizes();
        std::vector<int64_t> sizes(own.begin(), own.end());
        sizes[2] *= sharing;
        sizes.insert(sizes.begin(), count);
        return new_empty(x, sizes, state_type(x));
    }

    // The part of the first block.
    static Sequence first(const char* name, const Tensor& room, const Tensor& x) {
        if (room.dim() == x.dim()) return sequence(name, room);
        const Shape strides = room.strides();
        return {room.data_ptr(), strides[1], strides[2], strides[3], dtype_of(name, room.scalar_type())};
    }

    // The gradient of `x` that the parts add up to, in the order of the heads and of the blocks.
    static Tensor total(const Tensor& room, const Tensor& x) {
        if (room.dim() == x.dim()) return room;
        return sum_of(room, x, x.size(2) ? room.size(3) / x.size(2) : 1, x.dim() == 4 ? x.size(3) : 1);
    }

    RuleCall block(const RuleCall& p, int64_t number) const {
        RuleCall block = p;
        const int64_t start = number * width;
        block.columns = std::min(width, p.value_dim - start);
        for (Sequence* x :
             {&block.v, &block.log_value_decay, &block.out, &block.d_out, &block.dv, &block.d_log_value_decay}) {
            advance(*x, start);
        }
        for (Sequence* x :
             {&block.dq, &block.dk, &block.d_erase, &block.d_beta, &block.d_log_gate, &block.d_log_key_decay}) {
            advance(*x, number * p.batch * x->batch);
        }
        const int64_t bytes = start * (p.v.dtype == kFloat64 ? 8 : 4);
        for (const void** state : {&block.initial_state, &block.d_final_state}) {
            if (*state) *state = static_cast<const char*>(*state) + bytes;
        }
        for (void** state : {&block.states, &block.final_state, &block.d_initial_state}) {
            if (*state) *state = static_cast<char*>(*state) + bytes;
        }
        return block;
    }

private:
    static void advance(Sequence& x, int64_t elements) {
        const int64_t size = x.dtype == kFloat64 ? 8 : x.dtype == kFloat32 ? 4 : 2;
        if (x.data) x.data = static_cast<char*>(x.data) + elements * size;
    }
};

using Kernel = void (*)(const RuleCall&, int64_t, int64_t);

void run(Kernel kernel, const RuleCall& p, const ValueBlocks& value_blocks) {
    const int64_t work_items = p.work_items();
    parallel_for(0, value_blocks.count * work_items, 1, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t number = begin / work_items, before = number * work_items,
                          last = std::min(end, before + work_items);
            kernel(value_blocks.block(p, number), begin - before, last - before);
            begin = last;
        }
    });
}

// Fills in the fields that a sequence and a step have in common; `starts` must outlive the call.
template <class Call> void fill(Call& p, const Rule& rule, optional<Tensor>& starts) {
    rule.fill(p);
    p.batch = rule.v.size(0), p.heads = rule.v.size(2), p.key_dim = rule.k.size(3), p.columns = rule.v.size(3);
    p.is_delta = rule.is_delta;
    p.starts = flags_of(starts, {p.batch, rule.v.size(1)}, rule.v);
}

// A call on a sequence, and the contiguous copies that it reads.
struct Call {
    RuleCall p;
    optional<Tensor> starts, initial;

    Call(const Rule& rule, const optional<Tensor>& initial_state, int64_t interval)
        : starts(rule.starts), initial(contiguous_of(initial_state)) {
        if (interval < 0 || interval % 16) fail("interval is ", interval, "; it must be a multiple of 16, or 0");
        fill(p, rule, starts);
        p.time = rule.v.size(1), p.value_dim = p.columns, p.interval = interval;
        if (initial_state) {
            check_state("initial_state", *initial_state, rule.v, {p.batch, p.heads, p.key_dim, p.columns});
        }
        p.heads_per_item = heads_together(p, rule.v.scalar_type() == ScalarType::Double ? 8 : 4);
        p.initial_state = data_of(initial);
    }
};

std::tuple<Tensor, Tensor, Tensor> rule_forward(FAST_WEIGHTS_RULE_PARAMETERS, const optional<Tensor>& initial_state,
                                                int64_t interval) {
    const Rule rule = FAST_WEIGHTS_RULE;
    Call call(rule, initial_state, interval);
    RuleCall& p = call.p;
    const ScalarType type = state_type(rule.v);
    Tensor out = new_like(rule.v);
    Tensor final_state = new_empty(rule.v, {p.batch, p.heads, p.key_dim, p.columns}, type);
    Tensor states = new_empty(rule.v, {p.batch, p.heads, kept_states(p), p.key_dim, p.columns}, type);
    p.out = sequence("out", out), p.final_state = final_state.data_ptr(), p.states = states.data_ptr();
    run(kernels_for(rule.v).rule_forward, p, ValueBlocks(p));
    return {out, final_state, states};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients rule_backward(const Tensor& d_out, const optional<Tensor>& d_final_state, FAST_WEIGHTS_RULE_PARAMETERS,
                        const optional<Tensor>& initial_state, const Tensor& states, int64_t interval) {
    const Rule rule = FAST_WEIGHTS_RULE;
    Call call(rule, initial_state, interval);
    RuleCall& p = call.p;
    if (p.interval == 0) fail("the forward pass kept no states (interval 0)");
    check_state("states", states, v, {p.batch, p.heads, kept_states(p), p.key_dim, p.columns});
    const ValueBlocks value_blocks(p);
    check_sizes("d_out", d_out, v.sizes());
    const Tensor dy = last_contiguous(d_out);
    if (d_final_state) check_state("d_final_state", *d_final_state, v, {p.batch, p.heads, p.key_dim, p.columns});
    const optional<Tensor> d_final = contiguous_of(d_final_state), kept = contiguous_of(states);
    // The gradient of an absent input is an empty tensor. Only one block has a column of v and of the decays of values.
    const auto room = [&](const optional<Tensor>& x, Sequence& where, const char* name, int64_t sharing = 1) {
        if (!x) return new_empty(v, {0}, v.scalar_type());
        const Tensor made = sharing ? value_blocks.room(*x, sharing) : new_like(*x);
        where = ValueBlocks::first(name, made, *x);
        return made;
    };
    const auto total = [](const Tensor& made, const optional<Tensor>& x) {
        return x ? ValueBlocks::total(made, *x) : made;
    };
    const Tensor dq = room(rule.q, p.dq, "dq", p.q.sharing), dk = room(rule.k, p.dk, "dk", p.k.sharing);
    const Tensor dv = room(v, p.dv, "dv", 0), d_erase = room(rule.erase, p.d_erase, "d_erase", p.erase.sharing);
    const Tensor d_beta = room(rule.beta, p.d_beta, "d_beta");
    const Tensor d_gate = room(rule.log_gate, p.d_log_gate, "d_log_gate");
    const Tensor df = room(rule.log_key_decay, p.d_log_key_decay, "d_log_key_decay");
    const Tensor dz = room(rule.log_value_decay, p.d_log_value_decay, "d_log_value_decay", 0);
    const ScalarType type = state_type(v);
    const Tensor d_initial =
        initial_state ? new_empty(v, {p.batch, p.heads, p.key_dim, p.columns}, type) : new_empty(v, {0}, type);
    p.d_out = sequence("d_out", dy), p.d_final_state = data_of(d_final), p.states = data_of(kept);
    p.d_initial_state = initial_state ? d_initial.data_ptr() : nullptr;
    run(kernels_for(v).rule_backward, p, value_blocks);
    return {total(dq, rule.q),
            total(dk, rule.k),
            dv,
            total(d_erase, rule.erase),
            total(d_beta, rule.beta),
            total(d_gate, rule.log_gate),
            total(df, rule.log_key_decay),
            dz,
            d_initial};
}

Tensor rule_step_(FAST_WEIGHTS_RULE_PARAMETERS, const Tensor& state) {
    const Rule rule = FAST_WEIGHTS_RULE;
    if (v.size(1) != 1) fail("v has shape ", v.sizes(), "; a step takes one token");
    Tensor out = unfilled_like(v);
    RuleStep p;
    optional<Tensor> document_starts = starts;
    fill(p, rule, document_starts);
    check_own_state(state, v, {p.batch, p.heads, p.key_dim, p.columns});
    p.out = sequence("out", out), p.state = state.data_ptr();
    p.state_batch = state.stride(0), p.state_head = state.stride(1), p.state_key = state.stride(2);
    const int64_t grain = std::max<int64_t>(1, SMALLEST_SHARE / (p.key_dim * p.columns));
    const auto kernel = kernels_for(v).rule_step;
    parallel_for(0, p.work_items(), grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    return out;
}

// Contiguous, and of the type of states.
Tensor as_state(const Tensor& x, const Tensor& input) {
    const Tensor converted = x.scalar_type() == state_type(input) ? x : to(x, state_type(input));
    return converted.is_contiguous() ? converted : contiguous(converted);
}

// A selective scan, and the copies that it reads, contiguous and of the dtype of states.
struct ScanCall {
    Tensor A;
    optional<Tensor> D, initial;
    Scan p;

    ScanCall(const Tensor& u, const Tensor& delta, const Tensor& a, const Tensor& B, const Tensor& C,
             const optional<Tensor>& d, const optional<Tensor>& initial_state, int64_t interval)
        : A(as_state(a, u)), D(d ? optional(as_state(*d, u)) : std::nullopt), initial(contiguous_of(initial_state)) {
        if (interval < 0 || interval % 16) fail("interval is ", interval, "; it must be a multiple of 16, or 0");
        p.batch = u.size(0), p.time = u.size(1), p.channels = u.size(2), p.states = A.size(1);
        p.interval = interval;
        check_sizes("delta", delta, u.sizes());
        check_sizes("A", A, {p.channels, p.states});
        check_sizes("B", B, {p.batch, p.time, p.states});
        check_sizes("C", C, B.sizes());
        if (d) check_sizes("D", *d, {p.channels});
        if (initial_state) check_state("initial_state", *initial_state, u, {p.batch, p.channels, p.states});
        p.u = sequence("u", u, 3), p.delta = sequence("delta", delta, 3);
        p.B = sequence("B", B, 3), p.C = sequence("C", C, 3);
        p.A = data_of(A), p.D = data_of(D), p.initial_state = data_of(initial);
    }

    int64_t kept_states() const { return p.interval ? (p.time + p.interval - 1) / p.interval - 1 : 0; }

    void run(void (*kernel)(const Scan&, int64_t, int64_t), int64_t grain = 1) const {
        parallel_for(0, p.work_items(), grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    }
};

std::tuple<Tensor, Tensor, Tensor> selective_scan_forward(const Tensor& u, const Tensor& delta, const Tensor& A,
                                                          const Tensor& B, const Tensor& C, const optional<Tensor>& D,
                                                          const optional<Tensor>& initial_state, int64_t interval) {
    ScanCall call(u, delta, A, B, C, D, initial_state, interval);
    Scan& p = call.p;
    const ScalarType type = state_type(u);
    Tensor out = new_like(u);
    Tensor final_state = new_empty(u, {p.batch, p.channels, p.states}, type);
    Tensor kept = new_empty(u, {p.batch, call.kept_states(), p.states, p.channels}, type);
    p.out = sequence("out", out, 3), p.final_state = final_state.data_ptr(), p.kept = kept.data_ptr();
    call.run(kernels_for(u).scan_forward);
    return {out, final_state, kept};
}

// The sum over the first dimension, in its order, as the gradient of `x`.
Tensor total(const Tensor& parts, const Tensor& x) { return sum_of(parts, x, 1, x.size(-1)); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> selective_scan_backward(
    const Tensor& d_out, const optional<Tensor>& d_final_state, const Tensor& u, const Tensor& delta, const Tensor& A,
    const Tensor& B, const Tensor& C, const optional<Tensor>& D, const optional<Tensor>& initial_state,
    const Tensor& states, int64_t interval) {
    ScanCall call(u, delta, A, B, C, D, initial_state, interval);
    Scan& p = call.p;
    if (interval == 0) fail("the forward pass kept no states (interval 0)");
    check_state("states", states, u, {p.batch, call.kept_states(), p.states, p.channels});
    check_sizes("d_out", d_out, u.sizes());
    if (d_final_state) check_state("d_final_state", *d_final_state, u, {p.batch, p.channels, p.states});
    const ScalarType type = state_type(u);
    const Tensor dy = last_contiguous(d_out);
    const optional<Tensor> d_final = contiguous_of(d_final_state), kept = contiguous_of(states);
    Tensor du = new_like(u), d_delta = new_like(delta);
    Tensor dA = new_empty(u, {p.batch, p.channels, p.states}, type), dD = new_empty(u, {p.batch, p.channels}, type);
    Tensor dB = new_empty(u, {p.channel_blocks(), p.batch, p.time, p.states}, type), dC = new_like(dB);
    Tensor d_initial = initial_state ? new_empty(u, {p.batch, p.channels, p.states}, type) : new_empty(u, {0}, type);
    p.d_out = sequence("d_out", dy, 3), p.d_final_state = data_of(d_final), p.kept = data_of(kept);
    p.du = sequence("du", du, 3), p.d_delta = sequence("d_delta", d_delta, 3);
    for (auto [to, parts] : {std::pair(&p.dB, &dB), std::pair(&p.dC, &dC)}) {
        *to = {parts->data_ptr(), parts->stride(1), parts->stride(2), parts->stride(0),
               dtype_of("d", parts->scalar_type())};
    }
    p.dA = dA.data_ptr(), p.dD = dD.data_ptr(), p.d_initial_state = initial_state ? d_initial.data_ptr() : nullptr;
    call.run(kernels_for(u).scan_backward);
    const Tensor d_skip = D ? total(dD, *D) : new_empty(u, {0}, u.scalar_type());
    return {du, d_delta, total(dA, A), total(dB, B), total(dC, C), d_skip, d_initial};
}

Tensor selective_scan_step(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                           const optional<Tensor>& D, const Tensor& state) {
    if (u.size(1) != 1) fail("u has shape ", u.sizes(), "; a step takes one token");
    Tensor out = unfilled_like(u);
    ScanCall call(u, delta, A, B, C, D, {}, 0);
    Scan& p = call.p;
    check_own_state(state, u, {p.batch, p.channels, p.states});
    p.out = sequence("out", out, 3);
    p.state = state.data_ptr(), p.state_batch = state.stride(0), p.state_channel = state.stride(1);
    call.run(kernels_for(u).scan_step, std::max<int64_t>(1, SMALLEST_SHARE / (Scan::CHANNELS_PER_ITEM * p.states)));
    return out;
}

// Feature maps, gates and short convolutions on a CPU (native/operators.h).
struct Cpu {
    using Features = fairseq_fastweights::Features;
    using Gating = fairseq_fastweights::Gating;
    using Convolution = fairseq_fastweights::Convolution;

    struct Guard {
        explicit Guard(const Tensor&) {}
    };

    static void check(const Tensor&, int64_t) {}
    static int64_t size(const Tensor& x, int64_t dimension) { return x.size(dimension); }

    static void run(const Features& p, const Tensor& x, bool backward) {
        const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.heads * p.features()));
        run(&Kernels::features_forward, &Kernels::features_backward, p, x, backward, grain);
    }
    static void run(const Gating& p, const Tensor& x, bool backward) {
        run(&Kernels::gating_forward, &Kernels::gating_backward, p, x, backward);
    }
    static void run(const Convolution& p, const Tensor& x, bool backward) {
        run(&Kernels::convolution_forward, &Kernels::convolution_backward, p, x, backward);
    }

    static int64_t parts(const Gating& p) { return p.work_items(); }
    static int64_t parts(const Convolution& p) { return p.batch; }
    static int64_t rates(const Gating& p) { return p.rates; }
    static Tensor total(const Tensor& parts, const Tensor& x) { return fairseq_fastweights::total(parts, x); }

    static Tensor lengths(const Tensor& given, int64_t time) {
        const Tensor lengths = given.is_contiguous() ? given : contiguous(given);
        const auto* first = static_cast<const int64_t*>(lengths.data_ptr());
        for (const int64_t* length = first; length != first + lengths.numel(); ++length) {
            if (*length < 0 || *length > time) fail("lengths holds ", *length, "; it must be from 0 to ", time);
        }
        return lengths;
    }

private:
    template <class Call> using Member = void (*Kernels::*)(const Call&, int64_t, int64_t);

    template <class Call>
    static void run(Member<Call> forward, Member<Call> backward, const Call& p, const Tensor& x, bool is_backward,
                    int64_t grain = 1) {
        const auto kernel = kernels_for(x).*(is_backward ? backward : forward);
        parallel_for(0, p.work_items(), grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    }
};

std::string cpu_instruction_set() { return kernels_for(ScalarType::Float).instruction_set; }

FAST_WEIGHTS_OPERATORS(fairseq_fastweights, CPU, m) {
    m.impl("rule_forward", FAST_WEIGHTS_OPERATOR(rule_forward));
    m.impl("rule_backward", FAST_WEIGHTS_OPERATOR(rule_backward));
    m.impl("rule_step_", FAST_WEIGHTS_OPERATOR(rule_step_));
    m.impl("selective_scan_forward", FAST_WEIGHTS_OPERATOR(selective_scan_forward));
    m.impl("selective_scan_backward", FAST_WEIGHTS_OPERATOR(selective_scan_backward));
    m.impl("selective_scan_step_", FAST_WEIGHTS_OPERATOR(selective_scan_step));
    FAST_WEIGHTS_OPERATORS_OF(m, Cpu);
}

FAST_WEIGHTS_OPERATORS(fairseq_fastweights, CompositeExplicitAutograd, m) {
    m.impl("cpu_instruction_set", FAST_WEIGHTS_OPERATOR(cpu_instruction_set));
}

}  // namespace
}  // namespace fairseq_fastweights
