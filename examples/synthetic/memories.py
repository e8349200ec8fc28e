"""Memories that store key-value pairs, and their outputs after the last pair.

Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers" (ICML 2021). Equation numbers are
theirs. A value is one of S one-hot vectors, given by its number.

A query is read once, from the memory that all L pairs have left. Such a read is linear in the values that were stored,

    y = sum_i a_i v_i,

with coefficients a_i that depend on the keys, the query and the betas only. So the S x d_dot matrix need not
be built: the L coefficients are found, and each is added to the component of y that its one-hot value names. This is
exact. Each memory has its own coefficients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fastweights import ops
from fairseq_fastweights.mixers.feature_maps import FeatureMap
from fairseq_fastweights.ops.kernels import differentiable_once

SMALLEST_DIVISOR = 1e-30
"""Sums of attention weights below it are not divided by: nothing was found, and gradients would overflow."""


class Memory(nn.Module):
    """Stores pairs and answers queries."""

    features: int  # d_dot, the size of mapped keys and queries
    has_beta = False  # whether pairs are written with strengths beta in [0, 1] (Eq. 21)

    def forward(self, k: Tensor, q: Tensor, beta: Tensor | None, values: Tensor, size: int) -> Tensor:
        """Writes all pairs in order, then answers all queries; returns (batch, queries, size).

        `k`: (batch, length, d_key). `q`: (batch, queries, d_key). `beta`: (batch, length); None for memories without
        betas. `values`: (batch, length), the values' numbers. `size`: S, how many values there are.
        """
        return spread(self.coefficients(k, q, beta), values, size)

    def coefficients(self, k: Tensor, q: Tensor, beta: Tensor | None) -> Tensor:
        """a_i of the equation above: (batch, queries, length)."""
        raise NotImplementedError


def spread(coefficients: Tensor, values: Tensor, size: int) -> Tensor:
    """sum_i a_i v_i for one-hot v_i: (batch, queries, length) and (batch, length) -> (batch, queries, size)."""
    zeros = coefficients.new_zeros(*coefficients.shape[:2], size)
    return zeros.scatter_add(2, values[:, None].expand_as(coefficients), coefficients)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q_j . k_i for all queries and keys: (batch, queries, length)."""
    # With K Q^T instead of Q K^T the gradient of the many keys lies in memory as they do.
    return (k @ q.transpose(1, 2)).transpose(1, 2)


class SoftmaxMemory(Memory):
    """Keeps all pairs: a = softmax(K q / sqrt(d_key))."""

    def __init__(self, key_dim: int) -> None:
        super().__init__()
        self.features = key_dim

    def coefficients(self, k: Tensor, q: Tensor, beta: Tensor | None) -> Tensor:
        return torch.softmax(_products(q, k) * self.features**-0.5, dim=-1)


class MappedMemory(Memory):
    """A memory of keys and queries that a feature map has mapped."""

    def __init__(self, feature_map: FeatureMap) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.features = feature_map.output_dim


class SumMemory(MappedMemory):
    """The sum rule with attention normalisation (Eq. 17-19): a_i = phi(k_i) . phi(q) / sum_j phi(k_j) . phi(q)."""

    def coefficients(self, k: Tensor, q: Tensor, beta: Tensor | None) -> Tensor:
        phi_q, phi_k = self.feature_map(q[:, :, None], k[:, :, None], scales="queries and source")
        weights = _products(phi_q.squeeze(2), phi_k.squeeze(2))
        # Eq. 18: the normaliser is the sum of the weights.
        divisor = weights.sum(-1, keepdim=True) + self.feature_map.sum_eps
        return weights / divisor.masked_fill(divisor < SMALLEST_DIVISOR, 1)


class DeltaMemory(MappedMemory):
    """The delta rule with sum normalisation (Eq. 20-25, 29)."""

    has_beta = True

    def coefficients(self, k: Tensor, q: Tensor, beta: Tensor | None) -> Tensor:
        assert beta is not None
        # Sum normalisation (Eq. 29): features add up to 1.
        phi_q, phi_k = self.feature_map(q[:, :, None], k[:, :, None], scales="all", normalize=True)
        return delta_coefficients(phi_k, phi_q, beta)


def delta_coefficients(k: Tensor, q: Tensor, beta: Tensor, *, backend: str = "auto") -> Tensor:
    """The coefficient with which each value of a delta rule's memory is read in the end.

    Eq. 24 is W_i = W_{i-1} (I - beta_i k_i k_i^T) + beta_i v_i k_i^T. Written out, W_L q has v_i with the coefficient

        a_i = beta_i k_i . w_i,   w_L = q,   w_{i-1} = (I - beta_i k_i k_i^T) w_i = w_i - beta_i (k_i . w_i) k_i,

    and the recursion of w is the delta rule itself: it runs over the pairs from the last to the first, writes zeros
    and starts with the query as its state. That has a column for each query, where the memory has one for each value.

    `k`: (batch, length, 1, dim), mapped and normalised, as is `q`: (batch, queries, 1, dim). `beta`: (batch, length).
    `backend`: of `ops.delta_rule`. Returns (batch, queries, length).
    """
    # The state w has a column for each query: it starts as the queries and runs backwards over the pairs.
    queries = q.squeeze(2).transpose(1, 2)  # (batch, dim, queries)
    reversed_k, reversed_beta = k.flip(1), beta.flip(1)
    # k_i . w_i is read after the write of pair i + 1; for the last pair there is none, w_L is the query.
    last = reversed_k[:, :1].squeeze(2) @ queries
    zeros = queries.new_zeros(k.shape[0], k.shape[1] - 1, 1, queries.shape[2])
    before, _ = ops.delta_rule(
        reversed_k[:, 1:],
        reversed_k[:, :-1],
        zeros,
        reversed_beta[:, :-1, None],
        initial_state=queries[:, None].contiguous(),
        backend=backend,
    )
    reads = torch.cat([last, before.squeeze(2)], dim=1).flip(1)  # (batch, length, queries)
    return (beta[:, :, None] * reads).transpose(1, 2)


class CappedMemory(MappedMemory):
    """The memory of Schlag, Munkhdalai, Schmidhuber (2021), without its LSTM.

    The delta rule without normalisation of keys, but after each write a memory whose Frobenius norm is above 1 is
    scaled down to 1. Their output is layer-normalised (without gain and bias here: the values to be retrieved are
    fixed).

    Layer normalisation removes the mean of the output, so that its loss is at least 1 / (2 S): a one-hot vector
    has the mean 1 / S.

    `feature_map`: tanh in their model. `layer_norm`: whether the output is layer-normalised.
    """

    has_beta = True

    def __init__(self, feature_map: FeatureMap, *, layer_norm: bool) -> None:
        super().__init__(feature_map)
        self.layer_norm = layer_norm

    def forward(self, k: Tensor, q: Tensor, beta: Tensor | None, values: Tensor, size: int) -> Tensor:
        assert beta is not None
        phi_q, phi_k = self.feature_map(q[:, :, None], k[:, :, None])
        read = phi_q.squeeze(2) @ capped_delta_rule(phi_k.squeeze(2), beta, values, size)
        return F.layer_norm(read, [size]) if self.layer_norm else read


CHUNK = 32
"""Steps after which `capped_delta_rule` brings the memory itself up to date.

Within a chunk the memory that is not yet scaled down may grow by beta |k|^2 a step: float64 has the range for that."""


def capped_delta_rule(k: Tensor, beta: Tensor, values: Tensor, size: int) -> Tensor:
    """The delta rule for one-hot values, with a memory that is kept to a norm of at most 1.

        W'_t = W_{t-1} + beta_t (v_t - W_{t-1} k_t) k_t^T,   W_t = W'_t / max(1, |W'_t|)

    The norm is the only thing that is not linear in the values, and it is one number a step. Let P_t be the product of
    the divisors since the beginning of a chunk of steps. Then M_t = P_t W_t follows the ordinary delta rule for
    the values P_{t-1} v_t, and P_t = max(P_{t-1}, |M_t|). With r_t = P_{t-1} v_t - M_{t-1} k_t and M_0 = W_0,

        r_t = P_{t-1} v_t - W_0 k_t - sum_{i<t} beta_i (k_i . k_t) r_i,   so that with U = (I + tril(K K^T, -1) B)^-1
        r_t = sum_i U_ti P_{i-1} v_i - z_t,   Z = U K W_0^T,
        |M_t|^2 = |M_{t-1}|^2 + 2 beta_t P_{t-1} v_t . r_t + (beta_t^2 |k_t|^2 - 2 beta_t) |r_t|^2.

    U and Z are found for the whole chunk at once. As values are one-hot, the last line needs sums over i of
    U_ti P_{i-1} and entries of Z: that remains to be done step by step.

    `k`: (batch, length, dim), the mapped keys. `beta`: (batch, length). `values`: (batch, length), the values' numbers.
    `size`: how many values there are. Returns the memory's transpose, (batch, dim, size).
    """
    batch, _, dim = k.shape
    memory = k.new_zeros(batch, size, dim)
    square = k.new_zeros(batch, 1, dtype=torch.float64)
    for chunk in zip(k.split(CHUNK, 1), beta.split(CHUNK, 1), values.split(CHUNK, 1), strict=True):
        memory, square = _write_chunk(memory, square, *chunk)
    return memory.transpose(1, 2)


def _write_chunk(memory: Tensor, square: Tensor, k: Tensor, beta: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Writes a chunk of keys and values.

    The memory is (batch, size, dim), the square of its norm (batch, 1) in float64; returned are those after the last
    write.
    """
    steps = k.shape[1]
    long_k, beta = k.double(), beta.double()
    eye = torch.eye(steps, dtype=torch.float64, device=k.device)
    # U = (I + tril(K K^T, -1) B)^-1, by forward substitution.
    u = torch.linalg.solve_triangular(
        eye + (long_k @ long_k.transpose(1, 2)).tril(-1) * beta[:, None], eye.expand(len(k), -1, -1), upper=False
    )
    # K W_0^T needs the memory once a chunk; the rest are (steps, steps).
    z = u @ (k @ memory.transpose(1, 2)).double()
    z_at = z.gather(2, values[:, None].expand(-1, steps, -1))  # [t, i]: the component of z_t that v_i names
    same = (values[:, :, None] == values[:, None]).double()

    # The factor of |r_t|^2 in the last line.
    of_square = beta.square() * long_k.square().sum(-1) - 2 * beta
    scales, divided_by, square = _Caps.apply(u, same, z_at, z.square().sum(-1), of_square, 2 * beta, square)

    # r_t = sum_i U_ti P_{i-1} v_i - z_t; dividing by P_n gives the memory after the chunk.
    errors = spread(u * scales[:, None], values, memory.shape[1]) - z  # r
    scale = 1 / divided_by  # a product has a cheaper gradient than a quotient, and the memory is large
    written = (errors * (beta * scale)[:, :, None]).to(k.dtype)
    memory = torch.baddbmm(memory * scale.to(k.dtype)[:, :, None], written.transpose(1, 2), k)
    return memory, square * scale.square()


class _Caps(torch.autograd.Function):
    """The part of a chunk that goes step by step.

    With p_t = (P_0, ..., P_{t-1}, 0, ...), w_t = U_t * p_t, g_t = E w_t, where E_ij says whether v_i = v_j, and z_t at
    the components that the values name, Z_t, it is

        |r_t|^2 = w_t . (g_t - 2 Z_t) + |z_t|^2,   v_t . r_t = g_tt - Z_tt,
        |M_t|^2 = |M_{t-1}|^2 + a_t |r_t|^2 + b_t P_{t-1} v_t . r_t,   P_t = max(P_{t-1}, |M_t|).

    Autograd would find the same gradients in three times the time: these are many operations on few numbers.

    Takes U, E, Z (batch, steps, steps), |z|^2, a, b (batch, steps) and |M_0|^2 (batch, 1). Returns
    (P_0, ..., P_{n-1}), (batch, n) for n steps; P_n and |M_n|^2, (batch, 1).
    """

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, same: Tensor, z_at: Tensor, z_square: Tensor, a: Tensor, b: Tensor, square: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = u, same, z_at, z_square, a, b, square
        scales, along, errors = torch.zeros_like(a), torch.empty_like(a), torch.empty_like(a)
        weights, sums = torch.empty_like(u), torch.empty_like(u)  # w, g
        largest, twice = torch.ones_like(square), 2 * z_at
        for t in range(a.shape[1]):
            now = slice(t, t + 1)
            scales[:, now] = largest
            w = u[:, t] * scales
            g = torch.bmm(same, w[:, :, None]).squeeze(2)
            error = (g - twice[:, t]).mul_(w).sum(1, keepdim=True).add_(z_square[:, now])
            on_value = g[:, now] - z_at[:, t, now]
            square = torch.addcmul(square, error, a[:, now]).addcmul_(on_value * largest, b[:, now])
            largest = square.clamp(min=0).sqrt_().maximum(largest)
            weights[:, t], sums[:, t], errors[:, now], along[:, now] = w, g, error, on_value
        ctx.save_for_backward(*inputs, scales, largest, weights, sums, errors, along)
        return scales, largest, square

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: Any, d_scales: Tensor, d_largest: Tensor, d_square: Tensor
    ) -> tuple[Tensor | None, ...]:
        u, same, z_at, _, a, b, _, scales, largest, weights, sums, errors, along = saved
        of_value = b * scales
        by_weight = 2 * a[:, :, None] * (sums - z_at) + of_value[:, :, None] * same  # of |M_t|^2, as is the next
        by_scale = by_weight * u + torch.diag_embed(b * along)
        after = torch.cat([scales[:, 1:], largest], dim=1)  # P_1 ... P_n
        grew = (after > scales).to(after.dtype)
        kept, d_root = 1 - grew, grew / (2 * after)
        d_scales, d_squares = d_scales.clone(), torch.empty_like(a)
        # From the last step to the first; P_t passes its gradient on where the maximum was P_{t-1}.
        for t in range(a.shape[1] - 1, -1, -1):
            now = slice(t, t + 1)
            d_square = torch.addcmul(d_square, d_largest, d_root[:, now])
            d_squares[:, now] = d_square
            d_scales.addcmul_(by_scale[:, t], d_square)
            d_largest = torch.addcmul(d_scales[:, now], d_largest, kept[:, now])
        d_u = d_squares[:, :, None] * by_weight * scales[:, None].expand_as(u).tril()
        d_z_at = (-2 * a * d_squares)[:, :, None] * weights - torch.diag_embed(of_value * d_squares)
        return d_u, None, d_z_at, a * d_squares, errors * d_squares, along * scales * d_squares, d_square
