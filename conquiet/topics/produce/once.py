"""Writes that may be repeated: a batch of rows in several parts, each part's chunks appended once however often sent.

A write has a name that its repetitions share, and numbered batches. The part of a batch that one task writes is cut
into chunks by its rows alone, so a repetition with the same rows in the same order makes the same chunks, and each is
appended only if its place is free. Rows with IDs need no order: each ID is appended once a batch, whichever part it
comes with. A batch can be repeated until the next one begins, for up to a week; after that it is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from conquiet.errors import ConfigError, QueueError, TopicFullError
from conquiet.kit.retrying import patiently
from conquiet.kit.service import Background
from conquiet.metrics import producer_metrics
from conquiet.topics.server import retention
from conquiet.topics.server.instance import Site
from conquiet.topics.server.topics import Topic
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script
from conquiet.wire.streams import pack

__all__ = ["CHUNK", "CHUNK_BYTES", "Appended", "Appender", "Chunk", "Write", "begin", "forget"]

_log = logging.getLogger("conquiet.topics")

CHUNK: Final = 500
"""Rows of a chunk: one call holds the server for about a millisecond."""
CHUNK_BYTES: Final = 1 << 20
_DAY_MS: Final = 86_400_000
_REPEATABLE_MS: Final = 7 * _DAY_MS
_REMEMBERED_MS: Final = 8 * _DAY_MS
"""Longer than a batch can be repeated: what is remembered never runs out before that does."""
_AFTER_NEXT_MS: Final = 3_600_000
"""How long the batch before is remembered: a task of it that was given up may write on for a while."""
_AHEAD: Final = 4
"""Chunks of one partition that wait while another is on its way."""
_TRIM_EVERY: Final = 5_000

_pack: Final = msgspec.msgpack.Encoder().encode

_BEGIN: Final = Script.named("write_begin")
_APPEND: Final = Script.named("append_rows")


@dataclass(frozen=True, slots=True)
class Write:
    """One batch of a write. ``goes_on`` says that batches follow; ``by_id`` that rows are known by their IDs."""

    name: str
    batch: int = 0
    by_id: bool = False
    goes_on: bool = False

    def known_as(self, topic: Topic) -> str:
        """Its name in the keys of ``topic``; another one if that is deleted and made again, for then it is empty."""
        return f"{self.name}@{topic.created_ms}"


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of rows: how many were appended now, and how many had been by an earlier try."""

    rows: int = 0
    repeated: int = 0
    differing: int = 0
    """Of ``rows``, those of chunks that came at the same place with other rows before: some are there twice."""

    def __add__(self, other: Appended) -> Appended:
        return Appended(self.rows + other.rows, self.repeated + other.repeated, self.differing + other.differing)


@dataclass(slots=True)
class Chunk:
    """Rows for one partition, in order: for each a digit that tells what it has, and its values."""

    partition: int
    number: int
    """Its place among the chunks of the same part and partition."""
    kinds: bytearray = field(default_factory=bytearray)
    values: list[str] = field(default_factory=list[str])
    size: int = 0

    def packed(self) -> tuple[bytes, bytes]:
        """The values as one, in MessagePack, and a digest, which is the same for the same rows only."""
        packed = _pack(self.values)
        return packed, hashlib.blake2b(self.kinds + b" " + packed, digest_size=12).digest()


async def begin(site: Site, topic: Topic, write: Write) -> int:
    """Begin a batch, or join it; with how many partitions, which is what whoever began it found."""
    key, clock = site.keys.write(topic.name, write.known_as(topic)), site.clock
    until = "" if write.goes_on else _REMEMBERED_MS
    by = "ids" if write.by_id else "order"
    call = _BEGIN([key], clock.offset_ms, write.batch, topic.partitions, _REPEATABLE_MS, until, by)
    status, about = await site.run(key, call)
    which = f"batch {write.batch} of the write {write.name!r} to topic {topic.name!r}"
    if status == b"EXPIRED":
        raise ConfigError(f"{which} was begun more than 7 days ago: what it wrote is not remembered any more")
    if status == b"OVERTAKEN":
        raise ConfigError(f"{which} cannot be repeated: batch {about.decode()} has begun since")
    if status == b"OTHERWISE":
        how = "without IDs, and cannot be repeated with" if write.by_id else "with IDs, and cannot be repeated without"
        raise ConfigError(f"{which} was begun {how} them")
    return int(about)


async def forget(site: Site, topic: Topic, write: Write, partitions: int) -> None:
    """The write is done and will not be repeated: remember it for an hour only, for tasks that write on."""
    for partition in range(partitions):
        stream = topic.stream(site.keys, partition)
        key = site.keys.written(stream, write.known_as(topic), write.batch)
        await site.link.call(stream, _expire(key))
    key = site.keys.write(topic.name, write.known_as(topic))
    await site.link.call(key, _expire(key))


class Appender:
    """Sends the chunks of one part. Chunks of a partition go one after the other, partitions side by side.

    A chunk whose answer was lost is sent again, for about ten seconds: that is harmless, since it is appended once.
    """

    def __init__(self, site: Site, topic: Topic, write: Write, part: int, chance: random.Random | None = None) -> None:
        self._site = site
        self._topic = topic
        self._write = write
        self._part = part
        self._metrics = producer_metrics(topic.name)
        self._waiting: dict[int, deque[Chunk]] = {}
        self._background = Background()
        self._changed = asyncio.Event()
        self._busy = 0
        self._failure: Exception | None = None
        self._since_trim: dict[int, int] = {}
        self._chance = random.Random() if chance is None else chance
        self.total = Appended()

    async def put(self, chunk: Chunk) -> None:
        """Send a chunk after those that were put before; returns while it is on its way."""
        waiting = self._waiting.get(chunk.partition)
        while waiting is not None and len(waiting) >= _AHEAD:
            await self._change()
        self._check()
        if waiting is None:
            waiting = self._waiting[chunk.partition] = deque()
        waiting.append(chunk)
        if len(waiting) == 1:
            self._busy += 1
            self._background.start(self._run(waiting), "append")

    async def drain(self) -> Appended:
        """Return once all is written."""
        while self._busy:
            await self._change()
        self._check()
        return self.total

    async def aclose(self) -> None:
        """Give up what is not written yet."""
        await self._background.aclose()

    async def _change(self) -> None:
        self._check()
        self._changed.clear()
        await self._changed.wait()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _run(self, waiting: deque[Chunk]) -> None:
        try:
            while waiting:
                done = await self._append(waiting[0])
                self.total += done
                waiting.popleft()
                self._changed.set()
        except Exception as error:
            self._failure = error
        finally:
            self._busy -= 1
            self._changed.set()

    async def _append(self, chunk: Chunk) -> Appended:
        stream, call = self._call(chunk)
        status, count, *more = await self._sent(chunk, stream, call)
        kept = self._topic.retention
        while status == b"FULL" and more[0]:  # what is finished makes room step by step
            status, count, *more = await self._sent(chunk, stream, call)
        if status == b"FULL" and await retention.make_room(self._site, self._topic, chunk.partition, len(chunk.kinds)):
            status, count, *more = await self._sent(chunk, stream, call)
        if status == b"FULL":
            where = f"partition {chunk.partition} of topic {self._topic.name!r}"
            holds = f"holds {count} unfinished entries of {kept.max_len} that it may"
            raise TopicFullError(f"{where} {holds}: {len(chunk.kinds)} more do not fit")
        return await self._appended(chunk, status, count, more)

    async def _sent(self, chunk: Chunk, stream: str, call: Call) -> list[Reply]:
        again = partial(_log.warning, "topic %r, partition %d: sent again: %s", self._topic.name, chunk.partition)
        reply: list[Reply] = await patiently(self._site.clock, partial(self._site.run, stream, call), again)
        return reply

    async def _appended(self, chunk: Chunk, status: bytes, count: int, more: list[Reply]) -> Appended:
        rows = len(chunk.kinds)
        if count:
            self._metrics.produced(chunk.partition, count)
        if more[0]:
            self._metrics.dropped(chunk.partition, more[0])
        if count and self._topic.retention.trims:
            await self._trim(chunk.partition, count)
        return Appended(count, rows - count, count if status == b"DIFFERS" else 0)

    async def _trim(self, partition: int, count: int) -> None:
        since = self._since_trim.get(partition)
        if since is None:
            # Parts may be small and many: each begins anywhere, and together they trim as often as one would.
            since = self._chance.randrange(_TRIM_EVERY)
        since += count
        self._since_trim[partition] = since % _TRIM_EVERY
        if since >= _TRIM_EVERY:
            try:
                await retention.trim(self._site, self._topic, partition)
            except QueueError as error:  # the rows are written all the same
                _log.warning("topic %r, partition %d: could not trim: %s", self._topic.name, partition, error)

    def _call(self, chunk: Chunk) -> tuple[str, Call]:
        keys, write, kept = self._site.keys, self._write, self._topic.retention
        stream = self._topic.stream(keys, chunk.partition)
        name = write.known_as(self._topic)
        before = keys.written(stream, name, write.batch - 1)
        values, digest = chunk.packed()
        most = kept.max_len if kept.max_len is not None and kept.on_full != "grow" else -1
        return stream, _APPEND(
            [stream, keys.written(stream, name, write.batch), before, keys.trim(stream)],
            self._site.clock.offset_ms,
            "" if write.by_id else f"{self._part}:{chunk.number}",
            "" if write.by_id else digest,
            _REMEMBERED_MS,
            _AFTER_NEXT_MS if write.goes_on and chunk.number == 0 else "",
            most,
            kept.on_full,
            int(time.time() * 1000),
            bytes(chunk.kinds),
            values,
        )


def _expire(key: str) -> bytes:
    return pack("PEXPIRE", key, _AFTER_NEXT_MS)
