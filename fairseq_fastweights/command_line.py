"""Ends fairseq's commands with one line instead of a traceback, and exit code 2, for errors that a user can correct.

The type of an error says that: `InvalidInput`, which this package raises for an option or a setting, `FileError`, and
Python's own for files that cannot be opened. fairseq has no such type; an error of its own counts if it names an option
as it is typed, such as --path. All other errors keep their traceback; with FASTWEIGHTS_TRACEBACK=1 all do. It works in
commands that import the plugin.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# By their names, which a traceback of another process has, too; fairseq and the plugin each have a class `FileError`.
_FILES = ("FileError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError", "PermissionError")
_UNREADABLE = ("Model file not found", "Error(s) in loading state_dict for")
_NOISE: tuple[tuple[str, type[Warning], str], ...] = (
    ("", UserWarning, r"hydra\."),
    (r"\s*'config' is validated against ConfigStore", UserWarning, ""),
    (r"\s*The version_base parameter is not specified", UserWarning, ""),
    ("'pin_memory' argument is set as true", UserWarning, r"torch\."),
    ("", FutureWarning, r"fairseq\."),
)
_MISFIT = "Cannot load model parameters from checkpoint"


def fail(program: str, error: BaseException, text: str | None = None) -> int:
    """Prints an error of `program`, `text` or the error itself, and returns the exit code."""
    if tracebacks_wanted():
        traceback.print_exception(error)
    else:
        print(f"{program}: error: {text or str(error) or type(error).__name__}", file=sys.stderr)
    return 2


def tracebacks_wanted() -> bool:
    """True if FASTWEIGHTS_TRACEBACK asks for tracebacks."""
    return os.environ.get("FASTWEIGHTS_TRACEBACK", "0") not in ("", "0")


def install() -> None:
    """Makes errors of a running command of fairseq one line, and hides warnings of fairseq about itself."""
    frames = (frame.f_code for frame, _ in traceback.walk_stack(None))
    # Imported by a running command, as by --user-dir; a program that imports the plugin keeps its own hook.
    commanded = any(
        code.co_name == "cli_main" and Path(code.co_filename).parent.name == "fairseq_cli" for code in frames
    )
    if not commanded:
        return
    # fairseq's own use of hydra and torch, which a user cannot change. Filters of -W come first.
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message, category, module, append=True)
    if not tracebacks_wanted():
        sys.excepthook = partial(_end, sys.excepthook)


def _end(
    otherwise: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = told(error)
    if text is None:
        otherwise(kind, error, trace)
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)  # of several processes that fail alike the first speaks: torchrun ends the others meanwhile
    code = fail(os.path.basename(sys.argv[0]), error, in_one_line(text))
    if threading.active_count() > 1:
        leave(code)
    raise SystemExit(code)


def in_one_line(text: str) -> str:
    """A message without the breaks of its lines, which semicolons part, and not longer than a terminal shows."""
    return textwrap.shorten(re.sub(r"(?<![:;,])\s*\n\s*", "; ", text), 600, placeholder=" ...")


def leave(code: int, last: Callable[[], object] = int) -> NoReturn:
    """Ends this process with an exit code, after its exit functions and `last`.

    Python's own shutdown would abort the process (SIGABRT) while a thread reads batches by PyTorch's code.
    """
    try:
        logging.shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed since the process began
                with suppress(OSError, ValueError):
                    stream.flush()
        last()
    finally:
        os._exit(code)


def told(error: BaseException) -> str | None:
    """The line to print for an error that a user can correct; None for an unexpected error."""
    kind, message = type(error).__name__, str(error)
    if kind == "ProcessRaisedException":  # of torch.multiprocessing: the traceback of the first process that failed
        kind, _, message = message.strip().rpartition("\n")[2].partition(": ")
        kind = kind.rpartition(".")[2]
    # fairseq raises this one while it handles a model's own error, which says more.
    elif type(error) is Exception and message.startswith(_MISFIT) and error.__context__ is not None:
        return f"{_in_options(str(error.__context__))} ({message.partition(';')[0]})"
    if kind == "BackendUnavailable":
        return f"argument --fast-weight-backend: {message}"
    if kind == "InvalidInput":
        return _in_options(message)
    in_a_file = kind in _FILES or message.startswith(_UNREADABLE)
    return message if in_a_file or _names_an_option(message) else None


def _names_an_option(message: str) -> bool:
    """True for a message such as "--path required for generation!", which fairseq raises as an error of any kind."""
    typed = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", message)}
    return bool(typed) and not typed.isdisjoint(option_names())


def _in_options(message: str) -> str:
    """Writes options in a message as they are typed; if it begins with one, as argparse does ("argument --lr: ...")."""
    names = option_names()
    first, _, rest = message.partition(" ")
    rest = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda found: _dashes(found[0]) if found[0] in names else found[0], rest)
    return f"argument {_dashes(first)}: {rest}" if first in names else f"{first} {rest}"


def _dashes(name: str) -> str:
    return name if name == "data" else f"--{name.replace('_', '-')}"


def option_names() -> set[str]:
    """The names of the options of fairseq's commands, and of the registered models and tasks."""
    from fairseq import options
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    # Options of parsers, of configurations in the registries, and of models without a configuration.
    names = {"data"}
    for parser in (
        options.get_training_parser(),
        options.get_eval_lm_parser(),
        options.get_interactive_generation_parser(),
    ):
        names |= vars(parser.parse_known_args([])[0]).keys()
    configs = [*MODEL_DATACLASS_REGISTRY.values(), *TASK_DATACLASS_REGISTRY.values()]
    configs += [config for registry in REGISTRIES.values() for config in registry["dataclass_registry"].values()]
    names |= {name for config in configs for name in getattr(config, "__dataclass_fields__", ())}
    encoders = {name.replace("decoder", "encoder", 1) for name in names if name.startswith("decoder_")}
    return names | encoders | {"fast_weight_attention"}  # of the translation model, which has no dataclass
