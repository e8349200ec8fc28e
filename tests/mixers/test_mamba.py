"""Mamba: its equations, Hugging Face's numbers, and where it starts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_fastweights.mixers.mamba import Mamba
from tests.mixers import contract

WIDTH, TIME = 20, 23


def build(**options) -> Mamba:
    torch.manual_seed(0)
    return contract.spread(Mamba(WIDTH, **({"state": 5} | options)), noise=0.1)


def naive(mixer: Mamba, x: Tensor) -> Tensor:
    """A row of a text, (time, embed_dim), by the equations of the class's docstring, one number after the other."""
    out, (x, z) = x, mixer.in_proj(x).chunk(2, -1)
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
    return torch.stack(outputs) if outputs else out


@pytest.mark.parametrize("padding", ["none", "whole"])
@pytest.mark.parametrize(
    "options",
    [{}, {"conv": 1, "state": 1}, {"conv": 3, "expansion": 1, "bias": True}, {"dt_rank": 7, "state": 20}],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_equations(options, padding):
    contract.check_definition(build(**options), naive, contract.draw(TIME, WIDTH), contract.paddings(TIME)[padding])


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
    sizes = {"conv": config.conv_kernel, "expansion": config.expand, "dt_rank": config.time_step_rank}
    ours = Mamba(WIDTH, state=6, bias=config.use_bias, **sizes)
    initial = {name: x.clone() for name, x in ours.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x = contract.draw(TIME, WIDTH).float()
    torch.testing.assert_close(ours(x)[0], theirs(x.transpose(0, 1)).transpose(0, 1), rtol=1e-5, atol=1e-6)
    for name in ("A_log", "D"):  # it starts as theirs, but for steps, which are drawn
        torch.testing.assert_close(initial[name], theirs.state_dict()[name])


def test_where_its_special_parameters_start():
    mixer = build(expansion=500)
    mixer.reset_special_parameters()
    torch.testing.assert_close(mixer.A_log.exp()[3], torch.arange(1.0, 6, dtype=torch.float64))
    assert (mixer.D == 1).all()
    step = F.softplus(mixer.dt_proj.bias)
    assert 0.001 <= step.min() < 0.00101 and 0.099 < step.max() <= 0.1
    assert 0.5 < mixer.dt_proj.weight.abs().max() * mixer.dt_rank**0.5 <= 1
