"""--help lists the plugin's options in groups of their own, each with its default."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
from fairseq import options

from fairseq_fastweights.models.fast_weight_lm import FastWeightLanguageModel
from fairseq_fastweights.models.fast_weight_options import FastWeightLanguageModelOptions
from fairseq_fastweights.models.fast_weight_transformer import FastWeightTransformerModel, FastWeightTransformerOptions
from fairseq_fastweights.tasks.fast_weight_language_modeling import (
    FastWeightLanguageModelingTask,
    FastWeightTaskOptions,
)

MIXERS, STATES = "fast weight memories and other mixers", "carried states and transferred weights"
GROUPS = {
    "language model": (FastWeightLanguageModel.add_groups, MIXERS, FastWeightLanguageModelOptions),
    "translation": (FastWeightTransformerModel.add_groups, MIXERS, FastWeightTransformerOptions),
    "task": (FastWeightLanguageModelingTask.add_args, STATES, FastWeightTaskOptions),
}


@pytest.mark.parametrize(("add", "title", "config"), GROUPS.values(), ids=GROUPS)
def test_each_option_is_in_the_group_with_its_default(add, title, config):
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    _, _, group = parser.format_help().partition(f"{title}:\n")
    entries = re.split(r"\n  (?=--)", f"\n{group.rstrip()}")[1:]
    listed = {re.match(r"--([\w-]+)", entry)[1].replace("-", "_"): " ".join(entry.split()) for entry in entries}
    own = {field.name: field for field in dataclasses.fields(config) if field.metadata.get("help")}
    assert listed.keys() == own.keys()
    for name, field in own.items():
        default = "off" if field.default is False else field.default
        said = re.search(r"\(default: (.+)\)$", listed[name])
        assert said, name
        assert said[1] == str(default) or default in (None, ""), name


@pytest.mark.skipif(
    "add_groups" not in Path(options.__file__).read_text(), reason="needs tools/build_fairseq.py --force"
)
def test_fairseqs_help_has_them(capsys):
    parser = options.get_training_parser("fast_weight_language_modeling")
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(parser, ["data", "--arch", "fast_weight_lm", "--help"])
    assert {f"\n{MIXERS}:\n" in (text := capsys.readouterr().out), f"\n{STATES}:\n" in text} == {True}
