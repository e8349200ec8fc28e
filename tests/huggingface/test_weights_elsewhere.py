"""Weights that are frozen, or that accelerate keeps on disk: the same numbers, by one product each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM
from tests.mixers.test_children import Batches

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"swiglu": True, "rms_norm_eps": 1e-5, "mixers": "softmax", "mixer_settings": {"projection_bias": "none"}}
FORMS: dict[str, dict[str, Any]] = {
    "delta": {"mixers": "delta", "pre_norm": False},
    "Llama": LLAMA,
    "parallel": LLAMA | {"parallel_residual": True},
    "output norms": LLAMA | {"output_norm_layers": [1, 2]},
    "other sizes": {"mixers": "mamba", "input_size": 16, "output_size": 16, "dropout": 0.1},
}
TEXT = torch.arange(4, 40).view(3, 12)


def build(**options: Any) -> FastWeightForCausalLM:
    torch.manual_seed(0)
    return FastWeightForCausalLM(FastWeightConfig(**SIZES, max_position_embeddings=64, **options)).eval()


@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_are_multiplied_once(form):
    model = build(**FORMS[form]).requires_grad_(False)
    with Batches(model) as batches:
        for rows in (1, 3):
            model.eval()(TEXT[:rows], logits_to_keep=4)
            model.generate(TEXT[:rows], max_new_tokens=2, do_sample=False)
            model.train()(TEXT[:rows])
    assert not batches.found


@pytest.mark.parametrize("mixers", ["gated-delta,window-sum:2", "gla,linformer:2"])
def test_weights_on_disk_are_those_in_memory(mixers, tmp_path):
    pytest.importorskip("accelerate")
    model = build(mixers=mixers)
    model.save_pretrained(tmp_path / "model")
    memory = dict.fromkeys(("model.embed_tokens", "model.layer_norm", "model.dropout_module", "lm_head"), "cpu")
    where = memory | {"model.layers.0": "disk", "model.layers.1": "disk"}
    options = {"device_map": where, "offload_folder": tmp_path / "disk"}
    offloaded = FastWeightForCausalLM.from_pretrained(tmp_path / "model", **options).eval()
    assert all(x.is_meta for x in offloaded.model.layers.parameters())
    with torch.no_grad():
        assert torch.allclose(offloaded(TEXT).logits, model(TEXT).logits, atol=1e-5)
    written = (x.generate(TEXT, max_new_tokens=4, do_sample=False) for x in (offloaded, model))
    assert torch.equal(*written)
