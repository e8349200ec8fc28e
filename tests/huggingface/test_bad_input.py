"""A file that is missing, cut short, hostile or of something else is named in one line, and nothing is written."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.files.weight_files import load_safely
from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM
from tests.conversion.test_bad_input import Harmful, cut, gone, setting
from tests.conversion.test_bad_input import weights as in_file

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def folders(save, tmp_path_factory) -> dict[str, Path]:
    """A run, and the folder that it is exported to."""
    folder = tmp_path_factory.mktemp("bad")
    save(folder / "run", "--update-rule gated")
    assert main(["to-huggingface", str(folder / "run"), str(folder / "exported")]) == 0
    return {"run": folder / "run", "exported": folder / "exported"}


def checkpoint(change: Callable[[dict], Any]) -> Change:
    return in_file(change, "checkpoint_best.pt")


def flip(folder: Path) -> None:
    """Changes a bit of the last weight."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def options(**changes: Any) -> Change:
    return checkpoint(lambda state: state["cfg"]["model"].update(changes) or state)


def weights(change: Callable[[dict], Any]) -> Change:
    def spoil(folder: Path) -> None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")

    return spoil


def link(name: str) -> Change:
    """With a link to a file beside the folder, of the same contents."""

    def spoil(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to((folder.parent / "elsewhere").absolute())

    return spoil


def without_dictionary(folder: Path) -> None:
    (folder / "dict.txt").unlink()
    checkpoint(lambda state: state["cfg"]["task"].update(data="nowhere") or state)(folder)


FC1 = "model.layers.1.fc1.bias"
BAD: list[tuple[str, Change, str]] = [
    ("run", gone("checkpoint_best.pt"), "source: there is no checkpoint; it must hold one of"),
    ("run", shutil.rmtree, "source: there is no such checkpoint"),
    ("run", without_dictionary, "checkpoint_best.pt: there is no dict.txt in source or nowhere; the option data"),
    ("run", link("dict.txt"), "dict.txt is a link to .*/elsewhere; it must be a file in source, so copy it there"),
    ("exported", link("fairseq/dict.txt"), "fairseq/dict.txt is a link to .*/elsewhere; it must be a file in source"),
    ("run", cut("checkpoint_best.pt"), "checkpoint_best.pt is cut short"),
    ("run", checkpoint(lambda s: s | {"x": Harmful()}), "checkpoint_best.pt is refused: it asks for .*open"),
    ("run", checkpoint(lambda s: {"model": [1]}), "checkpoint_best.pt: this is not a checkpoint of fairseq's"),
    ("run", checkpoint(lambda s: {"model": s["model"]}), "checkpoint_best.pt: "),
    ("run", lambda f: (f / "dict.txt").write_text("w0 1\nw1 1\n"), "checkpoint_best.pt: .*dictionary (digest|size) is"),
    ("run", lambda f: (f / "dict.txt").write_text("w0\n"), "checkpoint_best.pt: .*dictionary"),
    ("run", checkpoint(lambda s: s["model"].pop("decoder.layers.1.fc1.bias") is None or s), r"Missing key.*1\.fc1\.bi"),
    ("run", options(decoder_ffn_embed_dim=48), "checkpoint_best.pt: .*size mismatch"),
    ("run", options(update_rule="delta"), "best.pt: the checkpoint does not fit the model: .*mixers is 'gated'"),
    ("run", options(character_embeddings=True, character_filters="[(1, 4)]"), "best.pt: "),
    ("run", options(quant_noise_pq=0.1), "best.pt: "),
    ("exported", lambda f: (f / "config.json").write_text("{"), "config.json: this is not JSON"),
    ("exported", gone("model.safetensors"), "source: there are no weights; it must hold one of"),
    ("exported", cut("model.safetensors"), "model.safetensors: the file is broken or cut short"),
    ("exported", flip, "model.safetensors is damaged: its weights do not have the digest"),
    ("exported", lambda f: shutil.rmtree(f / "fairseq"), "fairseq/dict.txt: there is no such file; the weights belong"),
    ("exported", lambda f: (f / "fairseq/dict.txt").write_text("w0 1\n"), "dict.txt: it has 5 entries, .* is 44"),
    ("exported", lambda f: (f / "fairseq/dict.txt").write_text("w0\n"), "dict.txt: this is not a dictionary"),
    ("exported", weights(lambda s: s.pop(FC1) is None or s), rf"{FC1} +missing +\(32,\)"),
    ("exported", weights(lambda s: s | {"x": torch.ones(2)}), r"x +\(2,\) +nothing of this name"),
    ("exported", weights(lambda s: s | {FC1: s[FC1].to(torch.int8)}), f"weight '{FC1}' is int8"),
    ("exported", setting(tie_word_embeddings=True), "config.json ties lm_head.weight to model.embed_tokens.weight"),
    ("exported", setting(intermediate_size=48), rf"{FC1} +\(32,\) +\(48,\)"),
    ("exported", setting(mixers=["gated", "hebb"]), "config.json: mixers is 'hebb'; it must be one of sum, gated"),
    ("exported", setting(mixer_settings={"windo": 3}), "config.json: mixer_settings holds 'windo'; it may hold"),
    ("exported", setting(hiden_size=3), "config.json: hiden_size is 3; there is no setting of this name"),
    ("exported", setting(format_version=2), "config.json: format_version is 2; this version"),
    ("exported", setting(num_hidden_layers=9999, mixers=None), "fit config.json: num_hidden_layers is 9999, and"),
    ("exported", setting(mixers=[[], "gated"]), r"config.json: mixers is '\[\]'; it must be one of"),
]


@pytest.mark.parametrize(("base", "spoil", "message"), BAD)
def test_it_is_named_and_nothing_is_left(folders, tmp_path, monkeypatch, capsys, base, spoil, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[base], "source")
    spoil(Path("source"))
    before = sorted(tmp_path.iterdir())
    command = "to-huggingface" if base == "run" else "from-huggingface"
    assert main([command, "source", "target"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith(f"python -m fairseq_fastweights.conversion {command}: error: source"), error
    assert re.search(message, "\n".join(error)), error
    assert len(error) == 1 or "the weights do not fit config.json" in error[0]  # of which a table follows
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": "16"}, "hidden_size is '16'; it must be a positive whole number"),
        ({"hidden_size": 10**13}, "hidden_size is 10000000000000; it must be at most 1000000000"),
        ({"output_size": 10**30}, "output_size is 1000000000000000000000000000000; it must be at most 1000000000"),
        ({"max_position_embeddings": 10**13}, "max_position_embeddings is 1.*0; it must be at most 1000000000000"),
        ({"swiglu": []}, r"swiglu is \[\]; it must be true or false"),
        ({"dtype": 5}, "dtype is 5; it must be the name of a floating-point type of torch"),
        ({"torch_dtype": "load"}, "torch_dtype is 'load'; it must be the name of a floating-point type of torch"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be the name of a floating-point type of torch"),
        ({"_attn_implementation": "someone/kernel"}, "_attn_implementation is 'someone/kernel'; these models have"),
        ({"attn_implementation": {"": "someone/kernel"}}, "attn_implementation is {'': 'someone/kernel'}; these"),
        ({"attn_implementation": "flash_attention_2"}, "it must be one of None, eager, sdpa, which are the same"),
        ({"experts_implementation": "a/b"}, "experts_implementation is 'a/b'; .* one of None, eager, grouped_mm, whi"),
        ({"_experts_implementation": "a/b"}, "_experts_implementation is 'a/b'; these models have nothing to choose"),
        ({"per_layer_config": {"0": {"hidden_size": 4}}}, "per_layer_config is {.*; these models have nothing to choo"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config has the quant_method 'mxfp4'; it"),
        ({"quantization_config": "mxfp4"}, "quantization_config has the quant_method 'mxfp4'; it must be one of"),
        *(
            ({name: "x"}, f"{name} is 'x'; there is no setting of this name")
            for name in (
                "kernel_config",
                "custom_pipelines",
                "base_model_tp_plan",
                "tokenizer_class",
                "custom_generate",
            )
        ),
        *(
            ({name: value}, f"{name} is {value}; it must be a finite number")
            for value in (math.nan, math.inf)
            for name in (
                *("rms_norm_eps", "initializer_range", "adaptive_input_factor", "adaptive_softmax_factor"),
                *("dropout", "attention_dropout", "activation_dropout", "layerdrop", "adaptive_softmax_dropout"),
            )
        ),
        ({"mixer_settings": {"query_key_norm_eps": math.nan}}, "query_key_norm_eps is nan; it must be a finite number"),
        ({"mixer_settings": {"gla_eps": math.inf}}, "gla_eps is inf; it must be a finite number"),
        ({"mixer_settings": {"feature_dim": 10**30}}, "feature_dim is 1.*; it must be at most 1000000000"),
        ({"mixer_settings": {"feature_dim": "x"}}, "feature_dim is 'x'; it must be a whole number"),
        ({"mixer_settings": {"rotary_base": [1]}}, r"rotary_base is \[1\]; it must be a finite number"),
        ({"mixer_settings": {"rotary_scaling": 1}}, "rotary_scaling is 1; it must be a name"),
        ({"mixer_settings": {"scale_read_out": 2}}, "scale_read_out is 2; it must be true or false"),
        ({"mixer_settings": {"local_window": None}}, "local_window is None; it must be a whole number"),
        ({"num_hidden_layers": 10**9, "mixers": "delta"}, "num_hidden_layers is 1000000000; it must be at most 10000"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3; it must be a divisor of hidden_size, 512"),
        ({"mixers": ["delta"]}, r"mixers is \['delta'\]; it must hold a name for each of 6 layers"),
        ({"mixers": "delta:1-7"}, "'1-7' is not within 1 to 6"),
        ({"mixer_settings": {"num_heads": 2}}, "mixer_settings holds num_heads; it must be given as"),
        ({"mixer_settings": {"fast_weight_heads": 3}}, "fast_weight_heads is 3; it must be a divisor of hidden_size"),
        ({"mixer_settings": {"normalization": ["layer"]}}, r"normalization is \['layer'\]; it must be a list of sum"),
        ({"mixer_settings": 3}, "mixer_settings is 3; it must give settings their values"),
        ({"position_embeddings": "rotary"}, "position_embeddings is 'rotary'; it must be one of sinusoidal"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'; it must be one of relu"),
        ({"parallel_residual": True, "pre_norm": False}, "parallel_residual is set; it needs pre_norm"),
        ({"output_norm_layers": [7]}, r"output_norm_layers is \[7\]; it must be a list of numbers from 1 to 6"),
        ({"output_norm_layers": 1}, r"output_norm_layers is 1; it must be a list of numbers from 1 to 6"),
        ({"output_norm_layers": [1], "pre_norm": False}, r"output_norm_layers is \[1\]; it needs pre_norm, without"),
        ({"mixer_settings": {"zero_centered_norms": True}}, "holds zero_centered_norms; it must be given as zero_cent"),
        ({"dropout": 1.5}, r"dropout is 1\.5; it must be from 0 to 1"),
        ({"initializer_range": -1}, "initializer_range is -1; it must be at least 0"),
        ({"adaptive_input_cutoffs": [20, 10]}, r"adaptive_input_cutoffs is \[20, 10\]; its numbers must rise"),
        ({"adaptive_input_factor": 0}, "adaptive_input_factor is 0; it must be above 0"),
        ({"adaptive_input_cutoffs": [10]}, "tie_word_embeddings is set; it needs the cut-offs"),
        ({"input_size": 8}, "tie_word_embeddings is set; it needs input_size, 8, to be output_size, 512"),
        ({"square_projections": "none"}, "square_projections is 'none'; it needs cut-offs"),
        ({"square_projections": True}, "square_projections is True; it must be one of keep, identity, none"),
        ({"adaptive_softmax_bias": True}, "adaptive_softmax_bias is set; it needs adaptive_softmax_cutoffs"),
        ({"tie_adaptive_projections": True}, "tie_adaptive_projections is set; it needs"),
        ({"masked_tokens": [-1]}, r"masked_tokens is \[-1\]; it must be a list of numbers below"),
        ({"eos_token_id": [2, 99999999]}, "eos_token_id is 99999999; it must be a number below vocab_size"),
    ],
)
def test_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        FastWeightConfig(**settings)


@pytest.mark.parametrize("safetensors", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (setting(max_position_embeddings=10**9, position_embeddings="learned"), "^max_position_embeddings is 10{9}"),
        (setting(mixer_settings={"feature_map": "favor", "favor_features": 10**8}), "^favor_features is 10{8} in"),
        (setting(mixers="linformer", mixer_settings={}, max_position_embeddings=10**8), "^max_position_embeddings is"),
        (setting(hidden_size=10**6), "^hidden_size is 10{6} in config.json, and it asks for a tensor of shape"),
        (setting(vocab_size=10**8), "^vocab_size is 10{8} in config.json, and it asks for a tensor of shape"),
        (setting(num_hidden_layers=9999, mixers="gated"), r"exported: num_hidden_layers is 9999 in .*, and there are"),
        (weights(lambda s: s | {FC1: s[FC1].to(torch.complex64)}), f": weight {FC1} is of type .*; it must be floatin"),
        (weights(lambda s: s | {FC1: s[FC1].to(torch.int8)}), f": weight {FC1} is of type .*; it must be floating-poi"),
    ],
)
def test_a_folder_is_held_against_its_weights_before_a_model_is_made(folders, tmp_path, change, says, safetensors):
    folder = shutil.copytree(folders["exported"], tmp_path / "exported")
    change(folder)
    if not safetensors:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=says) as error:
        FastWeightForCausalLM.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_damaged_file_of_torch_save_is_named(folders, tmp_path):
    folder = shutil.copytree(folders["exported"], tmp_path / "exported")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    FastWeightForCausalLM.from_pretrained(folder)
    cut("pytorch_model.bin")(folder)
    with pytest.raises(ValueError, match=r"pytorch_model.bin is cut short"):
        FastWeightForCausalLM.from_pretrained(folder)


def test_a_checkpoint_of_2019_and_one_in_half_precision_are_taken(save, fairseq, tmp_path):
    """Which have a Namespace instead of a configuration, and weights that stay in their type both ways."""
    save(tmp_path / "run", "--update-rule gated")
    args = fairseq.tiny("fast_weight_lm", "--update-rule gated")

    def older(state: dict) -> dict:
        half = {name: x.half() if x.is_floating_point() else x for name, x in state["model"].items()}
        return state | {"args": args, "cfg": None, "model": half}

    checkpoint(older)(tmp_path / "run")
    assert main(["to-huggingface", str(tmp_path / "run"), str(tmp_path / "folder")]) == 0
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["dtype"] == "float16"
    assert main(["from-huggingface", str(tmp_path / "folder"), str(tmp_path / "back")]) == 0
    before, after = (load_safely(tmp_path / name)["model"] for name in ("run/checkpoint_best.pt", "back/model.pt"))
    for name, weight in before.items():
        assert name.endswith(("version", "_float_tensor")) or torch.equal(after[name], weight), name
        assert name.endswith(("version", "_float_tensor")) or after[name].dtype == weight.dtype, name
