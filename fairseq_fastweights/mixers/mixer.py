"""What all mixers have in common: a sequence and a state go in, a sequence and a state come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
"""What a mixer keeps of what it has read.

Tensors by name, of which each has one row for each row of the batch, along its first dimension. A row of zeros (False)
in all of them is the state before the first step.
"""


@dataclass(frozen=True)
class Option:
    """A setting of one kind of mixer, which models offer as `--<mixer>-<name>`.

    Attributes:
        type: int, float, bool or str.
        default: what it is where nobody says.
        help: what it does, for `--help`.
    """

    type: type
    default: Any
    help: str


class Mixer(nn.Module):
    """A layer that mixes positions, each with those before it.

    Each kind of mixer is a subclass with its own `forward`, and with those of the attributes below that differ. A line
    in `registry.py` gives it a name.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: how many heads share it, a divisor of `embed_dim`.
        head_dim: size of each head; `num_heads` need not divide `embed_dim` then. 0 for embed_dim / num_heads.

    Raises:
        ValueError: naming the argument, what it was and what it may be.

    Attributes:
        options: the settings that no other kind has; arguments of the subclass by these names.
        carries: whether a state may be carried from one segment of a text to the next: whether its size is bounded.
        bounded: whether no text can be longer than the model was made for.
        takes_attention: whether its projections mean what those of softmax attention do, so that it can start at the
            weights of a trained one.
        beam_size: in generation, how many rows in a row may be hypotheses for the same source.
        needs_positions: whether it cannot tell the distances of earlier positions, so that models keep their positional
            embeddings.
        takes_starts: whether several documents may lie in a row: whether its `forward` takes `starts`.

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

    def __init__(self, embed_dim: int, num_heads: int = 1, head_dim: int = 0) -> None:
        super().__init__()
        if num_heads < 1 or (embed_dim % num_heads and not head_dim):
            raise ValueError(f"num_heads is {num_heads}; it must be a divisor of embed_dim, {embed_dim}")
        if head_dim < 0:
            raise ValueError(f"head_dim is {head_dim}; it must be positive, or 0 for embed_dim / num_heads")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim or embed_dim // num_heads

    def forward(
        self, x: Tensor, state: State | None = None, padding: Tensor | None = None, *, overwrite: bool = False
    ) -> tuple[Tensor, State]:
        """Mixes a text, or the next part of one. The result is the same all at once, in segments and step by step.

        Args:
            x: (time, batch, embed_dim), as torch's attention and recurrent layers have it.
            state: what the call for the part before returned; None at a text's beginning.
            padding: (batch, time), true where a position is padding, which no other position sees; None if none is.
            overwrite: whether the tensors of `state` may be reused, as in generation, which does not read them again.

        Mixers that say `takes_starts` also take `starts`, (batch, time): true where a document begins, which sees
        nothing of what is before it, `state` included. At padding it means nothing. None if none begins.

        Returns:
            (time, batch, embed_dim), whose values at padding have no meaning, and the state after the last step.
        """
        raise NotImplementedError

    def reorder(self, state: State, order: Tensor) -> State:
        """Takes rows of a state, as beam search asks for.

        Args:
            state: what a call returned.
            order: (rows,), the numbers of the rows to take, in their order.

        Returns:
            a state of these rows.
        """
        rows = next(iter(state.values())).shape[0]
        return state if keeps_rows(order, rows) else {name: x.index_select(0, order) for name, x in state.items()}

    def settings(self) -> dict[str, Any]:
        """What tells it from another of its kind whose parameters have the same names and shapes, for checkpoints."""
        return {name: getattr(self, name) for name in self.options}

    def reset_special_parameters(self) -> None:
        """Draws again those parameters that have initial values of their own, after a model drew all from one law."""

    def concern_when_carried(self) -> str | None:
        """Why training should not carry its states from segment to segment, for a warning, or None."""
        return None


def keeps_rows(new_order: Tensor, rows: int) -> bool:
    """Whether an order of rows is known to leave `rows` rows as they are, as mostly in greedy search.

    On a GPU it never is: to know it the CPU would have to wait, and the copy that it saves costs less there.
    """
    return (
        new_order.device.type == "cpu"
        and new_order.numel() == rows
        and torch.equal(new_order, torch.arange(rows, dtype=new_order.dtype))
    )
