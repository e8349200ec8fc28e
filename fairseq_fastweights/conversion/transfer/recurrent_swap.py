"""Initial values of gated delta networks and of Mamba that replace a trained softmax attention.

Their queries, keys and values go through a short convolution and silu, queries and keys have length 1, and the output
has a norm and a gate. The initial values undo these as far as possible. The numbers that are called rules of thumb were
chosen on seven layers of SmolLM2-135M, by the error of the first output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fairseq_fastweights.conversion.transfer.swap import Start
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.gated_delta import GatedDelta, KimiDelta
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.projections import shared
from fairseq_fastweights.mixers.registry import MIXERS, option_name

NEARLY_LINEAR = 0.3
"""The size of values, at which silu(x) is near x / 2."""

KEPT = 0.95
"""The decay of the state per step (a rule of thumb)."""

BETA = 0.2
"""The initial beta (a rule of thumb); without biases it is a half, or 1."""

RETRIEVED = 0.1
"""The size of a gated delta network's output before its norm, relative to its values (a rule of thumb)."""

READ, AVERAGED = 0.2, 0.4
"""The size of attention's output relative to its values, and to Mamba's averages of them (rules of thumb)."""

OPEN = 1.2784645
"""silu(OPEN) = 1."""

GATE = 4.0
"""The size of the input to an output gate without a bias: large enough for about half of the gates to be open."""

GATED = 5.3
"""The divisor after such a gate: the mean square over the mean of silu(x), for x of this size."""


def is_recurrent(mixer: Mixer) -> bool:
    """True if `swap_recurrent` computes the mixer's start."""
    return isinstance(mixer, (GatedDelta, Mamba))


def read_weights(mixer: Mixer, rows: int, shared_rows: int) -> dict[str, torch.Size]:
    """The shapes of the attention's weights that the mixer starts from, by name.

    `rows` is the number of outputs of the query projection, and `shared_rows` that of the value projection.
    """
    width = mixer.embed_dim
    inputs = {"q_proj": rows, "k_proj": shared_rows, "v_proj": shared_rows}
    shapes = {f"{name}.weight": torch.Size([outputs, width]) for name, outputs in inputs.items()}
    return shapes | {"out_proj.weight": torch.Size([width, rows])}


def bias_option(mixer: Mixer) -> str | None:
    """The option with which the mixer would have biases; None if it has them."""
    return None if mixer.bias else option_name(_name(mixer), "bias")


def check_recurrent(mixer: Mixer, heads: int, rows: int, shared_rows: int) -> None:
    """Checks that a mixer has room for an attention of `heads` heads.

    `rows` is the number of outputs of the query projection, and `shared_rows` that of the value projection.
    """
    name, dim = _name(mixer), rows // heads
    if isinstance(mixer, Mamba):
        needed = rows // mixer.embed_dim + 1  # values, and a channel that is always 1
        wanted = [("expansion", max(mixer.expansion, needed))]
    else:
        assert isinstance(mixer, GatedDelta)
        wanted = [("num_heads", heads), ("key_heads", heads), ("key_dim", dim), ("value_dim", dim)]
        if mixer.kv_heads:
            wanted.append(("kv_heads", shared_rows // dim))
    for option, value in wanted:
        if (own := getattr(mixer, option)) != value:
            named = "fast_weight_heads" if option == "num_heads" else option_name(name, option)
            raise InvalidInput(
                f"{named} is {own}; in place of the base model's attention it must be {value} ({name}), or transfer "
                "must be embeddings,output,feed-forward"
            )


def swap_recurrent(
    mixer: Mixer, weights: Mapping[str, Tensor], heads: int, gain: Tensor | None = None
) -> dict[str, Start]:
    """Computes the initial values of a gated delta network or of Mamba in place of an attention with these weights.

    Keys and values that heads share are repeated, unless the mixer has as few (`kv_heads`), and the norms of queries
    and keys are folded into their projections. Biases are left out by a mixer that has none, and with it an output gate
    stays a projection, of a larger size.

    - Gated delta networks: the convolution takes the last input, scaled so that silu serves as the feature map of
      queries and keys, and is nearly linear for values; decays and beta are constant; the output
      projection has each head's values in the size that attention gives them.
    - Mamba: values go through the first channels, and are averaged with exponential weights; of the other channels one
      is always 1, from which B and C are made. Queries and keys have no place in it.

    Args:
        mixer: one that `check_recurrent` accepts; it is not changed.
        weights: of q_proj, k_proj, v_proj and out_proj, with or without biases, and the norms of queries and keys.
        heads: the attention's number of heads.
        gain: (embed_dim,), the factors of the norm before it; None for 1.

    Returns:
        initial values of parameters by name, and how each was made. Parameters that are missing stay as they are.
    """
    attention = _Attention(weights, heads, gain, getattr(mixer, "kv_heads", 0) or heads)
    starts = _mamba(mixer, attention) if isinstance(mixer, Mamba) else _gated_delta(mixer, attention)
    shapes = dict(mixer.named_parameters())
    return {name: (values.reshape(shapes[name].shape), how) for name, (values, how) in starts.items() if name in shapes}


def _name(mixer: Mixer) -> str:
    return next(name for name, kind in MIXERS.items() if kind.build is type(mixer))


class _Attention:
    """An attention's projections, with `kv_heads` heads of keys and values, and the sizes of each head."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int, gain: Tensor | None, kv_heads: int) -> None:
        self.heads, self.dim = heads, len(weights["q_proj.weight"]) // heads
        self.out = weights["out_proj.weight"]
        self.out_bias = weights.get("out_proj.bias", self.out.new_zeros(len(self.out)))
        self.weight, self.bias, self.size = {}, {}, {}
        for name in "qkv":
            weight = weights[f"{name}_proj.weight"]
            bias = weights.get(f"{name}_proj.bias", weight.new_zeros(len(weight)))
            own = heads if name == "q" else kv_heads
            weight, bias = (shared(x.unflatten(0, (-1, self.dim)), own, 0) for x in (weight, bias))
            if (norm := weights.get(f"{name}_norm.weight")) is not None:  # its factors remain where lengths are 1
                weight, bias = weight * norm[:, None], bias * norm
            # E[(w . x + b)^2], for x = gain * z with independent entries of z of variance 1.
            squares = (weight if gain is None else weight * gain).square().sum(-1) + bias.square()
            self.size[name] = squares.mean(-1).sqrt().clamp(min=1e-6)
            self.weight[name], self.bias[name] = weight.flatten(0, 1), bias.flatten()

    def rescaled(self, name: str, size: float) -> Tensor:
        """The factor of each number of all heads, so that they have this size."""
        return (size / self.size[name]).repeat_interleave(self.dim)


def _gated_delta(mixer: Mixer, attention: _Attention) -> dict[str, Start]:
    assert isinstance(mixer, GatedDelta)
    writes, starts = mixer.writes, {}
    for name in "qkv":
        times = 1 if name == "q" else writes
        starts[f"{name}_proj.weight"] = attention.weight[name].repeat(times, 1), "kept"
        starts[f"{name}_proj.bias"] = attention.bias[name].repeat(times), "kept"
    taps = [attention.rescaled("q", 1), *[attention.rescaled("k", 1)] * writes]
    taps += [attention.rescaled("v", NEARLY_LINEAR)] * writes
    # The last tap alone: the convolution scales its input, and mixes no positions.
    conv = torch.zeros_like(mixer.conv1d.weight)
    conv[:, 0, -1] = torch.cat(taps)
    starts["conv1d.weight"] = conv, "new"
    # The `writes` updates under one key of a step have together this beta: 1 - (1 - beta)^writes = BETA.
    beta = (1 - (1 - BETA) ** (1 / writes)) / (1 + mixer.negative_eigenvalues)
    starts["b_proj.weight"] = torch.zeros_like(mixer.b_proj.weight), "new"
    starts["b_proj.bias"] = attention.out.new_full((writes * mixer.num_heads,), math.log(beta / (1 - beta))), "new"
    decays, start = ("forget_gate.", "f_b_proj") if isinstance(mixer, KimiDelta) else ("", "a_proj")
    A_log, dt_bias, projection = (mixer.get_parameter(f"{decays}{x}") for x in ("A_log", "dt_bias", f"{start}.weight"))
    starts[f"{decays}{start}.weight"] = torch.zeros_like(projection), "new"
    # decay = exp(-exp(A_log) softplus(dt_bias)) = KEPT, with A_log = 0; log(expm1(y)) is the inverse of softplus.
    starts[f"{decays}A_log"] = torch.zeros_like(A_log), "new"
    starts[f"{decays}dt_bias"] = torch.full_like(dt_bias, math.log(math.expm1(-math.log(KEPT)))), "new"
    if isinstance(mixer, KimiDelta):
        gate, opened = 0.5, {"weight": torch.zeros_like(mixer.g_b_proj.weight)}
        opened["bias"] = attention.out.new_zeros(mixer.num_heads * mixer.value_dim)
    elif mixer.gate_rank:
        gate, opened = _silu_gate(mixer.g_b_proj.weight, mixer.bias, mixer.g_a_proj.weight)
    else:
        gate, opened = _silu_gate(mixer.g_proj.weight, mixer.bias)
    last = "g_b_proj" if mixer.gate_rank else "g_proj"
    starts |= {f"{last}.{kind}": (values, "new") for kind, values in opened.items()}
    size = attention.size["v"].mean()
    size_before_norm = RETRIEVED * NEARLY_LINEAR / 2 * mixer.key_dim**-0.5
    norm = math.sqrt(1 + mixer.eps / size_before_norm**2)  # the norm's epsilon makes its output smaller
    starts["o_norm.weight"] = (READ * norm / gate * size).expand(mixer.value_dim), "new"
    scale = attention.rescaled("v", size.item()).unflatten(0, (-1, attention.dim))
    starts["o_proj.weight"] = attention.out / shared(scale, attention.heads, 0).flatten(), "rescaled"
    starts["o_proj.bias"] = attention.out_bias, "kept"
    return starts


def _silu_gate(weight: Tensor, bias: bool, before: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """The divisor after a gate by silu, and its initial values.

    `weight` is as it was drawn, and so is `before`, the matrix that it is multiplied by.
    """
    if bias:
        return 1.0, {"weight": torch.zeros_like(weight), "bias": weight.new_full((len(weight),), OPEN)}
    drawn = weight.detach()
    whole = drawn if before is None else drawn @ before.detach()
    return GATED, {"weight": drawn * (GATE / whole.square().sum(-1).mean().sqrt())}


def _mamba(mixer: Mamba, attention: _Attention) -> dict[str, Start]:
    inner, channels = attention.heads * attention.dim, mixer.channels
    one = inner  # the channel that is always 1
    starts = {}
    # Rows of in_proj: x, the inputs of the convolution, and z, those of the gate.
    x, z = mixer.in_proj.weight.detach().clone().chunk(2)
    x[:inner], x[one] = attention.weight["v"], 0
    gate, opened = _silu_gate(z, mixer.bias)
    starts["in_proj.weight"] = torch.cat([x, opened["weight"]]), "kept"
    biases = torch.cat([attention.bias["v"], x.new_zeros(channels - inner), opened.get("bias", x.new_zeros(channels))])
    starts["in_proj.bias"] = biases, "kept"
    assert mixer.conv1d.bias is not None
    conv, bias = (parameter.detach().clone() for parameter in (mixer.conv1d.weight, mixer.conv1d.bias))
    conv[: one + 1], bias[: one + 1] = 0, 0
    conv[:inner, 0, -1], bias[one] = attention.rescaled("v", NEARLY_LINEAR), OPEN
    starts["conv1d.weight"], starts["conv1d.bias"] = (conv, "new"), (bias, "new")
    # With B_n = C_n = c, the output for a text of one value is c^2 sum_n step / (1 - exp(-step * rate_n)) times it.
    step = -math.log(KEPT)
    rates = mixer.A_log.detach().exp()[:inner]
    total = (step / -torch.expm1(-step * rates)).sum(-1).mean()
    project = torch.zeros_like(mixer.x_proj.weight)
    project[mixer.dt_rank :, one] = total.rsqrt()
    starts["x_proj.weight"] = project, "new"
    starts["dt_proj.bias"] = torch.full_like(mixer.dt_proj.bias, math.log(math.expm1(step))), "new"
    # D passes x on past the state; channels of values read the state alone.
    D = mixer.D.detach().clone()
    D[:inner] = 0
    starts["D"] = D, "new"
    out = torch.zeros_like(mixer.out_proj.weight)
    out[:, :inner] = attention.out * (2 / gate * AVERAGED / attention.rescaled("v", NEARLY_LINEAR))
    starts["out_proj.weight"], starts["out_proj.bias"] = (out, "rescaled"), (attention.out_bias, "kept")
    return starts
