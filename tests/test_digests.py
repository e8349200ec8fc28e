"""Digests of a checkpoint's content say what it holds, and nothing of how it is stored."""

import io
import zlib
from argparse import Namespace
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from fairseq_fastweights.digests import DIGESTS, changed_parts, crc32, digests, with_digests


def state(**changes: Any) -> dict[str, Any]:
    weights = {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3).bfloat16(), "n": torch.tensor(7)}
    return {
        "args": Namespace(lr=0.5),
        "cfg": None,
        "model": OrderedDict(weights),
        "extra_state": {"x": [1, (2.5, "a")]},
    } | changes


def saved_and_loaded(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_those_that_were_written_before_are_still_checked():
    assert digests(state()) == {
        "args": "879b3b231f0f55b5",
        "model": "fda718ff77a8106f",
        "extra_state": "c69df97ba661b383",
    }
    numbers = bytes(range(256)) * 100
    assert all(crc32(numbers[n:]) == zlib.crc32(numbers[n:]) for n in (*range(20), len(numbers)))


@pytest.mark.parametrize("zipped", [True, False])
def test_they_outlive_every_format(zipped):
    unusual = {
        "expanded": torch.ones(2, 1).expand(2, 3),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.empty(0, 3),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(4, dtype=">i2"),
        "number": np.float32(0.1),
        "not a number": float("nan"),
        "set": {"b", "a"},
        "sparse": torch.ones(2, 2).to_sparse(),
    }
    before = with_digests(state(extra_state=unusual))
    assert changed_parts(before) == []
    assert [line.split()[0] for line in before[DIGESTS]] == ["args", "model", "extra_state"]
    assert changed_parts(saved_and_loaded(before, _use_new_zipfile_serialization=zipped)) == []


OTHERS = [
    {"model": OrderedDict(state()["model"], w=torch.arange(6.0).view(3, 2))},
    {"model": OrderedDict(state()["model"], w=torch.arange(6).view(2, 3))},
    {"model": OrderedDict(state()["model"], w=torch.tensor([[0, 1, 2], [3, 4, 5.0000005]]))},
    {"model": OrderedDict(reversed(state()["model"].items()))},
    {"model": {**state()["model"], "more": None}},
    {"extra_state": {"x": [1, [2.5, "a"]]}},
    {"extra_state": {"x": [True, (2.5, "a")]}},
    {"extra_state": {"y": [1, (2.5, "a")]}},
    {"args": Namespace(lr=0.25)},
    {"args": None},
    {"cfg": {}},
]


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_whatever_is_other_has_another_digest(other):
    (part,) = other
    found, before = digests(state(**other)), digests(state())
    assert found.get(part) != before.get(part)
    assert {name: x for name, x in found.items() if name != part} == {n: x for n, x in before.items() if n != part}
    assert changed_parts({**with_digests(state()), **other}) == [part]


def test_what_is_no_checkpoint_or_has_none_is_left_alone():
    weights = {"w": torch.ones(2)}
    assert with_digests(weights) is weights and changed_parts(weights) is None and changed_parts([1]) is None
    assert changed_parts(state()) is None and changed_parts({**state(), DIGESTS: 3}) == ["args", "extra_state", "model"]


def test_what_holds_itself_or_the_same_again_and_again_ends():
    again: list[Any] = []
    for _ in range(200):
        again = [again, again]
    again.append(again)
    assert digests(state(x=again)) == digests(state(x=again))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "model" in (changed_parts({**with_digests(state()), "x": deep}) or [])
    while deep:  # Python would free what is nested so deeply by calls that are nested as deeply
        deep = deep.pop()
