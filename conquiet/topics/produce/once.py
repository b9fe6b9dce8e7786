"""Writes that may be repeated: a batch of rows in several parts, each part's chunks appended once however often sent.

A write has a name that its repetitions share, and numbered batches. The part of a batch that one task writes is cut
into chunks by its rows alone, so a repetition with the same rows in the same order makes the same chunks, and each is
appended only if its place is free. Rows with IDs need no order: each ID is appended once a batch, whichever part it
comes with. A batch can be repeated until the next one begins, for up to a week; after that it is refused.

This is the door of Spark's writers: rows become entries as those of ``send_batch`` do, under the same bounds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Final, TypeAlias

from conquiet.kit.retrying import patiently
from conquiet.kit.service import Background
from conquiet.metrics import producer_metrics
from conquiet.topics.format.envelope import WITH_HEADERS, WITH_ID, WITH_KEY
from conquiet.topics.produce.batching import CHUNK, CHUNK_BYTES, named_partitioner
from conquiet.topics.server import retention, writes
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Topic
from conquiet.topics.server.writes import Chunk, Write, begin, forget

__all__ = ["CHUNK", "Appended", "Appender", "Chunk", "Cutter", "Write", "begin", "forget"]

_log = logging.getLogger("conquiet.topics")

_Column: TypeAlias = Iterable[str | None] | None
_AHEAD: Final = 4
"""Chunks of one partition that wait while another is on its way."""
_TRIM_EVERY: Final = 5_000
_NAMES: Final = 100_000
"""Keys and IDs whose partitions are not computed again."""
_NOTHING: Final = ord("0")


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of rows: how many were appended now, and how many had been by an earlier try."""

    rows: int = 0
    repeated: int = 0
    differing: int = 0
    """Of ``rows``, those of chunks that came at the same place with other rows before: some are there twice."""

    def __add__(self, other: Appended) -> Appended:
        return Appended(self.rows + other.rows, self.repeated + other.repeated, self.differing + other.differing)


# --- into chunks ------------------------------------------------------------------------------------------


class Cutter:
    """Cuts the rows of one part into chunks, by partition.

    ``places`` tells, by partition, the place of the next chunk among all of this part.
    """

    def __init__(self, topic: Topic, partitions: int, part: int, places: Mapping[int, int] | None = None) -> None:
        self.places = dict(places or {})
        self._partitions = partitions
        self._part = part
        self._route = named_partitioner(topic)
        self._chunks: dict[int, Chunk] = {}
        self._known: dict[str | None, int] = {}
        self._loose = 0

    def add(self, payloads: Iterable[str], keys: _Column, headers: _Column, ids: _Column) -> Iterator[Chunk]:
        """Take rows, in order; the chunks that are full."""
        known, chunks = self._known, self._chunks
        nothing: Iterable[Any] = repeat(None)
        plain, keyed = _NOTHING, _NOTHING + WITH_KEY
        for payload, key, header, id in zip(
            payloads, keys or nothing, headers or nothing, ids or nothing, strict=False
        ):
            name = id if key is None else key
            partition = known.get(name, -1)
            if partition < 0:
                partition = self._partition(name)
            chunk = chunks.get(partition)
            if chunk is None:
                chunk = chunks[partition] = Chunk(partition, self.places.get(partition, 0))
            values, kind = chunk.values, plain
            values.append(payload)
            if key is not None:
                values.append(key)
                kind = keyed
            if header is not None:
                values.append(header)
                kind += WITH_HEADERS
            if id is not None:
                values.append(id)
                kind += WITH_ID
            chunk.kinds.append(kind)
            chunk.size += len(payload)
            if len(chunk.kinds) >= CHUNK or chunk.size >= CHUNK_BYTES:
                yield self._cut(chunk)

    def rest(self) -> Iterator[Chunk]:
        """The chunks that are not full."""
        for chunk in list(self._chunks.values()):
            yield self._cut(chunk)

    def _cut(self, chunk: Chunk) -> Chunk:
        self.places[chunk.partition] = chunk.number + 1
        return self._chunks.pop(chunk.partition)

    def _partition(self, name: str | None) -> int:
        if name is None:
            # In runs, so that a chunk is full sooner; and by the row's number, so that a repetition does the same.
            self._loose += 1
            return (self._part + (self._loose - 1) // CHUNK) % self._partitions
        if len(self._known) >= _NAMES:
            self._known.clear()
        partition = self._known[name] = self._route(name, self._partitions)
        return partition


# --- on their way -----------------------------------------------------------------------------------------


class Appender:
    """Sends the chunks of one part. Chunks of a partition go one after the other, partitions side by side.

    A chunk whose answer was lost is sent again, for about ten seconds: that is harmless, since it is appended once.
    """

    def __init__(
        self, instance: Instance, topic: Topic, write: Write, part: int, chance: random.Random | None = None
    ) -> None:
        self._instance = instance
        self._topic = topic
        self._write = write
        self._part = part
        self._metrics = producer_metrics(topic.name)
        self._trimming = retention.Trimming(instance, _TRIM_EVERY, topic.span, chance or random.Random())
        self._waiting: dict[int, asyncio.Queue[Chunk]] = {}
        self._background = Background()
        self._failure: Exception | None = None
        self.total = Appended()

    async def put(self, chunk: Chunk) -> None:
        """Send a chunk after those that were put before; returns while it is on its way."""
        waiting = self._waiting.get(chunk.partition)
        if waiting is None:
            waiting = self._waiting[chunk.partition] = asyncio.Queue(_AHEAD)
            self._background.start(self._run(waiting), "append")
        await waiting.put(chunk)
        self._check()

    async def drain(self) -> Appended:
        """Return once all is written."""
        for waiting in self._waiting.values():
            await waiting.join()
        self._check()
        return self.total

    async def aclose(self) -> None:
        """Give up what is not written yet."""
        await self._background.aclose()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _run(self, waiting: asyncio.Queue[Chunk]) -> None:
        while True:
            chunk = await waiting.get()
            try:
                if self._failure is None:  # else the part has failed, and what waits is given up
                    done = await self._append(chunk)
                    self.total += done
            except Exception as error:
                self._failure = error
            finally:
                waiting.task_done()

    async def _append(self, chunk: Chunk) -> Appended:
        status, count, *more = await self._sent(chunk)
        while status == b"FULL" and more[0]:  # what is finished makes room step by step
            status, count, *more = await self._sent(chunk)
        rows, partition = len(chunk.kinds), chunk.partition
        if status == b"FULL" and await retention.make_room(self._instance, self._topic, partition, rows):
            status, count, *more = await self._sent(chunk)
        if status == b"FULL":
            limit = self._topic.retention.max_len
            holds = f"{count} unfinished entries of {limit} that it may: {rows} more do not fit"
            raise writes.full(self._topic, partition, holds)
        if more[0]:
            self._metrics.dropped(partition, more[0])
        if count:
            self._metrics.produced(partition, count)
            if self._topic.retention.trims:
                await self._trimming.wrote(self._topic, partition, count)
        return Appended(count, rows - count, count if status == b"DIFFERS" else 0)

    async def _sent(self, chunk: Chunk) -> list[Any]:
        topic, stream = self._topic, self._topic.stream(self._instance.keys, chunk.partition)
        call = writes.append_rows(self._instance, topic, self._write, self._part, chunk)
        again = partial(_log.warning, "topic %r, partition %d: sent again: %s", topic.name, chunk.partition)
        reply: list[Any] = await patiently(self._instance.clock, partial(self._instance.run, stream, call), again)
        return reply
