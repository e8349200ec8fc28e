"""Checkpoints of every kind that were made before layers were mixers load, and give what they gave."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils

# Each with its logits, as the release that made it computed them, in float32.
CHECKPOINTS = Path(__file__).with_name("former_checkpoints.tar.xz")
KINDS = (
    *("sum", "gated", "decay", "delta", "delta_removal", "retention", "favor", "softmax", "hybrid", "rotary"),
    *("adaptive", "translation", "translation_delta", "translation_retention", "translation_softmax"),
)
PAD = 1
# Relative, of results in float64: what float32 rounded then. An epsilon, a scale or a gate that differs costs more.
ROUNDED = 2e-6


def tokens(batch: int, time: int, types: int, seed: int) -> torch.Tensor:
    return torch.randint(4, types, (batch, time), generator=torch.Generator().manual_seed(seed))


def language_model(model: Any, types: int) -> list[torch.Tensor]:
    """Logits of whole texts, with padding and without, of one written token by token, and of two segments."""
    text, state = tokens(2, 9, types, 0), {}
    padded = text.clone()
    padded[0, -3:] = PAD
    outputs = [model(text)[0], model(padded)[0][padded != PAD]]
    for i in range(9):
        outputs.append(model(text[:, : i + 1], incremental_state=state)[0])
        if i == 4:
            model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 1]))
    if not model.decoder.args.softmax_attention_layers:
        outputs += [model(text, continues=torch.tensor(rows))[0] for rows in ([False, False], [True, False])]
    return outputs


def translation_model(model: Any, types: int) -> list[torch.Tensor]:
    """Logits of whole targets, and of targets written token by token."""
    source, target, state = tokens(4, 6, types, 0), tokens(4, 5, types, 1), {}
    source[0, :2] = target[1, -2:] = PAD  # on the left, as fairseq has it
    outputs = [model(source, source.ne(PAD).sum(dim=1), target)[0][target != PAD]]
    encoded = model.encoder(source, source.ne(PAD).sum(dim=1))
    for i in range(5):
        outputs.append(model.decoder(target[:, : i + 1], encoder_out=encoded, incremental_state=state)[0])
        if i == 2:
            order = torch.tensor([0, 2, 2, 3])
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
    return outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A file for each kind, `data/` with their dictionaries, and `former/` with what each should give."""
    folder = tmp_path_factory.mktemp("former")
    with tarfile.open(CHECKPOINTS) as archive:
        archive.extractall(folder, filter="data")
    return folder


def load(folder: Path, kind: str, **overrides: str) -> tuple[Any, int]:
    """The model, as fairseq's commands load it, and the size of its dictionary."""
    overrides |= {"data": str(folder / "data"), "source_lang": "en", "target_lang": "de"}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(folder / f"{kind}.pt")], overrides)
    return model.eval().double(), len(task.target_dictionary)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_former_checkpoints_give_what_they_gave(folder, kind):
    score = translation_model if kind.startswith("translation") else language_model
    now = score(*load(folder, kind, fast_weight_backend="reference"))
    for actual, expected in zip(now, torch.load(folder / "former" / f"{kind}.pt"), strict=True):
        assert actual.dtype == torch.float64
        assert (actual - expected).norm() <= ROUNDED * expected.norm()


def test_overrides_of_what_the_weights_were_made_for_are_refused(folder):
    with pytest.raises(ValueError, match=r"delta normalization is 'sum' in the checkpoint and 'attention,sum' in the"):
        load(folder, "delta", normalization="sum,attention")
