"""Steps in place: memory that is written and read, or written twice, is refused, however tensors lie in it."""

import itertools
import random

import pytest
import torch

from fairseq_fastweights import ops
from fairseq_fastweights.ops.checks import first_overlap, overlaps_itself
from tests.ops.agreement import assert_close
from tests.ops.results import named
from tests.ops.rules import BACKENDS, DEVICE, RULES

SIZES = {"B": 2, "H": 3, "K": 5, "V": 6}
SCAN = {"u": (2, 1, 6), "delta": (2, 1, 6), "A": (6, 8), "B": (2, 1, 8), "C": (2, 1, 8), "D": (6,)}


def within(state, x, first=0):
    """A tensor like `x` in the memory of `state`, from its element `first` on."""
    numbers = state.flatten() if x.dtype == state.dtype else state.flatten().view(torch.uint8).view(x.dtype)
    return numbers[first : first + x.numel()].view(x.shape)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("rule", RULES)
def test_inputs_in_the_memory_of_the_state_are_refused_and_named(rule, backend):
    """Before anything is written; beside it in one storage they are taken, and so are those that lie between it."""
    for steps in (1, 2):
        inputs = rule.inputs(**SIZES, T=steps, requires_grad=False)
        state = inputs.pop("initial_state").clone()
        starts = torch.zeros(2, steps, dtype=torch.bool, device=DEVICE)
        options = {"backend": backend, "in_place": True}
        for name, x in (inputs | {"starts": starts}).items():
            if x is None:
                continue
            before = state.clone()
            changed = {name: within(state, x, state.numel() - x.numel() if x.dtype == state.dtype else 0)}
            given, more = (inputs, changed) if name == "starts" else (inputs | changed, {})
            with pytest.raises(ValueError, match=rf"^{name} shares memory with initial_state and in_place is True"):
                rule.run(given | {"initial_state": state}, **options, **more)
            assert torch.equal(state, before)
        expected = named(rule.run(inputs | {"initial_state": state.clone()}, backend))
        storage = torch.zeros(2, 3, 5, 6 + 5 * steps, device=DEVICE)
        beside = storage[..., :6].copy_(state)
        # A head of the query of each step in the columns behind the state's.
        q = storage[:, :, 0, 6:].view(2, 3, steps, 5).transpose(1, 2).copy_(inputs["q"])
        assert_close(named(rule.run(inputs | {"q": q, "initial_state": beside}, **options)), expected, 1e-6)


@pytest.mark.parametrize("backend", [b for b in ("reference", *BACKENDS) if DEVICE.type == "cpu" or b != "native"])
def test_the_selective_scan_refuses_them_too(backend):
    inputs = {name: torch.rand(shape, device=DEVICE).neg() for name, shape in SCAN.items()}
    for name, x in inputs.items():
        state = torch.zeros(2, 6, 8, device=DEVICE)
        with pytest.raises(ValueError, match=rf"^{name} shares memory with initial_state"):
            ops.selective_scan(**inputs | {name: within(state, x)}, initial_state=state, in_place=True, backend=backend)
    state = torch.zeros(100, device=DEVICE).as_strided((2, 6, 8), (45, 7, 1))
    with pytest.raises(ValueError, match=r"initial_state has strides \(45, 7, 1\) and in_place is True"):
        ops.selective_scan(**inputs, initial_state=state, in_place=True, backend=backend)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_states_whose_rows_overlap_are_refused(backend):
    q, k, v = torch.randn(3, 2, 1, 2, 6, device=DEVICE)
    memory = torch.zeros(600, device=DEVICE)
    for strides, taken in (
        ((90, 40, 5, 1), False),  # rows
        ((90, 30, 6, 1), False),  # heads
        ((71, 36, 6, 1), False),  # batches
        ((0, 36, 6, 1), False),
        ((72, 36, 0, 1), False),
        ((200, 40, 1, 6), True),  # keys and values turned round
        ((6, 12, 24, 1), True),
        ((300, 6, 12, 1), True),  # heads between one another's rows
        ((300, 9, 18, 1), True),  # so with a gap
    ):
        state = memory.zero_().as_strided((2, 2, 6, 6), strides)
        if not taken:
            with pytest.raises(ValueError, match=r"initial_state has strides .* its elements must not share memory"):
                ops.sum_rule(q, k, v, initial_state=state, in_place=True, backend=backend)
            assert not memory.any()
        else:
            out, _ = ops.sum_rule(q, k, v, initial_state=state, in_place=True, backend=backend)
            assert_close(named((out, state)), named(ops.sum_rule(q, k, v)), 1e-6)
    one = memory[:72].view(2, 6, 6).expand(1, 2, 6, 6)  # a batch of one has any stride
    ops.sum_rule(q[:1], k[:1], v[:1], initial_state=one.as_strided(one.shape, (0, 36, 6, 1)), in_place=True)


@pytest.mark.slow
def test_compiled_code_reads_before_it_writes_and_refuses_overlapping_rows():
    torch.compiler.reset()

    def step(q, k, v, state):
        return ops.sum_rule(q, k, v, initial_state=state, in_place=True)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3):
            k, v = torch.randn(2, rows, 1, 2, 6, device=DEVICE)
            state = torch.randn(rows, 2, 6, 9, device=DEVICE)[..., :6]  # cropped
            whole = torch.randn(rows, 2, 6, 6, device=DEVICE)
            for q, start in ((torch.randn_like(k), state), (within(whole, k), whole)):
                expected = ops.sum_rule(q.clone(), k, v, initial_state=start.clone())
                compiled(q, k, v, start)
                assert_close({"state": start}, {"state": expected[1]}, 1e-6)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(k, k, v, torch.zeros(600, device=DEVICE).as_strided((3, 2, 6, 6), (90, 40, 5, 1)))


def test_other_storages_may_share_memory_and_those_without_share_none():
    if DEVICE.type == "cpu":
        state = torch.zeros(1, 1, 4, 4)
        q = torch.from_numpy(state.numpy())[:, :, :1]
        assert q.untyped_storage()._cdata != state.untyped_storage()._cdata
        with pytest.raises(ValueError, match="q shares memory"):
            ops.sum_rule(q, q.clone(), q.clone(), initial_state=state, in_place=True)
    x, state = torch.empty(1, 1, 1, 4, device="meta"), torch.empty(1, 1, 4, 4, device="meta")
    assert ops.sum_rule(x, x, x, initial_state=state, in_place=True)[1] is state
    assert first_overlap(torch.zeros(0, 4), [torch.zeros(4)]) is None
    with torch._subclasses.FakeTensorMode():
        x, state = torch.empty(1, 1, 1, 4), torch.empty(1, 1, 4, 4)
        assert ops.sum_rule(x, x, x, initial_state=state, in_place=True)[1] is state


def test_overlaps_are_those_of_the_elements_bytes():
    """Random layouts in one memory, against sets of addresses."""
    draw, memory, seen = random.Random(0), torch.zeros(400, dtype=torch.uint8), set()

    def tensor():
        dtype = draw.choice((torch.float32, torch.bfloat16))
        sizes = [draw.randint(1, 3) for _ in range(3)]
        strides, first = [draw.randint(0, 7) for _ in range(3)], draw.randint(0, 9)
        return memory.view(dtype).as_strided(sizes, strides, first)

    def places(x):
        steps = itertools.product(*(range(n) for n in x.shape))
        first = [x.storage_offset() + sum(i * step for i, step in zip(at, x.stride(), strict=True)) for at in steps]
        return [place * x.element_size() + byte for place in first for byte in range(x.element_size())]

    for _ in range(300):
        a, b = tensor(), tensor()
        of_a, of_b = places(a), places(b)
        twice = len(set(of_a)) < len(of_a)
        assert overlaps_itself(a) == twice, (a.shape, a.stride())
        if not twice:
            meet = bool(set(of_a) & set(of_b))
            both = [(x.dtype, x.shape, x.stride(), x.storage_offset()) for x in (a, b)]
            assert first_overlap(a, [None, b]) == (1 if meet else None), both
            seen.add(meet)
    assert seen == {True, False}
