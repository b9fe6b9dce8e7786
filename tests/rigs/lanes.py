"""Which part of the tests runs: all of it, or a lane of those that tell soon.

``CONQUIET_TEST_LANE`` names the lane. In each lane a test runs on the newest server and through the core alone.

- ``guarantees``: what is marked ``guarantee``.
- ``quick``: everything but what is marked ``slow``, needs a Cluster, PostgreSQL or Spark, starts processes of the whole
  system, or runs the pages of the documentation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

import pytest

__all__ = ["IS_NARROW", "LANE", "chosen", "is_left_out", "is_of_lane"]

_T = TypeVar("_T")

LANE: Final = os.environ.get("CONQUIET_TEST_LANE", "")
"""The lane that was asked for; empty for all tests."""
if LANE not in ("", "guarantees", "quick"):
    raise pytest.UsageError(f"CONQUIET_TEST_LANE must be guarantees or quick, not {LANE!r}")
IS_NARROW: Final = LANE != ""
"""Whether one server and one flavour are enough."""

_OTHER_ROOMS: Final = frozenset({"bench", "documents", "spark", "system", "typing"})
_OTHER_SERVERS: Final = frozenset({"cluster", "clustered", "pg", "postgres", "sentinels"})
_FAULTS: Final = re.compile(r"test_(boundaries|calls|cancelled_\w+|full_memory\w*|lost_writes_\w+)")
"""Every fault at every step: what ``nox -s system`` runs at full size."""
_MACHINES: Final = re.compile(r"test_\w+_machine")
"""Random walks that are compared with a model."""
_SLOW: Final = re.compile(r"^pytestmark = (?:.*|\[[^\]]*)\bmark\.slow\b", re.MULTILINE)


def is_left_out(path: Path) -> bool:
    """Whether no test of this file or folder is of the lane: then it is not even imported."""
    if not IS_NARROW:
        return False
    if path.is_dir():
        return LANE == "quick" and path.name in _OTHER_ROOMS
    if not path.name.startswith("test_"):
        return False
    text = path.read_text(encoding="utf-8")
    if LANE == "guarantees":
        return "mark.guarantee" not in text
    is_long = _FAULTS.fullmatch(path.stem) is not None or _MACHINES.fullmatch(path.stem) is not None
    return is_long or _SLOW.search(text) is not None


def chosen(parameters: Iterable[_T]) -> list[_T]:
    """Those that the lane has. What would only be left out is not even made: to make tests is most of collecting."""
    left_out = {"sync", "postgres"} if LANE == "quick" else {"sync"} if IS_NARROW else set[str]()
    return [one for one in parameters if one not in left_out]


def is_of_lane(item: pytest.Item) -> bool:
    """Whether this test is of the lane."""
    if not IS_NARROW:
        return True
    parameters = _parameters(item)
    if "sync" in parameters:
        return False
    if LANE == "guarantees":
        return item.get_closest_marker("guarantee") is not None
    needed = set(item.fixturenames) if isinstance(item, pytest.Function) else set[str]()
    return item.get_closest_marker("slow") is None and "postgres" not in parameters and not needed & _OTHER_SERVERS


def _parameters(item: pytest.Item) -> list[object]:
    return (
        list(item.callspec.params.values()) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
    )
