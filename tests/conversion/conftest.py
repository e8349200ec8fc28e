from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import train
from tests.models.conftest import Fairseq


@pytest.fixture(scope="session")
def fairseq(tmp_path_factory: pytest.TempPathFactory) -> Fairseq:
    return Fairseq(tmp_path_factory.mktemp("fairseq"))


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pre-norm Transformer that was trained a little."""
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder, "--arch", "transformer_lm", "--decoder-normalize-before", "--max-update", "30")
    shutil.move(folder / "checkpoint_last.pt", folder / "model.pt")
    shutil.copy(corpus / "dict.txt", folder)
    return folder
