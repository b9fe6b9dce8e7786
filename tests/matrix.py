"""``python -m tests.matrix [server...]``: contracts, boundaries and real processes, on one server after another.

Servers are named as in ``CONQUIET_TEST_SERVERS``; without a name it is every one that can be started here. Prints a
table, and writes it into docs/servers.md if it has all servers and no failure. Other words are for pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.rigs.servers import Rung, every_rung

HERE: Final = Path(__file__).parents[1]
PAGE: Final = HERE / "docs" / "servers.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
HEAD: Final = "| server | version | passed | failed | skipped | minutes |\n|---|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Row:
    """What the suites said of one server."""

    rung: Rung
    counts: Counter[str]
    minutes: float

    @property
    def failed(self) -> int:
        return self.counts["failure"] + self.counts["error"]

    def __str__(self) -> str:
        kind, _, version = self.rung.name.rpartition("-")
        numbers = f"{self.counts['passed']} | {self.failed} | {self.counts['skipped']} | {self.minutes:.0f}"
        return f"| {kind.replace('-', ' ').title()} | {version} | {numbers} |\n"


def suites(alone: list[str]) -> Iterator[list[str]]:
    """The words of each run of pytest: at four, at two, and one after another."""
    boundaries = [str(path.relative_to(HERE)) for path in sorted((HERE / "tests").glob("*/test_boundaries.py"))]
    yield ["--numprocesses=4", "--dist=worksteal", "tests/contracts", *boundaries]
    yield ["--numprocesses=2", "--dist=worksteal", "tests/system", *(f"--ignore={file}" for file in alone)]
    if alone:
        yield alone


def ran_on(rung: Rung, alone: list[str], more: list[str]) -> Row:
    """Run all suites on one server."""
    began, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        for number, words in enumerate(suites(alone)):
            file = Path(place) / f"{number}.xml"
            command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={file}", *words, *more]
            done = subprocess.run(
                command, cwd=HERE, env={**os.environ, "CONQUIET_TEST_SERVERS": rung.name}, check=False
            )
            counts.update(outcomes(file) if file.exists() else ["error"])
            # Beside failed tests there is what keeps pytest from running any.
            counts.update(["error"] if done.returncode not in (0, 1) else [])
    return Row(rung, counts, (time.monotonic() - began) / 60)


def outcomes(file: Path) -> Iterator[str]:
    """``passed``, ``failure``, ``error`` or ``skipped`` for each test."""
    for case in ElementTree.parse(file).iter("testcase"):
        told = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        yield told[0] if told else "passed"


def write(table: str) -> None:
    """Put the table where the page has the one before."""
    before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}{END}{after}")


def main() -> int:
    """Run the suites, and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--alone", action="append", default=[], help="a file that needs the machine for itself")
    arguments, more = parser.parse_known_args()
    names = tuple(arguments.names)
    rungs = [rung for rung in every_rung() if not names or rung.name.startswith(names)]
    rows: list[Row] = []
    for rung in rungs:
        rows.append(ran_on(rung, arguments.alone, more))
        print(HEAD + "".join(map(str, rows)), flush=True)
    if not rows or any(row.failed for row in rows):
        return 1
    if not names and not more:
        write(HEAD + "".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
