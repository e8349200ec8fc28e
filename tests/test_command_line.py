"""Errors that a command's user can mend end it in one line; unexpected ones keep their traceback."""

from __future__ import annotations

import io
import sys
import traceback

import pytest
import torch
from fairseq import checkpoint_loader, checkpoint_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.settings import literal
from fairseq_cli import generate
from torch.multiprocessing import ProcessRaisedException

from fairseq_fastweights import command_line, ops
from fairseq_fastweights.mixers.registry import parse_pattern
from fairseq_fastweights.models import option_checks
from tests.conftest import SMALL_MODEL, TASK, import_plugin, spawn


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    """Its options, by whose names errors are told."""
    import_plugin()


def raised(call, *arguments: object, **named: object) -> Exception:
    with pytest.raises(Exception) as error:
        call(*arguments, **named)
    return error.value


def refuse_a_size() -> None:
    option_checks.check_ranges(type("Options", (), {"feature_dim": 0}))


def misfit() -> None:
    try:
        refuse_a_size()
    except ValueError:
        raise Exception(  # noqa: B904
            "Cannot load model parameters from checkpoint x.pt; please ensure that the architectures match."
        )


def bug() -> None:
    [][1]


def on_purpose_but_of_the_code() -> None:
    raise ValueError("decoder_layers is 0")


def of_another_programs_option() -> None:
    raise RuntimeError("g++ --sysroot=/ failed")


def read_an_empty_checkpoint() -> None:
    checkpoint_loader.load_checkpoint_file(io.BytesIO(), "x/decoder_layers.pt")


X = torch.ones(1, 2, 1, 1)
SIZE = "argument --feature-dim: is 0; it must be at least 1"
CASES = {
    "ours": (refuse_a_size, (), SIZE),
    "ours, of a name that is no option": (parse_pattern, ("", 2), "argument --mixers: is ''"),
    "a checkpoint of another model": (misfit, (), f"{SIZE} (Cannot load model parameters from checkpoint x.pt)"),
    "a file": (open, ("/nowhere/file",), "[Errno 2] No such file or directory: '/nowhere/file'"),
    "a checkpoint": (checkpoint_utils.load_model_ensemble, (["/nowhere/x.pt"],), "Model file not found: /nowhere/x.pt"),
    "fairseq's, of an option": (generate.main, (FairseqConfig(),), "--path required for generation!"),
    "a damaged checkpoint": (read_an_empty_checkpoint, (), "x/decoder_layers.pt is empty (0 bytes)"),
    "a setting": (literal, ("f()",), "'f()' is no literal, nor a sum or product of such"),
    "another program's option": (of_another_programs_option, (), None),
    "an error of the code that is raised": (on_purpose_but_of_the_code, (), None),
    "arguments of a function": (ops.sum_rule, (X, X, X[0]), None),
    "a bug": (bug, (), None),
    "a number": (int, ("x",), None),
}


@pytest.mark.parametrize(("call", "arguments", "text"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("spawned", [False, True], ids=["", "in a process of its own"])
def test_errors_that_a_user_can_correct_are_told(call, arguments, text, spawned):
    error = raised(call, *arguments)
    if spawned and call is not misfit:
        trace = "".join(traceback.format_exception(error))
        error = ProcessRaisedException(f"\n\n-- Process 0 terminated with the following error:\n{trace}", 0, 1)
    told = command_line.told(error)
    assert told is text is None or told.startswith(text)


def test_a_message_of_several_lines_becomes_one():
    text = "does not fit:\nwhat       name\nleft over  fc1.weight\n" + 99 * "missing    x.weight\n"
    told = command_line.in_one_line(text)
    assert told.startswith("does not fit: what name; left over fc1.weight; missing x.weight; missing")
    assert len(told) <= 600 and told.endswith(" ...")


@pytest.mark.parametrize("program", ["fairseq_cli.train", "some.other"])
def test_the_hook_is_set_by_fairseqs_commands_and_tracebacks_can_be_had(monkeypatch, program):
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)
    code = compile("def cli_main():\n    install()\n", f"/x/{program.replace('.', '/')}.py", "exec")
    scope = {"install": command_line.install}
    exec(code, scope)
    monkeypatch.setenv("FASTWEIGHTS_TRACEBACK", "1")
    scope["cli_main"]()
    assert sys.excepthook is before
    monkeypatch.delenv("FASTWEIGHTS_TRACEBACK")
    scope["cli_main"]()
    assert (sys.excepthook is before) == (program == "some.other")


def test_a_command_ends_in_one_line_and_with_exit_code_2(corpus, tmp_path):
    flags = [*TASK, *SMALL_MODEL, *"--batch-size 4 --cpu --optimizer adam --feature-map dpfp --feature-dim 31".split()]
    ended = spawn("train", str(corpus), *flags, "--save-dir", str(tmp_path))
    line = ended.stderr.strip().rpartition("\n")[2]
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert line.endswith(
        ": error: argument --feature-dim: is 31; the feature map dpfp gives 2 * --head-dim * --dpfp-nu = 32: choose "
        "--dpfp-nu for it, or leave --feature-dim out"
    )
