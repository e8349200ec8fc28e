"""fairseq's commands for translation, with fast weights: train, go on, average, generate, interact, validate."""

from __future__ import annotations

import json
import math
import re
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.file_io import PathManager

from tests.conftest import QUIET, command, repeated
from tests.tasks.conftest import SAME_MODEL, TRANSLATION, binarise_pairs, generate, hypotheses_in, train_translation


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


@pytest.mark.slow
def test_a_moving_average_of_the_weights_is_kept_and_goes_on(pairs, tmp_path):
    ema = ["--update-rule", "delta", "--store-ema", "--ema-decay", "0.5", "--ema-fp32"]
    train_translation(pairs.data, tmp_path / "first", *ema, "--max-update", "2")
    first = tmp_path / "first" / "checkpoint_last.pt"
    log = train_translation(pairs.data, tmp_path / "then", *ema, "--max-update", "3", "--restore-file", str(first))
    assert "Loading EMA from checkpoint" in log and len(losses(log)) == 1
    before, state = load(first)["extra_state"]["ema"], load(tmp_path / "then" / "checkpoint_last.pt")
    averaged, weights = state["extra_state"]["ema"], state["model"]
    assert averaged.keys() == weights.keys()
    for side in ("encoder", "decoder"):
        assert torch.equal(averaged[f"{side}.settings_version"], weights[f"{side}.settings_version"])
    for name, x in averaged.items():
        if ".layers." in name and not FUSED.search(name):
            assert torch.allclose(x, (before[name] + weights[name]) / 2, atol=1e-7), name


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


def averaged(paths: list[Path]) -> dict[str, Any]:
    """What fairseq's `scripts/average_checkpoints.py` makes of files: the first one's all but the weights."""
    result: dict[str, Any] = {}
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        with PathManager.open(str(path), "rb") as file:
            state = torch.load(file, map_location="cpu")
        result = result or state
        for name, x in state["model"].items():
            x = x.float() if x.dtype == torch.float16 else x
            if name in total:
                total[name] += x
            else:
                total[name] = x.clone()
    for x in total.values():
        if x.is_floating_point():
            x.div_(len(paths))
        else:
            x //= len(paths)
    return {**result, "model": total}


@pytest.mark.parametrize("half", [False, slow(True)], ids=["float32", "float16"])
def test_averages_of_checkpoints_translate(pairs, translator, tmp_path, half):
    states, paths = [load(translator / f"checkpoint{epoch}.pt") for epoch in (3, 6, 9)], []
    for number, state in enumerate(states):
        weights = {name: x.half() if half and x.is_floating_point() else x for name, x in state["model"].items()}
        paths.append(tmp_path / f"{number}.pt")
        torch.save({**state, "model": weights}, paths[-1])
    average = averaged(paths)
    torch.save(average, tmp_path / "average.pt")
    assert_all_translated(pairs, generate(pairs.data, tmp_path / "average.pt", tmp_path / "out"))
    name = "decoder.layers.1.encoder_attn.v_proj.weight"
    mean = sum(state["model"][name] for state in states) / 3
    assert average["model"][name].dtype == torch.float32
    assert torch.allclose(average["model"][name], mean, atol=1e-3 if half else 1e-6)
    for side in ("encoder", "decoder"):
        settings = f"{side}.settings_version"
        assert torch.equal(average["model"][settings], states[0]["model"][settings])


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


# That each finds the same as without a state is in tests/models/test_translation_generation.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "nbest"),
    [
        ("--lenpen 0.6 --nbest 4 --max-len-a 1.2 --max-len-b 3 --min-len 2 --unkpen 1 --temperature 1.3", 4),
        ("--prefix-size 1 --fp16", 1),
        ("--sampling --sampling-topk 3 --beam 2 --nbest 2 --seed 3", 2),
        ("--diverse-beam-groups 2 --diverse-beam-strength 0.5 --nbest 4 --sacrebleu", 4),
    ],
)
def test_every_way_of_searching_translates_every_line(pairs, translator, tmp_path, flags, nbest):
    path = translator / "checkpoint_last.pt"
    found = generate(pairs.data, path, tmp_path / "out", *flags.split())
    assert_all_translated(pairs, found, nbest)
    if "--sampling" in flags:  # of which the seed is that of the command
        assert_same(generate(pairs.data, path, tmp_path / "again", *flags.split()), found)
    if "--prefix-size" in flags:
        for number, target in enumerate(pairs.lines("test", "de")):
            assert found[number][0].words[:1] == target.split()[:1]


def test_no_word_comes_twice(our_fairseq, pairs, translator, tmp_path):
    for option in ([], ["--no-repeat-ngram-size", "1"]):
        flags = ["--nbest", "4", "--min-len", "10", *option]
        found = generate(pairs.data, translator / "checkpoint_last.pt", tmp_path / "out", *flags)
        assert_all_translated(pairs, found, 4)
        words = [hypothesis.words for hypotheses in found.values() for hypothesis in hypotheses]
        assert any(repeated(x, 1) for x in words) != bool(option)


@pytest.mark.slow
def test_ensembles_translate(pairs, translator, tmp_path):
    train_translation(pairs.data, tmp_path / "softmax", "--fast-weight-attention", "none")
    paths = [translator / "checkpoint_last.pt", tmp_path / "softmax" / "checkpoint_last.pt"]
    single = generate(pairs.data, paths[0], tmp_path / "single")
    for number, order in enumerate((paths, paths[::-1])):
        both = ":".join(str(path) for path in order)
        found = generate(pairs.data, both, tmp_path / f"{number}")
        assert_all_translated(pairs, found)
        assert found[0][0].token_scores != single[0][0].token_scores
        references = generate(pairs.data, both, tmp_path / f"references {number}", "--score-reference")
        assert [references[i][0].words for i in sorted(references)] == [x.split() for x in pairs.lines("test", "de")]
    twice = ":".join([str(paths[0])] * 2)
    assert_same(generate(pairs.data, twice, tmp_path / "twice"), single)


def test_references_are_scored_as_validation_does(pairs, translator, tmp_path, logging_as_it_is):
    path = translator / "checkpoint_last.pt"
    scored = generate(pairs.data, path, tmp_path / "out", "--score-reference", "--gen-subset", "valid")
    values = [x for hypotheses in scored.values() for x in hypotheses[0].token_scores]
    targets = pairs.lines("valid", "de")
    assert len(values) == sum(len(line.split()) + 1 for line in targets)
    assert [scored[i][0].words for i in range(len(targets))] == [line.split() for line in targets]
    log = command("validate", *[str(pairs.data), *TRANSLATION, *QUIET, "--path", str(path), "--max-tokens", "200"])
    (result,) = [json.loads(line) for line in log.splitlines() if line.startswith("{") and '"valid_nll_loss"' in line]
    assert -statistics.mean(values) == pytest.approx(float(result["valid_nll_loss"]), abs=2e-3)


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


@pytest.mark.slow
def test_alignments_are_trained_with_softmax_attention_to_the_source(pairs, pair_text, tmp_path):
    points = {
        f"{split}.align": [" ".join(f"{i}-{i}" for i in range(len(line.split()))) for line in pair_text[f"{split}.en"]]
        for split in ("train", "valid", "test")
    }
    data = binarise_pairs(tmp_path / "aligned", {**pair_text, **points}, "--align-suffix", "align")
    aligned = ["--load-alignments", "--criterion", "label_smoothed_cross_entropy_with_alignment"]
    softmax = ["--fast-weight-attention", "encoder,decoder"]
    log = train_translation(data, tmp_path / "softmax", *aligned, *softmax)
    assert float(re.findall(r'"alignment_loss": "([^"]+)"', log)[-1]) > 0
    # Each of the two alone asks a memory for nothing; nor does a checkpoint that names both, once it is trained.
    for number, flags in enumerate((aligned[:1], aligned[1:])):
        assert len(losses(train_translation(data, tmp_path / f"{number}", *flags))) == 4
    path = tmp_path / "1" / "checkpoint_last.pt"
    state = load(path)
    state["cfg"]["model"].load_alignments = state["cfg"]["task"]["load_alignments"] = True
    torch.save(state, path)
    assert_all_translated(pairs, generate(pairs.data, path, tmp_path / "out"))
