"""Models of Llama's and Qwen's shape that have become memories, as models of transformers, and back."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fairseq_fastweights.huggingface  # noqa: F401
from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.files.weight_files import WeightFiles
from tests.conftest import import_plugin
from tests.conversion import llamas, sources


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@torch.no_grad()
def test_a_converted_model_is_exported_and_taken_back(tmp_path, capsys, kind):
    import_plugin()
    theirs, ours, run, out = (tmp_path / name for name in ("theirs", "ours", "run", "out"))
    settings = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0}, "head_dim": 8}
    source = llamas.model(kind, **settings)
    assert main(["from-huggingface", str(llamas.save(theirs, source, pieces=kind == "Llama")), str(ours)]) == 0
    # The first layer as training leaves it, with the memory that took its attention's place.
    state = torch.load(ours / "model.pt", weights_only=False)
    state["cfg"]["model"] |= {"softmax_attention_layers": "", "mixers": "gated:1,softmax:2", "scale_read_out": True}
    heads = {f"decoder.layers.0.self_attn.gate_proj.{n}": torch.randn(s) for n, s in (("weight", (4, 24)), ("bias", 4))}
    state["model"] |= heads
    del state["model"]["decoder.settings_version"]
    run.mkdir()
    (run / "dict.txt").write_bytes((ours / "dict.txt").read_bytes())
    torch.save(state, run / "model.pt")
    expected, words, numbers = sources.load(run, source)
    state["model"]["decoder.settings_version"] = expected.decoder.settings_version
    torch.save(state, run / "checkpoint_best.pt")
    arguments = ["to-huggingface", str(ours), str(out), "--checkpoint", str(run / "checkpoint_best.pt")]
    assert main(arguments) == 0, capsys.readouterr().err

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    text = "the cat 12345 é"
    real = [int(numbers[i]) for i in llamas.tokenizer(kind == "Llama").encode(text).ids]
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == [words.eos(), *real]
    logits = model(tokens).logits
    assert logits.std() > 0.5 and (logits - expected(tokens)[0]).abs().max() <= 1e-5
    assert tokenizer.decode(real) == text

    assert main(["from-huggingface", str(out), str(tmp_path / "back")]) == 0
    assert f"--bpe tokenizer_json --tokenizer-json-folder {tmp_path / 'back'}" in capsys.readouterr().out
    back = torch.load(tmp_path / "back" / "model.pt", weights_only=False)["model"]
    assert all(torch.equal(back[name], values) for name, values in state["model"].items())
    assert WeightFiles(out).shapes
