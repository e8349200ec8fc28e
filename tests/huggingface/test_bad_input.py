"""A folder or a setting that cannot be is named in one line, before a model is made."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fairseq_fastweights.conversion.__main__ import main
from fairseq_fastweights.conversion.files.weight_files import load_safely
from fairseq_fastweights.huggingface import FastWeightConfig, FastWeightForCausalLM
from tests.conversion.test_bad_input import FC1, checkpoint, cut, safetensors, setting


@pytest.fixture(scope="module")
def exported(save, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    save(folder / "run", "--update-rule gated")
    assert main(["to-huggingface", str(folder / "run"), str(folder / "exported")]) == 0
    return folder / "exported"


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


@pytest.mark.parametrize("in_safetensors", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (setting(max_position_embeddings=10**9, position_embeddings="learned"), "^max_position_embeddings is 10{9}"),
        (setting(mixer_settings={"feature_map": "favor", "favor_features": 10**8}), "^favor_features is 10{8} in"),
        (setting(mixers="linformer", mixer_settings={}, max_position_embeddings=10**8), "^max_position_embeddings is"),
        (setting(hidden_size=10**6), "^hidden_size is 10{6} in config.json, and it asks for a tensor of shape"),
        (setting(vocab_size=10**8), "^vocab_size is 10{8} in config.json, and it asks for a tensor of shape"),
        (setting(num_hidden_layers=9999, mixers="gated"), r"exported: num_hidden_layers is 9999 in .*, and there are"),
        (
            safetensors(lambda s: s | {FC1: s[FC1].to(torch.complex64)}),
            f": weight {FC1} is of type .*; it must be floatin",
        ),
        (
            safetensors(lambda s: s | {FC1: s[FC1].to(torch.int8)}),
            f": weight {FC1} is of type .*; it must be floating-poi",
        ),
    ],
)
def test_a_folder_is_held_against_its_weights_before_a_model_is_made(exported, tmp_path, change, says, in_safetensors):
    folder = shutil.copytree(exported, tmp_path / "exported")
    change(folder)
    if not in_safetensors:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=says) as error:
        FastWeightForCausalLM.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_damaged_file_of_torch_save_is_named(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "exported")
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
