"""Questions about batches that need not wait for a GPU, with the fairseq that `tools/build_fairseq.py` builds."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

if find_spec("fairseq.host_copies") is not None:
    from fairseq.host_copies import contains as contains
    from fairseq.host_copies import on_host as on_host
else:  # another fairseq, whose batches do not remember where they came from

    def on_host(x: Tensor) -> Tensor:
        """The numbers of `x` on the CPU."""
        return x.cpu()

    def contains(x: Tensor, number: int) -> bool:
        """True if `number` is among the numbers of `x`."""
        return bool(x.eq(number).any())
