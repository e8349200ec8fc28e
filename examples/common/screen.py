"""Shows the progress of a program while its commands run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TextIO


class Screen:
    """Lines that stay, and below them, on a terminal, lines that change; a log gets only those that stay."""

    def __init__(self, output: TextIO) -> None:
        self.output = output
        self._live_lines = 0

    def say(self, text: str) -> None:
        """Prints something that stays."""
        self.clear()
        print(text, file=self.output, flush=True)

    def show(self, lines: Iterable[str]) -> None:
        """Puts these in the place of the lines that change."""
        if not self.output.isatty():
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
