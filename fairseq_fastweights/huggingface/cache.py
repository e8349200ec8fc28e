"""The cache of a model: the states of its mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.mixer import State, keeps_rows


class LayerState:
    """The state of one layer's mixer, None before its first step, as a layer of `transformers.Cache`."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self.state: State | None = None

    @property
    def batch_size(self) -> int:
        """The number of rows of the state; -1 before the first step."""
        return -1 if self.state is None else next(iter(self.state.values())).shape[0]

    def get_max_length(self) -> int:
        """-1: there is no largest length."""
        return -1

    def apply(self, take: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor of the state by `take` of it, which selects rows."""
        if self.state is not None:
            self.state = {name: take(x) for name, x in self.state.items()}

    def bytes(self) -> int:
        """The size of the state in bytes."""
        return 0 if self.state is None else sum(x.numel() * x.element_size() for x in self.state.values())


class FastWeightCache(Cache):
    """The states of all layers' mixers: of linear attention, one matrix a head, whatever the length of the text.

    Only the state of softmax attention grows. A model makes a cache if it gets none and `use_cache` is set. It changes
    a cache in place and returns it; to continue twice from the same text, copy it first (`copy.deepcopy`).

    Args:
        num_layers: number of layers of the model.

    Attributes:
        read: (batch,), the place of the next token in the text of each row: the number of its tokens that were read,
            without padding; None before the first.

    Examples:
        >>> cache = FastWeightCache(2)
        >>> cache.get_seq_length(), cache.batch_size
        (0, -1)
    """

    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        check_number("num_layers", num_layers, 0, whole=True)
        super().__init__(layers=[LayerState() for _ in range(num_layers)])  # type: ignore[misc]
        self.read: Tensor | None = None
        self._length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that were read, with padding."""
        return self._length

    def advance(self, time: int, read: Tensor) -> None:
        """Adds `time` tokens, and sets the places of the rows' next tokens, (batch,)."""
        # With padding, as transformers counts; `read` counts each row's own tokens.
        self._length += time
        self.read = read

    def bytes(self) -> int:
        """The size of all states in bytes."""
        return sum(layer.bytes() for layer in self.layers)

    def reset(self) -> None:
        """Empties all states."""
        for layer in self.layers:
            layer.state = None
        self.read, self._length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects the rows `beam_idx`, for beam search."""
        check_whole("beam_idx", beam_idx, dims=1)
        # Most steps of greedy search keep the rows as they are: no copy is made.
        if self.read is not None and not keeps_rows(beam_idx, self.read.shape[0]):
            self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Selects the rows `indices`."""
        check_whole("indices", indices, dims=1)
        self._apply(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        check_number("repeats", repeats, 1, whole=True)
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a state cannot forget its last tokens."""
        raise InvalidInput("this cache cannot be cropped: a state keeps no tokens that could be taken out of it")

    def update(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Refused: there are no keys and values."""
        raise InvalidInput("this cache holds states of mixers, not keys and values; only a FastWeightModel can use it")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The length and offset of a mask over all tokens, those of this call included."""
        return self._length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no largest length."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """True if any token was read."""
        return self._length > 0

    def _apply(self, take: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.apply(take)
        if self.read is not None:
            self.read = take(self.read)


def check_whole(name: str, given: Any, dims: int) -> None:
    """Raises a `ValueError` unless this is a tensor of whole numbers with so many dimensions."""
    kind = f"of type {type(given).__name__}"
    if isinstance(given, Tensor):
        if given.dim() == dims and not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
            return
        kind = f"of shape {tuple(given.shape)} and dtype {given.dtype}"
    raise InvalidInput(f"{name} is {kind}; it must be a tensor of whole numbers with {dims} dimensions")


def check_kind(cache: Any, name: str = "past_key_values") -> FastWeightCache:
    """Returns the cache, or raises a `ValueError` if it is something else."""
    if not isinstance(cache, FastWeightCache):
        raise InvalidInput(f"{name} is a {type(cache).__name__}; it must be a FastWeightCache, or None")
    return cache


def check_cache(cache: Any, layers: int, rows: int) -> FastWeightCache:
    """Returns the cache, or raises a `ValueError` if it does not fit a model of so many layers and a batch of rows."""
    check_kind(cache)
    if len(cache.layers) != layers:
        raise InvalidInput(f"past_key_values has {len(cache.layers)} layers; the model has {layers}")
    if cache.batch_size not in (-1, rows):
        raise InvalidInput(f"past_key_values has {cache.batch_size} rows; the batch has {rows}")
    return cache
