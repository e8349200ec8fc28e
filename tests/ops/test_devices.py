"""Tensors on several devices are refused: by every operator, called by itself, and by the functions before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairseq_fastweights.mixers.short_convolution import short_convolution
from fairseq_fastweights.ops.elementwise import gate, random_features
from fairseq_fastweights.ops.kernels import NAMESPACE

SCHEMAS = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{NAMESPACE}::")]
OPERATORS = {schema.name: schema for schema in SCHEMAS if sum("Tensor" in str(x.type) for x in schema.arguments) > 1}
NUMBERS: dict[str, Any] = {"int": 1, "float": 1.0, "bool": True}


def test_all_operators_of_several_tensors_are_here():
    assert len(OPERATORS) == 16


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_refuses_one_tensor_without_memory(name):
    """torch calls the function for the results' shapes, whose tensors would be unwritten memory."""
    arguments = OPERATORS[name].arguments
    operator = getattr(torch.ops.fairseq_fastweights, name.partition("::")[2])
    given = [NUMBERS.get(str(x.type), torch.zeros(1) if "Tensor" in str(x.type) else torch.float32) for x in arguments]
    tensors = [place for place, x in enumerate(given) if isinstance(x, torch.Tensor)]
    for mode in (torch.enable_grad, torch.inference_mode):
        for place in tensors:
            mixed = [torch.zeros(1, device="meta") if other == place else x for other, x in enumerate(given)]
            blamed = arguments[tensors[1] if place == tensors[0] else place].name
            first = arguments[tensors[0]].name
            with mode(), pytest.raises(ValueError, match=f"^{blamed} is on device .*; it must be on that of {first}, "):
                operator(*mixed)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


CALLS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "short_convolution": (
        short_convolution,
        {
            "x": zeros(5, 2, 3),
            "weight": zeros(3, 4),
            "bias": zeros(3),
            "before": zeros(2, 3, 3),
            "lengths": zeros(2, dtype=torch.long),
            "starts": zeros(2, 5, dtype=torch.bool),
        },
    ),
    "random_features": (random_features, {"projected": zeros(1, 2, 1, 3), "source": zeros(1, 2, 1, 4)}),
    "gate": (
        lambda x, **others: gate(x, "sigmoid", **others),
        {"x": zeros(2, 4), "bias": zeros(4), "log_rate": zeros(2), "y": zeros(2, 4)},
    ),
    "norm": (
        lambda x, **others: gate(x, "silu", norm="rms", **others),
        {"x": zeros(2, 4), "y": zeros(2, 2, 2), "weight": zeros(2)},
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_function_names_the_tensor_that_is_elsewhere(call):
    run, given = CALLS[call]
    first, *others = given
    for name in others:
        with pytest.raises(ValueError, match=f"^{name} is on device meta; it must be on that of {first}, cpu$"):
            run(**given | {name: given[name].to("meta")})
    run(**{name: x.to("meta") for name, x in given.items()} if call != "short_convolution" else given)
