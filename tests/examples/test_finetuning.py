"""The scripts of examples/finetuning: a Transformer is trained, converted and fine-tuned, and the table says how."""

import math
from pathlib import Path

import pytest

from .conftest import EXAMPLES, options, write_training

MEMORY = ("--update-rule", "--feature-map", "--normalization")
WIKITEXT2, SUMMARIZE = (EXAMPLES / "finetuning" / name for name in ("wikitext2.sh", "summarize.py"))


def cells(table: str) -> list[str]:
    return [" | ".join(word.strip() for word in line.strip("| ").split("|")) for line in table.splitlines()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq and what it calls
def test_it_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path, commands, fairseq, run) -> None:
    out, env = tmp_path / "out", {"UPDATES": "10", "JOBS": "1"}
    models = "source decay-4-converted decay-4-scratch gated-16-scaled add-16-scratch".split()
    calls = commands(WIKITEXT2, data, out, *models, env=env)
    assert len(calls) == 5 * 2 + 2  # the two that are made from the source are validated before training, too
    assert commands(WIKITEXT2, data, out, *models, env=env) == []
    for call in calls:
        given = options(call)
        folder = Path(given.get("--save-dir") or Path(given["--path"]).parent)
        log = "test.log" if "--path" in given else "start.log" if "--no-save" in given else "train.log"
        if folder.name != "add-16-scratch":  # of which nothing is known yet
            (folder / log).write_text(fairseq(call))

    status, table, errors = run(SUMMARIZE, out, "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert status == 0 and table == (tmp_path / "t.md").read_text()
    assert errors == f"summarize.py: {out / 'add-16-scratch' / 'train.log'}: it has no validation in it\n"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    rows = {tuple(row.split(" | ")[:2]): row.split(" | ")[3:] for row in cells(table)[2:]}
    assert len(rows) == len(models) - 1
    converted, scratch = rows["decay, m = 4", "converted"], rows["decay, m = 4", "scratch"]
    assert all(math.isfinite(float(cell)) and float(cell) > 1 for cell in converted)
    assert scratch[0] == "–" and float(scratch[1]) > 1
    # Ten updates of training are in the converted model's weights.
    assert float(converted[1]) < float(scratch[1])


def test_all_rules_and_both_starts_are_run_if_none_is_named(tmp_path: Path, commands) -> None:
    (tmp_path / "dict.txt").touch()
    calls = list(map(options, commands(WIKITEXT2, tmp_path, tmp_path / "out", env={"JOBS": "1"})))
    rules = ("decay", "gated", "delta", "add")
    models = [f"{rule}-{m}-{start}" for rule in rules for m in (4, 16) for start in ("converted", "scratch")]
    models += [f"{rule}-{m}-scaled" for rule in ("decay", "gated") for m in (4, 16)]
    updates = {Path(call["--save-dir"]).name: call["--max-update"] for call in calls if "--lr-scheduler" in call}
    assert updates == {"source": "8000", **dict.fromkeys(models, "800")}
    memories = {tuple(call[option] for option in MEMORY) for call in calls[3:] if "--lr" in call}
    assert memories == {("delta", "relu", "sum"), *((rule, "identity", "none") for rule in ("decay", "gated", "sum"))}
    assert sum("--transfer-from" in call for call in calls) == 2 * 12  # the start, and the training
    assert {Path(call["--save-dir"]).name for call in calls if "--scale-read-out" in call} == set(models[-4:])


def test_a_fifth_of_the_budget_is_the_transfer_of_each_model_that_is_aligned(tmp_path: Path, commands) -> None:
    (tmp_path / "dict.txt").touch()
    (out := tmp_path / "out").joinpath("source").mkdir(parents=True)
    for name in ("trained", "test.log"):
        (out / "source" / name).touch()
    models = ["linear-32-aligned", "decay-16-aligned"]
    calls = list(map(options, commands(WIKITEXT2, tmp_path, out, *models, env={"JOBS": "1"})))
    assert len(calls) == 2 * 4
    for model, (transfer, start, training, test) in zip(models, (calls[:4], calls[4:]), strict=True):
        source, aligned = str(out / "source" / "checkpoint_best.pt"), out / model / "aligned"
        assert transfer["--criterion"] == "attention_transfer" and transfer["--transfer-from"] == source
        assert transfer["--save-dir"] == str(aligned) and transfer["--max-update"] == "160"
        for call in (start, training):
            assert call["--finetune-from-model"] == str(aligned / "checkpoint_last.pt")
            assert call["--criterion"] == "adaptive_loss" and call["--save-dir"] == str(out / model)
        # Validated when the others are: after 320, 480, 640 and 800.
        assert training["--max-update"] == "640" and training["--validate-interval-updates"] == "160"
        assert ("--scale-read-out" in transfer) is ("--scale-read-out" in training) is (model == models[1])
        assert test["--path"] == str(out / model / "checkpoint_best.pt")
    assert [calls[0][option] for option in MEMORY] == ["sum", "relu", "attention"]


def test_a_summary_has_a_row_for_each_model_by_update_of_which_an_aligned_one_had_some_before(tmp_path, run) -> None:
    updates = {"source": 400, "delta-16-converted": 40, "delta-16-scratch": 40, "add-4-scratch": 20}
    for name, number in (updates | {"linear-32-aligned": 20}).items():
        folder = write_training(tmp_path / name, number)
        if name != "add-4-scratch":
            (folder / "test.log").write_text(f"x | Loss (base 2): 5.0, Perplexity: {number / 10}\n")
    for name, ppl in (("delta-16-converted", "1e6"), ("linear-32-aligned", "90.0")):
        (tmp_path / name / "start.log").write_text(f'x | valid | {{"valid_num_updates": "1", "valid_ppl": "{ppl}"}}\n')
    (tmp_path / "linear-32-aligned" / "aligned.log").write_text('x | {"train_num_updates": "20"}\n')
    _, table, errors = run(SUMMARIZE, tmp_path)
    assert errors == f"summarize.py: {tmp_path / 'add-4-scratch' / 'test.log'} has no perplexity in it\n"
    head, _, *rows = cells(table)
    assert [head, *rows] == [
        "model | start | parameters | before | 20 | 40 | test",
        "source |  | 1,234,567 |  |  | 2.5 | 40.0",
        "add, m = 4 | scratch | 1,234,567 | – | 50.0 | – | –",
        "delta, m = 16 | converted | 1,234,567 | 1.0e+06 | 50.0 | 25.0 | 4.0",
        "delta, m = 16 | scratch | 1,234,567 | – | 50.0 | 25.0 | 4.0",
        "linear, m = 32 | aligned | 1,234,567 | – | 90.0 | 50.0 | 2.0",
    ]


def test_the_figure_is_drawn_from_the_table_of_a_page(tmp_path: Path, run) -> None:
    page, figure = EXAMPLES.parent / "docs" / "results.md", tmp_path / "f.png"
    assert run(SUMMARIZE, page, "--figure", figure)[0] == 0 and figure.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other.md").write_text("| model | test |\n| ---: | ---: |\n| delta | 1 |\n")
    status, _, errors = run(SUMMARIZE, tmp_path / "other.md", "--figure", figure)
    assert status == 1 and "holds no table of conversions" in errors
    assert run(SUMMARIZE, page)[0] == 2
