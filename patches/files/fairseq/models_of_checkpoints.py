"""Makes the models that checkpoints hold: no larger than their weights allow, and of weights that a model can have.

A checkpoint's settings describe its model. While the model is made, its tensors are counted, so that a file of a few
bytes cannot ask for gigabytes: not by a parameter, nor by a table of positions that no file holds, nor by a million
layers.
"""

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import integrity, model_sizes
from fairseq.invalid_input import InvalidInput
from fairseq.settings import literal
from fairseq.text_files import FileError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_TENSORS, _MORE_TENSORS = 100, 10_000
"""So many tensors may be made for each that the checkpoint holds, and so many more."""
_NO_SIZES = {"min_params_to_wrap", "seed"}
"""Whole numbers among a model's settings that make nothing larger."""
_NO_MODEL = (RuntimeError, RecursionError)
"""The RuntimeErrors that settings raise; others, of subclasses, are about the machine."""


_OF_SIZES = (MemoryError, OverflowError, RuntimeError, TypeError)
"""The errors that too large a size raises."""


class _TooLargeError(Exception):
    """A tensor of this shape is too large, or one too many."""

    def __init__(self, asked_for: str, shape: tuple[int, ...] = ()) -> None:
        super().__init__(asked_for)
        self.shape = shape


class _Limit(TorchDispatchMode):
    """Counts tensors that are made, and the bytes of those that are kept; stops before there are too many."""

    def __init__(self, most: int, most_tensors: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left, self.tensors_left, self.most_tensors = most, most_tensors, most_tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operators in place make no tensor.
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        for tensor in self._made(func, args, kwargs):
            if tensor.nbytes > self.left:
                shape = tuple(tensor.shape)
                raise _TooLargeError(f"a tensor of shape {shape}, {tensor.nbytes:,} bytes", shape)
        # Views share storage with an argument, and are not counted.
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = func(*args, **kwargs)
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._count(storage)
        return made

    def _made(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that a call would make, without numbers; none if that cannot be known."""
        args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        try:
            made = func(*args, **kwargs)
        except Exception:  # the call itself raises the error
            return []
        return [tensor for tensor in _tensors(made) if tensor.untyped_storage()._cdata not in given]

    def _count(self, storage: torch.UntypedStorage) -> None:
        self.tensors_left -= 1
        if self.tensors_left < 0:
            raise _TooLargeError(f"more than {self.most_tensors:,} tensors")
        self.left -= storage.nbytes()
        # A tensor that is freed no longer counts.
        weakref.finalize(storage, self._give_back, storage.nbytes())

    def _give_back(self, size: int) -> None:
        self.left += size


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.layout is torch.strided]


@contextmanager
def making_model(path: str, settings: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the model of a checkpoint is made.

    Args:
        path: the checkpoint.
        settings: those of its model.
        weights: its weights, to which the model's size is compared.

    Raises:
        FileError: if the settings ask for more than the weights could fill, or make no model; the message names the
            file and the setting.
    """
    tensors = _tensors(weights)
    size = sum(tensor.numel() for tensor in tensors) * torch.float32.itemsize
    numbers = _numbers(settings)
    for name, value in numbers.items():
        # A million layers would take hours before their tensors are too many.
        if "layers" in name and value > model_sizes.most_layers(len(tensors)):
            raise FileError(f"{path} is refused: {name} is {value}, and it has {len(tensors)} weights")
    try:
        with _Limit(model_sizes.most_bytes(size), _TENSORS * len(tensors) + _MORE_TENSORS):
            yield
    except _TooLargeError as error:
        likely = model_sizes.likely(numbers, error.shape)
        raise FileError(
            f"{path} is refused: {likely}, and it asks for {error}; its weights have {size:,} bytes in float32"
        ) from None
    except Exception as error:
        # Subclasses, such as torch.OutOfMemoryError, are about the machine.
        lacks = isinstance(error, RuntimeError) and type(error) not in _NO_MODEL
        if lacks or (isinstance(error, OSError) and error.filename is not None):
            raise
        reason = _line(error)
        if not isinstance(error, ValueError):
            reason = f"its settings make no model: {reason}"
        if isinstance(error, _OF_SIZES):
            reason += f"; {model_sizes.likely(numbers)}"
        raise FileError(f"{path}: {reason}") from error


def _numbers(settings: Any) -> dict[str, int]:
    """The whole numbers among settings, also in lists that are written as text, as fairseq has them."""
    names = settings if isinstance(settings, Mapping) else vars(settings)
    found: dict[str, int] = model_sizes.whole_numbers({name: _read(settings, name) for name in {*names} - _NO_SIZES})
    return found


def _read(settings: Any, name: str) -> Any:
    try:
        value = settings[name] if isinstance(settings, Mapping) else getattr(settings, name)
        return literal(value) if isinstance(value, str) and value.lstrip().startswith(("[", "(")) else value
    except Exception:  # a reference to nothing, or no literal: its user raises the error
        return None


def load_weights(model: Any, path: str, weights: dict[str, Tensor], strict: bool, settings: Any) -> None:
    """Loads the weights of a checkpoint into its model.

    Raises:
        FileError: if they do not fit it, or are no numbers; the message names the file and a weight.
    """
    if reason := integrity.why_no_numbers(weights):
        raise FileError(f"{path} is refused: {reason}")
    try:
        model.load_state_dict(weights, strict=strict, model_cfg=settings)
    except Exception as error:
        raise FileError(f"{path}: {_line(error)}") from error


def check_kinds(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raises an `InvalidInput` for a weight of another kind of number than the model's of that name."""
    own = model.state_dict()
    for name, weight in weights.items():
        if not isinstance(weight, Tensor):
            raise InvalidInput(f"weight {name} is of type {type(weight).__name__}; it must be a tensor")
        if name in own and own[name].is_floating_point() and not weight.is_floating_point() and weight.numel() > 1:
            kind = str(weight.dtype).removeprefix("torch.")
            raise InvalidInput(f"weight {name} is {kind}; it must be floating-point, as that of the model")


def check_score(path: str, loss: Any) -> None:
    """Raises a `FileError` for a loss that is not a number."""
    if math.isnan(loss):
        raise FileError(
            f"{path}: the loss is not a number (nan): an activation is too large for the type of the weights, as with "
            "--fp16, or the model computes with none"
        )


def _line(error: BaseException) -> str:
    """An error in one line of moderate length."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, (RuntimeError, ValueError)) else f"{type(error).__name__} {text}".strip())[:400]
