"""A group's pending entries over all partitions of a topic, page by page."""

from __future__ import annotations

import asyncio
import datetime as dt
from dataclasses import dataclass
from typing import Final

from conquiet.errors import ConfigError
from conquiet.kit import rules
from conquiet.kit.entry_ids import checked, moment, order
from conquiet.message import EntryId
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Script

__all__ = ["PendingEntry", "PendingPage", "pending_page"]

_PAGE: Final = Script.named("pending_page")
_ROWS: Final = 500
"""Rows that a script looks up before others get their turn."""


@dataclass(frozen=True, slots=True)
class PendingEntry:
    """An entry that was delivered to a group and is not finished.

    ``idle`` is the time in seconds since it was delivered, or taken over, last. ``parked_until`` is when its retry
    is due; ``failures`` and ``crashes`` are how often it failed, and how often its consumer died over it.
    """

    id: EntryId
    partition: int
    consumer: str
    consumer_id: str
    idle: float
    deliveries: int
    failures: int
    crashes: int
    parked_until: dt.datetime | None
    first_failed_at: dt.datetime | None
    last_failed_at: dt.datetime | None
    error_type: str | None


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Pending entries in the order of their IDs; with ``cursor`` the next page, ``None`` at the end."""

    entries: tuple[PendingEntry, ...]
    cursor: str | None


async def pending_page(
    instance: Instance, topic: Topic, group: str, count: int = 100, cursor: str | None = None
) -> PendingPage:
    """Up to ``count`` pending entries of ``group`` that come after ``cursor``, which only names a place.

    So it stays good whatever is acknowledged, delivered or added meanwhile: an entry that is pending all the time
    is on exactly one page.
    """
    rules.integer("count", count, least=1)
    starts = _starts(topic, cursor)
    pages = await asyncio.gather(
        *(_partition(instance, topic, group, at, start, count) for at, start in enumerate(starts))
    )
    merged = sorted((entry for page in pages for entry in page), key=lambda one: (order(one.id), one.partition))
    entries = tuple(merged[:count])
    last = entries[-1] if len(entries) == count else None
    return PendingPage(entries, None if last is None else f"{last.id}/{last.partition}")


def _starts(topic: Topic, cursor: str | None) -> list[str]:
    """Where each partition's page begins: entries of equal IDs are in the order of their partitions."""
    if cursor is None:
        return ["-"] * topic.partitions
    id, slash, index = cursor.partition("/") if isinstance(cursor, str) else ("", "", "")
    if not slash or not index.isascii() or not index.isdigit():
        raise ConfigError(f"cursor must come from a page before, not be {cursor!r}")
    id = checked("cursor", id)
    return [f"({id}" if partition <= int(index) else id for partition in range(topic.partitions)]


async def _partition(
    instance: Instance, topic: Topic, group: str, partition: int, start: str, count: int
) -> list[PendingEntry]:
    stream = topic.stream(instance.keys, partition)
    keys = [stream, instance.keys.retry(stream, group), instance.keys.attempts(stream, group)]
    found: list[PendingEntry] = []
    while len(found) < count:
        size = min(count - len(found), _ROWS)
        rows = await instance.run(stream, _PAGE(keys, group, start, size))
        found += [_entry(partition, row) for row in rows]
        if len(rows) < size:
            break
        start = f"({found[-1].id}"
    return found


def _entry(partition: int, row: Reply) -> PendingEntry:
    id, consumer, idle, deliveries, parked, record, crashes = row
    failures, first, last, kind, *_ = (record.decode(errors="replace") or "0||||").split("|", 4)
    owner = consumer.decode(errors="replace")
    return PendingEntry(
        EntryId(id.decode(), partition),
        partition,
        owner.partition("#")[0],
        owner,
        idle / 1000,
        deliveries,
        int(failures),
        int(crashes),
        moment(int(float(parked))) if parked else None,
        moment(first) if first else None,
        moment(last) if last else None,
        kind or None,
    )
