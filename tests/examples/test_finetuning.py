"""The scripts of examples/finetuning: a Transformer is trained, converted and fine-tuned, and the table says how."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT, options, run_script, write_training

WIKITEXT2, SUMMARIZE = (ROOT / "examples" / "finetuning" / name for name in ("wikitext2.sh", "summarize.py"))


def summarize(*arguments: object) -> tuple[subprocess.CompletedProcess, list[str]]:
    """The result, and the rows of its table."""
    result = run_script(SUMMARIZE, *arguments)
    lines = [line.strip("| ").split("|") for line in result.stdout.splitlines()]
    return result, [" | ".join(word.strip() for word in words) for words in lines]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq and what it calls
def test_it_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path, commands, fairseq, caplog) -> None:
    out, env = tmp_path / "out", {"UPDATES": "10", "JOBS": "1"}
    models = "source decay-4-converted decay-4-scratch gated-16-scaled delta-4-converted add-16-scratch".split()
    calls = commands(WIKITEXT2, data, out, *models, env=env)
    assert len(calls) == 6 * 2 + 3  # the three that are made from the source are validated before training, too
    assert commands(WIKITEXT2, data, out, *models, env=env) == []
    for call in calls:
        caplog.clear()
        fairseq(call)
        given = options(call)
        folder = Path(given.get("--save-dir") or Path(given["--path"]).parent)
        log = "test.log" if "--path" in given else "start.log" if "--no-save" in given else "train.log"
        if folder.name != "add-16-scratch":  # which has come to no perplexity that could be written down
            lines = [f"x | {record.name} | {record.getMessage()}\n" for record in caplog.records]
            (folder / log).write_text("".join(lines))

    summary, rows = summarize(out, "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert summary.returncode == 0
    assert summary.stderr == f"summarize.py: {out / 'add-16-scratch' / 'train.log'}: it has no validation in it\n"
    assert summary.stdout == (tmp_path / "t.md").read_text()
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    cells = {tuple(row.split(" | ")[:2]): row.split(" | ")[3:] for row in rows[2:]}
    assert len(cells) == len(models) - 1
    converted, scratch = cells["decay, m = 4", "converted"], cells["decay, m = 4", "scratch"]
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
    assert sum("--transfer-from" in call for call in calls) == 2 * 12  # the start, and the training
    assert {Path(call["--save-dir"]).name for call in calls if "--scale-read-out" in call} == set(models[-4:])


@pytest.mark.parametrize(
    ("models", "env", "message"),
    [
        (["decay-4"], {}, "MODEL is decay-4; it must be source or RULE-M-START, as in decay-16-converted"),
        (["sum-4-scratch"], {}, "MODEL is sum-4-scratch; it must be source or"),
        (["decay-0-scratch"], {}, "MODEL is decay-0-scratch; it must be source or"),
        (["source"], {"JOBS": "0"}, "JOBS is 0; it must be a positive number"),
        (["source"], {"UPDATES": "15"}, "UPDATES is 15; it must be a positive multiple of ten"),
        (["decay-4-converted"], {}, "source is not trained yet; decay-4-converted starts from it"),
        ([], {}, "which holds no dict.txt"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, models: list[str], env: dict[str, str], message: str) -> None:
    if "dict.txt" not in message:
        (tmp_path / "dict.txt").touch()
    result = run_script(WIKITEXT2, tmp_path, tmp_path / "out", *models, env=env)
    assert result.returncode != 0 and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_summary_has_a_row_for_each_model_by_update(tmp_path: Path) -> None:
    updates = {"source": 400, "delta-16-converted": 40, "delta-16-scratch": 40, "add-4-scratch": 20}
    for name, number in updates.items():
        folder = write_training(tmp_path / name, number)
        if name != "add-4-scratch":
            (folder / "test.log").write_text(f"x | Loss (base 2): 5.0, Perplexity: {number / 10}\n")
    start = 'x | valid | {"valid_num_updates": "1", "valid_ppl": "1e6"}\n'
    (tmp_path / "delta-16-converted" / "start.log").write_text(start)
    result, rows = summarize(tmp_path)
    assert result.stderr == f"summarize.py: {tmp_path / 'add-4-scratch' / 'test.log'} has no perplexity in it\n"
    assert [rows[0], *rows[2:]] == [
        "model | start | parameters | before | 20 | 40 | test",
        "source |  | 1,234,567 |  |  | 2.5 | 40.0",
        "add, m = 4 | scratch | 1,234,567 | – | 50.0 | – | –",
        "delta, m = 16 | converted | 1,234,567 | 1.0e+06 | 50.0 | 25.0 | 4.0",
        "delta, m = 16 | scratch | 1,234,567 | – | 50.0 | 25.0 | 4.0",
    ]
