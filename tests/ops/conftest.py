"""Settings that all tests of the operations run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fairseq_fastweights.ops import backends, libraries
from tests.ops.rules import DEVICE


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that a read of memory that was never written shows; kernels are loaded."""
    libraries.load(DEVICE.type)
    before = torch.are_deterministic_algorithms_enabled()
    # On a GPU torch's cumulative sums, which chunkwise takes, have no other algorithm.
    torch.use_deterministic_algorithms(True, warn_only=DEVICE.type != "cpu")
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call chooses its backend anew, so that a test may take kernels away."""

    class Forgets(dict[object, object]):
        def __setitem__(self, key: object, value: object) -> None:
            pass

    monkeypatch.setattr(backends, "chosen", Forgets())
