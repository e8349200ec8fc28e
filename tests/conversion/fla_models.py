"""Tiny folders of flash-linear-attention's models, and their outputs as its `naive` functions compute them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.conversion import llamas

WIDTH, BETWEEN, TYPES, EPS, RANK = 24, 28, 400, 1e-2, 16
SETTINGS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": TYPES, "intermediate_size": BETWEEN}
SETTINGS |= {"hidden_act": "swish", "norm_eps": EPS, "eos_token_id": 1, "max_position_embeddings": 64, "attn": None}
SETTINGS |= {"fuse_norm": True, "attn_mode": "chunk", "tie_word_embeddings": False}
OF_DELTA = {"use_short_conv": True, "conv_size": 4}
OWN: dict[str, dict[str, Any]] = {
    "gated_deltanet": OF_DELTA | {"head_dim": 6, "num_v_heads": None, "use_gate": True},
    "kda": OF_DELTA | {"head_dim": 6, "num_v_heads": None, "safe_gate": False, "lower_bound": None},
    "delta_net": OF_DELTA | {"expand_k": 1, "expand_v": 1, "use_gate": False, "qk_norm": "l2", "qk_activation": "silu"},
    "gla": {"use_short_conv": False, "num_kv_heads": None, "feature_map": None, "clamp_min": None, "expand_v": 1},
    "retnet": {"use_short_conv": False, "num_kv_heads": None, "feature_map": None, "expand_k": 1, "expand_v": 2},
}


def make(folder: Path, kind: str, settings: dict[str, Any], joined: bool = False) -> tuple[dict[str, Any], dict]:
    """Writes a folder; returns its settings and weights. `joined`: with the older names of feed-forward networks."""
    config = {"model_type": kind, **SETTINGS, **OWN[kind], **settings}
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": (TYPES, WIDTH), "norm.weight": (WIDTH,)}
    for i in range(2):
        layer = {"attn_norm.weight": (WIDTH,), "mlp_norm.weight": (WIDTH,), "mlp.down_proj.weight": (WIDTH, BETWEEN)}
        if joined:
            layer["mlp.gate_proj.weight"] = (2 * BETWEEN, WIDTH)
        else:
            layer |= {f"mlp.{part}_proj.weight": (BETWEEN, WIDTH) for part in ("gate", "up")}
        attention = i in (config["attn"] or {"layers": []})["layers"]
        own = _of_attention(config["attn"]) if attention else _of_memory(kind, config)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes |= {f"layers.{i}.attn.{name}": shape for name, shape in own.items()}
    shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (TYPES, WIDTH)}
    torch.manual_seed(0)
    weights = {name: float("norm" in name) + 0.13 * torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    llamas.tokenizer().save(str(folder / "tokenizer.json"))
    return config, weights


def _sizes(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """The numbers of heads of keys and of values, and their sizes."""
    heads = config["num_heads"]
    if "head_dim" in config:
        return heads, config["num_v_heads"] or heads, config["head_dim"], int(config["head_dim"] * config["expand_v"])
    return heads, heads, *(int(WIDTH * config[name]) // heads for name in ("expand_k", "expand_v"))


def _of_attention(attention: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shared = WIDTH // attention["num_heads"] * (attention.get("num_kv_heads") or attention["num_heads"])
    rows = {"q_proj": WIDTH, "k_proj": shared, "v_proj": shared}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (n, WIDTH) for name, n in rows.items()}
    biases = {f"{name}.bias": (n,) for name, n in rows.items()} if attention.get("qkv_bias") else {}
    return shapes | biases | {"o_proj.weight": (WIDTH, WIDTH)}


def _of_memory(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, value_heads, dim, value_dim = _sizes(config)
    keys, values = heads * dim, value_heads * value_dim
    parts = keys, keys, values
    layer: dict[str, tuple[int, ...]] = {f"{part}_proj": (n, WIDTH) for part, n in zip("qkv", parts, strict=True)}
    layer["o_proj"] = (WIDTH, values)
    other: dict[str, tuple[int, ...]] = {}
    if kind in ("gla", "retnet"):
        layer |= {"g_proj": (values, WIDTH)}
        layer["g_norm_swish_gate" if config["fuse_norm"] else "g_norm"] = (value_dim,)
    else:
        layer |= {"b_proj": (value_heads, WIDTH), "o_norm": (value_dim,)}
        layer |= {f"{part}_conv1d": (rows, 1, config["conv_size"]) for part, rows in zip("qkv", parts, strict=True)}
    if kind == "kda":
        layer |= {"f_proj.0": (value_dim, WIDTH), "f_proj.1": (value_heads * dim, value_dim)}
        layer |= {"g_proj.0": (value_dim, WIDTH), "g_proj.1": (values, value_dim)}
        other = {"g_proj.1.bias": (values,), "dt_bias": (value_heads * dim,), "A_log": (value_heads,)}
    elif kind == "gated_deltanet":
        layer |= {"a_proj": (value_heads, WIDTH), "g_proj": (values, WIDTH)}
        other = {"dt_bias": (value_heads,), "A_log": (value_heads,)}
    elif kind == "delta_net" and config["use_gate"]:
        layer |= {"g_proj": (values, WIDTH)}
    elif kind == "gla":
        layer |= {"gk_proj.0": (RANK, WIDTH), "gk_proj.1": (keys, RANK)}
        other = {"gk_proj.1.bias": (keys,)}
    return {f"{name}.weight": shape for name, shape in layer.items()} | other


def logits(config: dict[str, Any], weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The model's outputs for texts, (batch, time): a step of each memory at a time."""
    x = weights["model.embeddings.weight"][tokens]
    for i in range(2):
        own = {
            k.removeprefix(f"model.layers.{i}."): w for k, w in weights.items() if k.startswith(f"model.layers.{i}.")
        }
        attn = {k.removeprefix("attn.").removesuffix(".weight"): w for k, w in own.items()}
        attends = i in (config["attn"] or {"layers": []})["layers"]
        h = _norm(x, own["attn_norm.weight"])
        x = x + (_softmax_attention(config["attn"], attn, h) if attends else _memory(config, attn, h))
        h = _norm(x, own["mlp_norm.weight"])
        gate = own["mlp.gate_proj.weight"]
        gate, up = (gate, own["mlp.up_proj.weight"]) if len(gate) == BETWEEN else gate.chunk(2)
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ own["mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"]) @ weights.get("lm_head.weight", weights["model.embeddings.weight"]).T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _rotated(x: Tensor, base: float) -> Tensor:
    """x, (batch, time, heads, dim), by rotary embeddings of all dimensions."""
    frequencies = base ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = (torch.arange(x.shape[1])[:, None] * frequencies)[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first, second], -1) * torch.cat([angles, angles], -1).cos() + (
        torch.cat([-second, first], -1) * torch.cat([angles, angles], -1).sin()
    )


def _softmax_attention(attention: dict[str, Any], own: dict[str, Tensor], x: Tensor) -> Tensor:
    dim = WIDTH // attention["num_heads"]
    q, k, v = (F.linear(x, own[f"{p}_proj"], own.get(f"{p}_proj.bias")).unflatten(-1, (-1, dim)) for p in "qkv")
    q, k = (_rotated(y, attention.get("rope_theta", 10000.0)) for y in (q, k))
    k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], dim=2) for y in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q * dim**-0.5, k)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    read = torch.einsum("bhts,bshd->bthd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return read.flatten(2) @ own["o_proj"].T


def _memory(config: dict[str, Any], own: dict[str, Tensor], x: Tensor) -> Tensor:
    kind, (heads, n, dim, value_dim) = config["model_type"], _sizes(config)
    beta = None
    q, k, v = (x @ own[f"{part}_proj"].T for part in "qkv")
    if kind not in ("gla", "retnet"):
        q, k, v = (_convolved(y, own[f"{part}_conv1d"]) for part, y in (("q", q), ("k", k), ("v", v)))
        beta = (x @ own["b_proj"].T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
    q, k, v = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (heads, dim)), v.unflatten(-1, (n, value_dim))
    if beta is not None:
        q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    q, k = (y.repeat_interleave(n // heads, dim=2) for y in (q, k))
    decay, gate, norm = torch.ones(n, 1), torch.ones(()), "o_norm"
    if kind == "gated_deltanet":
        decay = (-own["A_log"].exp() * F.softplus(x @ own["a_proj"].T + own["dt_bias"])).exp()[..., None]
        gate = F.silu(x @ own["g_proj"].T)
    elif kind == "kda":
        step = F.softplus(x @ own["f_proj.0"].T @ own["f_proj.1"].T + own["dt_bias"]).unflatten(-1, (n, dim))
        decay = (-own["A_log"].exp()[:, None] * step).exp()
        gate = torch.sigmoid(x @ own["g_proj.0"].T @ own["g_proj.1"].T + own["g_proj.1.bias"])
    elif kind == "delta_net":
        gate = F.silu(x @ own["g_proj"].T) if config["use_gate"] else gate
    else:
        gate, norm = F.silu(x @ own["g_proj"].T), "g_norm_swish_gate" if config["fuse_norm"] else "g_norm"
    if kind == "gla":
        decay = (F.logsigmoid(x @ own["gk_proj.0"].T @ own["gk_proj.1"].T + own["gk_proj.1.bias"]) / 16).exp()
        decay = decay.unflatten(-1, (n, dim))
    elif kind == "retnet":
        q, k = _rotated(q, 10000.0), _rotated(k, 10000.0)
        decay = 1 - 2.0 ** (-5 - torch.arange(n)[:, None])
    read = _recurrence(q * dim**-0.5, k, v, decay.expand(*x.shape[:2], n, -1), beta)
    return (_norm(read, own[norm]).flatten(2) * gate) @ own["o_proj"].T


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    y = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(y, weight, groups=x.shape[-1])).transpose(1, 2)


def _recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Linear attention with decay; with `beta` the delta rule."""
    state, out = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        write = v[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * (write - (state * k[:, t, :, :, None]).sum(2))
        state = state + k[:, t, :, :, None] * write[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, dim=1)
