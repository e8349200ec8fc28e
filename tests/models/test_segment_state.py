"""A segment reads what the one before left, row by row, and never what it wrote itself."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.models.segment_state import SegmentState

ROWS = 3


def continues(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def carried(*keys: str, rows: int = ROWS) -> dict[str, dict[str, torch.Tensor]]:
    """One buffer a key, all different, none zero."""
    return {key: {"state": torch.arange(1.0, rows * 4 + 1).view(rows, 2, 2) + 100 * i} for i, key in enumerate(keys)}


def test_nothing_is_read_where_nothing_was_carried():
    for rows in (continues(1, 1, 1), continues(0, 0, 0)):
        state = SegmentState({}, rows)
        assert "a" not in state and state.get("a") is None and not state.detached()


def test_rows_that_continue_are_read_and_others_start_from_zeros():
    before = carried("a", "b")
    state = SegmentState(before, continues(1, 0, 1))
    for key, buffer in before.items():
        assert torch.equal(state[key]["state"][[0, 2]], buffer["state"][[0, 2]])
        assert not state[key]["state"][1].any()
    # The states that the next segment may still want are not touched.
    assert torch.equal(before["a"]["state"], carried("a")["a"]["state"])


def test_rows_that_do_not_continue_forget_even_what_is_not_a_number():
    before = carried("a")
    before["a"]["state"][1] = float("nan")
    assert not SegmentState(before, continues(1, 0, 1))["a"]["state"][1].any()


def test_what_is_written_is_for_the_next_segment_only():
    state = SegmentState(carried("a"), continues(1, 1, 1))
    read = state["a"]["state"].clone()
    written = torch.full((ROWS, 2, 2), 7.0)
    state["a"] = {"state": written}
    state["b"] = {"state": written}
    # A layer that is computed again, for its gradients, has to start where it started.
    assert torch.equal(state["a"]["state"], read)
    assert "b" not in state
    following = SegmentState(state.detached(), continues(1, 1, 1))
    assert torch.equal(following["a"]["state"], written)
    assert torch.equal(following["b"]["state"], written)


def test_a_layer_that_was_dropped_passes_on_what_it_was_given():
    state = SegmentState(carried("dropped", "computed"), continues(1, 0, 1))
    state["computed"] = {"state": torch.zeros(ROWS, 2, 2)}
    left = state.detached()
    # Including that the second row began anew.
    assert torch.equal(left["dropped"]["state"], state["dropped"]["state"])
    assert not left["dropped"]["state"][1].any() and left["dropped"]["state"][0].all()


def test_gradients_stop_at_the_edge():
    x = torch.ones(ROWS, 1, requires_grad=True)
    state = SegmentState({"kept": {"state": 2 * x}}, continues(1, 1, 1))
    state["written"] = {"state": 3 * x}
    assert not any(buffer["state"].requires_grad for buffer in state.detached().values())


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_of_another_size_cannot_continue(rows):
    with pytest.raises(ValueError, match=rf"continues has {rows} rows, .* had 3; .*same size"):
        SegmentState(carried("a"), torch.ones(rows, dtype=torch.bool))
    some = torch.zeros(rows, dtype=torch.bool)
    some[-1] = True
    with pytest.raises(ValueError, match="same size"):
        SegmentState(carried("a"), some)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_of_another_size_can_begin(rows):
    state = SegmentState(carried("a"), torch.zeros(rows, dtype=torch.bool))
    assert "a" not in state and not state.detached()
    state["a"] = {"state": torch.ones(rows, 1)}
    assert state.detached()["a"]["state"].shape == (rows, 1)
