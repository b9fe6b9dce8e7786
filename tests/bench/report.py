"""Rows, ratios and the page that shows them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


@dataclass(frozen=True)
class Row:
    """One kind of work, measured."""

    work: str
    rate: float
    cpu_us: float | None = None
    """Client CPU a message."""
    base: str = ""
    ratio: float | None = None
    goal: float | None = None

    def cells(self) -> list[str]:
        goal = "" if self.goal is None else f"≥ {self.goal:g}"
        verdict = "" if self.goal is None or self.ratio is None else ("yes" if self.ratio >= self.goal else "**no**")
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        cpu = "" if self.cpu_us is None else f"{self.cpu_us:.1f}"
        return [self.work, f"{self.rate:,.0f}", cpu, self.base, ratio, goal, verdict]


@dataclass(frozen=True)
class Section:
    """A suite's table."""

    name: str
    server: str
    rows: list[Row]
    note: str = ""

    def text(self) -> str:
        head = ["work", "messages/s", "client CPU µs/message", "compared to", "ratio", "goal", "met"]
        lines = [f"## {self.name}", "", f"Redis {self.server}, {_client()}.", ""]
        lines += [_row(head), _row(["---"] * len(head)), *(_row(row.cells()) for row in self.rows), ""]
        lines += [self.note, ""] if self.note else []
        return "\n".join(lines)


def _client() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("redis", "hiredis", "orjson", "msgspec"))
    return f"Python {platform.python_version()}, {packages}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write(sections: list[Section]) -> None:
    """Put each section in the page, in place of its last run."""
    text = PAGE.read_text(encoding="utf-8")
    for section in sections:
        before, _, rest = text.partition(f"<!-- {section.name} -->\n")
        _, _, after = rest.partition("<!-- end -->")
        text = f"{before}<!-- {section.name} -->\n{section.text()}<!-- end -->{after}"
    PAGE.write_text(text, encoding="utf-8")
