"""``python -m tests.bench [suite ...]``: run benchmark suites, print their tables, write docs/performance.md."""

from __future__ import annotations

import asyncio
import sys

from tests.bench import queue, topics
from tests.bench.report import Section, write

SUITES = {"queue": queue.run, "topics": topics.run}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise SystemExit(f"no such suite: {', '.join(unknown)}; there are: {', '.join(SUITES)}")
    sections: list[Section] = [asyncio.run(SUITES[name]()) for name in names]
    for section in sections:
        print(section.text())
    write(sections)


if __name__ == "__main__":
    main(sys.argv[1:] or list(SUITES))
