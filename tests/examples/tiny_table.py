"""examples/reproduce.py with tables whose rows take no time.

`tiny_table.py job VERB ROW OUT` is a row's program. It notes in jobs.txt beside OUT when it begins and ends, and on
which GPUs. One of the row "broken" fails; one of "slow" waits until a file "go" is beside OUT.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace


def job(verb: str, row: str, folder: Path) -> None:
    def note(what: str) -> None:
        with (folder / "jobs.txt").open("a") as file:
            file.write(f"{what} {verb} {row} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')} {os.getpid()}\n")

    note("begin")
    # Where several are to be at work at once, each waits for the others.
    together = int(os.environ.get("TOGETHER", "1"))
    for _ in range(6000):
        begun = (folder / "jobs.txt").read_text().count("begin")
        if begun >= together and (row != "slow" or (folder / "go").exists()):
            break
        time.sleep(0.02)
    note("end")
    if row == "broken":
        sys.exit("what went wrong")
    print("x | num. shared model params: 10 (num. trained: 10)\nscore 1.5\nx | done training in 1 seconds")


if sys.argv[1:2] == ["job"]:
    job(*sys.argv[2:4], Path(sys.argv[4]).parent)
    sys.exit()

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import reproduce  # noqa: E402
from common import steps  # noqa: E402
from papers import grid, row_runner  # noqa: E402
from papers.rows import Call, Row, Table  # noqa: E402

JOB = [sys.executable, "-S", __file__, "job"]
RECIPE = SimpleNamespace(
    sources=False,
    training=lambda row, places, options, env: Call([*JOB, "train", row, str(places.out), *options]),
    evaluations=lambda places, options, env: [
        Call([*JOB, "score", places.out.name.rpartition("-")[0], str(places.out), *options], title="test")
    ],
    scores=lambda call, places, log: {"test": float(log.split("score ")[1].split()[0])},
    check=lambda verb, places, env: None,
    finish=lambda places: None,
)


def table(*names):
    return Table("tiny", "gpt2", ("test",), {name: Row(name, RECIPE, name, ("1",)) for name in names})


def register(tables, gpus=()):
    """Adds them to the command's, on a machine with these GPUs; what it looks at now and then it looks at often."""
    tables |= {"tiny": table(*"abcde"), "failing": table("broken", "a", "b"), "long": table("slow", "a", "b")}
    steps.Runner.pause, row_runner.ASKED = 0.02, 0.1
    grid.visible = lambda: list(gpus)


if __name__ == "__main__":
    register(reproduce.ALL)
    sys.exit(reproduce.main())
