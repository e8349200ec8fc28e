"""A mistyped option or choice is answered by the nearest one that there is, in every command."""

import re
from pathlib import Path

import pytest
from fairseq import options

from fairseq_fastweights import env
from fairseq_fastweights.conversion.__main__ import main as convert
from fairseq_fastweights.mixers.registry import parse_pattern
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES, lookup
from fairseq_fastweights.suggestions import did_you_mean
from tests.conftest import TASK, import_plugin

ROOT = Path(__file__).resolve().parents[1]
LM = "--arch fast_weight_lm"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (f"{LM} --mixer gated-delta", "--mixers"),
        (f"{LM} --tokens_per_sampl 16", "--tokens-per-sample"),
        (f"{LM} --optimizer adm", "adam"),
        (f"{LM} --criterion cross_entrop", "cross_entropy"),
        (f"{LM} --update-rule=dleta", "delta"),
        ("--arch fast_weight_lmm", "fast_weight_lm"),
        (f"{LM} --task fast_weight_language_modelling", "fast_weight_language_modeling"),
        (f"{LM} --zzz 1", None),
    ],
)
@pytest.mark.parametrize("plugin", [True, False])
def test_fairseq_answers_by_the_nearest(our_fairseq, typed: str, meant: str | None, plugin: bool, capsys) -> None:
    import_plugin()
    parser = options.get_training_parser("fast_weight_language_modeling")
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(parser, ["data", *(TASK[:2] if plugin else []), *typed.split()])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"; did you mean {meant}?") if meant else "did you mean" not in said


def test_our_commands_answer_by_the_nearest(capsys) -> None:
    for main, typed, meant in (
        (env.main, ["--jsn"], "--json"),
        (convert, ["from-hugingface", "a", "b"], "from-huggingface"),
        (convert, ["from-huggingface", "a", "b", "--dry-rum"], "--dry-run"),
    ):
        with pytest.raises(SystemExit):
            main(typed)
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"; did you mean {meant}?")
    for call in (lambda: parse_pattern("gated-dleta", 2), lambda: lookup("update_rule", "dleta", UPDATE_RULES)):
        with pytest.raises(ValueError, match=r"; did you mean (gated-)?delta\?$"):
            call()


def test_nothing_is_suggested_where_nothing_is_like_it() -> None:
    assert did_you_mean("x", ["delta"]) == "" and did_you_mean("max_update", ["--max-update"]) != ""


def test_every_parser_of_the_package_and_the_examples_is_of_that_kind() -> None:
    sources = [
        path for folder in ("fairseq_fastweights", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    own = {path.name for path in sources if re.search(r"argparse\.ArgumentParser\(", path.read_text(encoding="utf-8"))}
    assert own <= {"suggestions.py"}
