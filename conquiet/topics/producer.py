"""Sending: which partition, which fields, and one round trip."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast
from uuid import uuid4

from conquiet.errors import ConfigError, PayloadError, QueueError, TopicFullError
from conquiet.kit import rules
from conquiet.message import EntryId, Outgoing
from conquiet.metrics import ProducerMetrics, producer_metrics
from conquiet.topics import retention
from conquiet.topics.codec import Codec
from conquiet.topics.envelope import fields_of
from conquiet.topics.partitioner import NAMED, Partitioner, checked
from conquiet.topics.registry import Registry, Topic, TopicLike
from conquiet.topics.site import Site
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script, is_noscript
from conquiet.wire.streams import pack

__all__ = ["Producer"]

_log = logging.getLogger("conquiet.topics")

_CHUNK: Final = 500
_CHUNK_BYTES: Final = 1 << 20
_TRIM_EVERY: Final = 1000
_APPEND: Final = Script.named("append")
_DELAY: Final = Script.named("delay")


class _Item(NamedTuple):
    """A message on its way: its place in the batch, its partition and the command that appends it."""

    at: int
    partition: int
    command: bytes
    call: Call | None


class Producer:
    """Sends to any topic of one site.

    A message with a key goes to the partition of that key, one with a ``message_id`` and no key to the partition
    of that ID, the others in turn. What is sent at the same time shares a write; nothing is sent twice.
    """

    def __init__(
        self,
        site: Site,
        registry: Registry,
        codec: Codec,
        partitioner: Partitioner | None = None,
        dedup_window: float = 600.0,
        dedup_size: int = 100_000,
    ) -> None:
        if partitioner is not None and not callable(partitioner):
            raise ConfigError(f"partitioner must be callable, not {partitioner!r}")
        self._site = site
        self._registry = registry
        self._codec = codec
        self._own = partitioner
        self._named: dict[str, Partitioner] = {}
        self._window_ms = round(rules.seconds("dedup_window", dedup_window) * 1000)
        self._window_size = rules.integer("dedup_size", dedup_size, least=1)
        self._metrics: dict[str, ProducerMetrics] = {}
        self._sent: dict[str, int] = {}
        self._streams: dict[tuple[str, int], str] = {}

    async def send(self, topic: TopicLike, message: Outgoing, delay: float | None = None) -> EntryId:
        """Append one message; its ID once Redis has it."""
        found = self._registry.cached(topic) or await self._registry.find(topic)
        if delay is not None:
            return await self._send_later(found, message, delay)
        item = self._item(found, self._partitions(found), 0, message, message.message_id is not None)
        ids = await self._append(found, item.partition, [item])
        return ids[0]

    async def send_batch(self, topic: TopicLike, messages: Iterable[Outgoing]) -> list[EntryId]:
        """Append messages, those of one partition in order; one round trip for each few hundred of a partition.

        All are checked before the first is sent. When Redis fails on the way, the ``QueueError`` says in
        ``entry_ids`` which were written.
        """
        found = await self._registry.find(topic)
        items = list(self._items(found, messages))
        by_partition: dict[int, list[_Item]] = {}
        for item in items:
            by_partition.setdefault(item.partition, []).append(item)
        ids: list[EntryId | None] = [None] * len(items)
        outcomes = await asyncio.gather(
            *(self._append_run(found, partition, run, ids) for partition, run in by_partition.items()),
            return_exceptions=True,
        )
        for error in outcomes:
            if isinstance(error, QueueError):
                written = sum(id is not None for id in ids)
                text = f"{error} ({written} of {len(ids)} entries are known to be written)"
                raise type(error)(text, entry_ids=ids) from error.__cause__
            if isinstance(error, BaseException):
                raise error
        return cast("list[EntryId]", ids)

    # --- where to, and what ---------------------------------------------------------------------------

    def _items(self, topic: Topic, messages: Iterable[Outgoing]) -> Iterator[_Item]:
        partitions = self._partitions(topic)
        if isinstance(messages, Outgoing) or not isinstance(messages, Iterable):
            raise ConfigError(f"messages must be an iterable of Outgoing, not {messages!r}")
        messages = list(messages)
        for at, message in enumerate(messages):
            if not isinstance(message, Outgoing):
                raise ConfigError(f"messages[{at}] must be an Outgoing, not {message!r}")
        # All in one way: calls of a script that the server forgot are sent again, behind what was not refused.
        guarded = any(message.message_id is not None for message in messages)
        for at, message in enumerate(messages):
            try:
                yield self._item(topic, partitions, at, message, guarded)
            except PayloadError as error:
                raise PayloadError(f"messages[{at}]: {error.path}", error.reason) from None

    def _item(self, topic: Topic, partitions: int, at: int, message: Outgoing, guarded: bool) -> _Item:
        fields = fields_of(message, self._codec, topic.legacy)
        partition = self._route(topic, partitions, message)
        stream = self._stream(topic, partition)
        if not guarded and topic.retention.on_full == "grow":
            return _Item(at, partition, pack("XADD", stream, "*", *fields), None)
        call = self._guarded(topic, stream, message.message_id or "", fields)
        return _Item(at, partition, call.by_hash(), call)

    def _stream(self, topic: Topic, partition: int) -> str:
        key = (topic.name, partition)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = topic.stream(self._site.keys, partition)
        return stream

    def _partitions(self, topic: Topic) -> int:
        if topic.next_count is not None and self._site.clock.monotonic() >= topic.switch_at:
            return topic.next_count
        return topic.partitions

    def _route(self, topic: Topic, partitions: int, message: Outgoing) -> int:
        if message.partition is not None:
            index = rules.integer("partition", message.partition, least=0)
            if index >= partitions:
                raise ConfigError(f"partition must be less than {partitions}, not {index}")
            return index
        if partitions == 1:
            return 0
        key = message.key if message.key is not None else message.message_id
        if self._own is not None:
            return checked(self._own, key, partitions)
        return self._partitioner(topic.partitioner)(key, partitions)

    def _partitioner(self, name: str) -> Partitioner:
        found = self._named.get(name)
        if found is None:
            if name not in NAMED:
                raise QueueError(f"this version does not know the partitioner {name!r}")
            found = self._named[name] = NAMED[name]()
        return found

    def _guarded(self, topic: Topic, stream: str, message_id: str, fields: Sequence[bytes | str | int]) -> Call:
        keys, kept = self._site.keys, topic.retention
        most = kept.max_len if kept.max_len is not None and kept.on_full != "grow" else -1
        return _APPEND(
            [stream, keys.dedup(stream), keys.dedup_ids(stream), keys.trim(stream)],
            self._site.clock.offset_ms,
            message_id,
            self._window_ms,
            self._window_size,
            most,
            kept.on_full,
            *fields,
        )

    # --- how --------------------------------------------------------------------------------------------

    async def _append_run(
        self, topic: Topic, partition: int, items: Sequence[_Item], ids: list[EntryId | None]
    ) -> None:
        for chunk in _chunks(items):
            replies = await self._replies(topic, partition, chunk)
            for item, reply in zip(chunk, replies, strict=True):
                if not isinstance(reply, Exception):
                    ids[item.at] = EntryId(reply.decode(), partition)
            self._raise_first(topic, partition, replies)
            await self._written(topic, partition, len(chunk))

    async def _append(self, topic: Topic, partition: int, items: Sequence[_Item]) -> list[EntryId]:
        replies = await self._replies(topic, partition, items)
        self._raise_first(topic, partition, replies)
        await self._written(topic, partition, len(items))
        return [EntryId(reply.decode(), partition) for reply in replies]

    async def _replies(self, topic: Topic, partition: int, items: Sequence[_Item]) -> list[Reply]:
        """For each item its entry ID as Redis gave it, or the error."""
        link, stream = self._site.link, self._stream(topic, partition)
        replies = await link.call_many(stream, [item.command for item in items])
        again = [at for at, item in enumerate(items) if item.call is not None and is_noscript(replies[at])]
        if again:
            whole = await link.call_many(stream, [cast("Call", items[at].call).whole() for at in again])
            for at, reply in zip(again, whole, strict=True):
                replies[at] = reply
        if topic.retention.group_expiry is not None:
            await self._make_room(topic, partition, items, replies)
        for at, item in enumerate(items):
            if item.call is not None and not isinstance(replies[at], Exception):
                replies[at] = self._judged(topic, partition, replies[at])
        return replies

    async def _make_room(self, topic: Topic, partition: int, items: Sequence[_Item], replies: list[Reply]) -> None:
        """A topic that only groups hold back which nobody serves any more is not full: trim, and try once more."""
        full = [at for at, reply in enumerate(replies) if isinstance(reply, list) and reply[0] == b"FULL"]
        if full and (await retention.trim(self._site, topic, partition)).removed:
            again = [items[at].command for at in full]
            for at, reply in zip(
                full, await self._site.link.call_many(self._stream(topic, partition), again), strict=True
            ):
                replies[at] = reply

    def _judged(self, topic: Topic, partition: int, reply: Reply) -> Reply:
        metrics = self._metrics_of(topic)
        if reply[0] == b"FULL":
            return TopicFullError(
                f"partition {partition} of topic {topic.name!r} holds {reply[1]} entries, all of them unfinished"
            )
        if reply[0] == b"AGAIN":
            metrics.duplicate(partition, 1)
        elif reply[2]:
            metrics.dropped(partition, reply[2])
        return reply[1]

    def _raise_first(self, topic: Topic, partition: int, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, TopicFullError):
                raise reply
            if isinstance(reply, Exception):
                self._site.link.refuse(topic.stream(self._site.keys, partition), reply)

    async def _written(self, topic: Topic, partition: int, count: int) -> None:
        self._metrics_of(topic).produced(partition, count)
        if not topic.retention.trims:
            return
        # Owners of leases trim; this is for topics that nobody subscribes to.
        stream = topic.stream(self._site.keys, partition)
        sent = self._sent.get(stream, 0) + count
        self._sent[stream] = sent % _TRIM_EVERY
        if sent >= _TRIM_EVERY:
            try:
                await retention.trim(self._site, topic, partition)
            except QueueError as error:  # the messages are written all the same
                _log.warning("topic %r, partition %d: could not trim: %s", topic.name, partition, error)

    async def _send_later(self, topic: Topic, message: Outgoing, delay: float) -> EntryId:
        if topic.legacy:
            raise ConfigError("a legacy stream cannot hold messages back: delay needs a topic")
        ms = round(rules.seconds("delay", delay) * 1000)
        fields = fields_of(message, self._codec)
        partition = self._route(topic, self._partitions(topic), message)
        stream = self._stream(topic, partition)
        keys, clock = self._site.keys, self._site.clock
        held = [keys.delayed(stream), keys.delayed_items(stream), keys.dedup(stream), keys.dedup_ids(stream)]
        window = (message.message_id or "", self._window_ms, self._window_size)
        item = f"delayed/{uuid4().hex}"
        status, id = await self._site.run(stream, _DELAY(held, clock.offset_ms, ms, item, *window, *fields))
        if status == b"AGAIN":
            self._metrics_of(topic).duplicate(partition, 1)
        else:
            self._metrics_of(topic).produced(partition, 1)
        return EntryId(id.decode(), partition)

    def _metrics_of(self, topic: Topic) -> ProducerMetrics:
        metrics = self._metrics.get(topic.name)
        if metrics is None:
            metrics = self._metrics[topic.name] = producer_metrics(topic.name)
        return metrics


def _chunks(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """``items`` in runs that hold neither side up: by number, and by size."""
    start = size = 0
    for at, item in enumerate(items):
        length = len(item.command)
        if at > start and (at - start >= _CHUNK or size + length > _CHUNK_BYTES):
            yield items[start:at]
            start, size = at, 0
        size += length
    if start < len(items):
        yield items[start:]
