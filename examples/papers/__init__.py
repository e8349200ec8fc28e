"""The papers' tables, a module for each paper, the same scaled down, and the code that runs them."""

from __future__ import annotations

from papers import choi, mao, schlag
from papers.rows import Table
from papers.scaled import SCALED

__all__ = ["SCALED", "TABLES"]

TABLES: dict[str, Table] = {**schlag.TABLES, **mao.TABLES, **choi.TABLES}
"""As they are called on the command line."""
