"""Softmax attention to the last few positions, and linear attention to all before them, in one sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.feature_maps import ReluMap
from fairseq_fastweights.mixers.linear_attention import LinearAttention
from fairseq_fastweights.mixers.local_attention import Blocks, in_blocks, last
from fairseq_fastweights.mixers.mixer import State, are_plain, beyond, option, project, within_documents
from fairseq_fastweights.mixers.projections import shared
from fairseq_fastweights.mixers.rotary_embedding import RotaryEmbedding, rotate
from fairseq_fastweights.mixers.update_rules import known_to_fail_when_carried
from fairseq_fastweights.ops import kernels
from fairseq_fastweights.ops.checks import without_autocast


class WindowSum(LinearAttention):
    """A window of softmax attention and linear attention behind it, with one denominator (LoLCATs; Zhang et al. 2024).

        a_tj = exp(s_tj - max_j s_tj),  s_tj = q_t k_j / sqrt(head_dim)      of the last `window` positions j
        S_t = sum_j v_j phi(k_j)^T,  z_t = sum_j phi(k_j)                    of the positions before these
        y_t = (g sum_j a_tj v_j + S_t phi(q_t)) / (g sum_j a_tj + z_t phi(q_t))
        out = W_out y                                                        g = exp(log_factor), one for each head

    For texts of at most `window` positions it is softmax attention. With `rotary_dim` queries and keys are rotated by
    their positions in their documents, also before the feature map. Padding takes no position.

    The state holds "keys" and "values", (batch, heads of keys, window, head_dim), the last at the end, "read",
    (batch,), the number of positions of the document so far, and "state", (batch, heads, feature_dim, head_dim + 1),
    S and z of the positions that have left the window.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given.
        window: number of positions that are compared by softmax, the current one included.
        feature_map: a key of `feature_maps.FEATURE_MAPS` without negative outputs; None for relu, which is learned.
        normalization: {"attention"} or, to divide the features of each query and key by their sum too, {"sum",
            "attention"}; None for the latter.
        bias: whether the projections have biases.
        rotary_dim, rotary_base, rotary_scaling: as in `SoftmaxAttention`.
        **options: the other arguments of `LinearAttention`, but for `source_dim` and `scale_read_out`.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> out, state = WindowSum(16, 2, window=4)(torch.randn(7, 3, 16))  # (time, batch, embed_dim)
        >>> {name: tuple(x.shape) for name, x in state.items()}
        {'keys': (3, 2, 4, 8), 'values': (3, 2, 4, 8), 'read': (3,), 'state': (3, 2, 8, 9)}
    """

    window: int = option(
        64, "number of positions that window-sum compares by softmax, the current one included", least=1
    )

    takes_attention = True
    takes_starts = True
    padding_last = True
    papers_map = "relu"
    papers_normalization = frozenset({"sum", "attention"})

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str | None = None,
        normalization: frozenset[str] | None = None,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        rotary_scaling: str = "",
        **options: Any,
    ) -> None:
        options = self.take_options(options)
        normalization = self.papers_normalization if normalization is None else frozenset(normalization)
        if normalization not in ({"attention"}, {"sum", "attention"}):
            text = ",".join(sorted(normalization)) or "none"
            raise InvalidInput(
                f"normalization is {text!r}; with window-sum it must be auto, attention, or sum,attention: the "
                "window and the linear attention have one denominator"
            )
        feature_map = feature_map or self.papers_map
        super().__init__(embed_dim, num_heads, feature_map=feature_map, normalization=normalization, **options)
        if not self.feature_map.positive:
            raise InvalidInput(
                f"feature_map is {feature_map!r}; with window-sum it must be a map without negative outputs: their "
                "sums are a part of the denominator"
            )
        if self.feature_map.key_dim != self.head_dim:
            raise InvalidInput(
                f"feature_dim is {self.feature_map.key_dim}; with window-sum and the feature map {feature_map} it must "
                f"be the head dim, {self.head_dim}: the window compares the same queries and keys"
            )
        if "sum" not in normalization:  # a scale of a query's features would not scale the window's part
            self._scales = "fixed"
        self.rotary = RotaryEmbedding(rotary_dim, rotary_base, rotary_scaling, self.head_dim)
        self.needs_positions = rotary_dim == 0
        self.log_factor = nn.Parameter(torch.zeros(num_heads))
        self.reset_parameters()

    def reset_special_parameters(self) -> None:
        """Sets the factor of the window to 1."""
        nn.init.zeros_(self.log_factor)

    def mix(
        self, text: Tensor, state: State | None, lengths: Tensor | None, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, State]:
        time = len(text)
        # (batch, heads, time, head_dim)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
            for part in project(text, [self.q_proj, self.k_proj, self.v_proj])
        )
        q, k = self.q_norm(q), self.k_norm(k)
        before = self._nothing(k, v) if state is None else state
        positions = torch.arange(time, device=text.device)[None]
        seen, read = within_documents(starts, positions, time if lengths is None else lengths, before["read"])
        # Angles of positions in the document; rotated queries and keys go through the feature map, too.
        turned = self.rotary.turns(seen[:, None], q.dtype) if self.rotary.dim else ()
        if time == 1 and lengths is None and state is not None and self._may_take_step(q, state):
            out, after = self._step(q, k, v, turned, seen, starts, state, in_place)
            return self._project_out(out, text), after | {"read": read}
        if turned:
            q, k = rotate(q, *turned), rotate(k, *turned)
        after = {"keys": last(before["keys"], k, lengths), "values": last(before["values"], v, lengths), "read": read}
        # The first steps of a text during which no position leaves the window.
        first = min(time, self.window) if state is None else 0
        # With gradients all parameters take part, as wrappers for several processes expect.
        if first == time and starts is None and not (time and torch.is_grad_enabled()):
            keys, values = shared(k, self.num_heads, 1), shared(v, self.num_heads, 1)
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
            return self._project_out(out.transpose(1, 2), text), after | {"state": before["state"]}
        if time == 1:  # the new state holds exactly the window of the one position
            ages = torch.arange(self.window - 1, -1, -1, device=text.device)
            blocks = Blocks(q, after["keys"], after["values"], (ages <= seen)[:, None], (len(q), 1, 1))
        else:
            past = before["keys"][:, :, 1:], before["values"][:, :, 1:]
            blocks = in_blocks(q, k, v, *past, seen.clamp(max=self.window - 1))
        # g sum_j a_tj v_j and g sum_j a_tj
        out, weight = self._window(blocks)
        # In documents shorter than the window nothing has left it yet: the state's places there are empty.
        staying = seen[:, first:] < self.window
        if lengths is not None:
            staying = staying | beyond(time, lengths).t()[:, first:]
        # Keys and values that leave the window are the ones that S and z take up.
        old_k, old_v = (_leaving(before[name], x)[:, :, first:] for name, x in (("keys", k), ("values", v)))
        begin = None if starts is None else starts[:, first:]
        # S_t phi(q_t) and, in the last column, z_t phi(q_t)
        recalled, memory = self._recall(q[:, :, first:], old_k, old_v, staying, before["state"], begin, in_place)
        recalled = recalled.transpose(1, 2)
        if first:
            recalled = F.pad(recalled, (0, 0, first, 0))
        y = (out + recalled[..., : self.head_dim]) / (weight + recalled[..., self.head_dim :])
        return self._project_out(y.transpose(1, 2), text), after | {"state": memory}

    def _may_take_step(self, q: Tensor, state: State) -> bool:
        # Keys of a text that was read under autocast are in half precision.
        learned = are_plain([self.feature_map], ReluMap) and state["keys"].dtype == q.dtype
        return learned and kernels.takes_step(self.backend, q)

    def _step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        turned: tuple[Tensor, ...],
        seen: Tensor,
        starts: Tensor | None,
        state: State,
        in_place: bool,
    ) -> tuple[Tensor, State]:
        """A decode step as one operator: the output, (batch, 1, heads, head_dim), and the state but for "read"."""
        after = {name: kernels.own_state(state[name], in_place) for name in ("keys", "values", "state")}
        phi: Any = self.feature_map
        cosines, sines = turned or (None, None)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        parameters = (x.contiguous() for x in (phi.weight, phi.bias, self.log_factor))
        how = "sum" in self.normalization, phi.sum_eps, starts
        out: Tensor = kernels.window_step_(q, k, v, cosines, sines, seen, *parameters, *how, *after.values())
        return out, after

    def _nothing(self, k: Tensor, v: Tensor) -> State:
        """The state before the first step."""
        batch, heads = k.shape[:2]
        dtype = ops.state_dtype(v.dtype)
        return {
            "keys": k.new_zeros(batch, heads, self.window, self.head_dim),
            "values": v.new_zeros(batch, heads, self.window, self.head_dim),
            "read": torch.zeros(batch, dtype=torch.long, device=k.device),
            "state": v.new_zeros(batch, self.num_heads, self.feature_map.output_dim, self.head_dim + 1, dtype=dtype),
        }

    def _window(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """The window's weighted values, (batch, heads, time, head_dim), and the sum of its weights, (..., 1).

        The largest weight is g, so that the sum never vanishes.
        """
        size, dim, heads = blocks.q.shape[2], self.head_dim, blocks.k.shape[1]
        precise = ops.state_dtype(blocks.q.dtype)
        with without_autocast(blocks.q):  # which would run products of matrices in half precision
            # Heads that share keys become queries of one head: (rows, heads of keys, sharing * size, dim).
            sharing = self.num_heads // heads
            queries = blocks.q.reshape(len(blocks.q), heads, sharing * size, dim).to(precise)
            scores = (queries * dim**-0.5) @ blocks.k.to(precise).transpose(2, 3)
            scores = scores.unflatten(2, (sharing, size))
            scores = scores.masked_fill(~blocks.visible[:, None, None], -torch.inf)
            # g a_tj = exp(s_tj - max_j s_tj + log g)
            largest = scores.amax(dim=-1, keepdim=True) - self.log_factor.to(precise).view(heads, -1, 1, 1)
            weights = (scores - largest).exp().flatten(2, 3)
            read = weights @ blocks.v.to(precise), weights.sum(-1, keepdim=True)
        out, weight = (blocks.join(x.unflatten(2, (sharing, size)).flatten(1, 2)) for x in read)
        return out, weight

    def _recall(
        self, q: Tensor, k: Tensor, v: Tensor, staying: Tensor, memory: Tensor, starts: Tensor | None, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Writes the positions that leave the window, unless `staying`, (batch, time), and reads at every step.

        Returns (batch, time, heads, head_dim + 1), sums of values and of ones, and the state.
        """
        q, k, v = (shared(x, self.num_heads, 1).transpose(1, 2) for x in (q, k, v))
        q, k, v = self._features(q, k, v)
        k = k.masked_fill(staying[..., None, None], 0)
        # A value of 1 beside the others: the last column of S is z.
        v = F.pad(v, (0, 1), value=1.0)
        return ops.RULES["sum"].for_layer(
            q, k, v, initial_state=memory, starts=starts, in_place=in_place, backend=self.backend
        )

    def settings(self) -> dict[str, Any]:
        """The settings that names and shapes of parameters do not show."""
        return {"window": self.window, **super().settings(), **self.rotary.settings()}

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training, or None."""
        return known_to_fail_when_carried("sum", self.normalization) or super().concern_when_carried()

    def extra_repr(self) -> str:
        return f"window={self.window}, {super().extra_repr()}"


def _leaving(past: Tensor, new: Tensor) -> Tensor:
    """The positions that leave the window at each step of `new`, (batch, heads, time, dim): as many as `past` has."""
    # Step t moves the window on by one: out comes the position `window` before it, of the state or of this call.
    time, window = new.shape[2], past.shape[2]
    return past[:, :, :time] if time <= window else torch.cat([past, new[:, :, : time - window]], dim=2)
