"""An extension of the reader of docstrings that MkDocs uses: what is completed when it is imported is shown so.

mkdocs.yml names this file.
"""

import importlib
import inspect
from typing import Any

import griffe


class CompletedDocstrings(griffe.Extension):
    """Reads the docstrings of the rules' functions, which share parts, from the functions themselves."""

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        """Replaces what stands in the source."""
        if func.path.startswith("fairseq_fastweights.ops.") and func.decorators and func.docstring:
            made = getattr(importlib.import_module(func.parent.path), func.name, None)
            func.docstring.value = inspect.getdoc(made) or func.docstring.value
