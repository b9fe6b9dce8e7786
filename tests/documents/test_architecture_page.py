"""The map of the house names what is there: every file, and every function on the ways that it describes."""

from __future__ import annotations

import importlib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "architecture.md").read_text()
STEP: Final = re.compile(r"`(conquiet/[\w/]+\.py)` `([\w.]+)`")
MOST_MODULES: Final = 15
"""How often the way of a message may change module from being taken to being acknowledged."""


def way_of(what: str) -> list[tuple[str, str]]:
    """The steps of a section: file and function."""
    section = PAGE.split(f"## The way of {what}\n")[1].split("\n## ")[0]
    return STEP.findall(section)


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`(conquiet/[\w/]+(?:\.\w+)?/?)`", PAGE))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_function_on_a_way_exists() -> None:
    steps = STEP.findall(PAGE)
    assert steps
    missing = []
    for path, name in steps:
        found: Any = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(f"{path} {name}")
    assert missing == []


def test_a_message_changes_module_few_times_from_take_to_ack() -> None:
    steps = way_of("a message")
    assert len(steps) > 3
    assert sum(before != after for (before, _), (after, _) in pairwise(steps)) <= MOST_MODULES


def test_all_rooms_are_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "conquiet").iterdir() if (path / "__init__.py").exists()}
    assert [room for room in sorted(rooms) if f"`{room}/`" not in PAGE] == []
