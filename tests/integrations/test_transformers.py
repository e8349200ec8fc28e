"""Models of Hugging Face with this package's operations: the numbers of theirs, undone without a trace."""

import importlib
import subprocess
import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

pytest.importorskip("transformers")

from fairseq_fastweights.integrations import transformers as fast

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"]}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, **dict.fromkeys(("num_experts", "num_local_experts"), 4)}
EXPERTS |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
LINEAR = {f"linear_{name}": n for name, n in (("num_value_heads", 4), ("num_key_heads", 2))}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "head_dim": 16}
KIMI = {"num_key_value_heads": 2, "linear_num_heads": 2, "linear_head_dim": 8, "v_head_dim": 8}
KIMI |= {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", SIZES | EXPERTS | LINEAR),
    "qwen3_5": ("Qwen3_5Text", SIZES | LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeText", SIZES | EXPERTS | LINEAR),
    "olmo_hybrid": ("OlmoHybrid", SIZES | LINEAR | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True}),
    "kimi_linear": ("KimiLinear", SIZES | EXPERTS | KIMI),
}


def module_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def build(name: str) -> Any:
    """A small random one of the real class, whose memories forget and write."""
    prefix, sizes = MODELS[name]
    configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    torch.manual_seed(0)
    config = getattr(configs, f"{prefix}Config")(**sizes)
    model = getattr(module_of(name), f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "dt_bias" in parameter_name or "A_log" in parameter_name:
                parameter.uniform_(-1, 1)
    return model.eval()


@pytest.fixture(autouse=True)
def undone():
    names = [(name, function) for name in MODELS for function in fast._known(module_of(name))]
    before = {(name, function): getattr(module_of(name), function) for name, function in names}
    yield
    fast.uninstall()
    for (name, function), original in before.items():
        assert getattr(module_of(name), function) is original, function


@pytest.mark.parametrize("name", MODELS)
def test_logits_gradients_and_greedy_generation_are_theirs(name):
    model = build(name)
    text, short = (torch.randint(2, 50, (2, n), generator=torch.Generator().manual_seed(1)) for n in (70, 9))
    mask = torch.ones_like(short)
    mask[0, :3] = 0  # with a cache, the first prompt padded on the left
    outcomes = []
    for context in (fast.install(model), nullcontext()):
        with context:
            model.zero_grad()
            logits = model(text).logits
            logits.logsumexp(-1).square().mean().backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            written = model.generate(short, attention_mask=mask, max_new_tokens=12, do_sample=False)
            outcomes.append((logits.detach(), gradients, written))
    (ours, our_gradients, our_text), (theirs, their_gradients, their_text) = outcomes
    assert (ours - theirs).abs().max() <= 1e-4 and not torch.equal(ours, theirs)
    assert torch.equal(our_text, their_text)
    assert our_gradients.keys() == their_gradients.keys()
    scale = max(x.norm() for x in their_gradients.values())
    for parameter, gradient in their_gradients.items():
        error = (our_gradients[parameter] - gradient).norm()
        assert error <= 1e-3 * gradient.norm() + 1e-5 * scale, parameter
    theirs = model.bfloat16()(text).logits
    with fast.install():
        ours = model(text).logits
    assert ours.dtype == torch.bfloat16 and (ours - theirs).norm() <= 2e-2 * theirs.norm()


def read_in_parts(model, lengths, rows, padded):
    """The logits of a text whose parts have these lengths, each read with the cache of those before."""
    text = torch.randint(2, 50, (rows, sum(lengths)), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(text)
    mask[0, :padded] = 0
    cache, logits, end = None, [], 0
    for length in lengths:
        start, end = end, end + length
        given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
        found = model(text[:, start:end], **given)
        cache = found.past_key_values
        logits.append(found.logits[:, -1])  # the end of each part has seen a token that is no padding
    return torch.stack(logits)


@pytest.mark.parametrize("name", MODELS)
def test_short_prompts_and_parts_of_prompts_with_a_cache(name):
    """With texts shorter than the convolution's reach, and where a cache is joined to a part, time is contiguous."""
    model = build(name)
    cases = [((length, 1, 4, 1), rows, 0) for length in range(1, 10) for rows in (1, 3)]
    cases += [((5, 2, 1), 2, 3), ((3, 8), 2, 1)]
    for case in cases:
        theirs = read_in_parts(model, *case)
        with fast.install(model):
            ours = read_in_parts(model, *case)
        assert (ours - theirs).abs().max() <= 1e-4, case
    for dtype in (torch.float32, torch.bfloat16):
        gradients = []
        for context in (fast.install(model.to(dtype)), nullcontext()):
            with context:
                model.zero_grad()
                model(torch.tensor([[4, 7]])).logits.float().logsumexp(-1).square().mean().backward()
                gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        ours, theirs = gradients
        assert (ours - theirs).norm() <= (1e-4 if dtype == torch.float32 else 2e-2) * theirs.norm()


LAYOUTS = {
    "as it is": lambda x: x,
    "time last": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "one row for all": lambda x: x[:1].expand_as(x),
    "one number for all": lambda x: x[..., :1].expand_as(x),
    "every other number": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for table in (fast._GATED, fast._KIMI) for name in table])
def test_rules_take_every_layout_and_dtype(name, layout):
    """And states of other layouts and dtypes than the module's own, which stay as they are."""
    original = getattr(module_of("kimi_linear" if name in fast._KIMI else "qwen3_next"), name)
    replacement, turned = fast._replacement(name, original), LAYOUTS[layout]
    for dtype, steps in ((torch.float32, 1), (torch.bfloat16, 2), (torch.float64, 5)):
        q, k, v = (torch.randn(2, steps, 3, size, dtype=dtype) for size in (4, 4, 5))
        g, beta = -torch.rand(2, steps, 3, 4), torch.rand(2, steps, 3, dtype=dtype)
        inputs = [turned(x) for x in (q, k, v, g if name in fast._KIMI else g[..., 0], beta)]
        for state in (None, turned(torch.randn(2, 3, 4, 5, dtype=dtype))):
            before = None if state is None else state.clone()
            for options in ({"output_final_state": True}, {"output_final_state": False, "cu_seqlens": None}):
                options |= {"initial_state": state, "use_qk_l2norm_in_kernel": steps > 1}
                expected = original(*inputs, **options)
                torch.testing.assert_close(replacement(*inputs, **options), expected, atol=1e-4, rtol=1e-2)
            assert state is None or torch.equal(state, before)


def test_only_the_models_kind_is_changed_and_others_are_refused():
    model = build("olmo_hybrid")
    other = module_of("kimi_linear").causal_conv1d_fn
    fast.install(model)
    replaced = module_of("olmo_hybrid").torch_chunk_gated_delta_rule
    assert replaced.__module__.startswith("fairseq_fastweights") and module_of("kimi_linear").causal_conv1d_fn is other
    fast.install(model)
    assert module_of("olmo_hybrid").torch_chunk_gated_delta_rule is replaced
    with fast.install():
        assert module_of("kimi_linear").causal_conv1d_fn is not other
    with pytest.raises(ValueError, match="model is a Linear, which has no layer of these: qwen3_next"):
        fast.install(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model is 'qwen3_next'; it must be a model, a "):
        fast.install("qwen3_next")


def test_unknown_functions_are_refused_before_anything_is_replaced(monkeypatch):
    before, name = module_of("qwen3_next").causal_conv1d_fn, "chunk_kimi_delta_attention"  # of the last module
    monkeypatch.setattr(module_of("kimi_linear"), name, lambda query, key, value, decay: None)
    for found in ("takes query, key, value, decay", "has no such function"):
        with pytest.raises(fast.UnknownFunction, match=rf"{name} of .* in transformers [\d.]+ {found}"):
            fast.install()
        monkeypatch.delattr(module_of("kimi_linear"), name, raising=False)
    assert module_of("qwen3_next").causal_conv1d_fn is before
    monkeypatch.undo()


def test_tensors_elsewhere_are_left_to_what_was_there():
    rule = create_autospec(module_of("qwen3_next").torch_chunk_gated_delta_rule)
    meta = torch.empty(1, 2, 1, 3, device="meta")
    fast._replacement("torch_chunk_gated_delta_rule", rule)(meta, meta, meta, g=meta, beta=meta)
    rule.assert_called_once()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolutions(width, bias):
    """Also for texts shorter than its reach, and with a bias, which none of the models has."""
    module = module_of("qwen3_next")
    weight, offsets = torch.randn(6, width), torch.randn(6) if bias else None
    for time in (1, 3, 9):
        x = torch.randn(2, 6, time)
        for activation in (None, "silu"):
            given = (x, weight, offsets, activation)
            torch.testing.assert_close(fast._convolve(*given), module.causal_conv1d_fn(*given))
    for length in (width - 1, width):
        state = torch.randn(2, 6, length)
        other, x = state.clone(), torch.randn(2, 6, 1)
        expected = module.causal_conv1d_update(x, other, weight, offsets, "silu")
        torch.testing.assert_close(fast._convolve_next(x, state, weight, offsets, "silu"), expected)
        assert torch.equal(state, other)


@pytest.mark.slow
def test_neither_fairseq_nor_a_plugin_is_needed(monkeypatch):
    code = f"import sys, {fast.__name__}; sys.exit('fairseq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, fast.__name__)
    with pytest.raises(ImportError, match="needs transformers: pip install transformers"):
        importlib.import_module(fast.__name__)
