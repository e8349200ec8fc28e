"""`python -m fairseq_fastweights.env` reports versions and kernels, and how to build those that are missing."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_fastweights import env, ops
from fairseq_fastweights.ops import libraries

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_has_the_backends_that_operations_choose() -> None:
    rows = env.report()["backends"]
    expected = set(itertools.product(ops.RULES, ("float32", "bfloat16", "float16", "float64")))
    assert {(row["rule"], row["dtype"]) for row in rows if row["device"] == "cpu"} == expected
    for row in rows:
        for name, time in (("sequence", 256), ("step", 1)):
            assert row[name] == ops.chosen_backend(row["device"], getattr(torch, row["dtype"]), time)


def test_the_text_describes_this_machine(capsys) -> None:
    env.main([])
    text, found = capsys.readouterr().out, env.report()
    assert text == f"{env.as_text(found)}\n" and found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads() and len(found["gpus"]) == torch.cuda.device_count()
    for part, kernels in found["kernels"].items():
        assert kernels["reason"] == libraries.load(part) and kernels["ready"] == (kernels["reason"] is None)
        assert kernels["build"] == libraries.record().get(part)
    if found["kernels"]["cpu"]["ready"]:
        assert found["cpu"]["instruction_set"] in found["kernels"]["cpu"]["build"]["variants"]


def test_a_gpu_is_described_and_asked_for(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    gpu = SimpleNamespace(name="GPU of a test", major=8, minor=6, total_memory=24 * 2**30 - 2**29)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: [gpu][index])
    env.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == env.report()
    assert found["gpus"] == [{"name": "GPU of a test", "capability": "8.6", "memory_gib": 23.5}]
    assert {row["device"] for row in found["backends"]} == {"cpu", "cuda"}
    assert found["versions"]["fairseq-fastweights"] and env.version("no-such-package") is None


REPORT = {
    "versions": {"torch": "2", "fairseq": None},
    "installed elsewhere": [],
    "cpu": {"machine": "x86", "threads": 2, "instruction_set": "avx2"},
    "kernels": {
        "cpu": {
            "ready": True,
            "reason": None,
            "build": {"variants": ["baseline", "avx2"], "compiler": "g++ 12"},
            "folder": "/a",
        },
        "cuda": {
            "ready": True,
            "reason": None,
            "build": {"architectures": ["sm_90"], "compiler": "nvcc 12"},
            "folder": "/a",
        },
    },
    "backends": [
        {"rule": rule, "device": device, "dtype": dtype, "sequence": "chunkwise", "step": step}
        for rule, device in (("sum", "cpu"), ("sum", "cuda"))
        for dtype, step in (("float32", "native"), ("float64", "reference"))
    ],
}
TEXT = """\
torch                2
fairseq              none
{gpus}
CPU                  x86, 2 threads
CPU kernels          ready: baseline, avx2; instruction set: avx2; g++ 12; in /a
CUDA kernels         ready: sm_90; nvcc 12; in /a

backend that auto takes, for a sequence / for a single step
rule, device           float32                float64
sum, cpu               chunkwise / native     chunkwise / reference
sum, cuda              chunkwise / native     chunkwise / reference
retention takes what decay takes"""


@pytest.mark.parametrize("count", [0, 2])
def test_the_text_to_the_letter(count: int) -> None:
    gpus = [{"name": f"H{index}", "capability": "9.0", "memory_gib": 80.0} for index in range(count)]
    lines = [f"GPU {index}                H{index}, compute capability 9.0, 80.0 GiB" for index in range(count)]
    expected = TEXT.format(gpus="\n".join(lines) or "GPU                  none that torch sees")
    assert env.as_text(REPORT | {"gpus": gpus}) == expected


def run(arguments: list[str], folder: Path, **variables: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_bare_clone_works_without_fairseq_and_says_how_to_build(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for folder in ("fairseq_fastweights", "native", "cpu", "cuda", "tools"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("_native_*", "__pycache__"))
    program = "import sys; import fairseq_fastweights.mixers.registry; "
    program += "from fairseq_fastweights import env; env.main(['--json']); sys.exit('fairseq' in sys.modules)"
    found = json.loads(run(["-c", program], clone, PYTHONPATH=str(clone)))
    assert found["versions"]["package"] == str(clone / "fairseq_fastweights")
    for kernels in found["kernels"].values():
        assert not kernels["ready"] and f"python {clone / 'tools/native_build.py'}" in kernels["reason"]
    assert {(row["sequence"], row["step"]) for row in found["backends"]} == {("chunkwise", "reference")}


def test_a_copy_that_is_installed_and_not_imported_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    """In a clone, Python imports the clone, and an installed copy with kernels may be elsewhere."""
    for folder in ("fairseq_fastweights", "fairseq_fastweights-0.1.0.dist-info", "other-1.dist-info"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "METADATA").write_text(f"Name: {folder.partition('-')[0]}\nVersion: 1\n")
    assert env.report()["installed elsewhere"] == []
    monkeypatch.syspath_prepend(tmp_path)
    env.main([])
    assert f"installed elsewhere  {tmp_path / 'fairseq_fastweights'}, which is not used: the" in capsys.readouterr().out


@pytest.mark.skipif(libraries.why_not("cpu", torch.__version__) is not None, reason="the CPU kernels were not built")
def test_a_clone_without_kernels_takes_those_of_an_installed_copy(tmp_path: Path, monkeypatch) -> None:
    """Kernels that `pip install .` compiled are used in the clone's folder too, if sources and torch are the same."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "fairseq_fastweights").symlink_to(libraries.PACKAGE)
    (tmp_path / "fairseq_fastweights-0.1.0.dist-info").mkdir()
    (tmp_path / "fairseq_fastweights-0.1.0.dist-info/METADATA").write_text("Name: fairseq_fastweights\nVersion: 1\n")
    installed = libraries.PACKAGE
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path / "clone")
    monkeypatch.setattr(libraries, "_homes", {})
    monkeypatch.setattr(libraries, "_outcomes", {})
    assert libraries.load("cpu") is None and libraries.home("cpu") == installed
    text = env.as_text(env.report())
    assert f"package              {tmp_path / 'clone'}" in text
    assert f"installed elsewhere  {installed}, whose kernels are used" in text and f"; in {installed}" in text
    for torch_version, digest in (("1.0", libraries.source_digest), (str(torch.__version__), lambda *_: "other")):
        monkeypatch.setattr(libraries, "source_digest", digest)
        reason = libraries._find("cpu", torch_version)
        assert reason is not None and reason.endswith(f"; that is of the copy in {installed}"), reason
        assert ("for torch 2" if torch_version == "1.0" else "are outdated") in reason


@pytest.mark.parametrize("part", list(libraries.PARTS))
def test_a_reason_is_passed_on(part: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    reason = f"the {libraries.PARTS[part]} kernels were built for torch 1; build them again"
    monkeypatch.setattr(libraries, "load", lambda asked: reason if asked == part else "other")
    monkeypatch.setattr(env.backends, "cpu_instruction_set", lambda: pytest.fail("there is none"))
    env.main([])
    assert "were built for torch 1; build them again" in capsys.readouterr().out
    assert {(row["sequence"], row["step"]) for row in env.report()["backends"]} == {("chunkwise", "reference")}


@pytest.mark.slow
@pytest.mark.skipif(libraries.load("cpu") is not None, reason="the CPU kernels were not built")
def test_an_instruction_set_that_is_not_there_is_shown_as_such() -> None:
    text = run(["-m", "fairseq_fastweights.env"], ROOT, FASTWEIGHTS_CPU_ISA="avx1024")
    assert re.search(r"CPU kernels .*FASTWEIGHTS_CPU_ISA is avx1024; here it may be one of \w+", text)
    assert "sum, cpu" in text
