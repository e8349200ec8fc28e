"""Where autocast is switched off; and on meta, which has none, shapes are found without data."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.ops.autocast import without_autocast
from tests.ops.rules import DEVICE, RULES, differentiate, state_dtype


def test_autocast_is_off_inside_and_back_after():
    """Of a device without autocast nothing is asked."""
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with without_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast(x.to("meta")):
            assert (x @ x).dtype == torch.bfloat16


CASES = [("reference", 5, torch.bfloat16), ("chunkwise", 70, torch.bfloat16), ("auto", 1, torch.float64)]


@pytest.mark.parametrize(("backend", "T", "dtype"), CASES)
@pytest.mark.parametrize("rule", RULES)
def test_rules_on_meta(rule, backend, T, dtype):
    drawn = rule.inputs(T=T, K=5, V=3, dtype=dtype)
    inputs = {name: None if x is None else x.detach().to("meta").requires_grad_() for name, x in drawn.items()}
    out, final_state = rule.run(inputs, backend)
    assert out.is_meta and (out.shape, out.dtype) == ((2, T, 2, 3), dtype)
    assert final_state.is_meta and (final_state.shape, final_state.dtype) == ((2, 2, 5, 3), state_dtype(dtype))
    for name, grad in differentiate((out, final_state), inputs, (out.detach(), final_state.detach())).items():
        assert grad.is_meta and (grad.shape, grad.dtype) == (inputs[name].shape, inputs[name].dtype)
