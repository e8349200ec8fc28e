"""The mixers by name, and the patterns that assign mixers to layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers import projections
from fairseq_fastweights.mixers.bounded_memory_attention import ABCMLP, Linformer
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.fast_weight_source_attention import FastWeightSourceAttention
from fairseq_fastweights.mixers.feature_maps import is_favor
from fairseq_fastweights.mixers.gated_delta import DeltaNet, DeltaProduct, GatedDelta, KimiDelta
from fairseq_fastweights.mixers.gated_linear_attention import GatedLinearAttention
from fairseq_fastweights.mixers.local_attention import LocalAttention
from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.mixer import Mixer, Option
from fairseq_fastweights.mixers.retention import Retention
from fairseq_fastweights.mixers.softmax_attention import SoftmaxAttention
from fairseq_fastweights.mixers.transformer_xl import TransformerXL
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from fairseq_fastweights.mixers.update_rules import lookup as lookup
from fairseq_fastweights.mixers.window_sum import WindowSum
from fairseq_fastweights.suggestions import did_you_mean

_FEATURES = ("dropout", "feature_map", "feature_dim", "dpfp_nu", "favor_features")
_MAP = (*_FEATURES, "scale_read_out")
_MEMORY = (*_MAP, "bias", "normalization", "backend")
_NO_BIASES = {"projection_bias": "none"}
_ROTARY = ("rotary_dim", "rotary_base", "rotary_scaling")

SHARED_DEFAULTS: dict[str, Any] = {
    **{"bias": True, "backend": "auto", "feature_map": None, "normalization": None},
    **{"feature_dim": None, "dpfp_nu": 1, "favor_features": None, "scale_read_out": False},
    **{"rotary_dim": 0, "rotary_base": 10000.0, "rotary_scaling": "", "kv_heads": 0, "head_dim": 0},
    **{"projection_bias": "all", "query_key_norm_eps": None},
}
"""The defaults of settings of several kinds, by their names; None is the choice of the rule's paper, or nothing."""

_CONDITIONS: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "dpfp_nu": ("feature_map", "feature_map dpfp", lambda name: name == "dpfp"),
    "favor_features": ("feature_map", "feature_map favor", lambda name: name is not None and is_favor(name)),
    **dict.fromkeys(("rotary_base", "rotary_scaling"), ("rotary_dim", "rotary_dim", bool)),
}
"""Settings that a mixer reads under a condition: another setting, its value in words, and a check of the value."""


@dataclass(frozen=True)
class Kind:
    """An entry of `MIXERS`: how a mixer is made.

    Attributes:
        build: the class, or a function, that is called with the width, the settings in `shared` and its `options`.
        shared: those settings of several kinds of mixers that it takes.
        heads: the setting with the number of its heads; None if it has no heads.
        help: how the state changes at a step, for `--help`.
        feature_map: that of the paper; None for mixers without one.
        normalization: those of the paper.
        fixed: the values of settings that it does not take, but has all the same; giving these is no error.
    """

    build: Callable[..., Mixer]
    shared: tuple[str, ...]
    heads: str | None = "num_heads"
    help: str = ""
    feature_map: str | None = None
    normalization: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> Mapping[str, Option]:
        """The settings of this kind alone."""
        return self._made.options

    def arguments(self, name: str) -> dict[str, str]:
        """The arguments of a mixer of this kind, by the names of the settings for `build_mixer`, with its `name`."""
        heads = {} if self.heads is None else {self.heads: "num_heads"}
        own = {option_name(name, option): option for option in self.options}
        return {**{setting: setting for setting in self.shared}, **heads, **own}

    @property
    def takes_starts(self) -> bool:
        """True if a row may hold several documents."""
        return self._made.takes_starts

    @property
    def _made(self) -> Any:
        return self.build.func if isinstance(self.build, partial) else self.build


def fast_weight_attention(update_rule: str) -> Kind:
    """An entry for fast weight attention with a rule of `UPDATE_RULES`."""
    rule, shared = UPDATE_RULES[update_rule], (*_MEMORY, *projections.SETTINGS)
    build = partial(FastWeightAttention, update_rule=update_rule)
    return Kind(build, shared, "fast_weight_heads", rule.help, rule.feature_map, rule.normalization)


MIXERS: dict[str, Kind] = {
    **{rule: fast_weight_attention(rule) for rule in UPDATE_RULES},
    "retention": Kind(
        Retention,
        _MEMORY,
        "fast_weight_heads",
        "decays it by a constant per head, and normalises and gates the output (RetNet)",
        Retention.papers_map,
        fixed=_NO_BIASES,  # a base model without biases has it; retention's own biases follow `bias`
    ),
    "softmax": Kind(SoftmaxAttention, ("dropout", *_ROTARY, *projections.SETTINGS)),
    "local": Kind(LocalAttention, ("dropout", "bias")),
    "window-sum": Kind(
        WindowSum,
        (*_FEATURES, "bias", "normalization", "backend", *_ROTARY, *projections.SETTINGS),
        "fast_weight_heads",
        feature_map=WindowSum.papers_map,
        normalization=WindowSum.papers_normalization,
    ),
    "linformer": Kind(Linformer, ("dropout", "bias", "max_positions")),
    "abc": Kind(ABCMLP, ("dropout", "bias")),
    "transformer-xl": Kind(TransformerXL, ("dropout", "bias")),
    "mamba": Kind(Mamba, ("backend",), heads=None, fixed=_NO_BIASES),
    "gated-delta": Kind(GatedDelta, ("backend",), heads="fast_weight_heads", fixed=_NO_BIASES),
    "kimi-delta": Kind(KimiDelta, ("backend",), heads="fast_weight_heads", fixed=_NO_BIASES),
    "delta-product": Kind(DeltaProduct, ("backend",), heads="fast_weight_heads", fixed=_NO_BIASES),
    "delta-net": Kind(DeltaNet, ("backend",), heads="fast_weight_heads", fixed=_NO_BIASES),
    "gla": Kind(GatedLinearAttention, ("backend",), heads="fast_weight_heads", fixed=_NO_BIASES),
}
"""The mixers of language models and decoders, by name."""

SOURCE_MIXERS: dict[str, Kind] = {
    rule: Kind(FastWeightSourceAttention, (*_MAP, "source_dim"))
    for rule, row in UPDATE_RULES.items()
    if not row.ordered
}
"""The mixers that read a whole source, in an encoder and from decoder to encoder, by name."""


def build_mixer(name: str, embed_dim: int, settings: Mapping[str, Any], kinds: Mapping[str, Kind] = MIXERS) -> Mixer:
    """Makes a mixer by its name.

    Args:
        name: a key of `kinds`.
        embed_dim: width of its input and output.
        settings: those of several kinds by their names (`num_heads`, `dropout` ...), and the options of one kind as
            `<name>_<option>`. Settings that are missing have their defaults. `batch_first` is one for any kind.
        kinds: `MIXERS` or `SOURCE_MIXERS`.

    Returns:
        the module.

    Raises:
        ValueError: if a setting is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> layer = build_mixer("local", 16, {"num_heads": 2, "local_window": 8})
        >>> layer.window, layer.carries
        (8, True)
    """
    kind = lookup("mixers", name, kinds)
    taken = {**kind.arguments(name), "batch_first": "batch_first"}.items()
    arguments = {argument: settings[x] for x, argument in taken if x in settings or x == kind.heads}
    try:
        return kind.build(embed_dim, **arguments)
    except ValueError as error:
        option, _, why = str(error).partition(" ")
        if option not in kind.options:
            raise
        raise InvalidInput(f"{option_name(name, option)} {why}") from None  # by the name that it has here


def settings_read(name: str, settings: Mapping[str, Any], kinds: Mapping[str, Kind] = MIXERS) -> set[str]:
    """The names, among `settings` for `build_mixer`, of those that the mixer `name` reads beside its width."""
    kind = kinds[name]
    values = {**settings, "feature_map": settings.get("feature_map") or kind.feature_map}

    conditions = {setting: _CONDITIONS.get(setting, ("", "", lambda _: True)) for setting in kind.arguments(name)}
    return {setting for setting, (other, _, fits) in conditions.items() if fits(values.get(other))}


def check_read(
    given: Mapping[str, tuple[str, Any]], settings: Mapping[str, Any], layers: Iterable[tuple[str, Mapping[str, Kind]]]
) -> None:
    """Raises a `ValueError` for a setting that was given and that no layer reads, by its name.

    Args:
        given: of each setting that was given, by the names that `build_mixer` takes, its name and value for the user.
        settings: all settings for `build_mixer`.
        layers: the layers' mixers, each with the kinds among which it is looked up.
    """
    chosen = {(name, id(kinds)): (name, kinds) for name, kinds in layers}.values()
    read = {setting for name, kinds in chosen for setting in settings_read(name, settings, kinds)}
    for setting, (shown, value) in given.items():
        if setting in read or any(kinds[name].fixed.get(setting) == value for name, kinds in chosen):
            continue
        if any(setting in kinds[name].arguments(name) for name, kinds in chosen):
            other, needed, _ = _CONDITIONS[setting]
            there = "auto" if settings.get(other) is None else settings[other]
            raise InvalidInput(f"{shown} is {value}; it needs {needed}, and {other} is {there}")
        # Either no layer of the one kind that has the setting, or no layer that takes a shared one.
        owner, short = next(
            ((name, x) for name, kind in MIXERS.items() for x in kind.options if option_name(name, x) == setting),
            ("", setting),
        )
        # Settings by which the mixers that are there do the same.
        instead = [
            option_name(name, option)
            for name, kinds in chosen
            for option, row in kinds[name].options.items()
            if short in (option, *row.like)
        ]
        needed = f"a layer of {owner}" if owner else "a layer that reads it"
        mixers = ", ".join(dict.fromkeys(name for name, _ in chosen))
        hint = f" ({' and '.join(instead)} {'is' if len(instead) == 1 else 'are'} that of {mixers})" if instead else ""
        raise InvalidInput(f"{shown} is {value}; it needs {needed}, and mixers has none: they are {mixers}{hint}")


def have_sizes(mixers: Sequence[str], value_of: Callable[[str], Any]) -> bool:
    """True if heads of all mixers with `fast_weight_heads` have sizes by settings, and need not divide the width."""
    return all(
        "key_dim" in MIXERS[name].options and value_of(option_name(name, size))
        for name in mixers
        if MIXERS[name].heads == "fast_weight_heads"
        for size in ("key_dim", "value_dim")
    )


def option_name(mixer: str, option: str) -> str:
    """The name of a mixer's own option among the options of a model."""
    return f"{mixer}_{option}".replace("-", "_")


def parse_pattern(text: str, layers: int) -> tuple[str, ...]:
    """Reads a pattern that assigns a mixer to each layer.

    Args:
        text: comma-separated names of `MIXERS`, each with the numbers of its layers, from 1, after a colon: "delta",
            "delta:1-10,softmax:11-12" or "delta,softmax:6,12". One name may have no numbers; it gets the other layers.
        layers: number of layers.

    Returns:
        a name for each layer.

    Raises:
        ValueError: if the pattern cannot be read, or a layer has no mixer or two.

    Examples:
        >>> parse_pattern("delta,softmax:2,4", layers=4)
        ('delta', 'softmax', 'delta', 'softmax')
    """

    def refuse(why: str, hint: str = "") -> InvalidInput:
        return InvalidInput(
            f"mixers is {text!r}, {why}; it must be comma-separated names, each with its layers from 1 to {layers}, as "
            f"in 'delta:1-{layers}' or 'delta,softmax:{layers}'. The names are {', '.join(MIXERS)}{hint}"
        )

    chosen: dict[int, str] = {}
    others = name = None
    for word in (word.strip() for word in text.split(",")):
        named = re.fullmatch(r"([A-Za-z][\w-]*)(?::\s*(\d.*))?", word)
        if named is not None:
            name, word = named[1], named[2]
            if name not in MIXERS:
                raise refuse(f"in which {name!r} is no mixer", did_you_mean(name, MIXERS))
            if word is None:
                if others is not None:
                    raise refuse(f"in which both {others!r} and {name!r} have the layers that are left")
                others, name = name, None
                continue
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", word or "")
        if span is None or name is None:
            raise refuse(f"in which {word!r} names no layers")
        first, last = int(span[1]), int(span[2] or span[1])
        if not 1 <= first <= last <= layers:
            raise refuse(f"in which {word!r} is not within 1 to {layers}")
        for number in range(first, last + 1):
            if number in chosen:
                raise refuse(f"which gives layer {number} both {chosen[number]!r} and {name!r}")
            chosen[number] = name
    # The name without numbers has the other layers.
    left = [number for number in range(1, layers + 1) if number not in chosen]
    if left and others is None:
        raise refuse(f"which leaves layers without a mixer: {', '.join(map(str, left))}")
    return tuple(chosen.get(number, others or "") for number in range(1, layers + 1))


def write_pattern(mixers: Sequence[str]) -> str:
    """The pattern that `parse_pattern` reads as these mixers."""
    parts = []
    number = 1
    for name, group in groupby(mixers):
        count = len(list(group))
        parts.append(f"{name}:{number}-{number + count - 1}")
        number += count
    return ",".join(parts)
