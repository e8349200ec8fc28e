"""Where autocast is switched off; and on meta, which has none, shapes are found without data."""

from __future__ import annotations

import pytest
import torch

from fairseq_fastweights.ops.autocast import without_autocast
from tests.ops.results import differentiate
from tests.ops.rules import DEVICE, RULES, mapped
from tests.ops.test_selective_scan import SCAN


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
@pytest.mark.parametrize("rule", [*RULES, SCAN])
def test_shapes_on_meta(rule, backend, T, dtype):
    drawn = rule.inputs(T=T, dtype=dtype)
    inputs = mapped(drawn, lambda x: x.detach().to("meta").requires_grad_())
    outputs = rule.run(inputs, backend)
    for found, real in zip(outputs, rule.run(drawn, "reference"), strict=True):
        assert found.is_meta and (found.shape, found.dtype) == (real.shape, real.dtype)
    for name, grad in differentiate(outputs, inputs, [x.detach() for x in outputs]).items():
        assert grad.is_meta and (grad.shape, grad.dtype) == (inputs[name].shape, inputs[name].dtype)
