"""Adaptive embeddings and softmax, in clusters of tokens (Baevski & Auli 2019), and sinusoidal positions.

They compute the same as fairseq's modules, with the same names and shapes of parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_fastweights.invalid_input import InvalidInput

_MOST = 10**9
"""The largest number of dimensions, as of `FastWeightConfig`."""


class AdaptiveInput(nn.Module):
    """Embeddings in clusters of ever rarer tokens, smaller by a factor from cluster to cluster.

    Args:
        vocab_size: number of vocabulary entries.
        padding_idx: the id of padding, whose embedding is zero.
        input_size: size of the first cluster's embeddings.
        factor: ratio of the sizes of successive clusters.
        hidden_size: size to which every cluster is projected.
        cutoffs: the first token id of each cluster after the first.

    Examples:
        >>> AdaptiveInput(40, 1, 8, 2, 16, [10, 20])(torch.tensor([[4, 15, 30]])).shape
        torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        vocab_size: int,
        padding_idx: int | None,
        input_size: int,
        factor: float,
        hidden_size: int,
        cutoffs: list[int],
    ) -> None:
        super().__init__()
        self.cutoff = _ends(cutoffs, vocab_size)
        self.embedding_dim = hidden_size
        self.padding_idx = padding_idx
        self.embeddings = nn.ModuleList()
        for cluster, (first, end) in enumerate(zip([0, *self.cutoff[:-1]], self.cutoff, strict=True)):
            size = _cluster_size("adaptive_input_factor", input_size, factor, cluster)
            embedding = nn.Embedding(end - first, size, padding_idx if cluster == 0 else None)
            self.embeddings.append(nn.Sequential(embedding, nn.Linear(size, hidden_size, bias=False)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings, (..., hidden_size), of tokens, (...)."""
        out = None
        for first, end, cluster in zip([0, *self.cutoff[:-1]], self.cutoff, self.embeddings, strict=True):
            # All tokens go through all clusters, as others': no shape depends on which tokens there are.
            own = (tokens >= first) & (tokens < end)
            embedded = cluster((tokens - first).clamp(0, end - first - 1))
            out = embedded if out is None else torch.where(own[..., None], embedded, out)
        assert out is not None
        return out


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of tokens in clusters: the first cluster also predicts the other clusters, with the rare types.

    Args:
        vocab_size: number of vocabulary entries.
        output_size: size of its input.
        cutoffs: the first token id of each cluster after the first.
        dropout: of the projections of clusters, in training.
        factor: ratio of the sizes of successive clusters.
        tied: sizes of the embeddings of all clusters, whose weights this shares; None for weights of its own.
        projections: whether the clusters after the first share the projections too.
        hidden_size: size to which embeddings are projected.

    Examples:
        >>> out = AdaptiveSoftmax(40, 16, [10, 20], factor=2)(torch.randn(2, 3, 16))
        >>> out.shape, torch.allclose(out.exp().sum(-1), torch.ones(2, 3))
        (torch.Size([2, 3, 40]), True)
    """

    def __init__(
        self,
        vocab_size: int,
        output_size: int,
        cutoffs: list[int],
        *,
        dropout: float = 0.0,
        factor: float = 4.0,
        tied: list[int] | None = None,
        projections: bool = False,
        hidden_size: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.cutoff = _ends(cutoffs, vocab_size)
        classes = len(self.cutoff) - 1
        self.dropout_module = nn.Dropout(dropout)
        self.head: nn.Module
        if tied is None:
            self.head = nn.Linear(output_size, self.cutoff[0] + classes, bias=False)
        else:
            self.head = _TiedHead(self.cutoff[0], tied[0], output_size, classes)
        self.tail = nn.ModuleList()
        for cluster, (first, end) in enumerate(zip(self.cutoff[:-1], self.cutoff[1:], strict=True), 1):
            project: nn.Module
            if tied is None:
                size = _cluster_size("adaptive_softmax_factor", output_size, factor, cluster)
                project = nn.Linear(output_size, size, bias=False)
            else:
                size = tied[cluster]
                project = _Transposed(hidden_size, size) if projections else nn.Linear(hidden_size, size, bias=False)
            self.tail.append(nn.Sequential(project, nn.Dropout(dropout), nn.Linear(size, end - first, bias=False)))

    def forward(self, features: Tensor) -> Tensor:
        """Returns log-probabilities, (..., vocab_size), for features, (..., output_size)."""
        features = self.dropout_module(features)
        # log p(token) = log p(cluster) + log p(token | cluster), Baevski & Auli 2019.
        head = self.head(features).log_softmax(-1)
        parts = [head[..., : self.cutoff[0]]]
        for i, cluster in enumerate(self.tail):
            prior = head[..., self.cutoff[0] + i, None]
            parts.append(cluster(features).log_softmax(-1) + prior)
        return torch.cat(parts, dim=-1)


class _Transposed(nn.Module):
    """x W, with the weight of a projection in the other direction."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_in, size_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


class _TiedHead(nn.Module):
    """The first cluster, with the weights of its embeddings, and a class for each other cluster."""

    def __init__(self, words: int, size: int, output_size: int, classes: int) -> None:
        super().__init__()
        words_proj = nn.Linear(size, words, bias=False)
        self.word_proj: nn.Module = words_proj
        if size != output_size:
            self.word_proj = nn.Sequential(nn.Linear(output_size, size, bias=False), words_proj)
        self.class_proj = nn.Linear(output_size, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.word_proj(x), self.class_proj(x)], dim=-1)


def tied_clusters(embeddings: AdaptiveInput, softmax: AdaptiveSoftmax, projections: bool) -> dict[str, str]:
    """The names of the softmax's weights that are weights of the embeddings, with their names there."""
    words = "head.word_proj.1.weight" if isinstance(softmax.head.word_proj, nn.Sequential) else "head.word_proj.weight"
    tied = {words: "embeddings.0.0.weight"}
    for i, cluster in enumerate(softmax.tail):
        tied[f"tail.{i}.2.weight"] = f"embeddings.{i + 1}.0.weight"
        if projections and hasattr(next(cluster.children()), "weight"):
            tied[f"tail.{i}.0.weight"] = f"embeddings.{i + 1}.1.weight"
    return tied


def sinusoidal_positions(places: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sines and then cosines, (..., dim), for places that count from 0, as in tensor2tensor and fairseq.

    fairseq's first position is 2, after the id of padding.
    """
    # Wavelengths rise from 2 pi to 10000 * 2 pi over the half of the dimensions.
    half = dim // 2
    rates = torch.exp(torch.arange(half, device=places.device, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = (places + 2).to(torch.float32)[..., None] * rates
    encoded = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return F.pad(encoded, (0, dim % 2)).to(dtype)


def _ends(cutoffs: list[int], vocab_size: int) -> list[int]:
    return [*cutoffs, vocab_size] if vocab_size > cutoffs[-1] else list(cutoffs)


def _cluster_size(name: str, size: int, factor: float, cluster: int) -> int:
    own = int(size // factor**cluster)
    if own < 1:
        raise InvalidInput(
            f"{name} is {factor:g}: of {size} dimensions it leaves none for cluster {cluster + 1}; it is too large"
        )
    if own > _MOST:
        raise InvalidInput(f"{name} is {factor:g}: it makes more than {_MOST} dimensions of {size}; it is too small")
    return own
