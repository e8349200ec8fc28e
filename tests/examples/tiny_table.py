"""examples/reproduce.py with tables whose rows take no time (tiny_job.py).

A job of the row "broken" fails; one of "slow" waits until a file "go" is in OUT.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import reproduce
from common import steps
from papers import grid, row_runner
from papers.rows import Call, Row, Table

JOB = [sys.executable, "-S", str(Path(__file__).with_name("tiny_job.py"))]


class Recipe:
    sources = False

    def training(self, row, places, options, env):
        return Call([*JOB, "train", row, str(places.out), *options])

    def evaluations(self, places, options, env):
        name = places.out.name.rpartition("-")[0]
        return [Call([*JOB, "score", name, str(places.out), *options], title="test")]

    def scores(self, call, places, log):
        return {"test": float(log.split("score ")[1].split()[0])}

    def check(self, verb, places, env):
        pass

    def finish(self, places):
        pass


def table(*names):
    return Table("tiny", "gpt2", ("test",), {name: Row(name, Recipe(), name, ("1",)) for name in names})


def register(tables, gpus=()):
    """Adds them to the command's, on a machine with these GPUs; what it looks at now and then it looks at often."""
    tables |= {"tiny": table(*"abcde"), "failing": table("broken", "a", "b")}
    tables["long"] = table("slow", "a", "b")
    steps.Runner.pause, row_runner.ASKED = 0.02, 0.1
    grid.visible = lambda: list(gpus)


if __name__ == "__main__":
    register(reproduce.ALL)
    sys.exit(reproduce.main())
