"""Feature maps are their papers' equations, FAVOR+ is the estimator that it claims to be, bad sizes are refused."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_fastweights.mixers.feature_maps import FEATURE_MAPS, build_feature_map, orthogonal_features
from fairseq_fastweights.ops.elementwise import map_features

BATCH, TIME, HEADS, DIM = 2, 5, 3, 4
FLOAT64 = {"rtol": 1e-13, "atol": 1e-13}  # two ways to round a few operations
STANDARD_ERRORS = 5  # that an estimate may be off: a normal deviate passes them with probability 6e-7


def build(name, **options):
    return build_feature_map(name, **{"num_heads": HEADS, "head_dim": DIM} | options)


def queries_and_keys(dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(2, BATCH, TIME, HEADS, dim, generator=generator, dtype=torch.float64).to(dtype))


def favor(feature_map, head, x):
    x = x / len(x) ** 0.25
    projected = feature_map.features @ x
    h = torch.exp(-x.square().sum() / 2) / math.sqrt(2)
    return h * torch.exp(torch.cat([projected, -projected])) / math.sqrt(len(projected))


def favor_schlag(feature_map, head, x):
    """As their program computes it: R^T has a row for each number of x."""
    projected = x @ feature_map.features.t()
    exponentials = [torch.exp(sign * projected - (x**2).sum() / 2) for sign in (1, -1)]
    return (torch.cat(exponentials) + 1e-4) / (2 * len(projected)) ** 0.5


def dpfp(feature_map, head, x):
    z = torch.cat([x, -x]).clamp(min=0)
    return torch.stack([z[i] * z[i - j] for j in range(1, feature_map.nu + 1) for i in range(len(z))])


CASES = [  # a map, its options, and what it makes of a vector, in a head
    ("identity", {}, lambda feature_map, head, x: x),
    ("elu", {}, lambda feature_map, head, x: torch.where(x > 0, x + 1, x.exp())),
    ("tanh", {}, lambda feature_map, head, x: 1 - 2 / (torch.exp(2 * x) + 1)),
    ("relu", {"feature_dim": 6}, lambda feature_map, h, x: F.relu(feature_map.weight[h] @ x + feature_map.bias[h])),
    *(("favor", {"favor_features": count}, favor) for count in (1, 9)),
    *(("favor-schlag", {"favor_features": count}, favor_schlag) for count in (1, 9)),
    *(("dpfp", {"dpfp_nu": nu}, dpfp) for nu in (1, 2, 3, 2 * DIM - 1)),
]
maps = pytest.mark.parametrize(("name", "options", "equation"), CASES, ids=lambda x: "" if callable(x) else str(x))


@maps
def test_map_is_its_equation_for_every_vector(name, options, equation):
    feature_map = build(name, **options).double().eval().requires_grad_(False)
    if name == "relu":
        torch.nn.init.normal_(feature_map.bias)
    q, k = queries_and_keys(feature_map.key_dim)
    k = k[:, :3]  # times may differ, and be 0
    for x, phi in zip((q, k), feature_map(q, k), strict=True):
        vectors = [equation(feature_map, i % HEADS, vector) for i, vector in enumerate(x.flatten(0, 2))]
        torch.testing.assert_close(phi.flatten(0, 2), torch.stack(vectors), **FLOAT64)
        assert phi.shape == (*x.shape[:3], feature_map.output_dim)
        assert feature_map.positive == bool((phi >= 0).all())
    for scales in ("fixed", "queries and source", "all"):
        assert feature_map(q, k[:, :0], scales=scales)[1].shape == (BATCH, 0, HEADS, feature_map.output_dim)
    inputs = [x[:1, :1].contiguous().requires_grad_() for x in (q, k)]
    assert torch.autograd.gradcheck(feature_map, inputs)
    zero, _ = feature_map(*[torch.zeros(1, 1, HEADS, DIM, dtype=torch.float64)] * 2)
    assert name == "relu" or ((zero == 0).all() if feature_map.may_vanish else (zero > 0).all())
    assert feature_map.sum_eps == (1e-5 if feature_map.may_vanish else 0)


@pytest.mark.parametrize("num_features", [1, 6])
def test_favor_is_an_unbiased_estimate_of_the_softmax_kernel(num_features):
    torch.manual_seed(1)
    feature_map = build("favor", favor_features=num_features).train()
    # Short vectors, because the estimate's variance grows with exp(|q + k|^2).
    q, k = (x / 3 for x in queries_and_keys(DIM))
    kernel = torch.exp((q * k).sum(-1) / math.sqrt(DIM))
    draws = torch.stack([torch.linalg.vecdot(*feature_map(q, k)) for _ in range(1000)])
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - kernel).abs() < STANDARD_ERRORS * standard_error).all()
    assert (standard_error < 0.1 * kernel).all(), "the bound above says nothing"


def test_every_row_of_a_block_is_a_standard_normal_vector():
    torch.manual_seed(5)
    dim, count = 4, 20000
    blocks = orthogonal_features(count * dim, dim, dtype=torch.float64).view(count, dim, dim)
    squared_norms = blocks.square().sum(-1)
    for samples, expected in (
        (blocks, 0),  # position by position: a QR whose signs are left as they come fails here
        (blocks.unsqueeze(-1) * blocks.unsqueeze(-2), torch.eye(dim, dtype=torch.float64)),
        (squared_norms, dim),  # chi-squared: mean dim, variance 2 dim
        ((squared_norms - dim).square(), 2 * dim),
    ):
        standard_error = samples.std(0) / math.sqrt(count)
        assert ((samples.mean(0) - expected).abs() < STANDARD_ERRORS * standard_error).all()


@pytest.mark.parametrize(("training", "count"), [(True, 3), (True, 9), (False, 9)])
def test_favor_uses_features_that_are_orthogonal_in_blocks(training, count):
    feature_map = build("favor", favor_features=count).train(training)
    axes = DIM**0.25 * torch.eye(DIM, dtype=torch.float64).view(1, DIM, 1, DIM)
    positive, negative = feature_map(axes, axes)[0].squeeze().split(count, dim=-1)
    first, *others = F.normalize((positive / negative).log().t(), dim=-1).split(DIM)  # of exp(R x) / exp(-R x)
    for block in (first, *others):  # the buffer is drawn in float32
        torch.testing.assert_close(block @ block.t(), torch.eye(len(block)).double(), rtol=0, atol=1e-5)
        assert block is first or (first @ block.t()).abs().max() > 0.1, "blocks are drawn independently"


@pytest.mark.parametrize("training", [True, False])
def test_favor_of_schlags_program_has_features_orthogonal_across_a_key(training):
    """R^T, (head_dim, m), has orthogonal rows in blocks of m: here two, of 3 and 1 rows; their norms are chi's of m."""
    torch.manual_seed(3)
    count = 3
    feature_map = build("favor-schlag", favor_features=count).train(training)
    axes = torch.eye(DIM, dtype=torch.float64).view(1, DIM, 1, DIM)
    exponentials = feature_map(axes, axes)[0].squeeze() * math.sqrt(2 * count) - 1e-4
    positive, negative = exponentials.split(count, dim=-1)
    rows = (positive / negative).log() / 2
    block = F.normalize(rows[:count], dim=-1)
    torch.testing.assert_close(block @ block.t(), torch.eye(count).double(), rtol=0, atol=1e-5)
    assert (block @ rows[count]).abs().max() > 0.1, "blocks are drawn independently"
    squares = torch.stack([feature_map.draw(torch.float64).square().sum(0) for _ in range(2000)])
    assert (squares.mean(0) - count).abs().max() < STANDARD_ERRORS * math.sqrt(2 * count / len(squares))


@pytest.mark.parametrize("name", ["favor", "favor-schlag"])
def test_favor_draws_anew_in_training_only_once_for_queries_keys_and_heads(name):
    feature_map, other, inputs = build(name), build(name).eval(), queries_and_keys(DIM)
    before = feature_map.features.clone()
    assert not torch.equal(feature_map.train()(*inputs)[0], feature_map(*inputs)[0])
    assert torch.equal(feature_map.eval()(*inputs)[0], feature_map(*inputs)[0])
    assert torch.equal(feature_map.features, before)
    assert not torch.equal(other(*inputs)[0], feature_map(*inputs)[0])
    other.load_state_dict(feature_map.state_dict())
    assert torch.equal(other(*inputs)[0], feature_map(*inputs)[0])
    x = inputs[0][:, :, :1].expand_as(inputs[0])
    for training in (True, False):
        phi_q, phi_k = feature_map.train(training)(x, x)
        assert torch.equal(phi_q, phi_k) and torch.equal(phi_q, phi_q[:, :, :1].expand_as(phi_q))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_favor_gradients_are_the_same_under_activation_checkpointing(use_reentrant):
    feature_map = build("favor").train()

    def gradients(seed, run):
        torch.manual_seed(seed)
        inputs = [x.requires_grad_() for x in queries_and_keys(DIM)]
        torch.linalg.vecdot(*run(*inputs)).square().sum().backward()
        return torch.cat([x.grad for x in inputs])

    again = gradients(8, partial(checkpoint, feature_map, use_reentrant=use_reentrant))
    expected = gradients(8, feature_map)
    assert torch.equal(expected, again) and not torch.equal(gradients(9, feature_map), again)


def test_favor_of_long_vectors_neither_overflows_nor_vanishes():
    # exp(R x) overflows float32 here while |x|^2 / 2 outweighs it.
    feature_map = build("favor", favor_features=64).eval()
    x = torch.full((1, 1, 1, DIM), 60.0)
    assert torch.exp(x @ feature_map.features.t()).isinf().any() and feature_map(x, x)[0].isfinite().all()
    q, k = 200 * torch.randn(2, 1, 3, HEADS, DIM)
    assert all(x.max() == 0 for x in feature_map(q, k))
    for scales in ("queries and source", "all"):
        assert all((x.amax(dim=(1, 3)) == 1).all() for x in feature_map(q, k, scales=scales))
    # Where 1e-4 is added, it is what is left of them. And features of wide heads do not overflow.
    other = build("favor-schlag", favor_features=64).eval()
    assert all((x == 1).all() for x in other(q, k, scales="all"))
    wide = build("favor-schlag", head_dim=256, favor_features=1).eval()
    x = wide.features.view(1, 1, 1, 256)  # exp(|x|^2 / 2) is e^128, about
    assert wide(x, x)[0].isinf().any() and wide(x, x, scales="all")[0].isfinite().all()


@maps
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_mapped_in_float32_and_meta_tells_the_shapes(name, options, equation, dtype):
    feature_map = build(name, **options).eval()
    inputs = queries_and_keys(DIM, dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    expected = feature_map(*(x.to(compute) for x in inputs))
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outputs = feature_map(*inputs)
        for phi, reference in zip(outputs, expected, strict=True):
            assert phi.dtype == (dtype if name == "identity" else compute)
            assert torch.equal(phi.to(compute), reference)
    # Also with parameters in half precision, and with FAVOR+'s draws of training.
    for training in (True, False):
        phi, _ = feature_map.to(dtype).train(training)(*inputs)
        assert phi.dtype == (dtype if name == "identity" else compute)
        for phi in build(name, **options).to("meta").train(training)(*(x.to("meta") for x in inputs)):
            assert phi.is_meta and phi.shape == (BATCH, TIME, HEADS, feature_map.output_dim)


@maps
def test_sum_normalisation_makes_components_sum_to_one_or_less(name, options, equation):
    feature_map = build(name, **options).double().eval()
    inputs = queries_and_keys(DIM)
    for phi, normalized in zip(feature_map(*inputs), feature_map(*inputs, normalize=True), strict=True):
        total = phi.sum(-1)
        expected = total / (total + (1e-5 if feature_map.may_vanish else 0))
        # Rounding is relative to the largest component; a sum of mixed signs is smaller, here by less than 1000.
        torch.testing.assert_close(normalized.sum(-1), expected, rtol=1e-11, atol=0)
    feature_map.float()
    for value in (0.0, -30.0, 30.0, -1000.0):  # finite where a map vanishes
        x = torch.full((1, 1, HEADS, DIM), value, requires_grad=True)
        normalized, _ = feature_map(x, x, normalize=True)
        (gradient,) = torch.autograd.grad(normalized.square().sum(), x)
        assert normalized.isfinite().all() and gradient.isfinite().all()
        assert not feature_map.positive or (normalized.sum(-1) < 1 + 1e-6).all()


def test_sum_normalisation_of_small_numbers():
    # 1e-5 is below the smallest normal float16: it is done in float32.
    x = torch.tensor([[1.0, 2.0, 5.0], [0.0, 0.0, 0.0]], dtype=torch.float16).view(1, 2, 1, 3)
    normalized = map_features(x, normalization="sum", eps=1e-5)
    assert normalized.dtype == torch.float32
    torch.testing.assert_close(normalized, x.float() / (x.float().sum(-1, keepdim=True) + 1e-5), rtol=1e-6, atol=0)
    # ELU as exp(x) - 1 would lose these to rounding; Eq. 30 gives them as exp(x).
    x = torch.tensor([-20.0, -21.0]).view(1, 1, 1, 2)
    phi, _ = build("elu", head_dim=2)(x, x, normalize=True)
    torch.testing.assert_close(phi, torch.softmax(x, dim=-1), rtol=1e-6, atol=0)


SIZES = [
    *[("identity", {}, 4, 4), ("elu", {"feature_dim": 7}, 7, 7), ("tanh", {"feature_dim": 2}, 2, 2)],
    *[("relu", {"feature_dim": 7}, 4, 7), ("dpfp", {"dpfp_nu": 3, "feature_dim": 24}, 4, 24)],
    ("dpfp", {"dpfp_nu": 3, "head_dim": 64}, 64, 384),  # Table 6
    *[("favor", {}, 4, 12), ("favor", {"head_dim": 64}, 64, 532)],  # 2 round(4 ln 4); the paper's m = 266, Sec. 6.2
    ("favor", {"head_dim": 1}, 1, 2),  # at least one feature, though ln 1 = 0
    ("favor-schlag", {"head_dim": 64, "favor_features": 192}, 64, 384),  # Table 6
    *[("favor", {"feature_dim": 10}, 4, 10), ("favor", {"favor_features": 3, "feature_dim": 6}, 4, 6)],
]


def test_sizes_and_the_scale_that_relu_starts_with():
    for name, options, key_dim, output_dim in SIZES:
        feature_map = build(name, **options)
        assert type(feature_map) is FEATURE_MAPS[name]
        assert (feature_map.key_dim, feature_map.output_dim) == (key_dim, output_dim), (name, options)
    phi, _ = build("relu", head_dim=64, feature_dim=512)(*queries_and_keys(64, torch.float32))
    # 30 vectors of 64 numbers estimate a mean square of 1 to 3 %, the 512 features to about 2 %.
    assert phi.square().mean().item() == pytest.approx(1, abs=0.15)


IMPOSSIBLE = [
    ("softmax", {}, r"feature map 'softmax'.* identity, elu, relu, favor, favor-schlag, dpfp, tanh"),
    *[
        ("elu", {"num_heads": 0}, "num_heads is 0; .*at least 1"),
        ("elu", {"head_dim": -4}, "head_dim is -4; .*at least 1"),
    ],
    ("elu", {"feature_dim": 2.5}, r"feature_dim is 2\.5; .*an integer of at least 1"),
    *(("dpfp", {"dpfp_nu": nu}, f"dpfp_nu is {nu}; .*head_dim 4 .*from 1 to 7") for nu in (0, 8)),
    ("dpfp", {"dpfp_nu": 2, "feature_dim": 8}, "feature_dim is 8; .*dpfp_nu = 16"),
    ("favor", {"favor_features": 0}, "favor_features is 0; .*at least 1"),
    ("favor", {"feature_dim": 7}, "feature_dim is 7; .*favor .*even"),
    ("favor", {"favor_features": 4, "feature_dim": 6}, "feature_dim is 6; with favor_features 4 it must be 8"),
]


def test_impossible_maps_and_inputs_of_another_size_are_refused_by_name():
    for name, options, message in IMPOSSIBLE:
        with pytest.raises(ValueError, match=message):
            build(name, **options)
    good = torch.zeros(BATCH, TIME, HEADS, DIM)
    for name in FEATURE_MAPS:
        for q, k, argument in ((good[..., :3], good, "q"), (good, good[0], "k")):
            with pytest.raises(ValueError, match=rf"{argument} has shape .*\(batch, time, heads, 4\)"):
                build(name)(q, k)


@maps
def test_favor_takes_out_the_largest_feature_and_the_others_nothing(name, options, equation):
    """For each query; and for each key, or for all keys of a row and head."""
    feature_map = build(name, **options).double().eval()
    q, k = (3 * x for x in queries_and_keys(feature_map.key_dim))
    for scales, keys in (("queries", None), ("queries and source", (1, 3)), ("all", (3,))):
        for fixed, free, dims in zip(feature_map(q, k), feature_map(q, k, scales=scales), ((3,), keys), strict=True):
            factor = torch.ones(())
            if name.startswith("favor") and dims is not None:  # of the exponentials, and of what is added to them
                added = 1e-4 / math.sqrt(feature_map.output_dim) if name == "favor-schlag" else 0
                factor = (fixed - added).amax(dim=dims, keepdim=True).clamp(min=added)
            torch.testing.assert_close(free * factor, fixed)
