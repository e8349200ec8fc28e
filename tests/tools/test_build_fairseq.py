"""fairseq is built from the source that the cures were written for, or not at all."""

import argparse
import importlib
import io
import os
import pickle
import re
import sys
import tarfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import build_fairseq
import fairseq_cures
import numpy as np
import pytest
import torch
from fairseq_cures import VERSION, UnexpectedSourceError

from fairseq_fastweights import command_line

HARMFUL = """import y

z = eval(y)
z = torch.load(y(1), "cpu") or th.load(
    y,
    map_location=z(),
) or torch.load(y, weights_only=False)
yaml.load(y, Loader=yaml.FullLoader)
"""
SAFE = """from fairseq.settings import literal
import y

z = literal(y)
z = torch.load(y(1), "cpu", weights_only=True) or th.load(
    y,
    map_location=z(), weights_only=True
) or torch.load(y, weights_only=False)
yaml.load(y, Loader=yaml.SafeLoader)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with the lines of fairseq that are cured, and nothing else."""
    root = tmp_path / "fairseq-0.12.2"
    for edits in fairseq_cures.CURES.values():
        for file, old, _ in edits:
            path = root / file.replace("*/*", "transformer_lm/gpt")
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text() if path.exists() else ""
            path.write_text(text if old in text else text + old)
    (root / "fairseq/optim").mkdir(exist_ok=True)
    (root / "fairseq/optim/harmful.py").write_text(
        f'"""Doc."""\nfrom __future__ import x\n{HARMFUL}with open(y) as f:\n'
    )
    return root


def test_cures_change_the_expected_source_once(source: Path) -> None:
    before = {path: path.read_text() for path in source.rglob("*.*") if path.is_file()}
    fairseq_cures.apply_cures(source)
    assert all(path.read_text() != text for path, text in before.items())
    opens = "from fairseq.text_files import open_text\n"
    harmful = (source / "fairseq/optim/harmful.py").read_text()
    assert harmful.partition("import x\n")[2] == f"{opens}{SAFE}with open_text(y) as f:\n"
    with pytest.raises(UnexpectedSourceError, match=r"cure 1 \(living_hydra\)"):
        fairseq_cures.apply_cures(source)
    [twice], [gone] = fairseq_cures.CURES["mask_type"], fairseq_cures.CURES["named_models"]
    (source / twice.file).write_text(2 * twice.old)
    (source / "fairseq/config/model/transformer_lm/gpt.yaml").unlink()
    for edit, times in ((twice, 2), (gone, 0)):
        with pytest.raises(UnexpectedSourceError, match=rf"^{re.escape(edit.file)}: it expects .* finds it {times} "):
            edit.apply(source, "it")


def test_the_files_in_the_fairseq_that_is_installed_are_those_that_are_here(our_fairseq: None) -> None:
    """One that is changed without a new version would be what the tests see, and no user has."""
    import fairseq

    for file, added in fairseq_cures.ADDED.items():
        here = Path(fairseq_cures.__file__).parent / file
        assert (Path(fairseq.__file__).parent / added).read_text() == here.read_text(), file


@pytest.fixture
def build(source: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An environment with a `version` of fairseq that has the failure `before`, as the new one `after`; what pip is
    asked for there; it downloads the source."""
    environment = SimpleNamespace(version=None, before=None, after=None, calls=[])

    def pip(what: str, *arguments: str, doing: str, **options: object) -> None:
        environment.calls.append(what)
        if what == "download":
            with tarfile.open(Path(arguments[arguments.index("--dest") + 1]) / "fairseq-0.12.2.tar.gz", "w") as archive:
                archive.add(source, source.name)
        elif what == "wheel":
            assert (Path(arguments[-1]) / "fairseq/checkpoint_loader.py").is_file()  # it is cured
            (Path(arguments[arguments.index("--wheel-dir") + 1]) / "fairseq-0.12.2.whl").touch()
        else:
            environment.version = {"install": VERSION, "uninstall": None}[what]
            environment.before = environment.after

    monkeypatch.setattr(build_fairseq, "pip", pip)
    monkeypatch.setattr(build_fairseq, "installed_version", lambda: environment.version)
    monkeypatch.setattr(build_fairseq, "import_failure", lambda: environment.before)
    return environment


A, B = "ImportError: a", "ImportError: b"


@pytest.mark.parametrize(
    ("version", "before", "after", "arguments", "calls", "left", "says"),
    [
        (None, None, None, "", "download wheel install", VERSION, f"fairseq {VERSION} is installed\n"),
        # One that works is left alone.
        (VERSION, None, None, "", "", VERSION, "left as it is"),
        ("1.0.0a0", None, None, "", "", "1.0.0a0", "left as it is"),
        ("0.10.2", None, None, "", "", "0.10.2", "error: fairseq 0.10.2 is installed, and 0.12"),
        ("0.10.2", None, None, "--force", "download wheel install install", VERSION, ""),
        # One that does not work is replaced; what is new and does not work is taken out again.
        (VERSION, A, None, "", "download wheel install install", VERSION, f"({A}); replacing"),
        ("0.12.2", A, B, "", "download wheel install install uninstall", None, f"error: .*{B}; .* now: None\n"),
        (None, None, None, "--constraint no/such", "", None, "error: --constraint no/such: there is no"),
    ],
)
def test_installs_what_is_needed_and_says_what_is_left(
    build, version, before, after, arguments, calls, left, says, capsys
) -> None:
    build.version, build.before, build.after = version, before, after
    status = build_fairseq.main(arguments.split())
    printed = capsys.readouterr()
    said = "".join(printed)
    assert re.search(says.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+"), said), said
    assert status == says.startswith("error") == bool(printed.err)
    assert build.calls == calls.split() and build.version == left


class Hostile:
    """Unpickling it writes the file `path`; a hostile checkpoint would do something worse."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


class Forged:
    """Unpickled, an array of two numbers of another shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __reduce__(self) -> tuple[object, ...]:
        function, arguments, state = np.arange(2.0).__reduce__()
        return function, arguments, (state[0], self.shape, *state[2:])


def checkpoint(**entries: object) -> dict[str, object]:
    run = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqNAG", "num_updates": 7}
    return {
        "args": None,
        "model": OrderedDict(weight=torch.arange(3.0)),
        "optimizer_history": [{**run, "lr_scheduler_state": {"best": None}}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 7}},
        **entries,
    }


def saved(content: object, zipped: bool = True, keep: float = 1.0, old: bytes = b"", new: bytes = b"") -> bytes:
    """As torch.save writes it, or as it did before torch 1.6; a part of that, or with other names of what is in it."""
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    written = file.getvalue()[: int(keep * len(file.getvalue()))]
    assert re.search(old, written)
    return re.sub(old, new, written) if old else written


@pytest.fixture
def load(our_fairseq: None, tmp_path: Path):
    """The function by which fairseq trains on, evaluates and generates."""
    from fairseq import checkpoint_utils

    def load(content: bytes, **options: object):
        (tmp_path / "file.pt").write_bytes(content)
        return checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "file.pt"), **options)

    return load


@pytest.mark.parametrize("zipped", [True, False])
def test_loads_an_old_checkpoint_and_allows_nothing_more_to_others(load, zipped: bool) -> None:
    args = argparse.Namespace(task="language_modeling", arch="transformer_lm", lr=0.25, data=["corpus"])
    before = torch.serialization.get_safe_globals()
    state = load(saved(checkpoint(args=args), zipped), arg_overrides={"data": "elsewhere"})
    assert state["args"].arch == "transformer_lm" and state["args"].lr == [0.25]
    assert state["args"].data == "elsewhere" and state["model"]["weight"].tolist() == [0, 1, 2]
    assert set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
def test_loads_the_meters_of_fairseq_0_8_and_numpy_numbers_and_saves_these_again(load, core: bytes) -> None:
    from fairseq.logging.meters import AverageMeter

    meter = AverageMeter()
    meter.update(1.5, n=2)
    state = checkpoint(extra_state={"train_iterator": {}, "train_meters": {"loss": meter}})
    content = saved(state, False, old=rb"fairseq\.logging\.meters\n", new=b"fairseq.meters\n")
    assert load(content)["extra_state"]["train_meters"]["loss"].count == 2

    counts, big_endian = np.array([[3, 2], [1, 0]]), np.array([1.5], dtype=">f4")
    state = checkpoint(metrics={"counts": counts, "big": big_endian, "loss": np.float64(2.5)})
    content = saved(state, False, old=rb"numpy\._?core\.multiarray\n", new=core + b".multiarray\n")
    for _ in range(2):
        loaded = load(content)["metrics"]
        assert isinstance(loaded["counts"], np.ndarray) and loaded["counts"].dtype == counts.dtype
        assert loaded["counts"].tolist() == counts.tolist() and loaded["big"].tolist() == [1.5]
        assert loaded["loss"] == 2.5
        content = saved(checkpoint(metrics=loaded))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda witness: saved(checkpoint(args=Hostile(witness))), "asks for .*open"),
        (lambda witness: saved(checkpoint(args=Hostile(witness)), zipped=False), "asks for .*open"),
        (lambda witness: pickle.dumps(Hostile(witness), protocol=2), ""),
        (saved(checkpoint(metrics=np.array([{}, []], dtype=object))), "only numbers are allowed"),
        (
            lambda _: saved(checkpoint(metrics=Forged((10**12,)))),
            r"cannot be loaded.*a NumPy array of shape \(1000000000000,\) with 16 bytes",
        ),
        (
            lambda _: saved(checkpoint(metrics=Forged((-1, -2)))),
            r"cannot be loaded.*a NumPy array of shape \(-1, -2\) with 16 bytes",
        ),
        (b"", "empty"),
        *[(saved(checkpoint())[:length], "cut short") for length in (1, 10)],
        *[(saved(checkpoint(), keep=keep), "cut short") for keep in (0.5, 0.99)],
        *[(saved(checkpoint(), zipped=False, keep=keep), "cut short") for keep in (0.1, 0.3, 0.6, 0.9, 0.95, 0.99)],
        *[(saved(x), "is not one of fairseq") for x in (torch.zeros(2), {"weight": torch.zeros(2)})],
    ],
)
def test_refuses_and_names_what_is_no_checkpoint_and_runs_nothing_of_it(load, content, says, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    with pytest.raises(ValueError, match=rf"file\.pt.* {says}") as error:
        load(content if isinstance(content, bytes) else content(witness))
    assert "asks for" not in says or "weights_only" not in str(error.value)  # no advice to run it after all
    assert not witness.exists()


@pytest.mark.parametrize(
    ("size", "rows", "forbidden"),
    [
        (1, [[4, 5]], [{4, 5}]),  # and not the end, which is at the beginning, too
        (2, [[4, 5, 4, 6, 4], [4, 5, 6, 5, 6]], [{5, 6}, {5}]),
        (3, [[4, 5, 6, 4], [4, 5, 4, 5], [4, 4, 4, 4]], [set(), {4}, {4}]),
    ],
)
def test_fairseqs_search_takes_away_what_came_after_the_same_words(our_fairseq, size: int, rows, forbidden) -> None:
    """Of the tokens 4 to 9, and the end, 2."""
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    step = len(rows[0])
    tokens = torch.tensor([[2, *row, 1, 1, 1, 1] for row in rows])  # a buffer that is longer than the words
    for choices in ([2, *range(4, 10)], [2], [5]):  # what there is no choice of stays
        scores = torch.full((len(rows), 10), float("-inf")).index_fill(1, torch.tensor(choices), -1.0)
        found = NGramRepeatBlock(size, use_extension=False)(tokens, scores, len(rows), 1, step)
        taken = [set(choices) - set(row.isfinite().nonzero().flatten().tolist()) for row in found]
        assert taken == (forbidden if len(choices) > 1 else [set()] * len(rows))


def weights_of_a_moving_average(folder: Path) -> None:
    from fairseq.checkpoint_utils import load_ema_from_checkpoint

    # Of a file that holds nothing else.
    (folder / "ema.pt").write_bytes(saved({"extra_state": {"ema": {"weight": torch.arange(3.0)}}}))
    assert load_ema_from_checkpoint(str(folder / "ema.pt"))["model"]["weight"].tolist() == [0, 1, 2]


def masks_of_bytes(folder: Path) -> None:
    from fairseq.modules.multihead_attention import MultiheadAttention, _mask_for_xformers

    attention, x = MultiheadAttention(4, 2).eval(), torch.randn(3, 2, 4)
    padding, future = torch.tensor([[0, 0, 1], [0, 0, 0]]), torch.ones(3, 3).triu(1)
    for static in (False, True):  # by PyTorch's function, and by fairseq's own
        given, expected = (
            attention(x, x, x, key_padding_mask=padding.to(kind), static_kv=static)[0]
            for kind in (torch.uint8, torch.bool)
        )
        assert torch.equal(given, expected)
    given, expected = (attention(x, x, x, attn_mask=future.to(kind))[0] for kind in (torch.uint8, torch.bool))
    assert torch.equal(given, expected)
    assert _mask_for_xformers(future.byte(), to_dtype=torch.float)[0].tolist() == [0, -float("inf"), -float("inf")]


def files_without_iopath(folder: Path) -> None:
    from fairseq import file_io

    with patch.object(file_io, "IOPathManager", None), patch.dict(sys.modules, iopath=None):
        with file_io.PathManager.opena(str(folder / "file"), "wb") as file:
            file.write(b"written")
        assert (folder / "file").read_bytes() == b"written" and file_io.PathManager.async_close()


def dictionaries_that_are_files(folder: Path) -> None:
    from fairseq.data import Dictionary

    os.mkfifo(folder / "pipe")
    for name in (".", "pipe"):
        with pytest.raises(ValueError, match="is no regular file; it must be a dictionary") as error:
            Dictionary.load(str(folder / name))
        assert command_line.told(error.value) == str(error.value)
    (folder / "dict.txt").write_text("word 3\n")
    assert Dictionary.load(str(folder / "dict.txt")).symbols[-1] == "word"


def dropout_of_16_bits(folder: Path) -> None:
    from fairseq.modules import FairseqDropout

    torch.manual_seed(0)
    for p, dtype, shape in (
        (0.1, torch.float32, (40_003,)),
        (0.3, torch.float64, (3, 5, 2667)),
        (0.9, torch.bfloat16, 40_001),
    ):
        x, share = torch.ones(shape, dtype=dtype, requires_grad=True), round(p * 2**16) / 2**16
        y = FairseqDropout(p)(x)
        y.sum().backward()
        assert y.dtype == dtype and torch.equal(y, x.grad)
        assert set(y.unique().tolist()) == {0, torch.tensor(1 / (1 - share), dtype=dtype).item()}
        lost = y.detach().flatten().eq(0).double()
        for start in range(4):  # of one draw
            assert lost[start::4].mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / 10_000) ** 0.5)
        assert abs(torch.corrcoef(torch.stack((lost[:-1], lost[1:])))[0, 1]) < 5 / 200
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(FairseqDropout(0.5)(torch.ones(99)))
    assert torch.equal(*drawn) and not torch.equal(drawn[0], FairseqDropout(0.5)(torch.ones(99)))
    assert FairseqDropout(0.5)(torch.ones(0, 3)).shape == (0, 3) and not FairseqDropout(1.0)(x).any()
    assert FairseqDropout(0.5).eval()(x) is x is FairseqDropout(0.0)(x)
    assert torch.jit.script(FairseqDropout(0.5))(torch.ones(4)).shape == (4,)


def fasta_of_any_name(folder: Path) -> None:
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary()
    for letter in "ACGT":
        dictionary.add_symbol(letter)
    data = folder / "x;touch ran;$(touch ran)"
    data.mkdir()
    (data / "test.fasta.idx.npy").symlink_to(folder / "elsewhere.npy")
    here = os.getcwd()
    for text, sizes in ((">a b\nAC\nG \n>c\n\n>d\nT", [3, 0, 1]), (">a\nACGT\n", [4])):  # which has changed since
        (data / "test.fasta").write_text(text)
        os.chdir(folder)
        try:
            found = data_utils.load_indexed_dataset(str(data / "test"), dictionary)
        finally:
            os.chdir(here)
        assert [dictionary.string(found[n]).replace(" ", "") for n in range(len(found))] == [
            "".join(part.splitlines()[1:]).strip() for part in text.split(">")[1:]
        ]
        assert found.sizes.tolist() == sizes
    assert sorted(path.name for path in folder.iterdir()) == [data.name]
    os.mkfifo(data / "valid.fasta")
    with pytest.raises(ValueError, match=r"valid\.fasta is no regular file"):
        data_utils.load_indexed_dataset(str(data / "valid"), dictionary)


WORKING = (
    *(weights_of_a_moving_average, masks_of_bytes, files_without_iopath, dictionaries_that_are_files),
    dropout_of_16_bits,
    fasta_of_any_name,
)


@pytest.mark.parametrize("works", WORKING)
def test_what_was_broken_works(our_fairseq, works, tmp_path: Path) -> None:
    works(tmp_path)


def test_a_plugin_that_is_not_there_ends_a_command_in_one_line(our_fairseq, monkeypatch, capsys) -> None:
    from fairseq import options

    for name, more in (("no/such", ""), ("no_such", ", and no package no_such is installed")):
        monkeypatch.setattr(sys, "argv", ["fairseq-train", "data", "--user-dir", name])
        with pytest.raises(SystemExit) as ended:
            options.get_training_parser()
        missing = Path(name).absolute()
        assert ended.value.code == 2
        told = f"fairseq-train: error: argument --user-dir: there is no folder {missing}{more}\n"
        assert capsys.readouterr().err == told


@pytest.mark.parametrize("first", ["nothing", "the package", "its task"])
def test_an_installed_plugin_is_found_by_its_name_and_registered_once(
    our_fairseq, first, tmp_path, monkeypatch
) -> None:
    """From every folder, as of an editable installation; also where a program imported it, or a part, before."""
    from fairseq.utils import import_user_module

    plugin, elsewhere = tmp_path / "installed" / "a_plugin", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for module in ("__init__", "tasks/__init__", "tasks/a_task", "models/__init__", "models/a_model"):
        path = plugin / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import sys\nsys.imported.append(__name__)\n")
    imported: list[str] = []
    monkeypatch.setattr(sys, "imported", imported, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, str(plugin.parent)])
    monkeypatch.setattr(import_user_module, "memo", set(), raising=False)
    before = set(sys.modules)
    monkeypatch.chdir(elsewhere)
    try:
        if first != "nothing":
            importlib.import_module("a_plugin" if first == "the package" else "a_plugin.tasks.a_task")
        for name in ("a_plugin", "a_plugin/", str(plugin)):
            import_user_module(argparse.Namespace(user_dir=name))
        parts = ("", ".models", ".models.a_model", ".tasks", ".tasks.a_task")
        assert sorted(imported) == [f"a_plugin{part}" for part in parts]
        (elsewhere / "a_plugin").mkdir()  # goes first, and is another one
        with pytest.raises(ImportError, match="elsewhere/a_plugin because the corresponding module name"):
            import_user_module(argparse.Namespace(user_dir="a_plugin"))
    finally:
        for name in [name for name in set(sys.modules) - before if name.partition(".")[0] == "a_plugin"]:
            del sys.modules[name]
