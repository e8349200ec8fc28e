"""The way of a tensor through a layer stays short."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fairseq_fastweights
from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.gated_delta import GatedDelta
from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.ops import backends, kernels, rules

PACKAGE = str(Path(fairseq_fastweights.__file__).parent)


@pytest.mark.skipif(backends.why_not("cpu", torch.float32) is not None, reason="needs the CPU kernels")
@pytest.mark.parametrize(("kind", "most_calls", "most_files"), [(FastWeightAttention, 40, 7), (GatedDelta, 60, 6)])
def test_calls_and_files_of_a_forward_pass(kind: type[Mixer], most_calls: int, most_files: int) -> None:
    """Python calls of functions of the package, with gradients, after a first pass has chosen backends."""
    layer, x = kind(64, 4), torch.randn(32, 2, 64, requires_grad=True)
    layer(x)
    calls: list[tuple[str, str]] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        layer(x)
    finally:
        sys.setprofile(before)
    assert 20 < len(calls) <= most_calls and len({file for file, _ in calls}) <= most_files, calls


def test_a_backend_is_chosen_once_until_it_is_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    choose = backends.choose_backend
    for module in (rules, kernels):
        monkeypatch.setattr(module, "choose_backend", lambda *given: made.append(given[0]) or choose(*given))
    monkeypatch.setattr(backends, "chosen", {})
    layer, x = FastWeightAttention(8, 2, update_rule="gated"), torch.randn(3, 2, 8)
    counts = []
    for inputs in (x, x[:2], x.double(), x, x[:1]):
        layer.to(inputs.dtype)(inputs)
        counts.append(len(made))
    # Again for another dtype, and for a single step, which "auto" takes another way without kernels.
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4]
    backends.say_again()
    layer(x)
    assert len(made) > counts[-1]
