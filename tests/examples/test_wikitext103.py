"""The scripts of examples/wikitext103: each does what it says, and no flag in it has rotted.

Cut down to a few updates of a tiny model: the options at a call's end override what the scripts set.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.conversion.transfers import save_as_in_2019

from .conftest import WIKITEXT103, options, run_script

PREPARE, WIKITEXT2 = WIKITEXT103 / "prepare.sh", WIKITEXT103 / "wikitext2.sh"
EVALUATE, SUMMARIZE = WIKITEXT103 / "evaluate.sh", WIKITEXT103 / "summarize.py"
ROWS = sorted(WIKITEXT103.glob("table*/*.sh"))
MAO_ROWS = sorted((WIKITEXT103 / "mao-table3").glob("*.sh"))
BASE, DECAY = WIKITEXT103 / "mao-table3" / "base.sh", WIKITEXT103 / "mao-table3" / "decay-32.sh"
DELTA = WIKITEXT103 / "table2" / "small-delta-network.sh"
CARRIED = WIKITEXT103 / "table4" / "delta-network.sh"

TINY_MODEL = (
    "--decoder-layers 1 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 8"
    " --decoder-attention-heads 2 --adaptive-input-cutoff 50,100 --adaptive-softmax-cutoff 50,100"
).split()
TINY_TRAINING = "--cpu --num-workers 0 --warmup-updates 1 --max-update 2 --batch-size 2 --tokens-per-sample 16".split()
TINY_EVALUATION = "--cpu --num-workers 0".split()


# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def row_id(row: Path) -> str:
    return f"{row.parent.name}/{row.stem}"


# --- the rows of the tables


def test_there_is_a_script_for_each_row_that_the_code_can_run() -> None:
    sizes = [f"table2/{size}-{model}" for size in ("small", "medium") for model in (
        "transformer", "linear-transformer", "delta-network", "performer-sum", "performer-delta")]  # fmt: skip
    ablation = [f"table3/positions-{p}-normalization-{n}" for p in ("yes", "no") for n in ("yes", "no")]
    carried = [f"table4/{m}" for m in ("linear-transformer", "linear-transformer-no-normalization", "delta-network")]
    capacity = [f"table5/{name}-{rule}" for name in ("performer", "dpfp") for rule in ("sum", "delta")]
    assert sorted(map(row_id, ROWS)) == sorted([*sizes, *ablation, *carried, *capacity])
    assert all(os.access(row, os.X_OK) for row in ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_row_trains_and_is_scored(row: Path, data: Path, tmp_path: Path, commands, fairseq, caplog) -> None:
    (train,) = commands(row, "train", data, tmp_path / "out", *TINY_TRAINING, *TINY_MODEL)
    fairseq(train)
    checkpoint = torch.load(tmp_path / "out" / "checkpoint_best.pt", weights_only=False)
    model, asked = checkpoint["cfg"]["model"], options(train)
    for option in ("--update-rule", "--feature-map", "--normalization", "--softmax-attention-layers"):
        if option in asked:
            assert str(model[option[2:].replace("-", "_")]) == asked[option]
    assert model["no_token_positional_embeddings"] == ("positions-no" in row.stem or row.parent.name == "table4")

    # An untrained model of this size is soon scored in segments as long as those it was trained on.
    _, test = commands(row, "evaluate", data, tmp_path / "out", *TINY_EVALUATION, "--tokens-per-sample", 16)
    if "--context-window" in test:
        test += ["--context-window", "15"]
    with caplog.at_level(logging.INFO):
        fairseq(test)
    assert "Perplexity: " in caplog.text


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_row_has_the_settings_of_the_paper(row: Path, tmp_path: Path, commands) -> None:
    (tmp_path / "dict.txt").touch()
    (tmp_path / "checkpoint_best.pt").touch()
    (train,) = commands(row, "train", tmp_path, tmp_path)
    evaluations = commands(row, "evaluate", tmp_path, tmp_path)
    small = "small" in row.stem or row.parent.name == "table5"
    length, batch, updates = (256, 96, 500_000) if small else (384, 56, 400_000)
    asked = options(train)
    assert asked["--arch"] == f"fast_weight_lm_wiki103_{'small' if small else 'medium'}"
    assert (asked["--tokens-per-sample"], asked["--batch-size"]) == (str(length), str(batch))
    assert (asked["--lr"], asked["--warmup-updates"], asked["--max-update"]) == ("0.00025", "2000", str(updates))
    assert [options(call)["--gen-subset"] for call in evaluations] == ["valid", "test"]
    for call in evaluations:
        scored = options(call)
        assert scored["--tokens-per-sample"] == str(length)
        if row.parent.name == "table4":
            assert "--carry-over-state" in scored and "--carry-over-state" in asked
        else:
            assert scored["--context-window"] == str(length - 1) and "--carry-over-state" not in asked


@pytest.mark.parametrize(("gpus", "update_freq"), [(1, 1), (2, 1), (2, 3), (8, 4)])
def test_the_batch_is_divided_among_gpus_and_accumulated_batches(
    gpus: int, update_freq: int, tmp_path: Path, commands
) -> None:
    (tmp_path / "dict.txt").touch()
    env = {"GPUS": str(gpus), "UPDATE_FREQ": str(update_freq)}
    (train,) = commands(DELTA, "train", tmp_path, tmp_path, env=env)
    asked = options(train)
    assert asked["--distributed-world-size"] == str(gpus) and asked["--update-freq"] == str(update_freq)
    assert int(asked["--batch-size"]) * gpus * update_freq == 96


@pytest.mark.slow
def test_a_row_runs_from_the_first_command_to_the_last(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_script(DELTA, "train", data, out, *TINY_TRAINING, *TINY_MODEL)
    assert result.returncode == 0, result.stderr
    assert "done training" in result.stdout and (out / "train.log").read_text() == result.stdout

    short = [*TINY_EVALUATION, "--tokens-per-sample", "16", "--context-window", "15"]
    result = run_script(DELTA, "evaluate", data, out, *short)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Perplexity: ") == 2
    before = (out / "sliding-test.log").stat()
    again = run_script(DELTA, "evaluate", data, out, *short)
    assert "scoring" not in again.stdout and again.stdout.count("Perplexity: ") == 2
    assert (out / "sliding-test.log").stat() == before

    summary = subprocess.run([sys.executable, SUMMARIZE, tmp_path], capture_output=True, text=True)
    assert summary.returncode == 0 and not summary.stderr
    assert "valid, sliding" in summary.stdout and "| 2 |" in summary.stdout


def make_newer(checkpoint: Path) -> None:
    """As more training would."""
    later = checkpoint.stat().st_mtime + 100
    os.utime(checkpoint, (later, later))


def test_each_checkpoint_has_logs_of_its_own_which_stand_until_it_changes(tmp_path: Path, commands) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("dict.txt", "checkpoint_best.pt", "checkpoint_last.pt"):
        (out / name).touch()

    def scored(**env: str) -> list[tuple[str, str]]:
        calls = map(options, commands(EVALUATE, "context-0", 512, out, out, env=env))
        return [(Path(call["--path"]).name, call["--gen-subset"]) for call in calls]

    for name, logs in (
        ("checkpoint_best.pt", {"context-0-valid.log", "context-0-test.log"}),
        ("checkpoint_last.pt", {"context-0-valid.checkpoint_last.log", "context-0-test.checkpoint_last.log"}),
    ):
        before = set(out.glob("*.log"))
        env = {} if name == "checkpoint_best.pt" else {"CHECKPOINT": name}
        assert scored(**env) == [(name, "valid"), (name, "test")]
        assert {log.name for log in set(out.glob("*.log")) - before} == logs
        assert scored(**env) == scored(**env, SPLITS="test") == []
    make_newer(out / "checkpoint_best.pt")
    assert scored(CHECKPOINT="checkpoint_last.pt") == []
    assert scored(SPLITS="valid") == [("checkpoint_best.pt", "valid")]
    assert not list(out.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("script", "arguments", "env", "message"),
    [
        (DELTA, ["learn", "DATA", "OUT"], {}, "ROW.sh train DATA OUT"),
        (DELTA, ["train"], {}, "ROW.sh train DATA OUT"),
        (DELTA, ["train", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (DELTA, ["evaluate", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (DELTA, ["evaluate", "DATA", "OUT"], {}, "OUT, which holds no checkpoint_best.pt"),
        (DELTA, ["train", "DATA", "OUT"], {"GPUS": "5"}, "GPUS x UPDATE_FREQ is 5; it must divide the batch of 96"),
        (DELTA, ["train", "DATA", "OUT"], {"GPUS": "two"}, "GPUS is two; it must be a positive number"),
        (CARRIED, ["train", "DATA", "OUT"], {"UPDATE_FREQ": "2"}, "with state carried over it must be 1"),
        (WIKITEXT103 / "row.sh", ["huge", "sliding", "--", "train", "DATA", "OUT"], {}, "must be small or medium"),
        (WIKITEXT103 / "row.sh", ["small", "folded", "--", "train", "DATA", "OUT"], {}, "must be sliding or carried"),
        (EVALUATE, ["sliding", "256", "DATA"], {}, "evaluate.sh MODE LENGTH DATA OUT"),
        (EVALUATE, ["folded", "256", "DATA", "OUT"], {}, "MODE is folded"),
        (EVALUATE, ["sliding", "all", "DATA", "OUT"], {}, "LENGTH is all"),
        (EVALUATE, ["context-512", "512", "DATA", "OUT"], {}, "N a number below LENGTH, 512"),
        (EVALUATE, ["context-", "512", "DATA", "OUT"], {}, "MODE is context-; it must be context-N"),
        (EVALUATE, ["context-0", "512", "DATA", "DATA"], {"CHECKPOINT": "x.pt"}, "data, which holds no x.pt"),
        (EVALUATE, ["context-0", "512", "DATA", "DATA"], {"CHECKPOINT": "a/x.pt"}, "must be the name of a file in OUT"),
        (DECAY, ["train", "DATA", "OUT"], {}, "ROW.sh train SOURCE DATA OUT"),
        (DECAY, ["learn", "DATA", "DATA", "OUT"], {}, "ROW.sh train SOURCE DATA OUT"),
        (DECAY, ["train", "nowhere", "DATA", "OUT"], {}, "SOURCE is nowhere; it must be a folder with model.pt"),
        (DECAY, ["train", str(DECAY), "DATA", "OUT"], {}, "there is no dict.txt beside"),
        (DECAY, ["train", "SOURCE", "nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (DECAY, ["train", "SOURCE", "DATA", "OUT"], {"GPUS": "4"}, "it must divide the batch of 26"),
        (DECAY, ["evaluate", "DATA", "DATA"], {}, "which holds no checkpoint_last.pt"),
        (WIKITEXT103 / "mao-row.sh", ["all", "--", "train", "SOURCE", "DATA", "OUT"], {}, "M is all"),
        (WIKITEXT2, ["DATA"], {}, "wikitext2.sh DATA OUT [MODEL ...]"),
        (WIKITEXT2, ["nowhere", "OUT"], {}, "DATA is nowhere, which holds no dict.txt"),
        (WIKITEXT2, ["DATA", "OUT", "gamma"], {}, "MODEL is gamma; it must be one of softmax sum delta"),
        (WIKITEXT2, ["DATA", "OUT"], {"UPDATES": "0"}, "UPDATES is 0; it must be a positive number"),
        (WIKITEXT2, ["DATA", "OUT"], {"JOBS": "all"}, "JOBS is all; it must be a positive number"),
    ],
)
def test_wrong_use_is_refused_and_leaves_nothing_behind(
    script: Path, arguments: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    for folder, name in (("data", "dict.txt"), ("source", "dict.txt"), ("source", "model.pt")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch()
    places = {"DATA": str(tmp_path / "data"), "SOURCE": str(tmp_path / "source"), "OUT": str(tmp_path / "OUT")}
    result = run_script(script, *(places.get(word, word) for word in arguments), env=env)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "OUT").exists()


# --- Mao's Table 3


@pytest.fixture(scope="module")
def published(tokens: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of the published one's format, its dictionary in another order than a freshly made one."""
    from fairseq import options as fairseq_options
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    folder = tmp_path_factory.mktemp("published")
    words = (data / "dict.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "dict.txt").write_text("".join(reversed(words)), encoding="utf-8")
    flags = ["--arch", "transformer_lm_baevski_wiki103", *TINY_MODEL, "--tokens-per-sample", "16"]
    parser = fairseq_options.get_training_parser("language_modeling")
    args = fairseq_options.parse_args_and_arch(parser, [str(folder), *flags])
    torch.manual_seed(1)
    model = tasks.setup_task(args).build_model(convert_namespace_to_omegaconf(args).model)
    return save_as_in_2019(model, folder)


@pytest.fixture(scope="module")
def numbered(published: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tokens` in the numbers of the published dictionary."""
    out = tmp_path_factory.mktemp("numbered") / "bin"
    env = {"SKIP_COUNTS": "1", "DICT": str(published / "dict.txt")}
    result = run_script(PREPARE, out, tokens, env=env)
    assert result.returncode == 0, result.stderr
    return out


def test_maos_rows_are_all_there() -> None:
    assert [row.stem for row in MAO_ROWS] == ["base", "decay-32", "decay-64"]
    assert all(os.access(row, os.X_OK) for row in MAO_ROWS)


@pytest.mark.parametrize("row", MAO_ROWS, ids=lambda row: row.stem)
def test_a_row_of_mao_has_the_settings_of_the_paper(row: Path, tmp_path: Path, commands) -> None:
    for name in ("dict.txt", "model.pt", "checkpoint_last.pt"):
        (tmp_path / name).touch()
    (train,) = commands(row, "train", tmp_path, tmp_path, tmp_path, env={"GPUS": "2"})
    asked = options(train)
    assert asked["--arch"] == "fast_weight_lm_baevski_wiki103"
    assert asked["--transfer-from"] == str(tmp_path / "model.pt")
    assert (asked["--tokens-per-sample"], asked["--batch-size"], asked["--clip-norm"]) == ("512", "13", "0.1")
    if row == BASE:
        assert (asked["--softmax-attention-layers"], asked["--lr"], asked["--max-update"]) == ("all", "0", "1")
    else:
        assert (asked["--update-rule"], asked["--feature-dim"]) == ("decay", row.stem.removeprefix("decay-"))
        assert (asked["--feature-map"], asked["--normalization"]) == ("identity", "none")
        assert (asked["--lr"], asked["--lr-scheduler"], asked["--min-lr"]) == ("0.0001", "cosine", "2e-06")
        assert (asked["--warmup-updates"], asked["--max-update"]) == ("4000", "100000")
    evaluations = [options(call) for call in commands(row, "evaluate", tmp_path, tmp_path)]
    kinds = [(scored["--gen-subset"], scored["--context-window"]) for scored in evaluations]
    assert kinds == [("valid", "0"), ("test", "0"), ("valid", "480"), ("test", "480")]
    assert {scored["--tokens-per-sample"] for scored in evaluations} == {"512"}
    assert {scored["--path"] for scored in evaluations} == {str(tmp_path / "checkpoint_last.pt")}


@pytest.mark.slow
def test_the_checkpoint_itself_is_scored_as_it_is(published, numbered, tmp_path, commands, fairseq) -> None:
    (train,) = commands(BASE, "train", published, numbered, tmp_path / "out", *TINY_TRAINING, *TINY_MODEL)
    fairseq(train)
    source, ours = (
        torch.load(path, weights_only=False)["model"]
        for path in (published / "model.pt", tmp_path / "out" / "checkpoint_last.pt")
    )
    _q, k, _v = source["decoder.layers.0.self_attn.in_proj_weight"].chunk(3)
    assert torch.equal(ours["decoder.layers.0.self_attn.k_proj.weight"], k)
    same = [name for name in source if name in ours]
    assert len(same) > 10 and all(torch.equal(source[name], ours[name]) for name in same)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in MAO_ROWS if row != BASE], ids=lambda row: row.stem)
def test_a_row_of_mao_is_fine_tuned_and_scored(row, published, numbered, data, tmp_path, commands, fairseq, caplog):
    # A head of this size has keys of 16.
    small = [*TINY_TRAINING, *TINY_MODEL, "--feature-dim", "8"]
    (train,) = commands(row, "train", published, numbered, tmp_path / "out", *small)
    fairseq(train)
    checkpoint = torch.load(tmp_path / "out" / "checkpoint_last.pt", weights_only=False)
    assert str(checkpoint["cfg"]["model"]["update_rule"]) == "decay"
    assert checkpoint["model"]["decoder.layers.0.self_attn.k_proj.weight"].shape == (16, 32)

    window = [*TINY_EVALUATION, "--tokens-per-sample", 16]
    for context, test in enumerate(commands(row, "evaluate", numbered, tmp_path / "out", *window)[1::2]):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fairseq([*test, "--context-window", "12"] if context else test)
        assert "Perplexity: " in caplog.text

    (other,) = commands(row, "train", published, data, tmp_path / "other", *small)
    with pytest.raises(ValueError, match="in another order than a freshly made one"):
        fairseq(other)


# --- wikitext2.sh


@pytest.mark.slow
@pytest.mark.parametrize("model", ["softmax", "delta", "delta-no-positions", "sum-carried", "delta-carried"])
def test_a_model_of_the_comparison_trains_and_is_scored(model: str, data: Path, tmp_path: Path, commands, fairseq):
    calls = commands(WIKITEXT2, data, tmp_path, model, env={"UPDATES": "2"})
    names = [call[0] for call in calls]
    assert names == ["fairseq-train", *["fairseq-eval-lm"] * (1 if model == "softmax" else 2)]
    for call in calls:
        fairseq(call)


@pytest.mark.slow
def test_the_comparison_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path) -> None:
    result = run_script(WIKITEXT2, data, tmp_path / "out", "sum", env={"UPDATES": "2"})
    assert result.returncode == 0, result.stderr
    again = run_script(WIKITEXT2, data, tmp_path / "out", "sum", env={"UPDATES": "2"})
    assert again.returncode == 0 and "training" not in again.stdout

    command = [sys.executable, SUMMARIZE, tmp_path / "out", "--markdown", tmp_path / "t.md"]
    summary = subprocess.run([*command, "--figure", tmp_path / "t.png"], capture_output=True, text=True)
    assert summary.returncode == 0, summary.stderr
    assert summary.stdout == (tmp_path / "t.md").read_text()
    table = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in summary.stdout.splitlines()}
    assert table["model"][3:6] == ["valid, in training", "test, sliding", "test, carried over"]
    assert table["sum"][2] == "2" and "–" not in table["sum"]
    assert table["delta-carried"][1] == "missing"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_comparison_is_not_trained_on_from_checkpoints_without_optimizer(tmp_path: Path, commands) -> None:
    (tmp_path / "dict.txt").touch()
    (tmp_path / "sum").mkdir()
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / "sum" / name).touch()
    assert len(commands(WIKITEXT2, tmp_path, tmp_path, "sum")) == 3
    assert not list((tmp_path / "sum").glob("*.pt"))


def test_the_comparison_scores_a_model_again_that_was_trained_again(tmp_path: Path, commands) -> None:
    out = tmp_path / "out"
    (out / "sum").mkdir(parents=True)
    for name in ("dict.txt", "sum/trained", "sum/checkpoint_best.pt"):
        (out / name).touch()
    assert len(commands(WIKITEXT2, out, out, "sum")) == 2
    assert commands(WIKITEXT2, out, out, "sum") == []
    make_newer(out / "sum" / "checkpoint_best.pt")
    assert len(commands(WIKITEXT2, out, out, "sum")) == 2


# --- summarize.py


def write_training(folder: Path, updates: int, finished: bool = True) -> Path:
    """A training's log as fairseq writes it: a report every 10 updates, a validation every 20."""
    folder.mkdir(parents=True)
    lines = ["fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1,234,567)"]
    for update in range(10, updates + 1, 10):
        report = {"num_updates": str(update), "ppl": str(900 / update), "wps": "1000"}
        lines.append(f"train_inner | {json.dumps(report)}")
        if update % 20 == 0:
            lines.append(f"valid | {json.dumps({'valid_num_updates': str(update), 'valid_ppl': str(999 / update)})}")
    lines += ["fairseq_cli.train | done training in 1.0 seconds"] * finished
    (folder / "train.log").write_text("".join(f"2026-01-01 00:00:00 | INFO | {line}\n" for line in lines))
    return folder


def summarize(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SUMMARIZE), *map(str, arguments)], capture_output=True, text=True)


def test_a_summary_tells_the_best_validation_and_the_scores(tmp_path: Path) -> None:
    run = write_training(tmp_path / "a", 40)
    (run / "carried-test.log").write_text("x | Loss (base 2): 5.0, Perplexity: 32.00\n")
    write_training(tmp_path / "b", 20)
    result = summarize(tmp_path)
    assert not result.stderr
    assert result.stdout.splitlines()[2:] == [
        "| a | 1,234,567 | 40 | 24.98 | 32.00 | 1,000 |",
        "| b | 1,234,567 | 20 | 49.95 | – | 1,000 |",
    ]


def test_a_summary_tells_checkpoints_apart(tmp_path: Path) -> None:
    for model, logs in (
        ("a", {"context-0-test": 32, "context-0-test.checkpoint_last": 34}),
        ("b", {"context-0-valid.checkpoint_last": 36}),
    ):
        write_training(tmp_path / model, 20)
        for name, perplexity in logs.items():
            (tmp_path / model / f"{name}.log").write_text(f"x | Loss (base 2): 5.0, Perplexity: {perplexity}.00\n")
    result = summarize(tmp_path)
    assert not result.stderr
    columns = "valid, context 0 (checkpoint_last) | test, context 0 | test, context 0 (checkpoint_last)"
    header, _, *rows = result.stdout.splitlines()
    assert f"| valid, in training | {columns} |" in header
    assert rows == [
        "| a | 1,234,567 | 20 | 49.95 | – | 32.00 | 34.00 | 1,000 |",
        "| b | 1,234,567 | 20 | 49.95 | 36.00 | – | – | 1,000 |",
    ]


def test_a_summary_says_what_is_unfinished_or_missing(tmp_path: Path) -> None:
    cut = write_training(tmp_path / "cut", 50, finished=False)
    with (cut / "train.log").open("a") as log:
        log.write('2026-01-01 00:00:00 | INFO | train_inner | {"num_upd')
    (cut / "sliding.log").write_text("loading\n")
    early = write_training(tmp_path / "early", 0, finished=False)
    (early / "train.log").write_text("starting\n")
    result = summarize(tmp_path, "cut", "early", "never")
    assert result.returncode == 0
    assert "| cut | 1,234,567 | 50 (unfinished) | 24.98 | 1,000 |" in result.stdout
    assert "| never | missing |" in result.stdout
    for message in (
        "cut/train.log is of an unfinished training: it ends at update 50, last validation at update 40",
        "cut/train.log has a damaged line",
        "cut/sliding.log ends before the perplexity",
        "early/train.log ends before the model was built",
        "never/train.log is missing",
    ):
        assert message in result.stderr


@pytest.mark.parametrize(("folder", "message"), [("nowhere", "no folder"), (".", "holds no folder with the log")])
def test_nothing_to_summarize_is_an_error(folder: str, message: str, tmp_path: Path) -> None:
    result = summarize(tmp_path / folder)
    assert result.returncode == 1 and message in result.stderr and not result.stdout


def test_the_summary_knows_the_models_of_the_comparison() -> None:
    listed = next(line for line in WIKITEXT2.read_text().splitlines() if line.startswith("models=("))
    assert runpy.run_path(str(SUMMARIZE))["WIKITEXT2"] == tuple(listed[len("models=(") : -1].split())


# --- prepare.sh


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, str]:
    """An environment whose fairseq-preprocess does no more than prepare.sh needs: TYPES lines of dict.txt."""
    programs = tmp_path / "quick"
    programs.mkdir()
    (programs / "fairseq-preprocess").write_text(
        """#!/bin/bash
while [ "$1" != --destdir ]; do shift; done
mkdir -p "$2" && seq "${TYPES:-5}" > "$2/dict.txt"
[ -z "${INTERRUPT:-}" ] || { kill -"$INTERRUPT" $PPID; sleep 0.5; exit 1; }
"""
    )
    (programs / "fairseq-preprocess").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    return {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]]), "SKIP_COUNTS": "1"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three files of known counts: 7, 3 and 3 tokens with line ends."""
    folder = tmp_path / "small"
    folder.mkdir()
    # Words of bytes above 127 only, and white space above 127: both count as they do for fairseq in any locale.
    (folder / "wiki.train.tokens").write_text(" \n – 日本\u3000b \n\u00a0c \n", encoding="utf-8")
    for split in ("valid", "test"):
        (folder / f"wiki.{split}.tokens").write_text(" a b \n")
    return folder


def test_a_prepared_corpus_is_what_fairseq_reads(data: Path) -> None:
    assert {f"{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")} <= {
        file.name for file in data.iterdir()
    }
    assert not data.with_name("bin.unfinished").exists()


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_counts_are_the_same_in_any_locale(locale: str, small: Path, tmp_path: Path, quick) -> None:
    result = run_script(PREPARE, tmp_path / "out", small, env={**quick, "LC_ALL": locale})
    assert result.returncode == 0, result.stderr
    assert "7 3 3 tokens with line ends" in result.stdout


def test_plain_and_gzipped_files_are_taken_and_a_second_run_does_nothing(small: Path, tmp_path: Path, quick) -> None:
    train = small / "wiki.train.tokens"
    (small / "wiki.train.tokens.gz").write_bytes(gzip.compress(train.read_bytes()))
    train.unlink()
    out = tmp_path / "deep" / "out"
    assert "7 3 3 tokens" in run_script(PREPARE, out, small, env=quick).stdout
    shutil.rmtree(small)
    again = run_script(PREPARE, f"{out}/", small, env=quick)
    assert again.returncode == 0 and "is finished" in again.stdout
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


@pytest.mark.slow
def test_the_words_of_a_dictionary_are_numbered_as_they_are_there(published: Path, numbered: Path, quick) -> None:
    def words(folder: Path) -> list[str]:
        return [line.split(" ")[0] for line in (folder / "dict.txt").read_text(encoding="utf-8").splitlines()]

    assert words(numbered) == words(published)
    log = (numbered / "preprocess.log").read_text()
    assert log.count(" 0.0% replaced (by <unk>)") == 3
    again = run_script(PREPARE, numbered, "FOLDER", env={**quick, "DICT": str(published / "dict.txt")})
    assert again.returncode == 0 and "is finished" in again.stdout


def test_data_of_another_dictionary_are_not_taken_for_finished(small: Path, tmp_path: Path, quick) -> None:
    assert run_script(PREPARE, tmp_path / "out", small, env=quick).returncode == 0
    (tmp_path / "dict.txt").write_text("2 1\n1 1\n3 1\n4 1\n5 1\n")
    result = run_script(PREPARE, tmp_path / "out", small, env={**quick, "DICT": str(tmp_path / "dict.txt")})
    assert result.returncode == 1 and "its words are not those of DICT" in result.stderr
    result = run_script(PREPARE, tmp_path / "new", small, env={**quick, "DICT": "nowhere"})
    assert result.returncode == 1 and "DICT is nowhere" in result.stderr
    assert not (tmp_path / "new").exists() and not (tmp_path / "new.unfinished").exists()


def test_wikitext2_is_known_by_its_counts_and_checked_by_its_word_types(tmp_path: Path, quick) -> None:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for split, count in (("train", 2_088_628), ("valid", 217_646), ("test", 245_569)):
        (folder / f"wiki.{split}.tokens").write_text(" a" * (count - 1) + " \n")
    wrong = run_script(PREPARE, tmp_path / "out", folder, env={**quick, "SKIP_COUNTS": "0", "TYPES": "33000"})
    assert wrong.returncode == 1 and not (tmp_path / "out").exists()
    assert "WikiText-2 has 33278 word types with <unk> and line end, but these files have 33002" in wrong.stderr
    right = run_script(PREPARE, tmp_path / "out", folder, env={**quick, "SKIP_COUNTS": "0", "TYPES": "33276"})
    assert right.returncode == 0 and right.stdout.startswith("WikiText-2 in ")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: None, "have 7 3 3 tokens with line ends, which is neither WikiText-103"),
        (lambda folder: (folder / "wiki.valid.tokens").unlink(), "holds neither wiki.valid.tokens nor"),
        (lambda folder: (folder / "wiki.test.tokens").write_text(""), "wiki.test.tokens is empty"),
        (lambda folder: (folder / "wiki.test.tokens").write_bytes(b"\x1f\x8b\xff\n"), "is not text in UTF-8"),
        (shutil.rmtree, "there is no folder"),
    ],
    ids=["counts", "missing", "empty", "binary", "no folder"],
)
def test_a_corpus_that_is_not_right_is_refused(damage, message: str, small: Path, tmp_path: Path, quick) -> None:
    damage(small)
    result = run_script(PREPARE, tmp_path / "out", small, env={**quick, "SKIP_COUNTS": "0"})
    assert result.returncode == 1 and message in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()


def test_a_folder_with_something_else_in_it_is_not_written_to(small: Path, tmp_path: Path, quick) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    result = run_script(PREPARE, tmp_path / "out", small, env=quick)
    assert result.returncode == 1 and "is there, but is not what this script makes" in result.stderr
    (tmp_path / "out" / "mine").unlink()
    assert run_script(PREPARE, tmp_path / "out", small, env=quick).returncode == 0


@pytest.mark.parametrize("signal", ["INT", "TERM", "KILL"])
def test_an_interrupted_run_leaves_nothing_that_looks_finished(signal, small: Path, tmp_path: Path, quick) -> None:
    out = tmp_path / "out"
    result = run_script(PREPARE, out, small, env={**quick, "INTERRUPT": signal})
    assert result.returncode != 0 and not out.exists()
    assert run_script(PREPARE, out, small, env=quick).returncode == 0
    assert (out / "dict.txt").exists() and not (tmp_path / "out.unfinished").exists()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_download_goes_on_where_it_was_cut_off(small: Path, tmp_path: Path, quick) -> None:
    archive, out = tmp_path / "served.zip", tmp_path / "out"
    with zipfile.ZipFile(archive, "w") as served:
        for file in small.iterdir():
            served.write(file, f"wikitext-103/{file.name}")
    env = {**quick, "WIKITEXT_URL": archive.as_uri()}
    failed = run_script(PREPARE, out, env={**quick, "WIKITEXT_URL": (tmp_path / "gone.zip").as_uri()})
    assert failed.returncode == 1 and "cannot download" in failed.stderr and not out.exists()

    part = tmp_path / "out.unfinished" / "wikitext-103-v1.zip.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(archive.read_bytes()[:100])
    result = run_script(PREPARE, out, env=env)
    assert result.returncode == 0, result.stderr
    assert (out / "dict.txt").exists() and not part.parent.exists()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_damaged_download_is_deleted(tmp_path: Path, quick) -> None:
    (tmp_path / "served.zip").write_bytes(b"<html>moved</html>")
    result = run_script(PREPARE, tmp_path / "out", env={**quick, "WIKITEXT_URL": (tmp_path / "served.zip").as_uri()})
    assert result.returncode == 1 and "is damaged and was deleted" in result.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()
