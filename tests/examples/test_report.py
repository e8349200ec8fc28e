"""Pages, tables and figures of what the ledger has; estimates of rows, and the page of what was verified."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from papers import SCALED, TABLES, drawing, estimate, ledger, overview, report, rows
from papers.estimate import Estimate, Size, Speed, stated
from papers.grid import plan

from .conftest import ROOT
from .test_reproduce_rows import SCORED, SHARED


def test_a_run_is_of_its_text_and_of_what_it_starts_from(tmp_path: Path) -> None:
    """A former one of the same commands on other data is trained and scored again, as far as it read what changed."""
    data, source = tmp_path / "data", tmp_path / "source.pt"
    data.mkdir()
    (tmp_path / "dict.txt").touch()
    for path in (source, *map(data.joinpath, ("dict.txt", "train.bin", "valid.bin", "test.bin"))):
        path.write_text("before")

    def planned() -> tuple[object, str]:
        (run,) = plan("wikitext2", SCALED["wikitext2"], ["delta"], [1], rows.Places(data, tmp_path, source))
        return run, ledger.data_digest(data)

    for path, trained, scored in (
        *((tmp_path / "other.txt", False, False), (data / "test.bin", False, True)),
        *((data / name, True, True) for name in ("valid.bin", "train.bin", "dict.txt")),
        (source, True, True),
    ):
        run, digest = planned()
        kept = entry("delta", 1, table="wikitext2", commands=run.commands, data=digest, inputs=run.inputs)
        assert run.is_in(kept, digest) and run.is_in(replace(kept, inputs=""), digest)  # an old line does not say it
        path.write_text("after")
        now, digest = planned()
        changed = [step.key != before.key for step, before in zip(now.steps, run.steps, strict=True)]
        assert (now.is_in(kept, digest), *changed[:2]) == (not scored, trained, scored), path


def entry(row: str, seed: int, bleu: float = 0.0, **others: object) -> ledger.Entry:
    known = {"table": "multi30k", "commands": [], "commit": "c", "code": "", "data": "", "versions": {"torch": "2"}}
    known |= {"processor": "p", "seconds": 3600.0, "parameters": 10, "scores": {"test BLEU": bleu}}
    return ledger.Entry(row=row, seed=seed, **known | {"valid": [(1, 9.0), (2, 8.0)]} | others)


def test_a_claim_holds_if_its_whole_interval_does() -> None:
    for softmax, dpfp, least, verdict in (
        ([39.0, 39.1], [30.0, 30.1], 0, "yes"),
        ([30.0, 30.1], [39.0, 39.1], 0, "no"),
        ([39.0, 36.0], [37.0, 37.1], 0, "open: the interval holds both"),
        ([39.0], [30.0], 10, "open: one seed, and against it"),
        ([39.0], [], 0, "not run"),
    ):
        found = [
            entry(row, n, x) for row, scores in (("softmax", softmax), ("dpfp", dpfp)) for n, x in enumerate(scores)
        ]
        claim = rows.Claim("more", ("softmax", "test BLEU"), ("dpfp", "test BLEU"), at_least=least)
        assert report.verdict(claim, found)[1] == verdict


def test_a_table_has_means_of_the_seeds_and_the_papers_numbers() -> None:
    """Its runs have the same data; losses are compared with that of the baseline, in percent."""
    of_gpus = {"gpu": "H100", "gpus": 2, "precision": ledger.precision(["--fp16"]), "without_kernels": ["chunkwise"]}
    entries = [entry("softmax", 1, 39.0), entry("softmax", 2, 39.2), entry("linear", 1, 36.5, **of_gpus)]
    made = report.block("multi30k", SCALED["multi30k"], entries)
    softmax = r"\| softmax +\| +2 \| +10 \| 1.00 \| +8.00 ± 0.00 \| +39.10 ± 1.27 \| +26.6 \| +27.7 \|"
    assert re.search(softmax, re.sub(" +", " ", made)) and " 36.50 |" in made and "not run" in made
    assert " (without kernels) |" in made and "GPUs: 2 x H100. Precision: float16." in made
    assert "Trained (without kernels): chunkwise." in made
    for name in ("data", "inputs"):
        mixed = [entry("linear", 1, 36.5, **{name: of}) for of in "xy"]
        with pytest.raises(rows.RowError, match="multi30k: its runs are of different data, which no table may mix"):
            report.block("multi30k", SCALED["multi30k"], mixed)
    scores = [("source", 1, 8.0), ("sum-6", 1, 16.0), ("sum-6", 2, 16.0)]  # log(16) is by a third above log(8)
    losses = [entry(row, n, table="smollm2", scores={"test, context-0": x}) for row, n, x in scores]
    made = report.block("smollm2", SCALED["smollm2"], losses)
    assert " 0.00 |" in made and " 33.33 ± 0.00 |" in made


def test_what_was_run_with_other_commands_is_stale() -> None:
    """An entry of a row that starts from another one by its own commands."""
    for table, row, seed in (("multi30k", "dpfp", 1), ("conversion", "add-800", 2)):
        places = rows.Places(Path("D"), Path("O"))
        *_, run = plan(table, SCALED[table], [row], [seed], places, checked=False)
        now = entry(row, seed, table=table, commands=run.commands)
        assert not report.is_stale(now) and report.current([now]) == [now]
        for change in ({"commands": []}, {"row": "gone"}, {"table": "gone"}, {"seed": 3}):
            assert report.is_stale(replace(now, **change)), change


def test_the_pages_have_the_ledgers_blocks_and_no_others() -> None:
    entries = ledger.read_ledger(ledger.COMMITTED)
    assert report.current(entries) == entries
    for name in ("convert.md", "results.md"):
        text = (report.DOCS / name).read_text(encoding="utf-8")
        assert report.page(name, text, entries) == text and text.count(": made by examples/reproduce.py") > 0
    with pytest.raises(rows.RowError, match=r"has 1 blocks between <!-- multi30k.*; it must have 0"):
        report.page("results.md", text, [])


def test_a_table_has_figures_of_its_curves_its_claims_and_its_states(tmp_path: Path) -> None:
    scores = {"test, context-192": 41.0, "test, carried": 40.0, "state": 8192.0}
    states = [entry(row, 1, table="wikitext2", scores=scores) for row in ("delta", "gated")]
    for name, entries, drawn in (
        ("multi30k", [entry("softmax", n, valid=[(2, 8.0)]) for n in (1, 2)], ""),  # a point is no curve
        ("multi30k", [entry("softmax", 1), entry("softmax", 2, 39.2), entry("dpfp", 1, 38.0)], "claims curves"),
        # One with a model that others start from, and differences of which some are a hundred times the others.
        ("conversion", ledger.read_ledger(ledger.COMMITTED), "claims curves"),
        ("wikitext2", states, "curves states"),
    ):
        drawing.draw_table(name, SCALED[name], entries, tmp_path)
        assert {path.name for path in tmp_path.glob(f"{name}-*")} == {f"{name}-{x}.png" for x in drawn.split()}
    made = report.block("wikitext2", SCALED["wikitext2"], states, pictures=True)
    assert "](wikitext2-states.png)" in made and " 8,192 |" in made


def test_a_table_of_any_ledger_is_printed_unless_it_is_damaged(tmp_path: Path, reproduce) -> None:
    book = tmp_path / "ledger"
    ledger.append_entry(book, entry("softmax", 1, 39.0))
    status, said, warned = reproduce("report", "multi30k", "--ledger", book)
    assert status == 0 and said.startswith("| model ") and " 39.00 |" in said
    assert warned == "multi30k softmax, seed 1: its row has other commands by now; it is kept\n"
    book.write_text('{"table": "multi30k"}\n')
    status, _, err = reproduce("report", "--ledger", book)
    assert status == 1 and "ledger, line 1 is no entry of a ledger; remove the line" in err


GPU = {"gigabytes": 10, "terabytes per second": 2.0, "teraflops": {"bf16": 100, "fp32": 10}}
SIZE = Size(words=1000, updates=3600, most=4, batches=None, layers=2, products=10**6, parameters=10**8, kept=10**5)
SPEED = Speed(0.5, 0.25, 4.0, Size(1000, 1, 1, None, 4, 10**6, 1, 1))


def test_the_bounds_are_what_was_worked_out_by_hand() -> None:
    # 6e9 operations at 50 TFLOP/s, 0.2 GB moved three times; 0.5 s for twice the layers, 0.25 s at twice the speed.
    half = Estimate(6e9 / 50e12 + 0.6e9 / 2e12, 0.25 + 0.25 * 2, 2.0 + 0.2, 3.6, 1)
    single = Estimate(6e9 / 5e12 + 1.2e9 / 2e12, 0.25 + 0.25 * 2 * 2, 1.6 + 0.4, 3.6, 1)
    for precision, expected in (("bf16", half), ("fp32", single)):
        assert vars(estimate.estimate(SIZE, GPU, precision, [SPEED])) == pytest.approx(vars(expected))
    # 2 GB of parameters, 0.2 of numbers that a word keeps: in 2.16 GB half of a batch has room, in 1.8 none.
    for most, gigabytes, batches in ((4, 2.4, 2), (4, 2.0, 4), (1, 2.0, 1)):
        size = Size(**vars(SIZE) | {"most": most})
        found = estimate.estimate(size, GPU | {"gigabytes": gigabytes}, "bf16", [SPEED])
        assert (found.batches, found.most) == (batches, pytest.approx(0.25 * batches + 0.5))
    with pytest.raises(rows.RowError, match="--precision is fp16; this GPU has bf16, fp32"):
        estimate.estimate(SIZE, GPU, "fp16", [SPEED])


def test_a_command_shows_rows_beside_what_their_paper_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(stated(name, row) for name, table in TABLES.items() for row in table.rows)
    assert estimate.main(["mao-table3", "--rows", "decay-32", "base", "--gpu", "H200"], TABLES) == 0
    header, _, decay, base = capsys.readouterr().out.strip().splitlines()
    assert "hours on one H200, bf16" in header and base.startswith("| `mao-table3`: `base` ")
    assert decay.startswith("| `mao-table3`: `decay-32` ") and "35 hours on an A40" in decay
    assert estimate.main(["mao-table3", "--rows", "decay-99"], TABLES) == 1
    assert "ROW is decay-99; it must be one of base, decay-32" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_of_gpus_has_the_estimates_of_all_rows() -> None:
    rows = [(name, row) for name, table in TABLES.items() for row in table.rows]
    assert estimate.report(rows, "H100", "bf16", TABLES) in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_page_of_papers_is_what_its_generator_makes_and_true_of_tests() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert overview.page() == page, "run python tools/papers_page.py"
    assert all(f"`{name} {row}`" in page for name, table in TABLES.items() for row in table.rows)
    tested = {" ".join(name.split()[:2]): count for name, count in SCORED.items() if name.split()[0] in TABLES}
    tested |= {"mao-table2 gpt2": 0} | {f"schlag-table4 {row}": 1 for row in SHARED}
    told = re.findall(r"^.*`((?:schlag|mao|choi)-table\d [\w-]+)`(.*)$", page, flags=re.MULTILINE)
    assert {name for name, rest in told if "trained" in re.sub("trained as", "", rest)} == tested.keys()
    assert {name for name, rest in told if "scored" in rest} == {name for name, count in tested.items() if count}
    words = {word for section in overview.sections() for line in section.lines for word in line.verified.split(", ")}
    assert words == {*overview.WORDS, "as the row", ""}
