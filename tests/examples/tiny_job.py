"""A job of tiny_table.py: VERB ROW OUT. It notes in jobs.txt beside OUT when it begins and ends, and on which GPUs."""

import os
import sys
import time
from pathlib import Path

verb, row, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])


def note(what: str) -> None:
    with (out.parent / "jobs.txt").open("a") as file:
        file.write(f"{what} {verb} {row} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')} {os.getpid()}\n")


note("begin")
while row == "slow" and not (out.parent / "go").exists():
    time.sleep(0.02)
# Where several are to be at work at once, each waits for the others.
for _ in range(6000):
    if (out.parent / "jobs.txt").read_text().count("begin") >= int(os.environ.get("TOGETHER", "1")):
        break
    time.sleep(0.02)
note("end")
if row == "broken":
    sys.exit("what went wrong")
print("x | num. shared model params: 10 (num. trained: 10)\nscore 1.5\nx | done training in 1 seconds")
