"""Mixers are made by name from the settings that they take, and patterns say which layer has which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fairseq_fastweights.mixers.gated_delta import GatedDelta
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import MIXERS, SOURCE_MIXERS, Kind, build_mixer, option_name, parse_pattern
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES

WIDTH = 16
HEADS = {"num_heads": 4, "fast_weight_heads": 2, "max_positions": 24}
MEMORIES = ("delta", "retention", "kimi-delta", "gla")
DELTA_NETWORKS = ("gated-delta", "kimi-delta", "delta-product", "delta-net")
NEVER_BIASED = {"compress_k", "compress_v", "control_proj"}
NO_CORRECTION, REMOVAL = ("sum", "gated", "decay"), {"normalization": {"sum", "removal"}}


def build(name: str, kinds: Mapping[str, Kind] = MIXERS, **settings: Any) -> Mixer:
    return build_mixer(name, WIDTH, {**HEADS, **settings}, kinds)


def test_patterns_are_read():
    for text, expected in {
        "delta": "delta delta delta delta",
        "softmax:2,4,delta": "delta softmax delta softmax",
        "softmax:1,3-4,retention:2": "softmax retention softmax softmax",
        "delta:1,softmax:2-3,delta:4": "delta softmax softmax delta",
        " delta: 1-3 , softmax:4 ": "delta delta delta softmax",
    }.items():
        assert parse_pattern(text, 4) == tuple(expected.split())


def test_other_patterns_are_refused_with_the_reason():
    hints = {"gated_delta": "; did you mean gated-delta?", "Delta": "; did you mean delta?"}
    for text, why in {
        "": "in which '' names no layers",
        "hebb": "in which 'hebb' is no mixer",
        "gated_delta": "in which 'gated_delta' is no mixer",
        "Delta": "in which 'Delta' is no mixer",
        "delta:1-2": "which leaves layers without a mixer: 3, 4",
        "delta:1-3,softmax:3-4": "which gives layer 3 both 'delta' and 'softmax'",
        "delta,softmax": "in which both 'delta' and 'softmax' have the layers that are left",
        "delta,softmax:5": "in which '5' is not within 1 to 4",
        "delta,softmax:0": "in which '0' is not within 1 to 4",
        "delta,softmax:3-2": "in which '3-2' is not within 1 to 4",
        "delta,2": "in which '2' names no layers",
        "delta,softmax:2-": "in which '2-' names no layers",
    }.items():
        with pytest.raises(ValueError) as raised:
            parse_pattern(text, 4)
        assert str(raised.value) == (
            f"mixers is {text!r}, {why}; it must be comma-separated names, each with its layers from 1 to 4, as in "
            f"'delta:1-4' or 'delta,softmax:4'. The names are {', '.join(MIXERS)}{hints.get(text, '')}"
        )


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_is_made_by_its_name_and_its_options_reach_it(name):
    kind = MIXERS[name]
    others = {o: not row.default if row.type is bool else row.default + 2 for o, row in kind.options.items()}
    if others.pop("key_heads", None) is not None:  # of which kv_heads leaves no choice
        assert build(name, **{option_name(name, "key_heads"): 1}).key_heads == 1
    shape = {"query_key_norm_eps": 1.0}  # which joint_norm needs
    named = {option_name(name, option): value for option, value in others.items()}
    mixer, default = build(name, **named, **shape), build(name)
    assert mixer.num_heads == {None: 1, **HEADS}[kind.heads]
    assert "dropout" not in kind.shared or default.dropout_module.p == 0
    for option, value in others.items():
        assert getattr(mixer, option) == value != getattr(default, option), option
        assert mixer.settings().get(option, value) == value
        assert getattr(default, option) == kind.options[option].default or kind.options[option].default == 0
    assert mixer.bounded == (not mixer.carries)
    described = "".join(of.__doc__ or "" for of in type(default).__mro__)
    assert all(re.search(rf"^ *{option}: ", described, flags=re.MULTILINE) for option in kind.options)
    linear = {part: x for part, x in default.named_modules() if isinstance(x, torch.nn.Linear)}
    biased = {part for part, x in linear.items() if x.bias is not None}
    none = name in ("transformer-xl", *DELTA_NETWORKS)
    one = {"mamba": "dt_proj", "gla": "f_b_proj"}
    assert biased == (set() if none else {one[name]} if name in one else {*linear} - NEVER_BIASED)
    assert default.beam_size == 1 and getattr(default, "scale", 1) == 1


def test_settings_reach_the_mixers_that_take_them():
    shared = {"dropout": 0.25, "feature_map": "elu", "feature_dim": 6, "scale_read_out": True, "bias": False}
    for name in (*UPDATE_RULES, "retention"):
        mixer = build(name, **shared, normalization=frozenset(), backend="reference", rotary_dim=2, source_dim=24)
        assert mixer.num_heads == 2 and mixer.scale == 8**-0.5 and mixer.backend == "reference"
        assert mixer.feature_map_name == "elu" and mixer.feature_map.output_dim == 6
        assert mixer.q_proj.bias is None and not mixer.normalization and mixer.dropout_module.p == 0.25
        assert getattr(mixer, "update_rule", "retention") == name
    for name in ("mamba", "gla", *DELTA_NETWORKS):
        assert build(name, backend="reference").backend == "reference"
    for name in ("local", "abc", "linformer", "transformer-xl"):
        mixer = build(name, dropout=0.25, bias=name == "transformer-xl")
        assert (mixer.q_proj.bias is None) == (name != "transformer-xl") and mixer.dropout_module.p == 0.25
    softmax = build("softmax", **shared, rotary_dim=2, rotary_base=500.0)
    assert (softmax.num_heads, softmax.rotary.dim, softmax.rotary.base) == (4, 2, 500.0)
    assert softmax.settings() == {"rotary dim": 2, "rotary base": 500.0} and not softmax.needs_positions
    assert build("sum", feature_map="dpfp", dpfp_nu=2).feature_map.output_dim == 32
    assert build("sum", feature_map="favor", favor_features=5).feature_map.output_dim == 10


def test_a_source_is_read_by_what_needs_no_order():
    with pytest.raises(ValueError, match=r"^mixers is 'delta'; it must be one of sum$"):
        build("delta", SOURCE_MIXERS)
    mixer = build("sum", SOURCE_MIXERS, feature_dim=6, source_dim=24, dropout=0.25, scale_read_out=True)
    out, state = mixer(torch.randn(9, 3, WIDTH), source=torch.randn(5, 3, 24))
    assert out.shape == (9, 3, WIDTH) and state["state"].shape == (3, 4, 6, 4)
    assert mixer.dropout_module.p == 0.25 and mixer.scale == 0.5


# Mixers' own options that are at least 1, and at least 0; each is refused alone, by the name that it has here.
LEAST = {
    **dict.fromkeys(DELTA_NETWORKS, ("conv", "key_dim value_dim eps")),
    **dict.fromkeys(("local", "window-sum"), ("window", "")),
    **dict.fromkeys(("abc", "linformer"), ("slots", "")),
    "transformer-xl": ("", "memory clamp_len"),
    "mamba": ("state conv expansion", "dt_rank"),
    "gla": ("rank", "key_dim value_dim eps"),
    "retention": ("", "value_dim eps"),
}
BACKENDS = "backend is 'cuda'; it must be one of auto, reference"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hebb", {}, f"mixers is 'hebb'; it must be one of {', '.join(MIXERS)}$"),
    ("softmax", {"rotary_dim": 3}, "rotary_dim is 3; .* even number from 2 to the head dim, 4, or 0 for none"),
    ("softmax", {"rotary_dim": 6}, "rotary_dim is 6; "),
    ("softmax", {"rotary_dim": 4, "rotary_base": float("nan")}, "rotary_base is nan; it must be a finite number above"),
    *((name, {"num_heads": 5}, "num_heads is 5; it must be a divisor of embed_dim, 16") for name in ("softmax", "abc")),
    *((name, {"fast_weight_heads": -4}, "num_heads is -4; it .* divisor of embed_dim, 16") for name in MEMORIES),
    *((name, {"backend": "cuda"}, BACKENDS) for name in ("mamba", "window-sum", *MEMORIES)),
    ("linformer", {"max_positions": 0}, "max_positions is 0; it must be at least 1"),
    ("delta", {"normalization": {"sum", "max"}}, "normalization is 'max,sum'; it may hold sum, attention, removal"),
    *(
        (rule, REMOVAL, f"normalization is 'removal,sum', but the {rule} rule .* with delta, delta-mao$")
        for rule in NO_CORRECTION
    ),
    ("delta", {"feature_map": "tanh", "normalization": {"removal"}}, "normalization holds 'removal' and .* 'tanh'"),
    ("delta", {"feature_map": "dpfp", "dpfp_nu": 32}, "dpfp_nu is 32; .*head_dim 8 .*from 1 to 15"),
    ("retention", {"fast_weight_heads": 16}, "the feature map gives keys 1 dimensions; with retention .* be even"),
    ("retention", {"feature_dim": 5}, "the feature map gives keys 5 dimensions; with retention"),
    ("retention", {"normalization": frozenset({"sum"})}, "normalization is 'sum'; with retention it must be none"),
    ("window-sum", {"normalization": frozenset()}, "normalization is 'none'; with window-sum it must be auto, attent"),
    ("window-sum", {"normalization": frozenset({"sum"})}, "normalization is 'sum'; with window-sum it must be auto"),
    ("window-sum", {"feature_map": "tanh"}, "feature_map is 'tanh'; with window-sum it must be a map without negative"),
    ("window-sum", {"feature_map": "elu", "feature_dim": 3}, "feature_dim is 3; with window-sum .* the head dim, 8"),
    ("window-sum", {"rotary_dim": 3}, "rotary_dim is 3; it must be an even number"),
    ("gated-delta", {"gated_delta_key_heads": 1, "gated_delta_kv_heads": 1}, "gated_delta_key_heads is 1; with kv_"),
    ("gated-delta", {"gated_delta_kv_heads": 3}, "gated_delta_kv_heads is 3; it must be a divisor of num_heads, 2"),
    ("gated-delta", {"gated_delta_kv_heads": -1}, "gated_delta_kv_heads is -1; it must be a divisor of num_heads, 2"),
    ("gated-delta", {"gated_delta_key_heads": 3}, "gated_delta_key_heads is 3; it must be a divisor of num_heads, 2"),
    ("kimi-delta", {"kimi_delta_key_heads": -1}, "kimi_delta_key_heads is -1; it must be a divisor of num_heads, 2"),
    ("gated-delta", {"gated_delta_gate_rank": -1}, "gated_delta_gate_rank is -1; it must be at least 0"),
    ("delta-product", {"delta_product_writes": 0}, "delta_product_writes is 0; it must be at least 1"),
    ("gla", {"gla_eps": float("nan")}, "gla_eps is nan; it must be a finite number of at least 0"),
    *(
        (
            name,
            {option_name(name, option): least - 1},
            f"{option_name(name, option)} is .*; it must be at least {least}",
        )
        for name, (ones, zeros) in LEAST.items()
        for least, options in ((1, ones), (0, zeros))
        for option in options.split()
    ),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED)
def test_what_a_mixer_cannot_be_is_named(name, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build(name, **settings)


def test_settings_are_those_of_checkpoints_from_before_keys_were_shared():
    names = {"key_heads", "key_dim", "value_dim", "conv", "negative_eigenvalues", "eps"}
    assert set(GatedDelta(WIDTH, 4, kv_heads=2, gate_rank=3).settings()) == names
