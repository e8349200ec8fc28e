"""Modules that the programs of this folder share."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A clone can be measured without being installed; tables and figures are those of the examples.
for folder in (ROOT, ROOT / "examples"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
