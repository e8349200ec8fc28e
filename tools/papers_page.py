#!/usr/bin/env python
"""Makes docs/papers.md from the rows of the papers' tables: `python tools/papers_page.py`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "papers.md"


def main() -> None:
    """Writes the page."""
    sys.path.insert(0, str(ROOT / "examples"))
    overview = import_module("papers.overview")
    PAGE.write_text(overview.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
