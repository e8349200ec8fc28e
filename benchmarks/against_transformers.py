"""Kernels, layers and models of this project beside Hugging Face's Transformers, in turns; ratios are of medians.

    .venv/bin/python benchmarks/against_transformers.py SUBJECT [--threads 1] [--rounds 5] [--out results.json]

mixers: Mamba's selective scan, its kernels, its form by chunks and the scan of Transformers, one step after the other;
a layer of `Mamba` and a `MambaMixer` with the same weights; local attention and ABC beside softmax attention.
gated_delta: the gated delta rule and the functions that Qwen3-Next runs, given normalised queries and keys and one gate
for each head; beside them the plain delta rule, and the rule with a gate for each key dimension (Kimi delta attention).
models: random models of the real classes, Qwen3-Next and Kimi-Linear of about 100 million parameters, before and after
`integrations.transformers.install`: a prompt, and a token after it. Their logits are compared first. "no rule" is the
same without the rule's work, which no implementation of the rule can beat.
converted: a decode step of a random model in the shape of SmolLM2-135M, by transformers' class, by this package, and
with linear attention in some of its layers, or in all. Times are CPU times, with one thread, or with --device cuda
those of a GPU.
--compiled NAME ... adds compiled steps of these models for a batch of one, which takes minutes each.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from harness import converted, records
from harness.program import finish, make_parser, parse
from harness.timing import Clock, CudaClock, ProcessorClock, clock_for, first_calls, time_in_turns
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next

from fairseq_fastweights import ops
from fairseq_fastweights.freed_memory import keep_freed_memory
from fairseq_fastweights.integrations.transformers import install
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.registry import build_mixer

Calls = dict[str, Callable[[], Any]]
Comparison = tuple[str, str, int, Calls]
"""Part, pass, time steps of a call, and calls by name, of which the first is the base of the ratios. The pass
"forward+backward" differentiates the tensor that a call returns, or the first of several; no other pass does."""
PEER = "transformers"
# The scan's backward pass goes over all steps as often as there are steps, which for many takes minutes.
LONGEST_BACKWARD_OF_PEER = 64
HEADS, STEPS = 8, 100  # of the gated delta rule
ALL_MODELS = {"num_attention_heads": 8, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ALL_MODELS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 352}
# The settings of each model beside the sizes and ALL_MODELS.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-Next": {
        **{"num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"num_experts": 4, "shared_expert_intermediate_size": 352},
    },
    "Kimi-Linear": {
        **{"num_key_value_heads": 8, "linear_num_heads": 8, "linear_head_dim": 64, "num_local_experts": 4},
        **{"kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
    },
}


def scans(time: int, batch: int, channels: int, state: int) -> Calls:
    """By name a forward pass; each gets its inputs in the memory layout that it wants."""
    u, B, C = (torch.randn(batch, time, size, requires_grad=True) for size in (channels, state, state))
    delta = F.softplus(torch.randn(batch, time, channels) - 4).requires_grad_()
    # Mamba's initial values: A = -(1, ..., state) for each channel, steps of about softplus(-4) = 0.02.
    A = -torch.arange(1.0, state + 1).repeat(channels, 1)
    A.requires_grad_()
    D = torch.ones(channels, requires_grad=True)
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (u, delta, B, C)]
    ours = {name: partial(ops.selective_scan, u, delta, A, B, C, D, backend=name) for name in ("native", "chunkwise")}
    return {**ours, PEER: partial(modeling_mamba.mamba_selective_scan, *theirs[:2], A, *theirs[2:], D)}


def layers(time: int, batch: int, channels: int, state: int) -> Calls:
    config = transformers.MambaConfig(hidden_size=channels // 2, state_size=state, num_hidden_layers=1)
    theirs = modeling_mamba.MambaMixer(config, layer_idx=0)
    ours = Mamba(channels // 2, state=state)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(time, batch, channels // 2, requires_grad=True)
    x_theirs = x.detach().transpose(0, 1).contiguous().requires_grad_()
    return {"Mamba": partial(ours, x), PEER: partial(theirs, x_theirs)}


def attention(time: int, batch: int, channels: int, state: int) -> Calls:
    """Layers of one row, in heads of 64 but where they are tiny."""
    x = torch.randn(time, 1, channels, requires_grad=True)
    settings = {"num_heads": max(1, channels // 64)}
    return {name: partial(build_mixer(name, channels, settings), x) for name in ("softmax", "local", "abc")}


def mixers(sizes: dict[str, int], quick: bool) -> Iterator[Comparison]:
    cases = [("forward", 1024), ("forward+backward", 1024), ("forward+backward", LONGEST_BACKWARD_OF_PEER)]
    lengths = [("forward+backward", 4**n) for n in range(4, 8)]
    if quick:
        cases = lengths = [("forward", 8), ("forward+backward", 8)]
    parts = {"scan": (scans, cases), "layer": (layers, cases), "attention": (attention, lengths)}
    for name, (prepare, its_cases) in parts.items():
        for kind, time in its_cases:
            calls = prepare(time, **sizes)
            if kind != "forward" and time > LONGEST_BACKWARD_OF_PEER:
                calls.pop(PEER, None)
            yield name, kind, time, calls


def rules(batch: int, time: int, dim: int) -> Calls:
    q, k, v = (torch.randn(batch, time, HEADS, dim) for _ in range(3))
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    # Decays are logarithms: negative, one for each head or for each key dimension.
    beta, by_head, by_key = torch.rand(batch, time, HEADS), -torch.rand(batch, time, HEADS), -torch.rand_like(k)
    for x in (q, k, v, beta, by_head, by_key):
        x.requires_grad_()
    ours, peer = {}, {}
    call = modeling_qwen3_next.torch_chunk_gated_delta_rule
    if time == 1:
        state = torch.randn(batch, HEADS, dim, dim)
        ours, peer = ({"initial_state": state, name: True} for name in ("in_place", "output_final_state"))
        call = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    calls = {
        "gated delta": partial(ops.gated_delta_rule, q, k, v, beta, by_head, **ours),
        "delta": partial(ops.delta_rule, q, k, v, beta, **ours),
        "Kimi delta": partial(ops.gated_delta_rule, q, k, v, beta, by_key, **ours),
        PEER: partial(call, q, k, v, g=by_head, beta=beta, **peer),
    }
    # A single step would start with the caches that another implementation has filled.
    return calls if time > 1 else {name: lambda c=c: [c() for _ in range(STEPS)] for name, c in calls.items()}


def gated_delta(sizes: dict[str, tuple[int, int, int]], quick: bool) -> Iterator[Comparison]:
    """By part the sizes are rows, steps and the dimension of a head."""
    for part, (batch, time, dim) in sizes.items():
        for kind in ("forward", "forward+backward"):
            yield part, kind, time, rules(batch, time, dim)
        yield part, "steps", STEPS, rules(1, 1, dim)


def models(sizes: dict[str, Any], quick: bool) -> Iterator[Comparison]:
    for name, settings in MODELS.items():
        torch.manual_seed(0)
        kind = name.replace("-", "")
        # Three layers of linear attention for one of softmax attention, as in the released models.
        kinds = [*["linear_attention"] * 3, "full_attention"] * (sizes["num_hidden_layers"] // 4)
        config = getattr(transformers, f"{kind}Config")(**sizes, layer_types=kinds, **ALL_MODELS, **settings)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        module = sys.modules[type(model).__module__]
        before = dict(vars(module))
        yield from both_ways(name, model, prompt=20 if quick else 2048)
        vars(module).update(before)


def no_rule(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Stands in for a rule, in next to no time."""
    batch, _, heads, value_dim = value.shape
    return value, value.new_zeros(batch, heads, key.shape[-1], value_dim)


def both_ways(name: str, model: Any, prompt: int) -> list[Comparison]:
    """A prompt, and a token after a prompt."""
    text = torch.randint(2, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(1))
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    with install(model):
        installed = {name: x for name, x in vars(module).items() if before[name] is not x}
    prefill, token, logits = {}, {}, []

    def call(functions: dict[str, Any], text: Tensor, **options: Any) -> Tensor:
        # Only the functions are exchanged here, which takes microseconds; `install` takes milliseconds.
        vars(module).update(functions)
        return model(text, **options).logits

    ways = {"installed": installed, PEER: {name: before[name] for name in installed}}
    ways["no rule"] = {name: no_rule if "delta" in name else x for name, x in installed.items()}
    for way, functions in ways.items():
        vars(module).update(functions)
        with torch.no_grad():
            first = model(text, use_cache=True)
        logits.append(first.logits)
        prefill[way] = partial(call, functions, text)
        # Each call appends a token to its cache, which grows alike in both.
        token[way] = partial(call, functions, text[:, :1], past_key_values=first.past_key_values)
    ours, theirs, _ = logits
    check_alike(ours, theirs)
    return [(name, "prefill", prompt, prefill), (name, "token", 1, token)]


def conversions(sizes: dict[str, Any], quick: bool) -> Iterator[Comparison]:
    """Decode steps of a batch of texts after a number of tokens, by `sizes["lengths"]`."""
    shape = sizes["shape"]
    peer = converted.llama(shape).to(sizes["device"])
    models = {"source": converted.converted(peer, "", ""), PEER: peer}
    for (where, layers), mixer in itertools.product(converted.layers_of(shape).items(), converted.MEMORIES):
        models[f"{mixer} {where}"] = converted.converted(peer, mixer, layers)
    text = torch.randint(4, shape["vocab_size"], (2, 9), device=peer.device)
    # The conversion without linear attention must be the base model itself.
    with torch.no_grad():
        check_alike(*(models[name](text).logits for name in ("source", PEER)))
    wanted, able = sizes.get("compiled", []), [name for name in models if name != PEER]
    if unknown := [name for name in wanted if name not in able]:
        sys.exit(f"--compiled has {unknown[0]!r}; it must have some of {', '.join(map(repr, able))}")
    compiled = {name: converted.compiled(models[name]) for name in wanted}
    for batch, befores in sizes["lengths"].items():
        steps = models | ({f"{name}, compiled": step for name, step in compiled.items()} if batch == 1 else {})
        for before in befores:
            calls = {name: converted.Generation(step, batch, before).advance for name, step in steps.items()}
            yield f"Batch of {batch}", "token", before, calls


def check_alike(ours: Tensor, theirs: Tensor) -> None:
    """Raises `RuntimeError` for logits that differ: the two models are not the same."""
    error = float((ours - theirs).abs().max())
    if not error <= 1e-3:
        raise RuntimeError(f"logits differ by {error:g}: the models that are measured are not the same")


# By subject its comparisons, their sizes, and tiny ones.
SUBJECTS: dict[str, tuple[Callable[..., Iterator[Comparison]], dict[str, Any], dict[str, Any]]] = {
    "mixers": (mixers, {"batch": 4, "channels": 512, "state": 16}, {"batch": 1, "channels": 16, "state": 4}),
    "gated_delta": (
        gated_delta,
        {"heads of 128": (1, 2048, 128), "heads of 64": (4, 512, 64)},
        {"heads of 128": (1, 20, 8), "heads of 64": (2, 9, 4)},
    ),
    "models": (
        models,
        {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12},
        {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4},
    ),
    "converted": (
        conversions,
        {"shape": converted.SMOLLM2, "lengths": {1: [256, 1024, 2048, 4096], 32: [256, 1024]}},
        {"shape": converted.TINY, "lengths": {1: [70], 2: [3]}},
    ),
}


def compare(comparison: Comparison, rounds: int, clock: Clock) -> list[dict[str, Any]]:
    """Makes a comparison; returns a row for each of its calls."""
    part, kind, time, calls = comparison

    def backward_too(forward: Callable[[], Any]) -> None:
        out = forward()
        (out if isinstance(out, Tensor) else out[0]).sum().backward()

    way = partial(partial, backward_too) if kind == "forward+backward" else torch.no_grad()
    calls = {name: way(call) for name, call in calls.items()}
    wait = torch.cuda.synchronize if isinstance(clock, CudaClock) else lambda: None
    warm = {name: first_calls(call, wait)[1:] for name, call in calls.items()}
    seconds, _ = time_in_turns(calls, warm, clock, rounds)
    first = next(iter(seconds.values()))["median"]
    common = {"part": part, "pass": kind, "time": time}
    return [{**common, "name": name, "ratio": x["median"] / first, "seconds": x} for name, x in seconds.items()]


def main() -> None:
    parser = make_parser(__doc__, "--device", "--threads", "--rounds", "--out", "--quick", rounds=5)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--compiled", nargs="+", metavar="NAME", help="of converted: models to compile, too")
    options = parse(parser)
    is_converted = options.subject == "converted"
    given = "--compiled" if options.compiled else "--device cuda" if options.device == "cuda" else None
    if given and not is_converted:
        parser.error(f"{given} is given; the subject must be converted, not {options.subject}")
    keep_freed_memory()
    comparisons, *sizes = SUBJECTS[options.subject]
    chosen = sizes[options.quick] | ({"compiled": options.compiled} if options.compiled else {})
    where = {"device": options.device} if is_converted else {}
    # A decode step that reads all weights takes many milliseconds: CPU time leaves out other work on the machine.
    clock = ProcessorClock() if is_converted and options.device == "cpu" else clock_for(options.device)
    rows = [row for x in comparisons(chosen | where, options.quick) for row in compare(x, options.rounds, clock)]
    finish(records.save(options.subject, options, sizes=chosen, rows=rows), options)


if __name__ == "__main__":
    main()
