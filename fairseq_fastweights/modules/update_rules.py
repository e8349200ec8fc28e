"""The table of update rules: what `FastWeightAttention` needs to know of each.

A new rule is its equation in `ops/`, one row here, and one row in the tests' table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fairseq_fastweights import ops


@dataclass(frozen=True)
class Gate:
    """A number in (0, 1) that a rule reads at every step, made from the layer's input by a projection and a sigmoid.

    Attributes:
        name: names the projection, `<name>_proj`. A fixed gate has none.
        per: what there is one of: a number for each "head", or for each "key" or "value" dimension of each head.
        log: whether the operation takes the gate's logarithm. Such a gate decays the state; it has a bias of its own,
            which starts at uniformly drawn decays (Gu et al. 2020). 0, a decay of 1 or a write strength of 0, is what
            a padded position gets in either case.
        fixed: where the gate is the same at every step: makes its values, (heads,), given how many heads there are,
            a device and a type.
    """

    name: str
    per: Literal["head", "key", "value"]
    log: bool
    fixed: Callable[[int, torch.device, torch.dtype], Tensor] | None = None


@dataclass(frozen=True)
class UpdateRule:
    """An operation of `ops`, called with q, k, v and the gates in order.

    Attributes:
        feature_map, normalization: what the rule's paper uses it with.
        corrects: whether a write depends on what is already stored. If so the normaliser of attention normalisation
            is not one more column of the state, but a sum of its own (Schlag et al. 2021, Eq. 26), with the rule's
            decays of keys.
        ordered: whether it matters in which order pairs are written. A source that is read as a whole, as an
            encoder reads it, has no order in which a memory could forget or correct.
        rotary: whether queries and keys are turned by their positions.
        gated_read_out: whether what is read is normalised in each head and multiplied by swish(W_g x). It takes the
            place of the other normalisations.
    """

    operation: Callable[..., tuple[Tensor, Tensor]]
    gates: tuple[Gate, ...]
    feature_map: str
    normalization: frozenset[str]
    corrects: bool = False
    ordered: bool = True
    rotary: bool = False
    gated_read_out: bool = False

    @property
    def learned_gates(self) -> tuple[Gate, ...]:
        """The gates that have projections."""
        return tuple(gate for gate in self.gates if gate.fixed is None)


def retention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """S_t = gamma S_{t-1} + v_t k_t^T, y_t = S_t q_t (Sun et al. 2023, Eq. 6); log_decay: (batch, time, heads).

    It is the decay rule with one decay for all key dimensions, for which the compiled kernels are those of the gated
    rule, without its second factor 1 - g. The gated rule itself would need values divided by 1 - gamma, up to 2^(4 +
    heads), which float16 has not the range for.
    """
    return ops.decay_rule(q, k, v, log_decay[..., None].expand(k.shape), None, **options)


def retention_log_decays(heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(heads,), log gamma_h, gamma_h = 1 - 2^(-5 - h) for h = 0, 1, ... (Sun et al. 2023, Eq. 8)."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, device=device, dtype=dtype)))


UPDATE_RULES: dict[str, UpdateRule] = {
    "sum": UpdateRule(ops.sum_rule, (), "elu", frozenset({"attention"}), ordered=False),
    "gated": UpdateRule(ops.gated_rule, (Gate("gate", per="head", log=True),), "identity", frozenset()),
    "decay": UpdateRule(
        ops.decay_rule,
        (Gate("key_decay", per="key", log=True), Gate("value_decay", per="value", log=True)),
        "identity",
        frozenset(),
    ),
    "delta": UpdateRule(
        ops.delta_rule,
        (Gate("beta", per="head", log=False),),
        "elu",
        frozenset({"sum"}),
        corrects=True,
    ),
    "retention": UpdateRule(
        retention,
        (Gate("decay", per="head", log=True, fixed=retention_log_decays),),
        "identity",
        frozenset(),
        rotary=True,
        gated_read_out=True,
    ),
}

NORMALIZATIONS = ("sum", "attention", "removal")


def parse_normalization(text: str, update_rule: str) -> frozenset[str]:
    """Reads a comma-separated list of normalisations.

    "auto" is what the rule's paper uses; otherwise it is "none", or any of `NORMALIZATIONS`.

    Raises:
        ValueError: for any other word, for "none" or "auto" beside others, and for "removal" with a rule that removes
            nothing.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    rule = lookup("update_rule", update_rule, UPDATE_RULES)
    if words == ["auto"]:
        return rule.normalization
    if words == ["none"]:
        return frozenset()
    if not words or not set(words) <= set(NORMALIZATIONS):
        raise ValueError(
            f"normalization is {text!r}; it must be auto, none, or a comma-separated list of "
            + ", ".join(NORMALIZATIONS)
        )
    check_normalization(frozenset(words), update_rule)
    if "removal" in words and not rule.corrects:
        able = ", ".join(name for name, rule in UPDATE_RULES.items() if rule.corrects)
        raise ValueError(
            f"normalization is {text!r}, but the {update_rule} rule removes nothing from its memory; 'removal' can be "
            f"used with {able}"
        )
    return frozenset(words)


def check_normalization(normalization: frozenset[str], update_rule: str) -> None:
    """Raises a `ValueError` for normalisations of a rule whose read-out is normalised by itself."""
    if normalization and UPDATE_RULES[update_rule].gated_read_out:
        raise ValueError(
            f"normalization is {','.join(sorted(normalization))!r}; with the {update_rule} rule it must be none: what "
            "is read is normalised in each head"
        )


def lookup(argument: str, name: str, table: dict[str, UpdateRule]) -> UpdateRule:
    """`table[name]`, or a `ValueError` that names the argument and lists what it may be."""
    if name not in table:
        raise ValueError(f"{argument} is {name!r}; it must be one of {', '.join(table)}")
    return table[name]


def known_to_diverge(update_rule: str, feature_map: str, normalization: frozenset[str]) -> str | None:
    """Where a paper reports that this combination diverges, or None."""
    normalized = bool(normalization & {"sum", "attention"})
    if update_rule == "delta" and "sum" not in normalization:
        return "without sum normalisation the delta rule diverged (Schlag et al. 2021, Table 3; Mao 2022, footnote 3)"
    if update_rule == "delta" and feature_map == "identity":
        return "the delta rule diverged without a feature map (Mao 2022, Table 1)"
    if update_rule == "delta" and feature_map == "favor":
        return (
            "FAVOR+ with the delta rule gave not-a-number in synthetic setting 2 (Schlag et al. 2021, App. D.2), "
            "though it trained on WikiText-103 (Tables 2 and 5)"
        )
    if update_rule == "sum" and feature_map == "relu" and not normalized:
        return "the additive rule diverged with ReLU features and no normalisation (Mao 2022, Table 1)"
    if update_rule == "gated" and feature_map == "relu" and "attention" in normalization:
        return "the gated rule diverged with ReLU features and attention normalisation (Mao 2022, Table 1)"
    if feature_map in ("identity", "tanh") and normalized:
        return (
            "normalising features that can be negative divides by sums near zero; training diverged "
            "(Mao 2022, Sec. 4.1.2)"
        )
    return None


def known_to_fail_when_carried(update_rule: str, feature_map: str, normalization: frozenset[str]) -> str | None:
    """Why this combination is not for states that are carried from segment to segment in training, or None."""
    if feature_map == "favor":
        return (
            "FAVOR+ draws new features for every training batch, so that a carried state is read with other features "
            "than it was written with"
        )
    if update_rule in ("sum", "delta") and normalization & {"attention", "removal"}:
        return (
            "the normaliser of attention normalisation grows without bound; perplexities were above 260 "
            "(Schlag et al. 2021, Table 4 and Sec. 6.3)"
        )
    return None
