"""The page of guarantees names tests that exist, has every room, and agrees with the README."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ROW: Final = re.compile(r"^\|(?!-)(.+)\|$", re.MULTILINE)
NAMED: Final = re.compile(r"`(\w+/test_\w+\.py)(?:::(\w+))?`")
SECTIONS: Final = ("Every room", "Queue", "Topics", "Balanced streams", "Jobs", "Spark", "Bounds")


def rows(section: str) -> list[list[str]]:
    """The cells of each row of a section's table, but for the head."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in row.split(" | ")] for row in ROW.findall(text)][1:]


@cache
def named_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions) and node.name.startswith("test_")}


def test_there_are_tests_to_look_for() -> None:
    assert len(NAMED.findall(PAGE)) > 80


def test_every_test_that_is_named_exists() -> None:
    assert sorted({file for file, _ in NAMED.findall(PAGE) if not (ROOT / "tests" / file).exists()}) == []
    assert sorted(f"{file}::{name}" for file, name in NAMED.findall(PAGE) if name and name not in named_in(file)) == []


@pytest.mark.parametrize("section", SECTIONS)
def test_every_promise_names_a_test(section: str) -> None:
    found = rows(section)
    assert found
    for row in found:
        assert len(row) == 3, row
        assert NAMED.search(row[-1]), row


def test_the_readme_says_the_same_in_short() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("\n## What is guaranteed\n")[1].strip().split("\n\n")[0]
    assert table.startswith("| what happens |")
    assert table in PAGE
