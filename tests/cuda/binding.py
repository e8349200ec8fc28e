"""A plugin for pytest: operations of CPU tensors run the CUDA kernels, through their binding, under the emulator.

python -m pytest -p tests.cuda.binding tests/ops -k "native or divided"
"""

from __future__ import annotations

import os

import pytest

from fairseq_fastweights.ops import backends, kernels
from tests.cuda.build import build
from tests.ops.rules import CPU_KERNELS

os.environ["FASTWEIGHTS_NATIVE_CPU"] = str(build(binding=True))
backends.EXTENSIONS["cpu"] = backends.EXTENSIONS["cuda"]
backends.LARGEST_DIM["cpu"] = backends.LARGEST_DIM["cuda"]
kernels.INTERVALS["cpu"] = kernels.INTERVALS["cuda"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out code that a GPU would skip as well."""
    others = [x for x in items if any(mark.kwargs.get("reason") == CPU_KERNELS for mark in x.iter_markers("skipif"))]
    config.hook.pytest_deselected(items=others)
    items[:] = [x for x in items if x not in others]
