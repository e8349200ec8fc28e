"""--amp and --bf16 on a CPU set the precision of training, evaluation and generation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.optim.amp_optimizer import AMPOptimizer
from torch import nn

from tests.conftest import DEVICE, evaluate

pytestmark = pytest.mark.skipif(DEVICE != ["--cpu"], reason="of a CPU")


def test_a_gradient_that_is_no_number_is_left_to_the_trainer(our_fairseq) -> None:
    """Without a loss scale there is none to lower."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([float("nan"), 1.0])
    common = SimpleNamespace(fp16_init_scale=4, amp_scale_window=None, min_loss_scale=0.1)
    inner = SimpleNamespace(
        optimizer=torch.optim.SGD([weight], 0.1), clip_grad_norm=lambda most, _: torch.linalg.norm(weight.grad)
    )
    optimizer = AMPOptimizer(SimpleNamespace(common=common, optimizer=None), [weight], inner)
    assert not optimizer.scaler.is_enabled() and optimizer.clip_grad_norm(1.0).isnan()


@pytest.mark.parametrize(("flag", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("amp", torch.float32)])
def test_evaluation_and_generation_take_the_precision_of_the_command(our_fairseq, flag, dtype, caplog) -> None:
    model = nn.Linear(2, 2)
    utils.use_precision(model, SimpleNamespace(**({"fp16": False, "bf16": False, "amp": False} | {flag: True})))
    assert model.weight.dtype == dtype and ("--amp is for training alone" in caplog.text) == (flag == "amp")


def test_an_evaluation_in_bfloat16_is_one(our_fairseq, corpus, model) -> None:
    plain, rounded = (evaluate(corpus, model(), "--tokens-per-sample", "16", *way)[0] for way in ([], ["--bf16"]))
    assert rounded == pytest.approx(plain, rel=2e-2) and rounded != plain
