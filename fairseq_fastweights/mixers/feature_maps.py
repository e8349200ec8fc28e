"""Feature maps phi for queries and keys, with their sum normalisation.

Equation numbers are those of Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast
Weight Programmers" (ICML 2021), unless another paper is named.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairseq_fastweights.invalid_input import InvalidInput, check_number
from fairseq_fastweights.ops.checks import without_autocast
from fairseq_fastweights.ops.elementwise import apply_map, divided_by_largest, random_exponents, random_features

Scales = Literal["fixed", "queries", "queries and source", "all"]
"""See `FeatureMap.forward`."""


class FeatureMap(nn.Module):
    """Maps projected queries and keys to the vectors that address the state.

    Args:
        key_dim: numbers per head that the projections of q and k have to produce.
        output_dim: numbers per head after the map, the state's key dimension; None for `key_dim`.

    Attributes:
        positive: whether every output is at least 0, as attention normalisation (Eq. 26-28) needs.
        may_vanish: whether an output vector can be all zero in exact arithmetic.
        operation: the name in `ops.elementwise.MAPS` of the function that is applied, in one operation with the
            normalisation, to the tensor that `_prepare` returns.
        nu: that of the operation "dpfp".

    Examples:
        >>> phi = build_feature_map("dpfp", num_heads=2, head_dim=4)
        >>> phi.key_dim, phi.output_dim, phi.positive, phi.may_vanish
        (4, 8, True, True)
    """

    positive: bool
    may_vanish: bool
    operation: str = "identity"
    nu: int = 1

    def __init__(self, key_dim: int, output_dim: int | None = None) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.output_dim = output_dim or key_dim

    @property
    def sum_eps(self) -> float:
        """The `eps` of the sum normalisation: 0 for maps that cannot vanish, 1e-5 for those that can."""
        return 1e-5 if self.may_vanish else 0.0

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        *,
        scales: Scales = "fixed",
        normalize: bool = False,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """Return `(phi(q), phi(k))`.

        Both are mapped in one call because a random map has to use one draw for the two.

        Args:
            q: (batch, time, heads, key_dim).
            k: (batch, time, heads, key_dim); batch and time may differ from those of q. None, if `are_alike`, where q
                holds heads of keys too.
            scales: which features a map may multiply by positive numbers to keep them within the range of their dtype,
                because a normalisation divides these out again. "fixed": none. "queries": each query by its own number
                (attention normalisation). "queries and source": also all keys of a row and head by one number
                (attention normalisation over a whole source without padding). "all": each query and key by its own
                number (sum normalisation).
            normalize: whether each vector is divided by the sum of its components plus `sum_eps` (Eq. 29). One whose
                sum has underflowed (FAVOR+ of a very long vector) becomes nearly zero, never NaN.
            dtype: of the results; None for float32 for half and bfloat16 inputs, else that of the inputs. All is
                computed in that precision.
            backend: one of `ops.BACKENDS`, as for the update rules.

        Returns:
            Two tensors (batch, time, heads, output_dim); the second is None if k is.

        Raises:
            ValueError: if q or k does not have four dimensions, the last of size `key_dim`.
        """
        how: dict[str, Any] = {"dtype": dtype, "backend": backend}
        if normalize:
            how |= {"normalization": "sum", "eps": self.sum_eps}
        if k is None:
            return self._map_alike(q, scales, **how), None
        for name, x in (("q", q), ("k", k)):
            if x.dim() != 4 or x.shape[-1] != self.key_dim:
                expected = f"(batch, time, heads, {self.key_dim})"
                raise InvalidInput(f"{name} has shape {tuple(x.shape)}; it must be {expected}")
        # Autocast would run the matrix products of float32 inputs in half precision again.
        with without_autocast(q):
            return self._map(q, k, scales, **how)

    def are_alike(self, scales: Scales) -> bool:
        """True if queries and keys of all heads are mapped alike, so that `forward` can map them in one tensor."""
        return type(self)._prepare is FeatureMap._prepare

    def _map(self, q: Tensor, k: Tensor, scales: Scales, **how: Any) -> tuple[Tensor, Tensor]:
        return self._map_alike(q, scales, **how), self._map_alike(k, scales, **how)

    def _map_alike(self, x: Tensor, scales: Scales, **how: Any) -> Tensor:
        return apply_map(self._prepare(x), self.operation, nu=self.nu, **how)

    def _prepare(self, x: Tensor) -> Tensor:
        """The tensor that the operation is applied to."""
        return x

    def extra_repr(self) -> str:
        return f"key_dim={self.key_dim}, output_dim={self.output_dim}"


class IdentityMap(FeatureMap):
    """phi(x) = x; without normalisation in the dtype of x, unless another is asked for.

    Examples:
        >>> q = k = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 3)
        >>> IdentityMap(3)(q, k)[0].flatten()
        tensor([-1.,  0.,  2.])
    """

    positive = False
    may_vanish = True

    def _map_alike(self, x: Tensor, scales: Scales, **how: Any) -> Tensor:
        return super()._map_alike(x, scales, **how) if "normalization" in how else x.to(how["dtype"] or x.dtype)


class EluMap(FeatureMap):
    """phi(x) = ELU(x) + 1, elementwise (Eq. 30; Katharopoulos et al. 2020).

    Examples:
        >>> q = k = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 3)
        >>> EluMap(3)(q, k)[0].flatten()
        tensor([0.3679, 1.0000, 3.0000])
    """

    positive = True
    may_vanish = False
    operation = "elu"


class TanhMap(FeatureMap):
    """phi(x) = tanh(x), elementwise (the baseline of Schlag et al. 2021, Sec. 6.1.2).

    Examples:
        >>> q = k = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 3)
        >>> TanhMap(3)(q, k)[0].flatten()
        tensor([-0.7616,  0.0000,  0.9640])
    """

    positive = False
    may_vanish = True

    def _prepare(self, x: Tensor) -> Tensor:
        return _at_least_float32(x).tanh()


class ReluMap(FeatureMap):
    """phi(x) = ReLU(W_h x + b_h), learned, one per head h, shared by q and k (Kasai et al. 2021).

    Parameters: `weight` (heads, output_dim, head_dim) and `bias` (heads, output_dim).

    Args:
        num_heads: number of heads.
        head_dim: numbers per head before the map.
        output_dim: numbers per head after it.

    Examples:
        >>> phi = ReluMap(num_heads=2, head_dim=4, output_dim=6)
        >>> phi_q, phi_k = phi(torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4))
        >>> phi_q.shape
        torch.Size([1, 5, 2, 6])
    """

    positive = True
    may_vanish = True
    operation = "relu"

    def __init__(self, num_heads: int, head_dim: int, output_dim: int) -> None:
        super().__init__(head_dim, output_dim)
        self.weight = nn.Parameter(torch.empty(num_heads, output_dim, head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads, output_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `weight` from Kaiming's uniform distribution, and set `bias` to 0.

        It makes up for the half that ReLU cuts off, so that features start at the scale of the projections.
        """
        # By hand, as `nn.init` would take the number of outputs for the fan of a weight with three dimensions.
        bound = math.sqrt(6 / self.key_dim)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    def _prepare(self, x: Tensor) -> Tensor:
        x = _at_least_float32(x)
        # One product of matrices for each head: (heads, batch * time, head_dim) @ (heads, head_dim, output_dim).
        vectors = x.flatten(0, 1).transpose(0, 1)
        bias, weight = self.bias.to(x.dtype)[:, None], self.weight.to(x.dtype).transpose(1, 2)
        return torch.baddbmm(bias, vectors, weight).transpose(0, 1).unflatten(0, x.shape[:2])


class FavorMap(FeatureMap):
    """Random features of the softmax kernel, FAVOR+ (Eq. 31-32; Choromanski et al. 2021).

    With x scaled by head_dim^(-1/4), phi(x) = exp(-|x|^2 / 2) / sqrt(2 m) [exp(R x); exp(-R x)], so
    that phi(q) . phi(k) is an unbiased estimate of exp(q . k / sqrt(head_dim)), the softmax kernel
    with its usual scale. The m rows of R come from `orthogonal_features`, one R for all heads.

    In training mode every call draws a new R from torch's global generator of the input's device, so activation
    checkpointing, which restores that generator, recomputes with the same draw. In evaluation mode the buffer
    `features` (m, head_dim) is used: drawn once, at construction, and kept in the state dict.

    The map "favor-schlag" is that of the program of Schlag et al.: x is not scaled, 1e-4 is added to
    every exponential, and R's columns are orthogonal instead of its rows.

    Args:
        head_dim: numbers per head before the map.
        num_features: m; there are 2 m numbers per head after the map.
        scaled: whether x is multiplied by head_dim^(-1/4), which Eq. 31-32 do not do.
        epsilon: added to exp(-|x|^2 / 2) exp(R x) and exp(-|x|^2 / 2) exp(-R x), before the division.
        orthogonal: "features", or "dimensions": R^T is drawn by `orthogonal_features`, head_dim vectors of m numbers.

    Examples:
        >>> phi = FavorMap(head_dim=4, num_features=2000).eval()
        >>> q, k = torch.rand(2, 1, 1, 1, 4).unbind(0)
        >>> phi_q, phi_k = phi(q, k)
        >>> torch.allclose((phi_q * phi_k).sum(), (q * k / 2).sum().exp(), rtol=0.3)  # 2 = sqrt(head_dim)
        True
    """

    positive = True
    may_vanish = False
    features: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        scaled: bool = True,
        epsilon: float = 0.0,
        orthogonal: Literal["features", "dimensions"] = "features",
    ) -> None:
        super().__init__(head_dim, 2 * num_features)
        self.num_features = num_features
        check_number("epsilon", epsilon, 0)
        self.scale = head_dim**-0.25 if scaled else 1.0
        self.orthogonal = orthogonal
        # Their program adds epsilon before the division by sqrt(2 m).
        self._log_epsilon = math.log(epsilon / math.sqrt(self.output_dim)) if epsilon else -math.inf
        self.register_buffer("features", self.draw())

    def draw(self, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
        """Draw an R, (m, head_dim), from the global generator of a device."""
        # R is (m, head_dim) in either case; orthogonal are its rows, or its columns.
        if self.orthogonal == "features":
            return orthogonal_features(self.num_features, self.key_dim, dtype=dtype, device=device)
        return orthogonal_features(self.key_dim, self.num_features, dtype=dtype, device=device).t().contiguous()

    def are_alike(self, scales: Scales) -> bool:
        return scales in ("fixed", "all")

    def _map_alike(self, x: Tensor, scales: Scales, **how: Any) -> Tensor:
        with without_autocast(x):
            return self._features_of(x, self._drawn(x), scales == "all", **how)

    def _map(self, q: Tensor, k: Tensor, scales: Scales, **how: Any) -> tuple[Tensor, Tensor]:
        # The exponents of long vectors lie far below 0: their features would vanish, or leave quotients of numbers
        # so small that gradients overflow.
        features = self._drawn(q)
        phi_q = self._features_of(q, features, scales != "fixed", **how)
        if scales != "queries and source" or not k.shape[1]:
            return phi_q, self._features_of(k, features, scales == "all", **how)
        # Keys of a whole source are divided by one number, the largest feature of their row and head.
        k = _at_least_float32(k)
        exponents = random_exponents(k @ features, k, self.scale)
        return phi_q, apply_map(divided_by_largest(exponents, self._log_epsilon, (1, 3)), **how)

    def _drawn(self, x: Tensor) -> Tensor:
        """The rows of R, times the scale of x, as columns, in the precision in which x is mapped."""
        precise = _at_least_float32(x[:0]).dtype
        features = self.draw(precise, x.device) if self.training else self.features.to(precise)
        return (features if self.scale == 1 else features * self.scale).t()

    def _features_of(self, x: Tensor, features: Tensor, stabilized: bool, **how: Any) -> Tensor:
        x = _at_least_float32(x)
        how |= {"scale": self.scale, "log_epsilon": self._log_epsilon, "stabilized": stabilized}
        return random_features(x @ features, x, **how)


class DpfpMap(FeatureMap):
    """Deterministic parameter-free projection, DPFP-nu (Eq. 37), in the order of the listing in App. C.

    With d = head_dim and z = [ReLU(x); ReLU(-x)] of size 2 d, output (j - 1) 2 d + i is z_i z_{i-j} for j = 1 ... nu,
    indices modulo 2 d. Eq. 37 has z_{i+j} instead: the same products, each block of 2 d rotated by j.

    Only nu < d adds to the capacity: the products of j = d are ReLU(x_i) ReLU(-x_i) = 0, and those
    of 2 d - j are those of j once more.

    Args:
        head_dim: numbers per head before the map.
        nu: how many rotations are multiplied; there are 2 head_dim nu numbers per head after the map.

    Examples:
        >>> q = k = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)  # z = [1, 2, 0, 0]
        >>> DpfpMap(head_dim=2, nu=1)(q, k)[0].flatten()
        tensor([0., 2., 0., 0.])
    """

    positive = True
    may_vanish = True
    operation = "dpfp"

    def __init__(self, head_dim: int, nu: int) -> None:
        super().__init__(head_dim, 2 * head_dim * nu)
        self.nu = nu


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "identity": IdentityMap,
    "elu": EluMap,
    "relu": ReluMap,
    "favor": FavorMap,
    "favor-schlag": FavorMap,
    "dpfp": DpfpMap,
    "tanh": TanhMap,
}


def is_favor(name: str) -> bool:
    """True if a key of `FEATURE_MAPS` is a form of FAVOR+."""
    return FEATURE_MAPS.get(name) is FavorMap


def build_feature_map(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    feature_dim: int | None = None,
    dpfp_nu: int = 1,
    favor_features: int | None = None,
) -> FeatureMap:
    """Make a feature map by its name.

    | name                | key_dim    | output_dim                                          |
    | ------------------- | ---------- | --------------------------------------------------- |
    | identity, elu, tanh | output_dim | feature_dim, else head_dim                          |
    | relu                | head_dim   | feature_dim, else head_dim                          |
    | favor, favor-schlag | head_dim   | 2 favor_features, else feature_dim, else 2 round(m) |
    | dpfp                | head_dim   | 2 head_dim dpfp_nu                                  |

    where m = head_dim ln(head_dim), as Choromanski et al. recommend, and round(m) is at least 1.

    Args:
        name: a key of `FEATURE_MAPS`, in the first column of the table.
        num_heads: number of heads.
        head_dim: per-head size of a query or key in an ordinary Transformer of this width.
        feature_dim: per-head size after the map, the state's key dimension; None for the default in the table.
        dpfp_nu: nu of DPFP, 1 to 2 head_dim - 1; other maps ignore it.
        favor_features: number m of random features of FAVOR+, half of its output size; None for the
            default in the table. Other maps ignore it.

    Raises:
        ValueError: for an unknown name, a size that is not a positive integer, `dpfp_nu` out of range, or a
            `feature_dim` that the map cannot have or that contradicts `dpfp_nu` or `favor_features`.

    Examples:
        >>> build_feature_map("favor", num_heads=8, head_dim=16, favor_features=32)
        FavorMap(key_dim=16, output_dim=64)
    """
    if name not in FEATURE_MAPS:
        raise InvalidInput(f"unknown feature map {name!r}; it must be one of {', '.join(FEATURE_MAPS)}")
    check_number("num_heads", num_heads, 1, whole=True)
    check_number("head_dim", head_dim, 1, whole=True)
    if feature_dim is not None:
        check_number("feature_dim", feature_dim, 1, whole=True)
    dim = head_dim if feature_dim is None else feature_dim

    if name in ("identity", "elu", "tanh"):
        return FEATURE_MAPS[name](dim)
    if name == "relu":
        return ReluMap(num_heads, head_dim, dim)
    if is_favor(name):
        how: dict[str, Any] = {"scaled": False, "epsilon": 1e-4, "orthogonal": "dimensions"}
        how = how if name == "favor-schlag" else {}
        return FavorMap(head_dim, _count_favor_features(head_dim, feature_dim, favor_features), **how)
    _check_dpfp(head_dim, feature_dim, dpfp_nu)
    return DpfpMap(head_dim, dpfp_nu)


def _count_favor_features(head_dim: int, feature_dim: int | None, favor_features: int | None) -> int:
    """Counts FAVOR+'s random features, from the options for them and for its output size.

    Raises:
        ValueError: if the two contradict each other, or are sizes that it cannot have.
    """
    if feature_dim is not None and feature_dim % 2:
        raise InvalidInput(
            f"feature_dim is {feature_dim}; for the feature map favor it must be even,"
            " because each random feature gives two outputs"
        )
    if favor_features is not None:
        check_number("favor_features", favor_features, 1, whole=True)
        if feature_dim is not None and feature_dim != 2 * favor_features:
            raise InvalidInput(
                f"feature_dim is {feature_dim}; with favor_features {favor_features}"
                f" it must be {2 * favor_features}, or left out"
            )
        return favor_features
    if feature_dim is not None:
        return feature_dim // 2
    return max(1, round(head_dim * math.log(head_dim)))


def _check_dpfp(head_dim: int, feature_dim: int | None, dpfp_nu: int) -> None:
    """Raises a `ValueError` for a nu that DPFP cannot have, or an output size that is not the one of this nu."""
    largest = 2 * head_dim - 1
    if not isinstance(dpfp_nu, int) or not 1 <= dpfp_nu <= largest:
        raise InvalidInput(f"dpfp_nu is {dpfp_nu!r}; for head_dim {head_dim} it must be an integer from 1 to {largest}")
    output_dim = 2 * head_dim * dpfp_nu
    if feature_dim is not None and feature_dim != output_dim:
        raise InvalidInput(
            f"feature_dim is {feature_dim}; the feature map dpfp gives 2 * head_dim * dpfp_nu ="
            f" {output_dim}: choose dpfp_nu for it, or leave feature_dim out"
        )


def orthogonal_features(
    num_features: int, dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """Draw the random features of FAVOR+ from the global generator of a device.

    Args:
        num_features: m, how many.
        dim: numbers of each.
        dtype: of the result.
        device: of the result, and of the generator; None for the CPU.

    Returns:
        (num_features, dim). Each row is distributed as N(0, I); rows within a block of `dim` are
        orthogonal, blocks are independent. The last block is cut at `num_features` rows.

    Examples:
        >>> features = orthogonal_features(6, 4)
        >>> gram = features @ features.t()
        >>> gram.shape, torch.allclose(gram[0, 1:4], torch.zeros(3), atol=1e-4)
        (torch.Size([6, 6]), True)
    """
    num_blocks = -(-num_features // dim)
    q, r = torch.linalg.qr(torch.randn(num_blocks, dim, dim, dtype=dtype, device=device))
    # QR leaves the signs of r's diagonal open; with all of them positive q is Haar distributed.
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    q = q * torch.copysign(torch.ones_like(diagonal), diagonal).unsqueeze(-2)
    # The norm of a normal vector: chi distributed with dim degrees of freedom.
    norms = torch.randn(num_features, dim, dtype=dtype, device=device).norm(dim=-1, keepdim=True)
    features: Tensor = q.flatten(0, 1)[:num_features] * norms
    return features


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
