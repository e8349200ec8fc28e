"""The emulated kernels, compiled once for a session."""

from __future__ import annotations

import ctypes

import pytest

from tests.cuda.emulated import SHIM, Emulator, build, compiler


@pytest.fixture(scope="session")
def cxx() -> str:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler to compile the CUDA kernels for the host: set CXX, or put g++ on PATH")
    return found


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest, cxx: str) -> Emulator:
    """Optimised for the long form alone, which gets back what a compiler takes for it."""
    return Emulator(build(optimized=any(item.get_closest_marker("emulated") for item in request.session.items)))


@pytest.fixture(scope="session")
def probes(cxx: str) -> ctypes.CDLL:
    """emulation/probes.cu, beside an emulator of its own."""
    return Emulator(build((SHIM / "probes.cu",))).library
