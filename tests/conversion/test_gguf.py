"""A GGUF file becomes the model and the tokenizer that it was made from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from fairseq_fastweights.conversion.__main__ import main
from tests.conversion import llamas

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
SETTINGS = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 300, "bos_token_id": 0}


def write(path: Path, made: Any, kind: gguf.GGMLQuantizationType, change: Any = lambda writer: None) -> None:
    """Writes a Llama as llama.cpp's converter does, all matrices in this type, and rounds the model's to it."""
    config, writer = made.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    content = json.loads(llamas.tokenizer().to_str())
    words = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    added = {token["content"] for token in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL if word in added else gguf.TokenType.NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, x in made.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name in TOP:
            theirs, heads = TOP[name], 0
        else:
            _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
            theirs = f"blk.{layer}.{NAMES[inner]}.weight"
            heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(
                inner.split("_proj")[0][-1], 0
            )
        values = x.numpy()
        if heads:  # its rotated pairs are neighbours
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if x.dim() == 2:
            stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            values = gguf.quants.dequantize(stored, kind)
            writer.add_tensor(theirs, stored, raw_dtype=kind)
            if heads:
                values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            x.copy_(torch.from_numpy(values.copy()))
        else:
            writer.add_tensor(theirs, values)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_a_file_is_the_model_that_its_numbers_stand_for(tmp_path, capsys, kind):
    made = llamas.model("Llama", tie_word_embeddings=True, **SETTINGS)
    write(tmp_path / "model.gguf", made, gguf.GGMLQuantizationType[kind])
    folder = llamas.save(tmp_path / "theirs", made)
    for source, ours in ((folder, "expected"), (tmp_path / "model.gguf", "found")):
        assert main(["from-huggingface", str(source), str(tmp_path / ours)]) == 0, capsys.readouterr().err
    expected, found = (torch.load(tmp_path / ours / "model.pt", weights_only=True) for ours in ("expected", "found"))
    assert expected["model"].keys() == found["model"].keys()
    for name, x in expected["model"].items():
        assert torch.equal(found["model"][name], x), name
    options = [(tmp_path / ours / "options.txt").read_text() for ours in ("expected", "found")]
    assert options[0] == options[1]
    words = [(tmp_path / ours / "tokenizer.json").read_text() for ours in ("expected", "found")]
    kept = json.loads((tmp_path / "found" / "huggingface" / "config.json").read_text())
    assert kept["architectures"] == ["LlamaForCausalLM"]
    vocabularies = [json.loads(text)["model"]["vocab"] for text in words]
    assert vocabularies[0] == vocabularies[1]


def change_nothing(path: Path) -> None:
    pass


def count(path: Path) -> None:
    """One array of 2^60 numbers, of which the file has none."""
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 0, 2**60))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20000])


@pytest.mark.parametrize(
    ("change", "damage", "says"),
    [
        (lambda writer: None, cut, "cannot be read as a GGUF file"),
        (lambda writer: None, lambda path: path.write_bytes(b"GGUF"), "cannot be read as a GGUF file"),
        (lambda writer: None, count, "it is cut short or damaged: a count in it is larger than the file"),
        (lambda writer: None, lambda path: path.unlink(), "cannot be read (No such file"),
        (lambda writer: writer.add_rope_scaling_factor(2.0), change_nothing, "it has llama.rope.scaling.factor; scale"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4)), change_nothing, "it has rope_freqs.weight"),
        (lambda writer: writer.add_block_count(10**6), change_nothing, "num_hidden_layers is 1000000"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, capsys, change, damage, says):
    made, path = llamas.model("Llama", tie_word_embeddings=True, **SETTINGS), tmp_path / "model.gguf"
    write(path, made, gguf.GGMLQuantizationType.F32, change)
    damage(path)
    assert main(["from-huggingface", str(path), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and says in error and not (tmp_path / "ours").exists()


def test_a_folder_with_such_a_file_is_told_to_give_the_file(tmp_path, capsys):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.gguf").write_bytes(b"GGUF")
    assert main(["from-huggingface", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    assert f"give the file: {tmp_path / 'theirs' / 'model.gguf'}" in capsys.readouterr().err
