"""How the chunked kernels divide their work, and what a benchmark can ask of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cuda.emulated import OPERATIONS

PLANS = [
    f"chunk={chunk} columns={columns} stages={stages} threads={threads}"
    for chunk, columns, stages, threads in itertools.product((16, 32, 64), (16, 48, 96), (1, 2), (128, 256))
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_plan_is_what_was_asked_for_or_none(emulator, operation, monkeypatch):
    sizes = (2, 300, 3, 40, 90, 128)
    chosen = emulator.plan(operation, sizes, torch.bfloat16)
    assert chosen.chunk in (16, 32, 64) and chosen.columns in (16, 32, 48, 64, 96) and chosen.segments >= 1
    for text in PLANS:
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", text)
        plan = emulator.plan(operation, sizes, torch.bfloat16)
        wanted = {name: int(number) for name, number in (word.split("=") for word in text.split())}
        wanted |= {"stages": 1} if operation.endswith("backward") else {}
        assert {name: getattr(plan, name) for name in wanted} == wanted
        assert plan.blocks == -(-90 // plan.columns) and 0 < plan.shared <= 227 * 1024
    for text in ("chunk=24", "columns=64", "threads=512", "chunk=128"):
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", text)
        assert emulator.plan(operation, sizes, torch.bfloat16).chunk == 0
        assert emulator.choose(operation, sizes, torch.bfloat16) == "recurrent"


@pytest.mark.parametrize("decays", [0, 1, 2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_walk_is_what_was_asked_for_or_none(emulator, operation, decays, monkeypatch):
    sizes = (2, 300, 3, 40, 90, 128)
    most = 2 if decays and operation == "delta_backward" else 4  # there is no room for more
    for columns, stages, segments in itertools.product((16, 32, 64), (1, 2, most), (1, 2)):
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"walk=1 columns={columns} stages={stages} segments={segments}")
        plan = emulator.plan(operation, sizes, torch.bfloat16, separate_decays=decays)
        found = (plan.chunk, plan.columns, plan.stages, plan.segments, plan.threads)
        assert found == (64, columns, stages, segments, 2 * columns) and plan.blocks == -(-90 // columns)
    # Chunks follow one another where there is none such, or where chunks of 64 would not end at an interval.
    for text, interval in (("walk=1 columns=48", 128), ("walk=1", 96), ("walk=-1", 128)):
        monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", text)
        assert emulator.plan(operation, (*sizes[:5], interval), torch.bfloat16, separate_decays=decays).cycles > 0
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "walk=1")
    plan = emulator.plan(operation, sizes, torch.bfloat16, separate_decays=decays)
    assert plan.cycles == 0, "what is asked for is the cheapest"
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "")
    if decays:
        assert emulator.plan(operation, sizes, torch.bfloat16, separate_decays=decays).walk == 1


@pytest.mark.parametrize("segments", [1, 2, 5, 100])
def test_as_many_segments_as_asked_for_or_as_there_are_chunks(emulator, segments, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"chunk=32 segments={segments}")
    plan = emulator.plan("diagonal_forward", (2, 640, 3, 16, 16, 64), torch.float32)
    assert plan.segments == min(segments, 20)


@pytest.mark.parametrize(("heads", "segments"), [(1, 32), (8, 16), (33, 8), (66, 4), (132, 1), (400, 1)])
def test_time_is_divided_where_heads_leave_multiprocessors_idle(emulator, heads, segments, monkeypatch):
    """For 132, each of which has room for two blocks and more; into 4 of 128 chunks or more."""
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "walk=-1")
    asked = "diagonal_forward", (1, 4096, heads, 64, 64, 128), torch.bfloat16
    assert emulator.plan(*asked).segments == segments


@pytest.mark.parametrize(
    ("operation", "dtype", "gated", "at_once"),
    [
        ("diagonal_forward", torch.bfloat16, False, 2),
        ("delta_backward", torch.bfloat16, False, 2),
        ("delta_backward", torch.bfloat16, True, 1),
        ("delta_backward", torch.float32, False, 1),
    ],
)
def test_a_multiprocessor_has_room_for_the_blocks_registers_allow(
    emulator, operation, dtype, gated, at_once, monkeypatch
):
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", "chunk=32 columns=64 threads=256")
    plan = emulator.plan(operation, (8, 1024, 8, 64, 64, 64), dtype, gated=gated)
    assert plan.at_once == at_once and plan.shared <= 113 * 1024
