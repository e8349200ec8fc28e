"""Reads the pickles of checkpoints: plain values, tensors, and the few types that fairseq's checkpoints need.

A pickle is a program. The unpicklers of Python and torch run all opcodes: some make arrays of any size, and some types
copy their arguments. This one knows only the opcodes and names that `torch.save` writes for fairseq, and
counts the memory of each object before it is made: a pickle that needs too much ends in an error. Weights, digests and
the number of updates are all read through it.

Besides tensors and plain values, checkpoints hold:

- `argparse.Namespace`, the options of the run: in every checkpoint before fairseq 0.10, in many since;
- the meters of a run, whole objects before fairseq 0.9, which nothing reads any more: they become a Namespace;
- NumPy numbers and arrays, which validation with `--eval-bleu` leaves among the metrics.

The module imports torch and NumPy alone, so that `tools/build_fairseq.py` can put it into fairseq, too.
"""

from __future__ import annotations

import argparse
import math
import pickletools
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from .zip_records import CheckpointError  # relative, to be found in fairseq, too

_STEP, _OBJECT, _ENTRY, _TENSOR = 48, 160, 100, 400
"""Bytes that count for an opcode, a list or tuple, an entry of a dictionary, and a tensor or its storage."""
_LARGEST_INT = 2**60
"""For keys: Python's hash of a number is its remainder by 2^61 - 1, so larger ones can be made to collide."""
_TUPLE_KEYS, _TUPLE_PARTS, _TUPLE_TEXT = 1000, 8, 200
"""How many tuples may be keys in one pickle, their parts, and the length of a string among these."""
_DIMENSIONS = 64
_NUMBERS = re.compile("[<>=|]?[biufc][0-9]{1,2}")


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of tensors; None for an outline without tensors."""

    content: torch.UntypedStorage | None
    dtype: torch.dtype


Loader = Callable[[str, int, int], torch.UntypedStorage | None]
"""Returns the storage of a key, for a number of elements and the bytes of one."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A type or function that a pickle may name; `call(unpickler, *arguments)` takes its place."""

    path: str
    call: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of a storage."""

    dtype: torch.dtype


class _DType:
    """Takes the place of `numpy.dtype`: a type of numbers, never one of objects, whose bytes would be pointers."""

    def __init__(self, code: str) -> None:
        if not _NUMBERS.fullmatch(code):
            raise ValueError(f"a NumPy array of type {code[:20]!r}, where only numbers are allowed")
        self.dtype = np.dtype(code)


class Unpickler:
    """Reads pickles, one after the other.

    Args:
        file: the open file, at the first one; `read` of more bytes than are left must not allocate them, so it is in
            memory or mapped.
        allowed: bytes that the values may take.
        load: returns storages.
    """

    def __init__(self, file: IO[bytes], allowed: int, load: Loader) -> None:
        self.file, self.allowed, self.left, self.load_storage = file, allowed, allowed, load
        self.tuple_keys, self.dtypes = 0, dict[str, torch.dtype]()

    def load(self) -> Any:
        """The next value.

        Raises:
            CheckpointError: if it is damaged, or holds anything that is not allowed.
        """
        # As in Python's unpickler: MARK puts the stack aside, and the memo holds values for later reference.
        self.stack, self.marks, self.memo = list[Any](), list[list[Any]](), list[Any]()
        file, read = self.file, self.file.read
        try:
            while (code := read(1)) != b".":
                if code not in _OPCODES:
                    raise ValueError(f"torch.save writes no opcode {_name_of(code)}" if code else "its end is missing")
                argument, act = _OPCODES[code]
                self.spend(_STEP)
                act(self, argument(file) if argument else None)
            if self.marks or len(self.stack) != 1:
                raise ValueError("it ends within a value")
        except CheckpointError:
            raise
        except Exception as error:  # its type depends on the place of the damage
            reason = " ".join((str(error) or type(error).__name__).split())[:200]
            raise CheckpointError(f"cannot be loaded; it is cut short, damaged or no checkpoint ({reason})") from None
        return self.stack.pop()

    def spend(self, size: int) -> None:
        """Counts memory, before it is taken."""
        self.left -= size
        if self.left < 0:
            raise CheckpointError(f"is refused: its values would take more than {self.allowed:,} bytes of memory")

    def pop(self) -> Any:
        return self.stack.pop()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_text(self, length: int) -> None:
        self.spend(_OBJECT + 4 * length)  # one character beyond 2^16 makes all of them 4 bytes long
        content = self.file.read(length)
        if len(content) < length:
            raise EOFError("a string is cut short")
        self.stack.append(str(content, "utf-8", "surrogatepass"))

    def push_new(self, value: list[Any] | dict[Any, Any]) -> None:
        self.spend(_OBJECT)
        self.stack.append(value)

    def mark(self, _: None) -> None:
        self.spend(_OBJECT)
        self.marks.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        values, self.stack = self.stack, self.marks.pop()
        return values

    def tuple(self, values: list[Any]) -> None:
        self.spend(_OBJECT + 8 * len(values))
        self.stack.append(tuple(values))

    def last(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        if len(values) < count:
            raise IndexError("a tuple without its values")
        del self.stack[-count:]
        return values

    def put(self, number: int) -> None:
        # Pickles number values from 0; a memo by any number would reserve as many places.
        if number != len(self.memo):
            raise ValueError(f"value {number} of the pickle is numbered out of turn")
        self.memo.append(self.stack[-1])

    def name(self, words: str) -> None:
        path = words.replace(" ", ".", 1)
        if path not in _NAMES:
            shown = path[:200] if path[:200].isprintable() else ascii(path[:200])
            raise CheckpointError(f"is refused: it asks for {shown}, which no checkpoint needs")
        self.stack.append(_NAMES[path])

    def call(self, _: None) -> None:
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, _Name) or type(arguments) is not tuple or len(arguments) > 9:
            raise ValueError("a call of something else than a name")
        self.stack.append(name.call(self, *arguments))

    def append(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError(f"values for {type(self.stack[-1]).__name__}, where a list must be")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise ValueError(f"entries for {type(target).__name__}, where a dictionary must be")
        self.spend(_ENTRY * len(values) // 2)  # keys and values take turns
        for key, value in zip(values[::2], values[1::2], strict=True):
            self.check_key(key)
            target[key] = value

    def check_key(self, key: Any, within: bool = False) -> None:
        """Raises an error for a key whose hash could be made to collide with others', or takes long to compute.

        Thousands of keys of one hash would make a dictionary quadratic in time.
        """
        if type(key) is tuple and not within and len(key) <= _TUPLE_PARTS and self.tuple_keys < _TUPLE_KEYS:
            self.tuple_keys += 1
            for part in key:
                self.check_key(part, within=True)
            return
        if key is None or type(key) is bool or (type(key) is int and abs(key) < _LARGEST_INT):
            return
        if type(key) is str and (not within or len(key) <= _TUPLE_TEXT):
            return
        raise CheckpointError(
            f"is refused: a key in it is a {type(key).__name__}; it must be a string, a whole number or a short tuple"
        )

    def build(self, _: None) -> None:
        state, target = self.pop(), self.stack[-1]
        if type(target) is argparse.Namespace and type(state) is dict and all(type(key) is str for key in state):
            self.spend(_ENTRY * len(state))
            vars(target).update(state)
        # The versions of modules, which torch notes beside a state_dict's weights.
        elif type(target) is OrderedDict and type(state) is dict and state.keys() == {"_metadata"}:
            vars(target).update(state)
        elif type(target) is _DType and state[1] in ("<", ">", "|", "="):
            target.dtype = target.dtype.newbyteorder(state[1])
        elif type(target) is np.ndarray:
            _fill(self, target, *state)
        else:
            raise ValueError(f"a state for {type(target).__name__}")

    def persistent(self, _: None) -> None:
        # ("storage", type, key, device, number of elements), and None for a view in the oldest format.
        word, kind, key, _location, numel, *view = self.pop()
        if word != "storage" or type(kind) is not _Kind or type(key) is not str or view not in ([], [None]):
            raise ValueError("a reference to something else than a storage")
        if type(numel) is not int or not 0 <= numel < 2**60:
            raise ValueError("a storage without a number of numbers")
        if self.dtypes.setdefault(key, kind.dtype) != kind.dtype:
            raise ValueError("a storage of numbers of two types")
        self.spend(_TENSOR)
        self.stack.append(Storage(self.load_storage(key, numel, kind.dtype.itemsize), kind.dtype))


def _name_of(code: bytes) -> str:
    """An opcode's name, or its byte."""
    return next((op.name for op in pickletools.opcodes if op.code.encode("latin-1") == code), repr(code))


def _proto(_: Unpickler, version: int) -> None:
    if version != 2:
        raise ValueError(f"torch.save writes no pickle protocol {version}")


def _constant(value: Any) -> Callable[[Unpickler, None], None]:
    return lambda unpickler, _: unpickler.push(value)


_ACTS: dict[str, Callable[[Unpickler, Any], None]] = {
    "PROTO": _proto,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), Unpickler.push),
    "BINUNICODE": Unpickler.push_text,
    "MARK": Unpickler.mark,
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": lambda unpickler, _: unpickler.push_new([]),
    "EMPTY_DICT": lambda unpickler, _: unpickler.push_new({}),
    "TUPLE": lambda unpickler, _: unpickler.tuple(unpickler.marked()),
    "TUPLE1": lambda unpickler, _: unpickler.tuple(unpickler.last(1)),
    "TUPLE2": lambda unpickler, _: unpickler.tuple(unpickler.last(2)),
    "TUPLE3": lambda unpickler, _: unpickler.tuple(unpickler.last(3)),
    "APPEND": lambda unpickler, _: unpickler.append(unpickler.last(1)),
    "APPENDS": lambda unpickler, _: unpickler.append(unpickler.marked()),
    "SETITEM": lambda unpickler, _: unpickler.set_items(unpickler.last(2)),
    "SETITEMS": lambda unpickler, _: unpickler.set_items(unpickler.marked()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Unpickler.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda unpickler, number: unpickler.push(unpickler.memo[number])),
    "GLOBAL": Unpickler.name,
    **dict.fromkeys(("REDUCE", "NEWOBJ"), Unpickler.call),
    "BUILD": Unpickler.build,
    "BINPERSID": Unpickler.persistent,
}
"""All opcodes but STOP that `torch.save` writes."""
_READERS = {op.name: op.arg.reader for op in pickletools.opcodes if op.arg} | {"BINUNICODE": pickletools.read_uint4}
_OPCODES = {
    op.code.encode("latin-1"): (_READERS.get(op.name), _ACTS[op.name]) for op in pickletools.opcodes if op.name in _ACTS
}


def _check_shape(shape: Any) -> None:
    """Raises an error unless a shape is a tuple of a few whole numbers; anything else is neither compared nor shown."""
    if type(shape) is not tuple or len(shape) > _DIMENSIONS:
        raise ValueError("a shape that is none")
    if not all(type(x) is int and -1 < x < _LARGEST_INT for x in shape):
        raise ValueError("a shape with a part that is no whole number, or below 0 or too large")


def _tensor(
    unpickler: Unpickler,
    storage: Storage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    _hooks: Any = None,
    dtype: torch.dtype | None = None,
    metadata: Any = None,
) -> torch.Tensor | None:
    """A tensor all of whose numbers lie within its storage."""
    if type(storage) is not Storage or type(requires_grad) is not bool or metadata:
        raise ValueError("a tensor without a storage, or a view as that of conjugates")
    _check_shape(size)
    _check_shape(stride)
    _check_shape((offset,))
    dtype = storage.dtype if dtype is None else dtype
    offset = 0 if 0 in size else offset  # an empty tensor may be anywhere
    # One more than the index of the last element: `set_` would enlarge a storage that is too small.
    last = 0 if 0 in size else 1 + offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    unpickler.spend(_TENSOR)
    if storage.content is None:
        return None
    if last * dtype.itemsize > len(storage.content) or math.prod(size) * dtype.itemsize >= _LARGEST_INT:
        raise CheckpointError(
            f"is refused: it has a tensor of shape {size}, for which its {len(storage.content):,} bytes are too few"
        )
    tensor = torch.empty(0, dtype=dtype).set_(storage.content, offset, size, stride)
    return tensor.requires_grad_(requires_grad)


def _tensor_v3(unpickler: Unpickler, *parts: Any) -> torch.Tensor | None:
    """As `_tensor`, of a type that has no storage of its own."""
    if len(parts) < 7 or type(parts[6]) is not torch.dtype:
        raise ValueError("a tensor without a type")
    return _tensor(unpickler, *parts)


def _tensor_v2(unpickler: Unpickler, *parts: Any) -> torch.Tensor | None:
    storage, offset, size, stride, requires_grad, hooks, *metadata = parts
    return _tensor(unpickler, storage, offset, size, stride, requires_grad, hooks, None, *metadata)


def _parameter(unpickler: Unpickler, data: Any, requires_grad: bool, _hooks: Any, _state: Any = None) -> Any:
    """A parameter, without its hooks and attributes."""
    unpickler.spend(_TENSOR)
    if data is not None and type(data) is not torch.Tensor:
        raise ValueError("a parameter without a tensor")
    return None if data is None else torch.nn.Parameter(data, requires_grad is True)


def _fill(
    unpickler: Unpickler, array: np.ndarray[Any, Any], _: Any, shape: Any, kind: Any, order: Any, data: Any
) -> None:
    if type(kind) is not _DType or type(data) is not bytes:
        raise ValueError("a NumPy array that does not consist of plain numbers")
    _check_shape(shape)
    if math.prod(shape) * kind.dtype.itemsize != len(data):
        raise ValueError(f"a NumPy array of shape {shape} with {len(data)} bytes")
    unpickler.spend(len(data))
    array.__setstate__((1, shape, kind.dtype, order is True, data))  # type: ignore[arg-type]


def _number(_: Unpickler, kind: _DType, data: bytes) -> Any:
    if type(kind) is not _DType or type(data) is not bytes:
        raise ValueError("a NumPy number without a type or bytes")
    return np.frombuffer(data, kind.dtype, count=1)[0].item()


def _array(unpickler: Unpickler, _kind: Any, _shape: Any, _code: Any) -> np.ndarray[Any, Any]:
    """An array that is filled later."""
    unpickler.spend(_TENSOR)
    return np.zeros(0)


def _dtype(unpickler: Unpickler, code: str, _align: Any = False, _copy: Any = True) -> _DType:
    unpickler.spend(_TENSOR)
    return _DType(code)


def _bytes(unpickler: Unpickler, text: str, _encoding: str) -> bytes:
    """The bytes of a string in latin-1, as a pickle of protocol 2 holds them."""
    if type(text) is not str:
        raise ValueError("bytes without a text")
    unpickler.spend(_OBJECT + len(text))
    return text.encode("latin-1")


def _size(unpickler: Unpickler, numbers: Any) -> torch.Size:
    _check_shape(numbers)
    unpickler.spend(_TENSOR)
    return torch.Size(numbers)


def _device(unpickler: Unpickler, kind: str, index: int | None = None) -> torch.device:
    if type(kind) is not str or (type(index) is not int and index is not None):
        raise ValueError("a device without a kind")
    unpickler.spend(_TENSOR)
    return torch.device(kind) if index is None else torch.device(kind, index)


def _set(unpickler: Unpickler, values: list[Any]) -> set[Any]:
    if type(values) is not list:
        raise ValueError("a set of something else than a list")
    unpickler.spend(_TENSOR + _ENTRY * len(values))
    for value in values:
        unpickler.check_key(value)
    return set(values)


def _namespace(unpickler: Unpickler) -> argparse.Namespace:
    unpickler.spend(_TENSOR)
    return argparse.Namespace()


def _ordered(unpickler: Unpickler) -> OrderedDict[Any, Any]:
    unpickler.spend(_TENSOR)
    return OrderedDict()


def _never(_: Unpickler, *arguments: Any) -> None:
    raise ValueError("a call of a type that is only named")


_DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_STORAGES = {
    "Half": torch.float16,
    **{"BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64},
    **{"Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64},
    **{"Byte": torch.uint8, "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
# NumPy 1 and 2 have two names for one module, and each writes its own into a checkpoint.
_MULTIARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "torch._utils._rebuild_tensor": lambda unpickler, *parts: _tensor(unpickler, *parts[:4]),
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    **{f"torch._utils._rebuild_parameter{end}": _parameter for end in ("", "_with_state")},
    "torch.Size": _size,
    "torch.device": _device,
    "builtins.set": _set,
    "__builtin__.set": _set,
    "_codecs.encode": _bytes,
    **dict.fromkeys(
        ("argparse.Namespace", *(f"fairseq.meters.{name}Meter" for name in ("Average", "Stopwatch", "Time"))),
        _namespace,
    ),
    **{f"{module}._reconstruct": _array for module in _MULTIARRAYS},
    **{f"{module}.scalar": _number for module in _MULTIARRAYS},
    "numpy.dtype": _dtype,
    "numpy.ndarray": _never,
}
_NAMES: dict[str, Any] = {
    **{path: _Name(path, call) for path, call in _CALLS.items()},
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
    **{f"torch.{name}Storage": _Kind(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _Kind(torch.uint8),
}
"""All types and functions that a pickle may name."""
