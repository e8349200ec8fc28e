"""Docstrings and comments of kernels begin with a noun or a verb, and names of tests fit in a line."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

FOLDERS = ("fairseq_fastweights", "benchmarks", "examples", "patches", "tests", "tools", "native", "cpu", "cuda")
UNCLEAR = re.compile(r"(What|Of|Whether|Those|Where)\b")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def openings(path: Path) -> Iterator[str]:
    """The first lines of a Python file's docstrings, or of the comments of any other source."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DEFINITIONS)]
        yield from filter(None, map(ast.get_docstring, nodes))
    else:
        yield from re.findall(r"(?:^|\n)(?! *//)[^\n]*\n *// *([^\n]*)", f"\n\n{text}")


@pytest.mark.parametrize("folder", FOLDERS)
def test_openings_name_their_subject(folder: str) -> None:
    kinds = (".h", ".cpp", ".cu", ".cuh") if folder in ("native", "cpu", "cuda") else (".py",)
    paths = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in kinds]
    assert paths
    found = {f"{path.relative_to(ROOT)}: {line}" for path in paths for line in openings(path) if UNCLEAR.match(line)}
    assert not found


def test_names_of_tests_have_at_most_70_characters() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    names = {name for text in texts.values() for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}
    assert not {name for name in names if len(name) > 70}
