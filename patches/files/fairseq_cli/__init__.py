"""Ends fairseq's commands in one line, and exit code 2, after an error in a file or an option.

It serves commands that load no plugin, such as fairseq-preprocess. FASTWEIGHTS_TRACEBACK=1 asks for a traceback.
"""

import os
import sys
import threading
from functools import partial
from types import TracebackType
from typing import Any


def _end(otherwise: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    from fairseq.invalid_input import InvalidInput  # not before: commands set their log up first

    if not isinstance(error, InvalidInput):
        otherwise(kind, error, trace)
        return
    print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr)
    if threading.active_count() > 1:  # a thread that reads batches would abort Python's shutdown
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
    raise SystemExit(2)


if os.environ.get("FASTWEIGHTS_TRACEBACK", "0") in ("", "0"):
    sys.excepthook = partial(_end, sys.excepthook)
