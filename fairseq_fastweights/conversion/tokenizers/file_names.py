"""The names of a tokenizer's files in a Hugging Face folder."""

from __future__ import annotations

import re
from pathlib import Path

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""The possible files of a tokenizer, besides those of `template_names`."""

TEMPLATE = FILES[-1]
TEMPLATES = "additional_chat_templates"
_TEMPLATE = re.compile(rf"{TEMPLATES}/\w[\w.-]*\.jinja", re.ASCII)


def is_template(name: str) -> bool:
    """True if this is the name, in its folder, of a chat template beside the first."""
    return _TEMPLATE.fullmatch(name) is not None


def template_names(folder: Path) -> list[str]:
    """The names of the chat templates beside the first that are in a folder."""
    files = (folder / TEMPLATES).iterdir() if (folder / TEMPLATES).is_dir() else ()
    return sorted(name for file in files if is_template(name := f"{TEMPLATES}/{file.name}"))
