"""The only loop of a consumer, one a node: it asks each partition what it wants, sends it, and hands out what came."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from conquiet.errors import QueueError
from conquiet.kit.retrying import Lines, Retrying
from conquiet.kit.service import Background
from conquiet.metrics import GroupMetrics
from conquiet.topics.codec import Codec
from conquiet.topics.consume.delivery import Deliveries, Delivery
from conquiet.topics.consume.handling import Handling
from conquiet.topics.consume.housekeeping import Housekeeping
from conquiet.topics.consume.node import Node
from conquiet.topics.consume.owned import Owned
from conquiet.topics.consume.partition import Partition
from conquiet.topics.consume.partition_leases import Acquired
from conquiet.topics.consume.pulling import Pulling
from conquiet.topics.consume.requests import Step
from conquiet.topics.consume.room import shared_out
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.partition import Answer, OwnedPartition, Page, Taken, send
from conquiet.wire.address import Endpoint
from conquiet.wire.capabilities import is_group_lost

__all__ = ["Engine"]

_log = logging.getLogger("conquiet.topics")

_COLD_POLL: Final = 0.005
"""While some partitions keep the loop busy nobody waits for news of the others: these are asked as often as this."""
_LINGER: Final = 0.001
_AFTER_MISTAKE: Final = 2.0

_Plan: TypeAlias = list[tuple[Owned, Step]]


class Engine:
    """Takes, hands out and settles the messages of the partitions that the members of a group acquire.

    Nothing is taken but by a script that first checks that the lease is still held, so an owner that was frozen or cut
    off cannot be given messages. What was handled is acknowledged by the same call that takes more. Redis being away
    delays; it loses nothing and ends nothing.
    """

    def __init__(
        self,
        instance: Instance,
        group: str,
        codec: Codec,
        options: SubscribeOptions,
        metrics_of: Callable[[str], GroupMetrics],
        on_lost: Callable[[Partition], None],
        on_no_group: Callable[[Partition], None],
        lines: Lines,
        delivery: type[Delivery] = Delivery,
    ) -> None:
        self.partitions: dict[str, Owned] = {}
        self._instance = instance
        self._group = group
        self._codec = codec
        self._options = options
        self._delivery = delivery
        self._metrics_of = metrics_of
        self._on_lost = on_lost
        self._on_no_group = on_no_group
        self._hands: Handling | Pulling | None = None
        self._housekeeping = Housekeeping(instance, self.partitions, group)
        self._nodes: dict[Endpoint, Node] = {}
        self._lines = lines
        self._background = Background()
        self._is_paused = self._is_ending = False

    def start(self, hands: Handling | Pulling) -> None:
        """Let ``hands`` handle what is taken, and keep house."""
        self._hands = hands
        self._housekeeping.start()

    # --- the member's side ------------------------------------------------------------------------------------

    def add(self, acquired: Acquired) -> None:
        """Begin with a partition: first with what is pending there, in order, then with what is new."""
        topic, index, stream, lease = acquired.topic.name, acquired.index, acquired.stream, acquired.lease
        letters = self._options.dead_letter
        made = Deliveries(self._delivery, self._codec, letters, (topic, index, self._group), lease.epoch)
        partition = Partition(acquired, self._options, made)
        partition.pause(self._is_paused or self._is_ending)
        scripts = OwnedPartition(self._instance.keys, self._instance.clock, topic, index, stream, self._group, lease)
        owned = made.owner = Owned(partition, scripts, self._metrics_of(topic), self._options, self.finished)
        self.partitions[stream] = owned
        self._housekeeping.letters.set()
        self._background.start(self._place(owned), "place")

    async def drain(self, stream: str, *, at_end: bool = False) -> None:
        """Finish what is being handled of a partition and settle it; what was not begun stays pending.

        Returns early if :meth:`keep` calls it off.
        """
        owned = self.partitions.get(stream)
        if owned is None:
            return
        owned.partition.drain()
        is_pulled = self._hands is not None and not self._hands.finishes
        if at_end and is_pulled:
            owned.hand.give_up(math.inf)
        self._wake([owned])
        limit = self._options.max_processing_time if is_pulled else None
        if await owned.drained(self._instance.clock, limit, is_quiet=at_end) and owned.outbox:
            await self._housekeeping.forward(owned)

    def keep(self, stream: str) -> None:
        """Call a drain off that was begun: the partition, of which nothing was released, goes on as before."""
        owned = self.partitions.get(stream)
        if owned is not None:
            owned.partition.keep()
            owned.settled.set()
            self._wake([owned])

    def limit(self, stream: str, id: str | None) -> None:
        """Take new entries of a partition up to ``id`` only, or all."""
        owned = self.partitions.get(stream)
        if owned is not None and owned.partition.limit != id:
            owned.partition.limit_to(id)
            self._wake([owned])

    def drop(self, stream: str) -> None:
        """Forget a partition: it is released or lost."""
        owned = self.partitions.pop(stream, None)
        if owned is not None:
            owned.abandon()
            self._wake(self.partitions.values())  # there is more room, and a suspect less

    # --- the subscription's side ------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """Deliveries that are not settled, parked ones apart."""
        return sum(owned.hand.inflight for owned in self.partitions.values())

    @property
    def errors(self) -> int:
        """Failures of exchanges since the last that succeeded, and what fails of the work beside them."""
        failures = sum(node.retrying.failures + node.news.failures for node in self._nodes.values())
        return failures + self._housekeeping.failures

    @property
    def held_up(self) -> str | None:
        """What a hand-over has been waiting for, for more than a moment."""
        return next((owned.waits_for for owned in self.partitions.values() if owned.waits_for), None)

    @property
    def busy(self) -> frozenset[str]:
        """The streams of which a handler still runs in a thread, which nothing can end."""
        owners = () if self._hands is None else self._hands.in_threads
        return frozenset(owned.stream for owned in owners)

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is taken."""
        return self._is_paused

    def pause(self) -> None:
        """Take nothing more; what was taken goes on, and the partitions stay owned."""
        self._is_paused = True
        self._pause_all()

    def resume(self) -> None:
        """Take again, unless the end was asked for."""
        self._is_paused = False
        self._pause_all()

    def take_no_more(self) -> None:
        """The end was asked for: what is taken from now on would only be in the way of the next owner."""
        self._is_ending = True
        self._pause_all()

    def _pause_all(self) -> None:
        for owned in self.partitions.values():
            owned.partition.pause(self._is_paused or self._is_ending)
        self._wake(self.partitions.values())

    async def end(self) -> None:
        """Take nothing more, finish what is being handled within the drain time, then stop."""
        self.take_no_more()
        draining = [self.drain(stream, at_end=True) for stream in list(self.partitions)]
        try:
            async with asyncio.timeout(self._options.drain_timeout):
                await asyncio.gather(*draining)
        except TimeoutError:
            _log.warning("%d messages are still being handled: they stay pending", self.inflight)
        if self._hands is not None:
            await self._hands.aclose()

    async def aclose(self) -> None:
        """Stop the loops; unsettled deliveries stay pending."""
        await self._housekeeping.aclose()
        await self._background.aclose()
        await asyncio.gather(*(node.news.aclose() for node in self._nodes.values()))
        for owned in list(self.partitions.values()):
            owned.abandon()

    # --- outcomes ---------------------------------------------------------------------------------------------

    def finished(self, delivery: Delivery, result: Any, error: BaseException | None, seconds: float) -> None:
        """A delivery was handled, or failed with ``error``."""
        owned = delivery.owner
        is_first = owned.finished(delivery, error, seconds)
        if is_first or owned.hand.has_ready:
            self._went_on(owned, is_first)

    def finished_all(self, deliveries: Sequence[Delivery], seconds: float) -> None:
        """Deliveries of one partition were handled, each in so many seconds."""
        owned = deliveries[0].owner
        self._went_on(owned, owned.finished_all(deliveries, seconds))

    def _went_on(self, owned: Owned, is_news: bool) -> None:
        if owned.hand.has_ready:
            self._hand_out([owned])
        if is_news and owned.node is not None:
            owned.node.event.set()

    # --- one loop a node --------------------------------------------------------------------------------------

    def _wake(self, some: Iterable[Owned]) -> None:
        for owned in some:
            if owned.node is not None:
                owned.node.event.set()

    async def _place(self, owned: Owned) -> None:
        """Give a partition to the loop of its node."""
        retrying = Retrying(self._lines, self._instance.clock)
        while self.partitions.get(owned.stream) is owned and owned.node is None:
            try:
                home = await self._instance.link.home(owned.stream)
            except QueueError as error:
                await retrying.failed(f"cannot find the node of {owned.stream!r}", error)
                continue
            node = self._nodes.get(home)
            if node is None:
                node = self._nodes[home] = Node(home, self._instance, self._lines)
                self._background.start(self._run(node), "engine")
            owned.node = node
            node.event.set()

    def _at(self, node: Node) -> list[Owned]:
        return [owned for owned in self.partitions.values() if owned.node is node and not owned.partition.is_lost]

    async def _run(self, node: Node) -> None:
        while True:
            mine = self._at(node)
            try:
                await self._look(node, mine)
                if not await self._turn(node, mine):
                    patience = node.rest(self._instance.clock.monotonic(), self._options.poll_timeout)
                    await self._instance.clock.wait(node.event, patience)
            except QueueError as error:
                await node.retrying.failed("Redis is away", error)
                self._distrust(mine)
                await self._move(mine)
            except Exception:
                _log.exception("a mistake in the engine; it goes on")
                await self._instance.clock.sleep(_AFTER_MISTAKE)

    async def _look(self, node: Node, mine: Sequence[Owned]) -> None:
        """See what has changed since the last turn."""
        is_another = await node.is_another(mine)
        self._distrust(owned for owned in mine if is_another or owned.partition.is_doubtful)
        was_deaf = node.news.failures
        heard = node.hear(self._instance.clock.monotonic(), self._options.poll_timeout, self.partitions)
        for stream, first in heard.items():
            if (owned := self.partitions.get(stream)) is not None:
                owned.partition.news(first)
        if node.news.failures > was_deaf:
            self._distrust(mine)
            await self._move(mine)

    @staticmethod
    def _distrust(some: Iterable[Owned]) -> None:
        for owned in some:
            owned.partition.distrust()

    async def _move(self, mine: Iterable[Owned]) -> None:
        """After a failure partitions may live on other nodes than before."""
        if self._instance.link.address.kind == "cluster":
            for owned in mine:
                owned.node = None
                self._background.start(self._place(owned), "place")

    async def _turn(self, node: Node, mine: Sequence[Owned]) -> bool:
        """One exchange with the node, if there is anything to say; whether there was."""
        if self._hands is not None and self._hands.has_ready:
            await asyncio.sleep(0)  # what was just taken is handled first, and settled along with the next take
        free = self._free()
        if 0 < free < self._options.max_inflight // 4 and not node.has_lingered:
            # Handlers are at work: what a few more of them finish goes along.
            node.has_lingered = True
            await asyncio.sleep(_LINGER)
            return True
        node.has_lingered = False
        node.event.clear()
        plan = self._plan(node, mine, free)
        if plan:
            await self._exchange(node, plan)
        return bool(plan)

    def _free(self) -> int:
        # What other nodes were asked for counts too: it may be on its way.
        return self._options.max_inflight - sum(owned.partition.load for owned in self.partitions.values())

    def _plan(self, node: Node, mine: Sequence[Owned], free: int) -> _Plan:
        """What all partitions of a node want; what they wait for, if they want nothing, is noted at the node."""
        now = self._instance.clock.monotonic()
        hungry = [owned.partition for owned in mine if owned.partition.is_hungry(now)]
        if not node.news.is_waiting and any(part.is_hot for part in hungry):
            for owned in mine:
                if now >= max(owned.partition.asked_at, node.news.heard_at) + _COLD_POLL:
                    owned.partition.news()
            hungry = [owned.partition for owned in mine if owned.partition.is_hungry(now)]
        everything = [owned.partition for owned in self.partitions.values()]
        room, spare = shared_out(free, everything, node.in_turn(hungry), self._options)
        is_alone = all(owned.hand.isolation.current is None for owned in self.partitions.values())
        plan: _Plan = []
        node.begin(now + self._options.poll_timeout)
        for owned in mine:
            request = owned.partition.wants(now, room.get(owned.partition, 0), spare, may_isolate=is_alone)
            is_alone = is_alone and owned.hand.isolation.current is None
            self._hand_out([owned])
            plan += [(owned, step) for step in request.steps]
            if not request.steps:
                node.note(owned.stream, request)
        # Pages first: a server that has to be sent a script again runs it later than the others, and may so give
        # what is settled along with it. That is known to be in hand only until its settlement is answered.
        plan.sort(key=lambda one: one[1].kind != "page")
        return plan

    # --- an exchange ------------------------------------------------------------------------------------------

    async def _exchange(self, node: Node, plan: _Plan) -> None:
        """Send steps in one write, and act on the answers."""
        started = time.perf_counter()
        try:
            answers = await send(self._instance, plan[0][0].stream, [owned.asked(step) for owned, step in plan])
        except BaseException:
            for owned, step in plan:
                self._torn(owned, step)
            raise
        seconds, now = time.perf_counter() - started, self._instance.clock.monotonic()
        node.retrying.succeeded()
        for (owned, step), answer in zip(plan, answers, strict=True):
            self._answered(owned, step, answer, seconds, now)
        self._hand_out(owned for owned, _ in plan)
        if len(self._nodes) > 1:  # what was asked for and not given is room for the others
            for other in self._nodes.values():
                if other is not node:
                    other.event.set()

    def _answered(
        self, owned: Owned, step: Step, answer: Answer | Exception | None, seconds: float, now: float
    ) -> None:
        was_lost = owned.partition.is_lost
        if isinstance(answer, Exception):
            self._torn(owned, step)
            owned.partition.refused(now)
            if is_group_lost(answer):
                self._on_no_group(owned.partition)
            else:
                self._lines.warn(f"{owned.stream!r} at {self._instance.link.address} refused", answer)
            return
        if answer is None:
            owned.fenced(step)
        else:
            owned.received(step, answer, seconds, now)
            if isinstance(answer, Taken | Page) and answer.ghosts:
                _log.warning("%r: %d pending IDs have no entry any more", owned.stream, answer.ghosts)
                owned.metrics.ghosts(owned.partition.index, answer.ghosts)
            if step.kind == "bury":
                self._housekeeping.letters.set()
        if owned.partition.is_lost and not was_lost:
            self._on_lost(owned.partition)

    def _torn(self, owned: Owned, step: Step) -> None:
        owned.partition.torn(step)
        if owned.partition.is_lost:
            owned.abandon()  # nobody asks again, and callers that wait for it have to hear

    def _hand_out(self, some: Iterable[Owned]) -> None:
        assert self._hands is not None
        for owned in some:
            if owned.hand.has_ready:
                self._hands.begin(owned, owned.hand.ready())
