"""A consumer of one or more topics, from joining its group to leaving it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from conquiet.errors import ConfigError
from conquiet.kit.ids import incarnation, process_name
from conquiet.kit.lifecycle import Life
from conquiet.kit.retrying import Lines
from conquiet.metrics import GroupMetrics, group_metrics
from conquiet.topics.codec import Codec
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.engine import Engine
from conquiet.topics.consume.handling import BatchHandler, Handler, Handling
from conquiet.topics.consume.membership import Membership
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.pulling import Pulling
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.members import Identity
from conquiet.topics.server.topics import Registry, TopicLike
from conquiet.wire.keys import name

__all__ = ["Health", "Messages", "Subscription"]

_log = logging.getLogger("conquiet.topics")


@dataclass(frozen=True, slots=True)
class Health:
    """How a subscription is doing, for probes.

    ``healthy`` is false once it has ended, while the server does not answer, and while trimming or the forwarding of
    dead letters fails unexpectedly.
    """

    healthy: bool
    owned: Mapping[str, tuple[int, ...]]
    inflight: int
    paused: bool
    failures: int
    error: str | None
    held_up: str | None = None
    """What has been waited for longer than a second: by a ``next``, for what its caller has not settled; by a
    hand-over of a partition, for what is still being handled."""


class _Consumer:
    """What both ways of consuming share."""

    _hands: Handling | Pulling

    def __init__(
        self,
        instance: Instance,
        registry: Registry,
        codec: Codec,
        topics: Sequence[TopicLike],
        group: str,
        options: SubscribeOptions,
        delivery: type[Delivery] = Delivery,
    ) -> None:
        self._topics = list(topics)
        if not self._topics or len(set(self._topics)) < len(self._topics):
            raise ConfigError(f"topics must be one or more different ones, not {topics!r}")
        self._group = name("group", group)
        self._options = options
        self._name = options.consumer or process_name()
        self._me = f"{self._name}#{incarnation()}"
        self._metrics: dict[str, GroupMetrics] = {}
        lines, heard = Lines(_log), (self._lost, self._no_group)
        self._worker = Engine(instance, group, codec, options, self._metrics_of, *heard, lines, delivery)
        who = Identity(instance, registry, group, self._me, options)
        self._membership = Membership(who, self._worker, self._metrics_of, self._fail, lines)
        self._failure: Exception | None = None
        life = f"consumer {self._me!r} of group {group!r}"
        self._life = Life(life, _log, handle_signals=options.handle_signals, on_stop=self._end)
        self._stopping = self._life.stopping
        """Set once it was asked to stop, and for ever."""
        self._open = ExitStack()

    @property
    def consumer(self) -> str:
        """The name under which it is known in Redis: the configured one and a part that is new each time."""
        return self._me

    @property
    def owned(self) -> Mapping[str, tuple[int, ...]]:
        """The partitions that it owns now, by topic."""
        members = self._membership.members
        return {topic: tuple(member.owned) for topic, member in members.items() if member.has_topic}

    @property
    def inflight(self) -> int:
        """Messages that were delivered and are not settled."""
        return self._worker.inflight

    @property
    def paused(self) -> bool:
        """Whether nothing new is taken."""
        return self._worker.is_paused

    def pause(self) -> None:
        """Take nothing more until :meth:`resume`; partitions stay owned, and what was taken is finished."""
        self._life.do(self._worker.pause)

    def resume(self) -> None:
        """Take again."""
        self._life.do(self._worker.resume)

    def stop(self) -> None:
        """Ask it to end; returns at once, safe from any thread and from signal handlers."""
        self._life.stop()

    async def wait(self) -> None:
        """Return when it was asked to stop; raise what ended it otherwise."""
        self._check_entered()
        await self._stopping.wait()
        if self._failure is not None:
            raise self._failure

    def _check_entered(self) -> None:
        """Nothing ever comes of waiting for a consumer that does nothing."""
        if not self._is_entered:
            raise ConfigError("this consumer is not entered: use it inside 'async with' ('with' in conquiet.sync)")
        if self._life.is_inherited:
            raise ConfigError("this consumer was entered before a fork and is the parent's: make another here")

    @property
    def _is_entered(self) -> bool:
        return self._life.is_lived or self._life.is_leaving

    @property
    def _drain_time(self) -> float:
        """Seconds that its handlers have to finish if it leaves now."""
        return self._options.drain_timeout if self._life.is_lived else 0.0

    def health(self) -> Health:
        """How it is doing, without asking the server."""
        failures, error = self._worker.errors, self._failure
        alive = self._life.is_lived and not self._life.is_inherited and not self._stopping.is_set()
        text = None if error is None else str(error)
        return Health(alive and failures == 0, self.owned, self.inflight, self.paused, failures, text, self._held_up)

    @property
    def _held_up(self) -> str | None:
        return self._worker.held_up

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise ConfigError("a subscription can be entered once: make another")
        self._open.enter_context(self._life.lived())
        self._stopping = self._life.stopping
        try:
            self._worker.start(self._hands)  # before anything is taken that they would have to be told of
            await self._membership.join(self._topics)
        except BaseException:
            await self.aclose()
            raise
        if self._stopping.is_set():
            self._end()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take nothing more, finish what is being handled, hand the partitions over and leave the group.

        Takes ``drain_timeout`` plus a second at most: others have what could not be released by then, since the server
        does not answer or a thread still runs, when its lease has run out. Cancelled meanwhile, it leaves all the same,
        and raises the cancellation afterwards. In a forked child it does nothing: all of that is the parent's.
        """
        if self._is_entered and not self._life.is_inherited:
            with self._open.pop_all():
                await self._life.leave(self._drain, self._close, self._options.drain_timeout)

    def _end(self) -> None:
        self._worker.take_no_more()
        self._hands.wake()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._stopping.set()
        self._end()

    async def _drain(self) -> None:
        self._end()
        # Side by side: what a server that does not answer was asked for may not cost the handlers their time.
        await asyncio.gather(self._membership.stop(), self._worker.end())
        await self._membership.leave(self._worker.busy)

    async def _close(self) -> None:
        await asyncio.gather(self._membership.aclose(), self._worker.aclose())
        for metrics in self._metrics.values():
            metrics.forget()

    def _metrics_of(self, topic: str) -> GroupMetrics:
        found = self._metrics.get(topic)
        if found is None:
            found = self._metrics[topic] = group_metrics(topic, self._group, self._name)
        return found

    def _lost(self, partition: Partition) -> None:
        self._membership.lose(partition.stream, partition.lease)

    def _no_group(self, partition: Partition) -> None:
        self._membership.regroup(partition.stream)


class Subscription(_Consumer):
    """Calls a handler for each message of one or more topics.

    At least once: a message is acknowledged after its handler returned. If the handler raises, the message is
    tried again by the retry policy and then becomes a dead letter; ``Reject`` makes it one at once. Messages of one
    key are begun in the order of sending and never two at a time. While its consumer is alive a message is not
    delivered to another one, however long it takes; if the consumer dies, the next owner gets it within the
    lease's time.
    """

    def __init__(
        self,
        instance: Instance,
        registry: Registry,
        codec: Codec,
        topics: Sequence[TopicLike],
        group: str,
        options: SubscribeOptions,
        *,
        handler: Handler | BatchHandler,
    ) -> None:
        super().__init__(instance, registry, codec, topics, group, options)
        self._hands = self._handling = Handling(handler, options, self._worker, instance.clock)


class Messages(_Consumer):
    """Messages of one or more topics, to be pulled and settled one by one: ``async for``, then ``ack`` and so on.

    At most ``max_inflight`` are out and unsettled at a time. Iteration ends after ``stop``.
    """

    def __init__(
        self,
        instance: Instance,
        registry: Registry,
        codec: Codec,
        topics: Sequence[TopicLike],
        group: str,
        options: SubscribeOptions,
        *,
        delivery: type[Delivery] = Delivery,
    ) -> None:
        if options.batch_handler:
            raise ConfigError("batch_handler is for subscribe: here nothing is handled")
        super().__init__(instance, registry, codec, topics, group, options, delivery)
        self._hands = self._pulling = Pulling(self._worker.partitions, options.max_inflight, instance.clock)

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        delivery = await self.next()
        if delivery is None:
            raise StopAsyncIteration
        return delivery

    async def next(self, timeout: float | None = None) -> Delivery | None:
        """The next message; ``None`` when it was asked to stop, or after ``timeout`` seconds."""
        self._check_entered()
        try:
            async with asyncio.timeout(timeout):
                return await self._next()
        except TimeoutError:
            return None

    @property
    def _held_up(self) -> str | None:
        return self._pulling.reason or super()._held_up

    async def _next(self) -> Delivery | None:
        delivery = await self._pulling.next(self._stopping)
        if delivery is None and self._failure is not None:
            raise self._failure
        return delivery
