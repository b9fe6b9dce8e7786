"""How far a stream is: for each partition of each topic the last entry that was read, as Spark's checkpoint has it.

In JSON: ``{"orders": {"0": ["1700000000000-0", 5]}}``, the last ID and how many entries had ever been added up to
there, or ``null`` where that is not known. The second number tells whether entries were removed unread. A third one,
if there is one, tells with which IDs the tasks of the batch end: so a batch that is repeated has the same tasks,
whatever the options say by then. Earlier versions had one topic, and left out its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from conquiet.kit.entry_ids import BEGINNING

__all__ = ["Mark", "Offset", "Spot", "as_json", "is_of_one_topic", "of_json"]

Spot: TypeAlias = tuple[str, int]
"""A topic and the number of a partition."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one partition is."""

    id: str = BEGINNING
    added: int | None = 0
    cuts: tuple[str, ...] = ()


Offset: TypeAlias = dict[Spot, Mark]


def is_of_one_topic(raw: Mapping[str, Any]) -> bool:
    """Whether an offset is of an earlier version."""
    return any(isinstance(value, list) for value in raw.values())


def of_json(raw: Mapping[str, Any], topic: str) -> Offset:
    """An offset; ``topic`` is the one that an earlier version meant."""
    named = {topic: raw} if is_of_one_topic(raw) else raw
    return {
        (name, int(partition)): Mark(mark[0], mark[1], tuple(mark[2]) if len(mark) > 2 else ())
        for name, marks in named.items()
        for partition, mark in marks.items()
    }


def as_json(offset: Offset) -> dict[str, Any]:
    """The same for Spark."""
    found: dict[str, Any] = {}
    for (topic, partition), mark in sorted(offset.items()):
        cuts = [list(mark.cuts)] if mark.cuts else []
        found.setdefault(topic, {})[str(partition)] = [mark.id, mark.added, *cuts]
    return found
