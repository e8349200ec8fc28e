"""The rows of the papers' tables, run by examples/reproduce.py on small models: they train, and are scored."""

import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from papers import ledger

from tests.conftest import import_plugin

from .conftest import EXAMPLES, reproduce_command, run_script, tiny

TABLES = reproduce_command.ALL
TRAINING = "--cpu --num-workers 0 --warmup-updates 1 --max-update 2 --batch-size 2 --tokens-per-sample 16".split()
EVALUATION = "--cpu --num-workers 0 --tokens-per-sample 16".split()
SOURCES = {"gpt2": "target", "xatl": "pythia", "smollm2": "smollm2"}
# Those that start from another row of their table are run with it, below.
ROWS = [(name, row) for name, table in TABLES.items() for row in table.rows if table.rows[row].source is None]
TRAINED = """schlag-table3 positions-yes-normalization-yes; schlag-table5 dpfp-sum; mao-table1 delta-baseline;
mao-table2 local-32; mao-table3 linformer-64; mao-table3 abc-32; choi-table2 400m-scratch-retnet;
choi-table2 400m-ffn-mamba; choi-table2 1b-attention-hybrid; choi-table3 ffn-frozen"""
SCORED = {
    "schlag-table2 small-delta-network --context-window 15": 2,
    "schlag-table4 delta-network": 2,
    "mao-table3 decay-32 --context-window 12": 4,
    "choi-table2 400m-ffn-retnet": 1,
    "smollm2 window-sum-6-transfer": 1,
    **dict.fromkeys(re.split(r";\s", TRAINED), 0),
}
"""Rows that are trained, with options of their evaluation, and how often each is scored."""
SHARED = ("transformer-xl-64", "transformer-xl-384")

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.slow]


def places(table: str, row: str, request: pytest.FixtureRequest, **others: str) -> list[Path]:
    """The folders that a call of `train` takes, of fixtures in whose place there may be others."""
    name = SOURCES.get(folder := TABLES[table].folder)
    if name:
        source = request.getfixturevalue(others.get(name, name))
        return [source, source.with_name("data")]
    names = ["published"] * TABLES[table].rows[row].recipe.sources + ["parallel" if folder == "wmt14" else "data"]
    return list(map(request.getfixturevalue, names))


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Without a buffer that fairseq leaves uninitialised: it tells a device."""
    return {n: x for n, x in torch.load(path, weights_only=False)["model"].items() if "_float_tensor" not in n}


@pytest.fixture(scope="module")
def target(gpt2: Path) -> Path:
    """The target model of Mao's Tables 1 and 2, run as a person runs it, from another folder."""
    data, out = (gpt2.with_name(name) for name in ("data", "target"))
    words = ["mao-table2", "gpt2", "train", gpt2, data, out, *TRAINING, *tiny("mao-table2", "gpt2")]
    said = run_script(EXAMPLES / "reproduce.py", *words, PRECISION="fp32", cwd=out.parent)
    assert "done training" in said and (out / "train.log").read_text() in said
    return out


@pytest.fixture
def parallel(tmp_path: Path) -> Path:
    """Enough of two languages, in Moses tokens and BPE, to build a model for them."""
    for language in ("en", "de"):
        (tmp_path / f"dict.{language}.txt").write_text("a 1\nb 1\n")
    (tmp_path / "subwords.codes").touch()
    (tmp_path / "preparation.json").write_text('{"made from": {"target": "de"}}')
    return tmp_path


@pytest.mark.parametrize(("table", "row"), ROWS, ids=lambda name: name)
def test_fairseq_takes_a_row_and_builds_its_model(table: str, row: str, reproduce, request, tmp_path) -> None:
    from fairseq import options, tasks
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY

    folders = places(table, row, request, target="gpt2")
    translates = TABLES[table].folder == "wmt14"
    task = "--source-lang en --target-lang de" if translates else "--tokens-per-sample 16"
    call = [table, row, "train", *folders, tmp_path, *tiny(table, row), *task.split()]
    printed, _ = reproduce("--print", *call)
    assert ("--eval-bleu-detok moses" in printed) == (table == "schlag-table1")
    import_plugin()
    args = options.parse_args_and_arch(options.get_training_parser(), shlex.split(printed.splitlines()[-1])[1:])
    # As the conversion to fairseq's configuration does, which takes longer than all else here.
    defaults = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[args.arch], Namespace)()
    model = tasks.setup_task(args).build_model(Namespace(**{**vars(defaults), **vars(args), "_name": args.arch}))
    if table in ("mao-table1", "mao-table2"):  # of two heads, of 32 numbers unless keys are folded to fewer
        folded = row.endswith("no-feature-map") or (table == "mao-table2" and row != "gpt2")
        size = {"16": 16, "32": 32}.get(row.split("-")[-1], 4) if folded else 32
        assert model.decoder.layers[0].self_attn.k_proj.weight.shape == (2 * size, 64)


@pytest.mark.parametrize(("name", "count"), SCORED.items())
def test_a_row_of_each_table_trains_and_is_scored_once(name, count: int, reproduce, request, tmp_path) -> None:
    """For two updates; scored, where `count` says how often, in segments as short as it was trained on."""
    (table, row, *options), out = name.split(), tmp_path / "out"
    folders = places(table, row, request)
    reproduce(table, row, "train", *folders, out, *TRAINING, *tiny(table, row), PRECISION="fp32")
    trained = weights(out / "checkpoint_best.pt").values()
    assert all(x.isfinite().all() for x in trained if x.is_floating_point())
    if count:
        first, again = (reproduce(table, row, "evaluate", folders[-1], out, *EVALUATION, *options)[0] for _ in "12")
        assert first.count("Perplexity: ") == first.count(": done (") == again.count(": done before\n") == count
        assert "fairseq-eval-lm" not in again and first.splitlines()[-count:] == again.splitlines()[-count:]


@pytest.fixture
def run(data: Path, tmp_path: Path, reproduce) -> Callable[..., tuple[str, dict[str, ledger.Entry]]]:
    """Trains small rows of a table for two updates, and scores them; returns the output, and the entries by row."""

    def call(table: str, rows: Sequence[str], *options: str) -> tuple[str, dict[str, ledger.Entry]]:
        small = [*tiny(table, rows[0]), *"--max-update 2 --warmup-updates 1 --batch-size 2".split(), *options]
        said, _ = reproduce("run", table, data, tmp_path, "--rows", *rows, "--seeds", "1", "--", *small)
        return said, {entry.row: entry for entry in ledger.read_ledger(tmp_path / "ledger.jsonl")}

    return call


def test_a_row_that_starts_from_another_is_trained_after_it_and_scored(run, tmp_path: Path) -> None:
    """One after attention was transferred, which has no perplexity of its own."""
    _, found = run("conversion", ["linear-aligned"], "--validate-interval-updates", "2")
    assert [(x, len(found[x].valid)) for x in found] == [("source", 1), ("linear-transfer", 0), ("linear-aligned", 1)]
    assert all(entry.scores["test, context-128"] > 1 for entry in found.values())
    source, transferred, trained = (weights(tmp_path / f"{row}-1" / "checkpoint_best.pt") for row in found)
    kept = [name for name in transferred if not re.search(r"\.self_attn\.|version", name)]
    assert kept and all(torch.equal(transferred[name], source[name]) for name in kept)
    distance = (trained["decoder.layers.0.fc1.weight"] - transferred["decoder.layers.0.fc1.weight"]).abs().max()
    assert 0 < distance < 1e-3  # two updates at a rate of 0.0001


def test_rows_of_one_training_are_trained_once_and_scored_each_in_its_way(run, tmp_path: Path) -> None:
    said, found = run("schlag-table4", SHARED, *EVALUATION)
    assert said.count("--save-dir") == said.count("about 0.0 hours for each") == 1
    assert tuple(found) == SHARED and len({entry.commands[0] for entry in found.values()}) == 1
    for name, entry in found.items():
        mode = f"memory-{name.split('-')[-1]}-{name.split('-')[-1]}"
        assert set(entry.scores) == {f"valid, {mode}", f"test, {mode}"}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["transformer-xl-15-1"]


def test_a_model_is_scored_in_windows_and_carried_and_its_state_counted(run) -> None:
    scores = run("wikitext2", ["sum-carried"])[1]["sum-carried"].scores
    assert [*scores] == ["test, context-192", "test, carried", "state"] and min(scores.values()) > 1
    assert scores["state"] == 2 * 16 * (16 + 1)  # a layer's two heads of 16, with a normaliser
