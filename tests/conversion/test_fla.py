"""Models of flash-linear-attention, whose layers are computed here as its `naive` functions compute them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.families.table import read_family
from fairseq_fastweights.conversion.files.weight_files import WeightFiles
from tests.conversion import llamas, sources

WIDTH, TYPES, EPS = 24, 400, 1e-2
SETTINGS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": TYPES, "intermediate_size": 28}
SETTINGS |= {"hidden_act": "swish", "norm_eps": EPS, "eos_token_id": 1, "max_position_embeddings": 64, "attn": None}
SETTINGS |= {"use_short_conv": True, "head_dim": 6, "conv_size": 4, "fuse_norm": True, "attn_mode": "chunk"}
CASES: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"num_heads": 5, "expand_v": 0.5, "use_gate": True},  # heads that do not divide the width
    "gated_deltanet, shared keys, tied": {"num_heads": 2, "num_v_heads": 4, "conv_size": 3, "allow_neg_eigval": True}
    | {"expand_v": 1.5, "tie_word_embeddings": True},
    "kda": {"num_heads": 5, "expand_v": 0.5, "safe_gate": False, "lower_bound": None},
    "kda, shared keys": {"num_heads": 2, "num_v_heads": 4, "expand_v": 1, "conv_size": 3, "allow_neg_eigval": True},
}


def make(folder: Path, kind: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Writes a folder; returns its settings and weights."""
    config = {"model_type": kind, "num_v_heads": None, "tie_word_embeddings": False, **SETTINGS, **settings}
    heads, dim, conv = config["num_heads"], config["head_dim"], config["conv_size"]
    value_heads, value_dim = config["num_v_heads"] or heads, int(dim * config["expand_v"])
    keys, values = heads * dim, value_heads * value_dim
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": (TYPES, WIDTH), "norm.weight": (WIDTH,)}
    for i in range(2):
        layer = {"attn_norm": (WIDTH,), "mlp_norm": (WIDTH,), "mlp.gate_proj": (28, WIDTH), "mlp.up_proj": (28, WIDTH)}
        layer |= {"mlp.down_proj": (WIDTH, 28), "attn.q_proj": (keys, WIDTH), "attn.k_proj": (keys, WIDTH)}
        layer |= {"attn.v_proj": (values, WIDTH), "attn.o_proj": (WIDTH, values), "attn.b_proj": (value_heads, WIDTH)}
        layer |= {"attn.q_conv1d": (keys, 1, conv), "attn.k_conv1d": (keys, 1, conv), "attn.o_norm": (value_dim,)}
        layer |= {"attn.v_conv1d": (values, 1, conv)}
        if kind == "kda":
            layer |= {"attn.f_proj.0": (value_dim, WIDTH), "attn.f_proj.1": (value_heads * dim, value_dim)}
            layer |= {"attn.g_proj.0": (value_dim, WIDTH), "attn.g_proj.1": (values, value_dim)}
            shapes |= {f"layers.{i}.attn.g_proj.1.bias": (values,), f"layers.{i}.attn.dt_bias": (value_heads * dim,)}
        else:
            layer |= {"attn.a_proj": (value_heads, WIDTH), "attn.g_proj": (values, WIDTH)}
            shapes[f"layers.{i}.attn.dt_bias"] = (value_heads,)
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes[f"layers.{i}.attn.A_log"] = (value_heads,)
    shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (TYPES, WIDTH)}
    torch.manual_seed(0)
    weights = {name: float("norm" in name) + 0.13 * torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    llamas.tokenizer().save(str(folder / "tokenizer.json"))
    return config, weights


def logits(config: dict[str, Any], weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model's outputs for texts, (batch, time): a step of each memory at a time."""
    x = weights["model.embeddings.weight"][tokens]
    for i in range(2):
        own = {
            k.removeprefix(f"model.layers.{i}."): w for k, w in weights.items() if k.startswith(f"model.layers.{i}.")
        }
        x = x + _attention(config, own, _norm(x, own["attn_norm.weight"]))
        h = _norm(x, own["mlp_norm.weight"])
        gated = F.silu(h @ own["mlp.gate_proj.weight"].T) * (h @ own["mlp.up_proj.weight"].T)
        x = x + gated @ own["mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"]) @ weights.get("lm_head.weight", weights["model.embeddings.weight"]).T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _attention(config: dict[str, Any], own: dict[str, Tensor], x: Tensor) -> Tensor:
    own = {name.removeprefix("attn.").removesuffix(".weight"): w for name, w in own.items()}
    batch, time, _ = x.shape
    heads, dim = config["num_heads"], config["head_dim"]
    n = config["num_v_heads"] or heads

    def mixed(part: str, heads: int) -> Tensor:
        y = F.pad((x @ own[f"{part}_proj"].T).transpose(1, 2), (config["conv_size"] - 1, 0))
        return F.silu(F.conv1d(y, own[f"{part}_conv1d"], groups=y.shape[1])).transpose(1, 2).unflatten(-1, (heads, -1))

    q, k, v = mixed("q", heads), mixed("k", heads), mixed("v", n)
    q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(n // heads, dim=2) for y in (q * dim**-0.5, k))
    beta = (x @ own["b_proj"].T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
    if config["model_type"] == "kda":
        step = F.softplus(x @ own["f_proj.0"].T @ own["f_proj.1"].T + own["dt_bias"]).unflatten(-1, (n, dim))
        gate = torch.sigmoid(x @ own["g_proj.0"].T @ own["g_proj.1"].T + own["g_proj.1.bias"])
    else:
        step = F.softplus(x @ own["a_proj"].T + own["dt_bias"])[..., None]
        gate = F.silu(x @ own["g_proj"].T)
    decay = (-own["A_log"].exp()[:, None] * step).exp()
    state, out = x.new_zeros(batch, n, dim, v.shape[-1]), []
    for t in range(time):
        state = state * decay[:, t, :, :, None]
        error = v[:, t] - (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(2))
    y = _norm(torch.stack(out, dim=1), own["o_norm"]) * gate.unflatten(-1, (n, -1))
    return y.flatten(2) @ own["o_proj"].T


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_converted_model_is_its_source_and_gives_its_bits_back(case: str, tmp_path: Path, capsys: Any) -> None:
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    config, weights = make(theirs, case.split(",")[0], CASES[case])
    assert main(["from-huggingface", str(theirs), str(ours)]) == 0, capsys.readouterr().err
    model, _, numbers = sources.load(ours, SimpleNamespace(config=SimpleNamespace(eos_token_id=1, vocab_size=TYPES)))
    tokens = torch.randint(TYPES, (2, 20), generator=torch.Generator().manual_seed(5))
    expected = logits(config, weights, tokens)
    assert expected.std() > 0.5  # so that the bound says something
    assert (model(numbers[tokens])[0][..., numbers] - expected).abs().max() <= 1e-5
    assert main(["to-huggingface", str(ours), str(back)]) == 0, capsys.readouterr().err
    after = WeightFiles(back)
    assert set(after.shapes) == set(weights) and all(torch.equal(after.read(name), w) for name, w in weights.items())


BAD = [
    ("gated_deltanet", {"use_gate": False}, "use_gate is False; only True is supported"),
    ("gated_deltanet", {"attn": {"layers": [0], "num_heads": 2}}, "attn is {.*}; only None is supported"),
    ("gated_deltanet", {"use_short_conv": False}, "use_short_conv is False; only True is supported"),
    ("gated_deltanet", {"num_v_heads": 7}, "num_heads is 5; it must be a divisor of num_v_heads, 7"),
    ("kda", {"lower_bound": -5}, "lower_bound is -5; only None is supported"),
    ("kda", {"safe_gate": True}, "safe_gate is True; only False is supported"),
    ("delta_net", {}, "model_type is 'delta_net', whose memory never forgets, .* is not supported"),
    ("gla", {}, "model_type is 'gla', whose gates are of low rank"),
    ("retnet", {}, "model_type is 'retnet', whose norm of what is read"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), BAD)
def test_other_layers_are_refused_by_name(kind: str, settings: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    config = {"model_type": kind, **SETTINGS, "num_heads": 5, "expand_v": 1, **settings}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    assert re.search(message, error := capsys.readouterr().err), error


def test_the_inner_width_is_the_multiple_of_256_above_two_thirds() -> None:
    config = {"model_type": "kda", **SETTINGS, "intermediate_size": None, "hidden_ratio": 4, "hidden_size": 2048}
    assert read_family(config, set()).options["decoder-ffn-embed-dim"] == 5632
