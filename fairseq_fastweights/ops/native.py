"""The compiled kernels as torch operators. They are not built yet: asking for them raises, saying so."""

from __future__ import annotations


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot do this, here; no other is taken in its place."""


def require() -> None:
    """Raises `BackendUnavailable`: this version of the package has no compiled kernels."""
    raise BackendUnavailable(
        "backend='native' was asked for, but this version of fairseq_fastweights has no compiled kernels; "
        "use backend='chunkwise' (which 'auto' takes) or 'reference'"
    )
