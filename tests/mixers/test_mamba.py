"""Mamba: Hugging Face's numbers, a text in any parts, padding anywhere, gradients, half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.mixers.mamba import Mamba
from fairseq_fastweights.mixers.mixer import State

WIDTH, TIME, BATCH = 20, 23, 3


def mamba(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> Mamba:
    """One whose parameters all matter: without zeros or equal numbers."""
    torch.manual_seed(seed)
    mixer = Mamba(WIDTH, **({"state": 5} | options))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer.to(dtype)


def text(dtype: torch.dtype = torch.float64, time: int = TIME) -> Tensor:
    return torch.randn(time, BATCH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def naive(mixer: Mamba, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), by the equations of the class's docstring, one number after the other."""
    x, z = mixer.in_proj(x).chunk(2, -1)
    h = torch.zeros(mixer.channels, mixer.state, dtype=x.dtype)
    outputs = []
    for t in range(len(x)):
        u = mixer.conv1d.bias
        for i in range(min(t + 1, mixer.conv)):
            u = u + mixer.conv1d.weight[:, 0, mixer.conv - 1 - i] * x[t - i]
        u = u * torch.sigmoid(u)
        numbers = mixer.x_proj.weight @ u
        dt, B, C = numbers[: -2 * mixer.state], numbers[-2 * mixer.state : -mixer.state], numbers[-mixer.state :]
        delta = torch.log1p(torch.exp(mixer.dt_proj.weight @ dt + mixer.dt_proj.bias))
        h = torch.exp(-delta[:, None] * mixer.A_log.exp()) * h + torch.outer(delta * u, B)
        y = h @ C + mixer.D * u
        outputs.append(mixer.out_proj(y * F.silu(z[t])))
    return torch.stack(outputs)


@pytest.mark.parametrize(
    "options",
    [{}, {"conv": 1, "state": 1}, {"conv": 3, "expansion": 1, "bias": True}, {"dt_rank": 7, "state": 20}],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_equations(options):
    mixer, x = mamba(**options), text().requires_grad_()
    leaves = [x, *mixer.parameters()]
    out, _ = mixer(x)
    wanted = torch.stack([naive(mixer, row) for row in x.unbind(1)], 1)
    torch.testing.assert_close(out, wanted)
    weights = torch.randn_like(out)
    for (name, _), got, right in zip(
        [("x", x), *mixer.named_parameters()],
        torch.autograd.grad(out, leaves, weights),
        torch.autograd.grad(wanted, leaves, weights),
        strict=True,
    ):
        torch.testing.assert_close(got, right, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"expand": 1, "conv_kernel": 3, "use_bias": True}, {"time_step_rank": 3}], ids=str
)
def test_it_computes_what_hugging_faces_does_with_its_weights(options):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = transformers.MambaConfig(hidden_size=WIDTH, state_size=6, num_hidden_layers=1, **options)
    theirs = MambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        theirs.conv1d.bias.normal_()
    ours = Mamba(
        WIDTH,
        state=6,
        conv=config.conv_kernel,
        expansion=config.expand,
        dt_rank=config.time_step_rank,
        bias=config.use_bias,
    )
    initial = {name: x.clone() for name, x in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x = text(torch.float32)
    torch.testing.assert_close(ours(x)[0], theirs(x.transpose(0, 1)).transpose(0, 1), rtol=1e-5, atol=1e-6)
    # And starts as it does: the rates and the way past the state are fixed, steps drawn from one range.
    for name in ("A_log", "D"):
        torch.testing.assert_close(initial[name], theirs.state_dict()[name])


def test_where_its_special_parameters_start():
    mixer = mamba(expansion=8)
    mixer.reset_special_parameters()
    torch.testing.assert_close(mixer.A_log.exp()[3], torch.arange(1.0, 6, dtype=torch.float64))
    assert (mixer.D == 1).all()
    step = F.softplus(mixer.dt_proj.bias)
    assert 0.001 <= step.min() < 0.003 and 0.04 < step.max() <= 0.1
    assert 0.5 < mixer.dt_proj.weight.abs().max() * mixer.dt_rank**0.5 <= 1


def read(mixer: Mamba, x: Tensor, parts: list[int], **how) -> tuple[Tensor, State | None]:
    outs, state = [], None
    for part in x.split(parts):
        out, state = mixer(part, state, **how)
        outs.append(out)
    return torch.cat(outs), state


@pytest.mark.parametrize("conv", [1, 2, 4, 7])
@pytest.mark.parametrize("parts", [[TIME], [1, 2, 20], [17, 6], [1] * TIME], ids=lambda parts: f"{len(parts)}-parts")
def test_a_text_in_parts_is_the_text(parts, conv):
    """Backwards too: gradients flow from part to part through the state."""
    mixer, x = mamba(conv=conv), text().requires_grad_()
    whole, state = mixer(x)
    out, last = read(mixer, x, parts)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(last, state)
    weights = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, weights), torch.autograd.grad(whole, x, weights))


@torch.no_grad()
def test_states_may_be_overwritten_where_that_is_said():
    mixer, x = mamba(), text()
    expected, last = mixer(x)
    out, state = read(mixer, x, [1] * TIME, overwrite=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, last)
    before = {name: x.clone() for name, x in state.items()}
    mixer(x[:1], state)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    assert mixer(x[:1], state, overwrite=True)[1]["scan"] is state["scan"]


def test_a_row_of_zeros_is_the_start():
    mixer, x = mamba(), text()
    expected, state = mixer(x)
    assert {name: x.shape for name, x in state.items()} == {"conv": (BATCH, 3, 40), "scan": (BATCH, 40, 5)}
    out, _ = mixer(x, {name: torch.zeros_like(x) for name, x in state.items()})
    torch.testing.assert_close(out, expected)


# Of each row, where padding is.
PADDING = {
    "right": [[], [22], range(9, 23)],
    "left": [[0], [], range(20)],
    "middle": [[4], [5, 6, 7, 12], [1, 3, 5, 7, 9, 11, 22]],
    "a whole row": [range(23), [], [3]],
}


@pytest.mark.parametrize("parts", [[TIME], [6, 1, 1, 15]], ids=["whole", "parts"])
@pytest.mark.parametrize("where", PADDING)
def test_padding_takes_no_place(where, parts):
    """Whatever stands there: not a number of it is seen."""
    mixer, x = mamba(), text()
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    for row, places in enumerate(PADDING[where]):
        padding[row, list(places)] = True
    given = x.masked_fill(padding.t()[..., None], torch.nan).requires_grad_()
    outs, state, first = [], None, 0
    for part in given.split(parts):
        out, state = mixer(part, state, padding[:, first : first + len(part)])
        outs.append(out)
        first += len(part)
    out = torch.cat(outs)
    for row in range(BATCH):
        real = ~padding[row]
        alone, last = mixer(x[real][:, row : row + 1])
        torch.testing.assert_close(out[real, row], alone[:, 0])
        for name, wanted in last.items():
            torch.testing.assert_close(state[name][row], wanted[0])
    out[~padding.t()].sum().backward()
    assert given.grad.isfinite().all() and not given.grad[padding.t()].any()
    assert given.grad[~padding.t()].any()


def test_rows_are_put_in_another_order():
    mixer, x = mamba(), text()
    order = torch.tensor([2, 0, 0, 1])
    _, state = mixer(x[:9])
    expected, _ = mixer(x)
    out, _ = mixer(x[9:, order], mixer.reorder(state, order))
    torch.testing.assert_close(out, expected[9:, order])


@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, autocast):
    """Within the rounding of what it computes in float64 with the same weights; states and steps are float32."""
    mixer = mamba(torch.float32 if autocast else dtype)
    x = text(torch.float32 if autocast else dtype)
    exact = mamba()
    exact.load_state_dict(mixer.state_dict())
    expected, _ = exact(x.double())
    with torch.autocast("cpu", dtype, enabled=autocast):
        out, state = read(mixer, x, [7, 1, 15])
        out.float().sum().backward()
    assert out.dtype == dtype and {x.dtype for x in state.values()} == {torch.float32}
    error = (out.double() - expected).norm() / expected.norm()
    # Half a unit in the last place, 4e-3 and 5e-4, for each of the five roundings between input and output.
    assert error < (2e-2 if dtype == torch.bfloat16 else 2.5e-3), error
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in mixer.parameters())


def test_its_settings_make_another_like_it():
    mixer = mamba(conv=3, expansion=1, dt_rank=0)
    assert mixer.settings() == {"state": 5, "conv": 3, "expansion": 1, "dt_rank": 2}
    again = Mamba(WIDTH, **mixer.settings())
    again.load_state_dict(mixer.double().state_dict())
    assert mixer.num_heads == 1 and mixer.carries and not mixer.bounded and not mixer.needs_positions
    assert {name: option.default for name, option in Mamba.options.items()} == Mamba(256).settings() | {"dt_rank": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": 0}, "state is 0; it must be at least 1"),
        ({"conv": 0}, "conv is 0; it must be at least 1"),
        ({"expansion": -1}, "expansion is -1; it must be at least 1"),
        ({"dt_rank": -2}, "dt_rank is -2; it must be at least 1, or 0 for a sixteenth of embed_dim"),
        ({"backend": "fast"}, "backend is 'fast'; it must be one of auto, reference"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba(WIDTH, **options)
