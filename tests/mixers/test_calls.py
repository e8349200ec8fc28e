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
from fairseq_fastweights.ops import backends

PACKAGE = str(Path(fairseq_fastweights.__file__).parent)


@pytest.mark.skipif(backends.why_not("cpu", torch.float32) is not None, reason="needs the CPU kernels")
@pytest.mark.parametrize(("kind", "most_calls", "most_files"), [(FastWeightAttention, 40, 7), (GatedDelta, 60, 8)])
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
    assert len(calls) <= most_calls and len({file for file, _ in calls}) <= most_files, calls
