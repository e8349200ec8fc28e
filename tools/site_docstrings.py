"""An extension of the reader of docstrings that MkDocs uses, which mkdocs.yml names."""

import inspect
from typing import Any

import griffe

from fairseq_fastweights import ops


class CompletedDocstrings(griffe.Extension):
    """Reads the docstrings of the rules' functions, which share parts, from the functions instead of their source."""

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        """Replaces the docstring of the source."""
        if func.parent.path == ops.rules.__name__ and func.docstring and func.name in ops.__all__:
            func.docstring.value = inspect.getdoc(getattr(ops, func.name)) or ""
