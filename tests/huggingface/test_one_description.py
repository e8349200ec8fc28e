"""A model's options, its config.json and the settings in its checkpoint say the same, and are made of one another."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from fairseq_fastweights.conversion.families.table import FAMILIES, read_family
from fairseq_fastweights.conversion.files.checkpoints import configuration
from fairseq_fastweights.huggingface import FastWeightConfig
from fairseq_fastweights.mixers.registry import MIXERS, option_name
from fairseq_fastweights.models.checkpoint_settings import decode, settings_of
from fairseq_fastweights.models.description import SHARED_OPTIONS, config_of, layer_mixers, options_of, same
from fairseq_fastweights.models.fast_weight_lm import (
    FastWeightLanguageModel,
    FastWeightLanguageModelConfig,
)
from fairseq_fastweights.models.fast_weight_options import FastWeightLanguageModelOptions
from tests.conversion import fla_models, llamas, sources, test_fla
from tests.huggingface.conftest import said
from tests.huggingface.test_exported_models import CASES
from tests.models.conftest import SIZES

LLAMAS = {**llamas.SIZES, "hidden_act": "silu", "head_dim": 8}
LLAMAS["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
"""Settings of all models of the shape of Llama."""
HYBRID = LLAMAS | llamas.DELTA
PUBLISHED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), LLAMAS),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text"), HYBRID),
    "mistral": LLAMAS | {"sliding_window": None},
    "qwen3_5": {"text_config": HYBRID},
    "gpt2": sources.GPT2,
    "gpt_neox": sources.NEOX,
    **{
        kind: fla_models.SETTINGS | fla_models.OWN[kind] | settings
        for kind, settings in test_fla.CASES.items()
        if kind in fla_models.OWN
    },
}
SHORT_FORMS = {"update_rule", "softmax_attention_layers", "fast_weight_heads", "mixers", "output_norm_layers"}
"""Options that say the same in several ways; config.json has one of these."""
OF_TRAINING = {"compile", "cuda_graphs", "no_cuda_graphs"}
WITHOUT_EFFECT = {
    *("_name", "relu_dropout", "max_target_positions", "tokens_per_sample", "no_decoder_final_norm"),
    *("tie_adaptive_weights", "tie_adaptive_proj", "share_decoder_input_output_embed", "adaptive_input_cutoff"),
    "base_shuffle",
}
"""Options that stand for one another, or that are set where they change nothing."""


def described(fairseq: Any) -> Iterator[tuple[str, Any, Dictionary]]:
    """All options of a model of each kind and each architecture, and of each published family, with a dictionary."""

    def complete(args: Namespace) -> Namespace:
        args.max_target_positions = args.max_target_positions or args.tokens_per_sample  # as the model is built
        return FastWeightLanguageModel.complete(args)[0]

    words = fairseq.task().dictionary
    for case, (flags, arch) in CASES.items():
        if arch != "transformer_lm":
            yield case, complete(fairseq.tiny(arch, flags)), words
    for arch, model in ARCH_MODEL_NAME_REGISTRY.items():
        if model == "fast_weight_lm" and "wiki103" not in arch:  # whose words are in bands: they are among the cases
            yield arch, complete(fairseq.parse(arch)), words
    for name, kind in MIXERS.items():  # each of whose own options has another value
        others = {x: not row.default if row.type is bool else row.default + 2 for x, row in kind.options.items()}
        named = {option_name(name, x): value for x, value in others.items()}
        shared = {
            "mixers": name,
            "query_key_norm_eps": 0.01,
            "fast_weight_backend": "reference",
            "max_target_positions": 9,
        }
        yield f"options of {name}", configuration({**SIZES, **shared, **named}).model, words
    assert PUBLISHED.keys() >= FAMILIES.keys()
    for name, config in PUBLISHED.items():
        family = read_family({**config, "model_type": name.split(",")[0]}, set(), 1)
        yield name, configuration(family.options).model, family.dictionary


def differing(options: Any, again: Any) -> set[str]:
    """The options in which two models differ, leaving out those that their mixers do not take."""
    kinds = {name: MIXERS[name] for name in layer_mixers(options)}
    taken = {name for kind in kinds.values() for name in kind.shared}
    of_mixers = {option: name in taken for name, (option, *_) in SHARED_OPTIONS.items()}
    of_mixers |= {option_name(name, x): name in kinds for name, kind in MIXERS.items() for x in kind.options}
    names = (row.name for row in fields(FastWeightLanguageModelConfig) if of_mixers.get(row.name, True))
    return {name for name in names if same(getattr(options, name, None)) != same(getattr(again, name, None))}


@pytest.mark.slow
def test_each_is_made_of_the_others(fairseq):
    changed, default = set(), configuration({}).model
    for name, options, dictionary in described(fairseq):
        config = config_of(options, dictionary)
        again = configuration(options_of(FastWeightConfig(**config.to_dict()))).model
        assert said(config_of(again, dictionary)) == said(config), name
        before, after = (decode(settings_of(x, layer_mixers(x), dictionary)) for x in (options, again))
        assert before == after and before["dictionary size"] == len(dictionary), name
        assert differing(options, again) - SHORT_FORMS - OF_TRAINING - WITHOUT_EFFECT == set(), name
        changed |= differing(again, default)
    # Of each own option there is a model in which it says something.
    own = {row.name for row in fields(FastWeightLanguageModelOptions)}
    assert own - changed - SHORT_FORMS - OF_TRAINING - {"_name"} == set()
