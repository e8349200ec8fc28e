"""Mixers call their children, whatever these have become, and multiply by each once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import SOURCE_MIXERS, build_mixer
from tests.mixers.contract import draw, error, spread
from tests.mixers.test_promises import CASES as PROMISED
from tests.mixers.test_promises import WIDTH, build

TIME = 20  # of two rows: more rows than columns, whose projections are one product in training
CASES: list[tuple[str, dict[str, Any]]] = [
    *PROMISED,
    ("sum", {"feature_map": "favor"}),
    ("delta", {"feature_map": "relu"}),
    ("window-sum", {"rotary_dim": 4, "projection_bias": "none", "query_key_norm_eps": 0.1}),
    ("softmax", {"rotary_dim": 2, "query_key_norm_eps": 0.1, "kv_heads": 2, "softmax_output_gate": True}),
    ("softmax", {"softmax_joint_norm": True, "query_key_norm_eps": 0.1, "zero_centered_norms": True}),
]
cases = pytest.mark.parametrize(("name", "settings"), CASES)


class Wrapped(nn.Module):
    """A module of another class, without its parameters' names, as adapters and quantization make of one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def each(mixer: Mixer, kinds: Any, change: Callable[[nn.Module], nn.Module]) -> Mixer:
    for module in list(mixer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kinds):
                setattr(module, name, change(child))
    return mixer


def offloaded(mixer: Mixer) -> Mixer:
    accelerate = pytest.importorskip("accelerate")
    mixer = accelerate.cpu_offload(mixer, torch.device("cpu"), offload_buffers=True)
    assert all(x.is_meta for x in (*mixer.parameters(), *mixer.buffers()))
    return mixer


BECOME: dict[str, Callable[[Mixer], Mixer]] = {
    "offloaded": offloaded,
    "wrapped": partial(each, kinds=(nn.Linear, nn.Conv1d, nn.RMSNorm), change=Wrapped),
    "parametrized": partial(each, kinds=(nn.Linear, nn.Conv1d), change=nn.utils.parametrizations.weight_norm),
}


def results(mixer: Mixer) -> list[Tensor]:
    """A text, its steps, padding, documents; gradients in training."""
    x, marks = draw(TIME, WIDTH, batch=2), torch.zeros(2, TIME, dtype=torch.bool)
    marks[0, [4, 5]] = marks[1, 7] = True
    found = []
    with torch.no_grad():
        whole, state = mixer(x)
        found.append(whole)
        for step in draw(2, WIDTH, seed=2, batch=2).split(1):
            out, state = mixer(step, state, overwrite=True)
            found.append(out)
        found.append(mixer(x, padding=marks)[0].masked_fill(marks.t()[..., None], 0))
        if mixer.takes_starts:
            out, state = mixer(x, starts=marks)
            found += [out, mixer(x[:3], state)[0]] if mixer.carries else [out]
    x.requires_grad_()
    torch.manual_seed(1)
    out, _ = mixer.train()(x)
    mixer.eval()
    return [*found, out.detach(), *torch.autograd.grad(out.square().sum(), x)]


@pytest.mark.parametrize("become", BECOME)
@cases
def test_children_that_are_more_than_their_parameters(name, settings, become):
    plain = build(name, settings)
    changed = BECOME[become](copy.deepcopy(plain))
    for one, other in zip(results(changed), results(plain), strict=True):
        assert error(one, other) < 1e-10


@cases
def test_quantized_children(name, settings):
    """In which `weight` is a method; the numbers of FAVOR+ are as large as exponentials."""
    pytest.importorskip("torch.ao.quantization")
    plain = build(name, settings).float()
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear})
    x = draw(TIME, WIDTH).float()
    with torch.no_grad():
        (out, state), (wanted, _) = quantized(x), plain(x)
        last, _ = quantized(x[:1], state, overwrite=True)
    assert out.isfinite().all() and last.isfinite().all()
    assert settings.get("feature_map") in ("favor", "dpfp") or error(out, wanted) < 0.3


class Batches(TorchDispatchMode):
    """Notes which layers are multiplied as a batch of matrices, and by how many."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        linear = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]
        self._names = {child.weight.untyped_storage().data_ptr(): name for name, child in linear}
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.bmm.default:
            name = self._names.get(args[1].untyped_storage().data_ptr())
            self.found += [] if name is None else [(name, len(args[1]))]
        return function(*args, **(kwargs or {}))


def calls(mixer: Mixer, batch: int, time_first: bool) -> None:
    time = 8
    x = draw(time, WIDTH, batch=batch).float()
    x = x if time_first else x.transpose(0, 1).contiguous().transpose(0, 1)
    marks = torch.arange(time).expand(batch, time)
    with torch.inference_mode():
        _, state = mixer(x)
        mixer(x[:1], state)
        mixer(x, padding=marks < 3)
        if mixer.takes_starts:
            mixer(x, starts=marks == 3)
    mixer.train()
    mixer(x.requires_grad_())[0].sum().backward()
    mixer.eval()


@cases
def test_frozen_weights_are_multiplied_once(name, settings):
    """In both layouts of a batch. torch makes one small product of each step of a transposed one."""
    for backend in ("auto",) if settings else ("auto", "reference"):
        others = {"projection_bias": "none", "bias": False} | settings | {"backend": backend}
        mixer = build(name, others).float().requires_grad_(False)
        with Batches(mixer) as batches:
            for batch in (1, 3):
                for time_first in (True, False):
                    calls(mixer, batch, time_first)
        assert not batches.found


def test_frozen_weights_of_a_source_are_multiplied_once():
    settings = {"num_heads": 2, "bias": False}
    mixer = spread(build_mixer("sum", WIDTH, settings, SOURCE_MIXERS)).float().requires_grad_(False)
    mixer.beam_size = 2
    source = draw(TIME, WIDTH, batch=2).float().repeat_interleave(2, 1).transpose(0, 1).contiguous().transpose(0, 1)
    with Batches(mixer) as batches, torch.no_grad():
        _, memory = mixer(source[:4], source=source)
        mixer(source[:1], memory)
    assert len(memory["state"]) == 2 and not batches.found
