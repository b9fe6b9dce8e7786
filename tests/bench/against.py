"""``python -m tests.bench.against REVISION``: the client's CPU a message, this tree against an older revision.

Both run the same program in turn, round by round, so that a noisy minute hits both alike. Prints a row for each work
and fails if the median of one is above ``MOST`` of what it was.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[2]
ROUND = Path(__file__).with_name("one_round.py")
ROUNDS = 5
MOST = 1.05

Figures = dict[str, list[float]]


def unpacked(revision: str, place: Path) -> Path:
    """The revision's own files, in ``place``."""
    packed = subprocess.run(["git", "archive", revision], cwd=HERE, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(place, filter="data")
    return place


def one_round(tree: Path) -> dict[str, float]:
    # -P: the folder of the program is not on its path, but the tree is, before any installed version.
    command = [sys.executable, "-P", str(ROUND)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, check=True, cwd=tree
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(revision: str, rounds: int = ROUNDS) -> int:
    before, after = Figures(), Figures()
    with tempfile.TemporaryDirectory() as place:
        old = unpacked(revision, Path(place))
        for number in range(rounds):
            for tree, figures in ((old, before), (HERE, after))[:: 1 if number % 2 == 0 else -1]:
                for work, cpu in one_round(tree).items():
                    figures.setdefault(work, []).append(cpu)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    worst = 0.0
    for work in after:
        was, now = statistics.median(before[work]), statistics.median(after[work])
        worst = max(worst, now / was)
        print(f"{work:40} {was:8.1f} -> {now:8.1f} us   {now / was:.3f}")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *(int(word) for word in sys.argv[2:3])))
