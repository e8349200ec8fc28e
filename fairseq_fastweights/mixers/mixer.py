"""The base class of all mixers: modules from a sequence and a state to a sequence and a new state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.mixers.children import in_rows

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
        if num_heads < 1 or (embed_dim % num_heads and not head_dim):
            raise InvalidInput(f"num_heads is {num_heads}; it must be a divisor of embed_dim, {embed_dim}")
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


def keeps_rows(new_order: Tensor, rows: int) -> bool:
    """True if `new_order` is known to keep `rows` rows as they are, as in most steps of greedy search.

    False for tensors on a GPU: to know it the CPU would have to wait for the GPU, which costs more than the copy.
    """
    return (
        new_order.device.type == "cpu"
        and new_order.numel() == rows
        and torch.equal(new_order, torch.arange(rows, dtype=new_order.dtype))
    )
