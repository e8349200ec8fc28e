"""The steps of the demos: what they do twice and what not, and how they end."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

steps = import_module("common.steps")
MARK = "made-by-a-test"


def test_a_folder_belongs_to_one_run_of_one_demo(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with steps.claim(out, MARK), pytest.raises(steps.StepError, match="at work"), steps.claim(out, MARK):
        pass
    with steps.claim(out, MARK):
        pass
    with pytest.raises(steps.StepError, match="out holds other files"), steps.claim(out, "another-mark"):
        pass
    assert [path.name for path in out.iterdir()] == [MARK]
    with pytest.raises(steps.StepError, match="for the results"), steps.claim(out / MARK, MARK):
        pass


# --- steps

WAIT_FOR_OTHER = """
import sys, pathlib, time
log = pathlib.Path(sys.argv[1]).parent / "slow" / "log.txt"
while not log.read_text(): time.sleep(0.01)
sys.exit(1)
"""


def make_step(folder: Path, code: str, **others: Any) -> Any:
    """A step that runs Python code in its folder, given as argument."""
    settings = {"read_result": lambda log: {"log": log}, **others}
    return steps.Step(folder.name, folder, [sys.executable, "-c", code, str(folder)], **settings)


def work(*wanted: Any, slots: int = 2, keep_open: tuple[int, ...] = ()) -> str:
    """Runs steps; returns what was shown."""
    output = io.StringIO()
    steps.Runner(ROOT, slots, output, {}, keep_open).run(wanted)
    return output.getvalue()


@pytest.mark.parametrize("change", ["nothing", "command", "input", "earlier step"])
def test_a_finished_step_is_run_again_only_if_it_changed(tmp_path: Path, change: str) -> None:
    def make(change: str = "") -> Any:
        first = make_step(tmp_path / "first", f"print({2 if change == 'earlier step' else 0})")
        code, digest = f"print({2 if change == 'command' else 1})", "2" if change == "input" else "1"
        return first, make_step(tmp_path / "second", code, depends_on=digest, after=[first])

    assert make()[1].result() is None
    work(*make())
    assert make()[1].finished_result() == {"log": "1\n"}
    (tmp_path / "second" / "witness").touch()
    first, second = make(change)
    assert (second.result() is None) == (change != "nothing")
    assert ("second: done before" in work(first, second)) == (change == "nothing")
    assert second.result() is not None
    assert (tmp_path / "second" / "witness").exists() == (change == "nothing")


def find_nothing(log: str) -> dict[str, Any]:
    raise ValueError("its log has no result in it")


@pytest.mark.parametrize(
    ("code", "settings", "reason"),
    [
        ("import sys; print('what went wrong'); sys.exit(3)", {}, "exit status 3"),
        ("import os; print('what went wrong', flush=True); os.abort()", {}, "signal 6"),
        ("print('what went wrong')", {"read_result": find_nothing}, "no result"),
    ],
)
def test_a_failed_step_is_shown_and_not_marked_as_done(
    tmp_path: Path, code: str, settings: dict[str, Any], reason: str
) -> None:
    step = make_step(tmp_path / "a", code, **settings)
    with pytest.raises(steps.StepError, match=rf"a failed: .*{reason}.*\n.*what went wrong\n.*log\.txt"):
        work(step)
    assert step.result() is None


def test_a_failure_ends_the_steps_beside_it_and_what_they_started(tmp_path: Path) -> None:
    """Workers of a loader keep the folder claimed while they live and notice their parent's end late."""
    out = tmp_path / "out"
    worker = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], close_fds=False)"
    slow, failing = make_step(out / "slow", starts), make_step(out / "failing", WAIT_FOR_OTHER)
    with pytest.raises(steps.StepError, match="failing failed"), steps.claim(out, MARK) as claimed:
        work(slow, failing, keep_open=(claimed,))
    assert slow.result() is None
    with steps.claim(out, MARK):
        pass


HALF_THEN_WHOLE = """
import pathlib, sys, zipfile
checkpoint = pathlib.Path(sys.argv[1]) / "checkpoint_last.pt"
print("resumed" if checkpoint.exists() else "began")
begun = checkpoint.exists()
zipfile.ZipFile(checkpoint, "w").writestr("updates", "1")
sys.exit(0 if begun else 1)
"""


@pytest.mark.parametrize("case", ["resumes", "begins anew", "broken checkpoint", "changed"])
def test_an_interrupted_step_goes_on_if_it_can(tmp_path: Path, case: str) -> None:
    step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=case != "begins anew")
    with pytest.raises(steps.StepError):
        work(step)
    assert step.log.read_text() == "began\n"
    if case == "broken checkpoint":
        checkpoint = step.folder / "checkpoint_last.pt"
        checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    if case == "changed":
        step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=True, depends_on="something else")
    if case == "resumes":
        assert "a: goes on where it was\n" in work(step)
        assert step.log.read_text() == "began\nresumed\n"
    else:
        with pytest.raises(steps.StepError):
            work(step)
        assert step.log.read_text() == "began\n"


# --- what is shown


def test_commands_are_shown_as_they_can_be_typed(tmp_path: Path) -> None:
    arguments = ["it's", "--b", "(1, 2)", *(f"folder/file {i}" for i in range(20)), *(f"--flag-{i}" for i in range(20))]
    script = "import sys; print(*sys.argv[1:], sep='|')"
    step = steps.Step("a", tmp_path, [sys.executable, "-c", script, *arguments], lambda log: {})
    shown = step.shell_command({"A": "b c"})
    assert max(map(len, shown.splitlines())) <= 110 and shown.count("\n") > 2
    typed = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert typed.strip().split("|") == arguments


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_progress_is_a_line_that_changes_on_a_terminal_and_nothing_in_a_log(tmp_path: Path, kind: type) -> None:
    waiting = "import pathlib, sys, time\nwhile not (pathlib.Path(sys.argv[1]) / 'seen').exists(): time.sleep(0.01)"

    def seen(log: str) -> str:
        (tmp_path / "a" / "seen").touch()
        return "halfway"

    step = make_step(tmp_path / "a", waiting if kind is Terminal else "pass", describe_progress=seen)
    output = kind()
    steps.Runner(ROOT, 1, output, {}).run([step])
    lines = output.getvalue().splitlines()
    assert lines[0] == "a" and re.search(r"a: done \(\d+ s\)$", lines[-1])
    assert ("> a: halfway" in lines) == ("\x1b[1F\x1b[J" in output.getvalue()) == (kind is Terminal)
