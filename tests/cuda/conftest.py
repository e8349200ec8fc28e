"""The emulated kernels, compiled once for a session."""

from __future__ import annotations

import pytest
import recorded_passes

from tests.cuda.build import ROOT, SHIM, build, compiler
from tests.cuda.emulated import Emulator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """To compile all kernels takes minutes: `make test-fast` does it only if they are not those that last passed."""
    if recorded_passes.is_recorded("emulated"):
        for item in items:
            if "emulator" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cxx() -> str:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler to compile the CUDA kernels for the host: set CXX, or put g++ on PATH")
    return found


@pytest.fixture(scope="session")
def emulator(cxx: str) -> Emulator:
    return Emulator(build())


@pytest.fixture(scope="session")
def small_emulator(cxx: str) -> Emulator:
    """Kernels that compile in seconds: those of a step, feature maps, gates, convolutions and emulation/probes.cu."""
    names = ("recurrent/step", "features", "gating", "convolution")
    return Emulator(build((*(ROOT / "cuda" / f"{name}.cu" for name in names), SHIM / "probes.cu")))
