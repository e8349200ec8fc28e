"""fairseq's own tests, as this project runs them: what is unexpected is named, and decides the exit status."""

import subprocess
import sys
from pathlib import Path

import tests_of_fairseq

FILES = {
    **{"__init__.py": "", "test_a.py": "def test_a(): assert False", "gpu/test_b.py": "def test_b(): assert False"},
    **{"test_c.py": "import nothing_of_this_name", "test_d.py": "import scripts.d", "../scripts/d.py": ""},
    "test_binaries.py": "class TestTranslation:\n    def test_insertion_transformer(self): pass\n"
    "class TestLanguageModeling:\n    def test_transformer_xl_bptt_lm(self): assert False\n",
}


def test_what_is_unexpected_is_named(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, tests_of_fairseq.__file__, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    says = "\nfailed unexpectedly: tests/test_a.py::test_a\nfailed unexpectedly: tests/test_c.py\npassed unexpectedly: "
    assert f"{says}tests/test_binaries.py::TestTranslation::test_insertion_transformer (" in ended.stdout, ended.stdout
    assert ended.returncode == 1
