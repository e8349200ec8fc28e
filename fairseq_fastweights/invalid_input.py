"""The error for what a user gave: an option, a setting or a file that is wrong, and no fault of the code.

It knows Python's own library alone, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations


class InvalidInput(ValueError):
    """An argument, an option or a setting that a user gave is not allowed.

    Args:
        message: one line that names it, its value and what is allowed. A command ends with it, without a traceback.
    """

    def __init__(self, message: str) -> None:
        if message.startswith("Caught "):  # by torch in a data worker, whose traceback ends with the line
            message = message.strip().rpartition("\n")[2].partition(": ")[2]
        super().__init__(message)
