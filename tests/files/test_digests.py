"""The digest of a checkpoint's weights depends on their values, not on how they are stored."""

import io
import zlib
from collections import OrderedDict
from typing import Any

import pytest
import torch

from fairseq_fastweights.files.digests import DIGESTS, crc32, is_changed, model_digest, with_digests

MODEL = OrderedDict(w=torch.arange(6.0).view(2, 3), half=torch.ones(3).bfloat16(), n=torch.tensor(7))


def saved_and_loaded(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_those_that_were_written_before_are_still_checked():
    before = ["args 879b3b231f0f55b5", "model fda718ff77a8106f", "extra_state c69df97ba661b383"]
    assert is_changed({"args": 1, "model": MODEL, DIGESTS: before}) is False
    assert is_changed({"model": MODEL, DIGESTS: before[::2]}) is is_changed({"model": MODEL, DIGESTS: 3}) is True
    numbers = bytes(range(256)) * 100
    assert all(crc32(numbers[n:]) == zlib.crc32(numbers[n:]) for n in (*range(20), len(numbers)))


@pytest.mark.parametrize("zipped", [True, False])
def test_they_outlive_every_format(zipped):
    both = torch.arange(12.0)
    unusual = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "parts": [both[:6], both[6:]],
        "first": both[:6],
        "last": both[6:],
        "empty": torch.empty(0, 3),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.ones(2, 2).to_sparse(),
        "none": None,
    }
    before = with_digests({"model": unusual})
    assert is_changed(before) is is_changed(saved_and_loaded(before, _use_new_zipfile_serialization=zipped)) is False


OTHERS: list[dict[str, Any]] = [
    {**MODEL, "w": torch.arange(6.0).view(3, 2)},
    {**MODEL, "w": torch.arange(6).view(2, 3)},
    {**MODEL, "w": torch.tensor([[0, 1, 2], [3, 4, 5.0000005]])},
    {**MODEL, "w": MODEL["w"].flip(0).flip(1)},
    dict(reversed(MODEL.items())),
    {**MODEL, "more": None},
]


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_other_weights_have_another_digest(other):
    assert model_digest(other) != model_digest(MODEL) == model_digest(dict(MODEL))
    assert is_changed({**with_digests({"model": MODEL}), "model": other}) is True


def test_weights_count_as_they_are_and_not_as_they_are_stored():
    turned = torch.arange(6.0).view(2, 3).t()
    assert (
        model_digest({"w": turned})
        == model_digest({"w": turned.contiguous()})
        != model_digest({"w": turned.T.view(3, 2)})
    )


def test_other_objects_and_checkpoints_without_digests_pass():
    assert with_digests(MODEL) is MODEL and is_changed(MODEL) is is_changed([1]) is is_changed({"model": MODEL}) is None
