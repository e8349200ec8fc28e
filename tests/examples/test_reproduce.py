"""examples/reproduce.py: command lines, errors, kept scores; pages, tables and estimates of rows."""

import hashlib
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common.files import UserError
from papers import SCALED, TABLES, drawing, estimate, ledger, report, rows
from papers.choi import TABLE_4
from papers.estimate import Estimate, Size, Speed
from papers.grid import plan, trained_as

from .conftest import ROOT, options, refused, shell_words, write_programs
from .test_reproduce_rows import SCORED, SHARED

ALL = TABLES | SCALED
FILES = """CONVERTED/model.pt CONVERTED/dict.txt TRAINED/checkpoint_best.pt TRAINED/checkpoint_last.pt TRAINED/dict.txt
    UNFINISHED/checkpoint_best.pt DATA/dict.txt OTHER/dict.txt""".split()


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    for path in (tmp_path / name for name in FILES):
        path.parent.mkdir(exist_ok=True)
        path.write_text("of another model 1\n" if path.parent.name == "OTHER" else "")
    return {path.name: path for path in [*tmp_path.iterdir(), tmp_path / "OUT"]}


def printed(reproduce, *words: object, **env: str) -> list[list[str]]:
    """The commands of a call, the programs without their folders."""
    commands = [shlex.split(line) for line in reproduce("--print", *words, **env)[0].splitlines()]
    return [[Path(first).name, *others] for first, *others in commands]


CALLS = (Path(__file__).parent / "commands.txt").read_text().removeprefix("$ ").split("\n$ ")


@pytest.mark.parametrize("block", CALLS, ids=lambda block: block.split("\n")[0])
def test_a_row_is_these_command_lines(block: str, reproduce) -> None:
    """Written by hand. S, a SOURCE that is a checkpoint, is a file that is there."""
    (env, call), *lines = [shell_words(re.sub(r"\bS\b", "README.md", line)) for line in block.strip().split("\n")]
    assert printed(reproduce, *call, **env) == [words for _, words in lines]


DIGESTS = {
    "schlag-table1": "eed3551a1a76ea12",
    "schlag-table2": "5de89eb6bde98587",
    "schlag-table3": "7c5cfb0cd754b7f4",
    "schlag-table4": "bbd09e5099e79922",
    "schlag-table5": "774db28bc235b83a",
    "mao-table1": "27c712d680b923bc",
    "mao-table2": "a8e017b0362faf28",
    "mao-table3": "66e42eaad50be692",
    "choi-table2": "74b46333f7b961e4",
    "choi-table3": "97006eef79bc9f60",
    "multi30k": "03edfb8e843bef01",
    "wikitext2": "24105f982252d853",
    "carried": "590db619aa444298",
    "conversion": "5179c6bc7ff4158e",
    "smollm2": "f8ff92b24e59fa57",
}
"""Of the commands that train and score the rows of a table, as they were compared, option by option, with the paper."""


@pytest.mark.parametrize("table", ALL)
def test_all_commands_of_a_table_are_those_compared_with_the_paper(table: str, reproduce) -> None:
    """If they change on purpose, the page of the paper's rows is to be read again before its digest is."""
    found = []
    for name, row in ALL[table].rows.items():
        source = ["S"] * row.recipe.sources
        (train,) = printed(reproduce, table, name, "train", *source, "D", "O")
        found += [train, *printed(reproduce, table, name, "evaluate", "D", "O")]
        if table in TABLES:  # no option overrides another
            assert len(options(train)) == sum(word.startswith("--") for word in train), name
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == DIGESTS.get(table)


@refused("""
--list mao -> TABLE is mao; it must be one of schlag-table1, schlag-table2,
schlag-table2 small-delta-network learn DATA OUT -> after ROW comes learn; it must be train or evaluate
mao-table1 add-baseline train DATA OUT -> mao-table1 add-baseline train takes SOURCE DATA OUT
schlag-table2 small-delta-network train nowhere OUT -> DATA is nowhere, which holds no dict.txt; prepare.sh makes it
schlag-table1 linear train DATA OUT -> which holds no preparation.json
schlag-table2 small-delta-network evaluate DATA OUT -> OUT, which holds no checkpoint_best.pt
CHECKPOINT=a/x.pt schlag-table2 small-delta-network evaluate DATA TRAINED -> it must be the name of a file in OUT
MODE=folded schlag-table2 small-delta-network evaluate DATA TRAINED -> MODE is folded; it must be sliding, carried, con
MODE=context-512 mao-table3 decay-32 evaluate DATA TRAINED -> N a number below the length, 512
GPUS=5 schlag-table2 small-delta-network train DATA OUT -> GPUS x UPDATE_FREQ is 5; it must divide the batch of 96
UPDATE_FREQ=two schlag-table4 delta-network train DATA OUT -> UPDATE_FREQ is two; it must be a positive number
UPDATE_FREQ=2 schlag-table4 delta-network train DATA OUT -> with state carried over it must be 1
UPDATE_FREQ=5 schlag-table1 linear train DATA OUT -> must divide the batch of 172032 tokens
PRECISION=half mao-table1 add-baseline train TRAINED DATA OUT -> it must be fp16, bf16 or fp32
mao-table1 add-baseline train DATA DATA OUT -> it must be a folder with model.pt or checkpoint_best.pt
mao-table1 add-baseline train UNFINISHED DATA OUT -> its training is not finished
mao-table3 decay-32 train UNFINISHED DATA OUT -> there is no dict.txt beside
choi-table2 400m-scratch-mha train CONVERTED OTHER OUT -> whose dict.txt is not that of SOURCE
""")
def test_wrong_use_is_refused_and_leaves_nothing_behind(env: dict, words: list, message: str, places: dict, reproduce):
    out, err = reproduce(*(places.get(word, word) for word in words), fails=True, **env)
    assert message in err and not out
    assert not places["OUT"].exists() and len(list(places["TRAINED"].iterdir())) == 3


def test_a_score_is_of_its_model_its_data_its_options_and_its_kernels(places, monkeypatch, reproduce, tmp_path) -> None:
    data, out, calls = places["DATA"], places["TRAINED"], tmp_path / "calls"
    for name in ("valid.bin", "valid.idx", "test.bin"):
        (data / name).write_text(name)
    body = f'echo "$@" >> {calls}; n=$(wc -l < {calls}); echo "x | Loss (base 2): 5.0, Perplexity: $n.00"; [ $n != 1 ]'
    write_programs(tmp_path, {"eval": body})
    monkeypatch.setattr("papers.language_models.program", lambda name: str(tmp_path / "eval"))

    def score(*given: str, **how: Any) -> int:
        """The number of the call that the score is of."""
        words = ("schlag-table2", "small-delta-network", "evaluate", data, out, *given)
        said, err = reproduce(*words, SPLITS="valid", MODE="context-0", **how)
        assert ("context-0 failed: exit status 1" in err) == how.get("fails", False)
        return int(re.findall(r"(?<=: valid, context-0: )\d+(?=\.00)|$", said)[0] or 0)

    assert not score(fails=True) and score() == score() == 2 and score("--fp16") == score("--fp16") == 3
    assert score(FASTWEIGHTS_CPU_ISA="scalar") == 4
    (data / "test.bin").write_text("another test set")
    assert score() == score() == 5
    for number, name in enumerate(("valid.bin", "valid.idx", "dict.txt", "words.json"), 6):
        (data / name).write_text('{"valid": {"subwords": 1, "words": 1}}')
        assert score() == number
    (out / "checkpoint_best.pt").write_text("other weights")
    assert score() == 10 and score(CHECKPOINT="checkpoint_last.pt") == 11 and score() == 10
    assert calls.read_text().splitlines()[-1].split()[2] == f"{out}/checkpoint_last.pt"


def test_a_run_is_of_its_text_and_of_its_source(tmp_path: Path) -> None:
    """A former one of the same commands on other data is trained and scored again, as far as it read a changed file."""
    data, source = tmp_path / "data", tmp_path / "source.pt"
    data.mkdir()
    (tmp_path / "dict.txt").touch()
    for path in (source, *map(data.joinpath, ("dict.txt", "train.bin", "valid.bin", "test.bin"))):
        path.write_text("before")

    def planned() -> tuple[object, str]:
        (run,) = plan("wikitext2", SCALED["wikitext2"], ["delta"], [1], rows.Places(data, tmp_path, source))
        return run, ledger.data_digest(data)

    read = [data / name for name in ("valid.bin", "train.bin", "dict.txt")]
    for path in (tmp_path / "other.txt", data / "test.bin", *read, source):
        run, digest = planned()
        kept = entry("delta", 1, table="wikitext2", commands=run.commands, data=digest, inputs=run.inputs)
        assert run.is_in([kept], digest) and run.is_in(
            [replace(kept, inputs="")], digest
        )  # an old line does not say it
        path.write_text("after")
        now, digest = planned()
        trained, scored = (now.steps[i].key != run.steps[i].key for i in range(2))
        assert trained == (path in [*read, source]) and scored == (path.parent == data or path == source), path
        assert now.is_in([kept], digest) != scored


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
        found = [*(entry("softmax", 1, x) for x in softmax), *(entry("dpfp", 1, x) for x in dpfp)]
        claim = rows.Claim("more", ("softmax", "test BLEU"), ("dpfp", "test BLEU"), at_least=least)
        assert report.verdict(claim, found)[1] == verdict


def test_a_table_has_means_of_the_seeds_and_the_papers_numbers() -> None:
    of_gpus = {"gpu": "H100", "gpus": 2, "precision": ledger.precision(["--fp16"]), "without_kernels": ["chunkwise"]}
    entries = [entry("softmax", 1, 39.0), entry("softmax", 2, 39.2), entry("linear", 1, 36.5, **of_gpus)]
    made = report.block("multi30k", SCALED["multi30k"], entries)
    softmax = r"\| softmax +\| +2 \| +10 \| 1.00 \| +8.00 ± 0.00 \| +39.10 ± 1.27 \| +26.6 \| +27.7 \|"
    assert re.search(softmax, re.sub(" +", " ", made)) and " 36.50 |" in made and "not run" in made
    assert "GPUs: 2 x H100. Precision: float16." in made and "Trained (without kernels): chunkwise." in made
    for name in ("data", "inputs"):
        mixed = [entry("linear", 1, 36.5, **{name: of}) for of in "xy"]
        with pytest.raises(UserError, match="multi30k: its runs are of different data, which no table may mix"):
            report.block("multi30k", SCALED["multi30k"], mixed)
    scores = [("source", 1, 8.0), ("sum-6", 1, 16.0), ("sum-6", 2, 16.0)]  # log(16) is by a third above log(8)
    losses = [entry(row, n, table="smollm2", scores={"test, context-0": x}) for row, n, x in scores]
    made = report.block("smollm2", SCALED["smollm2"], losses)
    assert " 0.00 |" in made and " 33.33 ± 0.00 |" in made
    for change in ({"commands": []}, {"row": "gone"}, {"table": "gone"}, {"seed": 9}):  # other commands by now
        assert all(report.is_stale(replace(now, **change)) for now in ledger.read_ledger(ledger.COMMITTED)), change


def test_the_pages_have_the_ledgers_blocks_and_no_others() -> None:
    entries = ledger.read_ledger(ledger.COMMITTED)
    assert report.current(entries) == entries
    for name in ("convert.md", "results.md"):
        text = (report.DOCS / name).read_text(encoding="utf-8")
        assert report.page(name, text, entries) == text and text.count(": made by examples/reproduce.py") > 0
    with pytest.raises(UserError, match=r"has 1 blocks between <!-- multi30k.*; it must have 0"):
        report.page("results.md", text, [])


def test_a_table_has_figures_of_its_curves_its_claims_and_its_states(tmp_path: Path) -> None:
    scores = {"test, context-192": 41.0, "test, carried": 40.0, "state": 8192.0}
    states = [entry(row, 1, table="wikitext2", scores=scores) for row in ("delta", "gated")]
    for name, entries, drawn in (
        ("multi30k", [entry("softmax", n, valid=[(2, 8.0)]) for n in (1, 2)], ""),  # a point is no curve
        # One with a model that others start from, and differences of which some are a hundred times the others.
        ("conversion", ledger.read_ledger(ledger.COMMITTED), "claims curves"),
        ("wikitext2", states, "curves states"),
    ):
        drawing.draw_table(name, SCALED[name], entries, tmp_path)
        assert {path.name for path in tmp_path.glob(f"{name}-*")} == {f"{name}-{x}.png" for x in drawn.split()}
    made = report.block("wikitext2", SCALED["wikitext2"], states, pictures=True)
    assert "](wikitext2-states.png)" in made and " 8,192 |" in made


def test_a_table_of_any_ledger_is_printed_unless_it_is_damaged(tmp_path: Path, reproduce) -> None:
    ledger.append_entry(book := tmp_path / "ledger", entry("softmax", 1, 39.0))
    said, warned = reproduce("report", "multi30k", "--ledger", book)
    assert said.startswith("| model ") and " 39.00 |" in said
    assert warned == "multi30k softmax, seed 1: its row has other commands by now; it is kept\n"
    book.write_text('{"table": "multi30k"}\n')
    assert "line 1 is no entry of a ledger; remove the line" in reproduce("report", "--ledger", book, fails=True)[1]


GPU = {"gigabytes": 10, "terabytes per second": 2.0, "teraflops": {"bf16": 100, "fp32": 10}}
SIZE = Size(words=1000, updates=3600, most=4, batches=None, layers=2, products=10**6, parameters=10**8, kept=10**5)
SPEED = Speed(0.5, 0.25, 4.0, Size(1000, 1, 1, None, 4, 10**6, 1, 1))


def test_the_bounds_are_those_worked_out_by_hand() -> None:
    # 6e9 operations at 50 TFLOP/s, 0.2 GB moved three times; 0.5 s for twice the layers, 0.25 s at twice the speed.
    half = Estimate(6e9 / 50e12 + 0.6e9 / 2e12, 0.25 + 0.25 * 2, 2.0 + 0.2, 3.6, 1)
    single = Estimate(6e9 / 5e12 + 1.2e9 / 2e12, 0.25 + 0.25 * 2 * 2, 1.6 + 0.4, 3.6, 1)
    for precision, expected in (("bf16", half), ("fp32", single)):
        assert vars(estimate.estimate(SIZE, GPU, precision, [SPEED])) == pytest.approx(vars(expected))
    # 2 GB of parameters, 0.2 of numbers that a word keeps: in 2.16 GB half of a batch has room, in 1.8 none.
    for most, gigabytes, batches in ((4, 2.4, 2), (4, 2.0, 4), (1, 2.0, 1)):
        found = estimate.estimate(replace(SIZE, most=most), GPU | {"gigabytes": gigabytes}, "bf16", [SPEED])
        assert (found.batches, found.most) == (batches, pytest.approx(0.25 * batches + 0.5))
    with pytest.raises(UserError, match="--precision is fp16; this GPU has bf16, fp32"):
        estimate.estimate(SIZE, GPU, "fp16", [SPEED])


@pytest.mark.slow
def test_the_page_of_gpus_has_the_estimates_of_all_rows(reproduce) -> None:
    assert reproduce("estimate")[0].strip() in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "one V100, fp16" in reproduce("estimate", "mao-table2", "--gpu", "V100")[0]
    assert "ROW is decay-99; it must" in reproduce("estimate", "mao-table3", "--rows", "decay-99", fails=True)[1]


def test_the_page_of_papers_has_all_rows_and_is_true_of_tests(reproduce) -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    listed = re.sub(" +", " ", reproduce("--list")[0])
    for name, table in TABLES.items():
        for row, made in table.rows.items():
            assert f"\n| `{row}` | {made.model} | {' | '.join(made.numbers)} |" in listed
            trained = trained_as(name, row)
            command = f"`{name} {row}`" + (f", trained as `{trained}`" if trained != row else "")
            assert f"\n| `{row}` | {made.model} | {' '.join(made.numbers)} | {command} | " in page
    assert all(f"\n| {each.model} | {each.tokens} | {each.numbers} | " in page for each in TABLE_4)
    tested = {" ".join(name.split()[:2]): count for name, count in SCORED.items() if name.split()[0] in TABLES}
    tested |= {"mao-table2 gpt2": 0} | {f"schlag-table4 {row}": 1 for row in SHARED}
    told = re.findall(r"^.*`((?:schlag|mao|choi)-table\d [\w-]+)`(.*)$", page, flags=re.MULTILINE)
    assert {name for name, rest in told if "trained" in re.sub("trained as", "", rest)} == tested.keys()
    assert {name for name, rest in told if "scored" in rest} == {name for name, count in tested.items() if count}
