"""`python -m fairseq_fastweights.env` says what there is, and what is missing and how to mend it."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_fastweights import env, ops
from fairseq_fastweights.ops import libraries

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_is_what_the_operations_take() -> None:
    rows = env.report()["backends"]
    expected = set(itertools.product(ops.OPERATIONS, ("float32", "bfloat16", "float16", "float64")))
    assert {(row["rule"], row["dtype"]) for row in rows if row["device"] == "cpu"} == expected
    for row in rows:
        for name, time in (("sequence", 256), ("step", 1)):
            assert row[name] == ops.chosen_backend(row["device"], getattr(torch, row["dtype"]), time)


def test_the_text_has_all_of_it(capsys) -> None:
    env.main([])
    text, found = capsys.readouterr().out, env.report()

    def line(start: str) -> str:
        return next(line for line in text.splitlines() if line.startswith(start))

    assert torch.__version__ in text and f"{torch.get_num_threads()} threads" in text
    for part, name in libraries.PARTS.items():
        kernels, shown = found["kernels"][part], line(f"{name} kernels")
        reason, build = kernels["reason"], kernels["build"] or {}
        assert ("ready" in shown) if reason is None else (reason.partition("kernels ")[2] in shown)
        assert reason or all(kind in shown for kind in (*build.get("variants", ()), build.get("compiler", "")))
        assert ("instruction set" in shown) == (part == "cpu" and reason is None)
    if found["kernels"]["cpu"]["ready"]:
        assert f"instruction set: {found['cpu']['instruction_set']}" in text
        assert found["cpu"]["instruction_set"] in found["kernels"]["cpu"]["build"]["variants"]
    for row in found["backends"]:
        assert f"{row['sequence']} / {row['step']}" in line(f"{row['rule']}, {row['device']}")


def run(arguments: list[str], folder: Path, **variables: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_bare_clone_works_on_chunkwise_without_fairseq_and_says_how_to_build(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for folder in ("fairseq_fastweights", "cpu", "cuda", "tools"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("_native_*", "__pycache__"))
    program = "import sys; import fairseq_fastweights.mixers.registry; "
    program += "from fairseq_fastweights import env; env.main(['--json']); sys.exit('fairseq' in sys.modules)"
    found = json.loads(run(["-c", program], clone, PYTHONPATH=str(clone)))
    assert found["versions"]["package"] == str(clone / "fairseq_fastweights")
    for kernels in found["kernels"].values():
        assert not kernels["ready"] and f"python {clone / 'tools/native_build.py'}" in kernels["reason"]
    assert {(row["sequence"], row["step"]) for row in found["backends"]} == {("chunkwise", "reference")}


def test_a_copy_that_is_installed_and_not_imported_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    """In a clone, Python imports the clone: what `pip install .` built is elsewhere, and nothing is wrong with it."""
    for folder in ("fairseq_fastweights", "fairseq_fastweights-0.1.0.dist-info", "other-1.dist-info"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "METADATA").write_text(f"Name: {folder.partition('-')[0]}\nVersion: 1\n")
    assert env.report()["installed elsewhere"] == []
    monkeypatch.syspath_prepend(tmp_path)
    env.main([])
    assert f"installed elsewhere  {tmp_path / 'fairseq_fastweights'}, which is not this one" in capsys.readouterr().out


@pytest.mark.parametrize("part", list(libraries.PARTS))
def test_a_reason_is_passed_on(part: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    reason = f"the {libraries.PARTS[part]} kernels were built for torch 1; build them again"
    monkeypatch.setattr(libraries, "load", lambda asked: reason if asked == part else "other")
    monkeypatch.setattr(env.native, "cpu_instruction_set", lambda: pytest.fail("there is none"))
    env.main([])
    assert "were built for torch 1; build them again" in capsys.readouterr().out
    assert {(row["sequence"], row["step"]) for row in env.report()["backends"]} == {("chunkwise", "reference")}


@pytest.mark.slow
@pytest.mark.skipif(libraries.load("cpu") is not None, reason="the CPU kernels were not built")
def test_an_instruction_set_that_is_not_there_is_shown_as_such() -> None:
    text = run(["-m", "fairseq_fastweights.env"], ROOT, FASTWEIGHTS_CPU_ISA="avx1024")
    assert re.search("CPU kernels .*FASTWEIGHTS_CPU_ISA is avx1024; here it may be one of baseline", text)
    assert "sum, cpu" in text
