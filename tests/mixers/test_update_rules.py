"""The table of update rules says what the papers say, also of what diverged, and reads its users' words."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from fairseq_fastweights import ops
from fairseq_fastweights.mixers import fast_weight_attention
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.gated_delta import DeltaNet, DeltaProduct, GatedDelta, KimiDelta
from fairseq_fastweights.mixers.update_rules import parse_normalization


@pytest.mark.parametrize("backend", ["chunkwise", "native"])
def test_reading_first_is_the_same_with_every_backend(backend):
    """With heads that share keys, documents, a state, and a last step in place."""
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 40, 2, 4), dim=-1)
    v, beta, state = torch.randn(2, 40, 4, 3), torch.rand(2, 40, 4), torch.randn(2, 4, 4, 3)
    starts = torch.zeros(2, 40, dtype=torch.bool)
    starts[0, [0, 20]] = starts[1, 39] = True
    rule, inputs = ops.RULES["delta-mao"], [x.requires_grad_() for x in (q, k, v, beta)]
    reference, ours = (rule(*inputs, initial_state=state, starts=starts, backend=x) for x in ("reference", backend))
    grads = [torch.autograd.grad(out.sum() + end.square().sum(), inputs) for out, end in (reference, ours)]
    torch.testing.assert_close((ours, grads[1]), (reference, grads[0]), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        before = rule(*(x[:, :39] for x in inputs), initial_state=state, starts=starts[:, :39], backend=backend)[1]
        options = {"initial_state": before, "starts": starts[:, 39:], "in_place": True, "backend": backend}
        out, after = rule(*(x[:, 39:] for x in inputs), **options)
    assert after is before
    torch.testing.assert_close((out, after), (reference[0][:, 39:], reference[1]), rtol=1e-4, atol=1e-5)


def test_normalisations_are_read_and_other_words_refused_by_name():
    assert parse_normalization("auto") is None and parse_normalization(" none ") == set()
    assert parse_normalization(" attention , sum,") == {"sum", "attention"}
    assert parse_normalization("sum,attention,removal,sum") == {"sum", "attention", "removal"}
    for text in ("", ",", "layer", "sum,layer", "none,sum", "auto,sum", "SUM"):
        message = f"normalization is '{text}'; it must be auto, none, or .* sum, attention, re"
        with pytest.raises(ValueError, match=message):
            parse_normalization(text)


@pytest.mark.parametrize(
    ("rule", "feature_map", "normalization", "source"),
    [
        ("delta", "elu", "", "Schlag et al. 2021, Table 3"),
        ("delta", "elu", "attention removal", "Schlag et al. 2021, Table 3"),
        ("delta-mao", "elu", "", "Schlag et al. 2021, Table 3"),
        ("delta", "elu", "sum", None),
        ("delta", "favor", "sum", "Schlag et al. 2021, App. D.2"),
        ("delta", "favor-schlag", "sum", "Schlag et al. 2021, App. D.2"),
        ("sum", "relu", "attention", None),
        ("sum", "relu", "", "Mao 2022, Table 1"),
        ("sum", "identity", "", None),
        ("delta", "identity", "sum", "Mao 2022, Table 1"),
        ("delta", "relu", "sum attention", None),
        ("gated", "relu", "attention", "Mao 2022, Table 1"),
        ("gated", "relu", "", None),
        ("gated", "identity", "", None),
        ("decay", "relu", "", None),
        ("sum", "identity", "attention", "Mao 2022, Sec. 4.1.2"),
        ("sum", "tanh", "sum", "Mao 2022, Sec. 4.1.2"),
        ("gated", "elu", "attention", None),
    ],
)
def test_what_diverged_in_a_paper_is_told_once(rule, feature_map, normalization, source, caplog):
    fast_weight_attention._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, fast_weight_attention.logger.name)
    options = {"update_rule": rule, "feature_map": feature_map, "normalization": frozenset(normalization.split())}
    for _ in range(3):  # a model has many layers
        FastWeightAttention(8, 2, **options)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == (source is not None)
    assert all(f"update rule {rule} with {feature_map}" in text and source in text for text in messages)


def test_what_fails_when_states_are_carried_is_told():
    for rule, feature_map, normalization, reason in (
        ("sum", "elu", "attention", "Table 4"),
        ("delta", "elu", "sum removal", "Table 4"),
        ("delta-mao", "elu", "sum attention", "Table 4"),
        *(
            (rule, "elu", "sum", f"{rule} never forgets.*; gated-delta and gated forget")
            for rule in ("sum", "delta", "delta-mao")
        ),
        ("gated", "elu", "attention", None),  # its normaliser decays
        ("delta", "favor", "sum", "new features for every training batch"),
    ):
        options = {"feature_map": feature_map, "normalization": frozenset(normalization.split())}
        told = FastWeightAttention(8, 2, update_rule=rule, **options).concern_when_carried()
        assert told is None if reason is None else re.search(reason, told)


def test_of_the_delta_networks_deltanet_alone_never_forgets():
    assert [kind(8, 2).concern_when_carried() for kind in (GatedDelta, KimiDelta, DeltaProduct)] == [None] * 3
    assert "never forgets" in (DeltaNet(8, 2).concern_when_carried() or "")
