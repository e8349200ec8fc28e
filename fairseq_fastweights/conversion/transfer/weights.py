"""Transfers a Transformer's weights into a model with other mixers (Choi 2024; Mao 2022)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from fairseq_fastweights.conversion.files.text_tables import text_table
from fairseq_fastweights.conversion.transfer.groups import GROUPS, attention_of, count_layers, group_of
from fairseq_fastweights.conversion.transfer.recurrent_swap import (
    bias_option,
    check_recurrent,
    is_recurrent,
    read_weights,
    swap_recurrent,
)
from fairseq_fastweights.conversion.transfer.source import Source
from fairseq_fastweights.conversion.transfer.swap import check_swap, reads_without_scale, swap
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention

HOW = ("kept", "rescaled", "folded", "new")
_NO_SCALE = (
    "the source's attention multiplies what it compares by 1 / sqrt(head dim), these layers do not: with "
    "scale_read_out they start nearer to it"
)
_NO_BIAS = (
    "layers whose projections have no biases cannot start with open gates, nor with the source's biases: with {} they "
    "start nearer to its attention"
)

# Options that change what weights of the same shapes mean: the groups for which they do, and what models were before
# there was the option, where it is known.
_MEANING: dict[str, tuple[tuple[str, ...], Any]] = {
    "decoder_normalize_before": (("attention", "feed-forward"), None),
    "parallel_residual": (("attention", "feed-forward"), False),
    "rotary_dim": (("attention",), 0),
    "rotary_base": (("attention",), 10000.0),
    "rotary_scaling": (("attention",), ""),
    "rms_norm_eps": (("attention", "feed-forward", "output"), None),
    "zero_centered_norms": (("attention", "feed-forward", "output"), False),
    "output_norm_layers": (("attention", "feed-forward"), ""),
    "activation_fn": (("feed-forward",), "relu"),
    "no_scale_embedding": (("embeddings",), False),
    "decoder_learned_pos": (("embeddings",), False),
    "no_token_positional_embeddings": (("embeddings",), False),
    "mask_special_symbols": (("output",), False),
}

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


@dataclass
class Report:
    """The result of a transfer for each parameter of the model.

    Attributes:
        source: file of the weights.
        targets: the parameters.
        advice: settings with which the model may start better, as text.
    """

    source: str
    targets: list[Target] = field(default_factory=list)
    advice: str = ""

    def count(self, group: str, how: str) -> int:
        """Counts the numbers of a group's parameters of an origin, or "frozen"; tied parameters count once."""
        return sum(
            target.parameter.numel()
            for target in self.targets
            if (target.groups or [_NO_GROUP])[0] == group and (target.frozen if how == "frozen" else target.how == how)
        )

    def freeze(self, groups: frozenset[str]) -> list[nn.Parameter]:
        """Marks the transferred parameters of these groups as frozen, and returns them."""
        for target in self.targets:
            target.frozen = target.how != "new" and bool(groups & set(target.groups))
        return [target.parameter for target in self.targets if target.frozen]

    def __str__(self) -> str:
        columns = (*HOW, "frozen")
        rows = [[group, *(self.count(group, column) for column in columns)] for group in (*GROUPS, _NO_GROUP)]
        rows.append(["all", *(sum(row[i] for row in rows) for i in range(1, 1 + len(columns)))])  # type: ignore[misc]
        lines = [["parameters", *columns], *([str(row[0]), *(f"{n:,}" for n in row[1:])] for row in rows)]
        text = f"transfer from {self.source}\n" + text_table(lines, numbers=True)
        for (first, *others), number in sorted(self._tied().items()):
            text += f"\n{number:,} parameters of {first} are tied to {', '.join(others)}"
        return text + (f"\n{self.advice}" if self.advice else "")

    def _tied(self) -> Counter[tuple[str, ...]]:
        tied: Counter[tuple[str, ...]] = Counter()
        for target in self.targets:
            if len(target.groups) > 1 and len(target.names) > 1:
                tied[tuple(target.groups)] += target.parameter.numel()
        return tied


def transfer(model: Any, source: Source, groups: frozenset[str]) -> Report:
    """Copies a source's weights into a model; mixers that can start at softmax attention do (`swap`).

    Gated delta networks and Mamba have a start of their own (`swap_recurrent`).

    Parameters outside `groups`, and those that the source lacks (gates, feature maps), stay as they are. So do mixers
    that cannot start at attention (`Mixer.takes_attention`), and the norm before each. In a model with such layers
    "attention" means the attention of the other layers, with its output projection (Choi 2024, Sec. 3.2).

    Args:
        model: a language model that fairseq built.
        source: the source; its weights are removed from it as they are copied.
        groups: some of `GROUPS`.

    Raises:
        ValueError: if the model is no Transformer, or weights do not fit; the message lists all, and nothing is copied.
    """
    if not isinstance(getattr(model, "decoder", None), TransformerDecoderBase):
        raise InvalidInput(
            f"transfer_from is set, but {type(model).__name__} is no Transformer; it must be fast_weight_lm"
        )
    options = model.decoder.args
    pre_norm = bool(options.decoder_normalize_before)
    mixers = {f"{path}.": module for path, module in model.named_modules() if isinstance(module, Mixer)}
    memories = {path: mixer for path, mixer in mixers.items() if not isinstance(mixer, SoftmaxAttention)}
    starting = {path: memory for path, memory in memories.items() if memory.takes_attention}
    recurrent = {path: mixer for path, mixer in starting.items() if is_recurrent(mixer)}
    attentions = {path: mixer for path, mixer in starting.items() if path not in recurrent}
    heads = source.options.get("decoder_attention_heads", options.decoder_attention_heads)
    read: dict[str, torch.Size] = {}
    if "attention" in groups:
        for attention in attentions.values():
            check_swap(attention)
        for path, mixer in recurrent.items():
            rows, shared_rows = (len(source.weights.get(f"{path}{name}_proj.weight", ())) for name in "qv")
            if rows:
                check_recurrent(mixer, heads, rows, shared_rows)
            read |= {f"{path}{name}": shape for name, shape in read_weights(mixer, rows, shared_rows).items()}
    names = [name for name, _ in model.named_parameters()]
    targets = _targets(model, pre_norm, {path for path in memories if path not in starting})
    if "attention" not in groups:  # with which the whole of these layers goes
        for target in targets:
            target.groups = [] if _is_at(target, tuple(recurrent)) else target.groups
    shapes = {
        # The source's are not folded: as many numbers as values have, in as many heads.
        f"{path}{name}": torch.Size([heads * attention.head_dim, *parameter.shape[1:]])
        for path, attention in attentions.items()
        for start, heads in (("q_proj.", attention.num_heads), ("k_proj.", _kv_heads(attention)))
        for name, parameter in attention.named_parameters()
        if name.startswith(start)
    }
    has_softmax = len(memories) < count_layers(names)
    rotates = has_softmax or any(hasattr(attention, "rotary_dim") for attention in attentions.values())
    misfits = [
        *_other_options(source, options, groups, rotates),
        *_other_heads(source, options, groups, attentions, has_softmax),
        *_other_weights(source, targets, groups, pre_norm, shapes, read, tuple(recurrent)),
    ]
    if misfits:
        of_attention = all(".self_attn." in name or name in _OF_ATTENTION for _, name, *_ in misfits)
        advice = f"; with transfer {_WITHOUT_ATTENTION} they would" if of_attention else ""
        raise InvalidInput(
            f"the weights in {source.file} do not fit the model; nothing was transferred{advice}\n"
            + text_table([["what", "name", "source", "model"], *misfits])
        )
    if not any(groups & set(target.groups) for target in targets):
        raise InvalidInput(
            f"transfer is {','.join(group for group in GROUPS if group in groups)}, of which the model has nothing: "
            f"its mixers take no weights of attention; it must be of {_WITHOUT_ATTENTION}"
        )
    gains = {path: source.weights.get(f"{path[:-1]}_layer_norm.weight") for path in recurrent if pre_norm}
    with torch.no_grad():
        starts: dict[str, Mapping[str, tuple[Tensor, str]]] = {}
        if "attention" in groups:
            starts |= {path: swap(mixer, _take(source, path, mixer)) for path, mixer in attentions.items()}
            for path, mixer in recurrent.items():
                starts[path] = swap_recurrent(mixer, _take(source, path), heads, gains.get(path))
        _copy(targets, source, groups, starts)
    return Report(str(source.file), targets, _advice(starting.values()) if "attention" in groups else "")


def _advice(mixers: Iterable[Mixer]) -> str:
    """Settings with which these mixers, in the place of attention, may start better."""
    mixers = list(mixers)
    unbiased = {name for mixer in mixers if is_recurrent(mixer) and (name := bias_option(mixer))}
    advice = [_NO_SCALE] if any(map(reads_without_scale, mixers)) else []
    return "\n".join([*advice, *([_NO_BIAS.format(", ".join(sorted(unbiased)))] if unbiased else [])])


def _kv_heads(attention: Any) -> int:
    return attention.v_proj.out_features // attention.head_dim


def _targets(model: nn.Module, pre_norm: bool, own_attention: set[str]) -> list[Target]:
    """The model's parameters.

    Args:
        model: the model.
        pre_norm: whether norms come before each part of a layer, or after it.
        own_attention: paths, with a dot at their ends, of mixers that are not in the group "attention".
    """
    names: dict[int, list[str]] = defaultdict(list)
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        parameters[id(parameter)] = parameter
    layers = count_layers(name for tied in names.values() for name in tied)
    targets = []
    for key, parameter in parameters.items():
        groups = {group_of(name, layers, pre_norm) for name in names[key]}
        if any(attention_of(name, pre_norm) in own_attention for name in names[key]):
            groups.discard("attention")
        elif own_attention and "output-projection" in groups:
            groups.add("attention")
        targets.append(Target(parameter, names[key], [group for group in GROUPS if group in groups]))
    return targets


def _other_options(source: Source, options: Any, groups: frozenset[str], rotates: bool) -> Iterable[list[str]]:
    for name, (of_groups, before) in _MEANING.items():
        theirs = _plain(source.options.get(name, before))
        ours = _plain(getattr(options, name, before))
        if name.startswith("rotary_") and not rotates:
            continue
        if groups & set(of_groups) and None not in (theirs, ours) and theirs != ours:
            yield ["other option", name, str(theirs), str(ours)]


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _other_heads(
    source: Source,
    options: Any,
    groups: frozenset[str],
    attentions: dict[str, Mixer],
    has_softmax: bool,
) -> Iterable[list[str]]:
    """Lists other numbers of heads than the source's, with which its weights of attention would not mean the same."""
    theirs, common = source.options.get("decoder_attention_heads"), options.decoder_attention_heads
    if "attention" not in groups or theirs is None:
        return
    ours = {"decoder_attention_heads": common} if has_softmax else {}
    for attention in attentions.values():
        name = "decoder_attention_heads" if attention.num_heads == common else "fast_weight_heads"
        ours[name] = attention.num_heads
    for name, heads in ours.items():
        if heads != theirs:
            yield ["other option", name, str(theirs), str(heads)]


def _other_weights(
    source: Source,
    targets: list[Target],
    groups: frozenset[str],
    pre_norm: bool,
    shapes: dict[str, torch.Size],
    read: dict[str, torch.Size],
    recurrent: tuple[str, ...],
) -> Iterable[list[str]]:
    """Lists weights that are missing, left over or of another shape.

    Args:
        source, targets, groups, pre_norm: as above.
        shapes: the shapes of the source's weights whose parameters have others.
        read: the source's weights that mixers at the paths `recurrent` read, and their shapes.
        recurrent: where mixers have parameters that are not the source's.
    """
    for name, shape in read.items():
        if (tensor := source.weights.get(name)) is None:
            yield ["missing", name, "-", _size(shape)]
        elif tensor.shape != shape:
            yield ["wrong shape", name, _size(tensor.shape), _size(shape)]
    wanted = [target for target in targets if groups & set(target.groups) and not _is_at(target, recurrent)]
    lacking = {
        group
        for group in groups
        if not any(name in source.weights for target in wanted if group in target.groups for name in target.names)
    }
    for group in GROUPS:
        number = sum(target.parameter.numel() for target in wanted if group in target.groups)
        if group in lacking and number:
            yield ["missing group", group, "none of it", f"{number:,} parameters"]
    for target in wanted:
        name, *_ = target.names
        found = [source.weights[name] for name in target.names if name in source.weights]
        shape = shapes.get(name, target.parameter.shape)
        if not found:
            if not set(target.groups) <= lacking:
                yield ["missing", name, "-", _size(shape)]
        elif any(tensor.shape != shape for tensor in found):
            yield ["wrong shape", name, _size(found[0].shape), _size(shape)]
        elif any(not torch.equal(tensor, found[0]) for tensor in found[1:]):
            yield ["not tied", name, "differs from", target.names[1]]
    known = {name for target in targets for name in target.names}
    layers = count_layers(source.weights)
    for name, tensor in source.weights.items():
        if name in known or name.startswith(recurrent):
            continue
        if group_of(name, layers, pre_norm) in {*groups, None}:
            yield ["left over", name, _size(tensor.shape), "-"]


def _size(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))


def _is_at(target: Target, paths: tuple[str, ...]) -> bool:
    return target.names[0].startswith(paths)


def _take(source: Source, path: str, mixer: Mixer | None = None) -> dict[str, Tensor]:
    """Removes from the source what it has at a path: all of it, or the projections and norms that `mixer` has too."""
    starts = ("q_proj.", "k_proj.", "v_proj.", "q_norm.", "k_norm.")
    names = [name for name in source.weights if name.startswith(path)]
    if mixer is not None:
        names = [f"{path}{name}" for name, _ in mixer.named_parameters() if name.startswith(starts)]
    return {name.removeprefix(path): source.weights.pop(name) for name in names}


def _copy(
    targets: list[Target],
    source: Source,
    groups: frozenset[str],
    starts: Mapping[str, Mapping[str, tuple[Tensor, str]]],
) -> None:
    """Sets parameters to their `starts`, which are by path and name, and to the weights of the same names."""
    by_name = {name: target for target in targets for name in target.names}
    for path, values in starts.items():
        for name, start in values.items():
            target = by_name[f"{path}{name}"]
            if not target.groups or groups & set(target.groups):
                _set(target, *start)
    for target in targets:
        found = [source.weights.pop(name) for name in target.names if name in source.weights]
        if found and groups & set(target.groups):
            _set(target, found[0], "kept")


def _set(target: Target, values: Tensor, how: str) -> None:
    target.parameter.copy_(values)
    target.how = how
