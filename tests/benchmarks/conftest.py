"""The programs of benchmarks/ import each other as scripts do: by their folder."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program in this process, which saves its start; returns what it ends with, "" if it comes to its end."""

    def run_here(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            import_module(name).main()
        except SystemExit as end:
            return f"{end.code} {capsys.readouterr().err}"
        return ""

    return run_here
