"""The peer `causal_product` of pytorch-fast-transformers 0.4.0: the sum rule on the CPU, one step at a time.

It is optional. build_causal_product.py puts it into a folder of its own, compiled for this machine; an installed
package is found as well, but nobody knows what flags it was compiled with. The kernel takes float32 in the layout
(batch, heads, time, dim), which is the one that it gets: no transposition is timed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness import ROOT
from harness.cases import Inputs, Shape
from harness.contestants import Contestant, Unavailable, Unsuitable, Work, leaf

PACKAGE = "pytorch-fast-transformers"
VERSION = "0.4.0"
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp")
BUILD_RECORD = "BUILD.json"
DEFAULT_FOLDER = ROOT / "build" / "peers"
NAME = "causal_product"


def build_record() -> dict[str, Any] | None:
    """How the kernel was compiled; None if it was not by build_causal_product.py, or is not there."""
    try:
        import fast_transformers
    except ImportError:
        return None
    path = Path(fast_transformers.__file__).parent / BUILD_RECORD
    return json.loads(path.read_text()) if path.exists() else None


def contestants(folder: Path) -> list[Contestant]:
    """The peer, looked for in `folder` and then among the installed packages."""
    if (folder / "fast_transformers").is_dir() and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return [Contestant(NAME, "sum", _prepare)]


def _prepare(shape: Shape, inputs: Inputs) -> Work:
    if inputs.v.dtype != torch.float32 or shape.steps:  # it has no other dtype and no state to start from
        raise Unsuitable
    try:
        from fast_transformers.causal_product import causal_dot_product
    except ImportError as error:
        raise Unavailable(f"{error}; benchmarks/build_causal_product.py builds it") from error
    q, k, v = (leaf(x.transpose(1, 2)) for x in (inputs.q, inputs.k, inputs.v))
    return Work(
        forward=lambda: causal_dot_product(q, k, v),
        inputs=[q, k, v],
        d_out=inputs.d_out.transpose(1, 2).contiguous(),
        as_reference=lambda out: out.transpose(1, 2),
    )
