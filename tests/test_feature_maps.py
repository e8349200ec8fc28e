"""Feature maps are their papers' equations, FAVOR+ is the estimator that it claims to be, and what
a map cannot give is refused by name."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_fastweights.feature_maps import (
    FEATURE_MAPS,
    build_feature_map,
    orthogonal_features,
    sum_normalize,
)

BATCH, TIME, HEADS, DIM = 2, 5, 3, 4

# Two ways to round the same few float64 operations: some units of 2e-16, with room for a sum of 10.
FLOAT64 = {"rtol": 1e-13, "atol": 1e-13}

# Estimates from a fixed seed may be this many standard errors off. A few hundred comparisons share
# the bound; a normal deviate passes 5 with probability 6e-7.
STANDARD_ERRORS = 5


def build(name, **options):
    return build_feature_map(name, **{"num_heads": HEADS, "head_dim": DIM, **options})


def queries_and_keys(dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TIME, HEADS, dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in "qk"]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def elu_vector(feature_map, head, x):
    return [value + 1 if value > 0 else math.exp(value) for value in x]


def relu_vector(feature_map, head, x):
    weight, bias = feature_map.weight[head].tolist(), feature_map.bias[head].tolist()
    return [max(0.0, dot(row, x) + b) for row, b in zip(weight, bias, strict=True)]


def favor_vector(feature_map, head, x):
    x = [value / len(x) ** 0.25 for value in x]
    h = math.exp(-sum(value**2 for value in x) / 2) / math.sqrt(2)
    products = [dot(row, x) for row in feature_map.features.tolist()]
    scale = h / math.sqrt(len(products))
    return [scale * math.exp(sign * product) for sign in (1, -1) for product in products]


def dpfp_vector(feature_map, head, x):
    z = [max(0.0, value) for value in x] + [max(0.0, -value) for value in x]
    return [z[i] * z[i - j] for j in range(1, feature_map.nu + 1) for i in range(len(z))]


CASES = [
    pytest.param("identity", {}, lambda feature_map, head, x: x, id="identity"),
    pytest.param("elu", {}, elu_vector, id="elu"),
    pytest.param("tanh", {}, lambda feature_map, head, x: [math.tanh(v) for v in x], id="tanh"),
    pytest.param("relu", {"feature_dim": 6}, relu_vector, id="relu"),
    pytest.param("favor", {"favor_features": 1}, favor_vector, id="favor-1"),
    pytest.param("favor", {"favor_features": 9}, favor_vector, id="favor-9"),
    *(pytest.param("dpfp", {"dpfp_nu": nu}, dpfp_vector, id=f"dpfp-{nu}") for nu in range(1, 2 * DIM)),
]


@pytest.mark.parametrize(("name", "options", "equation"), CASES)
def test_map_is_its_equation_for_every_vector(name, options, equation):
    feature_map = build(name, **options).double().eval()
    if name == "relu":
        torch.nn.init.normal_(feature_map.bias)
    inputs = queries_and_keys(feature_map.key_dim)
    for x, phi in zip(inputs, feature_map(*inputs), strict=True):
        vectors = [equation(feature_map, i % HEADS, vector.tolist()) for i, vector in enumerate(x.flatten(0, 2))]
        expected = torch.tensor(vectors, dtype=torch.float64)
        torch.testing.assert_close(phi.flatten(0, 2), expected, **FLOAT64)
        assert phi.shape == (BATCH, TIME, HEADS, feature_map.output_dim)
        assert not feature_map.positive or (phi >= 0).all()


@pytest.mark.parametrize(("name", "options", "_"), CASES)
def test_gradients_are_those_of_finite_differences(name, options, _):
    feature_map = build(name, **options).double().eval()
    inputs = [x[:1, :1].contiguous().requires_grad_() for x in queries_and_keys(DIM)]
    assert torch.autograd.gradcheck(feature_map, inputs)


@pytest.mark.parametrize(("name", "options", "_"), CASES)
def test_queries_and_keys_may_differ_in_time_and_be_empty(name, options, _):
    feature_map = build(name, **options)
    q, k = queries_and_keys(DIM, torch.float32)
    phi_q, phi_k = feature_map(q, k[:, :0])
    assert phi_q.shape == (BATCH, TIME, HEADS, feature_map.output_dim)
    assert phi_k.shape == (BATCH, 0, HEADS, feature_map.output_dim)


# ---------------------------------------------------------------------------------- DPFP


@pytest.mark.parametrize("nu", [1, 2, 3, 7])
def test_dpfp_listing_is_equation_37_with_each_block_rotated(nu):
    feature_map = build("dpfp", dpfp_nu=nu)
    x, _ = queries_and_keys(DIM)
    z = F.relu(torch.cat([x, -x], dim=-1))
    blocks = feature_map(x, x)[0].unflatten(-1, (nu, 2 * DIM))
    for j in range(1, nu + 1):
        products = [z[..., i] * z[..., (i + j) % (2 * DIM)] for i in range(2 * DIM)]
        equation = torch.stack(products, dim=-1)
        # The same two factors in the other order: exactly equal.
        assert torch.equal(blocks[..., j - 1, :], equation.roll(j, dims=-1))


@pytest.mark.parametrize("x", [(0.5, 2.0), (-0.5, 2.0), (0.5, -2.0), (-0.5, -2.0)])
def test_dpfp_of_the_plane_has_one_feature_for_each_quadrant(x):
    phi, _ = build("dpfp", head_dim=2)(*[torch.tensor(x).view(1, 1, 1, 2)] * 2)
    signs = [(a, b) for a in (1, -1) for b in (1, -1)]
    equations_33_to_36 = [max(0.0, a * x[0]) * max(0.0, b * x[1]) for a, b in signs]
    # Products of powers of two: exact. The paper's example numbers the features in another order.
    assert sorted(phi.flatten().tolist()) == sorted(equations_33_to_36) == [0, 0, 0, 1]


def test_dpfp_projections_of_different_quadrants_are_orthogonal():
    quadrants = torch.tensor([(1.0, 2.0), (-1.0, 2.0), (1.0, -2.0), (-1.0, -2.0)])
    phi, _ = build("dpfp", head_dim=2)(*[quadrants.view(1, 4, 1, 2)] * 2)
    phi = phi.squeeze()
    assert torch.equal(phi @ phi.t(), 4 * torch.eye(4))


# --------------------------------------------------------------------------------- FAVOR+


@pytest.mark.parametrize("num_features", [1, 6])
def test_favor_is_an_unbiased_estimate_of_the_softmax_kernel(num_features):
    torch.manual_seed(1)
    feature_map = build("favor", favor_features=num_features).train()
    # Short vectors, because the estimate's variance grows with exp(|q + k|^2).
    q, k = (x / 3 for x in queries_and_keys(DIM))
    kernel = torch.exp((q * k).sum(-1) / math.sqrt(DIM))
    pairs = (feature_map(q, k) for _ in range(1000))
    draws = torch.stack([(phi_q * phi_k).sum(-1) for phi_q, phi_k in pairs])
    standard_error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - kernel).abs() < STANDARD_ERRORS * standard_error).all()
    # Else the bound above would say nothing.
    assert (standard_error < 0.1 * kernel).all()


def test_favor_estimates_better_with_more_features():
    torch.manual_seed(2)
    q, k = (x / 2 for x in queries_and_keys(DIM))
    kernel = torch.exp((q * k).sum(-1) / math.sqrt(DIM))

    def error(num_features):
        phi_q, phi_k = build("favor", favor_features=num_features).double().eval()(q, k)
        return ((phi_q * phi_k).sum(-1) / kernel - 1).square().mean().sqrt()

    # The error falls as 1 / sqrt(m): by 16 here. A quarter of that leaves room for chance.
    assert error(4096) < error(16) / 4


@pytest.mark.parametrize(("num_features", "dim"), [(3, 5), (5, 5), (13, 5), (2, 1), (1, 64)])
def test_rows_within_a_block_are_orthogonal(num_features, dim):
    torch.manual_seed(3)
    features = orthogonal_features(num_features, dim, dtype=torch.float64)
    assert features.shape == (num_features, dim)
    for block in features.split(dim):
        gram = F.normalize(block, dim=-1) @ F.normalize(block, dim=-1).t()
        torch.testing.assert_close(gram, torch.eye(len(block), dtype=torch.float64), **FLOAT64)


def test_blocks_are_drawn_independently():
    torch.manual_seed(4)
    first, second = F.normalize(orthogonal_features(10, 5), dim=-1).split(5)
    assert (first @ second.t()).abs().max() > 0.1


def test_every_row_of_a_block_is_a_standard_normal_vector():
    torch.manual_seed(5)
    dim, count = 4, 20000
    blocks = orthogonal_features(count * dim, dim, dtype=torch.float64).view(count, dim, dim)

    def check(samples, expected):
        standard_error = samples.std(0) / math.sqrt(count)
        assert ((samples.mean(0) - expected).abs() < STANDARD_ERRORS * standard_error).all()

    # Position by position: a QR whose signs are left as they come fails the first of these.
    check(blocks, 0)
    check(blocks.unsqueeze(-1) * blocks.unsqueeze(-2), torch.eye(dim, dtype=torch.float64))
    # The squared norm is chi-squared: mean dim, variance 2 dim.
    squared_norms = blocks.square().sum(-1)
    check(squared_norms, dim)
    check((squared_norms - dim).square(), 2 * dim)


@pytest.mark.parametrize("training", [True, False])
def test_favor_uses_orthogonal_features(training):
    feature_map = build("favor", favor_features=DIM).train(training)
    axes = DIM**0.25 * torch.eye(DIM, dtype=torch.float64).view(1, DIM, 1, DIM)
    positive, negative = feature_map(axes, axes)[0].squeeze().split(DIM, dim=-1)
    # R times each axis, from exp(R x) / exp(-R x).
    features = F.normalize((positive / negative).log().t(), dim=-1)
    # The buffer is drawn in float32.
    torch.testing.assert_close(features @ features.t(), torch.eye(DIM).double(), rtol=0, atol=1e-5)


def test_favor_draws_anew_in_training_only():
    feature_map = build("favor")
    inputs = queries_and_keys(DIM)
    before = feature_map.features.clone()
    assert not torch.equal(feature_map.train()(*inputs)[0], feature_map(*inputs)[0])
    assert torch.equal(feature_map.eval()(*inputs)[0], feature_map(*inputs)[0])
    assert torch.equal(feature_map.features, before)


@pytest.mark.parametrize("training", [True, False])
def test_favor_maps_queries_keys_and_heads_with_one_draw(training):
    x, _ = queries_and_keys(DIM)
    x = x[:, :, :1].expand_as(x)
    phi_q, phi_k = build("favor").train(training)(x, x)
    assert torch.equal(phi_q, phi_k)
    assert torch.equal(phi_q, phi_q[:, :, :1].expand_as(phi_q))


def test_favor_draw_follows_the_global_generator():
    feature_map = build("favor").train()
    inputs = queries_and_keys(DIM)
    outputs = []
    for seed in (6, 6, 7):
        torch.manual_seed(seed)
        outputs.append(feature_map(*inputs)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_favor_draw_of_evaluation_survives_the_state_dict():
    old, new = build("favor").eval(), build("favor").eval()
    inputs = queries_and_keys(DIM)
    assert not torch.equal(old(*inputs)[0], new(*inputs)[0])
    new.load_state_dict(old.state_dict())
    assert torch.equal(old(*inputs)[0], new(*inputs)[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_favor_gradients_are_the_same_under_activation_checkpointing(use_reentrant):
    feature_map = build("favor").train()

    def loss(q, k):
        phi_q, phi_k = feature_map(q, k)
        return (phi_q * phi_k).sum(-1).square().sum()

    def gradients(seed, run):
        torch.manual_seed(seed)
        inputs = [x.requires_grad_() for x in queries_and_keys(DIM)]
        run(*inputs).backward()
        return [x.grad for x in inputs]

    def recomputed(q, k):
        return checkpoint(loss, q, k, use_reentrant=use_reentrant)

    plain, again, other = gradients(8, loss), gradients(8, recomputed), gradients(9, loss)
    for i in range(2):
        assert torch.equal(plain[i], again[i])
        assert not torch.equal(plain[i], other[i])


def test_favor_keeps_the_exponents_together():
    # exp(R x) overflows float32 here while |x|^2 / 2 outweighs it.
    feature_map = build("favor", favor_features=64).eval()
    x = torch.full((1, 1, 1, DIM), 60.0)
    assert torch.exp(x @ feature_map.features.t()).isinf().any()
    assert feature_map(x, x)[0].isfinite().all()


# ---------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(("name", "options", "_"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_inputs_are_mapped_in_float32(name, options, _, dtype):
    feature_map = build(name, **options).eval()
    inputs = queries_and_keys(DIM, dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    expected = feature_map(*(x.to(compute) for x in inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = feature_map(*inputs)
    for outputs in (feature_map(*inputs), under_autocast):
        for phi, reference in zip(outputs, expected, strict=True):
            assert phi.dtype == (dtype if name == "identity" else compute)
            assert torch.equal(phi.to(compute), reference)


@pytest.mark.parametrize(("name", "options", "_"), CASES)
@pytest.mark.parametrize("training", [True, False])
def test_maps_whose_parameters_are_half_precision_still_answer_in_float32(name, options, _, training):
    feature_map = build(name, **options).bfloat16().train(training)
    inputs = queries_and_keys(DIM, torch.bfloat16)
    expected_dtype = torch.bfloat16 if name == "identity" else torch.float32
    assert all(phi.dtype == expected_dtype for phi in feature_map(*inputs))


@pytest.mark.parametrize(("name", "options", "_"), CASES)
@pytest.mark.parametrize("training", [True, False])
def test_maps_on_meta_tell_the_shapes(name, options, _, training):
    feature_map = build(name, **options).to("meta").train(training)
    for phi in feature_map(*(x.to("meta") for x in queries_and_keys(DIM))):
        assert phi.is_meta and phi.shape == (BATCH, TIME, HEADS, feature_map.output_dim)


# ----------------------------------------------------------------------- sum normalisation


@pytest.mark.parametrize(("name", "options", "_"), CASES)
def test_sum_normalisation_makes_components_sum_to_one(name, options, _):
    feature_map = build(name, **options).double().eval()
    for phi in feature_map(*queries_and_keys(DIM)):
        total = phi.sum(-1)
        normalized = sum_normalize(phi, eps=feature_map.sum_eps)
        expected = total / (total + (1e-5 if feature_map.may_vanish else 0))
        # Rounding is relative to the largest component; a sum of mixed signs is smaller, here by
        # less than 1000.
        torch.testing.assert_close(normalized.sum(-1), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize(("name", "options", "_"), CASES)
def test_only_maps_that_may_vanish_do(name, options, _):
    feature_map = build(name, **options).eval()
    phi, _ = feature_map(*[torch.zeros(1, 1, HEADS, DIM)] * 2)
    assert (phi == 0).all() if feature_map.may_vanish else (phi > 0).all()
    assert feature_map.sum_eps == (1e-5 if feature_map.may_vanish else 0)


@pytest.mark.parametrize(("name", "options", "_"), CASES)
@pytest.mark.parametrize("value", [0.0, -30.0, 30.0, -1000.0])
def test_sum_normalisation_is_finite_where_a_map_vanishes(name, options, _, value):
    feature_map = build(name, **options).eval()
    x = torch.full((1, 1, HEADS, DIM), value, requires_grad=True)
    normalized = sum_normalize(feature_map(x, x)[0], eps=feature_map.sum_eps)
    (gradient,) = torch.autograd.grad(normalized.square().sum(), x)
    assert normalized.isfinite().all() and gradient.isfinite().all()
    assert not feature_map.positive or (normalized.sum(-1) < 1 + 1e-6).all()


def test_sum_normalisation_of_half_precision_is_done_in_float32():
    x = torch.tensor([[1.0, 2.0, 5.0], [0.0, 0.0, 0.0]], dtype=torch.float16)
    # 1e-5 is below the smallest normal float16.
    normalized = sum_normalize(x, eps=1e-5)
    assert normalized.dtype == torch.float32
    assert torch.equal(normalized, x.float() / (x.float().sum(-1, keepdim=True) + 1e-5))


def test_elu_keeps_very_small_features_apart():
    # ELU as exp(x) - 1 would lose these to rounding; Eq. 30 gives them as exp(x).
    x = torch.tensor([-20.0, -21.0]).view(1, 1, 1, 2)
    phi, _ = build("elu", head_dim=2)(x, x)
    # float32 rounds exp and a quotient to 6e-8 each.
    torch.testing.assert_close(sum_normalize(phi, eps=0.0), torch.softmax(x, dim=-1), rtol=1e-6, atol=0)


# ----------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("name", "options", "key_dim", "output_dim"),
    [
        ("identity", {}, 4, 4),
        ("identity", {"feature_dim": 7}, 7, 7),
        ("elu", {}, 4, 4),
        ("elu", {"feature_dim": 7}, 7, 7),
        ("tanh", {"feature_dim": 2}, 2, 2),
        ("relu", {}, 4, 4),
        ("relu", {"feature_dim": 7}, 4, 7),
        ("dpfp", {}, 4, 8),
        ("dpfp", {"dpfp_nu": 3, "feature_dim": 24}, 4, 24),
        ("dpfp", {"dpfp_nu": 3, "head_dim": 64}, 64, 384),  # Table 6
        ("favor", {}, 4, 12),  # 2 round(4 ln 4)
        ("favor", {"head_dim": 64}, 64, 532),  # the paper's m = 266, Sec. 6.2
        ("favor", {"head_dim": 1}, 1, 2),  # at least one feature, though ln 1 = 0
        ("favor", {"feature_dim": 10}, 4, 10),
        ("favor", {"favor_features": 3}, 4, 6),
        ("favor", {"favor_features": 3, "feature_dim": 6}, 4, 6),
    ],
)
def test_sizes(name, options, key_dim, output_dim):
    feature_map = build(name, **options)
    assert type(feature_map) is FEATURE_MAPS[name]
    assert (feature_map.key_dim, feature_map.output_dim) == (key_dim, output_dim)


def test_relu_map_starts_with_features_at_the_scale_of_its_input():
    torch.manual_seed(10)
    feature_map = build("relu", head_dim=64, feature_dim=512)
    assert feature_map.weight.shape == (HEADS, 512, 64) and feature_map.bias.shape == (HEADS, 512)
    phi, _ = feature_map(*queries_and_keys(64, torch.float32))
    # 30 vectors of 64 numbers estimate a mean square of 1 to 3 %, the 512 features to about 2 %.
    assert phi.square().mean().item() == pytest.approx(1, abs=0.15)


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("softmax", {}, r"feature map 'softmax'.* identity, elu, relu, favor, dpfp, tanh"),
        ("elu", {"num_heads": 0}, r"num_heads is 0; .*positive"),
        ("elu", {"head_dim": -4}, r"head_dim is -4; .*positive"),
        ("elu", {"feature_dim": 0}, r"feature_dim is 0; .*positive"),
        ("elu", {"feature_dim": 2.5}, r"feature_dim is 2\.5; .*positive integer"),
        ("dpfp", {"dpfp_nu": 0}, r"dpfp_nu is 0; .*head_dim 4 .*from 1 to 7"),
        ("dpfp", {"dpfp_nu": 8}, r"dpfp_nu is 8; .*head_dim 4 .*from 1 to 7"),
        ("dpfp", {"dpfp_nu": 2, "feature_dim": 8}, r"feature_dim is 8; .*dpfp_nu = 16"),
        ("favor", {"favor_features": 0}, r"favor_features is 0; .*positive"),
        ("favor", {"feature_dim": 7}, r"feature_dim is 7; .*favor .*even"),
        (
            "favor",
            {"favor_features": 4, "feature_dim": 6},
            r"feature_dim is 6; with favor_features 4 it must be 8",
        ),
    ],
)
def test_impossible_maps_are_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_inputs_of_another_size_are_refused(name):
    good = torch.zeros(BATCH, TIME, HEADS, DIM)
    for q, k, argument in ((good[..., :3], good, "q"), (good, good[0], "k")):
        with pytest.raises(ValueError, match=rf"{argument} has shape .*\(batch, time, heads, 4\)"):
            build(name)(q, k)


# ---------------------------------------------------------------------------- factors that are divided out again


@pytest.mark.parametrize(
    ("scales", "together"),
    [("queries", [(3,), None]), ("queries and source", [(3,), (1, 3)]), ("all", [(3,), (3,)])],
)
@pytest.mark.parametrize(("name", "options", "_"), CASES)
def test_favor_takes_out_the_largest_feature_and_the_others_nothing(name, options, _, scales, together):
    """Of each query; and of each key, or of all keys of a row and head."""
    feature_map = build(name, **options).double().eval()
    torch.manual_seed(1)
    q, k = 3 * torch.randn(2, 2, 5, HEADS, feature_map.key_dim, dtype=torch.float64)
    for fixed, free, dims in zip(feature_map(q, k), feature_map(q, k, scales=scales), together, strict=True):
        factor = torch.ones(()) if name != "favor" or dims is None else fixed.amax(dim=dims, keepdim=True)
        torch.testing.assert_close(free * factor, fixed)


@pytest.mark.parametrize("scales", ["queries and source", "all"])
def test_favor_of_long_vectors_does_not_vanish_where_its_factor_is_free(scales):
    feature_map = build("favor", favor_features=16).eval()
    q, k = 200 * torch.randn(2, 1, 3, HEADS, DIM)
    assert all(x.max() == 0 for x in feature_map(q, k))
    assert all((x.amax(dim=(1, 3)) == 1).all() for x in feature_map(q, k, scales=scales))
