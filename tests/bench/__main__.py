"""``python -m tests.bench [suite ...]``: run benchmark suites, print their tables, write docs/performance.md.

Without names all of them run, but for those that take long.
"""

from __future__ import annotations

import asyncio
import sys

from tests.bench import balance, jobs, queue, spark, topics
from tests.bench.report import Section, write

LONG = {"jobs-large": jobs.run_large}
SUITES = {
    "queue": queue.run,
    "topics": topics.run,
    "balance": balance.run,
    "jobs": jobs.run,
    "spark": spark.run,
    **LONG,
}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise SystemExit(f"no such suite: {', '.join(unknown)}; there are: {', '.join(SUITES)}")
    sections: list[Section] = [asyncio.run(SUITES[name]()) for name in names]
    for section in sections:
        print(section.text())
    write(sections)


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in SUITES if name not in LONG])
