"""The demos: texts, errors, results; steps, figures and logs, which all use."""

import gzip
import io
import random
import re
import sys
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from common import fairseq_logs, figures, files, steps
from common.files import SPLITS, UserError
from demo import corpora, run
from demo_translation import run as translation
from synthetic import demo as synthetic
from synthetic import run as grid

from .conftest import PATH, ROOT


@pytest.mark.parametrize("demo", [run, translation, grid, synthetic])
def test_wrong_options_and_folders_are_named_before_any_work(demo: Any, tmp_path: Path, monkeypatch, capsys) -> None:
    out = [*["--setting", "1"] * (demo is grid), "--out", str(tmp_path)]
    for option, value in (("--updates", "0"), ("--models", "lstm")) * (demo in (run, translation)):
        with pytest.raises(SystemExit, match="2"):
            demo.main([option, value, *out])
        assert option in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("common.commands.find_spec", lambda name: None)
        words = ["--draw", *out[2:]] if demo is grid else out
        assert demo.main(words) == 1 and "there is no package " in capsys.readouterr().err
    (tmp_path / "made-by-another-demo").write_text("years of work")
    assert demo.main(out) == 1 and "holds other files" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


def test_the_splits_of_the_english_share_nothing() -> None:
    english = corpora.split_english()
    # Headings and the like may coincide, sentences may not.
    for one, other in combinations(english.values(), 2):
        assert not {line for line in one if len(line.split()) >= 16} & set(other)
    tokens = {split: sum(len(line.split()) + 1 for line in lines) for split, lines in english.items()}
    assert 60_000 < sum(tokens.values()) < 0.95 * sum(len(corpora.tokenize(x).split()) for x in corpora.topics.values())
    assert all(0.08 < tokens[split] / sum(tokens.values()) <= 0.1 for split in ("valid", "test"))


def test_texts_have_their_usual_names_and_unusable_ones_are_named(tmp_path: Path, capsys) -> None:
    (folder := tmp_path / "texts").mkdir()
    text = b"\xef\xbb\xbf" + " two  <unk>\tgröße ’\r\n\n".encode() * 50
    for name, content in (("train", text), ("valid.txt", text), ("wiki.test.tokens.gz", gzip.compress(text))):
        (folder / name).write_bytes(content)
    corpus = corpora.corpus_in(folder)
    assert corpus.tokens["train"] == 50 * (4 + 1 + 1)
    corpus.write(tmp_path)
    assert all((tmp_path / f"{x}.txt").read_bytes() == "two <unk> größe ’\n\n".encode() * 50 for x in SPLITS)
    (folder / "valid.txt").unlink()
    for name, content, message in (
        ("other", b"", "has no text for valid: it must hold one of valid, valid.txt, wiki.valid.tokens, "),
        ("valid.txt", b"one two\n", "valid.txt holds 3 tokens; it must hold at least 100"),
        ("valid.txt", text + "größer\n".encode("latin-1"), "valid.txt, line 101: not UTF-8, byte 3 of the line"),
        ("valid", text, "more than one text for valid: valid, valid.txt"),
    ):
        (folder / name).write_bytes(content)
        assert run.main(["--data", str(folder), "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_demo_trains_scores_and_compares(tmp_path: Path, forked: None, capsys) -> None:
    """With a text of two words, of which a dictionary has fewer entries than a token is otherwise drawn from."""
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    draw = random.Random(0)
    for split in SPLITS:
        (folder / f"{split}.txt").write_text("".join(" ".join(draw.choices("01", k=20)) + "\n" for _ in range(20)))
    arguments = ["--data", str(folder), "--out", str(out), "--updates", "2", "--models", "transformer", "gated-delta"]
    assert run.main(arguments) == 0
    shown, table = capsys.readouterr().out, (out / "table.md").read_text()
    assert table in shown and table.partition("The Gated DeltaNet goes on after")[2].count("\n- ") == 5
    names, *numbers = zip(*(re.split(r" *\| *", line)[1:6] for line in table.splitlines()[2:5]), strict=True)
    assert names == ("unigram", "Transformer", "Gated DeltaNet")
    assert all(x == "-" or float(x.replace(",", "")) > 1 for x in chain(*numbers)) and numbers[-1].count("-") == 1
    # The KV cache grows 64-fold; the state does not grow. The last lines compare both, with times.
    kept = re.findall(
        r"^\| (?:Transformer|Gated DeltaNet) +\| +(\d+) \| +([\d,]+) \| +[\d.]+ \| +[\d.]+ \|$", table, re.MULTILINE
    )
    (few, many), (state, same) = ((int(x.replace(",", "")) for x in row) for row in kept)
    assert many == pytest.approx(64 * few, rel=0.01) and 10 < state == same < few
    line = (
        r"- {}: test perplexity [\d.]+; after 4,096 tokens it keeps {:,} kB of a text, and a decode step takes [\d.]+"
    )
    lines = line.format("Transformer", many), line.format("Gated DeltaNet", same), r"\nDone in \d+ s\."
    assert re.search(" ms\n".join(lines), shown)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run.main(arguments) == 0
    again = capsys.readouterr().out
    assert "fairseq-" not in again and table in again
    assert run.main([*arguments, "--seed", "2"]) == 0  # in the place of the others
    assert capsys.readouterr().out.count("fairseq-train") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq's own
def test_numbers_that_were_never_seen_are_translated(tmp_path: Path, forked: None, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", PATH)
    arguments = ["--out", str(tmp_path), "--models", "linear-transformer", "--updates", "450"]
    assert translation.main(arguments) == 0
    shown, table = capsys.readouterr().out, (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table in shown and "13a" in table
    bleu, exact = re.findall(r"\| *([\d.]+) \| *(\d+) of 1,000 \|", table)[0]
    assert float(bleu) >= 30 and int(exact) >= 200, shown  # 45; a model that has not learned to count has none
    # By another way than the demo's: the text in the folder is the one that was scored.
    names = ("text/test.de", "linear-transformer-1/generate-test.hyp", "text/train.de")
    reference, output, seen = ((tmp_path / name).read_text(encoding="utf-8").splitlines() for name in names)
    assert sum(map(str.__eq__, reference, output)) == int(exact) and not set(seen) & set(reference)
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process of its own, which has not imported the plugin
    try:
        assert translation.main(arguments) == 0
    finally:
        torch.serialization.add_safe_globals(allowed)
    assert "fairseq-" not in capsys.readouterr().out


MARK = "made-by-a-test"


def make_step(folder: Path, code: str, **others: Any) -> Any:
    """A step that runs Python code in its folder, given as argument."""
    words = [sys.executable, "-c", code, str(folder)]
    return steps.Step(folder.name, folder, words, read_result=lambda log: {"log": log}, **others)


def work(*wanted: Any) -> str:
    """Runs steps; returns the output, and the error if one fails."""
    output = io.StringIO()
    try:
        steps.Runner(2, output, {}).run(wanted)
    except UserError as error:
        output.write(str(error))
    return output.getvalue()


def test_a_folder_belongs_to_one_run_of_one_demo(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    with steps.claim(out, MARK):
        others = [(out, MARK, "at work"), (out, "another", "out holds other files"), (out / MARK, MARK, "the results")]
        for folder, mark, message in others:
            with pytest.raises(UserError, match=message):
                steps.claim(folder, mark).__enter__()
    with steps.claim(out, MARK):
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(95, "Operation not supported")))
    with pytest.raises(OSError, match=f"{MARK} cannot be locked: Operation not supported"):
        steps.claim(out, MARK).__enter__()


def test_a_file_takes_the_place_of_a_link_and_is_not_written_through_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    for name in ("file", "file.new"):
        (tmp_path / name).symlink_to("elsewhere")
    files.write_whole(tmp_path / "file", "text")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"elsewhere": "kept", "file": "text"}


@pytest.mark.parametrize("changed", ["nothing", "command", "input", "earlier step"])
def test_a_finished_step_is_run_again_only_if_it_changed(tmp_path: Path, changed: str) -> None:
    def make(changed: str = "") -> Any:
        first = make_step(tmp_path / "first", f"print({changed == 'earlier step'})")
        code, digest = f"print({changed == 'command'})", str(changed == "input")
        return first, make_step(tmp_path / "second", code, depends_on=digest, after=[first])

    work(*make())
    (tmp_path / "second" / "witness").touch()
    first, second = make(changed)
    assert ("second: done before" in work(first, second)) == (changed == "nothing")
    assert second.finished_result() == {"log": f"{changed == 'command'}\n"}
    assert (tmp_path / "second" / "witness").exists() == (changed == "nothing")


# It begins; the next call goes on, if there is a whole checkpoint of the same command.
HALF_THEN_WHOLE = """
import pathlib, sys, zipfile
checkpoint = pathlib.Path(sys.argv[1]) / "checkpoint_last.pt"
begun = checkpoint.exists()
print("resumed" if begun else "what went wrong")
zipfile.ZipFile(checkpoint, "w").writestr("updates", "1")
sys.exit(0 if begun else 3)
"""


@pytest.mark.parametrize("case", ["resumes", "begins anew", "broken checkpoint", "changed"])
def test_a_failed_step_is_shown_is_not_done_and_goes_on_if_it_can(tmp_path: Path, case: str) -> None:
    step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=case != "begins anew")
    for _ in range(1 if case == "resumes" else 2):
        told = work(step)
        assert re.search(r"a failed: .*exit status 3.*\n.*what went wrong\n.*log\.txt", told) and step.result() is None
        assert told.endswith("1 of 1 commands failed or were not run:\n  a failed: exit status 3")
        if case == "broken checkpoint":
            (step.folder / "checkpoint_last.pt").write_bytes(b"half")
        if case == "changed":
            step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=True, depends_on="something else")
    if case == "resumes":
        assert "a: goes on where it was\n" in work(step) and "resumed" in step.log.read_text()


TRAIN_LOG = """
x | INFO | fairseq.utils | ******************CUDA enviroments for all 2 workers******************
x | INFO | fairseq.utils | rank   0: capabilities =  9.0  ; total memory = 79.106 GB ; name = NVIDIA H100 80GB HBM3
x | INFO | fairseq.utils | rank   1: capabilities =  9.0  ; total memory = 79.106 GB ; name = NVIDIA H100 80GB HBM3
x | INFO | fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)
x | WARNING | ops.backends | fast weight rules run by chunkwise on cuda: the CUDA kernels were not built; build them
x | INFO | train_inner | {"loss": "3", "ppl": "8", "wps": "100", "ups": "2", "num_updates": "2", "gb_free": "60.1"}
x | INFO | valid | {"epoch": 1, "valid_loss": "4", "valid_ppl": "16", "valid_num_updates": "2"}
x | INFO | train_inner | {"loss": "2", "ppl": "4", "wps": "300", "ups": "2", "num_updates": "4", "gb_free": "58.2"}
x | INFO | valid | {"epoch": 1, "valid_loss": "5", "valid_ppl": "32", "valid_num_updates": "4"}
"""


def test_a_log_is_read_while_it_is_written_and_counts_updates_once() -> None:
    found = fairseq_logs.parse_training(TRAIN_LOG + TRAIN_LOG.replace('"ppl": "4"', '"ppl": "5"'))
    assert (found.train, found.valid) == ({2: 8.0, 4: 5.0}, {2: 16.0, 4: 32.0})
    assert (found.parameters, found.speed) == (1234, 200.0)
    read = fairseq_logs.parse_training(TRAIN_LOG)
    assert (read.gpus, read.gpu_memory) == (["NVIDIA H100 80GB HBM3"] * 2, 20.9)
    assert read.backends == read.without_kernels == ["chunkwise on cuda: the CUDA kernels were not built"]
    # Attention that is transferred has no perplexity.
    parts = [f'x | train_inner | {{"loss": 9, "wps": 1, "num_updates": {n}, "train_wall": 3}}\n' for n in (6, 12)]
    # One that ends before its first report has the sums of its epochs, which count for no other.
    epoch = 'x | train | {"train_wps": "50", "train_ups": "2", "train_train_wall": "7"}\n'
    for log, *told in ((epoch * 2, 14, 50, 2), ("".join(parts) + epoch, 6, 1, 0)):
        training = fairseq_logs.parse_training(log)
        assert [training.seconds, training.speed, training.updates_per_second] == told and not training.train
    cut = TRAIN_LOG + 'x | INFO | train_inner | {"epoch": 1, "lo'
    assert fairseq_logs.parse_training(cut) == read
    assert fairseq_logs.describe_training(cut, 8) == "update 4/8, loss 2.00, 300 tokens/s, about 2 s left"


def test_no_name_is_written_over_another_or_over_a_point() -> None:
    points = {"sum": (1, 1), "delta": (1, 1.03, 0.9, 1.2), "gated": (1.01, 1.02), "decay": (9, 2)}
    figure, axes = figures.new_figure()
    figures.draw_points(axes, points)
    figure.draw_without_rendering()
    names = [text.get_window_extent() for text in axes.texts]
    assert len(names) == 4 and not any(one.overlaps(other) for one, other in combinations(names, 2))
    assert not any(name.contains(*axes.transData.transform(x[:2])) for name in names for x in points.values())


def test_a_log_says_now_and_then_how_far_the_commands_are(monkeypatch) -> None:
    """A terminal has lines that change; a log would be silent for minutes."""
    log = io.StringIO()
    screen = steps.Screen(log)
    screen.show(["training: update 1/9"])
    assert log.getvalue() == ""
    monkeypatch.setattr("common.steps.PAUSE", 0.0)
    screen.show(iter(["training: update 2/9", "scoring: 3 s"]))
    assert log.getvalue() == "> training: update 2/9\n> scoring: 3 s\n"
    assert fairseq_logs.time_left(None) == "" and fairseq_logs.time_left(300) == ", about 5 min left"
