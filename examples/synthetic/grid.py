"""Many points, several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from common.commands import one_thread
from common.fairseq_logs import time_left
from common.files import append_line
from common.interruptions import undisturbed
from common.steps import Screen, UserError

from synthetic.results import Result, file_of, read_results
from synthetic.training import Point

WORKER = Path(__file__).resolve().parent / "worker.py"


class Estimate:
    """How long points take, learned from those that are finished."""

    def __init__(self, finished: Iterable[Result]) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._work: dict[str, float] = defaultdict(float)
        for result in finished:
            self.learn(result.point, result.seconds)

    def learn(self, point: Point, seconds: float) -> None:
        for name in (point.model, ""):
            self._seconds[name] += seconds
            self._work[name] += point.work

    def left(self, waiting: Sequence[Point], running: Sequence[tuple[Point, float]], jobs: int) -> float | None:
        """Seconds until the last point is done; None as long as none is finished.

        `running`: points with the seconds that they have taken so far. `jobs`: how many run at a time.
        """
        if not self._work[""]:
            return None
        ahead = []
        for point, taken in [*((point, 0.0) for point in waiting), *running]:
            name = point.model if self._work[point.model] else ""  # what other models take, where there is none of it
            # One that takes longer than expected is taken to be done any moment now: nothing better is known.
            ahead.append(max(0.0, self._seconds[name] / self._work[name] * point.work - taken))
        return max([sum(ahead) / jobs, *ahead], default=0.0)


class _Worker:
    """A process that trains one point after the other."""

    def __init__(self, keep_open: Sequence[int]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the worker lives)
        self.popen = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | one_thread(),
            # In a session of its own, so that Ctrl-C reaches the program only that will end it.
            start_new_session=True,
            pass_fds=keep_open,
        )
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.input, self.output = self.popen.stdin, self.popen.stdout
        self.point: Point | None = None
        self.started = 0.0
        self.progress = ""
        self._half = b""

    def begin(self, point: Point) -> None:
        self.point, self.started, self.progress = point, time.monotonic(), "begins"
        with contextlib.suppress(BrokenPipeError):  # it has died, which `read` will notice
            self.input.write((json.dumps(asdict(point)) + "\n").encode())
            self.input.flush()

    def read(self) -> list[dict[str, Any]]:
        """The results that it has written since; raises UserError if it has ended."""
        text = os.read(self.output.fileno(), 2**16)
        if not text:
            self.errors.seek(0)
            end = "".join(f"\n  | {line}" for line in self.errors.read().decode(errors="replace").splitlines()[-8:])
            raise UserError(f"the process for {self.point.title if self.point else 'no point'} ended{end}")
        *lines, self._half = (self._half + text).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout=10)
        for file in (self.input, self.output, self.errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()


class Grid(Screen):
    """Trains points and keeps their results.

    `folder`: for the files of results. `jobs`: how many points at a time. `output`: where progress goes. `keep_open`:
    file descriptors that the processes inherit.
    """

    def __init__(self, folder: Path, jobs: int, output: TextIO, keep_open: Sequence[int] = ()) -> None:
        super().__init__(output)
        self.folder = folder
        self.jobs = jobs
        self.keep_open = keep_open

    def run(self, points: Sequence[Point]) -> None:
        """Trains the points that have no result yet, those with the least work first. Raises UserError if a process
        dies. The others are stopped then, as they are on any exception; their points will begin anew; UserError
        for a file of results that cannot be used.
        """
        finished: dict[str, Result] = {}
        for setting in {point.setting for point in points}:
            finished |= read_results(file_of(self.folder, setting))
        waiting = sorted((point for point in points if point.key not in finished), key=lambda point: point.work)
        if len(waiting) < len(points):
            self.say(f"{len(points) - len(waiting)} of {len(points)} points: done before")
        devices = {point.device for point in points}
        estimate = Estimate(result for result in finished.values() if result.point.device in devices)
        self._work(waiting, estimate)

    def _work(self, waiting: list[Point], estimate: Estimate) -> None:
        total, done = len(waiting), 0
        workers: list[_Worker] = []
        with selectors.DefaultSelector() as selector:
            try:
                while done < total:
                    while waiting and len(workers) < self.jobs:
                        with undisturbed():  # or it could run on with nobody who knows of it
                            workers.append(_Worker(self.keep_open))
                        selector.register(workers[-1].output, selectors.EVENT_READ, workers[-1])
                        workers[-1].begin(waiting.pop(0))
                    for key, _ in selector.select(timeout=1):
                        for message in key.data.read():
                            if "result" not in message:
                                key.data.progress = f"step {message['step']:,}, loss {_shown(message['loss'])}"
                                continue
                            done += 1
                            self._keep(key.data, message["result"], estimate)
                            running = [(w.point, 0.0) for w in workers if w.point is not None and w is not key.data]
                            left = estimate.left(waiting, running, self.jobs)
                            self._announce(key.data, message["result"], done, total, left)
                            key.data.point = None
                            if waiting:
                                key.data.begin(waiting.pop(0))
                    self.show(self._progress(workers, waiting, estimate))
            finally:
                with undisturbed():
                    self.clear()
                    for worker in workers:
                        worker.stop()

    def _keep(self, worker: _Worker, result: dict[str, Any], estimate: Estimate) -> None:
        assert worker.point is not None
        append_line(file_of(self.folder, worker.point.setting), result)
        estimate.learn(worker.point, result["seconds"])

    def _announce(self, worker: _Worker, result: dict[str, Any], done: int, total: int, left: float | None) -> None:
        assert worker.point is not None
        end = {"solved": "below the target", "no progress": "no progress", "limit": "at the limit of steps"}
        self.say(
            f"[{done}/{total}] {worker.point.title}: loss {_shown(result['best_loss'])}, "
            f"{end.get(result['stopped'], result['stopped'])} after {result['steps']:,} steps "
            f"({result['seconds']:.0f} s){time_left(left) if done < total else ''}"
        )

    def _progress(self, workers: Sequence[_Worker], waiting: Sequence[Point], estimate: Estimate) -> Iterator[str]:
        now = time.monotonic()
        running = [(w.point, now - w.started, w.progress) for w in workers if w.point is not None]
        left = estimate.left(waiting, [(point, taken) for point, taken, _ in running], self.jobs)
        for point, _, progress in running:
            yield f"{point.title}: {progress}"
        yield f"{len(waiting)} waiting{time_left(left)}"


def _shown(loss: float | None) -> str:
    return "not a number" if loss is None else f"{loss:.5f}"
