"""Llama, Mistral, Qwen and OLMo-hybrid: a converted model is its source, and gives its bits back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq.options import get_parser
from safetensors.torch import load_file, save_file

import fairseq_fastweights.data.tokenizer_json  # noqa: F401
from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.families.table import read_family
from fairseq_fastweights.mixers.rotary_embedding import parse_scaling
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel
from tests.conversion import llamas, sources
from tests.conversion.test_bad_input import setting

# Of logits of a few units, in float32; on one machine they are equal to the bit.
LOGITS = 1e-5

LLAMA3 = {"rope_type": "llama3", "rope_theta": 99.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
CASES = {
    "llama 2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, {"pieces": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}, {"shards": 3}),
    "llama, linear scaling, tied": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}, "tie_word_embeddings": True},
        {},
    ),
    "llama, another head dim": ("Llama", {"head_dim": 10, "num_key_value_heads": 1}, {}),
    "mistral": ("Mistral", {"sliding_window": None}, {}),
    "qwen2, one head of keys": ("Qwen2", {"num_key_value_heads": 1}, {}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("Qwen3", {"head_dim": 8, "rms_norm_eps": 1e-3}, {}),
    "olmo-hybrid": (
        "OlmoHybrid",
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {},
    ),
    "olmo-hybrid, rotated": (
        "OlmoHybrid",
        {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}},
        {},
    ),
    "qwen3.5": ("Qwen3_5", {"rms_norm_eps": 1e-2, "num_key_value_heads": 1}, {}),
    "qwen3.5, tied": (
        "Qwen3_5",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 99.0, "partial_rotary_factor": 0.5}},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_converted_model_is_its_source_and_gives_its_bits_back(tmp_path, capsys, case):
    kind, settings, form = CASES[case]
    source = llamas.model(kind, **settings)
    theirs = llamas.save(tmp_path / "theirs", source, **form)
    found = sources.check_round_trip(theirs, source, lambda tokens: source(tokens).logits, LOGITS)
    assert f"--bpe tokenizer_json --tokenizer-json-folder {tmp_path / 'ours'}" in capsys.readouterr().out
    if "num_key_value_heads" in settings:  # the KV cache is as small as the original one
        heads = settings["num_key_value_heads"]
        assert found["cache"][found["model"].decoder.mixers[-1]]["keys"].shape[1] == heads
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()


VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 24, "patch_size": 2}


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_language_model_of_a_qwen3_5_that_reads_images_is_read_alone(tmp_path, capsys, caplog, tied):
    """As it is published: with settings and names of both parts, and weights that predict the token after the next."""
    transformers = pytest.importorskip("transformers")
    text = llamas.model("Qwen3_5", rms_norm_eps=1e-2).config.to_dict() | {"tie_word_embeddings": not tied}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    source = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    for name, parameter in source.named_parameters():
        parameter.normal_(mean=float(name.endswith("linear_attn.norm.weight")), std=0.13)
    theirs, ours, back = llamas.save(tmp_path / "theirs", source), tmp_path / "ours", tmp_path / "back"
    file = theirs / "model.safetensors"
    weights = load_file(file)
    assert ("lm_head.weight" in weights) is not tied and "model.language_model.norm.weight" in weights
    save_file(weights | {"mtp.fc.weight": torch.ones(2, 2)}, file)
    assert main(["from-huggingface", str(theirs), str(ours)]) == 0, capsys.readouterr().err
    images = sum(name.startswith("model.visual.") for name in weights)
    assert f"left out are {images + 1} weights that are no part of the language model" in caplog.text

    model, _, numbers = sources.load(ours, source.model.language_model)
    tokens = torch.randint(len(numbers), (3, 20), generator=torch.Generator().manual_seed(5))
    expected = source(tokens).logits
    assert expected.std() > 0.5 and (model(numbers[tokens])[0][..., numbers] - expected).abs().max() <= LOGITS
    assert main(["to-huggingface", str(ours), str(back)]) == 0, capsys.readouterr().err
    alone = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert type(alone) is transformers.Qwen3_5ForCausalLM and torch.equal(alone(tokens).logits, expected)

    save_file(weights | {"model.norm.weight": torch.ones(24)}, file)
    assert main(["from-huggingface", str(theirs), str(tmp_path / "twice")]) == 2
    assert re.search(r"weight '.*' would be 'model.norm.weight', which '.*' is", capsys.readouterr().err)
    setting(anything=3)(theirs)
    assert main(["from-huggingface", str(theirs), str(tmp_path / "none")]) == 2
    assert "config.json: anything is 3; it must not be there, as qwen3_5 has no such" in capsys.readouterr().err
    setting(text_config=None)(theirs)
    assert main(["from-huggingface", str(theirs), str(tmp_path / "none")]) == 2
    assert "config.json: text_config is None; it must be an object" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return llamas.save(tmp_path_factory.mktemp("llamas") / "Llama", llamas.model("Llama"))


def test_a_token_that_ends_texts_is_one_of_the_tokenizers(llama, tmp_path, capsys):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text('{"model_type": "fast_weight"}')
    for source, message in (
        (llama, "end_of_text is 'cat'; it must be an added token of the tokenizer: <|begin|>, <|end|>\n"),
        (tmp_path / "ours", f"--end-of-text is 'cat', but {tmp_path}/ours is a model of fairseq's, which has </s>"),
    ):
        assert main(["from-huggingface", str(source), str(tmp_path / "target"), "--end-of-text", "cat"]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "target").exists()


def test_older_files_say_the_same(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "source")
    setting(rope_parameters=LLAMA3 | {"rope_theta": 99.0})(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    assert main(["from-huggingface", str(tmp_path / "source"), str(tmp_path / "new")]) == 0
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    assert main(["from-huggingface", str(tmp_path / "source"), str(tmp_path / "old")]) == 0
    new, old = (torch.load(tmp_path / name / "model.pt")["cfg"]["model"] for name in ("new", "old"))
    assert new == old and new["rotary_scaling"] == "llama3:8,1,4,32" and new["rotary_base"] == 99


NUMBERS = [8 / 3, 1048576.0, 1e-7, 1e16, 0.1 + 0.2, 32.0]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_digit_of_a_number_is_kept(llama, number):
    """In options, whose text names scalings, and in the words of a command."""
    config = json.loads((llama / "config.json").read_text()) | {"rms_norm_eps": number}
    config["rope_parameters"] = LLAMA3 | {"rope_theta": number, "factor": number, "high_freq_factor": 1 + number}
    config["rope_parameters"]["original_max_position_embeddings"] = number
    options = read_family(config, set(), 1).options
    scaling = parse_scaling(options["rotary-scaling"])
    assert (scaling.factor, scaling.low, scaling.high, scaling.positions) == (number, 1, 1 + number, number)
    parser = get_parser("", "language_modeling")
    FastWeightLanguageModel.add_args(parser)
    args = parser.parse_args(
        [word for word in read_family(config, set(), 1).flags() if "rotary" in word or "eps" in word]
    )
    assert (args.rotary_base, args.rms_norm_eps) == (number, number)
    assert args.rotary_scaling == options["rotary-scaling"]
