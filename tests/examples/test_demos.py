"""What the demos do alike: what they refuse, what they read and show, and how `make` starts them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "examples"))  # as when a demo is started
demo, translation, grid, synthetic = map(
    import_module, ("demo.run", "demo_translation.run", "synthetic.run", "synthetic.demo")
)

BOTH = pytest.mark.parametrize("run", [demo, translation], ids=["demo", "translation"])


@BOTH
@pytest.mark.parametrize("arguments", [["--updates", "0"], ["--updates", "x"], ["--seed", "-1"], ["--models", "lstm"]])
def test_options_that_make_no_sense_are_refused(
    run: Any, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main([*arguments, "--out", str(tmp_path / "out")])
    assert arguments[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("run", "arguments"), [(demo, []), (translation, []), (grid, ["--setting", "1"]), (synthetic, [])]
)
@pytest.mark.parametrize("name", ["thesis.txt", "made-by-another-demo"])
def test_a_folder_with_other_files_is_left_alone(
    run: Any, arguments: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("years of work")
    assert run.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "holds other files" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


@BOTH
def test_a_missing_package_is_named_before_any_work(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = import_module("common.commands")
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "matplotlib" else name)
    assert run.main(["--out", str(tmp_path / "out")]) == 1
    assert "there is no package matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "row", "cells"),
    [
        ("demo", ("b", 1_000, 9.0, 9.5, 8.25, 5_000.4), "b | 1,000 | 9.00 | 9.50 | 8.25 | 5,000"),
        ("demo", ("b", 1_000, 9.0, 9.5), "b | 1,000 | 9.00 | 9.50 | - | -"),
        (
            "demo_translation",
            ("b", 241_664, 1.2, 99.4, "nrefs:1", 992, 1_000, 12_345.6, 250.91),
            "b | 241,664 | 99.40 | 992 of 1,000 | 12,346 | 251",
        ),
    ],
)
def test_a_row_of_the_table_has_its_numbers_in_their_columns(module: str, row: tuple[Any, ...], cells: str) -> None:
    comparison = import_module(f"{module}.comparison")
    line = comparison.format_rows([comparison.Row(*row)]).splitlines()[2]
    assert " | ".join(cell.strip() for cell in line.strip("|").split("|")) == cells


# --- make


def words_of_make(*arguments: str, **variables: str) -> list[str]:
    """The words of the command that `make` gives the shell, as from a shell, though make may have started the tests."""
    others = {name: value for name, value in os.environ.items() if name not in ("DATA", "MAKEFLAGS", "MFLAGS")}
    command = ["make", "--no-print-directory", "-n", *arguments]
    result = subprocess.run(
        command, cwd=ROOT, env={**others, **variables}, capture_output=True, text=True, check=True
    ).stdout
    return shlex.split(result.splitlines()[-1])


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make on the PATH")
def test_make_starts_the_demos_with_a_folder_of_any_name() -> None:
    start = [".venv/bin/python", "examples/demo/run.py"]
    assert words_of_make("demo") == words_of_make("demo", "DATA=") == start
    for name in ("texts", "it's", "two words", "$HOME a$b", '"quoted"', "back\\slash", "a,b;c&d"):
        expected = [*start, "--data", f"/tmp/{name}"]
        assert words_of_make("demo", f"DATA=/tmp/{name}") == words_of_make("demo", DATA=f"/tmp/{name}") == expected
    assert words_of_make("demo-translation") == [".venv/bin/python", "examples/demo_translation/run.py"]
    assert words_of_make("demo-synthetic") == [".venv/bin/python", "examples/synthetic/demo.py"]
