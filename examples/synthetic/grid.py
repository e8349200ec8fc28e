"""Many points, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TextIO

import torch
from common.commands import one_thread
from common.fairseq_logs import time_left
from common.files import UserError, append_line
from common.steps import Screen

from synthetic.results import Result, file_of, read_result, read_results
from synthetic.training import Point, train_point


def seconds_left(finished: Iterable[Result], running: Sequence[tuple[Point, float]], jobs: int) -> float | None:
    """Seconds until the last point is done, by the pace of finished ones; None as long as none is finished.

    `running`: points with the seconds that they have taken so far. `jobs`: how many run at a time.
    """
    seconds, work = map(sum, zip((0.0, 0.0), *((r.seconds, r.point.work) for r in finished), strict=True))
    if not work:
        return None
    # One that takes longer than expected is taken to be done any moment now: nothing better is known.
    ahead = [max(0.0, seconds / work * point.work - taken) for point, taken in running]
    return max([sum(ahead) / jobs, *ahead], default=0.0)


_reports: Any
"""A worker's queue for the evaluations of its points."""


def _start_worker(reports: Any) -> None:
    global _reports
    _reports = reports
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that ends the workers

    def end_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _train(point: Point) -> dict[str, Any]:
    return train_point(point, lambda step, loss: _reports.put((point.key, f"step {step:,}, loss {loss:.5f}")))


class Grid(Screen):
    """Trains points and keeps their results.

    `folder`: for the files of results. `jobs`: how many points at a time. `output`: where progress goes.
    """

    def __init__(self, folder: Path, jobs: int, output: TextIO) -> None:
        super().__init__(output)
        self.folder, self.jobs = folder, jobs

    def run(self, points: Sequence[Point]) -> None:
        """Trains the points that have no result yet, those with the least work first. Raises UserError if one fails, or
        for a file of results that cannot be used. The others are stopped then, as they are on any exception; they will
        begin anew.
        """
        finished: dict[str, Result] = {}
        for setting in {point.setting for point in points}:
            finished |= read_results(file_of(self.folder, setting))
        waiting = sorted((point for point in points if point.key not in finished), key=lambda point: point.work)
        if len(waiting) < len(points):
            self.say(f"{len(points) - len(waiting)} of {len(points)} points: done before")
        devices = {point.device for point in points}
        known = [result for result in finished.values() if result.point.device in devices]
        before = dict(os.environ)
        os.environ.update(one_thread())  # which the workers inherit
        try:
            self._work(waiting, known)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _work(self, waiting: list[Point], known: list[Result]) -> None:
        total, done = len(waiting), 0
        running: dict[Future[dict[str, Any]], tuple[Point, float]] = {}
        progress: dict[str, str] = {}
        # A forked process could not use a GPU.
        context = multiprocessing.get_context("spawn")
        reports = context.SimpleQueue()
        with ProcessPoolExecutor(max(1, min(self.jobs, total)), context, _start_worker, (reports,)) as pool:
            try:
                while done < total:
                    while waiting and len(running) < self.jobs:
                        point = waiting.pop(0)
                        running[pool.submit(_train, point)] = point, time.monotonic()
                    # A second without news is time for another look at the progress.
                    ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                    for future in ended:
                        done += 1
                        point, _ = running.pop(future)
                        if error := future.exception():
                            raise UserError(f"{point.title} failed: {error}")
                        result = future.result()
                        append_line(file_of(self.folder, point.setting), result)
                        known.append(read_result(result)[1])
                        ahead = [(other, 0.0) for other in (*waiting, *(x for x, _ in running.values()))]
                        left = seconds_left(known, ahead, self.jobs)
                        self.say(f"[{done}/{total}] {_told(point, result)}{time_left(left) if done < total else ''}")
                    while not reports.empty():
                        key, text = reports.get()
                        progress[key] = text
                    now = time.monotonic()
                    taken = [(point, now - started) for point, started in running.values()]
                    lines = [f"{point.title}: {progress.get(point.key, 'begins')}" for point, _ in taken]
                    left = seconds_left(known, [*((point, 0.0) for point in waiting), *taken], self.jobs)
                    self.show([*lines, f"{len(waiting)} waiting{time_left(left)}"])
            finally:
                self.clear()
                # The pool would wait until their points are done.
                for child in multiprocessing.active_children():
                    child.terminate()


def _told(point: Point, result: dict[str, Any]) -> str:
    end = {"solved": "below the target", "limit": "at the limit of steps"}.get(result["stopped"], result["stopped"])
    loss = "not a number" if result["best_loss"] is None else f"{result['best_loss']:.5f}"
    return f"{point.title}: loss {loss}, {end} after {result['steps']:,} steps ({result['seconds']:.0f} s)"
