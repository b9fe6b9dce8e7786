"""docs/conformance.md, made from the tests: ``python -m tests.documents.conformance`` writes it.

A test that holds a rule says so in its docstring, ``spec 1 §5.4: the rule, in words``.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"

HEAD = """# Conformance

The queue implements two specifications: 1, the Redis Streams queue (`RedisStreamsQueue`, `QueueConsumer` in outline),
and 2, the queue consumer (`QueueConsumer` in full). These are their rules and the tests that hold them, on every server
that the tests find, for the async core and again through `conquiet.sync`. The page is made from the tests by
`python -m tests.documents.conformance`; a test fails when it is out of date.
"""
TITLES = {"1": "1 Redis Streams queue", "2": "2 Queue consumer"}
RULE = re.compile(r"spec (\d) ((?:§[\d.]+(?:, )?)+): (.+?)(?=(?: spec \d §)|$)")


def rules() -> dict[str, list[tuple[str, str, str]]]:
    """For each specification: section, rule in words, and where its test is."""
    found: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                words = " ".join((ast.get_docstring(node) or "").split())
                for spec, sections, rule in RULE.findall(words):
                    where = f"`{path.relative_to(ROOT / 'tests')}::{node.name}`"
                    found[spec].append((sections, rule.strip(" ;"), where))
    return found


def order(section: str) -> list[int]:
    return [int(number) for number in section.split(", ")[0].strip("§.").split(".")]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def page() -> str:
    parts = [HEAD]
    for spec, rows in sorted(rules().items()):
        parts.append(f"## {TITLES[spec]}\n\n| section | rule | test |\n|---|---|---|")
        ordered = sorted(rows, key=lambda row: (order(row[0]), row[2]))
        parts[-1] += "".join(f"\n| {sections} | {_cell(rule)} | {where} |" for sections, rule, where in ordered) + "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
