"""Which compiled library is loaded where, and what is asked of it, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from fairseq_fastweights.ops import libraries, native

# Architectures, the capabilities that run code for them, and some that do not.
GPUS = [
    *[("sm_80", [(8, 0), (8, 9)], [(9, 0)]), ("sm_86", [], [(8, 0)]), ("sm_80 compute_80", [(9, 0)], [])],
    *[("compute_90", [], [(8, 6)]), ("sm_90a", [(9, 0)], [(8, 9), (9, 1)]), ("sm_90a compute_90a", [], [(10, 0)])],
    *[("sm_75 sm_90 compute_90", [(12, 0)], []), ("sm_100", [(10, 3)], []), ("sm_88", [], [(9, 8)])],
    ("", [], [(8, 0)]),
]


def test_which_gpus_run_what() -> None:
    for architectures, run, do_not in GPUS:
        for capability in run + do_not:
            assert libraries.runs_on(architectures.split(), capability) is (capability in run), architectures


def test_a_gpu_that_does_not_run_what_was_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0), (8, 6)][device])
    assert libraries._wrong_gpu(["sm_86", "sm_90"]) is None
    reason = str(libraries._wrong_gpu(["sm_90"]))
    assert "were built for sm_90, which GPU 1 of compute capability 8.6 does not run" in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert libraries._wrong_gpu(["sm_90"]) == "the CUDA kernels were built, but torch sees no GPU"


@pytest.mark.parametrize("text", [None, "{", "[]", "\x00"])
def test_a_record_that_is_none_is_no_build(text: str | None, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path)
    if text is not None:
        (tmp_path / libraries.RECORD).write_text(text)
    assert libraries.record() == {}
    assert "were not built" in str(libraries.why_not("cpu", str(torch.__version__)))
    (tmp_path / libraries.RECORD).write_text(json.dumps({"cpu": {"state": "missing", "reason": "no compiler"}}))
    assert str(libraries.why_not("cpu", str(torch.__version__))).endswith("were not built: no compiler")


def test_a_plan_is_asked_for_as_the_kernels_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def plan(*arguments: object) -> list[int]:
        asked.append(arguments)
        return [32, 64, 1, 2, 128, 4, 3, 1000, 1] if arguments[0] == "delta_forward" else []

    monkeypatch.setitem(libraries._outcomes, "cuda", None)
    monkeypatch.setattr(torch.ops.fairseq_fastweights, "cuda_plan", plan, raising=False)
    sizes = (1, 100, 2, 64, 32, 64)
    numbers = native.cuda_plan("delta_forward", sizes, torch.bfloat16, (9, 3))
    names = ("chunk", "columns", "blocks", "stages", "threads", "segments", "at_once", "shared", "walk")
    assert numbers == dict(zip(names, (32, 64, 1, 2, 128, 4, 3, 1000, 1), strict=True))
    assert native.cuda_plan("diagonal_forward", sizes, torch.float32, (8, 0), gated=True, separate_decays=2) is None
    assert asked == [
        ("delta_forward", sizes, torch.bfloat16, False, 0, 93),
        ("diagonal_forward", sizes, torch.float32, True, 2, 80),
    ]
