"""A plugin for pytest: operations of CPU tensors run the CUDA kernels, through their binding, under the emulator.

python -m pytest -p tests.cuda.binding tests/ops -k native
"""

from __future__ import annotations

import os

from fairseq_fastweights.ops import native
from tests.cuda.emulated import build

os.environ["FASTWEIGHTS_NATIVE_CPU"] = str(build(binding=True))
native.LARGEST_DIM["cpu"] = native.LARGEST_DIM["cuda"]
native.INTERVALS["cpu"] = native.INTERVALS["cuda"]
