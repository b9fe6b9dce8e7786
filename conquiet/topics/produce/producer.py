"""Sending: which partition, which fields, and one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, cast
from uuid import uuid4

from conquiet.errors import ConfigError, PayloadError, QueueError
from conquiet.kit import rules
from conquiet.kit.recent import Recent
from conquiet.message import EntryId, Outgoing
from conquiet.metrics import ProducerMetrics, producer_metrics
from conquiet.topics.format import envelope
from conquiet.topics.format.partitioner import Partitioner, checked
from conquiet.topics.options import BrokerOptions
from conquiet.topics.produce.batching import Batch, Destination, Run, named_partitioner
from conquiet.topics.server import growth, retention, writes
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic, TopicLike
from conquiet.wire.parser import Reply

__all__ = ["Producer"]

_TRIM_EVERY: Final = 1000
_TOPICS: Final = 1_000
"""Topics for which it is ready to send at once; for others it gets ready again."""
_PARTITIONS: Final = 20_000
"""The same for partitions."""
_WHILE_GROWING: Final = 0.05


class Producer:
    """Sends to any topic of one instance.

    A message with a key goes to the partition of that key, one with a ``message_id`` and no key to the partition
    of that ID, the others in turn. What is sent at the same time shares a write; nothing is sent twice.
    """

    def __init__(self, instance: Instance, registry: Registry, options: BrokerOptions) -> None:
        self._instance = instance
        self._registry = registry
        self._codec = options.codec
        own = options.partitioner
        self._own = None if own is None else cast("Partitioner", partial(checked, own))
        self._named: dict[str, Partitioner] = {}
        self._window = writes.Window(round(options.dedup_window * 1000), options.dedup_size)
        self._trimming = retention.Trimming(instance, _TRIM_EVERY, _PARTITIONS)
        self._metrics = Recent[str, ProducerMetrics](_TOPICS)
        self._plain = Recent[str, Batch](_TOPICS)
        self._destinations = Recent[tuple[str, int], Destination](_PARTITIONS)

    async def send(self, topic: TopicLike, message: Outgoing, delay: float | None = None) -> EntryId:
        """Append one message; its ID once Redis has it."""
        found = self._registry.cached(topic)
        if found is None or found.next_count is not None:
            found = await self._find(topic)
        if delay is not None and rules.number("delay", delay, least=0) > 0:
            return await self._send_later(found, message, delay)
        plain = self._plain.get(found.name)
        if plain is None or plain.topic is not found:
            plain = self._plain.keep(found.name, self._batch(found))
        if message.message_id is None and plain.is_plain(message):
            destination, command = plain.pack(message, envelope.now_ms())
            id = (await self._instance.link.call(destination.stream, command)).decode()
        else:
            destination, id = await self._send_special(found, message)
        self._metrics_of(found).produced(destination.partition, 1)
        if found.retention.trims:
            await self._trimming.wrote(found, destination.partition, 1)
        return EntryId(id, destination.partition)

    async def _send_special(self, topic: Topic, message: Outgoing) -> tuple[Destination, str]:
        batch = self._batch(topic, message.message_id is not None)
        batch.add(0, message)
        [run] = batch.runs.values()
        replies = await self._replies(topic, run)
        self._raise_first(run, replies)
        return run.destination, replies[0].decode()

    async def send_batch(self, topic: TopicLike, messages: Iterable[Outgoing]) -> list[EntryId]:
        """As :meth:`Broker.send_batch`."""
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
        batch = self._batch(topic, any(message.message_id is not None for message in messages))
        add = batch.add
        at = 0
        try:
            for at, message in enumerate(messages):
                add(at, message)
        except PayloadError as error:
            raise PayloadError(f"messages[{at}]: {error.path}", error.reason) from None
        return batch.runs.values()

    def _batch(self, topic: Topic, has_ids: bool = False) -> Batch:
        guard = self._window if has_ids or topic.retention.on_full != "grow" else None
        return Batch(self._instance, topic, self._codec, self._route(topic), self._destination, guard)

    def _destination(self, topic: Topic, partition: int) -> Destination:
        key = (topic.name, partition)
        destination = self._destinations.get(key)
        if destination is None:
            there = Destination.to(partition, topic.stream(self._instance.keys, partition))
            destination = self._destinations.keep(key, there)
        return destination

    def _route(self, topic: Topic) -> Partitioner:
        found = self._own or self._named.get(topic.partitioner)
        if found is None:
            found = self._named[topic.partitioner] = named_partitioner(topic)
        return found

    async def _find(self, topic: TopicLike) -> Topic:
        """The topic as it is to be written to: while it grows, that has to wait until it has grown."""
        found = await self._registry.fresh(topic)
        clock = self._instance.clock
        while found.next_count is not None and clock.monotonic() >= found.switch_at:
            if clock.monotonic() >= found.switch_at + growth.OVERDUE:
                await growth.finish_growth(self._instance, self._registry, found)  # its author is gone
            else:
                await clock.sleep(_WHILE_GROWING)
            self._registry.forget(found.name)
            found = await self._registry.fresh(topic)
        return found

    # --- how --------------------------------------------------------------------------------------------

    async def _append(self, topic: Topic, whole: Run, ids: list[EntryId | None]) -> None:
        partition, made = whole.destination.partition, str.__new__
        for run in whole.chunks():
            replies = await self._replies(topic, run)
            for at, reply in zip(run.places, replies, strict=True):
                if not isinstance(reply, Exception):
                    # As EntryId(...), at half the cost.
                    ids[at] = id = made(EntryId, reply.decode())
                    id.partition = partition
            self._raise_first(run, replies)
            self._metrics_of(topic).produced(partition, len(run.places))
            if topic.retention.trims:
                await self._trimming.wrote(topic, partition, len(run.places))

    async def _replies(self, topic: Topic, run: Run) -> list[Reply]:
        """For each message its entry ID as Redis gave it, or the error."""
        stream, partition = run.destination.stream, run.destination.partition
        if not run.calls:
            return await self._instance.link.call_many(stream, run.commands)
        replies = await self._instance.run_many(stream, run.calls)
        await self._make_room(topic, run, replies)
        return [reply if isinstance(reply, Exception) else self._judged(topic, partition, reply) for reply in replies]

    async def _make_room(self, topic: Topic, run: Run, replies: list[Reply]) -> None:
        """A topic that only groups without consumers hold back is not full: trim, and try again."""
        while full := [at for at, reply in enumerate(replies) if isinstance(reply, list) and reply[0] == b"FULL"]:
            try:
                if not await retention.make_room(self._instance, topic, run.destination.partition, len(full)):
                    return
                again = await self._instance.run_many(run.destination.stream, [run.calls[at] for at in full])
            except QueueError as error:  # of these; the others are written
                again = [error] * len(full)
            for at, reply in zip(full, again, strict=True):
                replies[at] = reply

    def _judged(self, topic: Topic, partition: int, reply: Reply) -> Reply:
        if reply[0] == b"FULL":
            return writes.full(topic, partition, f"{reply[1]} entries, all of them unfinished")
        if reply[0] == b"AGAIN":
            self._metrics_of(topic).duplicate(partition, 1)
        elif reply[2]:
            self._metrics_of(topic).dropped(partition, reply[2])
        return reply[1]

    def _raise_first(self, run: Run, replies: Sequence[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, QueueError):
                raise reply
            if isinstance(reply, Exception):
                self._instance.link.refuse(run.destination.stream, reply)

    async def _send_later(self, topic: Topic, message: Outgoing, delay: float) -> EntryId:
        if topic.legacy:
            raise ConfigError("a legacy stream cannot hold messages back: delay needs a topic")
        ms = round(delay * 1000)
        fields = envelope.fields_of(message, self._codec)
        there = self._batch(topic).destination_of(message)
        item = f"delayed/{uuid4().hex}"
        is_new, id = await writes.delay(
            self._instance, there.stream, ms, item, message.message_id, self._window, fields
        )
        metrics = self._metrics_of(topic)
        (metrics.produced if is_new else metrics.duplicate)(there.partition, 1)
        return EntryId(id, there.partition)

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
