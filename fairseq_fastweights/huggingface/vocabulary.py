"""Embeddings and output layers in bands of word types (Baevski & Auli 2019), and what stands for positions.

fairseq's, without fairseq: parameters have the names and shapes that they have there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AdaptiveInput(nn.Module):
    """Embeddings whose size gets smaller by a factor from band to band of ever rarer word types.

    Args:
        vocab_size: how many word types there are.
        padding_idx: the number of padding, whose embedding is zero.
        input_size: size of the first band's embeddings.
        factor: by which the size of a band is smaller than that of the band before.
        hidden_size: to which every band is projected.
        cutoffs: the first word type of each band after the first.

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
        self.cutoff = _bands(cutoffs, vocab_size)
        self.embedding_dim = hidden_size
        self.padding_idx = padding_idx
        self.embeddings = nn.ModuleList()
        for band, (first, end) in enumerate(zip([0, *self.cutoff[:-1]], self.cutoff, strict=True)):
            size = _band_size("adaptive_input_factor", input_size, factor, band)
            embedding = nn.Embedding(end - first, size, padding_idx if band == 0 else None)
            self.embeddings.append(nn.Sequential(embedding, nn.Linear(size, hidden_size, bias=False)))

    def forward(self, tokens: Tensor) -> Tensor:
        """(..., hidden_size) for tokens, (...)."""
        out = None
        for first, end, band in zip([0, *self.cutoff[:-1]], self.cutoff, self.embeddings, strict=True):
            # All tokens go through all bands, as others': no shape depends on which tokens there are.
            own = (tokens >= first) & (tokens < end)
            embedded = band((tokens - first).clamp(0, end - first - 1))
            out = embedded if out is None else torch.where(own[..., None], embedded, out)
        assert out is not None
        return out


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of word types in bands: of the frequent ones, and of the bands, in which those of the rare are.

    Args:
        vocab_size: how many word types there are.
        output_size: of what is read.
        cutoffs: the first word type of each band after the first.
        dropout: of the projections of bands, in training.
        factor: by which the size of a band is smaller than that of the band before.
        tied: sizes of the embeddings of all bands, whose weights this shares; None if it has its own.
        projections: whether the bands after the first share the projections too.
        hidden_size: to which the embeddings' projections go.

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
        self.cutoff = _bands(cutoffs, vocab_size)
        classes = len(self.cutoff) - 1
        self.dropout_module = nn.Dropout(dropout)
        self.head: nn.Module
        if tied is None:
            self.head = nn.Linear(output_size, self.cutoff[0] + classes, bias=False)
        else:
            self.head = _TiedHead(self.cutoff[0], tied[0], output_size, classes)
        self.tail = nn.ModuleList()
        for band, (first, end) in enumerate(zip(self.cutoff[:-1], self.cutoff[1:], strict=True), 1):
            project: nn.Module
            if tied is None:
                size = _band_size("adaptive_softmax_factor", output_size, factor, band)
                project = nn.Linear(output_size, size, bias=False)
            else:
                size = tied[band]
                project = _Transposed(hidden_size, size) if projections else nn.Linear(hidden_size, size, bias=False)
            self.tail.append(nn.Sequential(project, nn.Dropout(dropout), nn.Linear(size, end - first, bias=False)))

    def forward(self, features: Tensor) -> Tensor:
        """(..., vocab_size), logs of probabilities, for features, (..., output_size)."""
        features = self.dropout_module(features)
        head = self.head(features).log_softmax(-1)
        parts = [head[..., : self.cutoff[0]]]
        for i, band in enumerate(self.tail):
            prior = head[..., self.cutoff[0] + i, None]
            parts.append(band(features).log_softmax(-1) + prior)
        return torch.cat(parts, dim=-1)


class _Transposed(nn.Module):
    """x W: the weight of a projection the other way."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_in, size_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


class _TiedHead(nn.Module):
    """The first band, by the weights of its embeddings, and the classes that the other bands are."""

    def __init__(self, words: int, size: int, output_size: int, classes: int) -> None:
        super().__init__()
        words_proj = nn.Linear(size, words, bias=False)
        self.word_proj: nn.Module = words_proj
        if size != output_size:
            self.word_proj = nn.Sequential(nn.Linear(output_size, size, bias=False), words_proj)
        self.class_proj = nn.Linear(output_size, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.word_proj(x), self.class_proj(x)], dim=-1)


def tied_bands(embeddings: AdaptiveInput, softmax: AdaptiveSoftmax, projections: bool) -> dict[str, str]:
    """Which of the softmax's weights are which of the embeddings', by their names in the two modules."""
    words = "head.word_proj.1.weight" if isinstance(softmax.head.word_proj, nn.Sequential) else "head.word_proj.weight"
    tied = {words: "embeddings.0.0.weight"}
    for i in range(len(softmax.tail)):
        tied[f"tail.{i}.2.weight"] = f"embeddings.{i + 1}.0.weight"
        if projections:
            tied[f"tail.{i}.0.weight"] = f"embeddings.{i + 1}.1.weight"
    return tied


def sinusoidal_positions(places: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """(..., dim), sines and then cosines for positions that count from 0, as tensor2tensor and fairseq have them.

    fairseq's first position is 2, after the number of padding.
    """
    half = dim // 2
    rates = torch.exp(torch.arange(half, device=places.device, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = (places + 2).to(torch.float32)[..., None] * rates
    encoded = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return F.pad(encoded, (0, dim % 2)).to(dtype)


def _bands(cutoffs: list[int], vocab_size: int) -> list[int]:
    return [*cutoffs, vocab_size] if vocab_size > cutoffs[-1] else list(cutoffs)


def _band_size(name: str, size: int, factor: float, band: int) -> int:
    own = int(size // factor**band)
    if own < 1:
        raise ValueError(
            f"{name} is {factor:g}: of {size} dimensions it leaves none for band {band + 1}; it is too large"
        )
    return own
