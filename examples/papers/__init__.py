"""The papers' tables: a module for each, and what their rows have in common."""

from __future__ import annotations

from importlib import import_module

from papers.rows import Table

_MODULES = [
    *("schlag_table1", "schlag_table2", "schlag_table3", "schlag_table4", "schlag_table5"),
    *("mao_table1", "mao_table2", "mao_table3", "choi_table2", "choi_table3"),
]
TABLES: dict[str, Table] = {name.replace("_", "-"): import_module(f"papers.{name}").TABLE for name in _MODULES}
"""As they are called on the command line."""
