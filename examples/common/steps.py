"""Commands that are run once: what is finished stays finished, what was interrupted goes on.

Each step has a folder of its own. The first thing in it is `begun.json`, the last `done.json`; both hold a key, a
digest of the command and of all that it depends on. A step with its key in `done.json` is not run again; one with its
key in `begun.json` only goes on where it was, if its command can do that; any other begins with an empty folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from common.files import UserError, open_to_append, write_whole
from common.interruptions import undisturbed
from common.locks import take
from common.screen import Screen

BEGUN, DONE, LOG = "begun.json", "done.json", "log.txt"
_TAIL = 20_000


@dataclass(frozen=True, eq=False)
class Step:
    """A command, and what it takes to know whether it is done.

    Attributes:
        title: what it does, for people.
        folder: where its log and its results are.
        command: program and arguments. The program's folder is not part of the key.
        read_result: reads the step's result from its log; raises ValueError if the log holds none.
        describe_progress: says from the end of a log how far the step has come.
        after: the steps whose results it uses.
        depends_on: a digest of what else it uses.
        resumes: whether the command goes on with what an interrupted one left in the folder.
    """

    title: str
    folder: Path
    command: Sequence[str]
    read_result: Callable[[str], dict[str, Any]]
    describe_progress: Callable[[str], str] = lambda log: ""
    after: Sequence[Step] = ()
    depends_on: str = ""
    resumes: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        program, *arguments = self.command
        parts = [Path(program).name, arguments, self.depends_on, [step.key for step in self.after]]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        object.__setattr__(self, "key", key)

    @property
    def log(self) -> Path:
        return self.folder / LOG

    def result(self) -> dict[str, Any] | None:
        """The result of the finished step; None if it is not finished."""
        mark = read_json(self.folder / DONE)
        return mark["result"] if mark.get("key") == self.key else None

    def peak_memory(self) -> float | None:
        """GiB that the largest of the finished step's processes had at once; None where it is not noted."""
        found = read_json(self.folder / DONE).get("peak_memory")
        return found if isinstance(found, float) and found > 0 else None

    def finished_result(self) -> dict[str, Any]:
        """The result of a step that must be finished."""
        result = self.result()
        if result is None:
            raise UserError(f"{self.title} is not finished")
        return result

    @property
    def groups(self) -> list[list[str]]:
        """The command's arguments: each option with its values, before them what comes before any option."""
        groups: list[list[str]] = [[]]
        for word in self.command[1:]:
            if word.startswith("--"):
                groups.append([])
            groups[-1].append(word)
        return [group for group in groups if group]

    def shell_command(self, environment: dict[str, str]) -> str:
        """The command as one would type it, over several lines."""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
        return _folded(f"  {variables}{shlex.quote(self.command[0])}", self.groups)

    def difference(self, other: Step) -> str:
        """The options that this command adds to another of the same program, and those that it leaves out."""
        here, there = self.groups, other.groups
        text = _folded(f"  as for {other.title}, but with", [group for group in here if group not in there])
        options = [group[0] for group in here]
        gone = [[group[0]] for group in there if group[0].startswith("--") and group[0] not in options]
        return text + (f"\n{_folded('      and without', gone)}" if gone else "")

    def prepare_folder(self) -> bool:
        """Makes the folder ready for a run; returns whether that goes on with an earlier one."""
        begun = read_json(self.folder / BEGUN).get("key") == self.key
        if begun and self.resumes and not _broken_checkpoints(self.folder):
            return any(self.folder.glob("*.pt"))
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_json(self.folder / BEGUN, {"key": self.key})
        return False


def _folded(start: str, groups: list[list[str]]) -> str:
    """Words as a shell reads them; an option stays on one line with its values, if they fit."""
    lines = [start]
    for group in groups:
        quoted = [shlex.quote(word) for word in group]
        together = " ".join(quoted)
        for words in [together] if len(together) <= 90 else quoted:
            if len(lines[-1]) + len(words) + 3 > 100:
                lines[-1] += " \\"
                lines.append(f"      {words}")
            else:
                lines[-1] += f" {words}"
    return "\n".join(lines)


def _broken_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were being copied when the run was killed. Whole ones are zip files."""
    return [path for path in folder.glob("*.pt") if not zipfile.is_zipfile(path)]


class Process:
    """A step at work."""

    def __init__(self, step: Step, cwd: Path, environment: dict[str, str], keep_open: Sequence[int]) -> None:
        self.step = step
        self.resumed = step.prepare_folder()
        self.started = time.monotonic()
        self.peak_memory = 0.0
        # A pipe that nobody writes to: it ends when the last of the processes that the command started is gone.
        self.alive, held = os.pipe()
        with open_to_append(step.log) as log:
            # In a session of its own, so that Ctrl-C reaches this program only, which ends the others in order.
            self.popen = subprocess.Popen(
                step.command,
                cwd=cwd,
                # The log is read as UTF-8, whatever the terminal's encoding is, and no message may land within a line.
                env=os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"} | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[*keep_open, held],
            )
        os.close(held)

    def describe(self) -> str:
        progress = self.step.describe_progress(read_end(self.step.log))
        return f"{self.step.title}: {progress or f'{time.monotonic() - self.started:.0f} s'}"

    def ask_to_stop(self) -> None:
        """Asks it, and what it started (workers that load data), to end."""
        self._signal(signal.SIGTERM)

    def stop(self, patience: float) -> None:
        """Waits until all of it is gone, which must have been asked for, but no more than so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(timeout=patience)
        self._signal(signal.SIGKILL)
        self.popen.wait()
        select.select([self.alive], [], [], 10)
        os.close(self.alive)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def has_ended(self) -> bool:
        """True if it has; then it is also known how much memory it took."""
        if self.popen.returncode is None:
            process, status, usage = os.wait4(self.popen.pid, os.WNOHANG)
            if process:
                self.popen.returncode = os.waitstatus_to_exitcode(status)
                self.peak_memory = usage.ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
        return self.popen.returncode is not None

    def finish(self) -> dict[str, Any]:
        """Marks the step as done, if it is; raises UserError if it failed."""
        os.close(self.alive)
        code = self.popen.returncode
        log = self.step.log.read_text(encoding="utf-8", errors="replace")
        reason = f"exit status {code}" if code > 0 else f"signal {-code}"
        if code == 0:
            try:
                result = self.step.read_result(log)
                mark = {"key": self.step.key, "result": result, "peak_memory": self.peak_memory}
                write_json(self.step.folder / DONE, mark)
                return result
            except (ValueError, OSError) as error:
                reason = str(error)
        end = "\n".join(f"  | {line}" for line in log.splitlines()[-8:])
        hint = f"; remove {self.step.folder} to begin it anew" if self.resumed else ""
        raise UserError(f"{self.step.title} failed: {reason}\n{end}\nall of its output: {self.step.log}{hint}")


@dataclass(frozen=True)
class Turn:
    """The resources that a step gets when it begins.

    `environment`: variables of its own. `keep_open`: file descriptors that it inherits. `told`: what of that people
    should know.
    """

    environment: dict[str, str] = field(default_factory=dict)
    keep_open: Sequence[int] = ()
    told: str = ""


class Runner(Screen):
    """Runs steps, several at a time, each after those that it uses.

    The first command of each program is shown whole, of others what differs from it. A terminal has a line for each
    that is running, which says how far it has come. The methods from `begin` on say what else decides.

    `cwd`: where the commands run. `slots`: how many at a time. `output`: where all of that goes. `environment`:
    variables for the commands, printed with them. `keep_open`: file descriptors that the commands inherit. `finished`:
    is told of each step that has been run to its end. `pause`, `patience`: seconds between two looks at the commands,
    and that one may take to end when it is asked to.
    """

    pause, patience = 0.25, 10.0

    def __init__(
        self,
        cwd: Path,
        slots: int,
        output: TextIO,
        environment: dict[str, str],
        keep_open: Sequence[int] = (),
        finished: Callable[[Step], None] = lambda step: None,
    ) -> None:
        super().__init__(output)
        self.finished = finished
        self.cwd = cwd
        self.slots = slots
        self.environment = environment
        self.keep_open = keep_open
        self._shown: dict[str, Step] = {}  # the first of each program

    def run(self, steps: Sequence[Step]) -> None:
        """Runs all steps that are not done. Earlier ones come first where there is a choice. Raises UserError if one
        fails. The others that were running are stopped then, as they are on any exception.
        """
        waiting = []
        for step in steps:
            if step.result() is None:
                waiting.append(step)
            else:
                self.say(f"{step.title}: done before")
        running: list[Process] = []
        try:
            while waiting or running:
                for step in list(waiting):
                    if len(running) >= self.slots:
                        break
                    if all(s.result() is not None for s in step.after) and (turn := self.begin(step)):
                        waiting.remove(step)
                        self._start(step, turn, running)
                self.show(process.describe() for process in running)
                time.sleep(self.pause)
                for process in [process for process in running if process.has_ended()]:
                    running.remove(process)
                    self._finish(process)
                waiting = self.remaining(waiting, running)
        finally:
            with undisturbed():
                self.clear()
                for process in running:
                    process.ask_to_stop()
                for process in running:
                    process.stop(self.patience)

    def begin(self, step: Step) -> Turn | None:
        """The resources of a step that can begin now; None if it cannot begin yet."""
        return Turn()

    def fail(self, step: Step, error: UserError) -> None:
        """Ends all steps with the error of one that failed."""
        raise error

    def remaining(self, waiting: list[Step], running: Sequence[Process]) -> list[Step]:
        """The waiting steps that are still to be run."""
        return waiting

    def _start(self, step: Step, turn: Turn, running: list[Process]) -> None:
        environment, keep_open = self.environment | turn.environment, [*self.keep_open, *turn.keep_open]
        try:
            with undisturbed():  # or it could run on with nobody who knows of it
                running.append(process := Process(step, self.cwd, environment, keep_open))
        except OSError as error:
            self.fail(step, UserError(f"{step.title} failed: {error}"))
        else:
            self._announce(process, turn)

    def _finish(self, process: Process) -> None:
        step = process.step
        try:
            process.finish()
        except UserError as error:
            self.fail(step, error)
        else:
            self.say(f"{step.title}: done ({time.monotonic() - process.started:.0f} s)")
            self.finished(step)

    def _announce(self, process: Process, turn: Turn) -> None:
        goes_on = (": goes on where it was" if process.resumed else "") + turn.told
        step = process.step
        first = self._shown.setdefault(Path(step.command[0]).name, step)
        # Another script of Python's has nothing in common with it.
        known = first is not step and any(group in first.groups for group in step.groups)
        environment = self.environment | turn.environment
        self.say(f"{step.title}{goes_on}\n{step.difference(first) if known else step.shell_command(environment)}")


def mark(folder: Path, name: str) -> Path:
    """Makes `folder`, for results, and in it the file `name`, which marks it as made by this demo; returns that file.

    Raises UserError if the folder holds files but no such mark.
    """
    marked = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may be making it now: the mark first.
        if not marked.exists() and any(folder.iterdir()) and not marked.exists():
            raise UserError(f"{folder} holds other files; choose a new or an empty folder with --out")
        marked.touch()
    except OSError as error:
        raise UserError(f"cannot use {folder} for the results: {error.strerror}") from error
    return marked


@contextmanager
def claim(folder: Path, name: str) -> Iterator[int]:
    """Makes `folder` and keeps other runs out of it.

    `folder`, `name`: as of `mark`. Yields a descriptor. Others stay out as long as a process that inherited it lives,
    should this one be killed. Raises UserError if another run has it, or `mark` does.
    """
    descriptor = take(mark(folder, name))
    if descriptor is None:
        raise UserError(f"another demo is at work in {folder}; wait for it or choose another --out")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_end(path: Path) -> str:
    """The last lines of a file that may be long."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        return file.read().decode(errors="replace")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or holds no object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    write_whole(path, json.dumps(value, indent=1) + "\n")
