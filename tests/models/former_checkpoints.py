"""Computes what checkpoints give, as a process of its own, in arithmetic that has the same bits on every CPU.

    python -m tests.models.former_checkpoints DATA OUT CHECKPOINT...

loads each CHECKPOINT as fairseq's commands do and writes its logits to OUT: of whole texts, with padding and without,
of a text that is generated token by token, and of two segments with state carried over.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.utils import import_user_module

PAD = 1


def tokens(batch: int, time: int, types: int, seed: int) -> torch.Tensor:
    return torch.randint(4, types, (batch, time), generator=torch.Generator().manual_seed(seed))


def language_model(model: Any, types: int) -> list[torch.Tensor]:
    text = tokens(2, 9, types, 0)
    padded = text.clone()
    padded[0, -3:] = PAD
    state: dict[str, Any] = {}
    # What stands at padding means nothing.
    outputs = [model(text)[0], model(padded)[0][padded != PAD]]
    for i in range(9):
        outputs.append(model(text[:, : i + 1], incremental_state=state)[0])
        if i == 4:
            model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 1]))
    cfg = model.decoder.args
    if not cfg.softmax_attention_layers:
        outputs += [model(text, continues=torch.tensor(rows))[0] for rows in ([False, False], [True, False])]
    return outputs


def translation_model(model: Any, types: int) -> list[torch.Tensor]:
    source, target = tokens(4, 6, types, 0), tokens(4, 5, types, 1)
    source[0, :2] = PAD  # on the left, as fairseq has it
    target[1, -2:] = PAD
    outputs = [model(source, source.ne(PAD).sum(dim=1), target)[0][target != PAD]]
    encoded = model.encoder(source, source.ne(PAD).sum(dim=1))
    state: dict[str, Any] = {}
    for i in range(5):
        outputs.append(model.decoder(target[:, : i + 1], encoder_out=encoded, incremental_state=state)[0])
        if i == 2:
            order = torch.tensor([0, 2, 2, 3])
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoded = model.encoder.reorder_encoder_out(encoded, order)
    return outputs


@torch.no_grad()
def main(data: str, out: str, *checkpoints: str) -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    import_user_module(Namespace(user_dir=str(Path(__file__).parents[2] / "fairseq_fastweights")))
    overrides = {"data": data, "source_lang": "en", "target_lang": "de", "fast_weight_backend": "reference"}
    for checkpoint in checkpoints:
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], overrides)
        model.eval()
        score = translation_model if hasattr(model, "encoder") else language_model
        torch.save(score(model, len(task.target_dictionary)), Path(out) / Path(checkpoint).name)


if __name__ == "__main__":
    main(*sys.argv[1:])
