"""Ranges of entries as the parts that tasks read: as equal as can be, by the number of their entries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from pyspark.sql.datasource import InputPartition

from conquiet.kit.entry_ids import after, before, order
from conquiet.topics.outside import End, Instance, count_after

__all__ = ["Slice", "by_time", "cuts", "is_before", "pieces", "upper"]

_ALL: Final = 1 << 62


class Slice(InputPartition):
    """Entries of one partition: those after an ID up to another. ``expected`` is how many, if that is known."""

    def __init__(
        self, topic: str, partition: int, stream: str, since: str, until: str, expected: int | None = None
    ) -> None:
        super().__init__((topic, partition, since, until))
        self.topic = topic
        self.partition = partition
        self.stream = stream
        self.since = since
        self.until = until
        self.expected = expected


async def cuts(instance: Instance, slices: Sequence[Slice], tasks: int) -> list[list[str]]:
    """For each slice the IDs with which a part of it ends, the last one apart, so that there are ``tasks`` parts.

    A large slice has more parts than a small one. Redis has no way to find an entry by its number, so all are counted.
    """
    if tasks <= len(slices):
        return [[] for _ in slices]
    sizes = await asyncio.gather(*(_size(instance, part) for part in slices))
    total = max(sum(sizes), 1)
    parts = [max(1, min(size, -(-tasks * size // total))) for size in sizes]
    return await asyncio.gather(*map(_cut, [instance] * len(parts), slices, sizes, parts))


async def _size(instance: Instance, part: Slice) -> int:
    if part.expected is not None:
        return part.expected
    count, _ = await count_after(instance, part.stream, part.since, part.until, _ALL)
    return count


async def _cut(instance: Instance, part: Slice, size: int, parts: int) -> list[str]:
    found: list[str] = []
    since = part.since
    for number in range(1, parts):
        wanted = _share(size, number, parts)
        count, since = await count_after(instance, part.stream, since, part.until, wanted)
        if count < wanted or since == part.until:
            return []  # entries went meanwhile
        found.append(since)
    return found


def _share(size: int, number: int, parts: int) -> int:
    return size * number // parts - size * (number - 1) // parts


def pieces(whole: Slice, found: Sequence[str]) -> list[Slice]:
    """A slice in parts that end with these IDs. Where the whole is known to be, the parts are expected to be equal."""
    inner = [id for id in found if is_before(whole.since, id) and is_before(id, whole.until)]
    bounds, parts = [whole.since, *inner, whole.until], len(inner) + 1
    size = whole.expected if len(inner) == len(found) else None
    return [
        Slice(
            whole.topic, whole.partition, whole.stream, since, until, None if size is None else _share(size, at, parts)
        )
        for at, (since, until) in enumerate(pairwise(bounds), 1)
    ]


def by_time(whole: Slice, end: End, count: int) -> list[Slice]:
    """A slice as up to ``count`` slices of equal lengths of time: as earlier versions cut a batch that is repeated."""
    low = max(order(after(whole.since))[0], order(end.first or "0-0")[0])
    high = order(whole.until)[0]
    count = min(count, high - low + 1)
    if count <= 1:
        return [whole]
    found = [before(f"{low + (high - low + 1) * step // count}-0") for step in range(1, count)]
    return pieces(Slice(whole.topic, whole.partition, whole.stream, whole.since, whole.until), found)


def upper(id: str) -> tuple[int, float]:
    """The order of an ID up to which entries are read; without its second number it means all of a millisecond."""
    ms, seq = order(id)
    return (ms, seq if "-" in id else float("inf"))


def is_before(one: str, other: str) -> bool:
    """Whether there can be entries after ``one`` up to ``other``."""
    return order(one) < upper(other)
