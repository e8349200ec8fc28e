"""The selective scan: every backend against the definition in float64, refusals, and its operators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fairseq_fastweights import ops
from fairseq_fastweights.ops import backends, scan
from fairseq_fastweights.ops.backends import choose_backend
from tests.ops.agreement import TOLERANCE, assert_agrees, assert_close, assert_same
from tests.ops.results import cotangents, detached, differentiate, in_float64, named, outcome
from tests.ops.rules import DEVICE, Inputs, RuleCase, on_cpu, state_dtype

BACKENDS = ("chunkwise", "native") if DEVICE.type == "cpu" else ("chunkwise",)
EVERY = ("auto", "reference", *BACKENDS)

# Sizes of steps, from 1e-9, which neither writes nor forgets much, to 1e5, which forgets all; and 0.
REGIMES = ("ordinary", "tiny", "huge", "tiny or huge", "none")


class Scan(RuleCase):
    """The facts about it that the tests of update rules need: channels are values, the dimensions of its state keys."""

    operation, corrects, regimes = "selective_scan", False, REGIMES

    def inputs(
        self,
        *,
        B: int = 2,
        T: int = 31,
        H: int = 0,
        K: int = 5,
        V: int = 3,
        dtype: torch.dtype = torch.float32,
        extras_dtype: torch.dtype | None = None,
        regime: str = "ordinary",
        initial_state: bool = True,
        skip: bool | None = None,
        requires_grad: bool = True,
        seed: int = 0,
    ) -> Inputs:
        """Arguments by name; `extras_dtype` is that of all but `u` and the state; without `skip` there is no D."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        ordinary = torch.nn.functional.softplus(draw(B, T, V) - 2)
        tiny = 10 ** (-torch.rand(ordinary.shape, generator=generator, dtype=torch.float64) * 6 - 3)
        rare = torch.rand(ordinary.shape, generator=generator) < 0.1
        delta = {
            "ordinary": ordinary,
            "tiny": tiny,
            "huge": ordinary * 1e4,
            "tiny or huge": torch.where(rare, ordinary * 1e4, tiny),
            "none": torch.where(rare, ordinary, 0.0),
        }
        drawn: Inputs = {
            "u": draw(B, T, V),
            "delta": delta[regime],
            "A": -(torch.arange(K, dtype=torch.float64) + 0.5).repeat(V, 1) * draw(V, 1).exp(),
            **{name: draw(B, T, K) for name in "BC"},
            "D": draw(V) if (initial_state if skip is None else skip) else None,
            "initial_state": draw(B, V, K) if initial_state else None,
        }
        dtypes = {"u": dtype, "initial_state": state_dtype(dtype)}
        return {
            name: None
            if x is None
            else x.to(DEVICE, dtypes.get(name, extras_dtype or dtype)).requires_grad_(requires_grad)
            for name, x in drawn.items()
        }

    def reference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return scan.reference(**inputs)


SCAN = Scan("selective scan", "selective-scan")
SCANNED = [SCAN] if backends.EXTENSIONS[DEVICE.type] == "cpu" else []  # it has kernels for CPUs alone


def tolerance_of(inputs: Inputs) -> float:
    """Gradients of float32 inputs are rounded to it, whatever the dtype of `u`."""
    return max(TOLERANCE[x.dtype] for x in inputs.values() if x is not None)


def step_of(inputs: Inputs) -> Inputs:
    """The first step alone, which no gradient is asked for."""
    return {n: x[:, :1] if n in ("u", "delta", "B", "C") else x for n, x in detached(inputs).items()}


def laid(inputs: Inputs, dim: int, names: tuple[str, ...] = ("u", "delta", "B", "C")) -> Inputs:
    """The same, of `names` the dimension `dim` first in memory."""
    turned = {n: inputs[n].detach().transpose(0, dim).contiguous().transpose(0, dim).requires_grad_() for n in names}
    return inputs | turned


# (time, channels, state): chunks of 16 steps and states kept every 32, and one more and less; vectors of 2 to 16
# channels, 64 of them to a task.
SIZES = [(1, 1, 1), (2, 3, 5), (63, 17, 16), (64, 1, 64), (65, 3, 1), (200, 17, 5), (17, 64, 3), (33, 65, 16)]
SIZES += [(31, 8, 2), (32, 100, 17), (16, 130, 4), (40, 31, 33)]
HOW = [
    *[{"dtype": torch.float32}, {"dtype": torch.float64, "initial_state": False, "skip": True}],
    *[{"dtype": torch.bfloat16, "skip": False}, {"dtype": torch.float64, "extras_dtype": torch.float32}],
    {"dtype": torch.float16, "extras_dtype": torch.float32, "initial_state": False, "skip": True},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("i", "size"), list(enumerate(SIZES)))
def test_sizes_and_dtypes(backend, i, size):
    """In either precision, in one of the mixtures, and of a loss of either output: C and D may have no part in it."""
    sizes = dict(zip("TVK", size, strict=True))
    for how in (HOW[i % 2], HOW[2 + i % 3]):
        inputs = SCAN.inputs(**sizes, **how)
        assert_agrees(SCAN, backend, inputs, tolerance_of(inputs))
    assert_agrees(SCAN, backend, SCAN.inputs(**sizes), use=("out", "final_state")[i % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_of_steps(backend, regime, dtype):
    for initial_state in (True, False):
        inputs = SCAN.inputs(T=75, V=9, K=6, dtype=dtype, regime=regime, initial_state=initial_state)
        assert_agrees(SCAN, backend, inputs)


@pytest.mark.parametrize("backend", EVERY[1:])
def test_gradients_are_those_of_finite_differences(backend):
    """The reference has forward ones too, which the kernels leave to it."""
    inputs = SCAN.inputs(B=1, T=5, V=2, K=3, dtype=torch.float64).values()

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.selective_scan(*x[:6], initial_state=x[6], backend=backend)

    assert torch.autograd.gradcheck(run, [*inputs], check_forward_ad=backend == "reference")


def test_the_definition_is_the_papers_equation():
    inputs = SCAN.inputs(B=1, T=4, V=2, K=3, dtype=torch.float64, requires_grad=False)
    u, delta, A, B, C, D, h = (x.cpu() for x in inputs.values())
    out, final = ops.selective_scan(**inputs, backend="reference")
    for t in range(4):
        for c in range(2):
            for n in range(3):
                h[0, c, n] = torch.exp(delta[0, t, c] * A[c, n]) * h[0, c, n] + delta[0, t, c] * u[0, t, c] * B[0, t, n]
            torch.testing.assert_close(out[0, t, c].cpu(), h[0, c] @ C[0, t] + D[c] * u[0, t, c])
    torch.testing.assert_close(final.cpu(), h)


@pytest.mark.parametrize("backend", EVERY)
def test_no_steps(backend):
    inputs = SCAN.inputs(T=0)
    outputs = ops.selective_scan(**inputs, backend=backend)
    assert outputs[0].shape == (2, 0, 3) and torch.equal(outputs[1], inputs["initial_state"])
    gradients = differentiate(outputs, inputs, cotangents(outputs))
    assert all(x is not None and (name == "initial_state" or not x.any()) for name, x in gradients.items())
    assert not ops.selective_scan(**inputs | {"initial_state": None}, backend=backend)[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend):
    inputs = SCAN.inputs(B=3, T=40, V=17)
    expected = outcome(SCAN, backend, inputs)
    for other in (laid(inputs, 1), laid(inputs, -1, tuple(inputs))):
        assert_close(outcome(SCAN, backend, other), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", EVERY)
def test_steps_in_place_or_not(backend, dtype):
    """For a step and for more; with a state that lies among others, which stay as they are."""
    for time, channels, state, apart in ((1, 5, 3, False), (1, 70, 16, True), (1, 3, 20, True), (6, 5, 3, True)):
        inputs = SCAN.inputs(T=time, V=channels, K=state, dtype=dtype, requires_grad=False)
        wanted = named(SCAN.reference(in_float64(inputs)))
        whole = torch.full((2, channels, 2 * state), 7.0, dtype=state_dtype(dtype), device=DEVICE)
        place = whole[..., :state] if apart else whole.view(2, channels, 2, state)[:, :, 0].contiguous()
        place.copy_(inputs["initial_state"])
        outputs = ops.selective_scan(**inputs | {"initial_state": place}, backend=backend)
        assert_close(named(outputs), wanted, TOLERANCE[dtype])
        assert torch.equal(place, inputs["initial_state"])
        out, given = ops.selective_scan(**inputs | {"initial_state": place}, in_place=True, backend=backend)
        assert given is place and out.dtype == dtype
        assert_close(named((out, given)), wanted, TOLERANCE[dtype])
        assert (whole[..., state:] == 7).all()


@on_cpu
def test_threads_and_kept_states_change_no_bit(monkeypatch):
    inputs = SCAN.inputs(B=3, T=150, V=150, K=7)
    expected, before = outcome(SCAN, "native", inputs), torch.get_num_threads()
    for count in (2, 3):
        torch.set_num_threads(count)
        assert_same(outcome(SCAN, "native", inputs), expected, f"with {count} threads")
    torch.set_num_threads(before)
    for interval in (16, 48, 64, 512):
        monkeypatch.setattr(scan, "SCAN_INTERVAL", interval)
        assert_same(outcome(SCAN, "native", inputs), expected, f"with a state every {interval} steps")


WRONG = [
    ("u", lambda x: x[0], r"u has shape \(7, 3\); it must be \(batch, time, channels\)"),
    ("u", lambda x: x.long(), "u has dtype torch.int64; it must be one of float16, bfloat16, float32, float64"),
    ("delta", lambda x: x[:, :1], r"delta has shape \(2, 1, 3\); it must be \(2, 7, 3\), that of u"),
    ("A", lambda x: x[:, 0], r"A has shape \(3,\); it must be \(channels, state\)"),
    ("A", lambda x: x[:2], r"A has shape \(2, 5\); it must be \(3, 5\), \(channels, state\), with the channels of u"),
    ("A", lambda x: x[:, :0], r"A has shape \(3, 0\); channels and state must be at least 1"),
    ("B", lambda x: x[..., :4], r"B has shape \(2, 7, 4\); it must be \(2, 7, 5\), \(batch, time, state\) as u and"),
    ("C", lambda x: x[:1], r"C has shape \(1, 7, 5\); it must be \(2, 7, 5\)"),
    ("D", lambda x: x[:1], r"D has shape \(1,\); it must be \(3,\), \(channels,\) as u has them"),
    ("delta", lambda x: x.double(), "delta has dtype torch.float64; it must be that of u, torch.float32, or torch.f"),
    ("A", lambda x: None, "A is of type NoneType; it must be a torch.Tensor"),
    ("initial_state", lambda x: x.half(), "initial_state has dtype torch.float16; it must be torch.float32 for inp"),
    ("initial_state", lambda x: x[:, :1], r"initial_state has shape \(2, 1, 5\); it must be \(2, 3, 5\)"),
    ("C", lambda x: x.to("meta"), "C is on device meta; it must be on that of u, "),
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_is_wrong_is_named(backend):
    inputs = SCAN.inputs(T=7, requires_grad=False)
    for name, change, message in WRONG:
        with pytest.raises(ValueError, match=message):
            ops.selective_scan(**inputs | {name: change(inputs[name])}, backend=backend)


def test_what_cannot_be_done_is_said():
    inputs = SCAN.inputs(T=7)
    for given, message in (
        ({"backend": "triton"}, "backend is 'triton'; it must be one of auto, reference, chunkwise"),
        ({"in_place": True, "initial_state": None}, "initial_state is None and in_place is True"),
        ({"in_place": True}, r"requires a gradient.*torch.no_grad\(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.selective_scan(**inputs | given)
    for device, reason in (("meta", "devices of type meta"), ("cuda", "the selective scan has compiled kernels for C")):
        u = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
        with pytest.raises(ops.BackendUnavailable, match=f"'native' was asked for: .*{reason}.*backend='chunkwise'"):
            choose_backend("native", 7, scan._why_not_native(u), in_chunks=True)


@pytest.mark.parametrize(
    ("module", "name", "built", "time", "channels"),
    [
        pytest.param(scan, "native", True, 1, 3, marks=on_cpu),
        (scan.ScanFunction, "apply", False, 7, 1),
        (scan, "reference", False, 1, 3),
    ],
)
def test_auto_takes_the_kernel_or_chunks_or_for_a_step_the_definition(monkeypatch, module, name, built, time, channels):
    if not built:
        monkeypatch.setitem(ops.libraries._outcomes, DEVICE.type, "not built")
    monkeypatch.setattr(module, name, lambda u, *others, **options: (u, "taken"))
    inputs = SCAN.inputs(T=time, V=channels, requires_grad=False)
    assert ops.selective_scan(**inputs) == (inputs["u"], "taken")


def test_values_are_checked_where_that_is_asked_for():
    for name, value, message in (
        ("delta", -0.5, "delta has a least value of -0.5; the sizes of steps must be at least 0"),
        ("A", 2.0, "A has a largest value of 2; it must be at most 0"),
        ("B", torch.inf, "B holds 1 values that are not finite"),
    ):
        inputs = SCAN.inputs(T=7, requires_grad=False)
        with ops.check_values(True):
            ops.selective_scan(**inputs)
            inputs[name].view(-1)[3] = value
            with pytest.raises(ValueError, match=message):
                ops.selective_scan(**inputs)
        with ops.check_values(False):
            ops.selective_scan(**inputs)
