"""Functions that stand in for a method of fairseq have its defaults: callers may leave out the same arguments."""

from inspect import Parameter, getmembers, isclass, isfunction, signature
from types import ModuleType

import pytest

from fairseq_fastweights.models import (
    fast_weight_decoder,
    fast_weight_lm,
    fast_weight_transformer,
    mixer_layers,
)
from fairseq_fastweights.tasks import attention_transfer_criterion, fast_weight_language_modeling

MODULES = [fast_weight_decoder, fast_weight_lm, fast_weight_transformer, mixer_layers]
MODULES += [attention_transfer_criterion, fast_weight_language_modeling]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_methods_have_the_defaults_of_fairseqs(module: ModuleType) -> None:
    compared = 0
    for _, kind in getmembers(module, isclass):
        for name, method in vars(kind).items() if kind.__module__ == module.__name__ else ():
            theirs = next((vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)), None)
            if isfunction(method) and isfunction(theirs) and theirs.__module__.startswith("fairseq."):
                ours = signature(method).parameters
                for parameter, given in signature(theirs).parameters.items():
                    if parameter in ours and given.default is not Parameter.empty:
                        assert ours[parameter].default == given.default, (kind, name, parameter)
                        compared += 1
    assert compared
