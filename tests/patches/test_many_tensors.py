"""Operators for all parameters together, and values that are read late, give the results of one for each."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.logging import meters, metrics
from fairseq.models.ema.ema import EMA
from fairseq.optim.adam import Adam
from fairseq.optim.nag import NAG
from torch import Tensor, nn

many_tensors = pytest.importorskip("fairseq.many_tensors", reason="needs tools/build_fairseq.py's fairseq")
late_values = pytest.importorskip("fairseq.logging.late_values", reason="needs tools/build_fairseq.py's fairseq")
from fairseq import host_copies  # noqa: E402

SHAPES = [(3, 5), (64, 130), (0, 4), (7,), ()]
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-6}


def draw(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def trained(dtype: torch.dtype, together: bool, steps: int = 30, state: dict | None = None, **settings) -> Adam:
    """Adam after some steps, with its parameters; in every other step the last one has no gradient (LayerDrop)."""
    optimizer = Adam([nn.Parameter(x) for x in draw(dtype)], **SETTINGS, **settings)
    optimizer.goes_together = together
    if state is not None:
        for p, x in zip(optimizer.param_groups[0]["params"], state["params"], strict=True):
            p.data.copy_(x)
        optimizer.load_state_dict(state["optimizer"])
    for number in range(steps):
        for p, x in zip(optimizer.param_groups[0]["params"], draw(dtype, number + 1), strict=True):
            p.grad = None if p.dim() == 0 and number % 2 else x
        optimizer.step()
    return optimizer


def values(optimizer: Adam) -> list[Tensor]:
    return [p.detach().double() for p in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_adam_is_as_exact_as_one_parameter_after_the_other(dtype, settings, monkeypatch):
    monkeypatch.setattr(many_tensors, "_PORTION", 20)  # of weights in 16 bits, which are rounded after every step
    exact = values(trained(torch.float64 if dtype == torch.float32 else dtype, False, **settings))
    loop, together = (values(trained(dtype, way, **settings)) for way in (False, True))
    for x, y, z in zip(exact, loop, together, strict=True):
        # Of numbers up to 4, where a step in 16 bits may be rounded to the other side.
        error = 2e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(y, x, rtol=0, atol=error)
        torch.testing.assert_close(z, x, rtol=0, atol=error)
        assert dtype != torch.float32 or not x.numel() or (z - x).abs().mean() <= 1.5 * (y - x).abs().mean() + 1e-8


def test_other_layouts_are_left_to_the_loop_and_sparse_gradients_refused():
    transposed, sparse = nn.Parameter(torch.randn(3, 5).t()), nn.Parameter(torch.randn(4, 2))
    alone = nn.Parameter(transposed.detach().contiguous())
    transposed.grad, alone.grad = torch.ones(5, 3), torch.ones(5, 3)
    for p in (transposed, alone):
        Adam([p], **SETTINGS).step()
    assert torch.equal(transposed, alone) or torch.allclose(transposed, alone, atol=1e-6)
    sparse.grad = torch.randn(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        Adam([sparse], **SETTINGS).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_accelerated_gradients_are_those_of_every_parameter(dtype, monkeypatch):
    monkeypatch.setattr(many_tensors, "_PORTION", 20)
    found = []
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(many_tensors, "NAG_ON", (device,))
        optimizer = NAG([nn.Parameter(x) for x in draw(dtype)], lr=0.1, momentum=0.9, weight_decay=0.1)
        params = optimizer.param_groups[0]["params"]
        for number in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            for p, x in zip(params, draw(dtype, number + 1), strict=True):
                p.grad = None if p.dim() == 0 and number % 2 else x
            optimizer.step()
        found.append([y for p in params for y in (p.detach(), optimizer.state[p]["momentum_buffer"])])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("most", [0.0, 0.5])
def test_gradients_are_measured_and_clipped(dtype, most):
    params = [nn.Parameter(x) for x in draw(dtype)]
    for p, x in zip(params, draw(dtype, 1), strict=True):
        p.grad = 100 * x
    params[0].grad = None
    grads = [p.grad.double() for p in params[1:]]
    norm = torch.cat([x.flatten() for x in grads]).norm()
    torch.testing.assert_close(utils.clip_grad_norm_(params, most).double(), norm, rtol=1e-6, atol=0)  # in float32
    for p, x in zip(params[1:], grads, strict=True):
        expected = x * most / (norm + 1e-6) if most else x
        torch.testing.assert_close(p.grad.double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert params[0].grad is None


def test_sparse_gradients_have_a_norm_and_are_multiplied():
    grads = [torch.tensor([[3.0, 0.0]]).to_sparse(), torch.tensor([4.0])]
    assert many_tensors.total_norm(grads, "cpu") == 5
    for factor in (2, torch.tensor(2.0)):
        many_tensors.multiply(grads, factor)
    assert [float(x.to_dense().sum()) for x in grads] == [12, 16]


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_moving_average_is_that_of_every_parameter(dtype, in_float32, monkeypatch):
    monkeypatch.setattr(many_tensors, "_PORTION", 5)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    config = SimpleNamespace(ema_decay=0.75, ema_fp32=in_float32, ema_seed_model=None, ema_start_update=0)
    config.ema_update_freq = 1
    average = EMA(model, config, skip_keys={"1.num_batches_tracked"})
    expected = {name: x.to(torch.float32 if in_float32 else dtype).clone() for name, x in model.state_dict().items()}
    for _ in range(3):
        for x in model.parameters():
            x.data += 1
        average.step(model)
        for name, x in model.state_dict().items():
            expected[name].mul_(0.75).add_(x.to(expected[name].dtype), alpha=0.25)
    for name, x in average.get_model().state_dict().items():
        if x.is_floating_point():
            assert torch.equal(x, expected[name].to(dtype)), name


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_of_both_ways_are_laid_out_alike_and_go_on_in_the_other(dtype, before):
    first = trained(dtype, before, 4)
    saved = copy.deepcopy(
        {"optimizer": first.state_dict(), "params": [p.detach() for p in first.param_groups[0]["params"]]}
    )
    other = trained(dtype, not before, 4).state_dict()
    assert saved["optimizer"]["param_groups"] == other["param_groups"]
    for number, state in other["state"].items():
        kept = saved["optimizer"]["state"][number]
        assert {name: getattr(x, "dtype", type(x)) for name, x in state.items()} == {
            name: getattr(x, "dtype", type(x)) for name, x in kept.items()
        }
    goes_on, changes = (trained(dtype, way, 4, state=copy.deepcopy(saved)) for way in (before, not before))
    for x, y in zip(values(goes_on), values(changes), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-3)


def test_gradients_are_copied_and_missing_ones_are_zeros():
    params = [nn.Parameter(x) for x in draw(torch.float16)]
    params[1].grad = torch.full_like(params[1], 3)
    targets = [torch.full(shape, torch.nan) for shape in SHAPES]
    many_tensors.copy_gradients(params, targets)
    assert all((target == (3 if i == 1 else 0)).all() for i, target in enumerate(targets))


UPDATES = [(2.5, 3), (0.1, 0), (7.25, 1), (None, 2), (1.0, 4)]


@pytest.mark.parametrize("most", [1000, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meters_that_were_given_tensors_say_what_they_say_of_numbers(dtype, most, monkeypatch):
    monkeypatch.setattr(late_values, "MOST", most)
    kinds = meters.AverageMeter(round=3), meters.SumMeter(round=3)
    for kind in kinds:
        of_numbers, of_tensors = copy.deepcopy(kind), copy.deepcopy(kind)
        for i, (value, weight) in enumerate(UPDATES):
            rounded = None if value is None else float(torch.tensor(value, dtype=dtype))
            tensor = None if value is None or i == 2 else torch.tensor([value] if i else value, dtype=dtype)
            weights = (weight,) if kind is kinds[0] else ()
            of_numbers.update(rounded, *weights)
            # The third is a plain number, among tensors that are not read yet.
            of_tensors.update(*((rounded, *weights) if i == 2 else (tensor, *map(torch.tensor, weights))))
        assert of_tensors.smoothed_value == of_numbers.smoothed_value
        assert of_tensors.state_dict() == of_numbers.state_dict()
        assert not any(map(torch.is_tensor, of_tensors.state_dict().values()))
        again = type(kind)()
        again.load_state_dict(of_tensors.state_dict())
        again.update(torch.tensor(1.0))
        of_numbers.update(1.0)
        assert again.smoothed_value == of_numbers.smoothed_value
        again.update(torch.tensor(5.0))
        again.reset()
        assert not again.sum


def test_speed_counts_tensors_and_sums_take_vectors():
    speed, total = meters.TimeMeter(), meters.SumMeter()
    for tokens in (3, torch.tensor(4), 5):
        speed.update(tokens)
        total.update(torch.tensor([1, 2]))
    assert speed.n == 12 and speed.i == 3 and total.sum.tolist() == [3, 6]


def test_numbers_come_one_exchange_late():
    late = late_values.LateNumbers()
    given = [late.exchange(torch.tensor(1.0), "first"), late.exchange(torch.tensor(2.0), "second")]
    assert [*given, late.take(), late.take()] == [(None, None), (1, "first"), (2, "second"), (None, None)]


def test_the_loss_is_not_read_when_it_is_logged():
    with metrics.aggregate(new_root=True) as logged:
        AdaptiveLoss.reduce_metrics([{"loss": torch.tensor([3.0]), "ntokens": 2, "sample_size": 2}])
        assert vars(logged["loss"])["_late"]
        assert logged["loss"].avg == pytest.approx(1.5 / 0.6931, rel=1e-4)


def test_a_copy_that_was_changed_is_not_what_it_was_copied_from():
    x = torch.arange(6).view(2, 3)
    moved = host_copies.remember(x.clone(), x)
    assert host_copies.known(moved) is x and torch.equal(host_copies.known(moved.view(-1)), x.view(-1))
    assert host_copies.contains(moved, 5) and not host_copies.contains(moved, 6)
    for other in (moved.t(), moved[:1], moved + 0):
        assert torch.equal(host_copies.on_host(other), other)
    for changed in (moved, x):
        changed[0, 0] = 6
        assert host_copies.contains(moved, 6) == bool(moved.eq(6).any())
        moved = host_copies.remember(x.clone(), x)
