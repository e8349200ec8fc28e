"""The base class of all mixers: modules from a sequence and a state to a sequence and a new state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput, check_number

State = dict[str, Tensor]
"""The state of a mixer: tensors by name.

The first dimension of each tensor is the batch. A row of zeros (False) in all of them is the state before the first
step.
"""


@dataclass(frozen=True)
class Option:
    """A setting of one kind of mixer, which becomes the option `--<mixer>-<name>` of the models.

    Attributes:
        type: int, float, bool or str.
        default: its default.
        help: its line in `--help`.
        like: the settings of several kinds of mixers in whose place this kind has it, beside one of its own name.
    """

    type: type
    default: Any
    help: str
    like: tuple[str, ...] = ()


KEY_SIZES, VALUE_SIZES = ("head_dim", "feature_dim"), ("head_dim",)
"""`Option.like` of the sizes that a kind gives to heads of keys and of values."""


class Mixer(nn.Module):
    """Base class of mixers, modules that mix each position with those before it.

    Each kind of mixer is a subclass with its own `forward`, and with those of the attributes below that differ. A line
    in `registry.py` gives it a name.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        head_dim: size of each head, with which `num_heads` need not divide `embed_dim`; 0 for embed_dim / num_heads.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and what is allowed.

    Attributes:
        options: the settings of this kind alone, which are arguments of the subclass.
        carries: whether a state may be carried from one segment of a text to the next, as its size is bounded.
        bounded: whether texts have a largest length.
        takes_attention: whether its projections can start at those of a trained softmax attention.
        beam_size: in generation, the number of successive rows that may be hypotheses for the same source.
        needs_positions: whether it does not see how far away earlier positions are, so that models need positional
            embeddings.
        takes_starts: whether a row may hold several documents; its `forward` then takes `starts`.

    Examples:
        >>> class Shift(Mixer):  # y_t = x_{t-1}
        ...     def forward(self, x, state=None, padding=None, *, overwrite=False):
        ...         before = torch.zeros_like(x[0]) if state is None else state["last"]
        ...         return torch.cat([before[None], x[:-1]]), {"last": x[-1]}
        >>> y, state = Shift(2)(torch.ones(3, 1, 2))
        >>> y.flatten(), state["last"].shape
        (tensor([0., 0., 1., 1., 1., 1.]), torch.Size([1, 2]))
    """

    options: ClassVar[dict[str, Option]] = {}
    carries = True
    bounded = False
    needs_positions = False
    takes_attention = False
    takes_starts = False
    beam_size = 1

    def __init_subclass__(cls) -> None:
        if "forward" in cls.__dict__:
            cls.forward = _checked(cls.forward)  # type: ignore[method-assign]

    def __init__(self, embed_dim: int, num_heads: int = 1, head_dim: int = 0) -> None:
        super().__init__()
        check_number("embed_dim", embed_dim, 1, whole=True)
        if num_heads < 1 or not head_dim:
            check_divisor("num_heads", num_heads, "embed_dim", embed_dim)
        check_number("head_dim", head_dim, 0, whole=True)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim or embed_dim // num_heads

    def forward(
        self, x: Tensor, state: State | None = None, padding: Tensor | None = None, *, overwrite: bool = False
    ) -> tuple[Tensor, State]:
        """Mixes a text, or the next part of one. The result is the same all at once, in segments and step by step.

        Args:
            x: (time, batch, embed_dim), the order of torch's attention and recurrent layers.
            state: the state that the call for the part before returned; None at the beginning of a text.
            padding: (batch, time), true at padding, which no other position sees; None for no padding.
            overwrite: whether the tensors of `state` may be overwritten, as in generation.

        Mixers with `takes_starts` also take `starts`, (batch, time): true where a document begins, which sees nothing
        of what is before it, `state` included. Its values at padding are ignored. None if no document begins.

        Returns:
            (time, batch, embed_dim), with undefined values at padding, and the state after the last step.
        """
        raise NotImplementedError

    def reorder(self, state: State, order: Tensor) -> State:
        """Selects rows of a state, for beam search.

        Args:
            state: a state that `forward` returned.
            order: (rows,), the indices of the rows.

        Returns:
            a state of these rows, in this order.
        """
        rows = next(iter(state.values())).shape[0]
        return state if keeps_rows(order, rows) else {name: x.index_select(0, order) for name, x in state.items()}

    def settings(self) -> dict[str, Any]:
        """The settings that names and shapes of parameters do not show, which checkpoints record."""
        return {name: getattr(self, name) for name in self.options}

    def reset_special_parameters(self) -> None:
        """Draws parameters with initial values of their own again, after a model drew all from one distribution."""

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training, or None."""
        return None


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a `forward` refuse an input of another shape, or a state that is none, by name.

    The input is made a matrix of rows, so that each projection is one product.
    """

    @wraps(forward)
    def checked(self: Mixer, x: Tensor, state: State | None = None, *others: Any, **named: Any) -> Any:
        if state is not None and not isinstance(state, dict):
            raise InvalidInput(f"state is a {type(state).__name__}; it must be None or the dict that a call returned")
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            raise InvalidInput(f"x has shape {tuple(x.shape)}; it must be (time, batch, embed_dim = {self.embed_dim})")
        return forward(self, in_rows(x), state, *others, **named)

    return checked


def check_divisor(name: str, value: int, of: str, size: int) -> None:
    """Raises `InvalidInput` unless `value`, that of the setting `name`, divides `size`, that of the setting `of`."""
    if value < 1 or size % value:
        raise InvalidInput(f"{name} is {value}; it must be a divisor of {of}, {size}")


def keeps_rows(new_order: Tensor, rows: int) -> bool:
    """True if `new_order` is known to keep `rows` rows as they are, as in most steps of greedy search.

    False for tensors on a GPU: to know it the CPU would have to wait for the GPU, which costs more than the copy.
    """
    return (
        new_order.device.type == "cpu"
        and new_order.numel() == rows
        and torch.equal(new_order, torch.arange(rows, dtype=new_order.dtype))
    )


def check_starts(starts: Tensor | None, x: Tensor, padding: Tensor | None) -> Tensor | None:
    """Checks `starts`, the argument of a mixer's `forward`, and clears it at padding.

    Raises:
        ValueError: if it is not a bool tensor (batch, time), for x of (time, batch, ...).
    """
    if starts is None:
        return None
    shape = x.shape[1], x.shape[0]
    if starts.shape != shape or starts.dtype != torch.bool:
        raise InvalidInput(
            f"starts has shape {tuple(starts.shape)} and dtype {starts.dtype}; it must be {shape}, (batch, time), of "
            "torch.bool"
        )
    return starts if padding is None else starts & ~padding


def within_documents(starts: Tensor | None, positions: Tensor, length: Any, before: Any) -> tuple[Tensor, Any]:
    """Counts positions from the beginning of each document.

    Args:
        starts: (batch, time), true where a document begins; None for nowhere.
        positions: (batch, time), the number of positions before each in its row; one row if all rows are alike.
        length: (batch,), the number of positions of each row; a number if all rows are alike.
        before: (batch,), the number of positions, in earlier calls, of the document that continues; or one number.

    Returns:
        the number of positions before each in its document, (batch, time) or one row, and the number of positions of
        the last document so far, (batch,) or one number.
    """
    column = before[:, None] if isinstance(before, Tensor) else before
    if starts is None:
        return positions + column, length + before
    # Where each position's document began, counted from the row's beginning.
    first = positions.new_zeros(len(starts), 1) - column
    began = torch.cat([first, torch.where(starts, positions, first)], dim=1).cummax(dim=1)[0]
    return positions - began[:, 1:], length - began[:, -1]


class MovesPadding(Mixer):
    """Base class of mixers that compute rows with padding at their ends alone, where it takes no position."""

    takes_starts = True

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        padding: Tensor | None = None,
        *,
        starts: Tensor | None = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, State]:
        """Mixes rows whose padding is moved to their ends and set to 0; shapes and results as of `Mixer.forward`."""
        starts = check_starts(starts, x, padding)
        if padding is None:
            return self._mix(x, None, starts, state, overwrite)
        text, order = to_the_end(x.masked_fill(padding.t()[..., None], 0), padding)
        starts = None if starts is None else rows_to_the_end(starts, order)
        out, state = self._mix(text, (~padding).sum(1), starts, state, overwrite)
        return put_back(out, order), state

    def _mix(
        self, text: Tensor, lengths: Tensor | None, starts: Tensor | None, state: State | None, overwrite: bool
    ) -> tuple[Tensor, State]:
        """Computes rows of these lengths, (batch,), with padding at their ends; None for rows without padding."""
        raise NotImplementedError


def beyond(time: int, lengths: Tensor) -> Tensor:
    """A mask (time, batch), true after the end of rows of these lengths, (batch,)."""
    return torch.arange(time, device=lengths.device)[:, None] >= lengths


def to_the_end(x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the positions of x, (time, batch, dim), that are not padding to the front; also returns the order.

    `padding`, (batch, time), is true where a position is padding.
    """
    order = padding.t().long().argsort(dim=0, stable=True)[:, :, None]
    return x.gather(0, order.expand(x.shape)), order


def rows_to_the_end(x: Tensor, order: Tensor) -> Tensor:
    """Puts x, (batch, time), in the order that `to_the_end` returned."""
    return x.gather(1, order[:, :, 0].t())


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """Undoes `to_the_end`."""
    return x.new_empty(x.shape).scatter(0, order.expand(x.shape), x)


def in_rows(x: Tensor) -> Tensor:
    """`x`, (time, batch, width), as one matrix of rows that follow one another; a copy only if it is none.

    torch multiplies any other layout, as that of a transposed tensor, with frozen weights as one small matrix for each
    step.
    """
    of_time, of_batch, _ = x.stride()
    return x if of_time == x.shape[1] * of_batch else x.flatten(0, 1).contiguous().view(x.shape)
