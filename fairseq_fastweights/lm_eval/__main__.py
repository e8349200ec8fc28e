"""Runs lm-evaluation-harness with this project's models.

    python -m fairseq_fastweights.lm_eval --model fairseq-fastweights --model_args checkpoint=FILE --tasks hellaswag
    python -m fairseq_fastweights.lm_eval --model hf --model_args pretrained=FOLDER --tasks hellaswag

The arguments are lm_eval's. lm_eval does not load plugins, so this command registers the models first:
`fairseq-fastweights`, which takes a checkpoint of fairseq (`fairseq_fastweights.lm_eval.model`), and transformers' Auto
classes for a FOLDER that `to-huggingface` wrote.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from fairseq_fastweights.command_line import fail
from fairseq_fastweights.invalid_input import InvalidInput

PROGRAM = "python -m fairseq_fastweights.lm_eval"
CHECKS = (
    "lm_eval.config.evaluate_config.EvaluatorConfig.from_cli",  # options
    "lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks",  # names of tasks
    "lm_eval.tasks.TaskManager.load",  # tasks of the user's own, and their data
    "lm_eval.api.registry.get_model",
    "lm_eval.models.huggingface.HFLM._get_config",  # a folder of transformers
    "lm_eval.models.huggingface.HFLM._create_tokenizer",
)
"""Functions of lm_eval that refuse a user's input by Python's own `ValueError`."""


def main() -> int:
    """Runs lm_eval's command; returns the exit status, 2 for errors that a user can correct."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import fairseq_fastweights.huggingface
        import fairseq_fastweights.lm_eval.model  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"there is no package {error.name}; pip install 'fairseq-fastweights[eval]'"
        return fail(PROGRAM, error, message)
    logging.basicConfig(format="%(asctime)s %(levelname)-8s %(message)s", datefmt="%Y-%m-%d:%H:%M:%S")
    logging.getLogger("fairseq_fastweights").setLevel(logging.INFO)  # which backend runs; lm_eval shows its own alone
    try:
        # lm_eval raises a ValueError for a mistyped task or argument.
        with ExitStack() as stack:
            for name in CHECKS:
                stack.enter_context(mock.patch(name, _refusing(pkgutil.resolve_name(name))))
            cli_evaluate()
    except (InvalidInput, OSError) as error:
        message = textwrap.shorten(str(error), 500) or type(error).__name__
        if isinstance(error, ConnectionError):  # it names the data set or the model
            message += "; it must be in the cache of HF_HOME, or --include_path name tasks that read files"
        return fail(PROGRAM, error, message)
    return 0


def _refusing(check: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose `ValueError` is an `InvalidInput`."""

    @functools.wraps(check)
    def refuse(*arguments: Any, **options: Any) -> Any:
        try:
            return check(*arguments, **options)
        except ValueError as error:
            raise InvalidInput(str(error)) from error

    return refuse


if __name__ == "__main__":
    sys.exit(main())
