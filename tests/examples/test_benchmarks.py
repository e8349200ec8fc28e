"""examples/xatl: what benchmarks.sh runs and when, and the tables and the figure of its results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import EXAMPLES, Programs, options

SCRIPT, SUMMARY = EXAMPLES / "xatl" / "benchmarks.sh", EXAMPLES / "xatl" / "summarize.py"
TASKS = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
ACCURACIES = dict(zip(TASKS, (0.5, 0.25, 0.5, 0.5, 0.25, 0.4), strict=True))


def result(updates: int | None, shift: float = 0.0, **config: Any) -> str:
    """The output of lm_eval; of two accuracies the one that a table does not show is 0.9."""
    scores: dict[str, dict[str, float]] = {}
    for task, accuracy in ACCURACIES.items():
        normalised = task in ("hellaswag", "arc_challenge")
        shown, other = ("acc_norm,none", "acc,none") if normalised else ("acc,none", "acc_norm,none")
        scores[task] = {shown: accuracy + shift, other: 0.9}
    scores["lambada_openai"]["perplexity,none"] = 12.5
    return json.dumps({"results": scores, "config": {"updates": updates, "limit": None, **config}})


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """In Python's place a program that leaves a result where lm_eval would, or nothing, with FAILS's status."""
    body = '[ -z "${FAILS:-}" ] || exit "$FAILS"\n'
    body += 'while [ $# -gt 1 ]; do [ "$1" != --output_path ] || echo {} > "${2%.json}_2026.json"; shift; done'
    return Programs(tmp_path / "programs", {"python": body})


def test_each_checkpoint_is_scored_once_for_its_data_and_options(programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("checkpoint_best.pt", "checkpoint_1_50.pt"):
        (run / name).touch()

    def calls(*words: str, **env: object) -> list[list[str]]:
        done, made = programs.run(SCRIPT, run, *words, env=env)
        assert done.returncode == 0 and not list(run.glob("*unfinished")), done.stderr
        return made

    first, second = calls("--limit", "3", DATA=tmp_path)
    assert [Path(first[1]).name, *first[3:]] == ["benchmark_data.py", str(tmp_path)]
    assert second[1:3] == ["-m", "fairseq_fastweights.lm_eval"] and second[-2:] == ["--limit", "3"]
    told = options(second)
    assert told["--model"] == "fairseq-fastweights" and told["--include_path"] == first[2]
    assert told["--model_args"] == f"checkpoint={run}/checkpoint_best.pt,add_bos_token=False"
    assert second[second.index("--tasks") + 1 :][:6] == list(ACCURACIES)
    assert calls("--limit", "3", DATA=tmp_path) == [] and len(calls(CHECKPOINT="checkpoint_1_50.pt")) == 2
    assert {file.name for file in run.glob("*.json")} == {"benchmarks.json", "benchmarks.checkpoint_1_50.json"}
    assert len(calls(DATA=tmp_path)) == 2
    for changed in (run / "checkpoint_best.pt", tmp_path / "piqa.jsonl"):
        changed.write_text("other\n")
        assert len(calls(DATA=tmp_path)) == 2 and calls(DATA=tmp_path) == []
    for file in run.glob("benchmarks*"):
        file.unlink()
    for status in (1, 0):  # lm_eval fails; or it says that all is well, and writes nothing
        assert programs.run(SCRIPT, run, env={"FAILS": status})[0].returncode == 1
        assert not list(run.glob("benchmarks*"))


def test_tables_have_the_papers_numbers_and_below_them_the_measured(tmp_path: Path, run) -> None:
    for name, files in {
        "400m-ffn-retnet": {"": result(75_000), ".checkpoint_1_5000": result(5000, 0.1)},
        "wo-lit": {".checkpoint_1_5000": result(5000), ".checkpoint_1_900": result(900, 0.1)},
        "mine": {"": result(None, limit=10.0), ".x": "{"},
    }.items():
        (tmp_path / name).mkdir()
        for checkpoint, text in files.items():
            (tmp_path / name / f"benchmarks{checkpoint}.json").write_text(text)
    markdown, figure = tmp_path / "table.md", tmp_path / "curves.png"
    status, out, err = run(SUMMARY, tmp_path, "--markdown", markdown, "--figure", figure)
    assert status == 0 and figure.read_bytes().startswith(b"\x89PNG") and markdown.read_text() == out
    rows = re.sub(" +", " ", out)
    name, paper = "`400m-ffn-retnet`, 400M, RetNet, E_io + FFN", "48.81 | 39.92 | 66.38 | 50.55 | 24.74 | 52.80 | 47.20"
    measured = "50.00 | 25.00 | 50.00 | 50.00 | 25.00 | 40.00 | 40.00 |\n"
    # In Table 2 and, as what is never frozen, in Table 3.
    assert rows.count(f"| {name} | the paper | | {paper} |\n| | here | 75,000 | {measured}") == 2
    assert f"| | here | 5,000 | {measured}" in rows and f"| mine | here | – | 12.50 | {measured}" in rows
    assert "benchmarks.x.json is damaged" in err and "of a part of the data, --limit 10" in err
