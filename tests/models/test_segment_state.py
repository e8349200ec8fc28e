"""A segment reads what the one before left, row by row, and never what it wrote itself."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.models.segment_state import SegmentState

ROWS = 3


def continues(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_rows_that_continue_are_read_and_others_start_from_zeros():
    for rows in (continues(1, 1, 1), continues(0, 0, 0)):
        nothing = SegmentState({}, rows)
        assert "a" not in nothing and nothing.get("a") is None and not nothing.detached()
    x = torch.arange(1.0, ROWS * 4 + 1).view(ROWS, 2, 2)
    x[1, 0] = float("nan")  # which 0 times it would be
    state = SegmentState({"a": {"state": x}, "b": {"state": -x}}, continues(1, 0, 1))
    for key, sign in (("a", 1), ("b", -1)):
        assert torch.equal(state[key]["state"][[0, 2]], sign * x[[0, 2]]) and not state[key]["state"][1].any()
    assert x[1].isnan().any()  # the states that the next segment may still want are not touched


def test_what_is_written_is_for_the_next_segment_only_and_without_gradients():
    """A layer that is computed again, for its gradients, has to start where it started."""
    x = torch.ones(ROWS, 2, 2, requires_grad=True)
    state = SegmentState({"a": {"state": 2 * x}, "dropped": {"state": 4 * x}}, continues(1, 0, 1))
    read = state["a"]["state"].clone()
    state["a"], state["b"] = {"state": 7 * x}, {"state": 3 * x}
    assert torch.equal(state["a"]["state"], read) and "b" not in state
    left = state.detached()
    assert {key: buffer["state"][:, 0, 0].tolist() for key, buffer in left.items()} == {
        "a": [7, 7, 7],
        "b": [3, 3, 3],
        # A layer that was dropped passes on what it was given, and that the second row began anew.
        "dropped": [4, 0, 4],
    }
    assert not any(buffer["state"].requires_grad for buffer in left.values())


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_of_another_size_can_begin_and_not_continue(rows):
    carried, some = {"a": {"state": torch.ones(ROWS, 2)}}, torch.zeros(rows, dtype=torch.bool)
    state = SegmentState(carried, some)
    assert "a" not in state and not state.detached()
    some[-1] = True
    with pytest.raises(ValueError, match=rf"continues has {rows} rows, .* had 3; .*same size"):
        SegmentState(carried, some)
