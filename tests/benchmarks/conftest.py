import sys
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a program in this process, which saves its start; returns its exit and error, "" if it succeeds."""

    def run_here(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            import_module(name).main()
        except SystemExit as end:
            return f"{end.code} {capsys.readouterr().err}"
        return ""

    return run_here
