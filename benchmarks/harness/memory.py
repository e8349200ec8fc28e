"""How much memory a call takes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

T = TypeVar("T")

_MARK = "harness.memory.peak"


def peak(prepare: Callable[[], T], call: Callable[[T], Any], device: str) -> int:
    """The most bytes that `call` finds of what `prepare` made, and adds to it, at a time.

    On a CPU torch's profiler reports what tensors take and give back; what a kernel takes from the system by itself is
    not in it.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        prepared = prepare()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        kept = call(prepared)
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it reports every start and stop
    # What was there before the profiler is not reported when it goes: it has to see the state being made.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        prepared = prepare()
        with record_function(_MARK):
            kept = call(prepared)
    del kept, prepared
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    [start] = [event["ts"] for event in events if event["name"] == _MARK and event["ph"] == "X"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    size = sum(change for time, change in changes if time < start)
    most = size
    for _, change in sorted((item for item in changes if item[0] >= start), key=lambda item: item[0]):
        size += change
        most = max(most, size)
    return most


def held(state: Any) -> int:
    """Bytes of the tensors in nested dictionaries."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(held(value) for value in state.values())
    return 0
