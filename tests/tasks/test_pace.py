"""How far a training or an evaluation is that nobody watches."""

from __future__ import annotations

import logging
import sys
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fairseq_fastweights.tasks import pace


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ({"max_update": 1000}, "3 updates, 20 s each, about 5.5 h left for 997 updates"),
        ({"max_epoch": 2}, "3 updates, 20 s each, about 12 min left for 37 updates"),
        ({"max_epoch": 2, "max_update": 4}, "3 updates, 20 s each, about 1 min left for 1 updates"),
        ({"max_epoch": 2, "update_freq": [2]}, "3 updates, 20 s each, about 6 min left for 19 updates"),
        ({}, "3 updates, 20 s each"),
    ],
)
def test_a_log_says_in_its_first_minute_how_long_a_training_will_take(ends, says, caplog, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: False))
    optimization = SimpleNamespace(**{"max_update": 0, "max_epoch": 0, "update_freq": [1], **ends})
    noted = pace.Pace()
    for update in range(1, 34):  # of 20 seconds each
        trainer = SimpleNamespace(get_num_updates=lambda update=update: update, is_data_parallel_master=True)
        epoch_itr = mock.MagicMock(epoch=1, iterations_in_epoch=update, __len__=lambda _: 20)
        with (
            caplog.at_level(logging.INFO),
            mock.patch.object(pace.time, "monotonic", return_value=20.0 * update),
        ):
            noted.note(SimpleNamespace(optimization=optimization), trainer, epoch_itr)
    assert caplog.records[0].message == says
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["3", "33"]


@pytest.mark.parametrize(("threads", "load", "warns"), [(4, 4.0, True), (4, 3.9, False), (1, 9.0, False)])
def test_busy_cores_are_a_warning_where_there_are_several_threads(threads, load, warns, caplog, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(pace.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(pace.os, "getloadavg", lambda: (load, 0.0, 0.0))
    pace.warn_of_busy_cores()
    assert ["OMP_NUM_THREADS=1" in record.message for record in caplog.records] == [True] * warns


def test_an_evaluations_log_gets_a_line_a_minute_and_all_batches_pass(caplog: pytest.LogCaptureFixture) -> None:
    clock = (20.0 * tick for tick in count())  # a batch takes 20 seconds
    with caplog.at_level(logging.INFO), mock.patch.object(pace.time, "monotonic", side_effect=clock):
        assert list(pace.ReportedBatches(list("abcdefghi"))) == list("abcdefghi")
    lines = [record.message for record in caplog.records]
    assert [line.partition(",")[0] for line in lines] == [f"{used} of 9 batches evaluated" for used in (2, 5, 8)]
    assert lines[0].endswith("about 4 min left")  # 7 batches, where the first two took a minute


@pytest.mark.parametrize("terminal", [True, False])
def test_on_a_terminal_fairseqs_bar_is_enough(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: terminal))
    made = pace.reported(lambda: [1, 2])()
    assert isinstance(made, list) == terminal and len(made) == 2 and [*made] == [1, 2]
