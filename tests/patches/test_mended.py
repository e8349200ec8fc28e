"""Faults of fairseq that small patches mend."""

import argparse
import importlib
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_fastweights import command_line
from tests.conftest import command, train

pytestmark = pytest.mark.usefixtures("our_fairseq")


@pytest.mark.parametrize(
    ("size", "rows", "forbidden"),
    [
        (1, [[4, 5], [4, 2]], [{4, 5}, {4}]),  # and not the end, which is at the beginning, too, and between lines
        (2, [[4, 5, 4, 6, 4], [4, 5, 6, 5, 6]], [{5, 6}, {5}]),
        (3, [[4, 5, 6, 4], [4, 5, 4, 5], [4, 4, 4, 4]], [set(), {4}, {4}]),
    ],
)
def test_fairseqs_search_takes_away_what_came_after_the_same_words(size: int, rows, forbidden) -> None:
    """A model of the tokens 4 to 9, and the end, 2."""
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    step = len(rows[0])
    tokens = torch.tensor([[2, *row, 1, 1, 1, 1] for row in rows])  # a buffer that is longer than the words
    for choices in ([2, *range(4, 10)], [2], [5]):  # the last choice stays
        scores = torch.full((len(rows), 10), float("-inf")).index_fill(1, torch.tensor(choices), -1.0)
        found = NGramRepeatBlock(size, use_extension=False)(tokens, scores, len(rows), 1, step)
        taken = [set(choices) - set(row.isfinite().nonzero().flatten().tolist()) for row in found]
        assert taken == (forbidden if len(choices) > 1 else [set()] * len(rows))


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
    told = "is no regular file; it must be a dictionary", "there is no dictionary .*; fairseq-preprocess writes it"
    for name, message in ((".", told[0]), ("pipe", told[0]), ("dict.txt", told[1])):
        with pytest.raises(ValueError, match=message) as error:
            Dictionary.load(str(folder / name))
        assert command_line.told(error.value) == str(error.value)


def dropout_of_16_bits(folder: Path) -> None:
    from fairseq.modules import FairseqDropout

    torch.manual_seed(0)
    for p, dtype, shape in (
        (0.1, torch.float32, 40_003),
        (0.3, torch.float64, (3, 5, 2667)),
        (0.9, torch.half, 40_001),
    ):
        x, share = torch.ones(shape, dtype=dtype, requires_grad=True), round(p * 2**16) / 2**16
        y = FairseqDropout(p)(x)
        y.sum().backward()
        kept = torch.tensor(1 / (1 - share), dtype=dtype).item()
        assert torch.equal(y, x.grad) and set(y.unique().tolist()) == {0, kept}
        lost = y.detach().flatten().eq(0).double()
        for start in range(4):  # of one draw
            assert lost[start::4].mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / 10_000) ** 0.5)
        assert abs(torch.corrcoef(torch.stack((lost[:-1], lost[1:])))[0, 1]) < 5 / 200
    drawn = [torch.manual_seed(seed) and FairseqDropout(0.5)(torch.ones(99)) for seed in (1, 1, 2)]
    assert torch.equal(*drawn[:2]) and not torch.equal(*drawn[1:])
    assert FairseqDropout(0.5)(torch.ones(0, 3)).shape == (0, 3) and not FairseqDropout(1.0)(x).any()
    assert FairseqDropout(0.5).eval()(x) is x is FairseqDropout(0.0)(x)
    assert torch.jit.script(FairseqDropout(0.5))(torch.ones(4)).shape == (4,)


def fasta_of_any_name(folder: Path) -> None:
    from fairseq.data.fasta_dataset import FastaDataset

    commands: list[str] = []
    with patch("subprocess.check_output", lambda command, shell: commands.append(command) or b"0"):
        FastaDataset("a;touch ran")
    assert len(commands) == 2 and all(command.startswith("cat 'a;touch ran.fasta' |") for command in commands)


def paths_with_colons(folder: Path) -> None:
    from fairseq.utils import split_paths

    (folder / "a:b").mkdir()
    assert split_paths(f"{folder}/a:b") == [f"{folder}/a:b"]
    assert split_paths(f"{folder}/a:c") == [f"{folder}/a", "c"]


def one_model_to_validate(folder: Path) -> None:
    given = "--path a.pt:b.pt --batch-size 2 --task language_modeling --cpu".split()
    with pytest.raises(ValueError, match=r"--path is a\.pt:b\.pt; it must be one model"):
        command("validate", str(folder), *given)


def functions_that_a_plugin_extends(folder: Path) -> None:
    from fairseq import extensions

    train = extensions.extensible(lambda x: x)
    train.__wrapped__.__name__ = "train"
    with patch.object(extensions, "_extension", None):
        found = [train(1)]
        for extension in (SimpleNamespace(train=lambda original, x: 10 * original(x)), SimpleNamespace()):
            extensions.extend(extension)
            found.append(train(1))
    assert found == [1, 10, 1]


def forms_of_a_model_in_hydra(folder: Path) -> None:
    from fairseq_cli import hydra_train

    made = []
    given = "model=transformer_lm/transformer_lm_gpt task=language_modeling task.data=. optimizer=adam".split()
    with patch.object(hydra_train.distributed_utils, "call_main", lambda cfg, *_: made.append(cfg.model)):
        command("hydra_train", *given, f"hydra.run.dir={folder}")
    assert made[0]["_name"] == "transformer_lm" and made[0].activation_fn == "gelu"


WORKING = (
    *(functions_that_a_plugin_extends, forms_of_a_model_in_hydra),
    *(paths_with_colons, one_model_to_validate),
    *(masks_of_bytes, files_without_iopath, dictionaries_that_are_files),
    dropout_of_16_bits,
    fasta_of_any_name,
)


@pytest.mark.parametrize("works", WORKING)
def test_what_was_broken_works(works, tmp_path: Path) -> None:
    works(tmp_path)


@pytest.mark.parametrize("arguments", [["--help"], ["-h", "--arch", "transformer_lm"], ["data", "--help", "--lr", "1"]])
def test_help_needs_no_model_and_no_task(arguments, capsys) -> None:
    from fairseq import options

    with pytest.raises(SystemExit, match="0"):
        options.parse_args_and_arch(options.get_training_parser(default_task=None), arguments)
    printed = capsys.readouterr()
    assert "--arch" in printed.out and "--task" in printed.out and not printed.err


REQUIRED = "the following arguments are required:"


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("train", ["--arch", "transformer_lm"], f"{REQUIRED} --optimizer"),
        ("train", ["--lr", "abc"], "argument --lr: 'abc' is no float, nor several with commas between them"),
        ("eval_lm", [], f"{REQUIRED} --path"),
        ("interactive", [], f"{REQUIRED} --path"),
    ],
)
def test_what_a_command_lacks_ends_it_before_anything_is_read(name, arguments, told, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(name, str(tmp_path / "none"), "--task", "language_modeling", *arguments)
    assert capsys.readouterr().err.splitlines()[-1] == f"fairseq-{name}: error: {told}"


def test_a_training_of_hydra_without_an_optimizer_ends_in_one_line(monkeypatch) -> None:
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.invalid_input import InvalidInput
    from fairseq_cli import hydra_train

    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.delenv("HYDRA_FULL_ERROR")
    monkeypatch.setattr(hydra_train, "_hydra_main", hydra_train.pre_main)
    with pytest.raises(InvalidInput, match="--optimizer is required; fairseq-hydra-train takes it as optimizer=adam"):
        hydra_train.hydra_main.__wrapped__(OmegaConf.structured(FairseqConfig()))
    assert os.environ["HYDRA_FULL_ERROR"] == "1"  # or Hydra would print a traceback, and not ask sys.excepthook


def test_settings_are_one_line_unless_all_are_asked_for(caplog) -> None:
    from fairseq.logging.settings_in_brief import log_settings

    logger, task = logging.getLogger("of_a_command"), {"_name": "language_modeling"}
    read = OmegaConf.create({"task": task, "model": None, "common_eval": {"path": "x.pt"}})
    trained = OmegaConf.create({"task": task, "model": {"arch": "transformer_lm"}, "optimizer": {"_name": "adam"}})
    for level in ("INFO", "DEBUG"):
        with caplog.at_level(level, logger.name):
            log_settings(logger, read)
            log_settings(logger, trained)
    more = "(LOGLEVEL=DEBUG shows all settings)"
    first = f"task language_modeling, path x.pt {more}"
    second = f"task language_modeling, model transformer_lm, optimizer adam {more}"
    assert caplog.messages == [first, second, first, str(read), second, str(trained)]


def test_half_precision_on_a_cpu_is_told_to_be_slow(corpus, tmp_path) -> None:
    told = "--fp16 on a CPU computes in float16, as on a GPU, and mostly takes several times as long"
    for flags, count in (("--fp16 --fp16-init-scale 4", 1), ("--bf16", 0)):
        log = train(corpus, tmp_path, "--cpu", "--max-update", "1", "--no-save", *flags.split())
        assert log.count(told) == count


def test_a_plugin_that_is_not_there_ends_a_command_in_one_line(monkeypatch, capsys) -> None:
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
def test_an_installed_plugin_is_found_by_its_name_and_registered_once(first, tmp_path, monkeypatch) -> None:
    """From every folder, as of an editable installation; also where a program imported it, or a part, before."""
    from fairseq.utils import import_user_module

    plugin, elsewhere = tmp_path / "installed" / "a_plugin", tmp_path / "elsewhere"
    for folder in (elsewhere, plugin / "tasks", plugin / "models"):
        folder.mkdir(parents=True)
    for module in ("__init__", "tasks/__init__", "tasks/a_task", "models/__init__", "models/a_model"):
        (plugin / f"{module}.py").write_text("import sys\nsys.imported.append(__name__)\n")
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
