"""An option that no layer of a model reads is refused by name, and the options that are read change a layer."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq import options
from omegaconf import OmegaConf
from torch import nn

from fairseq_fastweights.huggingface.configuration import FastWeightConfig
from fairseq_fastweights.mixers.registry import (
    MIXERS,
    SHARED_DEFAULTS,
    SOURCE_MIXERS,
    build_mixer,
    option_name,
    settings_read,
)
from fairseq_fastweights.models import option_checks
from fairseq_fastweights.models.description import OPTIONS_OF_MIXERS
from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel
from fairseq_fastweights.models.option_checks import check_unread_settings
from tests.models.test_architectures import SMALL, in_hydra

BASE: dict[str, Any] = {"num_heads": 4, "fast_weight_heads": 4, "max_positions": 32, "source_dim": 16} | SHARED_DEFAULTS
OTHERS: dict[str, Any] = {
    **{"bias": False, "backend": "reference", "feature_map": "relu", "normalization": frozenset({"attention"})},
    **{"feature_dim": 8, "scale_read_out": True, "rotary_dim": 2, "kv_heads": 2, "head_dim": 8},
    **{"projection_bias": "none", "query_key_norm_eps": 0.5, "dropout": 0.25, "fast_weight_heads": 2},
}
"""Of each setting of several kinds another value than its default."""


def contents(module: nn.Module) -> Any:
    """All that a module is built as: shapes, and the plain values that its parts hold."""
    plain = (int, float, str, bool, tuple, frozenset, type(None))
    values = {
        f"{name}.{key}": value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, plain)
    }
    return values, {name: x.shape for name, x in module.named_parameters()}


def built(name: str, kinds: Any, settings: dict[str, Any]) -> Any:
    return contents(build_mixer(name, 16, settings, kinds))


@pytest.mark.parametrize("kinds", [MIXERS, SOURCE_MIXERS], ids=["decoder", "source"])
def test_the_settings_that_a_mixer_reads_change_it(kinds) -> None:
    values: dict[str, tuple[Any, ...]] = {setting: (value,) for setting, value in OTHERS.items()}
    for mixer, kind in MIXERS.items():
        for name, row in kind.options.items():
            values[option_name(mixer, name)] = {bool: (not row.default,), float: (0.5,)}.get(row.type, (2, 3))

    plain = {mixer: built(mixer, kinds, BASE) for mixer in kinds}

    def is_changed(mixer: str, setting: str, value: Any) -> bool:
        try:
            return built(mixer, kinds, BASE | {setting: value}) != plain[mixer]
        except ValueError as refused:  # by the mixer itself, which has read it
            return str(refused).startswith((setting, "feature_map", "the feature map"))

    for mixer, kind in kinds.items():
        for setting, others in values.items():
            read = setting in settings_read(mixer, BASE | {setting: others[0]}, kinds)
            is_papers = others[0] in (kind.feature_map, kind.normalization)
            assert any(is_changed(mixer, setting, value) for value in others) == read or is_papers, (mixer, setting)


@pytest.mark.parametrize("mixer", [*MIXERS])
def test_every_option_of_mixers_is_read_or_refused(fairseq, mixer: str) -> None:
    whole = vars(fairseq.tiny("fast_weight_lm", f"--mixers {mixer}"))
    for option in OPTIONS_OF_MIXERS.keys() & whole.keys():
        given = Namespace(**whole | {option: "elu" if option == "feature_map" else whole[option]})
        if OPTIONS_OF_MIXERS[option] in settings_read(mixer, {}):
            option_checks.check_unread(given, FastWeightLanguageModel, {option})
        else:
            with pytest.raises(ValueError, match=rf"^{option} is .*; it needs "):
                option_checks.check_unread(given, FastWeightLanguageModel, {option})


LM, MT = (
    "--arch fast_weight_lm",
    "--arch fast_weight_transformer_tiny --task translation --source-lang en --target-lang de",
)
NONE = "it needs a layer that reads it, and mixers has none: they are"
REFUSED = [
    (f"{LM} --mixers gated-delta --kv-heads 1", f"kv_heads is 1; {NONE} gated-delta (gated_delta_kv_heads is that of"),
    (
        f"{LM} --mixers gated-delta --head-dim 8",
        "(gated_delta_key_dim and gated_delta_value_dim are that of gated-delta)",
    ),
    (f"{LM} --mixers gated-delta --feature-dim 4", "(gated_delta_key_dim is that of gated-delta)"),
    (f"{LM} --mixers gated-delta --no-attention-bias", "(gated_delta_bias is that of gated-delta)"),
    (
        f"{LM} --mixers gla,mamba:1 --head-dim 8",
        "they are mamba, gla (gla_key_dim and gla_value_dim are that of mamba, gla)",
    ),
    (f"{LM} --mixers retention --head-dim 8", "(retention_value_dim is that of retention)"),
    (f"{LM} --mixers mamba --gated-delta-conv 3", "needs a layer of gated-delta, and mixers has none: they are mamba"),
    (f"{LM} --mixers window-sum --local-window 8", "(window_sum_window is that of window-sum)"),
    (f"{LM} --mixers gated-delta --feature-map dpfp --dpfp-nu 3", f"{NONE} gated-delta"),
    (f"{LM} --mixers gated-delta --scale-read-out", f"scale_read_out is True; {NONE} gated-delta"),
    (f"{LM} --mixers softmax --rotary-base 5", "rotary_base is 5.0; it needs rotary_dim, and rotary_dim is 0"),
    (f"{LM} --mixers softmax --fast-weight-heads 2", f"fast_weight_heads is 2; {NONE} softmax"),
    (f"{LM} --mixers mamba --attention-dropout 0.1", f"attention_dropout is 0.1; {NONE} mamba"),
    (f"{LM} --softmax-attention-layers all --update-rule sum", "update_rule is 'sum'; it needs a layer of sum"),
    (f"{LM} --dpfp-nu 1", "dpfp_nu is 1; it needs feature_map dpfp, and feature_map is auto"),
    (f"{LM} --adaptive-softmax-factor 2", "adaptive_softmax_factor is 2.0; it needs adaptive_softmax_cutoff, which"),
    (f"{LM} --adaptive-softmax-bias", "adaptive_softmax_bias is set; it needs adaptive_softmax_cutoff, which is not"),
    (f"{LM} --adaptive-input-cutoff 9", "adaptive_input_cutoff is 9; it needs adaptive_input, which is not set"),
    (f"{LM} --tie-adaptive-proj", "tie_adaptive_proj is set; it needs tie_adaptive_weights, which is not set"),
    (f"{LM} --square-projections none", "it needs adaptive_input or adaptive_softmax_cutoff, which is not set"),
    (f"{LM} --character-embedding-dim 8", "character_embedding_dim is 8; it needs character_embeddings, which is not"),
    (f"{LM} --swiglu --activation-fn gelu", "activation_fn is gelu; with swiglu it has no effect"),
    (f"{LM} --adaptive-softmax-cutoff 9 --share-decoder-input-output-embed", "with adaptive_softmax_cutoff it has no"),
    (f"{MT} --fast-weight-attention encoder,cross --normalization sum", f"normalization is sum; {NONE} sum, softmax"),
    (f"{MT} --fast-weight-attention none --feature-map elu", f"feature_map is elu; {NONE} softmax"),
    (f"{MT} --fast-weight-attention encoder --update-rule delta", "update_rule is 'delta'; it needs a layer of delta"),
    (
        f"{MT} --fast-weight-attention encoder --fast-weight-backend native",
        f"fast_weight_backend is native; {NONE} sum",
    ),
    (f"{MT} --encoder-xformers-att-config {{}}", f"encoder_xformers_att_config is {{}}; {NONE} sum"),
    (f"{LM} --decoder-xformers-att-config {{}}", f"decoder_xformers_att_config is {{}}; {NONE} delta"),
    (f"{MT} --mixers mamba --local-window 4", "local_window is 4; it needs a layer of local, and mixers has none"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_an_option_that_nothing_reads_is_refused_by_name(fairseq, flags: str, message: str) -> None:
    parser = options.get_training_parser("fast_weight_language_modeling")
    with pytest.raises(ValueError) as refused:
        options.parse_args_and_arch(parser, [str(fairseq.data()), *flags.split()])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        f"{LM} --mixers gated-delta,softmax:2 --rotary-dim 8 --kv-heads 1 --attention-dropout 0.1",
        f"{LM}_wiki103_small --mixers gated-delta",  # the architecture's own settings are no one's wish
        f"{LM} --mixers mamba --decoder-attention-heads 4",  # the decoder's shape
        f"{LM} --feature-map dpfp --dpfp-nu 1",
        f"{LM} --mixers gated-delta --transfer-from SOURCE --kv-heads 1 --rotary-dim 8",  # the source's shape
        f"{LM} --mixers gated-delta --finetune-from-model SOURCE --kv-heads 1 --projection-bias none",
        f"{MT} --fast-weight-attention encoder,cross --feature-map elu --scale-read-out",
        f"{MT} --mixers gated-delta --attention-dropout 0.1",  # which the attention to the source reads
    ],
)
def test_an_option_that_one_layer_reads_passes(fairseq, flags: str) -> None:
    parser = options.get_training_parser("fast_weight_language_modeling")
    assert options.parse_args_and_arch(parser, [str(fairseq.data()), *flags.split()])


def test_a_file_of_hydra_is_held_to_the_same(our_fairseq, fairseq) -> None:
    def config(given: dict[str, Any], arch: str = "fast_weight_lm") -> Any:
        return OmegaConf.create(in_hydra(arch, given))

    for arch in (SMALL, "fast_weight_lm_retnet_1b"):
        check_unread_settings(config({}, arch))
    check_unread_settings(config({"mixers": "gated-delta,softmax:2", "kv_heads": 1}))
    check_unread_settings(config({"dpfp_nu": 1}))  # a file that says all defaults
    check_unread_settings(config({"mixers": "gated-delta", "kv_heads": 1}))  # a source, from which it starts, has them
    for given, name in (({"mixers": "gated-delta", "feature_map": "elu"}, "feature_map"), ({"dpfp_nu": 2}, "dpfp_nu")):
        with pytest.raises(ValueError, match=f"^{name} is "):
            check_unread_settings(config(given))


def test_the_task_holds_a_run_to_it_and_no_checkpoint(our_fairseq, fairseq) -> None:
    cfg = OmegaConf.create(in_hydra("fast_weight_lm", {"decoder_layers": 1, "dpfp_nu": 2}))
    with pytest.raises(ValueError, match=r"^dpfp_nu is 2; it needs"):
        fairseq.task().build_model(cfg)
    assert fairseq.task().build_model(cfg, from_checkpoint=True)


def test_a_configuration_of_transformers_is_held_to_the_same() -> None:
    def config(mixers: str, **settings: Any) -> FastWeightConfig:
        return FastWeightConfig(
            vocab_size=40,
            hidden_size=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            mixers=mixers,
            mixer_settings=settings,
        )

    for settings in ({"kv_heads": 1}, {"head_dim": 8}, {"rotary_dim": 4}, {"feature_map": "elu"}, {"local_window": 8}):
        name, value = next(iter(settings.items()))
        with pytest.raises(ValueError, match=f"^{name} is {value}; it needs a layer"):
            config("gated-delta", **settings)
    with pytest.raises(ValueError, match=r"^dpfp_nu is 3; it needs feature_map dpfp"):
        config("delta", dpfp_nu=3, feature_map="elu")
    assert config("gated-delta,softmax:2", kv_heads=1) and config("delta", dpfp_nu=1, local_window=32)  # defaults
    assert config("gated-delta", projection_bias="none")
    with pytest.raises(ValueError, match=r"^projection_bias is qkv; it needs a layer"):
        config("gated-delta", projection_bias="qkv")


def test_infinity_and_not_a_number_are_refused_in_every_option_of_a_number() -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        for name in ("lenpen", "clip_norm", "dropout", "lr"):  # with a range or without one, alone or in a list
            with pytest.raises(ValueError, match=f"^{name} is {value}; it must be a finite number"):
                option_checks.check_ranges(Namespace(**{name: [0.1, value] if name == "lr" else value}))
    option_checks.check_ranges(SimpleNamespace(lr=[0.1], name="nan", flag=True, nothing=None))


@pytest.mark.parametrize("mixer", [*MIXERS])
def test_infinity_and_not_a_number_are_refused_by_every_mixer(mixer: str) -> None:
    floats = {option_name(mixer, name) for name, row in MIXERS[mixer].options.items() if row.type is float}
    floats |= {"dropout", "query_key_norm_eps", "rotary_base"} & settings_read(mixer, BASE | {"rotary_dim": 2})
    for setting in floats:
        for value in (float("nan"), float("inf"), -1.0):
            with pytest.raises(ValueError, match=rf"^{setting} is {value}; it must be "):
                build_mixer(mixer, 16, BASE | {setting: value} | ({"rotary_dim": 2} if "rotary" in setting else {}))
    integers = [name for name, row in MIXERS[mixer].options.items() if row.type is int]
    for name in integers:
        with pytest.raises(ValueError, match=f"^{option_name(mixer, name)} is nan; it must be "):
            build_mixer(mixer, 16, BASE | {option_name(mixer, name): float("nan")})
