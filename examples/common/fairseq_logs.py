"""What `fairseq-train` writes about its work, read back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from statistics import median
from typing import Any

_JSON_LINE = re.compile(r"\| (train_inner|valid) \| (\{.*\})$", re.MULTILINE)


def read_training(log: str) -> dict[str, Any]:
    """Reads the log of `fairseq-train --log-format json`.

    Returns:
        "parameters", "tokens_per_second" (the median), "train_ppl" and "valid_ppl" (lists of updates and
        perplexities) and "best_valid_ppl".

    Raises:
        ValueError: if the log has none of these.
    """
    parameters = re.search(r"num\. shared model params: ([\d,]+)", log)
    # By update: a run that was interrupted did some of them twice.
    curves: dict[str, dict[int, float]] = {"train_inner": {}, "valid": {}}
    speeds = []
    for kind, values in _json_lines(log):
        prefix = "valid_" if kind == "valid" else ""
        curves[kind][int(values[f"{prefix}num_updates"])] = float(values[f"{prefix}ppl"])
        if kind == "train_inner":
            speeds.append(float(values["wps"]))
    if parameters is None or not speeds or not curves["valid"]:
        raise ValueError("its log has no training and validation in it")
    return {
        "parameters": int(parameters[1].replace(",", "")),
        "tokens_per_second": median(speeds),
        "train_ppl": sorted(curves["train_inner"].items()),
        "valid_ppl": sorted(curves["valid"].items()),
        "best_valid_ppl": min(curves["valid"].values()),
    }


def describe_training(log_end: str, updates: int) -> str:
    """How far a training has come, by the end of its log."""
    last = None
    for kind, values in _json_lines(log_end):
        if kind == "train_inner":
            last = values
    if last is None:
        return "starting"
    done, speed = int(last["num_updates"]), float(last["ups"])
    left = f"{(updates - done) / speed:.0f} s left" if speed else ""
    return f"update {done}/{updates}, loss {float(last['loss']):.2f}, {float(last['wps']):.0f} tokens/s, {left}"


def read_nothing(log: str) -> dict[str, Any]:
    """For commands that are known by what they leave behind."""
    return {}


def _json_lines(log: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, text in _JSON_LINE.findall(log):
        try:
            yield kind, json.loads(text)
        except ValueError:  # it is being written
            continue
