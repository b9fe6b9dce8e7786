"""Sending: which partition, which fields, and one round trip."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast
from uuid import uuid4

from conquiet.errors import ConfigError, PayloadError, QueueError, TopicFullError
from conquiet.kit import rules
from conquiet.kit.recent import Recent
from conquiet.message import EntryId, Outgoing
from conquiet.metrics import ProducerMetrics, producer_metrics
from conquiet.topics.format import envelope
from conquiet.topics.format.partitioner import NAMED, Partitioner, checked
from conquiet.topics.options import BrokerOptions
from conquiet.topics.produce.batching import Destination, Packing, Run, now_ms
from conquiet.topics.server import growth, retention
from conquiet.topics.server.instance import Site
from conquiet.topics.server.topics import Registry, Topic, TopicLike
from conquiet.wire.parser import Reply
from conquiet.wire.scripts import Call, Script

__all__ = ["Producer"]

_log = logging.getLogger("conquiet.topics")

_TRIM_EVERY: Final = 1000
_TOPICS: Final = 1_000
"""Topics for which it is ready to send at once; for others it gets ready again."""
_PARTITIONS: Final = 20_000
"""The same for partitions."""
_WHILE_GROWING: Final = 0.05
_APPEND: Final = Script.named("append")
_DELAY: Final = Script.named("delay")


class Producer:
    """Sends to any topic of one site.

    A message with a key goes to the partition of that key, one with a ``message_id`` and no key to the partition
    of that ID, the others in turn. What is sent at the same time shares a write; nothing is sent twice.
    """

    def __init__(self, site: Site, registry: Registry, options: BrokerOptions) -> None:
        self._site = site
        self._registry = registry
        self._codec = options.codec
        self._own = options.partitioner
        self._named: dict[str, Partitioner] = {}
        self._window_ms = round(options.dedup_window * 1000)
        self._window_size = options.dedup_size
        self._metrics = Recent[str, ProducerMetrics](_TOPICS)
        self._sent = Recent[str, int](_PARTITIONS)
        self._plain = Recent[str, Packing](_TOPICS)
        self._destinations = Recent[tuple[str, int], Destination](_PARTITIONS)

    async def send(self, topic: TopicLike, message: Outgoing, delay: float | None = None) -> EntryId:
        """Append one message; its ID once Redis has it."""
        found = self._registry.cached(topic)
        if found is None or found.next_count is not None:
            found = await self._find(topic)
        if delay is not None:
            return await self._send_later(found, message, delay)
        plain = self._plain.get(found.name)
        if plain is None or plain.topic is not found:
            plain = self._plain.keep(found.name, self._packing(found, guarded=False))
        if message.message_id is None and plain.is_plain(message):
            destination, command = plain.pack(message, now_ms())
            id = (await self._site.link.call(destination.stream, command)).decode()
        else:
            destination, id = await self._send_special(found, message)
        self._metrics_of(found).produced(destination.partition, 1)
        if found.retention.trims:
            await self._trim(found, destination, 1)
        return EntryId(id, destination.partition)

    async def _send_special(self, topic: Topic, message: Outgoing) -> tuple[Destination, str]:
        packing = self._packing(topic, message.message_id is not None)
        packing.add(0, message)
        [run] = packing.runs.values()
        replies = await self._replies(topic, run)
        self._raise_first(run, replies)
        return run.destination, replies[0].decode()

    async def send_batch(self, topic: TopicLike, messages: Iterable[Outgoing]) -> list[EntryId]:
        """Append messages, those of one partition in order; one round trip for each few hundred of a partition.

        All are checked before the first is sent. When Redis fails on the way, the ``QueueError`` says in
        ``entry_ids`` which were written.
        """
        messages = _checked(messages)
        found = await self._find(topic)
        runs = self._runs(found, messages)
        ids: list[EntryId | None] = [None] * len(messages)
        outcomes = await asyncio.gather(*(self._append(found, run, ids) for run in runs), return_exceptions=True)
        for error in outcomes:
            if isinstance(error, QueueError):
                written = sum(id is not None for id in ids)
                text = f"{error} ({written} of {len(ids)} entries are known to be written)"
                raise type(error)(text, entry_ids=ids) from error.__cause__
            if isinstance(error, BaseException):
                raise error
        return cast("list[EntryId]", ids)

    # --- where to, and what ---------------------------------------------------------------------------

    def _runs(self, topic: Topic, messages: Sequence[Outgoing]) -> Iterable[Run]:
        packing = self._packing(topic, any(message.message_id is not None for message in messages))
        add = packing.add
        at = 0
        try:
            for at, message in enumerate(messages):
                add(at, message)
        except PayloadError as error:
            raise PayloadError(f"messages[{at}]: {error.path}", error.reason) from None
        return packing.runs.values()

    def _packing(self, topic: Topic, guarded: bool) -> Packing:
        return Packing(topic, self._codec, self._chooser(topic), self._destination, self._guarded, guarded)

    def _destination(self, topic: Topic, partition: int) -> Destination:
        key = (topic.name, partition)
        destination = self._destinations.get(key)
        if destination is None:
            there = Destination.to(partition, topic.stream(self._site.keys, partition))
            destination = self._destinations.keep(key, there)
        return destination

    def _chooser(self, topic: Topic) -> Callable[[str | None, int], int]:
        own = self._own
        return self._partitioner(topic) if own is None else lambda key, count: checked(own, key, count)

    def _partitioner(self, topic: Topic) -> Partitioner:
        name = topic.partitioner
        found = self._named.get(name)
        if found is None:
            if name not in NAMED:
                raise QueueError(f"this version does not know the partitioner {name!r} of topic {topic.name!r}")
            found = self._named[name] = NAMED[name]()
        return found

    async def _find(self, topic: TopicLike) -> Topic:
        """The topic as it is to be written to: while it grows, that has to wait until it has grown."""
        found = await self._registry.find(topic)
        clock = self._site.clock
        while found.next_count is not None and clock.monotonic() >= found.switch_at:
            if clock.monotonic() >= found.switch_at + growth.OVERDUE:
                await growth.finish_growth(self._site, self._registry, found)  # who planned it is gone
            else:
                await clock.sleep(_WHILE_GROWING)
            self._registry.forget(found.name)
            found = await self._registry.find(topic)
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

    async def _append(self, topic: Topic, whole: Run, ids: list[EntryId | None]) -> None:
        for run in whole.chunks():
            replies = await self._replies(topic, run)
            partition, made = run.partition, str.__new__
            for at, reply in zip(run.places, replies, strict=True):
                if not isinstance(reply, Exception):
                    # As EntryId(...), at half the cost.
                    ids[at] = id = made(EntryId, reply.decode())
                    id.partition = partition
            self._raise_first(run, replies)
            self._metrics_of(topic).produced(partition, len(run.places))
            if topic.retention.trims:
                await self._trim(topic, run.destination, len(run.places))

    async def _replies(self, topic: Topic, run: Run) -> list[Reply]:
        """For each message its entry ID as Redis gave it, or the error."""
        if not run.calls:
            return await self._site.link.call_many(run.stream, run.commands)
        replies = await self._site.run_many(run.stream, run.calls)
        await self._make_room(topic, run, replies)
        return [reply if isinstance(reply, Exception) else self._judged(topic, run, reply) for reply in replies]

    async def _make_room(self, topic: Topic, run: Run, replies: list[Reply]) -> None:
        """A topic that only groups hold back which nobody serves any more is not full: trim, and try again."""
        while full := [at for at, reply in enumerate(replies) if isinstance(reply, list) and reply[0] == b"FULL"]:
            try:
                if not await retention.make_room(self._site, topic, run.partition, len(full)):
                    return
                again = await self._site.run_many(run.stream, [run.calls[at] for at in full])
            except QueueError as error:  # of these; the others are written
                again = [error] * len(full)
            for at, reply in zip(full, again, strict=True):
                replies[at] = reply

    def _judged(self, topic: Topic, run: Run, reply: Reply) -> Reply:
        metrics, partition = self._metrics_of(topic), run.partition
        if reply[0] == b"FULL":
            return TopicFullError(
                f"partition {partition} of topic {topic.name!r} holds {reply[1]} entries, all of them unfinished"
            )
        if reply[0] == b"AGAIN":
            metrics.duplicate(partition, 1)
        elif reply[2]:
            metrics.dropped(partition, reply[2])
        return reply[1]

    def _raise_first(self, run: Run, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, QueueError):
                raise reply
            if isinstance(reply, Exception):
                self._site.link.refuse(run.stream, reply)

    async def _trim(self, topic: Topic, there: Destination, count: int) -> None:
        """After each so many messages: owners of leases trim; this is for topics that nobody subscribes to."""
        before = self._sent.get(there.stream)
        if before is None:  # where counts get lost, each begins anywhere, and together they trim as often
            before = self._sent.keep(there.stream, random.randrange(_TRIM_EVERY) if self._sent.is_full else 0)
        sent = before + count
        self._sent[there.stream] = sent % _TRIM_EVERY
        if sent >= _TRIM_EVERY:
            try:
                await retention.trim(self._site, topic, there.partition)
            except QueueError as error:  # the messages are written all the same
                _log.warning("topic %r, partition %d: could not trim: %s", topic.name, there.partition, error)

    async def _send_later(self, topic: Topic, message: Outgoing, delay: float) -> EntryId:
        if topic.legacy:
            raise ConfigError("a legacy stream cannot hold messages back: delay needs a topic")
        ms = round(rules.seconds("delay", delay) * 1000)
        fields = envelope.fields_of(message, self._codec)
        packing = self._packing(topic, True)
        packing.add(0, message)
        [run] = packing.runs.values()
        partition, stream = run.partition, run.stream
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
            metrics = self._metrics.keep(topic.name, producer_metrics(topic.name))
        return metrics


def _checked(messages: object) -> list[Outgoing]:
    if isinstance(messages, Outgoing) or not isinstance(messages, Iterable):
        raise ConfigError(f"messages must be an iterable of Outgoing, not {messages!r}")
    found = list(cast("Iterable[object]", messages))
    for at, message in enumerate(found):
        if not isinstance(message, Outgoing):
            raise ConfigError(f"messages[{at}] must be an Outgoing, not {message!r}")
    return cast("list[Outgoing]", found)
