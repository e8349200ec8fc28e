"""Parts that the demos share: steps that are done once, folders of one run, figures, and what is read from logs."""

import io
import os
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from common import fairseq_logs, figures, files, steps

from .conftest import ROOT

MARK = "made-by-a-test"


def make_step(folder: Path, code: str, **others: Any) -> Any:
    """A step that runs Python code in its folder, given as argument."""
    others.setdefault("read_result", lambda log: {"log": log})
    return steps.Step(folder.name, folder, [sys.executable, "-c", code, str(folder)], **others)


def work(*wanted: Any, **others: Any) -> str:
    """Runs steps; returns what was shown."""
    steps.Runner(ROOT, 2, output := io.StringIO(), {}, **others).run(wanted)
    return output.getvalue()


def test_a_folder_belongs_to_one_run_of_one_demo_and_to_its_commands(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    with steps.claim(out, MARK) as claimed:
        work(make_step(tmp_path / "step", f"import os; os.fstat({claimed})"), keep_open=[claimed])
        inherited = os.dup(claimed)
    with pytest.raises(steps.StepError, match="at work"), steps.claim(out, MARK):
        pass
    os.close(inherited)
    with steps.claim(out, MARK):
        pass
    for folder, mark, message in ((out, "another", "out holds other files"), (out / MARK, MARK, "for the results")):
        with pytest.raises(steps.StepError, match=message), steps.claim(folder, mark):
            pass
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(95, "Operation not supported")))
    with pytest.raises(OSError, match=f"{MARK} cannot be locked: Operation not supported"), steps.claim(out, MARK):
        pass


def test_a_file_takes_the_place_of_a_link_and_is_not_written_through_it(tmp_path: Path) -> None:
    elsewhere, file = tmp_path / "elsewhere", tmp_path / "file"
    elsewhere.write_text("kept")
    for name in ("file", "file.new"):
        (tmp_path / name).symlink_to(elsewhere)
    files.write_whole(file, "text")
    assert file.read_text() == "text" and elsewhere.read_text() == "kept" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("changed", ["nothing", "command", "input", "earlier step"])
def test_a_finished_step_is_run_again_only_if_it_changed(tmp_path: Path, changed: str) -> None:
    def make(changed: str = "") -> Any:
        first = make_step(tmp_path / "first", f"print({changed == 'earlier step'})")
        code, digest = f"print({changed == 'command'})", str(changed == "input")
        return first, make_step(tmp_path / "second", code, depends_on=digest, after=[first])

    work(*make())
    assert make()[1].finished_result() == {"log": "False\n"}
    (tmp_path / "second" / "witness").touch()
    first, second = make(changed)
    assert ("second: done before" in work(first, second)) == (changed == "nothing")
    assert second.result() is not None and (tmp_path / "second" / "witness").exists() == (changed == "nothing")


# It begins; the next call goes on, if there is a whole checkpoint of the same command.
HALF_THEN_WHOLE = """
import pathlib, sys, zipfile
checkpoint = pathlib.Path(sys.argv[1]) / "checkpoint_last.pt"
begun = checkpoint.exists()
print("resumed" if begun else "what went wrong")
zipfile.ZipFile(checkpoint, "w").writestr("updates", "1")
sys.exit(0 if begun else 3)
"""


@pytest.mark.parametrize("case", ["resumes", "begins anew", "broken checkpoint", "changed"])
def test_a_failed_step_is_shown_is_not_done_and_goes_on_if_it_can(tmp_path: Path, case: str) -> None:
    step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=case != "begins anew")
    with pytest.raises(steps.StepError, match=r"a failed: .*exit status 3.*\n.*what went wrong\n.*log\.txt"):
        work(step)
    assert step.result() is None
    if case == "broken checkpoint":
        (step.folder / "checkpoint_last.pt").write_bytes(b"half")
    if case == "changed":
        step = make_step(tmp_path / "a", HALF_THEN_WHOLE, resumes=True, depends_on="something else")
    if case == "resumes":
        assert "a: goes on where it was\n" in work(step) and "resumed" in step.log.read_text()
    else:
        with pytest.raises(steps.StepError, match="what went wrong"):
            work(step)


TRAIN_LOG = """
x | INFO | fairseq.utils | ******************CUDA enviroments for all 2 workers******************
x | INFO | fairseq.utils | rank   0: capabilities =  9.0  ; total memory = 79.106 GB ; name = NVIDIA H100 80GB HBM3
x | INFO | fairseq.utils | rank   1: capabilities =  9.0  ; total memory = 79.106 GB ; name = NVIDIA H100 80GB HBM3
x | INFO | fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)
x | WARNING | ops.choice | fast weight rules run by chunkwise on cuda: the CUDA kernels were not built; build them
x | INFO | train_inner | {"loss": "3", "ppl": "8", "wps": "100", "ups": "2", "num_updates": "2", "gb_free": "60.1"}
x | INFO | valid | {"epoch": 1, "valid_loss": "4", "valid_ppl": "16", "valid_num_updates": "2"}
x | INFO | train_inner | {"loss": "2", "ppl": "4", "wps": "300", "ups": "2", "num_updates": "4", "gb_free": "58.2"}
x | INFO | valid | {"epoch": 1, "valid_loss": "5", "valid_ppl": "32", "valid_num_updates": "4"}
"""


def test_a_log_is_read_while_it_is_written_and_counts_updates_once() -> None:
    assert fairseq_logs.read_training(TRAIN_LOG + TRAIN_LOG.replace('"ppl": "4"', '"ppl": "5"')) == {
        "parameters": 1234,
        "train_ppl": [(2, 8.0), (4, 5.0)],
        "valid_ppl": [(2, 16.0), (4, 32.0)],
        "best_valid_ppl": 16.0,
        "tokens_per_second": 200.0,
    }
    read = fairseq_logs.parse_training(TRAIN_LOG)
    assert (read.gpus, read.gpu_memory) == (["NVIDIA H100 80GB HBM3"] * 2, 20.9)
    assert read.backends == read.without_kernels == ["chunkwise on cuda: the CUDA kernels were not built"]
    # Attention that is transferred has no perplexity.
    parts = [f'x | train_inner | {{"loss": 9, "wps": 1, "num_updates": {n}, "train_wall": 3}}\n' for n in (6, 12)]
    # One that ends before its first report has the sums of its epochs, which count for no other.
    epoch = 'x | train | {"train_wps": "50", "train_ups": "2", "train_train_wall": "7"}\n'
    for log, told in ((epoch * 2, (14, 50, 2)), ("".join(parts) + epoch, (6, 1, 0))):
        training = fairseq_logs.parse_training(log)
        assert (training.seconds, training.speed, training.updates_per_second) == told and not training.train
    with pytest.raises(ValueError, match="its log has no training"):
        fairseq_logs.read_training("Traceback (most recent call last):\n")
    cut = TRAIN_LOG + 'x | INFO | train_inner | {"epoch": 1, "lo'
    assert fairseq_logs.parse_training(cut) == read
    assert fairseq_logs.describe_training(cut, 8) == "update 4/8, loss 2.00, 300 tokens/s, 2 s left"


def test_no_name_is_written_over_another_or_over_a_point() -> None:
    figure, axes = figures.new_figure()
    figures.draw_points(axes, {"sum": (1, 1), "delta": (1, 1.03, 0.9, 1.2), "gated": (1.01, 1.02), "decay": (9, 2)})
    figure.draw_without_rendering()
    names = [text.get_window_extent() for text in axes.texts]
    assert len(names) == 4 and not any(one.overlaps(other) for one, other in combinations(names, 2))
    dots = axes.transData.transform([(1, 1), (1, 1.03), (1.01, 1.02), (9, 2)])
    assert not any(name.contains(*dot) for name in names for dot in dots)
