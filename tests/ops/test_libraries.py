"""Which compiled library is loaded where, and how it is called, without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from fairseq_fastweights.ops import kernels, libraries

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


TORCH = str(torch.__version__)
BUILT = {"state": "built", "torch": TORCH}


@pytest.mark.parametrize(
    ("gone", "entry", "says"),
    [
        *((name, {}, ["were not built"]) for name in ("record", "{", "[]", "\x00")),
        ("", {"state": 3}, ["were not built"]),
        ("", {"state": "missing", "reason": "no compiler"}, ["were not built: no compiler"]),
        ("record", {}, ["python {root}/tools/native_build.py"]),  # a bare clone
        ("tools record", {}, ["pip install"]),  # an installed package
        ("", BUILT | {"torch": f"{TORCH}other"}, [f"torch {TORCH}other ", f"{TORCH};", "native_build.py"]),
        ("", BUILT | {"oldest torch": "2.1000"}, ["for torch 2.1000 and later", f"{TORCH};", "native_build.py"]),
        ("", BUILT | {"oldest torch": "2.9", "torch": "2.9.1"}, ["OSError"]),  # it would be loaded
        ("", BUILT | {"sources": "others"}, ["outdated", "native_build.py"]),
        ("tools cpu", BUILT | {"sources": "others"}, ["could not be loaded"]),  # they do not matter where none are
        ("library", BUILT, ["_native_cpu.so is gone"]),
    ],
)
def test_a_library_is_loaded_into_its_torch_or_refused_in_one_line(gone, entry, says, tmp_path, monkeypatch) -> None:
    places = {"tools": "tools/native_build.py", "cpu": "cpu/a.cpp", "library": "_native_cpu.so"}
    for name in places.values():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no library")
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path)
    monkeypatch.setattr(libraries, "CHECKOUT", tmp_path)
    text = gone if gone in ("{", "[]", "\x00") else ""
    entry = {"sources": libraries.source_digest(tmp_path, "cpu"), **entry}
    (tmp_path / libraries.RECORD).write_text(text or json.dumps({"cpu": entry}))
    for name in gone.split() if not text else ():
        (tmp_path / places.get(name, libraries.RECORD)).unlink()
    monkeypatch.setattr(libraries, "_outcomes", {})
    monkeypatch.delenv("FASTWEIGHTS_NATIVE_CPU", raising=False)  # it names a library to load instead
    reason = libraries.load("cpu")
    assert "\n" not in reason and all(text.format(root=tmp_path) in reason for text in says)
    (tmp_path / libraries.RECORD).unlink(missing_ok=True)
    assert libraries.load("cpu") == reason  # from memory


def test_a_plan_is_asked_for_as_the_kernels_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def plan(*arguments: object) -> list[int]:
        asked.append(arguments)
        return [64, 1, 2, 128, 4, 1000] if arguments[0] == "delta_forward" else []

    monkeypatch.setitem(libraries._outcomes, "cuda", None)
    monkeypatch.setattr(torch.ops.fairseq_fastweights, "cuda_plan", plan, raising=False)
    sizes = (1, 100, 2, 64, 32, 64)
    numbers = kernels.cuda_plan("delta_forward", sizes, torch.bfloat16, (9, 3))
    names = ("columns", "blocks", "stages", "threads", "segments", "shared")
    assert numbers == dict(zip(names, (64, 1, 2, 128, 4, 1000), strict=True))
    assert kernels.cuda_plan("diagonal_forward", sizes, torch.float32, (8, 0), gated=True, separate_decays=2) is None
    assert asked == [
        ("delta_forward", sizes, torch.bfloat16, False, 0, 93),
        ("diagonal_forward", sizes, torch.float32, True, 2, 80),
    ]
