// The CPU kernels as torch operators. Their schemas, shape functions and derivatives are in
// fairseq_fastweights/ops/native_operators.py; native.py makes last dimensions contiguous.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace fast_weights {
namespace {

using std::optional;

Type type_of(const Tensor& x) {
    switch (x.scalar_type()) {
        case ScalarType::Float: return Type::float32;
        case ScalarType::Double: return Type::float64;
        case ScalarType::Half: return Type::float16;
        case ScalarType::BFloat16: return Type::bfloat16;
        default: fail("tensors must be of a floating-point type, not ", x.scalar_type());
    }
}

ScalarType state_type(const Tensor& v) {
    return v.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

bool last_is_contiguous(const Tensor& x) { return x.size(-1) <= 1 || x.stride(-1) == 1; }

// A tensor of `dims` dimensions, (batch, time, heads[, dim]) or (batch, time, channels), as kernels read it: where it has as
// many, its last dimension is contiguous.
Sequence sequence(const char* name, const Tensor& x, int64_t dims = 4) {
    const Sizes strides = x.strides();
    if (int64_t(strides.size()) == dims && strides[dims - 1] != 1 && x.size(-1) > 1 && x.numel()) {
        fail(name, " has strides ", strides, "; its last dimension must be contiguous");
    }
    return {x.data_ptr(), type_of(x), strides[0], strides[1], dims == 4 ? strides[2] : 0};
}

// The kernels trust the sizes of a call: a tensor that has others would be read beyond its end.
void check_sizes(const char* name, const Tensor& x, Sizes sizes) {
    if (!x.sizes().equals(sizes)) fail(name, " has shape ", x.sizes(), "; it must be ", sizes);
}

// Checks the type of an input: that of v; gates may also be of float32.
void check_type(const char* name, const Tensor& x, const Tensor& v, bool gate) {
    if (x.scalar_type() == v.scalar_type() || (gate && x.scalar_type() == ScalarType::Float)) return;
    fail(name, " is of type ", x.scalar_type(), "; it must be that of v, ", v.scalar_type());
}

// A state: what the kernels read in the type of states, whatever it has.
void check_state(const char* name, const Tensor& x, const Tensor& input, Sizes sizes) {
    check_sizes(name, x, sizes);
    if (x.scalar_type() == state_type(input)) return;
    fail(name, " is of type ", x.scalar_type(), "; it must be ", state_type(input), " for inputs of ",
         input.scalar_type());
}

// A tensor, contiguous; nothing of nothing. The result must outlive the pointer to its data.
optional<Tensor> contiguous_of(const optional<Tensor>& x) {
    if (!x || x->is_contiguous()) return x;
    return contiguous(*x);
}

void* data_of(const optional<Tensor>& x) { return x ? x->data_ptr() : nullptr; }

// The parts of the recurrence, as the operators take them.
struct Rule {
    const Tensor &q, &k, &v;
    const optional<Tensor>& erase;
    bool corrects;
    const optional<Tensor>&beta, &log_gate;
    bool complement;
    const optional<Tensor>&log_key_decay, &log_value_decay, &starts;

    // Fills in what a sequence and a step have in common; what it makes contiguous must outlive the call.
    template <class Call> optional<Tensor> fill(Call& p) const {
        if (corrects && log_value_decay) fail("a rule that corrects was given log_value_decay; there is no kernel");
        if (!corrects && (erase || beta)) fail("a rule that does not correct was given erase or beta");
        const int64_t batch = v.size(0), time = v.size(1);
        p.batch = batch, p.heads = v.size(2), p.keys = k.size(3), p.values = v.size(3);
        const auto of_keys = [&](const char* name, const Tensor& x) {
            const int64_t own = x.size(2);
            check_sizes(name, x, {batch, time, own, p.keys});
            check_type(name, x, v, false);
            if (own == 0 || p.heads % own) {
                fail("v has ", p.heads, " heads and ", name, " ", own, "; those of v must be a multiple");
            }
            Sequence keys = sequence(name, x);
            keys.sharing = p.heads / own;
            return keys;
        };
        const auto given = [&](const char* name, const optional<Tensor>& x, Sizes sizes) {
            if (!x) return Sequence{};
            check_sizes(name, *x, sizes);
            check_type(name, *x, v, true);
            return sequence(name, *x);
        };
        p.q = of_keys("q", q), p.k = of_keys("k", k), p.v = sequence("v", v);
        p.corrects = corrects, p.complement = complement;
        if (erase) p.erase = of_keys("erase", *erase);
        p.beta = given("beta", beta, {batch, time, p.heads});
        p.log_gate = given("log_gate", log_gate, {batch, time, p.heads});
        p.log_key_decay = given("log_key_decay", log_key_decay, {batch, time, p.heads, p.keys});
        p.log_value_decay = given("log_value_decay", log_value_decay, {batch, time, p.heads, p.values});
        if (!starts) return {};
        check_sizes("starts", *starts, {batch, time});
        if (starts->scalar_type() != ScalarType::Bool) fail("starts is of type ", starts->scalar_type());
        optional<Tensor> flags = contiguous_of(starts);
        p.starts = static_cast<const bool*>(flags->data_ptr());
        return flags;
    }
};

// The kernels that compute with numbers of this type.
const Kernels& kernels_for(ScalarType type) {
    const Kernels* found = kernels(type == ScalarType::Double);
    if (found) return *found;
    const char* wanted = std::getenv("FASTWEIGHTS_CPU_ISA");
    fail("FASTWEIGHTS_CPU_ISA is ", wanted ? wanted : "", "; here it may be one of ", fast_weights_instruction_sets());
}
const Kernels& kernels_for(const Tensor& x) { return kernels_for(x.scalar_type()); }

// Heads that one task takes through time together: as many as have their states in a core's second-level cache, but so
// few that every thread gets several tasks.
int64_t heads_together(const Problem& p, int64_t bytes_of_number) {
    const int64_t state = p.keys * p.values * bytes_of_number;
    int64_t group = std::clamp<int64_t>((256 << 10) / std::max<int64_t>(state, 1), 1, p.heads);
    const int64_t tasks = 3 * int64_t{get_num_threads()};
    while (group > 1 && p.batch * ((p.heads + group - 1) / group) < tasks) group = (group + 1) / 2;
    return group;
}

int64_t kept_states(const Problem& p) { return p.interval ? (p.time + p.interval - 1) / p.interval - 1 : 0; }

// The sums over `count` parts, each (rows, sharing, dim), and over what shares a row, in this order: (rows, dim).
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

// The gradient of `x`, whose dimension `rows_dim` and those before are rows, that contiguous `parts` of the type of states add up to.
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

// Blocks of value columns that a call is divided into where its heads are fewer than the threads. What is multiplied
// with keys alone is done once in each. Calls that take no longer than threads to meet stay whole.
struct Blocks {
    int64_t count = 1, width;

    explicit Blocks(const Problem& p) : width(p.columns) {
        const int64_t heads = p.batch * p.heads, threads = int64_t{get_num_threads()};
        if (heads == 0 || heads >= threads || p.time * p.keys * p.columns < 1 << 18) return;
        const int64_t wanted = std::min((threads + heads - 1) / heads, (p.columns + 15) / 16);
        width = ((p.columns + wanted - 1) / wanted + 15) / 16 * 16;
        count = (p.columns + width - 1) / width;
    }

    // Room for the gradient of `x`, in which all blocks, and `sharing` heads each, have a share: as it is, or a part for
    // each of them.
    Tensor room(const Tensor& x, int64_t sharing = 1) const {
        if (count * sharing == 1) return new_like(x);
        const Sizes own = x.sizes();
        std::vector<int64_t> sizes(own.begin(), own.end());
        sizes[2] *= sharing;
        sizes.insert(sizes.begin(), count);
        return new_empty(x, sizes, state_type(x));
    }

    // The part of the first block.
    static Sequence first(const char* name, const Tensor& room, const Tensor& x) {
        if (room.dim() == x.dim()) return sequence(name, room);
        const Sizes strides = room.strides();
        return {room.data_ptr(), type_of(room), strides[1], strides[2], strides[3]};
    }

    // The gradient of `x` that the parts add up to, in the order of the heads and of the blocks.
    static Tensor total(const Tensor& room, const Tensor& x) {
        if (room.dim() == x.dim()) return room;
        return sum_of(room, x, x.size(2) ? room.size(3) / x.size(2) : 1, x.dim() == 4 ? x.size(3) : 1);
    }

    Problem block(const Problem& p, int64_t number) const {
        Problem block = p;
        const int64_t start = number * width;
        block.values = std::min(width, p.columns - start);
        for (Sequence* x :
             {&block.v, &block.log_value_decay, &block.out, &block.d_out, &block.dv, &block.d_log_value_decay}) {
            advance(*x, start);
        }
        for (Sequence* x :
             {&block.dq, &block.dk, &block.d_erase, &block.d_beta, &block.d_log_gate, &block.d_log_key_decay}) {
            advance(*x, number * p.batch * x->batch);
        }
        const int64_t bytes = start * (p.v.type == Type::float64 ? 8 : 4);
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
        const int64_t size = x.type == Type::float64 ? 8 : x.type == Type::float32 ? 4 : 2;
        if (x.data) x.data = static_cast<char*>(x.data) + elements * size;
    }
};

using Kernel = void (*)(const Problem&, int64_t, int64_t);

void run(Kernel kernel, const Problem& p, const Blocks& blocks) {
    const int64_t tasks = p.tasks();
    parallel_for(0, blocks.count * tasks, 1, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t number = begin / tasks, before = number * tasks, last = std::min(end, before + tasks);
            kernel(blocks.block(p, number), begin - before, last - before);
            begin = last;
        }
    });
}

// A call on a sequence, and what it has made contiguous.
struct Call {
    Problem p;
    optional<Tensor> starts, initial;

    Call(const Rule& rule, const optional<Tensor>& initial_state, int64_t interval)
        : starts(rule.fill(p)), initial(contiguous_of(initial_state)) {
        if (interval < 0 || interval % 16) fail("interval is ", interval, "; it must be a multiple of 16, or 0");
        p.time = rule.v.size(1), p.columns = p.values, p.interval = interval;
        if (initial_state) {
            check_state("initial_state", *initial_state, rule.v, {p.batch, p.heads, p.keys, p.values});
        }
        p.group = heads_together(p, rule.v.scalar_type() == ScalarType::Double ? 8 : 4);
        p.initial_state = data_of(initial);
    }
};

std::tuple<Tensor, Tensor, Tensor> forward(const Rule& rule, const optional<Tensor>& initial_state, int64_t interval) {
    Call call(rule, initial_state, interval);
    Problem& p = call.p;
    const ScalarType type = state_type(rule.v);
    Tensor out = new_like(rule.v);
    Tensor final_state = new_empty(rule.v, {p.batch, p.heads, p.keys, p.values}, type);
    Tensor states = new_empty(rule.v, {p.batch, p.heads, kept_states(p), p.keys, p.values}, type);
    p.out = sequence("out", out), p.final_state = final_state.data_ptr(), p.states = states.data_ptr();
    run(kernels_for(rule.v).rule_forward, p, Blocks(p));
    return {out, final_state, states};
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Tensor& d_out, const optional<Tensor>& d_final_state, const Rule& rule,
                   const optional<Tensor>& initial_state, const Tensor& states, int64_t interval) {
    Call call(rule, initial_state, interval);
    Problem& p = call.p;
    const Tensor& v = rule.v;
    if (p.interval == 0) fail("the forward pass kept no states (interval 0)");
    check_state("states", states, v, {p.batch, p.heads, kept_states(p), p.keys, p.values});
    const Blocks blocks(p);
    check_sizes("d_out", d_out, v.sizes());
    const Tensor dy = last_is_contiguous(d_out) ? d_out : contiguous(d_out);
    if (d_final_state) check_state("d_final_state", *d_final_state, v, {p.batch, p.heads, p.keys, p.values});
    const optional<Tensor> d_final = contiguous_of(d_final_state), kept = contiguous_of(states);
    // The gradient of an absent input is an empty tensor. Columns of v and of the decays of values are no block's but one's.
    const auto room = [&](const optional<Tensor>& x, Sequence& where, const char* name, int64_t sharing = 1) {
        if (!x) return new_empty(v, {0}, v.scalar_type());
        const Tensor made = sharing ? blocks.room(*x, sharing) : new_like(*x);
        where = Blocks::first(name, made, *x);
        return made;
    };
    const auto total = [](const Tensor& made, const optional<Tensor>& x) { return x ? Blocks::total(made, *x) : made; };
    const Tensor dq = room(rule.q, p.dq, "dq", p.q.sharing), dk = room(rule.k, p.dk, "dk", p.k.sharing);
    const Tensor dv = room(v, p.dv, "dv", 0), d_erase = room(rule.erase, p.d_erase, "d_erase", p.erase.sharing);
    const Tensor d_beta = room(rule.beta, p.d_beta, "d_beta");
    const Tensor d_gate = room(rule.log_gate, p.d_log_gate, "d_log_gate");
    const Tensor df = room(rule.log_key_decay, p.d_log_key_decay, "d_log_key_decay");
    const Tensor dz = room(rule.log_value_decay, p.d_log_value_decay, "d_log_value_decay", 0);
    const ScalarType type = state_type(v);
    const Tensor d_initial =
        initial_state ? new_empty(v, {p.batch, p.heads, p.keys, p.values}, type) : new_empty(v, {0}, type);
    p.d_out = sequence("d_out", dy), p.d_final_state = data_of(d_final), p.states = data_of(kept);
    p.d_initial_state = initial_state ? d_initial.data_ptr() : nullptr;
    run(kernels_for(v).rule_backward, p, blocks);
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

// The state of a step, which is changed where it lies.
void check_own_state(const Tensor& state, const Tensor& input, Sizes sizes) {
    check_state("state", state, input, sizes);
    if (last_is_contiguous(state)) return;
    fail("state has strides ", state.strides(), "; its last dimension must be contiguous");
}

// Fewer numbers of state are not worth another thread.
constexpr int64_t SMALLEST_SHARE = 65536;

Tensor step(const Rule& rule, const Tensor& state) {
    const Tensor& v = rule.v;
    if (v.size(1) != 1) fail("v has shape ", v.sizes(), "; a step takes one token");
    Tensor out = unfilled_like(v);
    Step p;
    const optional<Tensor> starts = rule.fill(p);
    check_own_state(state, v, {p.batch, p.heads, p.keys, p.values});
    p.out = sequence("out", out), p.state = state.data_ptr();
    p.state_batch = state.stride(0), p.state_head = state.stride(1), p.state_key = state.stride(2);
    const int64_t grain = std::max<int64_t>(1, SMALLEST_SHARE / (p.keys * p.values));
    const auto kernel = kernels_for(v).rule_step;
    parallel_for(0, p.tasks(), grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    return out;
}

// As torch calls them.
#define FAST_WEIGHTS_RULE_PARAMETERS                                                                \
    const Tensor &q, const Tensor &k, const Tensor &v, const optional<Tensor>&erase, bool corrects, \
        const optional<Tensor>&beta, const optional<Tensor>&log_gate, bool complement,              \
        const optional<Tensor>&log_key_decay, const optional<Tensor>&log_value_decay, const optional<Tensor>&starts
#define FAST_WEIGHTS_RULE \
    Rule { q, k, v, erase, corrects, beta, log_gate, complement, log_key_decay, log_value_decay, starts }

std::tuple<Tensor, Tensor, Tensor> rule_forward(FAST_WEIGHTS_RULE_PARAMETERS, const optional<Tensor>& initial_state,
                                                int64_t interval) {
    return forward(FAST_WEIGHTS_RULE, initial_state, interval);
}

Gradients rule_backward(const Tensor& d_out, const optional<Tensor>& d_final_state, FAST_WEIGHTS_RULE_PARAMETERS,
                        const optional<Tensor>& initial_state, const Tensor& states, int64_t interval) {
    return backward(d_out, d_final_state, FAST_WEIGHTS_RULE, initial_state, states, interval);
}

Tensor rule_step_(FAST_WEIGHTS_RULE_PARAMETERS, const Tensor& state) { return step(FAST_WEIGHTS_RULE, state); }

// Contiguous, and of the type of states.
Tensor as_state(const Tensor& x, const Tensor& input) {
    const Tensor converted = x.scalar_type() == state_type(input) ? x : to(x, state_type(input));
    return converted.is_contiguous() ? converted : contiguous(converted);
}

// A selective scan. What it makes contiguous, and of the dtype of states, must outlive it.
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
        parallel_for(0, p.tasks(), grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
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
    const Tensor dy = last_is_contiguous(d_out) ? d_out : contiguous(d_out);
    const optional<Tensor> d_final = contiguous_of(d_final_state), kept = contiguous_of(states);
    Tensor du = new_like(u), d_delta = new_like(delta);
    Tensor dA = new_empty(u, {p.batch, p.channels, p.states}, type), dD = new_empty(u, {p.batch, p.channels}, type);
    Tensor dB = new_empty(u, {p.groups(), p.batch, p.time, p.states}, type), dC = new_like(dB);
    Tensor d_initial = initial_state ? new_empty(u, {p.batch, p.channels, p.states}, type) : new_empty(u, {0}, type);
    p.d_out = sequence("d_out", dy, 3), p.d_final_state = data_of(d_final), p.kept = data_of(kept);
    p.du = sequence("du", du, 3), p.d_delta = sequence("d_delta", d_delta, 3);
    for (auto [to, parts] : {std::pair(&p.dB, &dB), std::pair(&p.dC, &dC)}) {
        *to = {parts->data_ptr(), type_of(*parts), parts->stride(1), parts->stride(2), parts->stride(0)};
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
    call.run(kernels_for(u).scan_step, std::max<int64_t>(1, SMALLEST_SHARE / (Scan::GROUP * p.states)));
    return out;
}

// Feature maps of x, (batch, time, heads, dim). `map` and `normalization` are numbers of the enumerations in kernels.h.
Features features_of(const Tensor& x, int64_t map, int64_t nu, int64_t normalization, double eps, double scale) {
    if (x.dim() != 4) fail("x has shape ", x.sizes(), "; it must be (batch, time, heads, dim)");
    Features p;
    p.batch = x.size(0), p.time = x.size(1), p.heads = x.size(2), p.dim = x.size(3);
    if (map < 0 || map > int64_t(Map::dpfp)) fail("map is ", map, "; it must be from 0 to ", int64_t(Map::dpfp));
    if (normalization < 0 || normalization > int64_t(Normalization::length)) {
        fail("normalization is ", normalization, "; it must be from 0 to ", int64_t(Normalization::length));
    }
    p.map = Map(map), p.normalization = Normalization(normalization), p.eps = eps, p.scale = scale;
    if (p.map == Map::dpfp && (nu < 1 || nu >= 2 * p.dim)) {
        fail("nu is ", nu, "; it must be from 1 to ", 2 * p.dim - 1);
    }
    p.nu = p.map == Map::dpfp ? nu : 0;
    p.x = sequence("x", x);
    return p;
}

void run_features(void (*kernel)(const Features&, int64_t, int64_t), const Features& p) {
    const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.heads * p.features()));
    parallel_for(0, p.tasks(), grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

// In x's layout, unless its last dimension has gaps: so the gradient of a projection is no copy.
Tensor gradient_like(const Tensor& x) {
    const Tensor made = new_like(x);
    return last_is_contiguous(made) ? made : new_empty(x, x.sizes(), x.scalar_type());
}

Tensor map_features(const Tensor& x, int64_t map, int64_t nu, int64_t normalization, double eps, double scale,
                    ScalarType dtype) {
    Features p = features_of(x, map, nu, normalization, eps, scale);
    const Tensor y = new_empty(x, {p.batch, p.time, p.heads, p.features()}, dtype);
    p.y = sequence("y", y);
    run_features(kernels_for(x).features_forward, p);
    return y;
}

Tensor map_features_backward(const Tensor& d_out, const Tensor& x, int64_t map, int64_t nu, int64_t normalization,
                             double eps, double scale) {
    Features p = features_of(x, map, nu, normalization, eps, scale);
    check_sizes("d_out", d_out, {p.batch, p.time, p.heads, p.features()});
    const Tensor dy = last_is_contiguous(d_out) ? d_out : contiguous(d_out);
    const Tensor dx = gradient_like(x);
    p.dy = sequence("d_out", dy), p.dx = sequence("dx", dx);
    run_features(kernels_for(x).features_backward, p);
    return dx;
}

// Random features of `source`, of which x are the projections: both (batch, time, heads, dim).
Features random_features_of(const Tensor& x, const Tensor& source, double source_scale, double log_epsilon,
                            bool stabilized, int64_t normalization, double eps) {
    Features p = features_of(x, 0, 1, normalization, eps, 1);
    check_sizes("source", source, {p.batch, p.time, p.heads, source.size(-1)});
    p.map = Map::random, p.source = sequence("source", source), p.source_dim = source.size(-1);
    p.source_scale = source_scale, p.log_epsilon = log_epsilon, p.stabilized = stabilized;
    return p;
}

Tensor random_features(const Tensor& x, const Tensor& source, double source_scale, double log_epsilon, bool stabilized,
                       int64_t normalization, double eps, ScalarType dtype) {
    Features p = random_features_of(x, source, source_scale, log_epsilon, stabilized, normalization, eps);
    const Tensor y = new_empty(x, {p.batch, p.time, p.heads, p.features()}, dtype);
    p.y = sequence("y", y);
    run_features(kernels_for(x).features_forward, p);
    return y;
}

std::tuple<Tensor, Tensor> random_features_backward(const Tensor& d_out, const Tensor& x, const Tensor& source,
                                                    double source_scale, double log_epsilon, bool stabilized,
                                                    int64_t normalization, double eps) {
    Features p = random_features_of(x, source, source_scale, log_epsilon, stabilized, normalization, eps);
    check_sizes("d_out", d_out, {p.batch, p.time, p.heads, p.features()});
    const Tensor dy = last_is_contiguous(d_out) ? d_out : contiguous(d_out);
    const Tensor dx = gradient_like(x), d_source = gradient_like(source);
    p.dy = sequence("d_out", dy), p.dx = sequence("dx", dx), p.d_source = sequence("d_source", d_source);
    run_features(kernels_for(x).features_backward, p);
    return {dx, d_source};
}

// The gradient of what is absent: no two results of an operator may share memory.
Tensor nothing(const Tensor& x) { return new_empty(x, {0}, x.scalar_type()); }

// Vectors of parameters, as the kernels read them; what it makes contiguous must outlive the call.
Sequence parameters(const char* name, optional<Tensor>& x, Sizes sizes) {
    if (!x) return {};
    check_sizes(name, *x, sizes);
    x = contiguous_of(x);
    return {x->data_ptr(), type_of(*x)};
}

// A call of gates, and what it has made contiguous. `activation` and `norm` are numbers of the enumerations in kernels.h.
struct GatingCall {
    optional<Tensor> bias, log_rate, weight;
    Gating p;

    GatingCall(const Tensor& x, const optional<Tensor>& b, const optional<Tensor>& A, const optional<Tensor>& y,
               const optional<Tensor>& w, int64_t activation, int64_t norm, double eps, double scale)
        : bias(b), log_rate(A), weight(w) {
        if (x.dim() != 3 || x.size(2) < 1) fail("x has shape ", x.sizes(), "; it must be (outer, inner, channels)");
        if (activation < 0 || activation > int64_t(Activation::softplus)) {
            fail("activation is ", activation, "; it must be from 0 to ", int64_t(Activation::softplus));
        }
        if (norm < 0 || norm > int64_t(Norm::layer)) {
            fail("norm is ", norm, "; it must be from 0 to ", int64_t(Norm::layer));
        }
        p.outer = x.size(0), p.inner = x.size(1), p.dim = x.size(2);
        p.activation = Activation(activation), p.norm = Norm(norm), p.eps = eps, p.scale = scale;
        p.x = sequence("x", x, 3);
        if (p.norm == Norm::none) {
            if (w) fail("weight was given without a norm");
            if (y) check_sizes("y", *y, x.sizes());
        } else {
            if (!y || b || A) fail("a norm is of y alone, without bias and log_rate");
            p.dim = y->dim() == 4 && y->size(3) ? y->size(3) : 1, p.heads = x.size(2) / p.dim;
            check_sizes("y", *y, {p.outer, p.inner, p.heads, p.dim});
        }
        if (y) p.y = sequence("y", *y, y->dim());
        p.bias = parameters("bias", bias, {p.channels()}), p.weight = parameters("weight", weight, {p.dim});
        p.rates = A && A->dim() == 1 && A->size(0) ? A->size(0) : 1;
        p.log_rate = parameters("log_rate", log_rate, {p.rates});
        if (p.channels() % p.rates) fail("log_rate has ", p.rates, " numbers for ", p.channels(), " channels");
    }

    void run(void (*kernel)(const Gating&, int64_t, int64_t)) const {
        parallel_for(0, p.tasks(), 1, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    }
};

Tensor gate(const Tensor& x, const optional<Tensor>& bias, const optional<Tensor>& log_rate, const optional<Tensor>& y,
            const optional<Tensor>& weight, int64_t activation, int64_t norm, double eps, double scale,
            ScalarType dtype) {
    GatingCall call(x, bias, log_rate, y, weight, activation, norm, eps, scale);
    const Tensor out = new_empty(x, x.sizes(), dtype);
    call.p.out = sequence("out", out, 3);
    call.run(kernels_for(x).gating_forward);
    return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gate_backward(const Tensor& d_out, const Tensor& x,
                                                                 const optional<Tensor>& bias,
                                                                 const optional<Tensor>& log_rate,
                                                                 const optional<Tensor>& y,
                                                                 const optional<Tensor>& weight, int64_t activation,
                                                                 int64_t norm, double eps, double scale) {
    GatingCall call(x, bias, log_rate, y, weight, activation, norm, eps, scale);
    Gating& p = call.p;
    check_sizes("d_out", d_out, x.sizes());
    const Tensor g = last_is_contiguous(d_out) ? d_out : contiguous(d_out), dx = gradient_like(x);
    const Tensor dy = y ? gradient_like(*y) : nothing(x);
    // The gradient of an absent input is an empty tensor; each task has a part of the gradients of parameters.
    const auto parts = [&](const optional<Tensor>& of, int64_t size, void*& where) {
        const Tensor made = of ? new_empty(x, {p.tasks(), size}, state_type(x)) : nothing(x);
        where = of ? made.data_ptr() : nullptr;
        return made;
    };
    const Tensor d_bias = parts(bias, p.channels(), p.d_bias), d_rate = parts(log_rate, p.rates, p.d_log_rate);
    const Tensor d_weight = parts(weight, p.dim, p.d_weight);
    p.d_out = sequence("d_out", g, 3), p.dx = sequence("dx", dx, 3);
    if (y) p.dy = sequence("dy", dy, y->dim());
    call.run(kernels_for(x).gating_backward);
    const auto total_of = [](const Tensor& made, const optional<Tensor>& of) { return of ? total(made, *of) : made; };
    return {dx, total_of(d_bias, bias), total_of(d_rate, log_rate), dy, total_of(d_weight, weight)};
}

// A short convolution of x, (time, batch, channels), and what it has made contiguous.
struct ConvolutionCall {
    optional<Tensor> weight, bias, starts, lengths;
    Convolution p;

    ConvolutionCall(const Tensor& x, const Tensor& w, const optional<Tensor>& b, const optional<Tensor>& before,
                    const optional<Tensor>& given_lengths, const optional<Tensor>& given_starts)
        : weight(w), bias(b), starts(contiguous_of(given_starts)), lengths(contiguous_of(given_lengths)) {
        if (x.dim() != 3) fail("x has shape ", x.sizes(), "; it must be (time, batch, channels)");
        p.time = x.size(0), p.batch = x.size(1), p.channels = x.size(2);
        p.width = w.dim() == 2 && w.size(1) ? w.size(1) : 1;
        p.weight = parameters("weight", weight, {p.channels, p.width}), p.bias = parameters("bias", bias, {p.channels});
        p.x = time_first("x", x);
        if (before) {
            check_sizes("before", *before, {p.batch, p.width - 1, p.channels});
            p.before = sequence("before", *before, 3);
        }
        if (starts) {
            check_sizes("starts", *starts, {p.batch, p.time});
            if (starts->scalar_type() != ScalarType::Bool) fail("starts is of type ", starts->scalar_type());
            p.starts = static_cast<const bool*>(starts->data_ptr());
        }
        if (lengths) {
            check_sizes("lengths", *lengths, {p.batch});
            if (lengths->scalar_type() != ScalarType::Long) fail("lengths is of type ", lengths->scalar_type());
            p.lengths = static_cast<const int64_t*>(lengths->data_ptr());
            for (int64_t i = 0; i < p.batch; ++i) {
                if (p.lengths[i] >= 0 && p.lengths[i] <= p.time) continue;
                fail("lengths holds ", p.lengths[i], "; it must be from 0 to ", p.time);
            }
        }
    }

    static Sequence time_first(const char* name, const Tensor& x) {
        Sequence made = sequence(name, x, 3);
        std::swap(made.batch, made.time);
        return made;
    }

    void run(void (*kernel)(const Convolution&, int64_t, int64_t)) const {
        parallel_for(0, p.tasks(), 1, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    }
};

std::tuple<Tensor, Tensor> short_convolution(const Tensor& x, const Tensor& weight, const optional<Tensor>& bias,
                                             const optional<Tensor>& before, const optional<Tensor>& lengths,
                                             const optional<Tensor>& starts) {
    ConvolutionCall call(x, weight, bias, before, lengths, starts);
    Convolution& p = call.p;
    const Tensor y = new_empty(x, x.sizes(), x.scalar_type());
    const Tensor last = new_empty(x, {p.batch, p.width - 1, p.channels}, state_type(x));
    p.y = call.time_first("y", y), p.last = sequence("last", last, 3);
    call.run(kernels_for(x).convolution_forward);
    return {y, last};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> short_convolution_backward(const Tensor& d_y, const optional<Tensor>& d_last,
                                                                      const Tensor& x, const Tensor& weight,
                                                                      const optional<Tensor>& bias,
                                                                      const optional<Tensor>& before,
                                                                      const optional<Tensor>& lengths,
                                                                      const optional<Tensor>& starts) {
    ConvolutionCall call(x, weight, bias, before, lengths, starts);
    Convolution& p = call.p;
    check_sizes("d_y", d_y, x.sizes());
    const Tensor g = last_is_contiguous(d_y) ? d_y : contiguous(d_y);
    const optional<Tensor> d_after = contiguous_of(d_last);
    p.d_y = call.time_first("d_y", g);
    if (d_after) {
        check_sizes("d_last", *d_after, {p.batch, p.width - 1, p.channels});
        p.d_last = sequence("d_last", *d_after, 3);
    }
    const Tensor dx = gradient_like(x), d_before = before ? gradient_like(*before) : nothing(x);
    p.dx = call.time_first("dx", dx);
    if (before) p.d_before = sequence("d_before", d_before, 3);
    const Tensor dw = new_empty(x, {p.batch, p.channels, p.width}, state_type(x));
    const Tensor db = new_empty(x, {p.batch, p.channels}, state_type(x));
    p.dw = dw.data_ptr(), p.db = db.data_ptr();
    call.run(kernels_for(x).convolution_backward);
    return {dx, total(dw, weight), bias ? total(db, *bias) : nothing(x), d_before};
}

std::string cpu_instruction_set() { return kernels_for(ScalarType::Float).instruction_set; }

FAST_WEIGHTS_OPERATORS(fairseq_fastweights, CPU, m) {
    m.impl("rule_forward", FAST_WEIGHTS_OPERATOR(rule_forward));
    m.impl("rule_backward", FAST_WEIGHTS_OPERATOR(rule_backward));
    m.impl("rule_step_", FAST_WEIGHTS_OPERATOR(rule_step_));
    m.impl("selective_scan_forward", FAST_WEIGHTS_OPERATOR(selective_scan_forward));
    m.impl("selective_scan_backward", FAST_WEIGHTS_OPERATOR(selective_scan_backward));
    m.impl("selective_scan_step_", FAST_WEIGHTS_OPERATOR(selective_scan_step));
    m.impl("map_features", FAST_WEIGHTS_OPERATOR(map_features));
    m.impl("map_features_backward", FAST_WEIGHTS_OPERATOR(map_features_backward));
    m.impl("random_features", FAST_WEIGHTS_OPERATOR(random_features));
    m.impl("random_features_backward", FAST_WEIGHTS_OPERATOR(random_features_backward));
    m.impl("gate", FAST_WEIGHTS_OPERATOR(gate));
    m.impl("gate_backward", FAST_WEIGHTS_OPERATOR(gate_backward));
    m.impl("short_convolution", FAST_WEIGHTS_OPERATOR(short_convolution));
    m.impl("short_convolution_backward", FAST_WEIGHTS_OPERATOR(short_convolution_backward));
}

FAST_WEIGHTS_OPERATORS(fairseq_fastweights, CompositeExplicitAutograd, m) {
    m.impl("cpu_instruction_set", FAST_WEIGHTS_OPERATOR(cpu_instruction_set));
}

}  // namespace
}  // namespace fast_weights
