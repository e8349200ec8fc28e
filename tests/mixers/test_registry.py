"""Mixers are made by their names, and a pattern says which layer has which."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.mixers.registry import MIXERS, SOURCE_MIXERS, build_mixer, option_name, parse_pattern

SETTINGS = {"num_heads": 2, "fast_weight_heads": 4, "max_positions": 16}


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_is_made_by_its_name_and_its_options_reach_it(name):
    kind = MIXERS[name]
    others = {option: row.default + 2 if row.type is int else row.default for option, row in kind.options.items()}
    settings = {option_name(name, option): value for option, value in others.items()}
    mixer, default = build_mixer(name, 16, {**SETTINGS, **settings}), build_mixer(name, 16, SETTINGS)
    assert mixer.num_heads == {None: 1, **SETTINGS}[kind.heads]
    for option, value in others.items():
        assert getattr(mixer, option) == value != getattr(default, option), option
    x = torch.randn(5, 2, 16)
    assert mixer(x)[0].shape == x.shape
    # What one mixer says of itself tells it from one with other settings, for checkpoints.
    assert isinstance(mixer.settings(), dict)


def test_only_a_rule_without_order_reads_a_source():
    assert list(SOURCE_MIXERS) == ["sum"]
    with pytest.raises(ValueError, match="mixers is 'delta'; it must be one of sum"):
        build_mixer("delta", 16, SETTINGS, SOURCE_MIXERS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("delta", "d d d d d"),
        ("delta:1-5", "d d d d d"),
        ("delta:1-3,softmax:4-5", "d d d s s"),
        ("softmax:5,delta", "d d d d s"),
        ("delta,softmax:2,4", "d s d s d"),
        (" softmax: 1-2 , 5 , delta ", "s s d d s"),
        ("delta,softmax:1-5", "s s s s s"),
    ],
)
def test_patterns(text, expected):
    names = {"d": "delta", "s": "softmax"}
    assert parse_pattern(text, 5) == tuple(names[word] for word in expected.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attention", "in which 'attention' is no mixer"),
        ("delta:1-3", "which leaves layers without a mixer: 4, 5"),
        ("delta:1-3,softmax:3-5", "which gives layer 3 both 'delta' and 'softmax'"),
        ("delta:1,1-5", "which gives layer 1 both 'delta' and 'delta'"),
        ("delta:0-5", "in which '0-5' is not within 1 to 5"),
        ("delta:4-6,softmax:1-3", "in which '4-6' is not within 1 to 5"),
        ("delta:5-1", "in which '5-1' is not within 1 to 5"),
        ("delta,softmax", "in which both 'delta' and 'softmax' have the layers that are left"),
        ("1-5", "in which '1-5' names no layers"),
        ("delta,1-5", "in which '1-5' names no layers"),
        ("delta:", "in which 'delta:' names no layers"),
        ("", "in which '' names no layers"),
        ("delta:1-5;softmax", "in which"),
    ],
)
def test_patterns_that_are_none_are_refused(text, why):
    with pytest.raises(ValueError) as error:
        parse_pattern(text, 5)
    assert str(error.value).startswith(f"mixers is {text!r}, {why}")
    assert "'delta:1-5' or 'delta,softmax:5'. The names are sum, gated" in str(error.value)
