"""Transfers a Transformer's weights into a model with other mixers (Choi 2024; Mao 2022)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from fairseq_fastweights.conversion.files.weight_files import text_table
from fairseq_fastweights.conversion.transfer.base_model import BaseModel
from fairseq_fastweights.conversion.transfer.options import GROUPS, plain_value
from fairseq_fastweights.conversion.transfer.recurrent_swap import (
    bias_option,
    check_recurrent,
    is_recurrent,
    read_weights,
    swap_recurrent,
)
from fairseq_fastweights.conversion.transfer.swap import Start, check_swap, lacks_scale, swap
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# By group: the beginnings of names after `decoder.`, and after `decoder.layers.<number>.`
_OF_DECODER: dict[str, tuple[str, ...]] = {
    "embeddings": ("embed_tokens.", "embed_positions.", "project_in_dim.", "layernorm_embedding."),
    "output": ("layer_norm.", "project_out_dim.", "output_projection.", "adaptive_softmax."),
}
_OF_LAYER: dict[str, tuple[str, ...]] = {
    "attention": tuple(f"self_attn.{part}." for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "in_proj")),
    # With the scales and norms of the attention's output.
    "output-projection": (
        *(f"self_attn.{part}_proj." for part in ("out", "o", "output_gate")),
        *("attn_ln.", "c_attn"),
    ),
    "feed-forward": ("fc1.", "fc2.", "ffn_layernorm.", "w_resid"),
}

HOW = ("kept", "rescaled", "folded", "new")
_NO_SCALE = (
    "the base model's attention multiplies scores by 1 / sqrt(head dim), these layers do not: with scale_read_out they "
    "start nearer to it"
)
_NO_BIAS = (
    "layers whose projections have no biases cannot start with open gates, nor with the base model's biases: with {} "
    "they start nearer to its attention"
)

_ATTENTION, _LAYERS = ("attention",), ("attention", "feed-forward")
_MEANING: dict[str, tuple[tuple[str, ...], Any]] = {
    "decoder_normalize_before": (_LAYERS, None),
    "parallel_residual": (_LAYERS, False),
    "rotary_dim": (_ATTENTION, 0),
    "rotary_base": (_ATTENTION, 10000.0),
    "rotary_scaling": (_ATTENTION, ""),
    "rms_norm_eps": ((*_LAYERS, "output"), None),
    "zero_centered_norms": ((*_LAYERS, "output"), False),
    "output_norm_layers": (_LAYERS, ""),
    "activation_fn": (("feed-forward",), "relu"),
    "no_scale_embedding": (("embeddings",), False),
    "decoder_learned_pos": (("embeddings",), False),
    "no_token_positional_embeddings": (("embeddings",), False),
    "mask_special_symbols": (("output",), False),
}
"""Options that change the meaning of weights of the same shapes: the groups of weights, and the value that models had
before there was the option, where it is known."""

_NO_GROUP = "none of them"
_WITHOUT_ATTENTION = "embeddings,output,feed-forward"
_OF_ATTENTION = tuple(group for group in GROUPS if group not in _WITHOUT_ATTENTION.split(","))


@dataclass
class Target:
    """A parameter of the model that gets the weights.

    Attributes:
        names: its names, several if it is tied.
        groups: its groups, in the order of `GROUPS`. It is transferred with any of them.
        how: the origin of its values, one of `HOW`.
        frozen: whether training does not change it.
    """

    parameter: nn.Parameter
    names: list[str]
    groups: list[str]
    how: str = "new"
    frozen: bool = False

    def is_at(self, paths: Iterable[str]) -> bool:
        """True if the parameter belongs to a module at one of these paths, which end in a dot."""
        return self.names[0].startswith(tuple(paths))

    def set(self, values: Tensor, how: str) -> None:
        """Gives the parameter these values."""
        self.parameter.copy_(values)
        self.how = how


class Transfer:
    """Copies a base model's weights into a model; mixers that can start at softmax attention do (`swap`).

    Gated delta networks and Mamba have a start of their own (`swap_recurrent`).

    Parameters outside `groups`, and those that the base model lacks (gates, feature maps), stay as they are. So do
    mixers that cannot start at attention (`Mixer.takes_attention`), and the norm before each. In a model with such
    layers "attention" means the attention of the other layers, with its output projection (Choi 2024, Sec. 3.2).

    As text it is a table of the numbers of parameters, and settings with which the model may start better.

    Args:
        model: a language model that fairseq built.
        base: the base model; its weights are removed from it as they are copied.
        groups: some of `GROUPS`.

    Attributes:
        targets: the parameters.

    Raises:
        ValueError: if the model is no Transformer, or weights do not fit; the message lists all, and nothing is copied.
    """

    def __init__(self, model: Any, base: BaseModel, groups: frozenset[str]) -> None:
        if not isinstance(getattr(model, "decoder", None), TransformerDecoderBase):
            raise InvalidInput(
                f"transfer_from is set, but {type(model).__name__} is no Transformer; it must be fast_weight_lm"
            )
        self._base, self._groups, self._options = base, groups, model.decoder.args
        self._pre_norm = bool(self._options.decoder_normalize_before)
        self._heads = base.options.get("decoder_attention_heads", self._options.decoder_attention_heads)
        mixers = {f"{path}.": module for path, module in model.named_modules() if isinstance(module, Mixer)}
        # By path: mixers in the place of attention; of these, those that can start at its weights, in two ways.
        replaced = {path: mixer for path, mixer in mixers.items() if not isinstance(mixer, SoftmaxAttention)}
        self._starting = {path: mixer for path, mixer in replaced.items() if mixer.takes_attention}
        self._recurrent = {path: mixer for path, mixer in self._starting.items() if is_recurrent(mixer)}
        self._attentions = {path: mixer for path, mixer in self._starting.items() if path not in self._recurrent}
        self.targets = _targets(model, self._pre_norm, replaced.keys() - self._starting.keys())
        if "attention" not in groups:  # recurrent mixers start whole, or not at all
            for target in self.targets:
                target.groups = [] if target.is_at(self._recurrent) else target.groups
        self._has_softmax = len(replaced) < count_layers(name for name, _ in model.named_parameters())
        self._check()
        with torch.no_grad():
            self._copy()

    def freeze(self, groups: frozenset[str]) -> list[nn.Parameter]:
        """Marks the transferred parameters of these groups as frozen, and returns them."""
        for target in self.targets:
            target.frozen = target.how != "new" and bool(groups & set(target.groups))
        return [target.parameter for target in self.targets if target.frozen]

    def __str__(self) -> str:
        counts: Counter[tuple[str, str]] = Counter()  # numbers of parameters; tied ones count once
        tied: Counter[tuple[str, ...]] = Counter()
        for target in self.targets:
            count = target.parameter.numel()
            for row in ((target.groups or [_NO_GROUP])[0], "all"):
                counts[row, target.how] += count
                counts[row, "frozen"] += count * target.frozen
            if len(target.groups) > 1 and len(target.names) > 1:
                tied[tuple(target.groups)] += count
        columns = (*HOW, "frozen")
        rows = [[row, *(f"{counts[row, column]:,}" for column in columns)] for row in (*GROUPS, _NO_GROUP, "all")]
        text = f"transfer from {self._base.file}\n" + text_table([["parameters", *columns], *rows], numbers=True)
        for (first, *others), number in sorted(tied.items()):
            text += f"\n{number:,} parameters of {first} are tied to {', '.join(others)}"
        return "\n".join([text, *self._advice()])

    def _check(self) -> None:
        """Raises a `ValueError` that lists all differences between the base model's weights and those of the model."""
        recurrent_shapes: dict[str, torch.Size] = {}
        if "attention" in self._groups:
            for attention in self._attentions.values():
                check_swap(attention)
            for path, mixer in self._recurrent.items():
                rows, kv_rows = (len(self._base.weights.get(f"{path}{name}_proj.weight", ())) for name in "qv")
                if rows:
                    check_recurrent(mixer, self._heads, rows, kv_rows)
                shapes = read_weights(mixer, rows, kv_rows)
                recurrent_shapes |= {f"{path}{name}": shape for name, shape in shapes.items()}
        misfits = [*self._other_options(), *self._other_heads(), *self._other_shapes(recurrent_shapes)]
        misfits += self._other_weights()
        if misfits:
            of_attention = all(".self_attn." in name or name in _OF_ATTENTION for _, name, *_ in misfits)
            advice = f"; with transfer {_WITHOUT_ATTENTION} they would" if of_attention else ""
            raise InvalidInput(
                f"the weights in {self._base.file} do not fit the model; nothing was transferred{advice}\n"
                + text_table([["difference", "name", "base model", "model"], *misfits])
            )
        if not any(self._groups & set(target.groups) for target in self.targets):
            raise InvalidInput(
                f"transfer is {','.join(group for group in GROUPS if group in self._groups)}, of which the model has "
                f"nothing: its mixers take no weights of attention; it must be of {_WITHOUT_ATTENTION}"
            )

    def _copy(self) -> None:
        """Sets parameters to the starts of their mixers, and all others to the weights of the same names."""
        starts: dict[str, Mapping[str, Start]] = {}
        if "attention" in self._groups:
            # The norm before a mixer is copied later, and removed from the base model then.
            gains = {path: self._base.weights.get(f"{path[:-1]}_layer_norm.weight") for path in self._recurrent}
            starts |= {path: swap(mixer, self._take(path, mixer)) for path, mixer in self._attentions.items()}
            for path, mixer in self._recurrent.items():
                gain = gains[path] if self._pre_norm else None
                starts[path] = swap_recurrent(mixer, self._take(path), self._heads, gain)
        by_name = {name: target for target in self.targets for name in target.names}
        for path, values in starts.items():
            for name, start in values.items():
                target = by_name[f"{path}{name}"]
                if not target.groups or self._takes(target):
                    target.set(*start)
        for target in self.targets:
            found = [self._base.weights.pop(name) for name in target.names if name in self._base.weights]
            if found and self._takes(target):
                target.set(found[0], "kept")

    def _advice(self) -> Iterator[str]:
        """Settings with which mixers in the place of attention may start better."""
        mixers = self._starting.values() if "attention" in self._groups else ()
        if any(map(lacks_scale, mixers)):
            yield _NO_SCALE
        if unbiased := {name for mixer in mixers if is_recurrent(mixer) and (name := bias_option(mixer))}:
            yield _NO_BIAS.format(", ".join(sorted(unbiased)))

    def _takes(self, target: Target) -> bool:
        return bool(self._groups & set(target.groups))

    def _take(self, path: str, mixer: Mixer | None = None) -> dict[str, Tensor]:
        """Removes the base model's weights at a path: all, or the projections and norms that `mixer` has too."""
        starts = ("q_proj.", "k_proj.", "v_proj.", "q_norm.", "k_norm.")
        names = [name for name in self._base.weights if name.startswith(path)]
        if mixer is not None:
            names = [f"{path}{name}" for name, _ in mixer.named_parameters() if name.startswith(starts)]
        return {name.removeprefix(path): self._base.weights.pop(name) for name in names}

    def _other_options(self) -> Iterator[list[str]]:
        rotates = self._has_softmax or any(hasattr(attention, "rotary") for attention in self._attentions.values())
        for name, (of_groups, before) in _MEANING.items():
            theirs = plain_value(self._base.options.get(name, before))
            ours = plain_value(getattr(self._options, name, before))
            if name.startswith("rotary_") and not rotates:
                continue
            if self._groups & set(of_groups) and None not in (theirs, ours) and theirs != ours:
                yield ["other option", name, str(theirs), str(ours)]

    def _other_heads(self) -> Iterator[list[str]]:
        """Other numbers of heads than the base model's, with which its weights of attention have another meaning."""
        theirs, common = self._base.options.get("decoder_attention_heads"), self._options.decoder_attention_heads
        if "attention" not in self._groups or theirs is None:
            return
        # Heads of softmax layers and of linear attention are two options.
        ours = {"decoder_attention_heads": common} if self._has_softmax else {}
        for attention in self._attentions.values():
            name = "decoder_attention_heads" if attention.num_heads == common else "fast_weight_heads"
            ours[name] = attention.num_heads
        yield from (["other option", name, str(theirs), str(heads)] for name, heads in ours.items() if heads != theirs)

    def _other_shapes(self, expected: Mapping[str, torch.Size]) -> Iterator[list[str]]:
        """Weights that recurrent mixers read, which are missing or have another shape than expected."""
        for name, shape in expected.items():
            if (tensor := self._base.weights.get(name)) is None:
                yield ["missing", name, "-", _size(shape)]
            elif tensor.shape != shape:
                yield ["wrong shape", name, _size(tensor.shape), _size(shape)]

    def _other_weights(self) -> Iterator[list[str]]:
        """Weights of the same names that are missing, left over, of another shape, or not tied as in the model."""
        weights, groups = self._base.weights, self._groups
        wanted = [target for target in self.targets if self._takes(target) and not target.is_at(self._recurrent)]
        present = {g for target in wanted if any(name in weights for name in target.names) for g in target.groups}
        # A group without any weight is one row of the table, not one for each parameter.
        lacking = groups - present
        for group in GROUPS:
            number = sum(target.parameter.numel() for target in wanted if group in target.groups)
            if group in lacking and number:
                yield ["missing group", group, "none of it", f"{number:,} parameters"]
        unfolded = self._unfolded_shapes()
        for target in wanted:
            name, *_ = target.names
            found = [weights[name] for name in target.names if name in weights]
            shape = unfolded.get(name, target.parameter.shape)
            if not found:
                if not set(target.groups) <= lacking:
                    yield ["missing", name, "-", _size(shape)]
            elif any(tensor.shape != shape for tensor in found):
                yield ["wrong shape", name, _size(found[0].shape), _size(shape)]
            elif any(not torch.equal(tensor, found[0]) for tensor in found[1:]):
                yield ["not tied", name, "differs from", target.names[1]]
        known = {name for target in self.targets for name in target.names}
        layers = count_layers(weights)
        for name, tensor in weights.items():
            if name in known or name.startswith(tuple(self._recurrent)):
                continue
            if group_of(name, layers, self._pre_norm) in {*groups, None}:
                yield ["left over", name, _size(tensor.shape), "-"]

    def _unfolded_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the base model's queries and keys: per head as many numbers as values, not as feature maps."""
        return {
            f"{path}{name}": torch.Size([heads * attention.head_dim, *parameter.shape[1:]])
            for path, attention in self._attentions.items()
            for start, heads in (("q_proj.", attention.num_heads), ("k_proj.", _kv_heads(attention)))
            for name, parameter in attention.named_parameters()
            if name.startswith(start)
        }


def _kv_heads(attention: Any) -> int:
    return attention.v_proj.out_features // attention.head_dim


def _targets(model: nn.Module, pre_norm: bool, own_attention: set[str]) -> list[Target]:
    """The model's parameters.

    Args:
        model: the model.
        pre_norm: whether norms come before each part of a layer, or after it.
        own_attention: paths, with a dot at their ends, of mixers that are not in the group "attention".
    """
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    layers = count_layers(name for tied in names.values() for name in tied)
    targets = []
    for parameter, tied in names.items():
        groups = {group_of(name, layers, pre_norm) for name in tied}
        # In hybrids with retention (Choi 2024) attention stays with the softmax layers, whole.
        if any(attention_of(name, pre_norm) in own_attention for name in tied):
            groups.discard("attention")
        elif own_attention and "output-projection" in groups:
            groups.add("attention")
        targets.append(Target(parameter, tied, [group for group in GROUPS if group in groups]))
    return targets


def _size(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))


def group_of(name: str, layers: int, pre_norm: bool) -> str | None:
    """The group of a parameter of a Transformer language model; None for parameters that a Transformer lacks, as gates.

    A norm belongs to the part after it. If norms follow the parts, the attention's norm belongs to the feed-forward
    network, and the feed-forward network's norm to the next layer's attention, or to the output.

    Args:
        name: fairseq's name of the parameter.
        layers: number of layers of the model.
        pre_norm: whether norms come before each part of a layer, or after it.
    """
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return _look_up(name.removeprefix("decoder."), _OF_DECODER) if name.startswith("decoder.") else None
    number, part = int(in_layer[1]), in_layer[2]
    if part.startswith("self_attn_layer_norm."):
        return "attention" if pre_norm else "feed-forward"
    if part.startswith("final_layer_norm."):
        if pre_norm:
            return "feed-forward"
        return "attention" if number + 1 < layers else "output"
    return _look_up(part, _OF_LAYER)


def attention_of(name: str, pre_norm: bool) -> str | None:
    """The path, with a dot at its end, of the attention that a parameter of that group belongs to or precedes.

    None for parameters outside the layers.
    """
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return None
    follows = not pre_norm and in_layer[2].startswith("final_layer_norm.")
    return f"decoder.layers.{int(in_layer[1]) + follows}.self_attn."


def count_layers(names: Iterable[str]) -> int:
    """The number of layers of a model with parameters of these names."""
    found = [_LAYER.match(name) for name in names]
    return len({match[1] for match in found if match})


def _look_up(part: str, table: dict[str, tuple[str, ...]]) -> str | None:
    return next((group for group, starts in table.items() if part.startswith(starts)), None)
