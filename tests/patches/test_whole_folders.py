"""Files with fixed or given names are written neither through links nor into pipes."""

import logging
import os
from pathlib import Path

import pytest
from fairseq import checkpoint_utils
from fairseq.logging import progress_bar
from fairseq_cli import generate, hydra_train
from omegaconf import OmegaConf

from fairseq_fastweights import command_line
from tests.conftest import command

whole_folders = pytest.importorskip("fairseq.whole_folders", reason="needs tools/build_fairseq.py's fairseq")
pytestmark = pytest.mark.usefixtures("our_fairseq")


def link(path: Path) -> None:
    path.symlink_to(path.with_name("precious"))


def hard_link(path: Path) -> None:
    os.link(path.with_name("precious"), path)


KINDS = [link, hard_link, os.mkfifo]


@pytest.fixture
def precious(tmp_path):
    file = tmp_path / "precious"
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious"


def preprocess_into(folder: Path) -> None:
    (folder / "text").write_text("a b\n")
    command("preprocess", "--only-source", "--trainpref", str(folder / "text"), "--destdir", str(folder))


LOGS = {"preprocess.log": preprocess_into, "log": lambda folder: progress_bar.progress_bar([], log_file=folder / "log")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_no_file_of_its_own_is_refused(tmp_path, precious, name, kind):
    kind(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is a link, a pipe or a device; a log must be a file of") as error:
        LOGS[name](tmp_path)
    assert command_line.told(error.value) == str(error.value)


def test_a_log_goes_on(tmp_path):
    for text in ("one", "tw\udcff"):
        log = whole_folders.LogFile(tmp_path / "log")
        log.emit(logging.makeLogRecord({"msg": text}))
        log.close()
    assert (tmp_path / "log").read_text() == "one\ntw\\udcff\n"


@pytest.mark.parametrize("kind", KINDS)
def test_generated_texts_take_the_place_of_what_is_there(tmp_path, monkeypatch, precious, kind):
    kind(tmp_path / "generate-test.txt")
    monkeypatch.setattr(generate, "_main", lambda cfg, file: file.write("H-0\n"))
    generation = {"sampling": False, "nbest": 1, "beam": 1, "replace_unk": None}
    dataset = {"max_tokens": 1, "batch_size": None, "gen_subset": "test", "dataset_impl": None}
    evaluation = {"path": "x.pt", "results_path": str(tmp_path)}
    generate.main(OmegaConf.create({"common_eval": evaluation, "generation": generation, "dataset": dataset}))
    found = tmp_path / "generate-test.txt"
    assert found.read_text() == "H-0\n" and not found.is_symlink()


@pytest.mark.parametrize("kind", [link, os.mkfifo])
@pytest.mark.parametrize("name", ["hydra_train.log", ".hydra", ".hydra/config.yaml"])
def test_hydra_writes_neither_through_links_nor_into_pipes(tmp_path, monkeypatch, precious, name, kind):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    kind(tmp_path / name)
    monkeypatch.setattr("sys.argv", ["fairseq-hydra-train", "hydra.run.dir=elsewhere", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(ValueError, match=rf"{name} is a link, a pipe or a device; hydra writes to it"):
        hydra_train.cli_main()
    whole_folders.check_hydras_files(["hydra.run.dir=elsewhere"])


def test_a_folder_for_checkpoints_is_tried_beside_what_is_there(tmp_path, precious):
    link(tmp_path / "dummy")
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    assert (tmp_path / "dummy").is_symlink() and not set(os.listdir(tmp_path)) - {"precious", "dummy", ".training.lock"}
