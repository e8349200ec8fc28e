"""Each setting of a config.json has the meaning that its class gives it, also if it is missing, or is refused."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.conversion.families.family import Family
from fairseq_fastweights.conversion.families.settings import UNUSED
from fairseq_fastweights.conversion.families.table import read_family
from fairseq_fastweights.conversion.files.checkpoints import configuration
from fairseq_fastweights.conversion.files.weight_files import WeightFiles
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel
from tests.conversion import fla_models, llamas, sources

transformers: Any = pytest.importorskip("transformers")
MOST = 1e-4  # of logits of a few units; another value of a setting changes them by more, or not at all

LLAMA3 = {"rope_type": "llama3", "rope_theta": 99.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("", {}),
    "gpt_neox": ("", {"rotary_pct": 0.5}),
    "llama": ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "olmo_hybrid": ("OlmoHybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}),
    "qwen3_5_text": ("Qwen3_5", {"rope_parameters": {"rope_theta": 99.0, "partial_rotary_factor": 0.5}}),
}
OLDER: dict[str, Any] = {
    **{"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
    **{"rotary_pct": 1.0, "rotary_emb_base": 500, "head_dim": 12, "full_attention_interval": 2, "hidden_size": 12},
    **{"n_ctx": 9, "sliding_window": 3, "max_window_layers": 0, "use_mrope": True, "attn_output_gate": False},
    **{"output_gate_type": "sigmoid", "quantization_config": {}, "pruned_heads": {"0": [1]}, "mlp_bias": True},
    **{"per_layer_config": {"0": {"num_attention_heads": 2}}, "add_cross_attention": True, "anything": 3},
}
"""Settings that a file may have besides those that transformers writes."""


def other(name: str, value: Any) -> Any:
    """Another value of a setting, of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 if value else type(value)(1) / 2
    if isinstance(value, list):
        return value[::-1]
    return {"hidden_act": "gelu", "activation_function": "gelu", "rope_type": "linear"}.get(name, 8)


def changed(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """This config.json without each of its settings in turn, with null and with another value for it, and with more."""
    for name, value in config.items():
        if name in UNUSED or name in ("vocab_size", "eos_token_id"):  # of the tokenizer
            continue
        without = {key: x for key, x in config.items() if key != name}
        yield from ((name, without), (name, config | {name: None}))
        if isinstance(value, dict):
            for inner, inner_without in changed(value):
                yield inner, config | {name: inner_without}
        else:
            yield name, config | {name: other(name, value)}
    if "vocab_size" in config:
        bare = {key: x for key, x in config.items() if key != "rope_parameters"}
        for name, value in OLDER.items():
            yield name, config | {name: value}
            if name.startswith(("rope", "rotary", "partial")):
                yield name, bare | {name: value}


def class_of(kind: str) -> Any:
    modules = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    return modules[kind]


def theirs(config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Any:
    """The model of transformers; None if it cannot be. Without numbers unless weights of these shapes are given."""
    try:
        made = class_of(config["model_type"]).from_dict(json.loads(json.dumps(config)))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(made)
        if weights is None or {n: x.shape for n, x in model.state_dict().items()} != {
            n: x.shape for n, x in weights.items()
        }:
            return model
        model = transformers.AutoModelForCausalLM.from_config(made).eval()
        if made.tie_word_embeddings:  # of two weights it would get the last one
            weights = {n: x for n, x in weights.items() if n not in ("lm_head.weight", "embed_out.weight")}
        model.load_state_dict(weights, strict=False)
        return model
    except Exception:  # whatever a class or its layers say of settings that do not fit
        return None


def ours(family: Family, weights: dict[str, Tensor]) -> Any:
    """The model that is read here, with the weights that it has in files."""
    words = family.dictionary
    task: Any = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = FastWeightLanguageModel.build_model(configuration(family.options).model, task).eval()
    state = family.split(weights.__getitem__)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(state[name])
    return model


def read_or_refused(config: dict[str, Any], names: set[str]) -> Family | None:
    """None if a config.json is refused in one line."""
    try:
        return read_family(config, names)
    except ValueError as error:
        said = str(error)
    assert said.startswith("config.json: ") and "; " in said and "\n" not in said
    return None


def source(kind: str) -> Any:
    name, settings = MODELS[kind]
    if name:
        return llamas.model(name, **settings)
    return sources.model(kind == "gpt_neox", **settings)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_each_setting_means_what_it_means_to_transformers(kind, tmp_path):
    model = source(kind)
    llamas.save(tmp_path / "theirs", model)
    files = WeightFiles(tmp_path / "theirs")
    stored, names = model.state_dict() | {name: files.read(name) for name in files.shapes}, set(files.shapes)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text()) | {"eos_token_id": 1}
    base, weights = read_family(config, names), model.state_dict()
    tokens = torch.randint(config["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(5))
    numbers = torch.tensor([2 if i == 1 else base.dictionary.index(str(i)) for i in range(config["vocab_size"])])
    expected, found = model(tokens).logits, 0
    for name, settings in changed(config):
        family = read_or_refused(settings, names)
        if family is None or (built := theirs(settings, weights)) is None:
            continue
        found += 1
        sizes = sum(x.numel() for x in built.parameters())
        assert sizes == sum(x.numel() for x in family.join(family.model.parameters).values()), (name, settings)
        if next(built.parameters()).is_meta:
            continue
        logits = built(tokens).logits
        mine = expected if family.options == base.options else ours(family, stored)(numbers[tokens])[0][..., numbers]
        assert (mine - logits).abs().max() <= MOST, (name, settings)
    assert found > 15


@pytest.mark.parametrize("kind", [*MODELS, "qwen3_5"])
def test_settings_of_generation_and_of_files_change_nothing(kind):
    given = dict.fromkeys(UNUSED, "any") | {"model_type": kind, "eos_token_id": 1}
    given |= {"text_config": {"eos_token_id": 1}} if kind == "qwen3_5" else {}
    given |= {"sliding_window": None} if kind == "mistral" else {}
    few = {name: given[name] for name in given if name not in UNUSED or name == "model_type"}
    assert read_family(given, set()).options == read_family(few, set()).options
    assert {*transformers.GenerationConfig().to_dict()} - {"_from_model_config", "eos_token_id"} <= UNUSED


FLA: dict[str, Any] = {
    **{"attn_mode": "chunk", "hidden_size": 2048, "max_position_embeddings": 2048, "hidden_ratio": 4},
    **{"intermediate_size": None, "hidden_act": "swish", "num_hidden_layers": 24, "norm_eps": 1e-6, "attn": None},
    **{"use_cache": True, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    **{"initializer_range": 0.02, "fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": True},
    **{"use_l2warp": False, "vocab_size": 32000, "attnres_block_size": None, "conv_size": 4},
}
OF_DELTA = {"use_short_conv": True, "allow_neg_eigval": False}
OF_LOSS = {"fuse_linear_cross_entropy": False}
UNGROUPED = {"num_kv_heads": None, "feature_map": None, "use_short_conv": False, "use_output_gate": True}
UNGROUPED |= {"elementwise_affine": True, "expand_k": 1.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gated_deltanet": OF_DELTA
    | OF_LOSS
    | {"expand_v": 2.0, "use_gate": True, "head_dim": 256, "num_heads": 6, "num_v_heads": None}
    | {"num_hidden_layers": 21, "output_gate_activation": "swish"},
    "kda": OF_DELTA
    | {"expand_v": 1.0, "safe_gate": False, "lower_bound": None, "head_dim": 128, "num_heads": 16}
    | {"num_v_heads": None},
    "delta_net": OF_DELTA
    | OF_LOSS
    | {"expand_k": 1.0, "expand_v": 1.0, "use_gate": False, "use_beta": True, "use_output_norm": True}
    | {"num_heads": 16, "qk_norm": "l2", "qk_activation": "silu"},
    "gla": UNGROUPED
    | OF_LOSS
    | {"expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "clamp_min": None, "use_gk": True, "use_gv": False},
    "retnet": UNGROUPED | OF_LOSS | {"expand_v": 2.0, "hidden_ratio": 2, "num_heads": 8},
}
"""The arguments of the configurations of flash-linear-attention 0.6.0, with their defaults, as its source has them."""


CONSTANTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "norm_eps")
"""Of `fla_models`."""


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_missing_setting_is_what_flash_linear_attention_takes(kind):
    whole = FLA | DEFAULTS[kind] | {"model_type": kind}
    expected = read_family(whole, set())
    for name in whole:
        if name not in ("model_type", "eos_token_id"):
            found = read_family({key: x for key, x in whole.items() if key != name}, set())
            assert found.options == expected.options, name
            assert (found.modules, len(found.parts)) == (expected.modules, len(expected.parts)), name
    for name in ("anything", "sliding_window", "rope_theta", "gate_fn", "conv_bias"):
        with pytest.raises(ValueError, match=f"config.json: {name} is 3; it must not be there, as {kind} has no such"):
            read_family(whole | {name: 3}, set())


@pytest.mark.parametrize("kind", DEFAULTS)
@torch.no_grad()
def test_each_setting_means_what_it_means_to_flash_linear_attention(kind, tmp_path):
    attention = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": None, "rope_theta": 99.0}
    given = DEFAULTS[kind] | fla_models.SETTINGS | fla_models.OWN[kind] | {"num_heads": 3, "attn": attention}
    given |= {"expand_v": 2} if "head_dim" in given else {"expand_k": 1, "expand_v": 2}
    tokens = torch.randint(fla_models.TYPES, (2, 9), generator=torch.Generator().manual_seed(5))
    found = 0
    for i, (name, settings) in enumerate(changed(given | {"model_type": kind})):
        if {*given} - {*settings}:  # whose defaults are above
            continue
        family = read_or_refused(settings, set())
        if family is None or any(settings[name] != given[name] for name in CONSTANTS):
            continue
        config, weights = fla_models.make(tmp_path / str(i), kind, settings)
        numbers = torch.tensor([2 if i == 1 else family.dictionary.index(str(i)) for i in range(fla_models.TYPES)])
        logits = fla_models.logits(config, weights, tokens)
        assert (ours(family, weights)(numbers[tokens])[0][..., numbers] - logits).abs().max() <= MOST, (name, settings)
        found += 1
    assert found > 8


# Settings of published models, some of them of older versions, beside those that a model is read by.
WRITTEN: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_ctx": 1024,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"max_length": 50}},
    }
    | {"predict_special_tokens": True, "output_past": True, "model_type": "gpt2", "embd_pdrop": 0.1},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000, "attention_bias": True, "classifier_dropout": 0.1}
    | {"rope_scaling": None, "use_cache": True, "initializer_range": 0.02},
    "llama": {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "rope_scaling": None}
    | {"rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers.js_config": {}, "unsloth_fixed": True},
    "mistral": {"sliding_window": None, "attention_dropout": 0.0, "rope_theta": 1000000.0, "head_dim": None},
    "qwen2": {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False},
    "qwen3": {"max_window_layers": 28, "sliding_window": None, "rope_scaling": None, "attention_bias": False},
    "olmo_hybrid": {"rope_theta": None, "attention_bias": False, "linear_a_log_min": 0.0, "pad_token_id": None},
    "qwen3_5_text": {"full_attention_interval": 4, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
    | {"output_gate_type": "swish", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    | {"mlp_only_layers": [], "partial_rotary_factor": 0.25, "initializer_range": 0.02}
    | {"rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_settings_that_published_models_have_are_known(kind):
    whole = {"model_type": kind, "eos_token_id": 1, "transformers_version": "4.40.0", **WRITTEN[kind]}
    options = read_family(whole, set()).options
    meaningful = {"sliding_window", "rope_theta"} if kind in ("mistral", "olmo_hybrid") else set()
    few = {name: x for name, x in whole.items() if name in {"model_type", "eos_token_id", *meaningful}}
    assert read_family(few, set()).options == options


ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": None}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "gpt2": {"scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True, "quantization_config": {"bits": 4}}
    | {"per_layer_config": {}, "scale_attn_weights": False, "layer_norm_epsilon": 1e-6},
    "gpt_neox": {"attention_bias": False, "layer_norm_eps": 1e-6},
    "llama": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True},
    "qwen3": {"attention_bias": True},
    "gated_deltanet": {"use_gate": False, "output_gate_activation": "sigmoid", "use_short_conv": False}
    | {"norm_first": False},
    "kda": {"lower_bound": -5, "safe_gate": True},
    "delta_net": {"use_short_conv": False, "use_beta": False, "qk_norm": "sum", "qk_activation": "elu"}
    | {"attnres_block_size": 2},
    "gla": {"use_short_conv": True, "num_kv_heads": 1, "clamp_min": -1.0, "feature_map": "relu"}
    | {"use_output_gate": False, "hidden_act": "gelu"},
    "retnet": {"elementwise_affine": False},
}
"""Values of settings that change the model, and are not supported."""
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {}, "model_type is 'bert'; it must be one of .*qwen3_5, .*gpt_neox$"),
    ("gpt2", {"activation_function": "silu"}, "activation_function is 'silu'; it must be one of "),
    ("gpt2", {"anything": 3}, "anything is 3; it must not be there, as gpt2 has no such setting that is known here"),
    ("gpt2", {"n_layer": None}, "n_layer is None; it must be a positive whole number"),
    ("gpt2", {"n_embd": True}, "n_embd is True; it must be a positive whole number"),
    ("gpt2", {"n_positions": 0}, "n_positions is 0; it must be a positive whole number"),
    ("gpt2", {"n_layer": 10**9}, "n_layer is 10+; it must be at most 10000"),
    ("gpt2", {"n_head": 5}, "n_head is 5; it must be a divisor of n_embd, 768"),
    ("gpt_neox", {"num_attention_heads": 5}, "num_attention_heads is 5; it must be a divisor of hidden_size, 6144"),
    ("gpt2", {"resid_pdrop": 1.5}, "resid_pdrop is 1.5; it must be at least 0 and below 1"),
    ("gpt2", {"attn_pdrop": 1}, "attn_pdrop is 1; it must be at least 0 and below 1"),
    ("gpt2", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    ("gpt2", {"eos_token_id": 50257}, "eos_token_id is 50257; it must be one number, from 0 to .* 50256"),
    ("gpt_neox", {"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'; it must be one of default"),
    ("gpt_neox", {"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'; it must be one of default"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5; it must be at mo"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.27}}, "is 0.27 and head_dim 96; their product must"),
    ("gpt_neox", {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0; it must be above 0"),
    ("gpt_neox", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta is 10+; it must be a finite number above"),
    ("gpt_neox", {"rotary_emb_base": math.nan}, "rotary_emb_base is nan; it must be a finite number"),
    ("gpt_neox", {"rope_parameters": {"beta": 1}}, "in rope_parameters: beta is 1; it must not be there, as rope_type"),
    ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
    ("llama", {"eos_token_id": None}, "eos_token_id is None; it must be one number"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads"),
    ("llama", {"head_dim": 7}, "partial_rotary_factor is 1.0 and head_dim 7; their product must be even"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a finite number above 0"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a finite number above 0"),
    ("llama", {"partial_rotary_factor": 0.3}, "partial_rotary_factor leaves 38 of 128 dimensions a head; only 1.0"),
    ("llama", {"qk_norm": True}, "qk_norm is True; it must not be there, as llama has no such setting"),
    ("qwen2", {"attention_bias": False}, "attention_bias is False; it must not be there, as qwen2 has no such set"),
    ("qwen2", {"layer_types": 7}, "layer_types is 7; it must hold one of full_attention for each of 32 layers"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 32}, "layer_types is .*'sliding_attention'.*; it must hold on"),
    *(
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32} | changes}, message)
        for changes, message in (
            ({"rope_type": "yarn"}, "rope_type is 'yarn'; it must be one of default, linear, llama3"),
            ({"rope_type": []}, r"rope_type is \[\]; it must be one of default"),
            ({"factor": None}, "factor is None; it must be a finite number above 0"),
            ({"factor": math.inf}, "factor is inf; it must be a finite number above 0"),
            ({"beta_fast": 32}, "in rope_parameters: beta_fast is 32; it must not be there, as rope_type llama3 has"),
            ({"low_freq_factor": 4}, "rope_parameters is 'llama3:8,4,4,32'; .* LOW less than HIGH"),
        )
    ),
    ("gated_deltanet", {"attn": 7}, "attn is 7; it must be an object"),
    ("gated_deltanet", {"num_v_heads": 7}, "num_heads is 3; it must be a divisor of num_v_heads, 7"),
    ("delta_net", {"expand_v": 1.1}, r"num_heads is 3; it must be a divisor of hidden_size \* expand_v, 26"),
    ("delta_net", {"attn": ATTENTION | {"window_size": 8}}, "window_size is 8; only None is supported"),
    ("delta_net", {"attn": ATTENTION | {"layers": [2]}}, r"layers of attn is \[2\]; .* numbers from 0 to 1"),
    ("delta_net", {"attn": ATTENTION | {"layers": None}}, "layers of attn is None; it must be a list of numbers from"),
    ("delta_net", {"attn": ATTENTION | {"qk_norm": True}}, "in attn: qk_norm is True; it must not be there, as delt"),
    ("delta_net", {"attn": {"layers": [0]}}, "num_heads is None; it must be a positive whole number"),
    ("retnet", {"num_heads": 5, "expand_k": 1.25, "expand_v": 2.5}, "num_heads is 5; .* divisor of hidden_size, 24"),
    ("retnet", {"num_heads": 8, "expand_k": 1}, "hidden_size . expand_k / num_heads is 3; it must be even"),
]


def test_unsupported_settings_are_named_with_their_value():
    rows = [
        (kind, {k: x}, f"{k} is .*; only .* is supported") for kind, xs in UNSUPPORTED.items() for k, x in xs.items()
    ]
    for kind, settings, message in [*BAD, *rows]:
        small = fla_models.SETTINGS | fla_models.OWN[kind] | {"num_heads": 3} if kind in fla_models.OWN else {}
        fixed = {"sliding_window": None} if kind == "mistral" else {}
        with pytest.raises(ValueError, match=f"^config.json: .*{message}") as error:
            read_family({"model_type": kind, "eos_token_id": 1, **small, **fixed, **settings}, set())
        assert "\n" not in str(error.value)


WIDTHS = [("kda", {"hidden_ratio": 4}, 5632), ("retnet", {"hidden_ratio": None}, 5632), ("retnet", {}, 2816)]


@pytest.mark.parametrize(("kind", "settings", "between"), WIDTHS)
def test_the_inner_width_is_the_multiple_of_256_above_two_thirds(kind, settings, between):
    config = {"model_type": kind, **fla_models.SETTINGS, "intermediate_size": None, "hidden_size": 2048}
    assert read_family(config | settings, set()).options["decoder-ffn-embed-dim"] == between


def test_sizes_of_more_numbers_than_torch_can_count_are_one_line():
    sizes = dict.fromkeys(("hidden_size", "head_dim", "num_attention_heads"), 10**8) | {"num_hidden_layers": 1}
    family = read_family({"model_type": "llama", "eos_token_id": 1, "vocab_size": 9, **sizes}, set())
    with pytest.raises(ValueError, match=r"^config.json: a model of these sizes cannot be built \(.*overflow.*\)$"):
        family.join(family.model.parameters)
