"""A value that is read late, or from a copy on the CPU, is the tensor's own."""

import copy

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.logging import meters, metrics

late_values = pytest.importorskip("fairseq.logging.late_values", reason="needs tools/build_fairseq.py's fairseq")
from fairseq import host_copies  # noqa: E402

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
