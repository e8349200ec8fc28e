"""The table of update rules says what the papers say, also of what diverged, and reads its users' words."""

from __future__ import annotations

import logging
import re

import pytest

from fairseq_fastweights import ops
from fairseq_fastweights.mixers import memory_attention
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES, delta_rule_of_mao, parse_normalization

# Operation, gates as (name, per, logarithm), what papers use it with (Mao 2022, Table 1; Schlag et al. 2021), corrects.
DECAYS = [("key_decay", "key", True), ("value_decay", "value", True)]
ROWS = {
    "sum": (ops.sum_rule, [], "elu", {"attention"}, False),
    "gated": (ops.gated_rule, [("gate", "head", True)], "identity", set(), False),
    "decay": (ops.decay_rule, DECAYS, "identity", set(), False),
    "delta": (ops.delta_rule, [("beta", "head", False)], "elu", {"sum"}, True),
    "delta-mao": (delta_rule_of_mao, [("beta", "head", False)], "elu", {"sum"}, True),
}


def test_rules_are_as_their_papers_have_them():
    assert list(ROWS) == list(UPDATE_RULES)
    for name, rule in UPDATE_RULES.items():
        gates = [(gate.name, gate.per, gate.log) for gate in rule.gates]
        assert (rule.operation, gates, rule.feature_map, rule.normalization, rule.corrects) == ROWS[name]


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
def test_what_diverged_in_a_paper_is_told_once(rule, feature_map, normalization, source, monkeypatch, caplog):
    monkeypatch.setattr(memory_attention, "_warned_of", set())
    caplog.set_level(logging.WARNING, memory_attention.logger.name)
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
