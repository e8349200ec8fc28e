"""Reads settings that are written as Python, without running them.

`tools/fairseq_cures.py` puts this module into fairseq as `fairseq/settings.py`, in the place of every `eval`: settings
come out of checkpoints, which may be anybody's.
"""

import ast
from typing import Any

LARGEST = 100_000
"""Items of a list or characters of a string that a setting may repeat something to."""


def literal(text: str) -> Any:
    """The value of a literal; also of sums and products of such, as in "[(512, 3)] * 4 + [(1024, 1)]".

    Raises:
        TypeError: if `text` is no string, as `eval` does.
        ValueError: for anything else than a literal, naming it.
    """
    if not isinstance(text, str):
        raise TypeError(f"a setting must be a string, not {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text[:200]!r} is no literal, nor a sum or product of such: {error}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if not isinstance(node.op, ast.Mult):
        raise ValueError(f"{type(node.op).__name__} is not among +, - and *")
    for items, times in ((left, right), (right, left)):
        if hasattr(items, "__len__") and isinstance(times, int) and len(items) * times > LARGEST:
            raise ValueError(f"{len(items)} items, {times} times, are more than {LARGEST:,}")
    return left * right
