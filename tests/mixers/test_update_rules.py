"""The table of update rules says what the papers say, and reads its users' words."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.update_rules import (
    UPDATE_RULES,
    known_to_diverge,
    known_to_fail_when_carried,
    parse_normalization,
    retention,
    retention_log_decays,
)

# Operation, gates as (name, per, logarithm), what the rule's paper uses it with, whether a write
# depends on what is stored. Mao 2022 drops feature map and normalisation for gated and decay
# (Table 1); Schlag et al. 2021 use ELU + 1 (Sec. 6.3), and sum normalisation with delta (Table 3).
ROWS = {
    "sum": (ops.sum_rule, [], "elu", {"attention"}, False),
    "gated": (ops.gated_rule, [("gate", "head", True)], "identity", set(), False),
    "decay": (
        ops.decay_rule,
        [("key_decay", "key", True), ("value_decay", "value", True)],
        "identity",
        set(),
        False,
    ),
    "delta": (ops.delta_rule, [("beta", "head", False)], "elu", {"sum"}, True),
    "retention": (retention, [("decay", "head", True)], "identity", set(), False),
}
# Queries and keys that are turned, a gate that is no projection's, a norm and a gate behind the read-out.
OF_RETENTION = {"retention"}


def test_every_rule_has_a_row_here():
    assert list(ROWS) == list(UPDATE_RULES)


@pytest.mark.parametrize("name", UPDATE_RULES)
def test_rules_are_as_their_papers_have_them(name):
    rule = UPDATE_RULES[name]
    gates = [(gate.name, gate.per, gate.log) for gate in rule.gates]
    row = (rule.operation, gates, rule.feature_map, rule.normalization, rule.corrects)
    assert row == ROWS[name]
    assert {rule.rotary, rule.gated_read_out, not rule.learned_gates and bool(gates)} == {name in OF_RETENTION}


def test_retention_is_its_equation_exactly_as_far_as_types_reach():
    """Parallel form: y_t = sum over s <= t of gamma^(t - s) <q_t, k_s> v_s; gamma = 1 - 2^(-5 - h)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 150, 16, 4, dtype=torch.float64).unbind()
    decays = 1 - 2.0 ** -(5 + torch.arange(16, dtype=torch.float64))
    distance = (torch.arange(150)[:, None] - torch.arange(150)).double()
    mask = (decays[:, None, None] ** distance).masked_fill(distance < 0, 0)
    expected = torch.einsum("bthk,bshk,hts,bshv->bthv", q, k, mask, v)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        log_decays = retention_log_decays(16, q.device, dtype)
        # To the last digit, where 1 - gamma has lost most of them: 2^-20 in float32.
        assert torch.allclose(log_decays.double(), decays.log(), rtol=torch.finfo(dtype).eps, atol=0)
        for backend in ("reference", "chunkwise", "native"):
            y, _ = retention(*(x.to(dtype) for x in (q, k, v)), log_decays.expand(2, 150, 16), backend=backend)
            assert (y.double() - expected).norm() <= bound * expected.norm(), (dtype, backend)


def test_retention_takes_the_kernels_of_one_gate_per_head(monkeypatch):
    taken = []
    forward = torch.ops.fairseq_fastweights.diagonal_forward
    monkeypatch.setattr(
        torch.ops.fairseq_fastweights, "diagonal_forward", lambda *args: (taken.append(args[3:7]), forward(*args))[1]
    )
    q, k, v = torch.randn(3, 2, 5, 4, 6, requires_grad=True).unbind()
    retention(q, k, v, retention_log_decays(4, q.device, q.dtype).expand(2, 5, 4), backend="native")
    ((gate, complement, key_decay, value_decay),) = taken
    assert gate.shape == (2, 5, 4) and not complement and key_decay is None and value_decay is None


# --------------------------------------------------------------------------------- the words


@pytest.mark.parametrize(
    ("text", "rule", "expected"),
    [
        ("auto", "sum", {"attention"}),
        ("auto", "gated", set()),
        ("auto", "decay", set()),
        ("auto", "delta", {"sum"}),
        ("auto", "retention", set()),
        ("none", "delta", set()),
        (" none ", "sum", set()),
        ("sum", "sum", {"sum"}),
        ("attention", "decay", {"attention"}),
        ("sum,attention", "gated", {"sum", "attention"}),
        (" attention , sum,", "sum", {"sum", "attention"}),
        ("sum,sum", "delta", {"sum"}),
        ("removal", "delta", {"removal"}),
        ("sum,attention,removal", "delta", {"sum", "attention", "removal"}),
    ],
)
def test_normalisations_are_read(text, rule, expected):
    assert parse_normalization(text, rule) == expected


@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        ("", "sum", r"normalization is ''; it must be auto, none, or .* sum, attention, removal"),
        (",", "delta", r"normalization is ','; it must be auto, none"),
        ("layer", "delta", r"normalization is 'layer'; it must be auto, none"),
        ("sum,layer", "delta", r"normalization is 'sum,layer'; it must be auto, none"),
        ("none,sum", "delta", r"normalization is 'none,sum'; it must be auto, none"),
        ("auto,sum", "delta", r"normalization is 'auto,sum'; it must be auto, none"),
        ("SUM", "delta", r"normalization is 'SUM'; it must be auto, none"),
        ("removal", "sum", r"'removal', but the sum rule removes nothing .* with delta$"),
        ("sum,removal", "gated", r"'sum,removal', but the gated rule removes nothing"),
        ("removal", "decay", r"the decay rule removes nothing"),
        ("sum", "retention", r"normalization is 'sum'; with the retention rule it must be none: what is read"),
        ("sum,attention", "retention", r"'attention,sum'; with the retention rule it must be none"),
        ("sum", "hebb", r"update_rule is 'hebb'; it must be one of sum, gated, decay, delta, retention"),
    ],
)
def test_other_words_are_refused_by_name(text, rule, message):
    with pytest.raises(ValueError, match=message):
        parse_normalization(text, rule)


# ------------------------------------------------------------------------- what diverged where


@pytest.mark.parametrize(
    ("rule", "feature_map", "normalization", "source"),
    [
        # Schlag et al., Sec. 6.3: "sum normalisation is used in all cases: the models diverged
        # otherwise", with and without attention normalisation.
        ("delta", "elu", "", "Schlag et al. 2021, Table 3"),
        ("delta", "dpfp", "attention", "Schlag et al. 2021, Table 3"),
        ("delta", "elu", "attention removal", "Schlag et al. 2021, Table 3"),
        ("delta", "elu", "sum", None),
        ("delta", "elu", "sum attention", None),
        ("delta", "dpfp", "sum", None),
        ("delta", "favor", "sum", "Schlag et al. 2021, App. D.2"),
        # Mao, Table 1: rows Add, Delta, Gated, Decay; ReLU and attention normalisation, ReLU
        # alone, neither.
        ("sum", "relu", "attention", None),
        ("sum", "relu", "", "Mao 2022, Table 1"),
        ("sum", "identity", "", None),
        ("delta", "relu", "sum attention", None),
        ("delta", "relu", "sum", None),
        ("delta", "identity", "sum", "Mao 2022, Table 1"),
        ("gated", "relu", "attention", "Mao 2022, Table 1"),
        ("gated", "relu", "", None),
        ("gated", "identity", "", None),
        ("decay", "relu", "", None),
        ("decay", "identity", "", None),
        # Mao, Sec. 4.1.2: "the additive rule with normalization but no feature map ... diverged".
        ("sum", "identity", "attention", "Mao 2022, Sec. 4.1.2"),
        ("sum", "tanh", "sum", "Mao 2022, Sec. 4.1.2"),
        ("gated", "identity", "attention", "Mao 2022, Sec. 4.1.2"),
        # Nothing of the kind is reported for these.
        ("sum", "elu", "attention", None),
        ("sum", "elu", "sum", None),
        ("sum", "favor", "attention", None),
        ("sum", "dpfp", "attention", None),
        ("gated", "elu", "attention", None),
    ],
)
def test_divergence_is_told_with_its_source(rule, feature_map, normalization, source):
    reason = known_to_diverge(rule, feature_map, frozenset(normalization.split()))
    if source is None:
        assert reason is None
    else:
        assert reason is not None and source in reason


@pytest.mark.parametrize(
    ("rule", "feature_map", "normalization", "reason"),
    [
        ("sum", "elu", "attention", "Table 4"),
        ("delta", "elu", "sum removal", "Table 4"),
        ("delta", "elu", "sum", None),
        ("gated", "elu", "attention", None),  # its normaliser decays
        ("decay", "elu", "attention", None),
        ("delta", "favor", "sum", "new features for every training batch"),
    ],
)
def test_what_fails_when_states_are_carried_is_told(rule, feature_map, normalization, reason):
    told = known_to_fail_when_carried(rule, feature_map, frozenset(normalization.split()))
    assert told is None if reason is None else reason in told
