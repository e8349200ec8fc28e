"""The Markdown files: what they link to is there, and nothing is left to be filled in. Examples in docstrings work."""

import doctest
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "cpu", "cuda", "docs", "examples", "fairseq_fastweights", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
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
def test_links_lead_somewhere_tables_are_whole_and_nothing_is_left_to_be_filled_in(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert not re.findall(r"@[A-Z_]+@|\bTODO\b|\bFIXME\b|\bTBD\b", written)
    text = re.sub(r"```.*?```", "", written, flags=re.DOTALL)
    plain = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert "://" in target or (file.exists() and (not anchor or anchor in anchors(file))), target
    # Every row of a table has as many cells as its header.
    for table in re.findall(r"(?:^\|.*\n?)+", re.sub(r"\\\|", "", plain), flags=re.MULTILINE):
        assert len({len(line.split("|")) for line in table.splitlines()}) == 1, table


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_all_pages_of_a_git_checkout_are_looked_at() -> None:
    command = ["git", "ls-files", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert {ROOT / name for name in listed} <= set(PAGES)
