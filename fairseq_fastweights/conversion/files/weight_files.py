"""Files of weights in a Hugging Face folder, read without running code from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.files import integrity, safetensors_digests
from fairseq_fastweights.files.text_files import FileError, read_text
from fairseq_fastweights.invalid_input import InvalidInput

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of files of weights, in the order in which they are searched."""

_MOST_ROWS = 40
Shapes = Mapping[str, tuple[int, ...]]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class WeightFiles:
    """The weights in a folder: `model.safetensors` or `pytorch_model.bin`, or the shards that an index names.

    Names and shapes are read at once; each weight is read when it is needed.

    Args:
        folder: the folder.
        named: the name that a weight is to have here, by that in the file; None for weights to leave out.

    Attributes:
        shapes: of the weights, by name.
        left_out: the number of weights that were left out.

    Raises:
        ValueError: if there are no weights, a shard is missing, a file is broken, it holds anything but weights, or two
            weights have one name; the message names the file. Nothing else in a file is executed or built.
    """

    def __init__(self, folder: Path, named: Callable[[str], str | None] = str) -> None:
        found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
        if found is None:
            raise InvalidInput(f"{folder}: there are no weights; it must hold one of {', '.join(WEIGHTS)}")
        paths = _shards(found) if found.name.endswith(".index.json") else [found]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.left_out = 0
        self._readers: dict[str, Callable[[], Tensor]] = {}
        before: dict[str, str] = {}
        for path in paths:
            read = _open_safetensors if path.suffix == ".safetensors" else _open_pickle
            for name, (shape, reader) in read(path).items():
                if (new := named(name)) is None:
                    self.left_out += 1
                    continue
                if new in before:
                    raise InvalidInput(
                        f"{path}: weight {name!r} is in another file too"
                        if before[new] == name
                        else f"weight {name!r} would be {new!r}, which {before[new]!r} is; one of them must go"
                    )
                before[new], self.shapes[new], self._readers[new] = name, shape, reader

    def read(self, name: str) -> Tensor:
        """Reads a weight. Raises a `ValueError` if its dtype is not a floating-point type."""
        weight = self._readers[name]()
        # Integers are weights of quantized models, without their scales.
        if weight.dtype not in _DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise InvalidInput(f"weight {name!r} is {str(weight.dtype).removeprefix('torch.')}; it must be {allowed}")
        return weight


def check_regular(path: Path, name: Path | None = None) -> None:
    """Raises a `ValueError` for a file that cannot be read, or a folder, pipe or device; `name` is for messages."""
    try:
        kind = integrity.why_not_regular(path)
        if not kind:
            path.open("rb").close()
    except OSError as error:
        raise InvalidInput(f"{name or path} cannot be read ({error.strerror})") from None
    if kind:
        raise InvalidInput(f"{name or path} {kind}")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file. Raises a `ValueError` if it is missing, broken, or no object."""
    if not path.exists():
        raise InvalidInput(f"{path}: there is no such file")
    check_regular(path)
    try:
        content = json.loads(read_text(path))
    except FileError:
        raise
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise InvalidInput(f"{path}: this is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"{path}: this must hold a JSON object, not {type(content).__name__}")
    return content


def check_weights(heading: str, found: Shapes, expected: Shapes) -> None:
    """Compares names and shapes. Raises a `ValueError` if weights are missing, left over, or of another shape."""
    rows = [
        (name, str(found.get(name, "missing")), str(expected.get(name, "nothing of this name")))
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if not rows:
        return
    lines = text_table([("weight", "found", "expected"), *rows[:_MOST_ROWS]]).splitlines()
    lines += [f"and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    raise InvalidInput("\n  ".join([f"{heading} ({len(rows)} of {len(found.keys() | expected.keys())}):", *lines]))


def text_table(rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """Formats rows in columns; with `numbers`, all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
    lines = ("  ".join(side(word, n) for side, word, n in zip(sides, row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def save_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Writes model.safetensors, with a digest of it. Raises an `OSError` if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, folder / WEIGHTS[0], metadata={"format": "pt"})
        safetensors_digests.note_digest(folder / WEIGHTS[0])
    except SafetensorError as error:
        raise OSError(f"{WEIGHTS[0]}: {error}") from error


def load_safely(path: Path) -> Any:
    """Loads a file of torch.save, or raises a `ValueError`; it may hold tensors and plain values alone."""
    check_regular(path)
    with path.open("rb") as file:
        return integrity.load_checked(file, path, mapped=True)


def _shards(index: Path) -> list[Path]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise InvalidInput(f"{index}: weight_map is missing; it must say in which file each weight is")
    names = sorted(set(places.values()))
    suffix = ".safetensors" if "safetensors" in index.name else ".bin"
    for name in names:
        if Path(name).name != name or not name.endswith(suffix):
            raise InvalidInput(f"{index}: weight_map names {name!r}; it must be a {suffix} file in the same folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise InvalidInput(f"{index.parent}: of {len(names)} shards {len(missing)} missing: {', '.join(missing)}")
    return [index.parent / name for name in names]


def _open_safetensors(path: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InvalidInput(f"{path}: reading it needs the package safetensors: pip install safetensors") from None
    try:
        opened = safe_open(path, framework="pt")
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path}: the file is broken or cut short ({first_line(error)})") from None
    # safe_open checks the header alone; the digest covers the numbers.
    if damage := safetensors_digests.why_damaged(path):
        raise InvalidInput(f"{path} {damage}")

    return {name: (shape, partial(opened.get_tensor, name)) for name, shape in shapes.items()}


def _open_pickle(path: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]:
    check_regular(path)
    weights = safetensors_digests.weights_in_pickle(path)
    return {name: (tuple(weight.shape), weight.detach) for name, weight in weights.items()}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
