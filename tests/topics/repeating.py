"""What the tests of repeatable writes share: chunks, and what they leave in the stream."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

from conquiet.topics.produce.once import Appended, Appender, Chunk, Write, begin
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from tests.topics.staging import Stage

__all__ = ["BY_ID", "DAY", "HOUR", "ONCE", "append", "by_ids", "chunk", "payloads", "remembered", "rows"]

HOUR: Final = 3_600_000
DAY: Final = 24 * HOUR
ONCE: Final = Write("export")
BY_ID: Final = Write("export", by_id=True)


def chunk(number: int, *payloads: object, partition: int = 0, ids: Sequence[str] = (), key: str | None = None) -> Chunk:
    """Rows that have a payload each, an ID each if ``ids`` are given, and one key for all."""
    made = Chunk(partition, number)
    for at, payload in enumerate(payloads):
        values = [str(payload)]
        kind = 48
        if key is not None:
            values.append(key)
            kind += 1
        if ids:
            values.append(ids[at])
            kind += 4
        made.kinds.append(kind)
        made.values += values
    return made


def by_ids(*ids: str, number: int = 0, partition: int = 0) -> Chunk:
    """Rows whose payloads are their IDs."""
    return chunk(number, *(f'"{id}"' for id in ids), partition=partition, ids=ids)


async def append(instance: Instance, topic: Topic, write: Write, chunks: Iterable[Chunk], part: int = 0) -> Appended:
    """Write one part, as one task does."""
    await begin(instance, topic, write)
    appender = Appender(instance, topic, write, part, random.Random(1))
    try:
        for made in chunks:
            await appender.put(made)
        return await appender.drain()
    finally:
        await appender.aclose()


async def rows(stage: Stage, topic: Topic, partition: int = 0) -> list[dict[str, str]]:
    """What is in a partition, as the fields of its entries."""
    stream = stage.stream(topic, partition)
    found = []
    for _, fields in await stage.call(stream, "XRANGE", stream, "-", "+"):
        words = [word.decode() for word in fields]
        found.append(dict(zip(words[::2], words[1::2], strict=True)))
    return found


async def payloads(stage: Stage, topic: Topic, partition: int = 0) -> list[str]:
    return [row["payload"] for row in await rows(stage, topic, partition)]


async def remembered(stage: Stage, topic: Topic, write: Write, partition: int = 0) -> int:
    """For how many milliseconds a partition knows yet what the batch has written; -2 if it does not."""
    stream = stage.stream(topic, partition)
    return int(
        await stage.call(stream, "PTTL", stage.instance.keys.written(stream, write.known_as(topic), write.batch))
    )
