"""The Markdown files: what they link to is there, and nothing is left to be filled in. Examples in docstrings work."""

from __future__ import annotations

import doctest
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "benchmarks", "cuda", "docs", "examples", "fairseq_fastweights", "tests")
PAGES = sorted(
    page
    for folder in FOLDERS
    for page in (ROOT / folder).glob("*.md" if folder == "" else "**/*.md")
    if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)


EXAMPLES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "fairseq_fastweights").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_of_docstrings_give_what_they_say(module: str) -> None:
    found = doctest.testmod(import_module(module.removesuffix(".__init__")), extraglobs={"torch": torch})
    assert found.attempted and not found.failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert not missing


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_is_left_to_be_filled_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"@[A-Z_]+@|\bTODO\b|\bFIXME\b|\bTBD\b", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """Every row has as many cells as its header."""
    broken, columns = [], 0
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = len(re.sub(r"\\\||`[^`]*`", "", line).split("|"))
        columns = columns or cells
        if cells != columns:
            broken.append(line)
    assert not broken


def test_all_pages_are_looked_at() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    assert {ROOT / name for name in listed} <= set(PAGES)
