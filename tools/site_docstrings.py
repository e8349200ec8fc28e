"""An extension of the reader of docstrings that MkDocs uses, which mkdocs.yml names."""

import inspect
from typing import Any

import griffe

from fairseq_fastweights import ops


class CompletedDocstrings(griffe.Extension):
    """Reads docstrings and arguments of the rules' functions, which share parts, from the functions, not the source."""

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        """Replaces the docstring of the source, and `**options` by the arguments of `sum_rule` for which they stand."""
        if func.parent.path == ops.rules.__name__ and func.docstring and func.name in ops.__all__:
            func.docstring.value = inspect.getdoc(getattr(ops, func.name)) or ""
            if "options" in func.parameters:
                own = [x for x in func.parameters if x.name != "options"]
                shared = [x for x in func.parent["sum_rule"].parameters if x.kind is griffe.ParameterKind.keyword_only]
                func.parameters = griffe.Parameters(*own, *shared)
