"""Documents one after the other in a row, and heads of q and k that several of v share: of every rule and backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops import native
from tests.ops.rules import (
    BACKENDS,
    CPU_KERNELS,
    DEVICE,
    RULE,
    RULES,
    TOLERANCE,
    Inputs,
    Rule,
    assert_close,
    cotangents,
    deal,
    differentiate,
    in_float64,
    label,
    named,
)

EVERY = ("reference", *BACKENDS)
# Keys and values step by step in tiles, with few keys, and by chunks.
SIZES = [(5, 3), (20, 24), (65, 66)]
# Where documents begin in a row: nowhere; at chunks and between them, side by side; at the first step and at the last.
STARTS = [[], [16, 32, 64, 112], [0, 5, 6, 7, 40, 69], [1, 63, 64, 65, 129]]


@pytest.fixture(autouse=True)
def kernels_or_none(request: pytest.FixtureRequest) -> None:
    """On a GPU the kernels have no starts for some rules, and other rules not at all."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    on_gpu = given.get("backend") == "native" and native.EXTENSIONS[DEVICE.type] == "cuda"
    if on_gpu and (given["rule"].corrects or not ops.OPERATIONS[given["rule"].operation_name].kernel.cuda):
        pytest.skip("the CUDA kernels do not have it")


def where(T: int, *rows: list[int]) -> Tensor:
    starts = torch.zeros(len(rows), T, dtype=torch.bool)
    for row, steps in zip(starts, rows, strict=True):
        row[[t for t in steps if t < T]] = True
    return starts.to(DEVICE)


def results(rule: Rule, inputs: Inputs, backend: str, **options) -> Inputs:
    outputs = rule.run(inputs, backend, **options)
    return named(outputs, differentiate(outputs, inputs, cotangents(outputs)))


def apart(rule: Rule, inputs: Inputs, starts: Tensor, backend: str) -> Inputs:
    """The same, each document of each row in a call of its own: what `starts` is to be equal to."""
    outs, states = [], []
    for b, row in enumerate(starts):
        begins = sorted({0, *row.nonzero().flatten().tolist()})
        pieces = []
        for begin, end in zip(begins, [*begins[1:], starts.shape[1]], strict=True):
            piece = {n: None if x is None else x[b : b + 1, begin:end] for n, x in inputs.items()}
            goes_on = begin == 0 and not row[0] and inputs["initial_state"] is not None
            piece["initial_state"] = inputs["initial_state"][b : b + 1] if goes_on else None
            out, state = rule.run(piece, backend)
            pieces.append(out)
        outs.append(torch.cat(pieces, 1))
        states.append(state)
    outputs = torch.cat(outs), torch.cat(states)
    grads = differentiate(outputs, inputs, cotangents(outputs))
    return named(outputs, {n: torch.zeros_like(inputs[n]) if x is None else x for n, x in grads.items()})


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize(
    ("rule", "size", "starts"), deal(RULES, SIZES, list(zip(STARTS, STARTS[::-1], strict=True))), ids=label
)
def test_documents_are_as_apart(rule, size, starts, backend):
    """Outputs, all gradients and final states, in float64."""
    K, V = size
    inputs = rule.inputs(B=2, T=130 if backend != "reference" else 40, H=2, K=K, V=V, dtype=torch.float64)
    at = where(inputs["v"].shape[1], *starts)
    actual = results(rule, inputs, backend, starts=at)
    assert_close(actual, apart(rule, inputs, at, "reference"), TOLERANCE[torch.float64], vanishing=1e-20)


@pytest.mark.parametrize("rule", RULES, ids=label)
@pytest.mark.skipif(DEVICE.type != "cpu", reason=CPU_KERNELS)
def test_documents_that_begin_at_chunks_have_the_same_bits(rule):
    """In the kernels: chunks begin at multiples of 16, documents anew."""
    for K, V in SIZES:
        inputs = rule.inputs(B=1, T=100, H=2, K=K, V=V, regime=rule.regimes[-1])
        at = where(100, [16, 48, 64])
        actual, expected = results(rule, inputs, "native", starts=at), apart(rule, inputs, at, "native")
        for name, x in expected.items():
            assert torch.equal(actual[name], x), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=label)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_nothing_passes_from_one_document_to_another(rule, backend, dtype):
    """No number, however large, and no gradient of any input."""
    inputs = rule.inputs(B=1, T=60, K=6, V=7, dtype=dtype, initial_state=False)
    at = where(60, [0, 37])
    out, _ = rule.run(inputs, backend, starts=at)
    gradients = differentiate((out, out), inputs, (torch.zeros_like(out).index_fill_(1, torch.tensor(59), 1), None))
    for name, x in gradients.items():
        assert (x[:, :37] == 0).all() and (x[:, 37:] != 0).any(), name
    other = {n: None if x is None else x.detach().clone() for n, x in inputs.items()}
    other["v"][:, :37] = 1e4
    assert torch.equal(rule.run(other, backend, starts=at)[0][:, 37:], out[:, 37:])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_a_step_that_begins_a_document(rule, backend, in_place):
    inputs = rule.inputs(B=3, T=1, K=6, V=7, requires_grad=False)
    state = inputs.pop("initial_state")
    at = torch.tensor([[True], [False], [True]], device=DEVICE)
    out, after = rule.run(inputs | {"initial_state": state.clone()}, backend, starts=at, in_place=in_place)
    kept = torch.where(at[..., None, None], 0, state)
    expected = rule.reference(in_float64(inputs | {"initial_state": kept}))
    assert_close({"out": out, "state": after}, {"out": expected[0], "state": expected[1]}, 1e-6)


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_heads_that_are_shared(rule, backend, T):
    """Two heads of q and k, and of an erase key, for six of v: as if each had been repeated, gradients added up."""
    inputs = rule.inputs(B=2, T=T, H=6, K=20, V=18, dtype=torch.float64)
    keys = {n: inputs[n][:, :, :2].detach().contiguous().requires_grad_() for n in ("q", "k", "erase") if n in inputs}
    actual = results(rule, inputs | keys, backend)
    repeated = inputs | {n: x.repeat_interleave(3, 2) for n, x in keys.items()}
    outputs = rule.reference(repeated)
    expected = named(outputs, differentiate(outputs, inputs | keys, cotangents(outputs)))
    assert_close(actual, expected, TOLERANCE[torch.float64], vanishing=1e-20)
    in_half = {n: None if x is None else x.detach().bfloat16() for n, x in (inputs | keys).items()}
    in_half["initial_state"] = inputs["initial_state"].detach().float()
    with torch.no_grad():
        assert rule.run(in_half, backend)[0].isfinite().all()


@pytest.mark.skipif(DEVICE.type != "cpu", reason=CPU_KERNELS)
def test_shared_heads_are_not_copied(monkeypatch):
    """The kernels read them where they lie."""
    inputs = RULE["gated delta"].inputs(B=1, T=40, H=4, requires_grad=False)
    k = inputs["k"][:, :, :2].contiguous()
    monkeypatch.setattr(native, "ungrouped", None)
    ops.gated_delta_rule(**inputs | {"q": k, "k": k}, backend="native")


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([[True] * 5], "starts is of list; it must be a tensor of torch.bool"),
        (torch.ones(2, 5), r"starts is of torch.float32; it must be a tensor of torch.bool"),
        (torch.ones(5, 2, dtype=torch.bool), r"starts has shape \(5, 2\); it must be \(2, 5\), \(batch, time\)"),
        (torch.ones(2, 5, dtype=torch.bool, device="meta"), "starts is on device meta; it must be on that of v"),
    ],
    ids=["list", "numbers", "turned", "elsewhere"],
)
def test_bad_starts_are_refused(starts, message):
    with pytest.raises(ValueError, match=message):
        RULE["sum"].run(RULE["sum"].inputs(T=5), "auto", starts=starts)


def test_heads_that_are_no_multiple_are_refused():
    inputs = RULE["delta"].inputs(T=5, H=3)
    keys = {n: inputs[n][:, :, :2] for n in ("q", "k")}
    with pytest.raises(ValueError, match="the heads of v, 3, must be those of k, 2, or a multiple"):
        RULE["delta"].run(inputs | keys, "auto")


def test_a_rule_of_ones_own_refuses_what_it_does_not_take():
    def last_value(q, k, v, *, initial_state=None):
        return v, k[:, -1, :, :, None] * v[:, -1, :, None, :]

    own = ops.Operation("own", (), last_value)
    q = torch.ones(1, 5, 2, 4)
    with pytest.raises(ValueError, match="the own rule was given starts"):
        own(q, q, q, starts=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="the own rule was given k of 2 heads for v of 4"):
        own(q, q, torch.ones(1, 5, 4, 4))


@pytest.mark.parametrize("backend", ["chunkwise", "auto"])
def test_value_decays_with_an_erase_key_have_no_kernel(backend):
    """But for one they are as the reference has them, step by step, and the kernels say so."""
    rule = RULE["two gates"]
    inputs = rule.inputs(T=130, dtype=torch.float64)
    inputs["log_value_decay"] = -torch.rand_like(inputs["v"]).requires_grad_()
    at = where(130, [5, 64], [])
    assert_close(results(rule, inputs, backend, starts=at), results(rule, inputs, "reference", starts=at), 1e-11)
    with pytest.raises(ops.BackendUnavailable, match="no kernel takes decays of values together with an erase key"):
        rule.run(inputs, "native")
