"""The models of both settings, and the one module that they all are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fastweights.mixers.feature_maps import build_feature_map
from synthetic.memories import CappedMemory, DeltaMemory, Memory, SoftmaxMemory, SumMemory
from synthetic.retrieval import Sequences

KEY_DIM = 64


@dataclass(frozen=True)
class Model:
    """A memory and its feature map."""

    title: str  # for figures and tables
    memory: str  # "softmax", "sum", "delta" or "capped"
    feature_map: str = "identity"  # a name of `feature_maps.FEATURE_MAPS`
    dpfp_nu: int = 1
    favor_features: int | None = None
    layer_norm: bool = False  # of the capped memory

    def build(self, key_dim: int = KEY_DIM) -> Memory:
        """The memory, with random features drawn from torch's global generator."""
        if self.memory == "softmax":
            return SoftmaxMemory(key_dim)
        feature_map = build_feature_map(
            self.feature_map, num_heads=1, head_dim=key_dim, dpfp_nu=self.dpfp_nu, favor_features=self.favor_features
        )
        if self.memory == "capped":
            return CappedMemory(feature_map, layer_norm=self.layer_norm)
        return {"sum": SumMemory, "delta": DeltaMemory}[self.memory](feature_map)


MODELS: dict[int, dict[str, Model]] = {
    1: {
        "softmax": Model("softmax", "softmax"),
        "linear": Model("linear (ELU + 1)", "sum", "elu"),
        "dpfp-1": Model("DPFP-1", "sum", "dpfp"),
        "dpfp-2": Model("DPFP-2", "sum", "dpfp", dpfp_nu=2),
        "dpfp-3": Model("DPFP-3", "sum", "dpfp", dpfp_nu=3),
        "favor-64": Model("FAVOR+, 64 features", "sum", "favor", favor_features=64),
        "favor-128": Model("FAVOR+, 128 features", "sum", "favor", favor_features=128),
        "favor-512": Model("FAVOR+, 512 features", "sum", "favor", favor_features=512),
    },
    2: {
        "sum-dpfp-1": Model("sum rule, DPFP-1", "sum", "dpfp"),
        "delta-dpfp-1": Model("delta rule, DPFP-1", "delta", "dpfp"),
        "delta-dpfp-2": Model("delta rule, DPFP-2", "delta", "dpfp", dpfp_nu=2),
        "delta-linear": Model("delta rule, ELU + 1", "delta", "elu"),
        "delta-favor-64": Model("delta rule, FAVOR+, 64 features", "delta", "favor", favor_features=64),
        # Of the authors' list of commands; the paper has no result of it.
        "delta-favor-128": Model("delta rule, FAVOR+, 128 features", "delta", "favor", favor_features=128),
        "tanh": Model("Schlag (2021)", "capped", "tanh", layer_norm=True),
        "tanh-dpfp-1": Model("Schlag (2021) with DPFP-1", "capped", "dpfp", layer_norm=True),
        "tanh-bare": Model("Schlag (2021), no layer norm", "capped", "tanh"),
        "tanh-dpfp-1-bare": Model("Schlag (2021) with DPFP-1, no layer norm", "capped", "dpfp"),
    },
}
"""By setting and name. The sum rule goes with attention normalisation, the delta rule with sum normalisation."""


class Retriever(nn.Module):
    """Learned key embeddings and projections around a memory (Sec. 6.1).

    k = W_K [e(k); v] with a one-hot v is a row of one table for the key plus a row of another for the value, so that
    nothing of size d_emb + S is ever built for a pair. So is beta, sigmoid(W_beta [e(k); v]).

    `model`: the memory. `size`: S, how many keys, and how many values, there are. `key_dim`: d_key.
    """

    def __init__(self, model: Model, size: int, key_dim: int = KEY_DIM) -> None:
        super().__init__()
        self.size = size
        self.memory = model.build(key_dim)
        self.embed_dim = embedding_size(size)
        self.embedding = nn.Parameter(torch.randn(size, self.embed_dim))
        self.key_weight = nn.Parameter(torch.empty(key_dim, self.embed_dim + size))
        self.query_weight = nn.Parameter(torch.empty(key_dim, self.embed_dim))
        # As in the authors' program.
        for weight in (self.key_weight, self.query_weight):
            if model.memory == "softmax":
                nn.init.xavier_uniform_(weight)
            else:
                nn.init.uniform_(weight, -(key_dim**-0.5), key_dim**-0.5)
        if self.memory.has_beta:
            bound = 1 / math.sqrt(self.embed_dim + size)
            self.beta_weight = nn.Parameter(torch.empty(1, self.embed_dim + size).uniform_(-bound, bound))

    def forward(self, sequences: Sequences, queries: Tensor) -> Tensor:
        """Writes the sequences' pairs and answers queries.

        `queries`: (batch, queries), keys. Returns (batch, queries, S), the retrieved values.
        """
        weights = [self.key_weight, self.query_weight]
        if self.memory.has_beta:
            weights.append(self.beta_weight)
        # One product for all of W_K, W_Q and W_beta that the embeddings meet.
        tables = self.embedding @ torch.cat([weight[:, : self.embed_dim] for weight in weights]).t()
        of_keys = tables.split([len(weight) for weight in weights], dim=1)
        k = self._sum(sequences, of_keys[0], self.key_weight)
        beta = self._sum(sequences, of_keys[2], self.beta_weight) if self.memory.has_beta else None
        return self.memory(
            k,
            F.embedding(queries, of_keys[1]),
            None if beta is None else beta.squeeze(2).sigmoid(),
            sequences.values,
            self.size,
        )

    def _sum(self, sequences: Sequences, of_keys: Tensor, weight: Tensor) -> Tensor:
        """W [e(k); v], given W e for all keys, (S, rows of W): (batch, length, rows of W)."""
        of_values = weight[:, self.embed_dim :].t()
        return F.embedding(sequences.keys, of_keys) + F.embedding(sequences.values, of_values)


def embedding_size(size: int) -> int:
    """d_emb, which the paper leaves open: that of the authors' published code."""
    return int(2.2 * size)


def retrieval_loss(retrieved: Tensor, targets: Tensor) -> Tensor:
    """l = sum_j (v*_j - v_j)^2 / 2 for one-hot v*: (..., S) and the numbers of v*, (...) -> (...)."""
    return 0.5 * (retrieved - F.one_hot(targets, retrieved.shape[-1]).to(retrieved.dtype)).square().sum(-1)
