"""Reads settings that are written as Python or YAML, without running or multiplying them.

This takes the place of every `eval`: settings come out of checkpoints, which may be anybody's.
"""

import ast
import math
import os
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, TextIO

import yaml
from fairseq.invalid_input import InvalidInput
from fairseq.text_files import FileError

LARGEST = 100_000
"""Values and characters that sums, products and aliases may make of a text that is shorter."""
_MOST = 5_000
"""Values that OmegaConf may get of one file or command, those within others included."""
_INFINITE = {"clip_norm": math.inf, "clip_threshold": math.inf, "stop_min_lr": -math.inf, "stop_time_hours": math.inf}
_INFINITE["unkpen"] = math.inf
"""Settings that may be infinite: bounds that are then none, and a penalty."""


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
    # Sums may be within lists, where ast.literal_eval refuses them.
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
    # [x] * n and n * [x]: bounded before the list is made.
    for items, times, one in ((left, right, left_size), (right, left, right_size)):
        if hasattr(items, "__len__") and isinstance(times, int):
            size = _checked(one * max(times, 1), most)
    return left * right, size


def _checked(size: Any, most: int) -> Any:
    if size > most:
        raise ValueError(f"{size} values and characters are more than {most:,}")
    return size


def run_without_shell(command: str) -> int:
    """Runs a command without a shell, in place of `os.system`; returns its exit status."""
    return subprocess.call(shlex.split(command))


def check_literals(settings: Any) -> None:
    """Raises an `InvalidInput` that names a setting, at any level of `settings`, which is no literal or no number.

    OmegaConf would resolve an interpolation, which repeats other settings without bound and reads environment
    variables. No comparison notices NaN. OmegaConf takes a millisecond for each value, so there may be only so many.
    """
    left, count = [("", settings, True)], 0
    while left:
        name, value, counts = left.pop()
        count += counts
        if count > _MOST:
            raise InvalidInput(f"setting {name} is one of more than {_MOST:,} values, which are too many")
        # OmegaConf's mark of an interpolation.
        if isinstance(value, str) and "${" in value:
            raise InvalidInput(f"setting {name} is {value[:200]!r}; it must be a literal, without ${{...}}")
        may_be = _INFINITE.get(name.rpartition(".")[2])
        if isinstance(value, float) and not math.isfinite(value) and value != may_be:
            raise InvalidInput(f"setting {name} is {value}; it must be a finite number")
        if isinstance(value, Namespace):  # OmegaConf does not look into it
            value, counts = vars(value), False
        if isinstance(value, Mapping):
            left += [(f"{name}.{key}".lstrip("."), item, counts) for key, item in value.items()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += [(name, item, counts) for item in value]


def check_checkpoint(path: str, state: Mapping[str, Any], overrides: Any) -> None:
    """Raises a `FileError` if a checkpoint's settings, or their `overrides`, are of another kind or no literals."""
    args, cfg = state.get("args"), state.get("cfg")
    kinds: dict[str, tuple[Any, Any]] = {"args": (args, Namespace), "cfg": (cfg, dict)}
    if isinstance(cfg, dict):
        kinds |= {f"cfg.{name}": (cfg.get(name), (dict, Namespace)) for name in ("model", "task")}
    try:
        for name, (value, kind) in kinds.items():
            if value is not None and not isinstance(value, kind):
                raise InvalidInput(f"setting {name} is of type {type(value).__name__}; it must hold settings by name")
        check_literals({"args": args, "cfg": cfg, "overrides": overrides})
    except InvalidInput as error:
        raise FileError(f"{path} is refused: {error}") from None


def read_yaml(file: TextIO) -> Any:
    """The content of a file in YAML. Raises `FileError` if it is none, or if its aliases repeat too much of it."""
    try:
        loader = yaml.SafeLoader(file)
        node = loader.get_single_node()
        if node is None:
            return None
        _checked(_nodes(node, {}), max(LARGEST, os.fstat(file.fileno()).st_size))
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{file.name} cannot be read as YAML: {' '.join(str(error).split())}") from None


def _nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node of YAML makes, those of aliases at each place."""
    if id(node) not in known:
        known[id(node)] = math.inf  # of one that holds itself
        items = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_nodes(part, known) for part in parts)
    return known[id(node)]
