"""Reads settings that are written as Python, without running them.

This takes the place of every `eval`: settings come out of checkpoints, which may be anybody's.
"""

import ast
from typing import Any

from fairseq.invalid_input import InvalidInput

LARGEST = 100_000
"""Values and characters that sums and products may make of a text that is shorter."""


def literal(text: str) -> Any:
    """The value of a literal; also of sums and products of such, as in "[(512, 3)] * 4 + [(1024, 1)]".

    Raises:
        TypeError: if `text` is no string, as `eval` does.
        InvalidInput: for anything else than a literal, naming it.
    """
    if not isinstance(text, str):
        raise TypeError(f"a setting must be a string, not {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, max(LARGEST, len(text)))[0]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise InvalidInput(f"{text[:200]!r} is no literal, nor a sum or product of such: {error}") from None


def _value(node: ast.expr, most: int) -> tuple[Any, int]:
    """A value, and how many values and characters it has at all its levels together, which may be `most`."""
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_value(item, most) for item in node.elts]
        made: Any = [value for value, _ in items]
        size = _checked(1 + sum(size for _, size in items), most)
        return (made if isinstance(node, ast.List) else tuple(made)), size
    if not isinstance(node, ast.BinOp):
        made = ast.literal_eval(node)
        return made, len(made if isinstance(made, (str, bytes)) else repr(made))
    (left, left_size), (right, right_size) = _value(node.left, most), _value(node.right, most)
    if isinstance(node.op, ast.Add):
        size = _checked(left_size + right_size, most)
        return left + right, size
    if isinstance(node.op, ast.Sub):
        return left - right, 1
    if not isinstance(node.op, ast.Mult):
        raise ValueError(f"{type(node.op).__name__} is not among +, - and *")
    size = 1
    for items, times, one in ((left, right, left_size), (right, left, right_size)):
        if hasattr(items, "__len__") and isinstance(times, int):
            size = _checked(one * max(times, 1), most)
    return left * right, size


def _checked(size: int, most: int) -> int:
    if size > most:
        raise ValueError(f"{size} values and characters are more than {most:,}")
    return size
