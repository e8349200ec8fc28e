"""examples/reproduce.py with tables whose rows take no time.

A row's program notes in jobs.txt beside OUT when it begins and ends, and on which GPUs. One of the row "broken" fails;
one of "slow" waits until a file "go" is beside OUT. Where TOGETHER are to be at work at once, each waits for others.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import reproduce
from common import steps
from papers import grid
from papers.rows import Row, Scoring, Table

PROGRAM = """verb=$1 row=$2 folder=${3%/*}
note() { echo "$1 $verb $row ${CUDA_VISIBLE_DEVICES:--} $$" >> "$folder/jobs.txt"; }
note begin
for _ in {1..6000}; do
    if [ "$(grep -c begin "$folder/jobs.txt")" -ge "${TOGETHER:-1}" ]; then
        [ "$row" = slow ] && [ ! -e "$folder/go" ] || break
    fi
    sleep 0.02
done
note end
[ "$row" != broken ] || { echo "what went wrong"; exit 1; }
printf "x | num. shared model params: 10 (num. trained: 10)\\nscore 1.5\\nx | done training in 1 seconds\\n"
"""
JOB = ["bash", "-c", PROGRAM, "job"]
RECIPE = SimpleNamespace(
    sources=False,
    training=lambda row, places, options, env: [*JOB, "train", row, str(places.out), *options],
    evaluations=lambda places, options, env: [
        Scoring([*JOB, "score", places.out.name[:-2], str(places.out), *options], "test", "test", places.out, [])
    ],
    scores=lambda title, places, log: {"test": float(log.split("score ")[1].split()[0])},
    check=lambda verb, places, env: None,
    finish=lambda places: None,
)


def table(*names):
    return Table("tiny", "gpt2", ("test",), {name: Row(name, RECIPE, name, ("1",)) for name in names})


TABLES = {"tiny": table(*"abcde"), "failing": table("broken", "a", "b"), "long": table("slow", "a", "b")}

if __name__ == "__main__":
    reproduce.ALL |= TABLES
    steps.Runner.pause, steps.Runner.asks = 0.02, 0.1
    grid.visible = list
    sys.exit(reproduce.main())
