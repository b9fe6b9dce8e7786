"""Writing to a partition: typed calls of the scripts that append messages, hold them back, and append rows once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from conquiet.errors import TopicFullError
from conquiet.topics.format import envelope
from conquiet.topics.server.instance import Site
from conquiet.topics.server.topics import Topic
from conquiet.wire.scripts import Call, Script

__all__ = ["Rows", "Window", "append", "append_rows", "begin", "delay", "forget", "full"]

_DAY_MS: Final = 86_400_000
_REPEATABLE_MS: Final = 7 * _DAY_MS
_REMEMBERED_MS: Final = 8 * _DAY_MS
"""Longer than a batch can be repeated: what is remembered never runs out before that does."""
_AFTER_NEXT_MS: Final = 3_600_000
"""How long the batch before is remembered: a task of it that was given up may write on for a while."""

_APPEND: Final = Script.named("append")
_DELAY: Final = Script.named("delay")
_ROWS: Final = Script.named("append_rows")
_BEGIN: Final = Script.named("write_begin")


def full(topic: Topic, partition: int, holds: str) -> TopicFullError:
    """The error of a partition that ``holds`` as much as it may."""
    return TopicFullError(f"partition {partition} of topic {topic.name!r} holds {holds}")


def _bound(topic: Topic) -> tuple[int, str]:
    """How many entries a partition holds at most, or -1, and what happens then."""
    kept = topic.retention
    return (-1 if kept.max_len is None or kept.on_full == "grow" else kept.max_len), kept.on_full


@dataclass(frozen=True, slots=True)
class Window:
    """For how many milliseconds, and for how many messages, a message ID is remembered."""

    ms: int
    size: int


def append(
    site: Site, topic: Topic, stream: str, message_id: str | None, window: Window, fields: Sequence[bytes | str | int]
) -> Call:
    """Append an entry unless its message ID is known or the partition is full.

    Replies ``OK`` with its ID and how many unfinished entries were dropped, ``AGAIN`` with the first ID, or ``FULL``.
    """
    keys = site.keys
    names = [stream, keys.dedup(stream), keys.dedup_ids(stream), keys.trim(stream)]
    return _APPEND(names, site.clock.offset_ms, message_id or "", window.ms, window.size, *_bound(topic), *fields)


async def delay(
    site: Site,
    stream: str,
    ms: int,
    item: str,
    message_id: str | None,
    window: Window,
    fields: Sequence[bytes | str | int],
) -> tuple[bool, str]:
    """Hold an entry back; whether it is new, and what it is known by."""
    keys = site.keys
    names = [keys.delayed(stream), keys.delayed_items(stream), keys.dedup(stream), keys.dedup_ids(stream)]
    terms = (site.clock.offset_ms, ms, item, message_id or "", window.ms, window.size)
    status, id = await site.run(stream, _DELAY(names, *terms, *fields))
    return status != b"AGAIN", id.decode()


# --- once -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for one partition. ``place`` is what they are known by as a whole, or ``""`` if each has an ID."""

    partition: int
    place: str
    digest: bytes
    kinds: bytes
    """A digit a row: what it has, as :mod:`conquiet.topics.format.envelope` numbers it."""
    packed: bytes


def append_rows(site: Site, topic: Topic, name: str, batch: int, rows: Rows, forgets: bool) -> Call:
    """Append rows, unless they are there: ``OK``, ``AGAIN`` or ``DIFFERS`` with how many rows were appended and how
    many unfinished entries were dropped, or ``FULL``.

    ``forgets``: what the batch before has written is remembered for an hour only.
    """
    stream = topic.stream(site.keys, rows.partition)
    written = site.keys.written
    return _ROWS(
        [stream, written(stream, name, batch), written(stream, name, batch - 1), site.keys.trim(stream)],
        site.clock.offset_ms,
        rows.place,
        rows.digest,
        _REMEMBERED_MS,
        _AFTER_NEXT_MS if forgets else "",
        *_bound(topic),
        envelope.now_ms(),
        rows.kinds,
        rows.packed,
    )


async def begin(site: Site, topic: Topic, name: str, batch: int, *, by_id: bool, goes_on: bool) -> tuple[bytes, bytes]:
    """Begin a batch of a write, or join it: ``OK`` and its number of partitions, or why it cannot be written."""
    key = site.keys.write(topic.name, name)
    until, known_by = "" if goes_on else _REMEMBERED_MS, "ids" if by_id else "order"
    call = _BEGIN([key], site.clock.offset_ms, batch, topic.partitions, _REPEATABLE_MS, until, known_by)
    return cast("tuple[bytes, bytes]", await site.run(key, call))


async def forget(site: Site, topic: Topic, name: str, batch: int, partitions: int) -> None:
    """Remember a batch of a write for an hour only."""
    streams = (topic.stream(site.keys, partition) for partition in range(partitions))
    for key in (*(site.keys.written(stream, name, batch) for stream in streams), site.keys.write(topic.name, name)):
        await site.ask("PEXPIRE", key, _AFTER_NEXT_MS)
