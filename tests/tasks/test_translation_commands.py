"""fairseq's commands for translation, with fast weights: train, go on, average, generate, interact, validate."""

from __future__ import annotations

import math
import re
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import QUIET, command
from tests.tasks.conftest import SAME_MODEL, TRANSLATION, generate, hypotheses_in, train_translation


def slow(*values: Any) -> Any:
    """A case that `make test-fast` leaves out: others of the same test run there."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Copies of weights that fairseq's own encoder layers keep for a fused kernel.
FUSED = re.compile(r"encoder\.layers\.\d+\.\w+_(weight|bias)$")


def losses(log: str) -> list[float]:
    return [float(x) for x in re.findall(r'"loss": "([^"]+)"', log)]


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def is_unset(name: str) -> bool:
    """Whether this is the number whose type fairseq looks at, and whose value it never sets."""
    return name.endswith("._float_tensor")


def assert_all_translated(corpus, found, nbest: int = 1) -> None:
    """One line for every line of the test split, also for those that are empty."""
    assert sorted(found) == list(range(len(corpus.lines("test", "en"))))
    for hypotheses in found.values():
        assert len(hypotheses) == nbest
        for hypothesis in hypotheses:
            assert math.isfinite(hypothesis.score)
            assert len(hypothesis.token_scores) > len(hypothesis.words)  # there is an end, and there may be a start


# ------------------------------------------------------------------------------------ training


@pytest.mark.slow
def test_training_learns(pairs, tmp_path):
    values = losses(train_translation(pairs.data, tmp_path, *SAME_MODEL, "--max-update", "40", "--lr", "0.01"))
    assert len(values) == 40
    # Of 24 types: 4.6 bits where nothing is known.
    assert statistics.mean(values[-5:]) < statistics.mean(values[:5]) - 0.5


@pytest.mark.parametrize(
    "flags",
    [
        "--update-rule gated --feature-map favor",
        slow("--update-rule decay --feature-map relu"),
        slow("--update-rule sum --feature-map identity"),
    ],
)
def test_every_rule_and_map_trains(pairs, tmp_path, flags):
    values = losses(train_translation(pairs.data, tmp_path, *flags.split(), "--no-save"))
    assert len(values) == 4 and all(math.isfinite(x) for x in values)


@pytest.mark.slow
def test_other_ways_to_train_learn_the_same(pairs, tmp_path):
    flags = "--no-save --dropout 0.2 --attention-dropout 0.1 --feature-map favor".split()
    plain = losses(train_translation(pairs.data, tmp_path, *flags))
    assert len(plain) == 4
    # bfloat16 keeps 8 bits.
    ways = {"--fp16": 2e-3, "--bf16": 2e-2, "--ddp-backend=legacy_ddp": 2e-3, "--checkpoint-activations": 4e-4}
    for way, rel in ways.items():
        assert losses(train_translation(pairs.data, tmp_path, *flags, way)) == pytest.approx(plain, rel=rel), way


@pytest.mark.slow
def test_layers_are_dropped_in_training_and_pruned_in_generation(pairs, tmp_path):
    drop = "--encoder-layerdrop 0.5 --decoder-layerdrop 0.5 --encoder-layers 3 --decoder-layers 3".split()
    assert all(math.isfinite(x) for x in losses(train_translation(pairs.data, tmp_path, *drop)))
    path = tmp_path / "checkpoint_last.pt"
    whole = generate(pairs.data, path, tmp_path / "whole")
    kept = str({"encoder_layers_to_keep": "0,2", "decoder_layers_to_keep": "1"})
    pruned = generate(pairs.data, path, tmp_path / "pruned", "--model-overrides", kept)
    for found in (whole, pruned):
        assert_all_translated(pairs, found)
    assert whole[0][0].token_scores != pruned[0][0].token_scores


@pytest.mark.parametrize(
    "flags",
    [
        "--share-all-embeddings",
        slow(
            "--share-decoder-input-output-embed --decoder-normalize-before --encoder-normalize-before "
            "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding --quant-noise-pq 0.1"
        ),
        slow(
            "--encoder-embed-dim 24 --decoder-embed-dim 16 --adaptive-softmax-cutoff 8,16 --criterion adaptive_loss "
            "--ddp-backend legacy_ddp"
        ),
        slow("--cross-self-attention --no-cross-attention --fast-weight-attention encoder"),
        slow("--fast-weight-attention cross"),
    ],
)
def test_fairseqs_options_train_and_translate(joined_pairs, tmp_path, flags):
    if "adaptive_loss" in flags:  # in place of the other criterion, whose flags it does not have
        log = command(
            "train",
            *[str(joined_pairs.data), *TRANSLATION, *QUIET, "--arch", "fast_weight_transformer_tiny", *flags.split()],
            *"--optimizer adam --max-tokens 160 --max-update 4 --disable-validation".split(),
            *["--save-dir", str(tmp_path)],
        )
    else:
        log = train_translation(joined_pairs.data, tmp_path, *flags.split())
    assert len(losses(log)) == 4 and all(math.isfinite(x) for x in losses(log))
    path = tmp_path / "checkpoint_last.pt"
    assert_all_translated(joined_pairs, generate(joined_pairs.data, path, tmp_path / "out"))
    weights = load(path)["model"]
    shared = torch.equal(weights["encoder.embed_tokens.weight"], weights["decoder.embed_tokens.weight"])
    assert shared == ("--share-all-embeddings" in flags)


@pytest.mark.slow
def test_validation_translates(pairs, tmp_path):
    """With --eval-bleu a generator works in the midst of training, which goes on as without."""
    flags = ["--max-update", "8", "--feature-map", "favor", "--dropout", "0.1"]
    bleu = ["--eval-bleu", "--eval-bleu-detok", "space", "--eval-bleu-args", '{"beam": 4, "max_len_b": 10}']
    bleu += ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    log = train_translation(pairs.data, tmp_path / "bleu", *flags, *bleu, validate=True)
    assert len(re.findall(r'"valid_bleu": "[^"]+"', log)) == 2
    assert (tmp_path / "bleu" / "checkpoint_best.pt").exists()
    assert losses(log) == losses(train_translation(pairs.data, tmp_path / "plain", *flags))


# --------------------------------------------------------------------------------- restoring


@pytest.mark.slow
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(pairs, tmp_path):
    common = """--update-rule delta --feature-map favor --attention-dropout 0.1 --dropout 0.2
        --lr-scheduler inverse_sqrt --warmup-updates 4""".split()
    train_translation(pairs.data, tmp_path / "whole", *common, "--max-update", "12")
    for updates in ("5", "12"):  # the first in the middle of an epoch
        log = train_translation(pairs.data, tmp_path / "cut", *common, "--max-update", updates)
    assert "Loaded checkpoint" in log and len(losses(log)) == 7
    whole, cut = (load(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "cut"))
    assert whole["model"].keys() == cut["model"].keys()
    for name, x in whole["model"].items():
        # fairseq's own encoder layers fill their copies of weights only in loading.
        assert is_unset(name) or FUSED.search(name) or torch.equal(x, cut["model"][name]), name
    states = [state["last_optimizer_state"]["state"] for state in (whole, cut)]
    for number, state in states[0].items():
        assert all(torch.equal(x, states[1][number][name]) for name, x in state.items() if torch.is_tensor(x))


RESET = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters".split()


def assert_starts_from(weights: dict[str, torch.Tensor], pairs, folder: Path, path: Path, *flags: str) -> None:
    """An update of nearly nothing leaves the weights of the file as they are."""
    before = path.read_bytes()
    flags = ("--restore-file", str(path), *RESET, "--max-update", "1", "--lr", "1e-9", *flags)
    log = train_translation(pairs.data, folder, *flags)
    assert "Loaded checkpoint" in log and len(losses(log)) == 1
    state = load(folder / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 1
    for name, x in weights.items():
        if name in state["model"] and not is_unset(name):
            assert torch.allclose(state["model"][name], x, atol=1e-6), name
    assert path.read_bytes() == before


def test_training_starts_from_a_checkpoint_with_a_new_optimizer(pairs, translator, tmp_path):
    path = translator / "checkpoint_last.pt"
    assert_starts_from(load(path)["model"], pairs, tmp_path, path, *SAME_MODEL)


@pytest.fixture(scope="module")
def transformer(pairs, tmp_path_factory) -> Path:
    """A checkpoint of fairseq's own."""
    folder = tmp_path_factory.mktemp("transformer")
    train_translation(pairs.data, folder, "--arch", "transformer_tiny")
    return folder / "checkpoint_last.pt"


def in_old_layout(state: dict[str, Any]) -> dict[str, Any]:
    """What fairseq wrote before version 0.10: all arguments in one Namespace, and no configuration."""
    old = {key: value for key, value in state.items() if key != "cfg"}
    # The model of a parser's arguments has all of them, as of old; but for what the tasks and models said themselves.
    return {**old, "args": Namespace(**{**state["cfg"]["task"], **vars(state["cfg"]["model"])})}


def under_old_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One matrix for queries, keys and values, and none of the copies that came later."""
    old = {name: x for name, x in weights.items() if not FUSED.search(name)}
    for name in list(old):
        path, _, kind = name.rpartition(".q_proj.")
        if path:
            old[f"{path}.in_proj_{kind}"] = torch.cat([old.pop(f"{path}.{x}_proj.{kind}") for x in "qkv"])
    return old


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["new", "old"])
def test_training_starts_from_a_transformer(pairs, transformer, tmp_path, layout):
    path, state = transformer, load(transformer)
    if layout == "old":
        path = tmp_path / "old.pt"
        torch.save({**in_old_layout(state), "model": under_old_names(state["model"])}, path)
    assert_starts_from(state["model"], pairs, tmp_path / "new", path)
    # What came of it is a model of ours.
    assert_all_translated(pairs, generate(pairs.data, tmp_path / "new" / "checkpoint_last.pt", tmp_path / "out"))


def test_without_fast_weights_a_transformers_checkpoint_translates_the_same(pairs, transformer, tmp_path):
    expected = generate(pairs.data, transformer, tmp_path / "theirs")
    overrides = str(
        {"_name": "fast_weight_transformer", "arch": "fast_weight_transformer", "fast_weight_attention": "none"}
    )
    found = generate(pairs.data, transformer, tmp_path / "ours", "--model-overrides", overrides)
    assert_same(found, expected)


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for number, hypotheses in expected.items():
        for hypothesis, other in zip(found[number], hypotheses, strict=True):
            assert hypothesis.words == other.words
            assert hypothesis.token_scores == pytest.approx(other.token_scores, abs=2e-4)  # both are rounded


@pytest.mark.slow
def test_an_old_checkpoint_with_a_namespace_translates_the_same(pairs, translator, tmp_path):
    path = translator / "checkpoint_last.pt"
    old = in_old_layout(load(path))
    assert "cfg" not in old and isinstance(old["args"], Namespace)
    torch.save(old, tmp_path / "old.pt")
    found = generate(pairs.data, tmp_path / "old.pt", tmp_path / "old")
    assert_same(found, generate(pairs.data, path, tmp_path / "new"))
    torch.save({**old, "model": under_old_names(old["model"])}, tmp_path / "older.pt")
    assert_same(generate(pairs.data, tmp_path / "older.pt", tmp_path / "older"), found)


# --------------------------------------------------------------------------------- generation


@pytest.mark.slow
def test_there_is_a_line_for_every_line(pairs, translator, tmp_path):
    sources = pairs.lines("test", "en")
    assert "" in sources
    path = translator / "checkpoint_last.pt"
    found = generate(pairs.data, path, tmp_path / "out")
    assert_all_translated(pairs, found)
    # In batches of other sizes, where sentences have other neighbours.
    for size in ("1", "12"):
        assert_same(generate(pairs.data, path, tmp_path / size, "--batch-size", size), found)


@pytest.mark.parametrize(("buffer", "batch"), [slow("1", "1"), ("10", "3")])
def test_interactive_translates_what_it_is_given(pairs, translator, tmp_path, capsys, buffer, batch):
    given = ["e1 e2 e3", "", "e4 ünïcödé 漢字 e5 \u2028 🙂", " ", "e6"]
    (tmp_path / "input").write_text("\n".join(given) + "\n", encoding="utf-8")
    flags = ["--path", str(translator / "checkpoint_last.pt"), "--beam", "4", "--max-len-b", "12"]
    flags += ["--input", str(tmp_path / "input"), "--buffer-size", buffer, "--batch-size", batch]
    command("interactive", str(pairs.data), *TRANSLATION, *QUIET, *flags)
    found = hypotheses_in(capsys.readouterr().out)
    assert sorted(found) == list(range(len(given)))
    assert all(math.isfinite(hypotheses[0].score) for hypotheses in found.values())
    # Without words there is nothing to tell two sources apart.
    assert found[1] == found[3] != found[0]


@pytest.mark.slow
def test_softmax_attention_to_the_source_aligns_words(pairs, tmp_path, capsys):
    train_translation(pairs.data, tmp_path, "--fast-weight-attention", "encoder,decoder")
    path = tmp_path / "checkpoint_last.pt"
    generate(pairs.data, path, tmp_path / "out", "--print-alignment")
    text = (tmp_path / "out" / "generate-test.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^A-\d+\t", text, flags=re.MULTILINE)) == len(pairs.lines("test", "en"))
    (tmp_path / "input").write_text("e1 unknown\n")
    flags = ["--path", str(path), "--replace-unk", "", "--input", str(tmp_path / "input")]
    command("interactive", str(pairs.data), *TRANSLATION, *QUIET, *flags)
    assert sorted(hypotheses_in(capsys.readouterr().out)) == [0]
