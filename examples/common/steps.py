"""Commands that are run once: a finished one stays finished, an interrupted one goes on.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TextIO

from common.files import UserError, open_to_append, sign, take, write_whole
from common.processes import undisturbed

BEGUN, DONE = "begun.json", "done.json"
DEVICES = "CUDA_VISIBLE_DEVICES"
PAUSE = 30.0
"""Seconds between two reports of progress in a log."""
_TAIL = 20_000


@dataclass(frozen=True, eq=False)
class Step:
    """A command, and the means to tell whether it is done."""

    title: str  # its purpose, for people
    folder: Path  # where its log and its results are
    command: Sequence[str]  # program and arguments; the program's folder is not part of the key
    read_result: Callable[[str], dict[str, Any]] = lambda log: {}  # of its log; raises ValueError if that holds none
    describe_progress: Callable[[str], str] = lambda log: ""  # by the end of a log
    after: Sequence[Step] = ()  # the steps whose results it uses
    depends_on: str = ""  # a digest of all else that it uses
    resumes: bool = False  # whether the command goes on with the files that an interrupted one left in the folder
    always: bool = False  # runs at each call, goes on with whatever the folder holds, and is never done
    locks: Path | None = None  # the folder that one process at a time works in; its own if it is None
    gpus: int = 0  # how many it gets, if there are any
    log_name: str = "log.txt"
    key: str = field(init=False)

    def __post_init__(self) -> None:
        program, *arguments = self.command
        parts = [Path(program).name, arguments, self.depends_on, [step.key for step in self.after]]
        object.__setattr__(self, "key", hashlib.sha256(json.dumps(parts).encode()).hexdigest())

    @property
    def log(self) -> Path:
        return self.folder / self.log_name

    @property
    def lock(self) -> Path:
        """A file beside the folder that is locked: whoever holds its lock may work in the folder."""
        folder = self.locks or self.folder
        return folder.with_name(f"{folder.name}.lock")

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

    def shell_command(self, environment: Mapping[str, str]) -> str:
        """The command as one would type it, over several lines."""
        lines = ["  "]
        for word in [
            *(f"{name}={shlex.quote(value)}" for name, value in environment.items()),
            *map(shlex.quote, self.command),
        ]:
            if len(lines[-1]) + len(word) > 116:
                lines[-1] += "\\"
                lines.append("      ")
            lines[-1] += f"{word} "
        return "\n".join(line.rstrip() for line in lines)

    def prepare_folder(self) -> bool:
        """Makes the folder ready for a run; returns whether that goes on with an earlier one."""
        # A checkpoint that was being copied when the run was killed is no whole zip file.
        checkpoints = list(self.folder.glob("*.pt"))
        begun = read_json(self.folder / BEGUN).get("key") == self.key
        if self.always or (begun and self.resumes and all(map(zipfile.is_zipfile, checkpoints))):
            self.folder.mkdir(parents=True, exist_ok=True)
            return bool(checkpoints)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_json(self.folder / BEGUN, {"key": self.key})
        return False


class Process:
    """A step at work, with these variables besides the environment's; it inherits the descriptor of a lock."""

    def __init__(self, step: Step, environment: Mapping[str, str], lock: int, gpus: Sequence[str]) -> None:
        self.step, self.gpus = step, gpus
        self.resumed = step.prepare_folder()
        self.started = time.monotonic()
        self.peak_memory = 0.0
        # A pipe that nobody writes to: it ends when the last of the processes that the command started is gone.
        self.alive, held = os.pipe()
        with open_to_append(step.log) as log:
            self._read = log.seek(0, os.SEEK_END)
            # In a session of its own, so that Ctrl-C reaches this program only, which ends the others in order.
            self.popen = subprocess.Popen(
                step.command,
                # The log is read as UTF-8, whatever the terminal's encoding is, and no message may land within a line.
                env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock, held],
            )
        os.close(held)

    def describe(self) -> str:
        progress = self.step.describe_progress(read_end(self.step.log))
        return f"{self.step.title}: {progress or f'{time.monotonic() - self.started:.0f} s'}"

    def news(self) -> str:
        """The text that its log has got since the last call."""
        with self.step.log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        self._read += len(text)
        return text.decode(errors="replace")

    def ask_to_stop(self) -> None:
        """Asks it, and the processes that it started (workers that load data), to end."""
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
            # In place of `poll`, which would not tell the memory.
            process, status, usage = os.wait4(self.popen.pid, os.WNOHANG)
            if process:
                self.popen.returncode = os.waitstatus_to_exitcode(status)
                self.peak_memory = usage.ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
        return self.popen.returncode is not None

    def finish(self) -> None:
        """Marks the step as done, if it is; raises UserError if it failed."""
        os.close(self.alive)
        code = self.popen.returncode
        log = self.step.log.read_text(encoding="utf-8", errors="replace")
        reason = f"exit status {code}" if code > 0 else f"signal {-code}"
        # An exit status of 0 is not enough: the log must hold a result.
        if code == 0:
            try:
                result = self.step.read_result(log)
                if not self.step.always:
                    mark = {"key": self.step.key, "result": result, "peak_memory": self.peak_memory}
                    write_json(self.step.folder / DONE, mark)
                return
            except (ValueError, OSError) as error:
                reason = str(error)
        end = "\n".join(f"  | {line}" for line in log.splitlines()[-8:])
        hint = f"; remove {self.step.folder} to begin it anew" if self.resumed else ""
        raise UserError(f"{self.step.title} failed: {reason}\n{end}\nall of its output: {self.step.log}{hint}")


class Screen:
    """Lines that stay, and below them, on a terminal, lines that change; a log gets these every `PAUSE` seconds."""

    def __init__(self, output: TextIO) -> None:
        self.output = output
        self._live_lines = 0
        self._reported = time.monotonic()

    def say(self, text: str) -> None:
        """Prints something that stays."""
        self.clear()
        print(text, file=self.output, flush=True)

    def show(self, lines: Iterable[str]) -> None:
        """Puts these in the place of the lines that change."""
        if not self.output.isatty():
            if time.monotonic() - self._reported >= PAUSE:
                self.say("\n".join(f"> {line}" for line in lines))
                self._reported = time.monotonic()
            return
        self.clear()
        width = shutil.get_terminal_size().columns - 1
        for line in lines:
            print(f"> {line}"[:width], file=self.output)
            self._live_lines += 1
        self.output.flush()

    def clear(self) -> None:
        """Takes them away."""
        if self._live_lines:
            print(f"\x1b[{self._live_lines}F\x1b[J", end="", file=self.output, flush=True)
            self._live_lines = 0


class Runner(Screen):
    """Runs steps, several at a time, each after those that it uses, beside other processes that run the same steps.

    A terminal has a line for each that is running, which says how far it has come. A step that fails lets the others
    run on. One process at a time, of this machine or another, has a folder; a step whose folder another one has is left
    to that: `run` ends when nothing is left that this process could do, now or later.

    `slots`: how many at a time. `output`: where all of that goes. `environment`: variables for the commands, printed
    with them. `gpus`: the names of those there are; a step gets the ones that fewest others have. `finished`: is told
    of each step that has been run to its end. `follows`: whether to show the output of the commands. `pause`, `asks`,
    `patience`: seconds between two looks at the commands, until the lock of another process is asked for again, and
    that a command may take to end, which is a validation and a large checkpoint.
    """

    pause, asks, patience = 0.25, 5.0, 300.0

    def __init__(
        self,
        slots: int,
        output: TextIO,
        environment: Mapping[str, str],
        gpus: Sequence[str] = (),
        finished: Callable[[Step], None] = lambda step: None,
        follows: bool = False,
    ) -> None:
        super().__init__(output)
        self.slots, self.environment, self.gpus = slots, environment, gpus
        self.finished, self.follows = finished, follows
        self._failed: dict[Step, str] = {}  # with a line that says why
        self._held: dict[Path, int] = {}  # the locks' descriptors
        self._others: dict[Path, float] = {}  # when a lock that another process has was asked for

    def run(self, steps: Sequence[Step]) -> None:
        """Runs all steps that are not done. Earlier ones come first where there is a choice. On any exception those
        that are running are stopped. Raises UserError, which names the steps that failed, when all others are done.
        """
        waiting = []
        for step in steps:
            if step.result() is None:
                waiting.append(step)
            else:
                self.say(f"{step.title}: done before")
        running: list[Process] = []
        try:
            while (waiting := self._left(waiting, running)) or running:
                # A step begins when a slot, all that it uses and the lock of its folder are there.
                for step in list(waiting):
                    ready = len(running) < self.slots and all(s.result() is not None for s in step.after)
                    if ready and self._hold(step.lock):
                        waiting.remove(step)
                        self._start(step, running)
                if not self.follows:
                    self.show(process.describe() for process in running)
                time.sleep(self.pause)
                for process in list(running):
                    ended = process.has_ended()
                    if self.follows:
                        print(end=process.news(), file=self.output, flush=True)
                    if ended:
                        running.remove(process)
                        self._finish(process)
        finally:
            with undisturbed():
                self.clear()
                for process in running:
                    process.ask_to_stop()
                for process in running:
                    process.stop(self.patience)
                while self._held:
                    os.close(self._held.popitem()[1])
        if self._failed:
            told = f"{len(self._failed)} of {len(steps)} commands failed or were not run:"
            raise UserError("\n  ".join([told, *self._failed.values()]))

    def _left(self, waiting: Sequence[Step], running: Sequence[Process]) -> list[Step]:
        """The waiting steps that can still be run; frees the folders that no step needs any more."""
        left = []
        for step in waiting:
            if any(before in self._failed for before in step.after):
                self._failed[step] = f"{step.title} was not run, as it uses a step that failed"
            else:
                left.append(step)
        for lock in self._held.keys() - {step.lock for step in [*left, *(process.step for process in running)]}:
            os.close(self._held.pop(lock))
        # With nothing running here, and all folders at work elsewhere, there is nothing to wait for.
        locks = dict.fromkeys(step.lock for step in left)
        if running or not locks or not locks.keys() <= self._others.keys():
            return left
        for lock in locks:
            self.say(f"{lock.stem}: left to {lock.read_text(encoding='utf-8').strip()}")
        return []

    def _hold(self, lock: Path) -> bool:
        """True if this process has the lock, or gets it now."""
        if lock in self._held:
            return True
        if time.monotonic() - self._others.get(lock, -inf) < self.asks:
            return False
        lock.parent.mkdir(parents=True, exist_ok=True)
        # The system frees the lock when this process and those that inherited it have ended, however they end.
        descriptor = take(lock)
        if descriptor is None:
            self._others[lock] = time.monotonic()
            return False
        sign(descriptor)
        self._others.pop(lock, None)
        self._held[lock] = descriptor
        return True

    def _start(self, step: Step, running: list[Process]) -> None:
        if step.result() is not None:
            self.say(f"{step.title}: done by another process")
            return
        users = Counter(name for process in running for name in process.gpus)
        gpus = sorted(self.gpus, key=users.__getitem__)[: step.gpus]
        environment = {**self.environment, **({DEVICES: ",".join(gpus)} if gpus else {})}
        try:
            with undisturbed():  # else a signal could leave it running and unknown
                running.append(process := Process(step, environment, self._held[step.lock], gpus))
        except OSError as error:
            self._fail(step, UserError(f"{step.title} failed: {error}"))
            return
        told = (": goes on where it was" if process.resumed else "") + (f" (GPU {', '.join(gpus)})" if gpus else "")
        self.say(f"{step.title}{told}\n{step.shell_command(environment)}")

    def _finish(self, process: Process) -> None:
        try:
            process.finish()
        except UserError as error:
            self._fail(process.step, error)
        else:
            self.say(f"{process.step.title}: done ({time.monotonic() - process.started:.0f} s)")
            self.finished(process.step)

    def _fail(self, step: Step, error: UserError) -> None:
        self._failed[step] = str(error).splitlines()[0]
        self.say(str(error))


def mark(folder: Path, name: str) -> Path:
    """Makes `folder`, for results, and in it the file `name`, which marks it as made by a program; returns that file.

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
def claim(folder: Path, name: str) -> Iterator[None]:
    """Makes `folder`, marked by the file `name`, and keeps other runs out of it. Raises UserError if one has it, or as
    `mark` does.
    """
    descriptor = take(mark(folder, name))
    if descriptor is None:
        raise UserError(f"another demo is at work in {folder}; wait for it or choose another --out")
    try:
        yield
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
