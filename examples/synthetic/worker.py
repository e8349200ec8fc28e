"""A process that trains points: it reads them from its input, a line each, and writes how far it is and the results.

Its output has JSON lines: {"step": ..., "loss": ...} for each evaluation, {"result": {...}} for a finished point. It
ends with its input. Should whoever reads its output be gone, it ends at the next evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the packages in it
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the plugin

import torch

from synthetic.training import Point, round_off, train_point


def main() -> int:
    torch.set_num_threads(1)
    for line in sys.stdin:
        point = Point(**json.loads(line))
        result = train_point(point, lambda step, loss: write({"step": step, "loss": round_off(loss)}))
        write({"result": result})
    return 0


def write(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
