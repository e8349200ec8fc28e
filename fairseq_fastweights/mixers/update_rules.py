"""The table of update rules that `FastWeightAttention` can use.

A new rule is its equation in `ops/`, one row here, and one row in the table of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.feature_maps import is_favor
from fairseq_fastweights.ops.autocast import without_autocast


@dataclass(frozen=True)
class Gate:
    """A number in (0, 1) that a rule reads at every step, made from the layer's input by a projection and a sigmoid.

    Attributes:
        name: the projection is called `<name>_proj`.
        per: "head" for a number for each head; "key" or "value" for one for each of these dimensions of each head.
        log: whether the operation takes the gate's logarithm. Such a gate decays the state, and its bias starts so
            that decays are uniformly distributed (Gu et al. 2020). Either form is 0 at padding: a decay of 1, or a
            write strength of 0.
    """

    name: str
    per: Literal["head", "key", "value"]
    log: bool


@dataclass(frozen=True)
class UpdateRule:
    """An operation of `ops`, called with q, k, v and the gates in order.

    Attributes:
        feature_map, normalization: those of the rule's paper.
        corrects: whether a write depends on what is already stored. If so, the normaliser of attention normalisation
            is not one more column of the state, but a sum of its own (Schlag et al. 2021, Eq. 26), with the rule's
            decays of keys.
        ordered: whether the order matters in which pairs are written. An encoder reads its source as a whole, without
            an order in which a memory could forget or correct.
    """

    operation: Callable[..., tuple[Tensor, Tensor]]
    gates: tuple[Gate, ...]
    feature_map: str
    normalization: frozenset[str]
    corrects: bool = False
    ordered: bool = True


def delta_rule_of_mao(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """The delta rule as Mao's published kernel computes it, which reads before it writes, with beta in the key.

        k'_t = beta_t k_t;  y_t = S_{t-1} q_t;  S_t = S_{t-1} + (v_t - S_{t-1} k'_t) k'_t^T

    Eq. 6 of Mao (2022) removes beta_t S_{t-1} k_t k_t^T, this beta_t times as much. Arguments and results are those of
    `ops.delta_rule`, which computes it: what a step reads after it has written is what the next reads before that.
    """
    if initial_state is None:
        first = torch.zeros_like(v[:, :1])
    else:
        with without_autocast(q):
            first = torch.einsum("bthm,bhmv->bthv", q[:, :1].to(initial_state.dtype), initial_state).to(v.dtype)
    options = how if starts is None else how | {"starts": starts}
    key = k * beta[..., None].to(k.dtype)
    out, state = ops.delta_rule(q.roll(-1, 1), key, v, torch.ones_like(beta), initial_state=initial_state, **options)
    out = torch.cat([first, out[:, :-1]], dim=1)
    if starts is not None:  # a document begins with an empty memory
        out = out.masked_fill(starts[..., None, None], 0)
    return out, state


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
    "delta-mao": UpdateRule(
        delta_rule_of_mao,
        (Gate("beta", per="head", log=False),),
        "elu",
        frozenset({"sum"}),
        corrects=True,
    ),
}
DELTA_RULES = ("delta", "delta-mao")
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
        raise ValueError(
            f"normalization is {text!r}; it must be auto, none, or a comma-separated list of "
            + ", ".join(NORMALIZATIONS)
        )
    return frozenset(words)


def check_normalization(normalization: frozenset[str], update_rule: str) -> None:
    """Raises a `ValueError` for normalisations that do not exist, or that the rule cannot have."""
    text = ",".join(sorted(normalization))
    if not normalization <= set(NORMALIZATIONS):
        raise ValueError(f"normalization is {text!r}; it may hold {', '.join(NORMALIZATIONS)}")
    if "removal" in normalization and not UPDATE_RULES[update_rule].corrects:
        able = ", ".join(name for name, rule in UPDATE_RULES.items() if rule.corrects)
        raise ValueError(
            f"normalization is {text!r}, but the {update_rule} rule removes nothing from its memory; 'removal' can be "
            f"used with {able}"
        )


def lookup(argument: str, name: str) -> UpdateRule:
    """`UPDATE_RULES[name]`, or a `ValueError` that names the argument and lists what it may be."""
    if name not in UPDATE_RULES:
        raise ValueError(f"{argument} is {name!r}; it must be one of {', '.join(UPDATE_RULES)}")
    return UPDATE_RULES[name]


def known_to_diverge(update_rule: str, feature_map: str, normalization: frozenset[str]) -> str | None:
    """Returns what a paper reports of this combination diverging, or None."""
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
    if update_rule in ("sum", *DELTA_RULES) and normalization & {"attention", "removal"}:
        return (
            "the normaliser of attention normalisation grows without bound; perplexities were above 260 "
            "(Schlag et al. 2021, Table 4 and Sec. 6.3)"
        )
    return None


def known_to_lose_when_carried(update_rule: str) -> str | None:
    """Returns what carried states were seen to cost this rule in training, and which mixers they cost less; or None."""
    if update_rule in ("sum", *DELTA_RULES):
        return (
            f"the memory of {update_rule} never forgets, and models of WikiText-2 were worse for it than in windows "
            "(docs/results.md); gated-delta and gated forget, and lose little"
        )
    return None
