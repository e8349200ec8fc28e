"""Frozen weights are multiplied once, not once for each step or row, in fairseq's layout of batches too."""

from __future__ import annotations

import pytest
import torch

from tests.mixers.test_children import Batches
from tests.models.translation import batch, build, sentences, shifted


@pytest.mark.parametrize("flags", ["--mixers delta", "--mixers softmax --swiglu --rms-norm-eps 1e-5", "--mixers gla"])
def test_language_models(fairseq, text, flags):
    model = fairseq.build(f"{flags} --share-decoder-input-output-embed").requires_grad_(False)
    with Batches(model) as batches:
        for rows in (1, 3):
            for train in (False, True):
                model.train(train)(text(rows, 12))
    assert not batches.found


@pytest.mark.parametrize("pre_norm", [True, False])
def test_translation_models(pre_norm):
    norms = {"encoder_normalize_before": pre_norm, "decoder_normalize_before": pre_norm}
    model = build(fast_weight_attention="encoder,decoder,cross", **norms).requires_grad_(False)
    with Batches(model) as batches, torch.no_grad():
        for lengths in ([9], [9, 5, 4]):
            rows = sentences(lengths)
            model(**batch(rows), prev_output_tokens=shifted(rows))
    assert not batches.found
