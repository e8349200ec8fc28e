"""The update rules that `FastWeightAttention` can use, their normalisations, and known failures of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.feature_maps import is_favor
from fairseq_fastweights.ops import RULES
from fairseq_fastweights.suggestions import did_you_mean

_Entry = TypeVar("_Entry")

UPDATE_RULES = {name: rule for name, rule in RULES.items() if rule.feature_map is not None}
"""The rules of layers that differ in nothing else, by name."""

DELTA_RULES = tuple(name for name, rule in UPDATE_RULES.items() if rule.corrects)
"""The forms of the delta rule."""


NORMALIZATIONS = ("sum", "attention", "removal")


def parse_normalization(text: str) -> frozenset[str] | None:
    """Reads a comma-separated list of some of `NORMALIZATIONS`, "none" or "auto".

    Returns:
        the set of them; None for "auto", which stands for those of the mixer's paper.

    Raises:
        ValueError: for any other word, and for "none" or "auto" beside others.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words in (["auto"], ["none"]):
        return None if words == ["auto"] else frozenset()
    if not words or not set(words) <= set(NORMALIZATIONS):
        raise InvalidInput(
            f"normalization is {text!r}; it must be auto, none, or a comma-separated list of "
            + ", ".join(NORMALIZATIONS)
        )
    return frozenset(words)


def write_normalization(normalization: frozenset[str]) -> str:
    """The text that `parse_normalization` reads as these."""
    return ",".join(name for name in NORMALIZATIONS if name in normalization) or "none"


def check_normalization(normalization: frozenset[str], update_rule: str) -> None:
    """Raises a `ValueError` for normalisations that do not exist, or that the rule cannot have."""
    text = ",".join(sorted(normalization))
    if not normalization <= set(NORMALIZATIONS):
        raise InvalidInput(f"normalization is {text!r}; it may hold {', '.join(NORMALIZATIONS)}")
    if "removal" in normalization and not UPDATE_RULES[update_rule].corrects:
        able = ", ".join(name for name, rule in UPDATE_RULES.items() if rule.corrects)
        raise InvalidInput(
            f"normalization is {text!r}, but the {update_rule} rule removes nothing from its memory; 'removal' can be "
            f"used with {able}"
        )


def lookup(argument: str, name: str, table: Mapping[str, _Entry]) -> _Entry:
    """`table[name]`, or a `ValueError` that names the argument and lists the keys."""
    if name not in table:
        allowed = f"it must be one of {', '.join(table)}"
        raise InvalidInput(f"{argument} is {name!r}; {allowed}{did_you_mean(name, table)}")
    return table[name]


def known_to_diverge(update_rule: str, feature_map: str, normalization: frozenset[str]) -> str | None:
    """Returns a paper's report that this combination diverged, or None."""
    normalized = bool(normalization & {"sum", "attention"})
    if update_rule in DELTA_RULES and "sum" not in normalization:
        return "without sum normalisation the delta rule diverged (Schlag et al. 2021, Table 3; Mao 2022, footnote 3)"
    if update_rule in DELTA_RULES and feature_map == "identity":
        return "the delta rule diverged without a feature map (Mao 2022, Table 1)"
    if update_rule in DELTA_RULES and is_favor(feature_map):
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


def known_to_fail_when_carried(update_rule: str, normalization: frozenset[str]) -> str | None:
    """Returns a reason not to carry states of this combination from segment to segment in training, or None."""
    if _has_no_decay(update_rule) and normalization & {"attention", "removal"}:
        return (
            "the normaliser of attention normalisation grows without bound; perplexities were above 260 "
            "(Schlag et al. 2021, Table 4 and Sec. 6.3)"
        )
    return None


def known_to_lose_when_carried(update_rule: str) -> str | None:
    """Returns a measured cost of carried states in training for this rule, with better mixers; or None."""
    if _has_no_decay(update_rule):
        return (
            f"the memory of {update_rule} never forgets, and models of WikiText-2 were worse for it than in windows "
            "(docs/results.md); gated-delta and gated forget, and lose little"
        )
    return None


def _has_no_decay(update_rule: str) -> bool:
    return not any(gate.log for gate in UPDATE_RULES[update_rule].gates)
