"""What a model keeps of the text that it has read: the states of its mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fairseq_fastweights.mixers.mixer import State, keeps_rows


class LayerState:
    """The state of one layer's mixer, None before its first step.

    It has what `transformers.Cache` asks of its layers.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self.state: State | None = None

    @property
    def batch_size(self) -> int:
        """How many rows the state has; -1 for none yet."""
        return -1 if self.state is None else next(iter(self.state.values())).shape[0]

    def get_max_length(self) -> int:
        """No text is too long for a state (-1)."""
        return -1

    def apply(self, take: Callable[[Tensor], Tensor]) -> None:
        """Takes other rows of the state."""
        if self.state is not None:
            self.state = {name: take(x) for name, x in self.state.items()}

    def bytes(self) -> int:
        """The size of the state."""
        return 0 if self.state is None else sum(x.numel() * x.element_size() for x in self.state.values())


class FastWeightCache(Cache):
    """The states of all layers' mixers: for a memory a matrix for each head, whose size does not depend on the text.

    Only softmax attention has a state that grows. A model that is given no cache makes one if `use_cache` is set; one
    that is given a cache changes it in place and returns it. To continue twice from the same text, copy the cache first
    (`copy.deepcopy`).

    Args:
        num_layers: how many layers the model has.

    Attributes:
        read: (batch,), how many tokens of each row were read, padding left out; None before the first.

    Examples:
        >>> cache = FastWeightCache(2)
        >>> cache.get_seq_length(), cache.batch_size
        (0, -1)
    """

    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[LayerState() for _ in range(num_layers)])  # type: ignore[misc]
        self.read: Tensor | None = None
        self._length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens were read, padding included."""
        return self._length

    def advance(self, time: int, read: Tensor) -> None:
        """Notes that so many tokens were read, and how many of each row in all, (batch,)."""
        self._length += time
        self.read = read

    def bytes(self) -> int:
        """The size of all states."""
        return sum(layer.bytes() for layer in self.layers)

    def reset(self) -> None:
        """Forgets what was read."""
        for layer in self.layers:
            layer.state = None
        self.read, self._length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the rows `beam_idx`, as beam search asks for."""
        if self.read is not None and not keeps_rows(beam_idx, self.read.shape[0]):
            self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Takes the rows `indices`."""
        self._apply(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Takes each row so many times."""
        self._apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a memory cannot forget its last tokens."""
        raise ValueError("this cache cannot be cropped: a memory keeps no tokens that could be taken out of it")

    def update(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Refused: there are no keys and values."""
        raise ValueError("this cache holds states of mixers, not keys and values; only a FastWeightModel can use it")

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of a mask over all that was read and is read now."""
        return self._length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No text is too long (-1)."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether something was read."""
        return self._length > 0

    def _apply(self, take: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.apply(take)
        if self.read is not None:
            self.read = take(self.read)


def check_cache(cache: Any, layers: int, rows: int) -> FastWeightCache:
    """`cache`, if it can go on with a batch of `rows` rows.

    Raises:
        ValueError: if it is of another class, or of another model or batch.
    """
    if not isinstance(cache, FastWeightCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}; it must be a FastWeightCache, or None")
    if len(cache.layers) != layers:
        raise ValueError(f"past_key_values has {len(cache.layers)} layers; the model has {layers}")
    if cache.batch_size not in (-1, rows):
        raise ValueError(f"past_key_values has {cache.batch_size} rows; the batch has {rows}")
    return cache


def count_tokens(
    cache: FastWeightCache | None, rows: int, padding: Tensor | None, time: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The places of tokens in their texts, padding left out, and how many tokens each text has after them.

    Args:
        cache: what was read before.
        rows, time: of the batch.
        padding: (rows, time), true at padding; None for none.
        device: of the result.

    Returns:
        (rows, time), or (1, time) where rows are alike, in which what stands at padding means nothing; and (rows,).
    """
    before = torch.zeros(rows, dtype=torch.long, device=device)
    if cache is not None and cache.read is not None:
        before = cache.read
    if padding is not None:
        places = (~padding).cumsum(dim=1) - 1
        return (before[:, None] + places).clamp(min=0), before + (~padding).sum(dim=1)
    return before[:, None] + torch.arange(time, device=device), before + time
