"""The scripts of examples/finetuning: a Transformer is trained, converted and fine-tuned, and the table says how."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT, run_script

FINETUNING = ROOT / "examples" / "finetuning"
WIKITEXT2, SUMMARIZE = FINETUNING / "wikitext2.sh", FINETUNING / "summarize.py"
RULES = ("decay", "gated", "delta", "add")

# fairseq and what it calls, attributed to the line that calls fairseq.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def summarize(*arguments: object) -> subprocess.CompletedProcess:
    return run_script(SUMMARIZE, *arguments)


@pytest.mark.slow
def test_it_runs_from_the_first_command_to_the_table(data: Path, tmp_path: Path, commands, fairseq) -> None:
    out, updates = tmp_path / "out", {"UPDATES": "10"}
    models = ["source", "decay-4-converted", "decay-4-scratch"]
    result = run_script(WIKITEXT2, data, out, *models, env=updates)
    assert result.returncode == 0, result.stderr
    again = run_script(WIKITEXT2, data, out, *models, env=updates)
    assert again.returncode == 0 and "training" not in again.stdout

    summary = summarize(out, "--markdown", tmp_path / "t.md", "--figure", tmp_path / "t.png")
    assert summary.returncode == 0 and not summary.stderr
    assert summary.stdout == (tmp_path / "t.md").read_text()
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    rows = {
        (cells[0].strip("| "), cells[1].strip()): [cell.strip(" |") for cell in cells[2:]]
        for cells in (line.split(" | ") for line in summary.stdout.splitlines()[2:])
    }
    assert set(rows) == {("source", ""), ("decay, m = 4", "converted"), ("decay, m = 4", "scratch")}
    converted, scratch = rows["decay, m = 4", "converted"], rows["decay, m = 4", "scratch"]
    assert all(math.isfinite(float(cell)) and float(cell) > 1 for cell in converted[1:])
    assert scratch[1] == "–" and float(scratch[2]) > 1
    # Ten updates of training are in the converted model's weights.
    assert float(converted[2]) < float(scratch[2])

    # The other rules and starts, in this process.
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "source").symlink_to(out / "source")
    for model, programs in (
        ("gated-16-scaled", ["fairseq-train", "fairseq-train", "fairseq-eval-lm"]),
        ("delta-4-converted", ["fairseq-train", "fairseq-train", "fairseq-eval-lm"]),
        ("add-16-scratch", ["fairseq-train", "fairseq-eval-lm"]),
    ):
        calls = commands(WIKITEXT2, data, tmp_path / "others", model, env=updates)
        assert [call[0] for call in calls] == programs
        for call in calls:
            fairseq(call)


def test_all_rules_and_both_starts_are_run_if_none_is_named(tmp_path: Path, commands) -> None:
    (tmp_path / "dict.txt").touch()
    calls = commands(WIKITEXT2, tmp_path, tmp_path / "out", env={"JOBS": "1"})
    folders = [call[call.index("--save-dir") + 1] for call in calls if call[0] == "fairseq-train"]
    models = [f"{rule}-{m}-{start}" for rule in RULES for m in (4, 16) for start in ("converted", "scratch")]
    models += [f"{rule}-{m}-scaled" for rule in ("decay", "gated") for m in (4, 16)]
    assert {Path(folder).name for folder in folders} == {"source", *models}
    updates = {
        Path(c[c.index("--save-dir") + 1]).name: c[c.index("--max-update") + 1] for c in calls if "--lr-scheduler" in c
    }
    assert updates == {"source": "8000", **dict.fromkeys(models, "800")}
    assert sum("--transfer-from" in call for call in calls) == 2 * 12  # the start, and the training
    scaled = {Path(call[call.index("--save-dir") + 1]).name for call in calls if "--scale-read-out" in call}
    assert scaled == set(models[-4:])


@pytest.mark.parametrize(
    ("models", "env", "message"),
    [
        (["decay-4"], {}, "MODEL is decay-4; it must be source or RULE-M-START, as in decay-16-converted"),
        (["sum-4-scratch"], {}, "MODEL is sum-4-scratch; it must be source or"),
        (["decay-0-scratch"], {}, "MODEL is decay-0-scratch; it must be source or"),
        (["source"], {"JOBS": "0"}, "JOBS is 0; it must be a positive number"),
        (["source"], {"UPDATES": "15"}, "UPDATES is 15; it must be a positive multiple of ten"),
        (["decay-4-converted"], {}, "source is not trained yet; decay-4-converted starts from it"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, models: list[str], env: dict[str, str], message: str) -> None:
    (tmp_path / "dict.txt").touch()
    result = run_script(WIKITEXT2, tmp_path, tmp_path / "out", *models, env=env)
    assert result.returncode != 0 and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_data_that_are_not_prepared_are_named(tmp_path: Path) -> None:
    result = run_script(WIKITEXT2, tmp_path, tmp_path / "out")
    assert result.returncode == 1 and f"DATA is {tmp_path}, which holds no dict.txt" in result.stderr


# --- the summary


def write_run(folder: Path, validations: dict[int, float], before: float | None = None, test: bool = True) -> None:
    folder.mkdir(parents=True)
    lines = ["fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)"]
    lines.append(f"train_inner | {json.dumps({'num_updates': '1', 'ppl': '9', 'wps': '10'})}")
    for update, ppl in validations.items():
        lines.append(f"valid | {json.dumps({'valid_num_updates': str(update), 'valid_ppl': str(ppl)})}")
    lines.append("fairseq_cli.train | done training in 1.0 seconds")
    (folder / "train.log").write_text("".join(f"2026-01-01 00:00:00 | INFO | {line}\n" for line in lines))
    if before is not None:
        report = json.dumps({"valid_num_updates": "1", "valid_ppl": str(before)})
        (folder / "start.log").write_text(f"2026-01-01 00:00:00 | INFO | valid | {report}\n")
    if test:
        (folder / "test.log").write_text("x | Loss (base 2): 5.0, Perplexity: 32.00\n")


def test_a_summary_has_a_row_for_each_model_by_update(tmp_path: Path) -> None:
    write_run(tmp_path / "source", {50: 12.0, 100: 10.0})
    write_run(tmp_path / "delta-16-converted", {5: 21.0, 10: 20.0}, before=1e6)
    write_run(tmp_path / "delta-16-scratch", {5: 41.0, 10: 40.0})
    write_run(tmp_path / "add-4-scratch", {5: 51.0}, test=False)
    result = summarize(tmp_path)
    assert result.stderr == f"summarize.py: {tmp_path / 'add-4-scratch' / 'test.log'} has no perplexity in it\n"
    rows = [" | ".join(word.strip() for word in line.strip("| ").split("|")) for line in result.stdout.splitlines()]
    assert rows[0] == "model | start | parameters | before | 5 | 10 | test"
    assert rows[2:] == [
        "source |  | 1,234 |  |  | 10.0 | 32.0",
        "add, m = 4 | scratch | 1,234 | – | 51.0 | – | –",
        "delta, m = 16 | converted | 1,234 | 1.0e+06 | 21.0 | 20.0 | 32.0",
        "delta, m = 16 | scratch | 1,234 | – | 41.0 | 40.0 | 32.0",
    ]


def test_a_summary_of_nothing_is_refused(tmp_path: Path) -> None:
    assert summarize(tmp_path).returncode == 1
    assert summarize(tmp_path / "never").stderr == f"summarize.py: there is no folder {tmp_path / 'never'}\n"
