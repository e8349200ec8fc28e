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
    assert chosen.chunk in (32, 64) and chosen.columns in (48, 96) and chosen.segments >= 1
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


@pytest.mark.parametrize("segments", [1, 2, 5, 100])
def test_as_many_segments_as_asked_for_or_as_there_are_chunks(emulator, segments, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_CUDA_PLAN", f"chunk=32 segments={segments}")
    plan = emulator.plan("diagonal_forward", (2, 640, 3, 16, 16, 64), torch.float32)
    assert plan.segments == min(segments, 20)


@pytest.mark.parametrize(("heads", "segments"), [(1, 16), (32, 8), (66, 4), (67, 7), (100, 5), (132, 1), (400, 1)])
def test_time_is_divided_where_heads_leave_multiprocessors_idle(emulator, heads, segments):
    """Of 132, on each of which two blocks work side by side in a quarter more time than one, into 4 of 64 chunks or
    more. With 67 to 100 heads it pays still, though the segments' first launch is half as much work again."""
    plan = emulator.plan("diagonal_forward", (1, 4096, heads, 64, 64, 128), torch.bfloat16)
    assert plan.chunk == 64 and plan.segments == segments


@pytest.mark.parametrize(("dtype", "segments"), [(torch.bfloat16, 32), (torch.float32, 16)])
def test_time_is_divided_among_as_many_blocks_as_registers_have_room_for(emulator, dtype, segments):
    """8 heads on 132 multiprocessors, whose shared memory has room for two blocks of either type."""
    plan = emulator.plan("delta_backward", (1, 16384, 8, 64, 64, 128), dtype)
    assert plan.shared <= 113 * 1024 and plan.segments == segments


@pytest.mark.parametrize(("value_dim", "capability", "plan"), [(160, 90, (32, 128)), (112, 80, (32, 112))])
def test_a_plan_counts_on_as_many_blocks_as_registers_have_room_for(emulator, value_dim, capability, plan):
    """With four blocks side by side on a multiprocessor 64 columns would pay, or chunks of 16 steps; of the gated delta
    rule's way back there are two."""
    sizes = (8, 1024, 8, 16, value_dim, 64)
    found = emulator.plan("delta_backward", sizes, torch.bfloat16, gated=True, capability=capability)
    assert found.threads == 128 and (found.chunk, found.columns) == plan
