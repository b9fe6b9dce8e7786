"""All partitions that a subscription owns, and everything that is done with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from conquiet.metrics import GroupMetrics
from conquiet.topics.consume.delivery import Delivery
from conquiet.topics.consume.desk import Desk, Hands
from conquiet.topics.consume.exchange import Exchanges
from conquiet.topics.consume.housekeeping import Housekeeping
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.partition_leases import Acquired
from conquiet.topics.consume.reading import Reading
from conquiet.topics.consume.suspects import Suspects
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance

__all__ = ["Worker"]

_log = logging.getLogger("conquiet.topics")


class Worker:
    """Takes, hands out and settles the messages of the partitions that a member of a group acquires.

    Redis being away delays; it loses nothing and ends nothing.
    """

    def __init__(
        self,
        instance: Instance,
        group: str,
        exchanges: Exchanges,
        options: SubscribeOptions,
        metrics_of: Callable[[str], GroupMetrics],
        on_lost: Callable[[Partition], None],
        on_no_group: Callable[[Partition], None],
    ) -> None:
        self.desk = Desk(instance, exchanges, options, self)
        self._reading = Reading(instance, self.desk, exchanges, options)
        self._suspects = Suspects(instance, self.desk, exchanges)
        self._housekeeping = Housekeeping(instance, self.desk, group)
        self._options = options
        self._metrics_of = metrics_of
        self._on_lost = on_lost
        self._on_no_group = on_no_group
        self._is_paused = self._is_ending = False

    def start(self, hands: Hands) -> None:
        """Let ``hands`` handle what is taken, and keep house."""
        self.desk.hands = hands
        self._housekeeping.start()

    # --- the member's side ------------------------------------------------------------------------------------

    def add(self, acquired: Acquired) -> None:
        """Begin with a partition: first with what is pending there, in order, then with what is new."""
        metrics = self._metrics_of(acquired.topic.name)
        order, batches = self._options.order, self._options.batch_handler
        partition = Partition(acquired, order, metrics, self.desk.ready, self.desk, keyless=batches)
        self.desk.partitions[acquired.stream] = partition
        self.desk.letters.set()
        self._reading.add(partition)

    async def drain(self, stream: str, *, at_end: bool = False) -> None:
        """Finish what is being handled of a partition and settle it; what was not begun stays pending."""
        partition = self.desk.partitions.get(stream)
        if partition is None:
            return
        partition.is_draining = True
        partition.forget_unstarted()
        if at_end and self.desk.hands is not None and not self.desk.hands.finishes:
            partition.held.clear()
        self._suspects.look(partition)
        self._reading.kick(partition)
        while self.desk.partitions.get(stream) is partition and (partition.held or partition.leaving):
            partition.settled.clear()
            await partition.settled.wait()
        if partition.outbox:
            await self._housekeeping.forward(partition)

    def limit(self, stream: str, id: str | None) -> None:
        """Take new entries of a partition up to ``id`` only, or all."""
        partition = self.desk.partitions.get(stream)
        if partition is not None and partition.limit != id:
            partition.limit = id
            partition.hot = True
            self._reading.wake_all()

    def drop(self, stream: str) -> None:
        """Forget a partition: it is released or lost."""
        partition = self.desk.partitions.pop(stream, None)
        if partition is not None:
            self.desk.abandon(partition)
            self._suspects.look(partition)
            self._reading.wake_all()

    # --- the desk's side --------------------------------------------------------------------------------------

    def settled(self, partition: Partition) -> None:
        """Something waits to be written."""
        self._reading.kick(partition)

    def suspects(self, partition: Partition) -> None:
        """There are entries to be handled alone, or the last one was."""
        self._suspects.look(partition)

    def lost(self, partition: Partition) -> None:
        """The lease of a partition is somebody else's."""
        self._on_lost(partition)

    def no_group(self, partition: Partition) -> None:
        """The server does not know the group any more."""
        self._on_no_group(partition)

    # --- the subscription's side ------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """Deliveries that are not settled, parked ones apart."""
        return sum(len(part.held) + len(part.leaving) for part in self.desk.partitions.values())

    @property
    def errors(self) -> int:
        """Failures of exchanges since the last that succeeded, and what fails of the work beside them."""
        return self.desk.errors + self._housekeeping.failures

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is taken."""
        return self._is_paused

    def pause(self) -> None:
        """Take nothing more; what was taken goes on, and the partitions stay owned."""
        self._is_paused = self._reading.is_stopped = True
        self._reading.wake_all()

    def resume(self) -> None:
        """Take again, unless the end was asked for."""
        self._is_paused = False
        self._reading.is_stopped = self._is_ending
        self._reading.wake_all()

    def take_no_more(self) -> None:
        """The end was asked for: what is taken from now on would only be in the way of the next owner."""
        self._is_ending = self._reading.is_stopped = True
        self._reading.wake_all()

    def finished(self, delivery: Delivery, error: BaseException | None, seconds: float) -> None:
        """A handler is done with a delivery."""
        self.desk.finished(delivery, error, seconds)

    async def end(self) -> None:
        """Take nothing more, finish what is being handled within the drain time, then stop."""
        self.take_no_more()
        draining = [self.drain(stream, at_end=True) for stream in list(self.desk.partitions)]
        try:
            async with asyncio.timeout(self._options.drain_timeout):
                await asyncio.gather(*draining)
        except TimeoutError:
            _log.warning("%d messages are still being handled: they stay pending", self.inflight)
        if self.desk.hands is not None:
            await self.desk.hands.aclose()

    async def aclose(self) -> None:
        """Stop the loops; unsettled deliveries stay pending."""
        for part in (self._housekeeping, self._suspects, self._reading):
            await part.aclose()
        for partition in list(self.desk.partitions.values()):
            self.desk.abandon(partition)
