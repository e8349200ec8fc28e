"""fairseq's own tests, as this project runs them: what is unexpected is named, and decides the exit status."""

import subprocess
import sys
from pathlib import Path

import pytest
import tests_of_fairseq

PASSES, FAILS = "def test_{}(): pass\n", "def test_{}(): assert False\n"
CLASS = "class TestTranslation:\n    def test_insertion_transformer(self): "


@pytest.mark.parametrize(
    ("files", "status", "says"),
    [
        ({"test_a.py": PASSES.format("a"), "gpu/test_b.py": FAILS.format("b")}, 0, "nothing unexpected"),
        ({"__init__.py": "", "test_a.py": "import scripts.b", "../scripts/b.py": ""}, 5, "no tests ran"),
        ({"test_a.py": FAILS.format("a")}, 1, "failed unexpectedly: tests/test_a.py::test_a"),
        ({"test_a.py": "import nothing_of_this_name"}, 1, "failed unexpectedly: tests/test_a.py"),
        ({"test_binaries.py": f"{CLASS}assert False"}, 0, "nothing unexpected"),
        ({"test_binaries.py": f"{CLASS}pass"}, 1, "passed unexpectedly: tests/test_binaries.py::TestTranslation::"),
        ({}, 2, "has no folder tests"),
    ],
)
def test_what_is_unexpected_is_named(tmp_path: Path, files: dict[str, str], status: int, says: str) -> None:
    for name, text in files.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ended = subprocess.run(
        [sys.executable, tests_of_fairseq.__file__, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert says in ended.stdout + ended.stderr
