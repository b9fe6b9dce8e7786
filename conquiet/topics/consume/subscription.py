"""A consumer of one or more topics, from joining its group to leaving it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from conquiet.errors import ConfigError
from conquiet.kit.ids import incarnation, process_name
from conquiet.kit.loopthread import forks
from conquiet.kit.service import Background
from conquiet.kit.signals import stop_on_signals
from conquiet.metrics import GroupMetrics, group_metrics
from conquiet.topics.codec import Codec
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.exchange import Exchanges
from conquiet.topics.consume.handling import BatchHandler, Handler, Handling, Pulling
from conquiet.topics.consume.member import Member
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.standstill import Standstill
from conquiet.topics.consume.worker import Worker
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, TopicLike
from conquiet.wire.keys import name

__all__ = ["Health", "Messages", "Subscription"]


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
    """Why a ``next`` has waited for more than a second, where it waits for what its caller has not settled."""


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
        self._instance = instance
        self._registry = registry
        self._topics = list(topics)
        if not self._topics or len(set(self._topics)) < len(self._topics):
            raise ConfigError(f"topics must be one or more different ones, not {topics!r}")
        self._group = name("group", group)
        self._options = options
        self._name = options.consumer or process_name()
        self._me = f"{self._name}#{incarnation()}"
        self._metrics: dict[str, GroupMetrics] = {}
        exchanges = Exchanges(instance, group, codec, options.dead_letter, delivery)
        self._worker = Worker(instance, group, exchanges, options, self._metrics_of, self._lost, self._no_group)
        self._members: list[Member] = []
        self._background = Background()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = ExitStack()
        self._entered = self._left = False
        self._forks = forks()

    @property
    def consumer(self) -> str:
        """The name under which it is known in Redis: the configured one and a part that is new each time."""
        return self._me

    @property
    def owned(self) -> Mapping[str, tuple[int, ...]]:
        """The partitions that it owns now, by topic."""
        return {member.topic.name: tuple(member.owned) for member in self._members if member.has_topic}

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
        self._on_loop(self._worker.pause)

    def resume(self) -> None:
        """Take again."""
        self._on_loop(self._worker.resume)

    def stop(self) -> None:
        """Ask it to end; returns at once, safe from any thread and from signal handlers."""
        self._on_loop(self._end)

    def _on_loop(self, action: Callable[[], None]) -> None:
        """Do something that belongs to the loop, from wherever this is called but a forked child, who has none."""
        if self._is_inherited:
            return
        if self._loop is None:
            action()
        else:
            with suppress(RuntimeError):  # that loop has been closed, and all is over
                self._loop.call_soon_threadsafe(action)

    async def wait(self) -> None:
        """Return when it was asked to stop; raise what ended it otherwise."""
        self._check_entered()
        await self._stopping.wait()
        if self._failure is not None:
            raise self._failure

    def _check_entered(self) -> None:
        """Nothing ever comes of waiting for a consumer that does nothing."""
        if self._is_inherited:
            raise ConfigError("this consumer was entered before a fork and is the parent's: make another here")
        if not self._entered:
            raise ConfigError("this consumer is not entered: use it inside 'async with' ('with' in conquiet.sync)")

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a forked child, and what was entered before is the parent's."""
        return self._entered and self._forks != forks()

    def health(self) -> Health:
        """How it is doing, without asking the server."""
        failures, error = self._worker.errors, self._failure
        is_over = self._left or self._is_inherited or self._stopping.is_set()
        alive = self._entered and error is None and not is_over
        text = None if error is None else str(error)
        healthy = alive and failures == 0
        return Health(healthy, self.owned, self.inflight, self.paused, failures, text, self._held_up)

    @property
    def _held_up(self) -> str | None:
        return None

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ConfigError("a subscription can be entered once: make another")
        self._entered, self._forks = True, forks()
        self._loop = asyncio.get_running_loop()
        try:
            await self._join()
        except BaseException:
            self._end()
            await self._leave()
            raise
        if self._options.handle_signals:
            self._signals.enter_context(stop_on_signals(self.stop))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Take nothing more, finish what is being handled, hand the partitions over and leave the group.

        In a forked child it does nothing: all of that is the parent's.
        """
        if self._entered and not self._left and not self._is_inherited:
            self._end()
            self._signals.close()
            await self._leave()

    def _end(self) -> None:
        self._stopping.set()
        self._worker.take_no_more()
        self._hands.wake()

    async def _join(self) -> None:
        self._worker.start(self._hands)  # before anything is taken that they would have to be told of
        for topic in self._topics:
            found = await self._registry.fetch(topic)
            metrics = self._metrics_of(found.name)
            member = Member(
                self._instance, self._registry, topic, self._group, self._me, self._options, self._worker, metrics
            )
            self._members.append(member)
            await member.join()
            self._background.start(self._follow(member), "member")

    async def _follow(self, member: Member) -> None:
        try:
            await member.run(self._background.start)
        except Exception as error:
            self._failure = error
            self._end()

    async def _leave(self) -> None:
        self._left = True
        try:
            await self._worker.end()
        finally:
            await self._background.aclose()
            await asyncio.gather(*(member.leave() for member in self._members))
            await self._worker.aclose()

    def _metrics_of(self, topic: str) -> GroupMetrics:
        found = self._metrics.get(topic)
        if found is None:
            found = self._metrics[topic] = group_metrics(topic, self._group, self._name)
        return found

    def _lost(self, partition: Partition) -> None:
        for member in self._members_of(partition):
            member.lose(partition.stream)

    def _no_group(self, partition: Partition) -> None:
        for member in self._members_of(partition):
            self._background.start(member.regroup(partition.stream), "regroup")

    def _members_of(self, partition: Partition) -> list[Member]:
        # Of several topics, those that come later may not be joined yet.
        return [one for one in self._members if one.has_topic and one.topic.name == partition.topic.name]


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
        worker = self._worker
        self._hands = self._handling = Handling(handler, options, worker.desk.ready, worker.finished, instance.clock)


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
        desk = self._worker.desk
        self._standstill = Standstill(desk.partitions, options.max_inflight, instance.clock)
        self._hands = self._pulling = Pulling(desk.ready, self._standstill, instance.clock)

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
        return self._standstill.reason

    async def _next(self) -> Delivery | None:
        delivery = await self._pulling.next(self._stopping)
        if delivery is None and self._failure is not None:
            raise self._failure
        return delivery
