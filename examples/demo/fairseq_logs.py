"""What `fairseq-eval-lm` and `fairseq-interactive` write, read back."""

from __future__ import annotations

import re
from typing import Any


def read_perplexity(log: str) -> dict[str, Any]:
    """Reads the log of `fairseq-eval-lm`; ValueError if there is no perplexity in it."""
    perplexity = re.findall(r"Perplexity: (\S+)", log)
    if not perplexity:
        raise ValueError("its log has no perplexity in it")
    return {"ppl": float(perplexity[-1])}


def read_continuations(log: str) -> dict[str, Any]:
    """Reads the log of `fairseq-interactive`; ValueError if there is no text in it."""
    texts = re.findall(r"^H-\d+\t\S+\t(.*)$", log, re.MULTILINE)
    if not texts:
        raise ValueError("its log has no text in it")
    return {"texts": texts}
