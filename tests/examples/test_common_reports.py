"""What the demos read from logs and show at their end."""

from __future__ import annotations

from importlib import import_module

import pytest

fairseq_logs, tables = map(import_module, ("common.fairseq_logs", "common.tables"))

TRAIN_LOG = """
2026-01-01 | INFO | fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)
2026-01-01 | INFO | train_inner | {"epoch": 1, "loss": "3", "ppl": "8", "wps": "100", "ups": "2", "num_updates": "2"}
2026-01-01 | INFO | valid | {"epoch": 1, "valid_loss": "4", "valid_ppl": "16", "valid_num_updates": "2"}
2026-01-01 | INFO | train_inner | {"epoch": 1, "loss": "2", "ppl": "4", "wps": "300", "ups": "2", "num_updates": "4"}
2026-01-01 | INFO | valid | {"epoch": 1, "valid_loss": "5", "valid_ppl": "32", "valid_num_updates": "4"}
"""


def test_the_log_of_a_training_that_was_resumed_counts_each_update_once() -> None:
    assert fairseq_logs.read_training(TRAIN_LOG + TRAIN_LOG.replace('"ppl": "4"', '"ppl": "5"')) == {
        "parameters": 1234,
        "train_ppl": [(2, 8.0), (4, 5.0)],
        "valid_ppl": [(2, 16.0), (4, 32.0)],
        "best_valid_ppl": 16.0,
        "tokens_per_second": 200.0,
    }


def test_progress_is_read_from_a_log_that_is_being_written() -> None:
    assert fairseq_logs.describe_training("", 8) == "starting"
    cut = TRAIN_LOG + '2026-01-01 | INFO | train_inner | {"epoch": 1, "lo'
    assert fairseq_logs.describe_training(cut, 8) == "update 4/8, loss 2.00, 300 tokens/s, 2 s left"


@pytest.mark.parametrize(
    ("module", "read"),
    [
        ("common.fairseq_logs", "read_training"),
        ("demo.run", "read_perplexity"),
        ("demo.run", "read_continuations"),
        ("demo_translation.run", "read_speed"),
        ("demo_translation.run", "read_bleu"),
    ],
)
def test_a_log_without_results_is_noticed(module: str, read: str) -> None:
    with pytest.raises(ValueError, match="its log has no"):
        getattr(import_module(module), read)("Traceback (most recent call last):\n")


def test_a_table_is_markdown_and_aligned() -> None:
    assert tables.format_table(["model", "n"], [["a", "1,000"], ["longer name", "2"]]).splitlines() == [
        "| model       |     n |",
        "| ----------- | ----: |",
        "| a           | 1,000 |",
        "| longer name |     2 |",
    ]
