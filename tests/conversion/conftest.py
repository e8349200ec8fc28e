import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import train
from tests.conversion.transfers import make_source
from tests.huggingface.conftest import save  # noqa: F401
from tests.models.conftest import fairseq, text  # noqa: F401


@pytest.fixture(scope="session")
def source(fairseq, tmp_path_factory) -> tuple[Any, Path]:  # noqa: F811
    """A pre-norm Transformer with tied embeddings, and its folder."""
    folder = tmp_path_factory.mktemp("source")
    return make_source(fairseq, folder), folder


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pre-norm Transformer that was trained a little."""
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder, "--arch", "transformer_lm", "--decoder-normalize-before", "--max-update", "30")
    shutil.move(folder / "checkpoint_last.pt", folder / "model.pt")
    shutil.copy(corpus / "dict.txt", folder)
    return folder
