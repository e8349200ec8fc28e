"""The error for a wrong option, setting or file, which a user can correct, and the check of a number.

It knows Python's own library alone, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real
from typing import Any


class InvalidInput(ValueError):
    """An argument, an option or a setting that a user gave is not allowed.

    Args:
        message: one line that names it, its value and the allowed values. A command ends with it, without a traceback.
    """

    def __init__(self, message: str) -> None:
        if message.startswith("Caught "):  # by torch in a data worker, whose traceback ends with the line
            message = message.strip().rpartition("\n")[2].partition(": ")[2]
        super().__init__(message)


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    whole: bool = False,
) -> None:
    """Raises `InvalidInput`, with the setting's name, value and limits, unless it is a finite number within them.

    Infinity, NaN (which passes tests such as `not value < 0`) and bools are always refused.

    Args:
        name: the setting's name.
        value: the given value.
        least: the smallest allowed value.
        most: the largest allowed value.
        above: an exclusive lower limit.
        below: an exclusive upper limit.
        whole: True to allow integers alone.

    Raises:
        InvalidInput: if the value is not allowed.

    Examples:
        >>> check_number("dropout", 0.1, 0, 1)
        >>> check_number("dropout", float("nan"), 0, 1)
        Traceback (most recent call last):
        fairseq_fastweights.invalid_input.InvalidInput: dropout is nan; it must be a finite number from 0 to 1
        >>> check_number("std", 0, above=0)
        Traceback (most recent call last):
        fairseq_fastweights.invalid_input.InvalidInput: std is 0; it must be above 0
        >>> check_number("layers", 1.5, 1, whole=True)
        Traceback (most recent call last):
        fairseq_fastweights.invalid_input.InvalidInput: layers is 1.5; it must be an integer of at least 1
    """
    kind: Any = Integral if whole else Real
    number = isinstance(value, kind) and not isinstance(value, bool)
    if number and (whole or abs(value) <= sys.float_info.max):  # a long integer is no float
        if least <= value <= most and above < value < below:
            return
        wanted = ""
    else:
        wanted = "an integer " if whole else "a finite number "
    if least > -math.inf and most < math.inf:
        limits = [f"from {least} to {most}"]
    else:
        of = "of " if wanted else ""
        words = ((f"{of}at least", least), (f"{of}at most", most), ("above", above), ("below", below))
        limits = [f"{word} {limit}" for word, limit in words if math.isfinite(limit)]
    raise InvalidInput(f"{name} is {value!r}; it must be {wanted}{' and '.join(limits)}".rstrip())
