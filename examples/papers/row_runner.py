"""Runs rows beside other processes, of this machine and of others, that run rows in the same folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TextIO

from common.commands import one_thread
from common.devices import VARIABLE, Devices
from common.locks import sign, take
from common.steps import Process, Runner, Step, Turn, UserError

ASKED = 5.0
"""Seconds until a lock that another process has is asked for again."""


def lock_of(folder: Path) -> Path:
    """The lock of a training's folder, beside it: who holds it trains there and scores what was trained."""
    return folder.with_name(f"{folder.name}.lock")


class RowRunner(Runner):
    """Runs steps of rows. One process at a time is at work in the folder of a training.

    What fails is noted in `failed`, with a line that says why, and lets the others run on. What another process is at
    work on is left to it: this one ends when nothing is left that it could do, now or later.

    `folders`: the training's folder of each step. `gpus`: how many each gets of `devices`. The others: as of `Runner`.
    """

    patience = 300.0  # until the running update, or a validation, has ended and a large checkpoint is written

    def __init__(
        self,
        slots: int,
        output: TextIO,
        folders: Mapping[Step, Path],
        gpus: Mapping[Step, int],
        devices: Devices,
        finished: Callable[[Step], None],
    ) -> None:
        super().__init__(Path.cwd(), slots, output, one_thread(), finished=finished)
        self.failed: dict[Step, str] = {}
        self._folders, self._gpus, self._devices = folders, gpus, devices
        self._held: dict[Path, int] = {}  # the locks' descriptors
        self._others: dict[Path, float] = {}  # when the lock was asked for
        self._given: dict[Step, list[str]] = {}
        self._done_elsewhere: set[Step] = set()

    def begin(self, step: Step) -> Turn | None:
        folder = self._folders[step]
        if not self._hold(folder):
            return None
        if step.result() is not None:
            self._done_elsewhere.add(step)
            return None
        self._given[step] = names = self._devices.take(self._gpus[step])
        kept = [self._held[folder]]
        if not names:
            return Turn(keep_open=kept)
        return Turn({VARIABLE: ",".join(names)}, kept, f" (GPU {', '.join(names)})")

    def fail(self, step: Step, error: UserError) -> None:
        self.failed[step] = str(error).splitlines()[0]
        self.say(str(error))

    def remaining(self, waiting: list[Step], running: Sequence[Process]) -> list[Step]:
        at_work = {process.step for process in running}
        for step in self._given.keys() - at_work:
            self._devices.give_back(self._given.pop(step))
        left = []
        for step in waiting:
            broken = next((before for before in step.after if before in self.failed), None)
            if step in self._done_elsewhere:
                self.say(f"{step.title}: done by another process")
            elif broken:
                self.failed[step] = f"{step.title} was not run, as it uses what failed"
            else:
                left.append(step)
        for folder in self._held.keys() - {self._folders[step] for step in [*left, *at_work]}:
            os.close(self._held.pop(folder))
        return left if at_work or not self._leaves(left) else []

    def release(self) -> None:
        """Gives back what is still held; nothing may run any more."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _hold(self, folder: Path) -> bool:
        """True if this process has the folder, or gets it now."""
        if folder in self._held:
            return True
        if time.monotonic() - self._others.get(folder, -inf) < ASKED:
            return False
        lock = take(lock_of(folder))
        if lock is None:
            self._others[folder] = time.monotonic()
            return False
        sign(lock)
        self._others.pop(folder, None)
        self._held[folder] = lock
        return True

    def _leaves(self, left: Sequence[Step]) -> bool:
        """True if all that is left is others'."""
        folders = dict.fromkeys(self._folders[step] for step in left)
        if not folders or not folders.keys() <= self._others.keys():
            return False
        for folder in folders:
            self.say(f"{folder.name}: left to {lock_of(folder).read_text(encoding='utf-8').strip()}")
        return True
