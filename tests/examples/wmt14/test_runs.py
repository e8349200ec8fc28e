"""examples/reproduce.py run and report: rows with seeds, the ledger, and what a page says of them."""

import re
import subprocess
from dataclasses import replace
from math import inf, sqrt
from pathlib import Path

import papers
import pytest
from papers import drawing, ledger, report, rows
from papers.grid import plan, trained_as

from tests.examples.conftest import TINY


@pytest.mark.slow
def test_rows_are_trained_scored_and_kept_once_and_give_the_same_numbers_again(data: Path, tmp_path, reproduce) -> None:
    small = ["--", *TINY["wmt14"].split(), *"--max-update 3 --validate-interval-updates 2 --log-interval 1".split()]

    def run(out: Path, *options: str, rest: list[str] = small) -> tuple[int, str, str]:
        return reproduce("run", "multi30k", data, out, "--rows", "dpfp", *options, *rest)

    out, book = tmp_path / "out", tmp_path / "out" / "ledger.jsonl"
    status, said, err = run(out, "--seeds", "1")
    assert status == 0, err
    assert "dpfp: about 0.0 hours for each of seeds 1\n" in said and "all: about 0.0 hours of training with" in said
    (first,) = ledger.read_ledger(book)
    assert (first.table, first.row, first.seed) == ("multi30k", "dpfp", 1)
    assert [update for update, _ in first.valid] == [2, 3] and set(first.scores) == {"valid BLEU", "test BLEU"}
    assert first.parameters > 0 and first.code and "torch" in first.versions
    assert first.words_per_second > 0 and first.memory_gib > 0.1 and (first.gpus, first.precision) == (0, "float32")
    assert len(first.backends) == 1 and " on the CPU" in first.backends[0]
    assert bool(first.without_kernels) == (not first.backends[0].startswith("native"))
    train, generate = first.commands
    assert train.startswith("fairseq-train DATA --save-dir OUT ") and generate.endswith("generate.sh DATA OUT --cpu")

    before = book.read_bytes()
    status, said, _ = run(out, "--seeds", "1")
    assert status == 0 and said.startswith("1 of 1 runs are in ") and book.read_bytes() == before
    book.unlink()  # as if the run had been ended before it wrote down what it did
    assert run(out, "--seeds", "1")[0] == 0
    assert ledger.read_ledger(book) == [first]
    status, said, _ = run(tmp_path / "other", "--seeds", "1", "--ledger", str(tmp_path / "other.jsonl"))
    (again,) = ledger.read_ledger(tmp_path / "other.jsonl")
    assert replace(again, seconds=first.seconds) == first
    status, _, err = run(out, "--seeds", "1", rest=[*small, "--lr", "0.1"])
    assert status == 1 and "dpfp-1 was begun with another command or data; name another OUT, or delete it" in err


def test_what_a_row_starts_from_is_trained_before_it(tmp_path: Path) -> None:
    table, out = papers.SCALED["conversion"], tmp_path / "out"
    source, *others = plan("conversion", table, ["add-800", "gated-800"], [2, 3], rows.Places(tmp_path, out), (), False)
    assert [(run.name, run.seed) for run in (source, *others)] == [
        *(("source", 1), ("add-800", 2), ("gated-800", 2), ("add-800", 3), ("gated-800", 3))
    ]
    assert not source.steps[0].after
    for run in others:
        assert run.steps[0].after == source.steps[:1] and run.steps[1].after == run.steps[:1]
        assert str(out / "source-1" / "checkpoint_best.pt") in run.training.words
        assert "--transfer-from SOURCE " in run.commands[0]
    (tmp_path / "dict.txt").write_text("a 1\n")
    (out / "source-1").mkdir(parents=True)
    source.row.recipe.finish(source.places)
    assert (out / "source-1" / "dict.txt").read_text() == "a 1\n"
    chain = plan("conversion", table, ["linear-aligned"], [2], rows.Places(tmp_path, out), (), False)
    assert [(run.name, run.seed) for run in chain] == [("source", 1), ("linear-transfer", 1), ("linear-aligned", 2)]
    assert [run.steps[0].after for run in chain] == [(), chain[0].steps[:1], chain[1].steps[:1]]
    assert str(out / "linear-transfer-1" / "checkpoint_best.pt") in chain[2].training.words
    given = plan("conversion", table, ["add-800"], [1], rows.Places(tmp_path, out), ["--lr", "1"], False)
    assert given[1].training.words[-4:] == ["--lr", "1", "--seed", "1"]


def test_a_run_is_of_its_text_and_of_what_it_starts_from(tmp_path: Path) -> None:
    """A former one of the same commands on other data is trained and scored again, as far as it read what changed."""
    data, source = tmp_path / "data", tmp_path / "source.pt"
    data.mkdir()
    (tmp_path / "dict.txt").touch()
    for path in (source, *map(data.joinpath, ("dict.txt", "train.bin", "valid.bin", "test.bin"))):
        path.write_text("before")

    def planned() -> tuple[object, str]:
        (run,) = plan("wikitext2", papers.SCALED["wikitext2"], ["delta"], [1], rows.Places(data, tmp_path, source))
        return run, ledger.data_digest(data)

    run, digest = planned()
    kept = replace(entry("delta", 1, 1.0), table="wikitext2", commands=run.commands, data=digest, inputs=run.inputs)
    for path, trained, scored in (
        *((tmp_path / "other.txt", False, False), (data / "test.bin", False, True)),
        *((data / name, True, True) for name in ("valid.bin", "train.bin", "dict.txt")),
        (source, True, True),
    ):
        run, digest = planned()
        kept = replace(kept, data=digest, inputs=run.inputs)
        assert run.is_in(kept, digest) and run.is_in(replace(kept, inputs=""), digest)  # an old line does not say it
        path.write_text("after")
        now, digest = planned()
        assert now.is_in(kept, digest) is not scored, path
        for number, changed in enumerate((trained, scored)):
            assert (now.steps[number].key != run.steps[number].key) is changed, path


def test_a_table_does_not_mix_runs_of_different_data() -> None:
    one, other = entry("softmax", 1, 39.0), entry("softmax", 2, 39.2)
    for change in ({"data": "x"}, {"inputs": "x"}):
        with pytest.raises(rows.RowError, match="multi30k: its runs are of different data, which no table may mix"):
            report.block("multi30k", papers.SCALED["multi30k"], [replace(one, inputs="y"), replace(other, **change)])


def test_one_training_serves_all_rows_that_have_the_same(tmp_path: Path) -> None:
    """Runs of one table, and of two in the same folder."""
    places = rows.Places(tmp_path, tmp_path / "out")
    names = [f"transformer-xl-{memory}" for memory in (64, 384)]
    shared = plan("schlag-table4", papers.TABLES["schlag-table4"], [*names, "delta-network"], [1, 2], places, (), False)
    first, second, other, *of_seed_2 = shared
    assert first.steps[0] is second.steps[0] is not other.steps[0] and of_seed_2[0].steps[0] is of_seed_2[1].steps[0]
    assert first.places.out == second.places.out == tmp_path / "out" / "transformer-xl-15-1" != of_seed_2[0].places.out
    assert len({step.folder for run in (first, second) for step in run.steps}) == 1 + 2 * 2
    assert first.key != second.key
    of_two = [
        plan(table, papers.TABLES[table], [row], [1], places, (), False)[0]
        for table, row in (
            ("schlag-table2", "medium-delta-network"),
            ("schlag-table3", "positions-yes-normalization-no"),
        )
    ]
    assert len({run.steps[0].key for run in of_two}) == len({run.places.out for run in of_two}) == 1
    same = {
        (table, row): trained_as(table, row)
        for table, found in (papers.TABLES | papers.SCALED).items()
        for row in found.rows
        if trained_as(table, row) != row
    }
    assert len(same) == 4  # three of the Transformer-XL's, and one of Table 3
    # A row that starts from another may be trained by the command of one from another model.
    assert trained_as("conversion", "linear") == "linear" and trained_as("elsewhere", "row") == "row"


def entry(row: str, seed: int, bleu: float) -> object:
    return ledger.Entry(
        **{"table": "multi30k", "row": row, "seed": seed, "commands": [], "commit": "c", "code": "", "data": ""},
        **{"versions": {"torch": "2"}, "processor": "p", "seconds": 3600.0, "parameters": 10},
        scores={"test BLEU": bleu},
        valid=[(1, 9.0), (2, 8.0)],
    )


def test_an_interval_is_students_of_the_seeds() -> None:
    found = report.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (2.0, pytest.approx(4.303 / sqrt(3))) and str(found) == "2.00 ± 2.48"
    assert report.interval([1.5]) == report.Interval(1.5, inf) and str(report.interval([1.5])) == "1.50"
    assert (found - report.Interval(1.0, 1.0)).half == pytest.approx(sqrt(1 + 4.303**2 / 3))


@pytest.mark.parametrize(
    ("softmax", "dpfp", "least", "verdict"),
    [
        ([39.0, 39.1], [30.0, 30.1], 0, "yes"),
        ([30.0, 30.1], [39.0, 39.1], 0, "no"),
        ([39.0, 36.0], [37.0, 37.1], 0, "open: the interval holds both"),
        ([39.0], [30.0], 0, "open: one seed"),
        ([39.0], [30.0], 10, "open: one seed, and against it"),
        ([39.0], [], 0, "not run"),
    ],
)
def test_a_claim_holds_if_its_whole_interval_does(softmax: list, dpfp: list, least: float, verdict: str) -> None:
    found = [entry(name, n, x) for name, values in (("softmax", softmax), ("dpfp", dpfp)) for n, x in enumerate(values)]
    claim = rows.Claim("more", ("softmax", "test BLEU"), ("dpfp", "test BLEU"), at_least=least)
    assert report.verdict(claim, found)[1] == verdict


def test_a_table_has_means_of_the_seeds_and_the_papers_numbers() -> None:
    entries = [entry("softmax", 1, 39.0), entry("softmax", 2, 39.2), entry("linear", 1, 36.5)]
    made = report.block("multi30k", papers.SCALED["multi30k"], entries)
    first, linear = (
        next(line for line in made.splitlines() if line.startswith(f"| {name} "))
        for name in ("softmax", "linear (ELU + 1)")
    )
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        *("softmax", "2", "10", "1.00", "8.00 ± 0.00", "39.10 ± 1.27", "26.6", "27.7")
    ]
    assert " 36.50 |" in linear and "not run" in made and "Processors: p." in made
    made = report.block("multi30k", papers.SCALED["multi30k"], [replace(entry("linear", 1, 36.5), valid=[])])
    assert re.search(r"linear \(ELU \+ 1\) +\| +1 \| +10 \| +1.00 \| +\| +36.50 \|", made)  # it transferred attention


def test_losses_are_compared_with_that_of_the_tables_baseline() -> None:
    """In percent of its loss: one of log(16) is by a third above one of log(8)."""
    table, score = papers.SCALED["smollm2"], "test, context-0"

    def above(**perplexities: list[float]) -> list[str]:
        runs = [(name.replace("_", "-"), n, x) for name, values in perplexities.items() for n, x in enumerate(values)]
        made = [replace(entry(name, n, 0.0), table="smollm2", scores={score: x}) for name, n, x in runs]
        lines = report.block("smollm2", table, made).splitlines()
        return [line.split("|")[-2].strip() for line in lines if "| 10 |" in line.replace("  ", "")]

    assert above(source=[8.0], sum_6=[16.0]) == ["0.00", "33.33"]
    assert above(source=[8.0], sum_6=[16.0, 16.0]) == ["0.00", "33.33 ± 0.00"]
    assert above(sum_6=[16.0]) == [""]


def test_what_was_run_with_other_commands_is_stale() -> None:
    """An entry of a row that starts from another one by its own commands."""
    for table, row, seed in (("multi30k", "dpfp", 1), ("conversion", "add-800", 2)):
        places = rows.Places(Path("D"), Path("O"))
        *_, run = plan(table, papers.SCALED[table], [row], [seed], places, checked=False)
        now = replace(entry(row, seed, 36.0), table=table, commands=run.commands)
        assert not report.is_stale(now) and report.current([now]) == [now]
        for change in ({"commands": []}, {"row": "gone"}, {"table": "gone"}, {"seed": 3}):
            assert report.is_stale(replace(now, **change)), change


def test_a_run_of_changed_files_says_so_unless_it_changed_them_itself(tmp_path: Path, monkeypatch) -> None:
    book = tmp_path / ledger.COMMITTED.relative_to(rows.ROOT)
    book.parent.mkdir(parents=True)
    for path in (book, tmp_path / "code"):
        path.touch()
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm one"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    book.write_text("a run\n")
    clean = ledger.circumstances(tmp_path)["commit"]
    (tmp_path / "code").write_text("changed\n")
    assert len(clean) == 12 and ledger.circumstances(tmp_path)["commit"] == f"{clean}-dirty"


def test_the_pages_say_what_the_ledger_does_and_have_blocks_of_nothing_else() -> None:
    entries = ledger.read_ledger(ledger.COMMITTED)
    assert report.current(entries) == entries
    for name in ("convert.md", "results.md"):
        text = (report.DOCS / name).read_text(encoding="utf-8")
        assert report.page(name, text, entries) == text and text.count(": made by examples/reproduce.py") > 0
    with pytest.raises(rows.RowError, match=r"has 1 blocks between <!-- multi30k.*; it must have 0"):
        report.page("results.md", text, [])


def test_a_table_has_a_figure_of_its_curves_and_one_of_its_claims(tmp_path: Path) -> None:
    table = papers.SCALED["multi30k"]
    entries = [entry("softmax", 1, 39.0), entry("softmax", 2, 39.2)]
    drawing.draw_table("multi30k", table, entries, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["multi30k-curves.png"]
    drawing.draw_table("multi30k", table, [replace(one, valid=one.valid[-1:]) for one in entries], tmp_path / "end")
    assert not (tmp_path / "end").exists()  # a point is no curve
    drawing.draw_table("multi30k", table, [*entries, entry("dpfp", 1, 38.0)], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["multi30k-claims.png", "multi30k-curves.png"]
    # One with a model that others start from, and differences of which some are a hundred times the others.
    drawing.draw_table("conversion", papers.SCALED["conversion"], ledger.read_ledger(ledger.COMMITTED), tmp_path)
    assert len(list(tmp_path.glob("conversion-*.png"))) == 2
    page = report.block("multi30k", table, entries, pictures=True)
    assert "](multi30k-curves.png)" in page and "claims.png" not in page


def test_a_table_of_models_whose_states_were_counted_has_a_figure_of_them(tmp_path: Path, monkeypatch) -> None:
    table = papers.SCALED["wikitext2"]
    scores = {"test, context-192": 41.0, "test, carried": 40.0, "state": 8192.0}
    entries = [replace(entry("delta", seed, 1.0), table="wikitext2", scores=scores) for seed in (1, 2)]
    entries += [replace(entry("gated", 1, 1.0), table="wikitext2", scores=scores | {"state": 9000.0})]
    drawing.draw_table("wikitext2", table, entries, tmp_path)
    assert (tmp_path / "wikitext2-states.png").read_bytes().startswith(b"\x89PNG")
    with monkeypatch.context() as patch:
        patch.setattr(drawing, "draw_points", lambda axes, points: drawn.update(points))
        drawn: dict[str, tuple[float, ...]] = {}
        variant = replace(entry("delta-no-positions", 1, 1.0), table="wikitext2", scores=scores)
        drawing.draw_table("wikitext2", table, [*entries, variant], tmp_path / "variant")
        assert drawn == {"delta": (8192.0, 40.0, 40.0, 40.0), "gated": (9000.0, 40.0)}
    made = report.block("wikitext2", table, entries, pictures=True)
    assert "](wikitext2-states.png)" in made
    assert re.search(r"\| delta +\| +2 \|.* 41.00 ± 0.00 \| +40.00 ± 0.00 \| +8,192 \|", made)
    broken = replace(entries[0], scores=scores | {"test, carried": 716160.8})
    assert " 41.00 ± 0.00 |  40 – 716,161 | " in report.block("wikitext2", table, [broken, *entries[1:]])


def test_a_table_of_any_ledger_is_printed_unless_it_is_damaged(tmp_path: Path, reproduce) -> None:
    book = tmp_path / "ledger"
    ledger.append_entry(book, entry("softmax", 1, 39.0))
    status, said, warned = reproduce("report", "multi30k", "--ledger", book, "--figures", tmp_path / "drawn")
    assert [path.name for path in (tmp_path / "drawn").iterdir()] == ["multi30k-curves.png"]
    assert status == 0 and said.startswith("| model ") and " 39.00 |" in said
    assert warned == "multi30k softmax, seed 1: its row has other commands by now; it is kept\n"
    with pytest.raises(SystemExit):
        reproduce("report", "--figures", tmp_path)
    book.write_text('{"table": "multi30k"}\n')
    status, _, err = reproduce("report", "--ledger", book)
    assert status == 1 and "ledger, line 1 is no entry of a ledger; remove the line" in err
