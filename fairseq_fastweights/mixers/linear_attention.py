"""The base class of linear attention: projections, feature map and normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.feature_maps import Scales, build_feature_map, is_favor
from fairseq_fastweights.mixers.mixer import in_rows, project
from fairseq_fastweights.mixers.projections import Attention, shared

SMALLEST_DIVISOR = 1e-30
"""Attention normalisation treats smaller sums as 0; above it, gradients stay within float32's range."""


class LinearAttention(Attention):
    """Base class of linear attention: its projections, feature map and normalisation.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: number of heads, a divisor of `embed_dim` unless `head_dim` is given. Values have head_dim numbers.
        feature_map: a key of `feature_maps.FEATURE_MAPS`.
        source_dim: width of the input of keys and values; None for `embed_dim`.
        feature_dim: size m of queries and keys after the feature map; the state is m x head_dim. None for the map's
            default.
        dpfp_nu: nu of the map "dpfp".
        favor_features: number of random features of the maps "favor" and "favor-schlag"; None for their default.
        normalization: a set of some of "sum", "attention" and "removal".
        bias: whether the projections have biases. Those of gates that decay the state always have.
        scale_read_out: whether the output is multiplied by 1 / sqrt(head_dim).
        dropout: probability of dropout before the output projection; there are no attention weights.
        **shape: `backend` and `batch_first`, and `kv_heads`, `head_dim`, `projection_bias` and `query_key_norm_eps`,
            which `Projections` describes. Each head of queries has a state of its own, also if heads share keys and
            values.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed values.

    Examples:
        >>> from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
        >>> layer = FastWeightAttention(16, 2, feature_map="dpfp", dpfp_nu=2)  # one of its subclasses
        >>> layer.feature_map
        DpfpMap(key_dim=8, output_dim=32)
    """

    # The feature map of a subclass's paper.
    papers_map = "identity"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: str,
        source_dim: int | None = None,
        feature_dim: int | None = None,
        dpfp_nu: int = 1,
        favor_features: int | None = None,
        normalization: frozenset[str] = frozenset(),
        bias: bool = True,
        scale_read_out: bool = False,
        dropout: float = 0.0,
        **shape: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout, **shape)
        self.source_dim = embed_dim if source_dim is None else source_dim
        self.normalization = normalization
        self.feature_map_name = feature_map
        self.feature_map = build_feature_map(
            feature_map,
            num_heads=num_heads,
            head_dim=self.head_dim,
            feature_dim=feature_dim,
            dpfp_nu=dpfp_nu,
            favor_features=favor_features,
        )
        if "removal" in normalization and not self.feature_map.positive:
            raise InvalidInput(
                f"normalization holds 'removal' and feature_map is {feature_map!r}; it must be a map without negative "
                "outputs: the removed value is divided by a sum of them"
            )
        # Normalisers grow with time, their inverses shrink, and exp() of FAVOR+'s exponents is large unless sum
        # normalisation takes it back: float16 has not the range for them.
        self.needs_float32_range = bool(normalization & {"attention", "removal"}) or (
            is_favor(feature_map) and "sum" not in normalization
        )
        # A normalisation divides out a factor of each vector (sum), or of each query (attention).
        self._scales: Scales = "fixed"
        if "sum" in normalization:
            self._scales = "all"
        elif "attention" in normalization:
            self._scales = "queries"
        self.scale = self.head_dim**-0.5 if scale_read_out else 1.0
        self._make_projections(bias, self.feature_map.key_dim, self.source_dim)
        # Whether queries and keys can be mapped in one tensor: as many heads, without norms between.
        grouped = self.k_proj.out_features < self.q_proj.out_features
        alike = self.feature_map.are_alike(self._scales)
        self._in_one = alike and not grouped and isinstance(self.q_norm, nn.Identity)

    def _inputs(self, x: Tensor, *gates: nn.Module) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Projects x, (time, batch, embed_dim), to features of queries and keys, values, and logits of gates."""
        dim, modules = self.feature_map.key_dim, [self.q_proj, self.k_proj, self.v_proj, *gates]
        if not self._in_one:
            q, k, v, *logits = project(x, modules)
            q, k = self.q_norm(self._heads(q, dim)), self.k_norm(self._heads(k, dim))
            return *self._features(q, k, self._heads(v, self.head_dim)), logits
        # One matrix product for q and k, whose heads the map takes side by side: (batch, time, 2 heads, dim).
        both, v, *logits = project(x, modules, together=2)
        v = self._in_float32_range(self._heads(v, self.head_dim))
        heads = both.unflatten(-1, (-1, dim)).transpose(0, 1)
        both, _ = self.feature_map(heads, None, scales=self._scales, **self._mapping(v))
        q, k = both.chunk(2, dim=2)
        return q, k, v, logits

    def _features(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps and normalises queries and keys, and converts all three to a dtype with a large enough range."""
        v = self._in_float32_range(v)
        q, k = self.feature_map(q, k, scales=self._scales, **self._mapping(v))
        return q, k, v

    def _mapping(self, v: Tensor) -> dict[str, Any]:
        return {"normalize": "sum" in self.normalization, "dtype": v.dtype, "backend": self.backend}

    def _in_float32_range(self, v: Tensor) -> Tensor:
        return v.float() if v.dtype == torch.float16 and self.needs_float32_range else v

    def _divide(self, out: Tensor, z_q: Tensor) -> Tensor:
        divisor = z_q + self.feature_map.sum_eps
        # Before the first key that is not padding there is nothing to read and nothing to divide by. Nor is there
        # where FAVOR+ of all keys has as good as vanished: gradients through the quotient would overflow.
        return out / divisor.masked_fill(divisor.abs() < SMALLEST_DIVISOR, 1)

    def _project_out(self, out: Tensor, query: Tensor) -> Tensor:
        """Projects (batch, time, heads, head_dim) to the layer's output, (time, batch, embed_dim)."""
        time, batch, _ = query.shape
        # From the dtype of states back to that of the layer.
        out = out.to(query.dtype)
        out = self.dropout_module(out if self.scale == 1 else out * self.scale)
        return self.out_proj(in_rows(out.transpose(0, 1).reshape(time, batch, self.num_heads * self.head_dim)))

    def _heads(self, x: Tensor, dim: int) -> Tensor:
        """Reshapes (time, batch, heads * dim) to (batch, time, num_heads, dim); copies only if heads are shared."""
        # Grouped heads are repeated here: each head of queries has a feature map and a state of its own.
        x = x.unflatten(-1, (-1, dim)).transpose(0, 1)
        return x if x.shape[2] == self.num_heads else shared(x, self.num_heads, 2)

    def settings(self) -> dict[str, Any]:
        """The settings that names and shapes of parameters do not show, and the sizes of the features."""
        return {
            "feature map": self.feature_map_name,
            "feature dim": self.feature_map.output_dim,
            "normalization": self._normalization_text(),
            "read-out scale": self.scale,
        }

    def concern_when_carried(self) -> str | None:
        """Returns a reason not to carry states from segment to segment in training, or None."""
        if is_favor(self.feature_map_name):
            return (
                "FAVOR+ draws new features for every training batch, so that a carried state is read with other "
                "features than it was written with"
            )
        return None

    def _normalization_text(self) -> str:
        return ",".join(sorted(self.normalization)) or "none"

    def extra_repr(self) -> str:
        return f"normalization={self._normalization_text()}, heads={self.num_heads}"
