"""Mixers are their equations: outputs and gradients against a simple form, one position and head after the other.

The update rules of `FastWeightAttention` and retention have their equations in `test_fast_weight_attention.py`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.bounded_memory_attention import ABCMLP, BoundedMemoryAttention, Linformer
from fairseq_fastweights.mixers.gated_delta import DeltaNet, DeltaProduct, GatedDelta, KimiDelta
from fairseq_fastweights.mixers.gated_linear_attention import GatedLinearAttention
from fairseq_fastweights.mixers.local_attention import SMALLEST_BLOCK, LocalAttention
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.mixers.transformer_xl import TransformerXL
from fairseq_fastweights.mixers.window_sum import WindowSum
from tests.mixers import contract

EMBED, HEADS = 12, 2


def rows(outputs: list[Tensor], x: Tensor) -> Tensor:
    """The outputs of a text, which may be empty."""
    return torch.stack(outputs) if outputs else x


def rms_norm(mixer: Any, y: Tensor) -> Tensor:
    return mixer.o_norm.weight * y / (y.square().mean(-1, keepdim=True) + mixer.eps).sqrt()


def heads_of(mixer: Any, x: Tensor) -> list[Tensor]:
    """(time, heads, dim) each."""
    return [each(x).unflatten(-1, (-1, mixer.head_dim)) for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]


def turned(mixer: Any, x: Tensor) -> Tensor:
    """(time, heads, dim), each pair (i, i + half) of rotated dimensions as a complex number, times e^(i t theta)."""
    half = mixer.rotary.dim // 2
    speeds = torch.tensor([mixer.rotary.base ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * speeds
    plane = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([plane.real, plane.imag, x[..., 2 * half :]], dim=-1)


def softmax_attention(mixer: SoftmaxAttention, x: Tensor) -> Tensor:
    q, k, v = heads_of(mixer, x)
    q, k = turned(mixer, q), turned(mixer, k)
    outputs = []
    for t in range(len(x)):
        scores = (k[: t + 1] * q[t]).sum(-1, keepdim=True) / math.sqrt(mixer.head_dim)
        outputs.append(mixer.out_proj((scores.softmax(0) * v[: t + 1]).sum(0).flatten()))
    return rows(outputs, x)


def local_attention(mixer: LocalAttention, x: Tensor) -> Tensor:
    q, k, v = heads_of(mixer, x)
    outputs = []
    for t in range(len(x)):
        seen = slice(max(0, t - mixer.window + 1), t + 1)
        scores = (k[seen] * q[t]).sum(-1, keepdim=True) / math.sqrt(mixer.head_dim)
        outputs.append(mixer.out_proj((scores.softmax(0) * v[seen]).sum(0).flatten()))
    return rows(outputs, x)


def bounded_memory(mixer: BoundedMemoryAttention, x: Tensor) -> Tensor:
    """The share of each position in the slots after it, with nothing against overflow, from all positions anew."""
    (q, k, v), outputs = heads_of(mixer, x), []
    for t in range(len(x)):
        if isinstance(mixer, Linformer):
            phi, psi = (each.weight.t()[: t + 1, None] for each in (mixer.compress_k, mixer.compress_v))
        else:
            alpha = mixer.control_proj(x[: t + 1]).unflatten(-1, (HEADS, -1)).exp()
            phi = psi = alpha / alpha.sum(dim=0)
        keys = (phi[..., None] * k[: t + 1, :, None]).sum(0)  # (heads, slots, head_dim)
        values = (psi[..., None] * v[: t + 1, :, None]).sum(0)
        scores = (keys * q[t][:, None]).sum(-1, keepdim=True) / math.sqrt(mixer.head_dim)
        outputs.append(mixer.out_proj((scores.softmax(1) * values).sum(1).flatten()))
    return rows(outputs, x)


@cache
def encoding(distance: int, embed: int) -> Tensor:
    angles = [distance / 10000 ** (2 * i / embed) for i in range((embed + 1) // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)][:embed], dtype=torch.float64)


def transformer_xl(mixer: TransformerXL, x: Tensor, past: Tensor | None = None) -> Tensor:
    """One query after the other, with the encoding of its distance to each key."""
    past = x[:0] if past is None else past.detach()
    inputs = torch.cat([past, x])
    q, k, v = mixer.q_proj(x), mixer.k_proj(inputs), mixer.v_proj(inputs)
    outputs = []
    for i in range(len(x)):
        place, heads = len(past) + i, []
        seen = list(range(max(0, place - mixer.memory) if mixer.same_length else 0, place + 1))
        distances = [min(place - j, mixer.clamp_len or place) for j in seen]
        encoded = mixer.position_proj(torch.stack([encoding(distance, mixer.embed_dim) for distance in distances]))
        for h in range(mixer.num_heads):
            part = slice(h * mixer.head_dim, (h + 1) * mixer.head_dim)
            scores = k[seen, part] @ (q[i, part] + mixer.content_bias[h])
            scores = scores + encoded[:, part] @ (q[i, part] + mixer.position_bias[h])
            heads.append((scores / math.sqrt(mixer.head_dim)).softmax(0) @ v[seen, part])
        outputs.append(mixer.out_proj(torch.cat(heads)))
    return rows(outputs, x)


def window_sum(mixer: WindowSum, x: Tensor) -> Tensor:
    q, k, v = heads_of(mixer, x)
    q, k = mixer.q_norm(q), mixer.k_norm(k)
    q, k = turned(mixer, q), turned(mixer, k)
    k, v = (y.repeat_interleave(HEADS // y.shape[1], dim=1) for y in (k, v))
    f_q, f_k = (y[0] for y in mixer.feature_map(q[None], k[None]))
    if "sum" in mixer.normalization:
        f_q, f_k = (f / (f.sum(-1, keepdim=True) + mixer.feature_map.sum_eps) for f in (f_q, f_k))
    outputs = []
    for t in range(len(x)):
        old, seen = slice(0, max(0, t - mixer.window + 1)), slice(max(0, t - mixer.window + 1), t + 1)
        scores = (k[seen] * q[t]).sum(-1) / math.sqrt(mixer.head_dim)
        near = mixer.log_factor.exp() * (scores - scores.amax(0)).exp()
        weights = torch.cat([(f_k[old] * f_q[t]).sum(-1), near])[..., None]
        outputs.append(mixer.out_proj(((weights * v[: t + 1]).sum(0) / weights.sum(0)).flatten()))
    return rows(outputs, x)


def gated_linear_attention(mixer: GatedLinearAttention, x: Tensor) -> Tensor:
    """Yang et al. 2024, Eq. 3 and Sec. 4.4."""
    outputs, S = [], [x.new_zeros(mixer.key_dim, mixer.value_dim)] * HEADS
    for x_t in x:
        q, k, v = (p(x_t).view(HEADS, -1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        alpha = torch.sigmoid(mixer.f_b_proj(mixer.f_a_proj(x_t))).view(HEADS, -1) ** (1 / 16)
        S = [alpha[h][:, None] * S[h] + torch.outer(k[h], v[h]) for h in range(HEADS)]
        y = torch.stack([q[h] @ S[h] for h in range(HEADS)]) / mixer.key_dim**0.5
        outputs.append(mixer.o_proj(rms_norm(mixer, y).flatten() * F.silu(mixer.g_proj(x_t))))
    return rows(outputs, x)


def short_convolution(mixer: Any, x: Tensor, t: int) -> Tensor:
    """silu(sum_i w_i * x_{t-i} + b)."""
    u = 0 if mixer.conv1d.bias is None else mixer.conv1d.bias
    for i in range(min(t + 1, mixer.conv)):
        u = u + mixer.conv1d.weight[:, 0, -1 - i] * x[t - i]
    return u * torch.sigmoid(u)


def mamba(mixer: Mamba, x: Tensor) -> Tensor:
    projected, z = mixer.in_proj(x).chunk(2, -1)
    h, outputs = x.new_zeros(mixer.channels, mixer.state), []
    for t in range(len(x)):
        u = short_convolution(mixer, projected, t)
        dt, B, C = (mixer.x_proj.weight @ u).split([mixer.dt_rank, mixer.state, mixer.state])
        delta = torch.log1p(torch.exp(mixer.dt_proj.weight @ dt + mixer.dt_proj.bias))
        h = torch.exp(-delta[:, None] * mixer.A_log.exp()) * h + torch.outer(delta * u, B)
        outputs.append(mixer.out_proj((h @ C + mixer.D * u) * F.silu(z[t])))
    return rows(outputs, x)


def gated_delta(mixer: GatedDelta, x: Tensor) -> Tensor:
    """The equations of the classes' docstrings, each step as the product with I - beta k k^T."""
    n, K, V, H = mixer.writes, mixer.key_dim, mixer.value_dim, mixer.num_heads
    share, kv = H // mixer.key_heads, mixer.kv_heads
    projected = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    S, outputs = x.new_zeros(H, K, V), []
    for t in range(len(x)):
        u = short_convolution(mixer, projected, t)
        q, keys, values = u.split([mixer.key_heads * K, n * (kv or mixer.key_heads) * K, n * (kv or H) * V])
        q, keys, values = q.view(-1, K), keys.view(n, -1, K), values.view(n, -1, V)
        if kv:
            keys, values = (torch.stack([x[:, h * kv // H] for h in range(H)], 1) for x in (keys, values))
        q, *keys = ((k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for k in (q, *keys))
        betas = torch.sigmoid(mixer.b_proj(x[t])).view(n, H) * (2 if mixer.negative_eigenvalues else 1)
        if isinstance(mixer, KimiDelta):
            gate = mixer.forget_gate
            steps = F.softplus(gate.f_b_proj(gate.f_a_proj(x[t])) + gate.dt_bias).view(H, K)
            f = torch.exp(-gate.A_log.view(H, 1).exp() * steps)
            output_gate = torch.sigmoid(mixer.g_b_proj(mixer.g_a_proj(x[t])))
        elif isinstance(mixer, DeltaNet):
            f, output_gate = x.new_ones(H, 1), F.silu(mixer.g_proj(x[t])) if mixer.gate else 1
        else:
            f = torch.exp(-mixer.A_log.exp() * F.softplus(mixer.a_proj(x[t]) + mixer.dt_bias))[:, None]
            output_gate = F.silu(mixer.g_b_proj(mixer.g_a_proj(x[t])) if mixer.gate_rank else mixer.g_proj(x[t]))
        states = []
        for h in range(H):
            state = f[h][:, None] * S[h]
            for k, v, beta in zip(keys, values, betas, strict=True):
                key = k[h // share]
                turn = torch.eye(K, dtype=x.dtype) - beta[h] * torch.outer(key, key)
                state = turn @ state + beta[h] * torch.outer(key, v[h])
            states.append(state)
        S = torch.stack(states)
        y = torch.stack([q[h // share] @ S[h] for h in range(H)]) * K**-0.5
        outputs.append(mixer.o_proj(rms_norm(mixer, y).flatten() * output_gate))
    return rows(outputs, x)


ATTENTION = frozenset({"attention"})
GROUPED = {"kv_heads": 1, "head_dim": 4, "projection_bias": "none", "query_key_norm_eps": 0.1}
# Windows of one, within a block, larger than the text, of several blocks and of larger blocks; one block and several.
WINDOWS = {1: [1], 7: [1, 3, 7], 9: [40], 33: [1, 2], 64: [32], 65: [33], 100: [34], 121: [70], 200: [138]}
Case = tuple[type[Mixer], dict[str, Any], list[int]]
CASES: list[Case] = [  # a mixer, its options, and numbers of positions
    *((LocalAttention, {"window": window}, [time]) for time, windows in WINDOWS.items() for window in windows),
    (WindowSum, {"window": 9}, [5]),
    (WindowSum, {"window": 1, "feature_map": "elu", "normalization": ATTENTION}, [7]),
    (WindowSum, {"window": 3, "feature_map": "dpfp"}, [34]),
    (WindowSum, {"window": 3, "feature_map": "favor", "favor_features": 4, "normalization": ATTENTION}, [12]),
    (WindowSum, {"window": 4, **GROUPED}, [33]),
    (WindowSum, {"window": 7, "normalization": ATTENTION, "feature_dim": 5}, [40]),
    *((WindowSum, {"window": window}, [time]) for time, window in ((100, 34), (200, 138))),
    *((ABCMLP, {"slots": slots}, [1, 70]) for slots in (1, 3, 40)),
    *((Linformer, {"slots": slots, "max_positions": 70}, [1, 70]) for slots in (1, 3, 40)),
    (TransformerXL, {"memory": 0}, [2, 9]),
    (TransformerXL, {"memory": 3, "bias": True}, [2, 9]),
    (TransformerXL, {"memory": 3, "clamp_len": 4}, [2, 9]),
    (TransformerXL, {"memory": 3, "embed_dim": 15, "num_heads": 3}, [2, 9]),
    *((TransformerXL, {"memory": memory, "same_length": True}, [2, 9]) for memory in (0, 3, 40)),
]
ROTARY = {"rotary_dim": 2, "rotary_base": 50.0, **GROUPED}
PADDED: list[Case] = [  # with padding, too
    *((SoftmaxAttention, {"rotary_dim": dim}, [11]) for dim in (0, 2, 4, 6)),
    (SoftmaxAttention, {"rotary_dim": 6, "rotary_base": 50.5}, [11]),
    (WindowSum, {"window": 4, **ROTARY}, [15]),
    *((LocalAttention, {"window": window}, [time]) for time, window in ((13, 4), (70, 20), (110, 70))),
    *((WindowSum, {"window": window, **more}, [time]) for time, window, more in ((13, 4, GROUPED), (110, 70, {}))),
    *((ABCMLP, {"slots": slots}, [13]) for slots in (1, 3, 40)),
    *((Linformer, {"slots": slots, "max_positions": 20}, [13]) for slots in (1, 3, 40)),
    *((kind, options, [9]) for kind, options, times in CASES if kind is TransformerXL),
    (GatedLinearAttention, {}, [9]),
    (GatedLinearAttention, {"key_dim": 3, "value_dim": 5, "rank": 2, "eps": 0.5}, [9]),
    (Mamba, {"state": 5}, [23]),
    (Mamba, {"state": 1, "conv": 1}, [23]),
    (Mamba, {"state": 5, "conv": 3, "expansion": 1, "bias": True}, [23]),
    (Mamba, {"state": 20, "dt_rank": 7}, [23]),
    (GatedDelta, {"num_heads": 4}, [9]),
    (GatedDelta, {"num_heads": 4, "key_heads": 2, "key_dim": 5, "value_dim": 2, "negative_eigenvalues": True}, [9]),
    (GatedDelta, {"num_heads": 4, "bias": True, "conv": 2}, [9]),
    (GatedDelta, {"num_heads": 4, "kv_heads": 2, "gate_rank": 3, "value_dim": 2, "conv": 3}, [9]),
    (KimiDelta, {"num_heads": 4, "conv": 1, "bias": True}, [9]),
    (KimiDelta, {"num_heads": 4, "kv_heads": 1}, [9]),
    (KimiDelta, {"num_heads": 4, "key_heads": 1, "key_dim": 6}, [9]),
    (DeltaProduct, {"num_heads": 4, "writes": 1}, [9]),
    (DeltaProduct, {"num_heads": 4, "key_heads": 2, "key_dim": 5, "bias": True}, [9]),
    (DeltaProduct, {"num_heads": 4, "writes": 3, "negative_eigenvalues": True}, [9]),
    (DeltaProduct, {"num_heads": 4, "kv_heads": 2, "bias": True, "gate_rank": 2}, [9]),
    (DeltaNet, {"num_heads": 4, "eps": 0.5}, [9]),
    (DeltaNet, {"num_heads": 4, "key_heads": 2, "key_dim": 5, "value_dim": 2, "gate": True}, [9]),
    (DeltaNet, {"num_heads": 4, "negative_eigenvalues": True}, [9]),
]
EQUATIONS: dict[type[Mixer], Any] = {
    SoftmaxAttention: softmax_attention,
    LocalAttention: local_attention,
    BoundedMemoryAttention: bounded_memory,
    TransformerXL: transformer_xl,
    WindowSum: window_sum,
    GatedLinearAttention: gated_linear_attention,
    Mamba: mamba,
    GatedDelta: gated_delta,
}


def build(kind: type[Mixer], options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    sizes = {"embed_dim": EMBED} | ({} if kind is Mamba else {"num_heads": HEADS})
    mixer = kind(**{**sizes, **options})
    # Recurrences stay near their initial values, so that they neither explode nor vanish.
    special = isinstance(mixer, (GatedDelta, GatedLinearAttention, Mamba))
    return contract.spread(mixer, 0.2) if special else contract.spread(mixer, 0.5, keep=0)


def equations(mixer: Mixer) -> Any:
    return next(form for kind, form in EQUATIONS.items() if isinstance(mixer, kind))


@pytest.mark.parametrize(
    ("kind", "options", "times", "padding"),
    [(*c, "none") for c in CASES + PADDED] + [(*c, "whole") for c in PADDED],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_equations(kind, options, times, padding):
    mixer = build(kind, options)
    for time in times:
        x = contract.draw(time, mixer.embed_dim)
        with ops.check_values(True):  # so that rules get only gates within the ranges that they declare
            # Angles are rounded in float32.
            bound = 1e-6 if "rotary_dim" in options else contract.FLOAT64
            contract.check_definition(mixer, equations(mixer), x, contract.paddings(time)[padding], bound)


@pytest.mark.parametrize("padding", ["none", "whole"])
@pytest.mark.parametrize(("kind", "options", "times"), [case for case in PADDED if "window" in case[1]], ids=str)
def test_windows_of_several_blocks_are_the_same_in_parts(kind, options, times, padding):
    (time,) = times
    contract.check_parts(build(kind, options), contract.draw(time, EMBED), contract.paddings(time)[padding])


@pytest.mark.parametrize("kind", [LocalAttention, WindowSum])
def test_work_of_windows_grows_linearly(kind):
    """By the sizes of the factors of products: times are no claim that a test can hold."""
    counts = []
    for blocks in (10, 20):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            build(kind, {"window": 9})(contract.draw(blocks * SMALLEST_BLOCK, EMBED))
        counts.append(counter.get_total_flops())
    # Of window-sum more than twice as many positions are beyond the first window.
    assert counts[0] < counts[1] <= (2 if kind is LocalAttention else 2.1) * counts[0]


@torch.no_grad()
def test_within_the_window_window_sum_is_softmax_attention():
    mixer, attention = build(WindowSum, {"window": 15, **ROTARY}), SoftmaxAttention(EMBED, HEADS, **ROTARY).double()
    attention.load_state_dict({n: p for n, p in mixer.state_dict().items() if n in attention.state_dict()})
    x = contract.draw(15, EMBED)
    for gradients in (False, True):  # with and without the short way
        with torch.set_grad_enabled(gradients):
            assert contract.error(mixer(x)[0], attention(x)[0]) <= contract.FLOAT64


@pytest.mark.parametrize("state", [False, True])
def test_linformer_reads_no_more_positions_than_it_has_learned(state):
    mixer, x = build(Linformer, {"max_positions": 9}), contract.draw(10, EMBED)
    padding = torch.zeros(contract.BATCH, 10, dtype=torch.bool)
    padding[:, 3] = True
    before, rest = (mixer(x[:2])[1], slice(2, None)) if state else (None, slice(None))
    mixer(x[rest], before, padding[:, rest])
    padding[1] = False
    for mask in (None, padding[:, rest]):
        with pytest.raises(ValueError, match="x ends at position 10 of a text; max_positions is 9"):
            mixer(x[rest], before, mask)
