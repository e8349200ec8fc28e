"""Logs the settings of a command in one line; all of them, some hundred, if LOGLEVEL=DEBUG asks for them."""

import logging
from typing import Any


def log_settings(logger: logging.Logger, settings: Any) -> None:
    """Logs the task, the model and how it is trained, or the path of the model; at debug level all settings."""
    parts = ("task", "model", "criterion", "optimizer", "lr_scheduler")
    names = {part: _name(getattr(settings, part, None)) for part in parts}
    if names["model"] is None:
        names = {"task": names["task"], "path": settings.common_eval.path}
    named = ", ".join(f"{part.replace('_', '-')} {name}" for part, name in names.items() if name is not None)
    logger.info(f"{named} (LOGLEVEL=DEBUG shows all settings)")
    logger.debug(settings)


def _name(part: Any) -> Any:
    return getattr(part, "_name", None) or getattr(part, "arch", None)
