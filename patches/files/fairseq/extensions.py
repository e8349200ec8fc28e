"""Lets a plugin act before, after or in place of functions of fairseq-train."""

from collections.abc import Callable
from functools import wraps
from typing import Any

_extension: Any = None


def extend(extension: Any) -> None:
    """Lets each method of `extension` run in place of the `extensible` function that has its name.

    The method gets the function first, then the function's arguments. A process has one extension, the last.
    """
    global _extension
    _extension = extension


def extensible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function in place of which a method of an extension may run."""

    @wraps(function)
    def extended(*arguments: Any, **options: Any) -> Any:
        method = getattr(_extension, function.__name__, None)
        return method(function, *arguments, **options) if method else function(*arguments, **options)

    return extended
