"""Shows the progress of a program while its commands run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from typing import TextIO

PAUSE = 30.0
"""Seconds between two reports of progress in a log."""


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
