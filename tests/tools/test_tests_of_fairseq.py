"""fairseq's own tests, as this project runs them: what is unexpected is named, and decides the exit status."""

import subprocess
import sys
from pathlib import Path

import pytest
import tests_of_fairseq

CLASS = "class Test{}:\n    def test_{}(self): assert {}\n"


@pytest.mark.parametrize(
    ("files", "status", "says"),
    [
        (
            {
                **{"__init__.py": "", "test_a.py": "def test_a(): assert False", "gpu/test_b.py": "assert False"},
                **{"test_c.py": "import nothing_of_this_name", "test_d.py": "import scripts.d", "../scripts/d.py": ""},
                "test_binaries.py": CLASS.format("Translation", "insertion_transformer", True)
                + CLASS.format("LanguageModeling", "transformer_xl_bptt_lm", False),
            },
            1,
            "\nfailed unexpectedly: tests/test_a.py::test_a\nfailed unexpectedly: tests/test_c.py\n"
            "passed unexpectedly: tests/test_binaries.py::TestTranslation::test_insertion_transformer (",
        ),
        ({"test_a.py": "def test_a(): pass"}, 0, "\nnothing unexpected\n"),
        ({}, 2, "has no folder tests"),
    ],
)
def test_what_is_unexpected_is_named(tmp_path: Path, files: dict[str, str], status: int, says: str) -> None:
    for name, text in files.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, tests_of_fairseq.__file__, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status and says in ended.stdout + ended.stderr, ended.stdout + ended.stderr
