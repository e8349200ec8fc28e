"""Readers of single settings of a config.json, whose errors name the setting."""

from __future__ import annotations

from typing import Any

from fairseq_fastweights.invalid_input import InvalidInput

_MOST, _MOST_LAYERS = 10**8, 10_000


def sizes(layers: int, width: int, heads: int, between: int, positions: int, tied: bool) -> dict[str, Any]:
    """The options of models of all families."""
    return {
        "decoder-layers": layers,
        "decoder-embed-dim": width,
        "decoder-input-dim": width,
        "decoder-output-dim": width,
        "decoder-ffn-embed-dim": between,
        "decoder-attention-heads": heads,
        "decoder-normalize-before": True,
        "no-scale-embedding": True,
        "share-decoder-input-output-embed": tied,
        "max-target-positions": positions,
        "tokens-per-sample": positions,
        "mask-special-symbols": True,
        "softmax-attention-layers": "all",
    }


def number(config: dict[str, Any], name: str) -> int:
    """Reads a positive whole number."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be a positive whole number")
    if value > _MOST:
        raise InvalidInput(f"config.json: {name} is {value}; it must be at most {_MOST}")
    return value


def count_layers(config: dict[str, Any], name: str) -> int:
    """Reads a number of layers, which has a largest value, as memory is used for each before weights are read."""
    layers = number(config, name)
    if layers > _MOST_LAYERS:
        raise InvalidInput(f"config.json: {name} is {layers}; it must be at most {_MOST_LAYERS}")
    return layers


def mapping(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Reads settings within a setting; {} if there are none."""
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be an object")
    return value or {}


def flag(config: dict[str, Any], name: str, default: bool) -> bool:
    """Reads true or false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be true or false")
    return value


def probability(config: dict[str, Any], name: str, default: float) -> float:
    """Reads a number of at least 0 and less than 1."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be at least 0 and less than 1")
    return float(value)


def positive(config: dict[str, Any], name: str, default: float | None) -> float:
    """Reads a positive number."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be a positive number")
    return float(value)


def check(config: dict[str, Any], name: str, supported: Any) -> None:
    """Raises a `ValueError` unless a setting has the one supported value, which is also its default."""
    value = config.get(name, supported)
    if value != supported:
        raise InvalidInput(f"config.json: {name} is {value!r}; only {supported!r} is supported")


def check_heads(width_name: str, width: int, name: str, heads: int) -> None:
    """Checks that `heads` divides `width`."""
    if width % heads:
        raise InvalidInput(f"config.json: {name} is {heads}; it must be a divisor of {width_name}, {width}")


def activation(config: dict[str, Any], name: str, default: str) -> str:
    """Reads an activation function; returns fairseq's name of it."""
    tanh = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # three ways to write the same formula
    known = {"gelu": "gelu", "relu": "relu", **dict.fromkeys(tanh, "gelu_accurate")}
    value = config.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise InvalidInput(f"config.json: {name} is {value!r}; it must be one of {', '.join(known)}")
    return known[value]


def rotary(config: dict[str, Any]) -> tuple[float, float]:
    """Reads the fraction of each head that is rotated, and the base; older and newer files write them differently."""
    parameters = mapping(config, "rope_parameters")
    scaling = config.get("rope_scaling")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or scaling:
        raise InvalidInput(
            f"config.json: rope_type is {kind!r} and rope_scaling is {scaling!r}; only 'default' and null are supported"
        )
    fraction = parameters.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    base = parameters.get("rope_theta", config.get("rotary_emb_base", 10000))
    for name, value, most in (("rotary_pct", fraction, 1), ("rotary_emb_base", base, float("inf"))):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise InvalidInput(f"config.json: {name} is {value!r}; it must be more than 0 and at most {most}")
    return float(fraction), float(base)


def read_end_of_text(config: dict[str, Any], vocabulary: int, otherwise: int | None) -> int:
    """Reads the number of the word type that ends a text."""
    value = config.get("eos_token_id")
    if isinstance(value, list) and value:  # models for dialogue have several: the first ends a text
        value = value[0]
    if value is None:
        value = otherwise
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise InvalidInput(
            f"config.json: eos_token_id is {value!r}; it must be one number, from 0 to vocab_size - 1, {vocabulary - 1}"
        )
    return value
