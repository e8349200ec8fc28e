"""How far an evaluation is that nobody watches."""

import logging
import sys
from itertools import count
from unittest import mock

import pytest

from fairseq_fastweights.data import progress


def test_a_log_gets_a_line_a_minute_and_all_batches_pass(caplog: pytest.LogCaptureFixture) -> None:
    clock = (20.0 * tick for tick in count())  # a batch takes 20 seconds
    with caplog.at_level(logging.INFO), mock.patch.object(progress.time, "monotonic", side_effect=clock):
        assert list(progress.ReportedBatches(list("abcdefghi"))) == list("abcdefghi")
    lines = [record.message for record in caplog.records]
    assert [line.partition(",")[0] for line in lines] == [f"{used} of 9 batches evaluated" for used in (2, 5, 8)]
    assert lines[0].endswith("about 4 min left")  # 7 batches, where the first two took a minute


@pytest.mark.parametrize("terminal", [True, False])
def test_on_a_terminal_fairseqs_bar_is_enough(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: terminal))
    made = progress.reported(lambda: [1, 2])()
    assert isinstance(made, list) == terminal and len(made) == 2 and [*made] == [1, 2]
