"""The papers' tables: a module for each, and what their rows have in common."""

from __future__ import annotations

from papers import (
    choi_table2,
    choi_table3,
    mao_table1,
    mao_table2,
    mao_table3,
    schlag_table1,
    schlag_table2,
    schlag_table3,
    schlag_table4,
    schlag_table5,
)
from papers.rows import Table

TABLES: dict[str, Table] = {
    "schlag-table1": schlag_table1.TABLE,
    "schlag-table2": schlag_table2.TABLE,
    "schlag-table3": schlag_table3.TABLE,
    "schlag-table4": schlag_table4.TABLE,
    "schlag-table5": schlag_table5.TABLE,
    "mao-table1": mao_table1.TABLE,
    "mao-table2": mao_table2.TABLE,
    "mao-table3": mao_table3.TABLE,
    "choi-table2": choi_table2.TABLE,
    "choi-table3": choi_table3.TABLE,
}
"""As they are called on the command line."""
