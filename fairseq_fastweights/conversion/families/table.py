"""The families of Hugging Face's models that can be converted, by their model_type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq_fastweights.conversion.families.family import Family
from fairseq_fastweights.conversion.families.settings import Settings
from fairseq_fastweights.invalid_input import InvalidInput

_EXPERTS = dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"), "which has experts")
_UNSUPPORTED = {"kimi_linear": "which has experts and compressed keys", **_EXPERTS}
"""Models that are near to those of `FAMILIES`, and the parts that `fast_weight_lm` lacks."""

Reader = Callable[[dict[str, Any], set[str], int | None], Family]
"""Called with all settings, the weights' names, and the default of the end-of-text token's id."""

FAMILIES: dict[str, tuple[Settings, Reader]] = {}
"""The settings and the readers of models, by their model_type."""

SERVED: list[str] = []
"""Those that `to-huggingface --as` writes any model as that fits."""

WITHIN: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[str], str | None]]] = {}
"""Language models that may be within a model of several parts, by the whole's model_type.

The functions return the contents of config.json, had the language model been saved alone, and a weight's name then;
None for weights of other parts.
"""


def reads(model_type: str, settings: Settings, *, served: bool = False) -> Callable[[Reader], Reader]:
    """Enters a function into `FAMILIES`, and its models into `SERVED`."""

    def enter(reader: Reader) -> Reader:
        FAMILIES[model_type] = settings, reader
        SERVED.extend([model_type] * served)
        return reader

    return enter


def read_family(config: dict[str, Any], names: set[str], end_of_text: int | None = None) -> Family:
    """Reads a model's config.json.

    Args:
        config: its contents.
        names: of the weights in the folder, which distinguish variants of a model.
        end_of_text: id of the end-of-text token, if the configuration has none.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _UNSUPPORTED:
        raise InvalidInput(f"config.json: model_type is {kind!r}, {_UNSUPPORTED[kind]}, which is not supported")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InvalidInput(f"config.json: model_type is {kind!r}; it must be one of {', '.join(FAMILIES)}")
    settings, reader = FAMILIES[kind]
    return reader(settings.complete(config, kind), names, end_of_text)
