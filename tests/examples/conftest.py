"""A small corpus in WikiText's format, and a way to see what the example scripts would run."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import import_plugin

ROOT = Path(__file__).resolve().parents[2]
WIKITEXT103 = ROOT / "examples" / "wikitext103"

Commands = Callable[..., list[list[str]]]


def run_script(script: Path, *arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    """Runs a script in the repository's root, with this Python's fairseq."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        ["bash", str(script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
    )


def options(command: list[str]) -> dict[str, str]:
    """The options of a call by name; the last one of a kind counts, as for argparse."""
    found = {}
    for i, word in enumerate(command):
        if word.startswith("--"):
            value = command[i + 1] if i + 1 < len(command) else "--"
            found[word] = "" if value.startswith("--") else value
    return found


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """wiki.{train,valid,test}.tokens; more than 10,000 word types, for the bands of wikitext2.sh."""
    folder = tmp_path_factory.mktemp("tokens")
    draw = random.Random(1)
    vocabulary = ["the", "<unk>", ",", ".", "@-@", "–", "日本", "naïve"] + [f"w{i}" for i in range(10_200)]
    for split, paragraphs in (("train", [vocabulary, *([40] * 8)]), ("valid", [40] * 4), ("test", [40] * 4)):
        lines = [" \n", " = Title = \n", " \n"]
        for words in paragraphs:
            words = draw.choices(vocabulary[:40], k=words) if isinstance(words, int) else words
            lines.append(" " + " ".join(words) + " \n")
        (folder / f"wiki.{split}.tokens").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tokens` as prepare.sh leaves them."""
    out = tmp_path_factory.mktemp("data") / "bin"
    result = run_script(WIKITEXT103 / "prepare.sh", out, tokens, env={"SKIP_COUNTS": "1", "LC_ALL": "C"})
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Runs a script to the end with programs that only note how they were called, and returns these calls."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("fairseq-train", "fairseq-eval-lm"):
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" > "$CALLS/$(date +%s%N)"\n')
        (programs / name).chmod(0o755)

    def collect(script: Path, *arguments: object, env: Mapping[str, str] | None = None) -> list[list[str]]:
        calls = tmp_path / "calls"
        calls.mkdir()
        path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
        try:
            result = subprocess.run(
                ["bash", str(script), *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, "PATH": path, "CALLS": str(calls), **(env or {})},
                capture_output=True,
                text=True,
            )
            assert result.returncode == 0, result.stderr
            return [call.read_text().rstrip("\0").split("\0") for call in sorted(calls.iterdir())]
        finally:
            shutil.rmtree(calls)

    return collect


@pytest.fixture
def fairseq(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Runs a call that `commands` returned in this process, which saves the seconds that fairseq takes to start."""
    monkeypatch.chdir(ROOT)

    def call(command: list[str]) -> None:
        from fairseq import checkpoint_utils
        from fairseq_cli import eval_lm, train

        if "fairseq_fastweights" in sys.modules:  # otherwise it is left to --user-dir
            import_plugin()
        # Of all trainings in a process fairseq keeps only one best checkpoint.
        monkeypatch.delattr(checkpoint_utils.save_checkpoint, "best", raising=False)
        monkeypatch.setattr(sys, "argv", command)
        {"fairseq-train": train, "fairseq-eval-lm": eval_lm}[command[0]].cli_main()

    return call
