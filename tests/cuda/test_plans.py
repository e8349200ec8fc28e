"""How the chunked kernels divide their work, and the plans that a benchmark can ask for."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cuda.emulated import OPERATIONS


@pytest.mark.parametrize("decays", [0, 1, 2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_plan_is_the_one_asked_for_or_none(emulator, operation, decays, monkeypatch):
    sizes = (2, 300, 3, 40, 90, 128)
    most = 2 if decays and operation == "delta_backward" else 4  # there is no room for more
    for columns, stages, segments in itertools.product((16, 32, 64), (1, 2, most), (1, 2)):
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"columns={columns} stages={stages} segments={segments}")
        plan = emulator.plan(operation, sizes, torch.bfloat16, separate_decays=decays)
        found = (plan.columns, plan.stages, plan.segments, plan.threads)
        assert found == (columns, stages, segments, 2 * columns) and plan.blocks == -(-90 // plan.columns)
        assert plan.cycles > 0 and 0 < plan.shared <= 227 * 1024
    # Steps follow one another where there is none such, or where chunks of 64 would not end at an interval.
    for text, interval in (("columns=48", 128), ("stages=3", 128), ("", 96)):
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", text)
        asked = operation, (*sizes[:5], interval), torch.bfloat16
        assert emulator.plan(*asked, separate_decays=decays).columns == 0
        assert emulator.choose(*asked, separate_decays=decays) == "recurrent"


@pytest.mark.parametrize("segments", [1, 2, 5, 100])
def test_as_many_segments_as_asked_for_or_as_there_are_chunks(emulator, segments, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"segments={segments} slice=20")
    plan = emulator.plan("diagonal_forward", (2, 640, 3, 16, 16, 64), torch.float32)
    assert plan.segments == min(segments, 10)


@pytest.mark.parametrize(("heads", "segments"), [(1, 16), (8, 16), (66, 4), (132, 1), (400, 1)])
def test_time_is_divided_where_heads_leave_multiprocessors_idle(emulator, heads, segments):
    """For 132 multiprocessors; into at most 16 of 64 chunks."""
    asked = "diagonal_forward", (1, 4096, heads, 64, 64, 128), torch.bfloat16
    assert emulator.plan(*asked).segments == segments


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_slice_has_no_more_chunks_than_a_grid_has_rows_of_blocks(emulator, way):
    """An interval more, and there are two slices, each of half of the chunks."""
    most, more = (
        emulator.workspace(f"diagonal_{way}", "chunked", (1, 64 * chunks, 1, 8, 8, 128), torch.bfloat16)
        for chunks in (65534, 65536)
    )
    assert more < 0.51 * most
