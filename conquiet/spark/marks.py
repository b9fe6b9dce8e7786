"""From one offset to the next: where a partition begins, how far a batch goes, and what was lost in between."""

from __future__ import annotations

from collections.abc import Mapping

from conquiet.kit.entry_ids import BEGINNING, before, order
from conquiet.spark.bounding import Bounds
from conquiet.spark.cutting import Slice
from conquiet.spark.offsets import Mark, Offset, Spot
from conquiet.spark.options import ReadOptions
from conquiet.spark.reading import Seen, lost
from conquiet.topics.outside import End, Instance, last_up_to, removed_after

__all__ = ["backlog", "beginning", "between", "bounded", "first_of", "left", "whole_of"]

_ALL = 1 << 62


def first_of(end: End) -> Mark:
    """The beginning of what a partition has."""
    return Mark(end.last, end.added) if end.first is None else Mark(before(end.first), end.gone)


async def beginning(instance: Instance, options: ReadOptions, spot: Spot, now: Seen) -> Mark:
    """Where a partition is begun: always a place that it has had, so that what is missing later was lost."""
    (topic, partition), end = spot, now.end
    given = options.since or options.starts.get(topic, {}).get(partition) or options.start
    given = {"earliest": BEGINNING, "latest": end.last}.get(given, given)
    if end.first is None or order(given) >= order(end.last):
        return Mark(end.last, end.added)
    if order(given) < order(end.first):
        return first_of(end)
    return Mark(await last_up_to(instance, now.stream, given) or given, None)


def whole_of(target: Offset | None, seen: Mapping[Spot, Seen], since: Offset) -> Offset:
    """Where everything ends, as far as the query is to read it."""
    whole: Offset = {}
    for spot, now in seen.items():
        mark = Mark(now.end.last, now.end.added) if target is None else target.get(spot)
        reached = since.get(spot)
        if mark is None or (reached is not None and _is_done(reached.id, mark.id, target is not None)):
            mark = reached
        if mark is not None:
            whole[spot] = mark
    return whole


def _is_done(reached: str, end: str, is_fixed: bool) -> bool:
    """Whether nothing is left to read; a query may begin behind an end that was fixed before."""
    # What differs in nothing but a count that was not known is no new batch.
    return reached == end or (is_fixed and order(reached) > order(end))


def backlog(since: Offset, whole: Offset, spot: Spot) -> float:
    """How much is left to read, as far as that is known."""
    start, end = since.get(spot, Mark()), whole[spot]
    count = between(start, end)
    return 0 if start.id == end.id else float("inf") if count is None else count


def between(start: Mark, end: Mark) -> int | None:
    """How many entries are between two places, if that is known."""
    return None if start.added is None or end.added is None else end.added - start.added


async def bounded(
    bounds: Bounds, now: Seen, start: Mark, whole: Mark, limit: int | None, size: int | None
) -> tuple[int, int, Mark]:
    """How many entries and bytes a batch takes of one partition, at most so many, and where it ends there."""
    since, read, end, stream = start.id, start.added, now.end, now.stream
    if since == whole.id or limit == 0:  # what was lost is told once something of it is read
        return 0, 0, start
    if _is_another(end, start):
        since, read = _begin_again(end, since), end.gone
        bounds.forget(stream)
    if read is not None and whole.added is not None:
        if end.gone is not None and end.gone > read:  # entries that were never read
            read = end.gone
            bounds.forget(stream)
        if size is None and limit is not None and whole.added - read <= limit:
            return max(0, whole.added - read), 0, whole
    most = _ALL if limit is None else limit
    count, last, took = await bounds.count(stream, since, whole.id, most, size)
    if last == whole.id:
        return count, took, whole
    if count:
        bounds.look_ahead(stream, last, whole.id, most, size)
    return count, took, Mark(last, None if read is None else read + count)


def left(options: ReadOptions, spot: Spot, now: Seen | None, start: Mark, end: Mark | None) -> Slice | None:
    """What is read of a partition in a batch, if anything; says what was lost of it."""
    if end is not None and end.id == start.id:
        return None
    if end is None or now is None:
        lost(options, spot, None)  # the topic was made again, with fewer partitions
        return None
    since, read = start.id, start.added
    if _is_another(now.end, start):
        lost(options, spot, None)
        since, read = _begin_again(now.end, since), None
    elif order(end.id) < order(since):
        # It began at the latest entry and died in its first batch: Spark does not know any more where that was.
        lost(options, spot, None)
        return None
    elif (gone := removed_after(now.end, since, read)) != 0:
        lost(options, spot, gone)
        read = None
    return Slice(*spot, now.stream, since, end.id, between(Mark(since, read), end))


def _is_another(end: End, start: Mark) -> bool:
    """Whether the partition was made again after it was read up to ``start``, or the server forgot it."""
    fewer = start.added is not None and end.added is not None and end.added < start.added
    return fewer or order(end.last) < order(start.id)


def _begin_again(end: End, since: str) -> str:
    """Where such a partition is begun. IDs tell the time: where they can, all that is new comes after ``since``."""
    return BEGINNING if order(end.last) < order(since) else since
