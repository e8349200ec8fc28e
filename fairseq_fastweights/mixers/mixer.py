"""The base class of all mixers: modules from a sequence and a state to a sequence and a new state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.ops.elementwise import apply_gate

State = dict[str, Tensor]
"""The state of a mixer: tensors by name.

The first dimension of each tensor is the batch. A row of zeros (False) in all of them is the state before the first
step.
"""


@dataclass(frozen=True)
class Option:
    """A setting of one kind of mixer, which becomes the option `--<mixer>-<name>` of the models.

    Attributes:
        default: its default, an int, float, bool or str.
        help: its line in `--help`.
        like: settings of several kinds of mixers that this one replaces, besides the one of its own name.
        least: the smallest number allowed; None for no limit.
    """

    default: Any
    help: str
    like: tuple[str, ...] = ()
    least: float | None = None

    @property
    def type(self) -> type:
        """int, float, bool or str."""
        return type(self.default)


def option(default: Any, text: str, like: tuple[str, ...] = (), least: float | None = None) -> Any:
    """Declares an attribute of a mixer as an `Option`, and an argument of its class."""
    return Option(default, text, like, least)


KEY_SIZES, VALUE_SIZES = ("head_dim", "feature_dim"), ("head_dim",)
"""`Option.like` of the sizes that a kind gives to heads of keys and of values."""


class Mixer(nn.Module):
    """Base class of mixers, modules that mix each position with those before it.

    Each kind of mixer is a subclass with its own `mix`, and with those of the attributes below that differ. A line in
    `registry.py` gives it a name.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim`.
        head_dim: size of each head, with which `num_heads` need not divide `embed_dim`; 0 for embed_dim / num_heads.
        backend: one of `ops.BACKENDS`, for mixers whose recurrence has several implementations.
        batch_first: whether the input and the output are (batch, time, embed_dim), as in `torch.nn.MultiheadAttention`.
            Masks and states are the same with it.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Attributes:
        options: the settings of this kind alone, which are arguments of the subclass: its attributes that `option`
            declares, by name.
        unrecorded: those of them that checkpoints need not record, as names or shapes of parameters show them.
        carries: whether a state may be carried from one segment of a text to the next, as its size is bounded.
        bounded: whether texts have a largest length.
        takes_attention: whether its projections can start at those of a trained softmax attention.
        beam_size: in generation, the number of successive rows that may be hypotheses for the same source.
        needs_positions: whether it does not see how far away earlier positions are, so that models need positional
            embeddings.
        takes_starts: whether a row may hold several documents.
        padding_last: whether `mix` gets rows with all padding at their ends, and their lengths in place of a mask.
        reads_source: whether `padding` and the state are those of a source, which `mix` checks.

    Examples:
        >>> class Shift(Mixer):  # y_t = x_{t-1}
        ...     def mix(self, x, state, padding, starts, in_place):
        ...         before = torch.zeros_like(x[0]) if state is None else state["last"]
        ...         return torch.cat([before[None], x[:-1]]), {"last": x[-1]}
        >>> y, state = Shift(2)(torch.ones(3, 1, 2))
        >>> y.flatten(), state["last"].shape
        (tensor([0., 0., 1., 1., 1., 1.]), torch.Size([1, 2]))
        >>> y, state = Shift(2)(torch.zeros(1, 1, 2), state)  # the text goes on
        >>> y.flatten()
        tensor([1., 1.])
    """

    options: ClassVar[dict[str, Option]] = {}
    unrecorded: tuple[str, ...] = ()
    carries = True
    bounded = False
    needs_positions = False
    takes_attention = False
    takes_starts = False
    padding_last = False
    reads_source = False
    beam_size = 1

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        head_dim: int = 0,
        *,
        backend: str = "auto",
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        check_number("embed_dim", embed_dim, 1, whole=True)
        if num_heads < 1 or not head_dim:
            check_divisor("num_heads", num_heads, "embed_dim", embed_dim)
        check_number("head_dim", head_dim, 0, whole=True)
        if backend not in ops.BACKENDS:
            raise InvalidInput(f"backend is {backend!r}; it must be one of {', '.join(ops.BACKENDS)}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = head_dim or embed_dim // num_heads
        self.backend = backend
        self.batch_first = batch_first

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        own = {name: x for name, x in vars(cls).items() if isinstance(x, Option)}
        # An attribute of another kind ends an option of the base class.
        cls.options = {name: x for name, x in cls.options.items() if name not in vars(cls)} | own

    def take_options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Sets the attributes that are `options` to their values among `given`, or to their defaults.

        Returns:
            the others of `given`.

        Raises:
            ValueError: for a number that is not allowed.
        """
        for name, own in self.options.items():
            value = given.get(name, own.default)
            if own.type in (int, float):
                check_number(name, value, -math.inf if own.least is None else own.least, whole=own.type is int)
            setattr(self, name, value)
        return {name: x for name, x in given.items() if name not in self.options}

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        padding: Tensor | None = None,
        *,
        starts: Tensor | None = None,
        overwrite: bool = False,
        **others: Any,
    ) -> tuple[Tensor, State]:
        """Mixes a text, or the next part of one. The result is the same all at once, in segments and step by step.

        Args:
            x: (time, batch, embed_dim), the order of torch's attention and recurrent layers; (batch, time, embed_dim)
                with `batch_first`.
            state: the state that the call for the part before returned; None at the beginning of a text.
            padding: (batch, time), true at padding, which no other position sees; None for no padding.
            starts: (batch, time), true where a document begins, which sees nothing of the text before it, `state`
                included; only for mixers with `takes_starts`. Its values at padding are ignored. None if no document
                begins.
            overwrite: whether the tensors of `state` may be overwritten, as in generation.
            **others: arguments of one kind of mixer, as `source` of `FastWeightSourceAttention`.

        Returns:
            the output, of the shape of x, with undefined values at padding; and the state after the last step.

        Raises:
            ValueError: if x has another shape, `state` is no dict or that of another batch, or `padding` or `starts` is
                not a mask (batch, time).
        """
        if state is not None and not isinstance(state, dict):
            raise InvalidInput(f"state is a {type(state).__name__}; it must be None or the dict that a call returned")
        if x.dim() != 3 or x.shape[-1] != self.embed_dim:
            wanted = (
                "it must be (batch, time, embed_dim = " if self.batch_first else "it must be (time, batch, embed_dim = "
            )
            raise InvalidInput(f"x has shape {tuple(x.shape)}; {wanted}{self.embed_dim})")
        if self.batch_first:
            x = x.transpose(0, 1)
        if not self.reads_source:
            if padding is not None:
                check_mask("padding", padding, x, self)
            for name, part in (state or {}).items():
                if part.shape[0] != x.shape[1]:
                    raise InvalidInput(
                        f"state[{name!r}] has shape {tuple(part.shape)}; it must be the state of a batch of "
                        f"{x.shape[1]}, its first dimension{self.order_read(x)}"
                    )
        if starts is not None:
            if not self.takes_starts:
                raise InvalidInput("starts is given; it must be None: with this mixer a row holds one document")
            check_mask("starts", starts, x, self)
            starts = starts if padding is None else starts & ~padding
        # A backward pass reads the state as it was.
        in_place = overwrite and state is not None and not torch.is_grad_enabled()
        # One matrix of rows, so that each projection is one product.
        x = in_rows(x)
        if padding is None or not self.padding_last:
            out, state = self.mix(x, state, padding, starts, in_place, **others)
        else:
            # A stable sort moves padding behind each row's text, and zeros keep out NaN that may stand there.
            order = padding.t().long().argsort(dim=0, stable=True)[:, :, None]
            text = x.masked_fill(padding.t()[..., None], 0).gather(0, order.expand(x.shape))
            # Starts move with their tokens.
            starts = None if starts is None else starts.gather(1, order[:, :, 0].t())
            out, state = self.mix(text, state, (~padding).sum(1), starts, in_place, **others)
            out = out.new_empty(out.shape).scatter(0, order.expand(out.shape), out)
        return out.transpose(0, 1) if self.batch_first else out, state

    def mix(
        self, x: Tensor, state: State | None, padding: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        """Computes `forward` after its checks.

        Args:
            x: (time, batch, embed_dim), also with `batch_first`; rows of one matrix.
            state: that of `forward`.
            padding: that of `forward`; with `padding_last` the lengths of rows, (batch,), zeros behind which are
                padding. None for no padding.
            starts: (batch, time), false at padding; None if no document begins.
            in_place: whether the tensors of `state` may be changed; false without a state and where gradients are
                recorded.

        Returns:
            (time, batch, embed_dim), and the state after the last step.
        """
        raise NotImplementedError

    def order_read(self, x: Tensor) -> str:
        """The end of an error message about an argument that does not fit x, (time, batch, width)."""
        read = x.transpose(0, 1) if self.batch_first else x
        orders = (
            "read as (time, batch, embed_dim); if it is (batch, time, embed_dim), give the layer batch_first=True",
            "read as (batch, time, embed_dim); if it is (time, batch, embed_dim), give the layer batch_first=False",
        )
        return f": x has shape {tuple(read.shape)}, {orders[self.batch_first]}"

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
        return {name: getattr(self, name) for name in self.options if name not in self.unrecorded}

    def reset_special_parameters(self) -> None:
        """Draws parameters with initial values of their own again, after a model drew all from one distribution."""

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training, or None."""
        return None


def check_divisor(name: str, value: int, of: str, size: int, *, or_zero: bool = False) -> None:
    """Raises `InvalidInput` unless `value`, that of the setting `name`, divides `size`, that of the setting `of`."""
    if (value or not or_zero) and (value < 1 or size % value):
        default = ", or 0 for all" if or_zero else ""
        raise InvalidInput(f"{name} is {value}; it must be a divisor of {of}, {size}{default}")


def keeps_rows(new_order: Tensor, rows: int) -> bool:
    """True if `new_order` is known to keep `rows` rows as they are, as in most steps of greedy search.

    False for tensors on a GPU: to know it the CPU would have to wait for the GPU, which costs more than the copy.
    """
    return (
        new_order.device.type == "cpu"
        and new_order.numel() == rows
        and torch.equal(new_order, torch.arange(rows, dtype=new_order.dtype))
    )


def check_mask(name: str, mask: Tensor, x: Tensor, layer: Mixer | None = None) -> None:
    """Checks the mask `name` for x of (time, batch, ...), the input of `layer` or, without one, of a model.

    Raises:
        ValueError: if it is not a bool tensor (batch, time).
    """
    shape = x.shape[1], x.shape[0]
    if mask.shape != shape or mask.dtype != torch.bool:
        raise InvalidInput(
            f"{name} has shape {tuple(mask.shape)} and dtype {mask.dtype}; it must be {shape}, (batch, time), of "
            f"torch.bool{'' if layer is None else layer.order_read(x)}"
        )


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
    # Where each position's document began, counted from the row's beginning: the last start so far, by `cummax`. A
    # document that continues began `before` positions ahead of the row.
    first = positions.new_zeros(len(starts), 1) - column
    began = torch.cat([first, torch.where(starts, positions, first)], dim=1).cummax(dim=1)[0]
    return positions - began[:, 1:], length - began[:, -1]


def beyond(time: int, lengths: Tensor) -> Tensor:
    """A mask (time, batch), true after the end of rows of these lengths, (batch,)."""
    return torch.arange(time, device=lengths.device)[:, None] >= lengths


def in_rows(x: Tensor) -> Tensor:
    """`x`, (time, batch, width), as one matrix of rows that follow one another; a copy only if it is none.

    torch multiplies any other layout, as that of a transposed tensor, with frozen weights as one small matrix for each
    step.
    """
    of_time, of_batch, _ = x.stride()
    return x if of_time == x.shape[1] * of_batch else x.flatten(0, 1).contiguous().view(x.shape)


def project(x: Tensor, modules: Sequence[Any], together: int = 1) -> list[Tensor]:
    """The outputs of some linear modules for x, (..., width); of the first `together` ones in one tensor.

    In training it is one product of matrices instead of several, and so backwards. The joined weights are a copy, which
    pays where x has more rows than columns. Modules that may do more than multiply stay alone.
    """
    if modules[0].training and x.shape[:-1].numel() >= x.shape[-1] and are_plain(modules):
        weights, all_biases, sizes = zip(*[(x.weight, x.bias, x.out_features) for x in modules], strict=True)
        biases = [bias for bias in all_biases if bias is not None]
        if len(biases) in (0, len(modules)):
            # A matrix, as torch multiplies tensors of more dimensions in one way with gradients and in another without.
            rows = x.reshape(-1, x.shape[-1])
            projected = F.linear(rows, torch.cat(weights), torch.cat(biases) if biases else None)
            sizes = sum(sizes[:together]), *sizes[together:]
            return list(projected.unflatten(0, x.shape[:-1]).split(sizes, dim=-1))
    parts = [module(x) for module in modules]
    return [torch.cat(parts[:together], dim=-1), *parts[together:]] if together > 1 else parts


def are_plain(modules: Sequence[Any], kind: type[nn.Module] = nn.Linear) -> bool:
    """True if modules compute with the parameters that they show as their class `kind` does.

    Only of such modules may a fused operation read the parameters; others have to be called. Hooks may bring weights
    for the length of a call, as accelerate's do where weights are offloaded, or change the output; modules of other
    classes, as of adapters, quantization and parametrizations, may compute something else.
    """
    for module in modules:
        own = vars(module)
        if (
            type(module) is not kind
            or "forward" in own
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return False
    return True


def gated_norm(
    norm: Any,
    y: Tensor,
    logits: Tensor,
    activation: str,
    *,
    eps: float,
    dtype: torch.dtype,
    backend: str,
    size: int = 1,
) -> Tensor:
    """activation(logits) * norm(y / sqrt(size)), with the heads of y, (..., heads, dim), side by side.

    Args:
        norm: an RMS norm of each head, which adds `eps` under its root.
        y: (..., heads, dim).
        logits: (..., heads * dim).
        activation, eps, dtype, backend: as of `ops.elementwise.gate`.
        size: the divisor of squares of y.
    """
    if are_plain([norm], nn.RMSNorm):
        # The norm of y / sqrt(size) is that of y with `size` times the epsilon: the division costs nothing.
        eps = eps * size
        return apply_gate(logits, activation, None, None, y, norm.weight, "rms", eps, 1.0, dtype, backend)
    y = norm(y if size == 1 else y * size**-0.5).flatten(-2)
    return apply_gate(logits, activation, y=y, dtype=dtype, backend=backend)
