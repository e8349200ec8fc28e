"""A value that is read late, or asked of a copy, is the one that would have been read at once, of the tensor itself."""

import copy

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.logging import meters, metrics
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from torch.nn import functional as F

late_values = pytest.importorskip("fairseq.logging.late_values", reason="needs tools/build_fairseq.py's fairseq")
from fairseq import host_copies  # noqa: E402
from fairseq.modules import bands  # noqa: E402

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


def test_speed_counts_words_of_tensors():
    meter = meters.TimeMeter()
    for words in (3, torch.tensor(4), 5):
        meter.update(words)
    assert meter.n == 12 and meter.i == 3


def test_a_vector_is_no_number_and_stays_as_it_is():
    meter = meters.SumMeter()
    meter.update(torch.tensor([1, 2]))
    meter.update(torch.tensor([3, 4]))
    assert torch.equal(meter.sum, torch.tensor([4, 6]))


def test_numbers_come_one_exchange_late():
    late = late_values.LateNumbers()
    assert late.exchange(torch.tensor(1.0), "first") == (None, None)
    assert late.exchange(torch.tensor(2.0), "second") == (1, "first")
    assert late.take() == (2, "second") and late.take() == (None, None)


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


ENDS = [4, 6, 9, 12]


@pytest.mark.parametrize("words", [[[0, 11, 5], [4, 1, 3]], [[8, 8, 8]], [[0, 1, 3]], [[]]], ids=str)
def test_every_word_is_in_its_band(words):
    tensor = torch.tensor(words, dtype=torch.long)
    found, flat = bands.find(tensor, ENDS), tensor.view(-1)
    starts, joined = [0, *ENDS[:-1]], []
    for number, (places, numbers) in enumerate(zip(found.places, found.numbers, strict=True)):
        inside = [i for i, word in enumerate(flat.tolist()) if starts[number] <= word < ENDS[number]]
        assert (places is None and numbers is None and not inside) or (
            places.tolist() == inside and (numbers + starts[number]).tolist() == flat[inside].tolist()
        )
        joined += inside
        assert all(found.heads[i] == (flat[i] if number == 0 else 3 + number) for i in inside)
    assert [joined[i] for i in found.back] == list(range(flat.numel()))


def test_words_beyond_the_last_band_are_refused():
    with pytest.raises(ValueError, match="words range from 0 to 12; they must be from 0 to 11"):
        bands.find(torch.tensor([0, 12]), ENDS)


@pytest.mark.parametrize("words", [[[0, 11, 5], [4, 1, 3]], [[8, 8, 8]]], ids=str)
def test_adaptive_input_and_loss_are_those_of_every_word(words):
    torch.manual_seed(0)
    tokens = torch.tensor(words)
    embed = AdaptiveInput(12, 1, 8, 2, 8, ENDS[:-1])
    softmax = AdaptiveSoftmax(12, 8, ENDS[:-1], 0.0, factor=2, adaptive_inputs=embed, tie_proj=True)
    x = embed(tokens)
    for position, word in enumerate(tokens.view(-1).tolist()):
        band = next(i for i, end in enumerate(ENDS) if word < end)
        expected = embed.embeddings[band](torch.tensor(word - [0, *ENDS][band]))
        assert torch.allclose(x.view(-1, 8)[position], expected, atol=1e-6)
    scores = softmax.get_log_prob(x, None)
    output, target = softmax(x, tokens)
    loss = sum(
        F.cross_entropy(*pair, reduction="sum") for pair in zip(output, target, strict=True) if pair[0] is not None
    )
    assert torch.allclose(loss, -scores.gather(-1, tokens[..., None]).sum(), atol=1e-5)


def test_the_loss_is_not_read_when_it_is_logged():
    with metrics.aggregate(new_root=True) as logged:
        outputs = [{"loss": torch.tensor([3.0]), "ntokens": 2, "sample_size": 2}]
        AdaptiveLoss.reduce_metrics(outputs)
        assert vars(logged["loss"])["_late"]
        assert logged["loss"].avg == pytest.approx(1.5 / 0.6931, rel=1e-4)
