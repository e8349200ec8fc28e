"""Rules over segments in several processes, forward and backward, against one process with the whole text."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from sequence_parallel.run import RULES, run


def test_segments_in_processes_are_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forked, for a new process would take seconds to import torch.
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", partial(torch.multiprocessing.start_processes, start_method="fork")
    )
    # 37 steps, which 2 processes share unequally; a state that is not square.
    sizes = {"processes": 2, "batch": 2, "time": 37, "heads": 2, "key_dim": 5, "value_dim": 3}
    found = run(Namespace(**sizes, rules=RULES, measure=False), torch.float64)
    assert [row[:2] for row in found] == [(rule, rank) for rule in RULES for rank in range(2)]
    # Sums in another order.
    assert all(difference < 1e-12 for _, _, difference, *_ in found), found
