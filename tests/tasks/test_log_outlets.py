"""A process's prints neither fail nor wait, whoever reads them, and arrive if they are read."""

import os
import pty
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from fairseq_fastweights.tasks import log_outlets
from fairseq_fastweights.tasks.log_outlets import LogOutlets
from tests.tasks.conftest import forked

MUCH = b"x" * 999 + b"\n"


def read_by_nobody() -> tuple[int, Callable[[], object]]:
    source, sink = os.pipe()
    return sink, lambda: os.close(source)


def full() -> tuple[int, Callable[[], object]]:
    """A pipe that nobody reads, though this process could."""
    _, sink = os.pipe()

    def fill() -> None:
        os.set_blocking(sink, False)
        with suppress(BlockingIOError):
            while True:
                os.write(sink, MUCH)
        os.set_blocking(sink, True)

    return sink, fill


def hung_up() -> tuple[int, Callable[[], object]]:
    """A terminal that is read until it is closed: it holds only a few thousand characters."""
    controller, terminal = pty.openpty()
    closing = threading.Event()

    def read() -> None:
        while not closing.is_set():
            if select.select([controller], [], [], 0.01)[0]:
                os.read(controller, 4096)

    def close() -> None:
        closing.set()
        reader.join()  # or its reading would keep the terminal open
        os.close(controller)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return terminal, close


LOGS: dict[str, Callable[[], tuple[int, Callable[[], object]]]] = {
    "nobody": read_by_nobody,
    "full": full,
    "hung up": hung_up,
    "disk full": lambda: (os.open("/dev/full", os.O_WRONLY), int),
}
"""Each makes a log, and a function after which it takes no more."""


def log_to(name: str) -> Callable[[], object]:
    """Puts a log in the place of stdout and stderr; returns the function after which it takes no more."""
    file, spoil = LOGS[name]()
    for number in (1, 2):
        os.dup2(file, number)
    return spoil


@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_does_not_take_more_keeps_nothing_from_going_on(log):
    def run() -> None:
        outlets = LogOutlets()
        spoil = log_to(log)
        outlets.begin()
        spoil()
        started = time.monotonic()
        outlets.open_if_unread()
        assert bool(outlets._open) == (log in ("nobody", "hung up"))
        outlets.open()
        for _ in range(300):
            assert os.write(1, MUCH) == len(MUCH)
        outlets.say("a line")
        outlets.close()
        if log in ("nobody", "hung up"):
            os.write(2, MUCH)  # goes nowhere from now on
        os._exit(7 if time.monotonic() - started < 200 else 1)

    assert forked(run) == 7


def test_a_log_that_is_read_has_all_lines_in_order(tmp_path):
    def run() -> None:
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 1)
        outlets = LogOutlets()
        outlets.begin()
        for number in range(3):
            os.write(1, b"before\n")
            outlets.open()
            outlets.begin()  # of the next epoch
            for _ in range(200):
                os.write(1, b"%d" % number + MUCH)
            outlets.close()
        os._exit(7)

    assert forked(run) == 7
    parts = (tmp_path / "log").read_bytes().split(b"before\n")
    assert parts == [b"", *((b"%d" % number + MUCH) * 200 for number in range(3))]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("since", ["the beginning", "then"])
def test_a_closed_output_whose_number_another_file_may_have_is_let_alone(tmp_path, number, since):
    def run() -> None:
        outlets = LogOutlets()
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 3 - number)
        if since == "the beginning":
            setattr(log_outlets.sys, "__stdout__" if number == 1 else "__stderr__", None)
        else:
            outlets.begin()
        os.close(number)
        assert os.open(tmp_path / "data", os.O_WRONLY | os.O_CREAT) == number
        if since == "the beginning":
            outlets.begin()
        outlets.open()
        outlets.say("a line")
        os.write(number, b"12345")
        outlets.close()
        os._exit(7)

    assert forked(run) == 7
    assert (tmp_path / "log").read_bytes() == (b"a line\n" if number == 1 else b"")
    assert (tmp_path / "data").read_bytes() == b"12345"


def test_a_closed_output_takes_text_after_all():
    def run() -> None:
        outlets = LogOutlets()
        outlets.begin()
        for number in (0, 1, 2):
            os.close(number)
        outlets.open()
        written = [os.write(number, MUCH) for number in (1, 2)]
        outlets.close()
        os._exit(7 if written == [len(MUCH)] * 2 else 1)

    assert forked(run) == 7
