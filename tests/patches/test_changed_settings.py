"""Settings that are others than in the checkpoint that a run goes on from."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

pytestmark = pytest.mark.usefixtures("our_fairseq")

CFG = {
    "task": {"data": "here", "tokens_per_sample": 16, "sample_break_mode": "none"},
    "dataset": {"batch_size": 4, "max_tokens": None, "num_workers": 1},
    "common": {"seed": 1, "log_interval": 1},
    "distributed_training": {"distributed_world_size": 1},
}


@pytest.mark.parametrize(
    ("part", "options", "told"),
    [
        ("task", {"data": "moved"}, ""),
        ("task", {"tokens_per_sample": 32}, "tokens_per_sample was 16 and is 32"),
        ("dataset", {"num_workers": 2, "batch_size": None, "max_tokens": 99}, "batch_size was 4 and is None, max_to"),
        ("common", {"seed": 2, "log_interval": 5}, "seed was 1 and is 2"),
        ("distributed_training", {"distributed_world_size": 3}, "distributed_world_size was 1 and is 3"),
    ],
)
def test_the_settings_that_make_batches_are_told(part, options, told):
    from fairseq.changed_settings import of_data

    former, now = OmegaConf.create(CFG), OmegaConf.create({**CFG, part: {**CFG[part], **options}})
    assert of_data(former, now).startswith(told) and bool(told) == bool(of_data(former, now))
    former = SimpleNamespace(**{**former, "task": Namespace(**CFG["task"])})  # of a task without a dataclass
    assert of_data(former, now).startswith(told) and of_data(None, now) == ""


MODEL = {"dropout": 0.1, "layers": 2, "width": 4, "activation_fn": "relu", "share_embeddings": False, "heads": "${no}"}


def build(settings, task):
    assert settings.width % 2 == 0
    return torch.nn.Sequential(*(torch.nn.Linear(settings.width, 4) for _ in range(settings.layers)))


@pytest.mark.parametrize("kind", [OmegaConf.create, lambda settings: Namespace(**settings)])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dropout": 0.2, "layers": 3}, "^x.pt does not fit the model: layers is 2 in the checkpoint and 3 in the mo"),
        ({"width": 3, "layers": 1}, "layers is 2 .*; width is 4 in the checkpoint and 3 in the"),  # makes no model
        ({"activation_fn": "gelu"}, "'relu' in the checkpoint and 'gelu' in the model"),
        ({"share_embeddings": True}, "share_embeddings is False in"),
        ({"dropout": 0.2}, None),
    ],
)
def test_only_what_does_not_fit_is_told(monkeypatch, kind, options, told):
    from fairseq import changed_settings, models

    monkeypatch.setattr(models, "build_model", build)
    former, now = (SimpleNamespace(model=kind(settings)) for settings in (MODEL, {**MODEL, "heads": 1, **options}))
    weights = build(former.model, None).state_dict()

    def check():
        changed_settings.check_computation("x.pt", former, now)
        if told is not None:  # loading has failed
            changed_settings.check_shapes("x.pt", former, now, weights, None)

    if told is None:
        check()
        return
    with pytest.raises(ValueError, match=told) as error:
        check()
    assert "dropout" not in str(error.value)
