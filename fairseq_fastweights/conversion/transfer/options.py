"""The options of a transfer: the base model, and the groups of weights that are taken and frozen."""

# No `from __future__ import annotations` and no `X | None` here: fairseq reads the types of a configuration's fields as
# they stand, and knows `Optional` alone.
# ruff: noqa: UP045

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from fairseq_fastweights.invalid_input import InvalidInput, check_number

GROUPS = ("embeddings", "output", "feed-forward", "output-projection", "attention")
"""The groups of weights that can be transferred and frozen (Choi 2024, Sec. 3)."""


@dataclass
class TransferOptions(FairseqDataclass):
    """Options of the task: the weights that training starts from, and those that are frozen."""

    transfer_from: Optional[str] = field(
        default=None,
        metadata={
            "help": "start training from the weights of this Transformer language model: a folder with model.pt and "
            "dict.txt, or a checkpoint with dict.txt beside it; its dictionary must be that of the data (default: "
            "random weights)"
        },
    )
    transfer: str = field(
        default="all",
        metadata={
            "help": f"which weights of --transfer-from to take: all, or comma-separated {', '.join(GROUPS)}; norms go "
            "with the part that follows them (default: all)"
        },
    )
    freeze: str = field(
        default="none",
        metadata={
            "help": "which of the weights that were taken are not trained: none, all, or groups as in --transfer "
            "(default: none)"
        },
    )
    unfreeze_threshold: Optional[float] = field(
        default=None,
        metadata={
            "help": "train frozen weights too once the training loss improves by less than this fraction from one "
            "interval to the next, 0.01 in Choi 2024, Sec. 3.1 (default: they stay frozen)"
        },
    )
    unfreeze_patience: int = field(
        default=1,
        metadata={
            "help": "number of intervals in a row in which the loss must improve by less than --unfreeze-threshold "
            "(default: 1)"
        },
    )
    unfreeze_interval: Optional[int] = field(
        default=None,
        metadata={"help": "number of updates in an interval (default: none; --unfreeze-threshold needs it)"},
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "report which weights would be transferred and frozen, and stop before training (default: off)"
        },
    )

    # Options of fairseq's that decide which weights can be transferred or frozen.
    fp16: bool = II("common.fp16")
    memory_efficient_fp16: bool = II("common.memory_efficient_fp16")
    fp16_no_flatten_grads: bool = II("common.fp16_no_flatten_grads")
    ddp_backend: Any = II("distributed_training.ddp_backend")
    zero_sharding: Any = II("distributed_training.zero_sharding")
    use_bmuf: bool = II("optimization.use_bmuf")
    tpu: bool = II("common.tpu")


def parse_groups(argument: str, text: str) -> frozenset[str]:
    """Reads "all", "none", or comma-separated `GROUPS`; raises a `ValueError` for any other word."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return frozenset(GROUPS)
    if words == ["none"]:
        return frozenset()
    if not set(words) <= set(GROUPS):
        raise InvalidInput(f"{argument} is {text!r}; it must be all, none, or comma-separated: {', '.join(GROUPS)}")
    return frozenset(words)


def check_options(options: Any) -> None:
    """Raises a `ValueError` for options that are out of range, contradict each other, or need others."""
    transferred = parse_groups("transfer", options.transfer)
    frozen = parse_groups("freeze", options.freeze)
    if options.transfer_from is None:
        for name, unset in (("transfer", "all"), ("freeze", "none"), ("dry_run", False)):
            value = getattr(options, name)
            if value != unset:
                raise InvalidInput(f"{name} is {value!r}; it needs transfer_from, which is not set")
    if not transferred:
        raise InvalidInput(f"transfer is {options.transfer!r}; with transfer_from it must name something")
    if not frozen <= transferred:
        raise InvalidInput(
            f"freeze is {options.freeze!r}, but transfer is {options.transfer!r}: only transferred weights can be "
            "frozen"
        )
    _check_unfreezing(options, bool(frozen))


def _check_unfreezing(options: Any, frozen: bool) -> None:
    threshold = options.unfreeze_threshold
    if threshold is None:
        for name, unset in (("unfreeze_patience", 1), ("unfreeze_interval", None)):
            if getattr(options, name) != unset:
                raise InvalidInput(f"{name} is {getattr(options, name)}; it needs unfreeze_threshold, which is not set")
        return
    check_number("unfreeze_threshold", threshold, above=0, below=1)
    if not frozen:
        raise InvalidInput(f"unfreeze_threshold is {threshold:g}, but freeze is none; it must name weights to unfreeze")
    if options.unfreeze_patience < 1:
        raise InvalidInput(f"unfreeze_patience is {options.unfreeze_patience}; it must be at least 1")
    if options.unfreeze_interval is None or options.unfreeze_interval < 1:
        raise InvalidInput(
            f"unfreeze_interval is {options.unfreeze_interval}; with unfreeze_threshold it must be a number of "
            "updates, at least 1"
        )
    flat = options.fp16 is True and options.memory_efficient_fp16 is not True
    for name, refused, instead in (
        # One vector of all parameters, in which none can be left out of a step.
        ("fp16", flat and options.fp16_no_flatten_grads is not True, "with fp16_no_flatten_grads"),
        # Steps and averages of their own, after the optimizer's; parts in the place of the parameters that are held.
        ("ddp_backend", plain_value(options.ddp_backend) in ("slowmo", "fully_sharded"), "another"),
        ("use_bmuf", options.use_bmuf is True, "off"),
        ("zero_sharding", plain_value(options.zero_sharding) == "os", "none"),
        ("tpu", options.tpu is True, "off"),
    ):
        if refused:
            raise InvalidInput(
                f"{name} is {plain_value(getattr(options, name))}; with unfreeze_threshold it must be {instead}: "
                "frozen weights would be changed too"
            )


def plain_value(value: Any) -> Any:
    """The value of an option that may be a member of an enumeration."""
    return getattr(value, "value", value)
