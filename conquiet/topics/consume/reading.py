"""Waiting for news, and taking it: one loop for all partitions of a node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from conquiet.errors import QueueError
from conquiet.kit.service import Background
from conquiet.topics.consume.desk import AFTER_ERROR, Desk
from conquiet.topics.consume.exchange import Exchanges, Step
from conquiet.topics.consume.partition import Partition, Reader
from conquiet.topics.options import SubscribeOptions
from conquiet.topics.server.instance import Instance
from conquiet.wire import streams
from conquiet.wire.address import Endpoint
from conquiet.wire.interrupt import Interrupt

__all__ = ["Reading"]

_log = logging.getLogger("conquiet.topics")

_PAGE: Final = 500
_SHARE: Final = 32
"""A take is not divided into smaller ones than this: a script call costs as much as many entries."""
_COLD_POLL: Final = 0.005
"""While some partitions keep the loop busy nobody waits for news of the others: these are asked as often as this."""
_LINGER: Final = 0.001
_MOST_POLLS: Final = 20
_CLUSTER_WAIT: Final = 0.1
_CLUSTER_RATE: Final = 30


class Reading:
    """Takes for a desk whatever its partitions have, as long as there is room.

    Waiting has no side effect on the server: nothing is taken but by a script that first checks that the lease is
    still held, so an owner that was frozen or cut off cannot be given messages. Under load there is no waiting, and
    what was handled is acknowledged by the same call that takes more.
    """

    def __init__(self, instance: Instance, desk: Desk, exchanges: Exchanges, options: SubscribeOptions) -> None:
        self.is_stopped = False
        """Whether nothing new is taken, while what was taken goes on."""
        self._instance = instance
        self._desk = desk
        self._exchanges = exchanges
        self._options = options
        self._readers: dict[Endpoint, _Reader] = {}
        self._background = Background()

    def add(self, partition: Partition) -> None:
        """Read a partition from now on."""
        self._background.start(self._place(partition), "place")

    def kick(self, partition: Partition) -> None:
        """Something waits to be settled: the reader takes it along, unless it is waiting for news."""
        reader = partition.reader
        if reader is not None:
            reader.event.set()
            if reader.is_waiting and not reader.is_flushing:
                reader.is_flushing = True
                self._background.start(self._flush(reader), "flush")

    def wake_all(self) -> None:
        """Let every loop look again."""
        for reader in self._readers.values():
            reader.wake()

    async def aclose(self) -> None:
        """End the loops."""
        await self._background.aclose()

    # --- settling while a reader waits ------------------------------------------------------------------------

    async def _flush(self, reader: Reader) -> None:
        try:
            while reader.is_waiting:
                steps: list[Step] = []
                for partition in self._parts(reader):
                    steps += self._settlements(partition)
                if not steps:
                    break
                await self._exchange(reader, steps)
        except QueueError as error:
            await self._pause_after(error)
            reader.wake()  # it tries again
        finally:
            reader.is_flushing = False

    def _settlements(self, partition: Partition) -> Iterable[Step]:
        if partition.lease.lost or self._instance.clock.monotonic() < partition.ask_at:
            return
        if partition.failed:
            yield from self._exchanges.failures(partition)
        if partition.acks:
            yield self._exchanges.take(partition, 0, 0)

    # --- one loop a node --------------------------------------------------------------------------------------

    async def _place(self, partition: Partition) -> None:
        """Give a partition to the loop of its node."""
        failures = 0
        while partition.stream in self._desk.partitions and partition.reader is None:
            try:
                home = await self._instance.link.home(partition.stream)
            except QueueError as error:
                _log.warning("cannot find the node of %r: %s", partition.stream, error)
                await self._instance.clock.sleep(AFTER_ERROR.delay(failures))
                failures += 1
                continue
            reader = self._readers.get(home)
            if reader is None:
                reader = self._readers[home] = _Reader(home)
                self._background.start(self._read(reader), "reader")
            partition.reader = reader
            reader.wake()

    async def _read(self, reader: _Reader) -> None:
        while True:
            parts = self._parts(reader)
            try:
                await self._look_at_home(reader, parts)
                if not await self._turn(reader, parts):
                    await self._rest(reader, parts)
            except QueueError as error:
                await self._pause_after(error)
                self._distrust(parts)
                await self._move(parts)
            except Exception:
                _log.exception("a mistake in the reader; it goes on")
                await self._instance.clock.sleep(AFTER_ERROR.cap)

    async def _look_at_home(self, reader: _Reader, parts: Sequence[Partition]) -> None:
        """After a failover the node is another, after a restart the connection, also if nobody noticed a failure."""
        opened, reader.opened = reader.opened, self._instance.link.opened(reader.home)
        if opened != reader.opened:
            self._distrust(parts)
        self._distrust([part for part in parts if part.doubt.is_open])
        if parts and self._instance.link.address.kind != "single":
            stream = parts[0].stream
            seen, reader.seen = reader.seen, (stream, await self._instance.link.home(stream))
            if seen[0] == stream and seen != reader.seen:
                self._distrust(parts)

    @staticmethod
    def _distrust(parts: Sequence[Partition]) -> None:
        """The server may have forgotten what it confirmed: what is pending there is looked at again."""
        for part in parts:
            part.distrust()

    async def _exchange(self, reader: Reader, steps: Sequence[Step]) -> None:
        try:
            await self._desk.exchange(steps)
        finally:
            if len(self._readers) > 1:  # what was asked for and not given is room for the others
                for other in self._readers.values():
                    if other is not reader:
                        other.event.set()

    async def _turn(self, reader: _Reader, parts: Sequence[Partition]) -> bool:
        """One exchange with the node, if there is anything to say; whether there was."""
        if self._desk.ready:
            await asyncio.sleep(0)  # what was just taken is handled first, and settled along with the next take
        room = self._room()
        if 0 < room < self._options.max_inflight // 4 and not reader.has_lingered:
            # Handlers are at work: what a few more of them finish goes along.
            reader.has_lingered = True
            await asyncio.sleep(_LINGER)
            return True
        reader.has_lingered = False
        reader.event.clear()
        steps = self._plan(reader, parts)
        if steps:
            await self._exchange(reader, steps)
        return bool(steps)

    def _parts(self, reader: Reader) -> list[Partition]:
        return [part for part in self._desk.partitions.values() if part.reader is reader and not part.lease.lost]

    def _room(self) -> int:
        # What other nodes were asked for counts too: it may be on its way.
        parts = self._desk.partitions.values()
        return self._options.max_inflight - sum(
            len(part.held) + part.unwritten + part.sending + part.asking for part in parts
        )

    def _plan(self, reader: _Reader, parts: Sequence[Partition]) -> list[Step]:
        """What to take, and what to settle along with it; nothing if there is nothing to take."""
        now = self._instance.clock.monotonic()
        is_busy = any(part.hot for part in parts)
        hungry: list[Partition] = []
        for part in parts:
            if part.resume(now):
                self._desk.wake_hands()
            unheard = is_busy and now >= max(part.cold_at, reader.heard_at) + _COLD_POLL
            if self._may_take(part, now) and (unheard or self._is_hungry(part, now)):
                hungry.append(part)
        takes = self._takes(reader, hungry, now)
        if not takes:
            return []
        steps = [step for part in parts for step in self._settlements(part)] + takes
        # Takeovers first: a server that has to be sent a script again runs it later than the others, and may so give
        # what is settled along with it. That is known to be in hand only until its settlement is answered.
        return sorted(steps, key=lambda step: step.kind != "takeover")

    def _may_take(self, part: Partition, now: float) -> bool:
        idle = self.is_stopped or part.is_draining or part.is_careful
        return not idle and now >= part.ask_at and part.lease.is_safe(now)

    def _is_hungry(self, part: Partition, now: float) -> bool:
        return part.page is not None or part.hot or part.is_due(now)

    def _takes(self, reader: _Reader, hungry: list[Partition], now: float) -> list[Step]:
        room = self._room()
        if not hungry:
            return []
        # In turn, so that with little room each partition has its share of it.
        reader.turn += 1
        start = reader.turn % len(hungry)
        hungry = hungry[start:] + hungry[:start]
        most = self._options.batch_size
        asked = max(1, min(len(hungry), room // min(_SHARE, most)))
        share = min(most, max(room // asked, 0))
        steps: list[Step] = []
        for at, part in enumerate(hungry):
            step = self._take(part, share if at < asked else 0, now)
            if step is not None:
                steps.append(step)
        return steps

    def _take(self, part: Partition, share: int, now: float) -> Step | None:
        if part.page is not None:
            if share > 0:
                return self._exchanges.takeover(part, min(_PAGE, share))
            # More may be pending behind a parked message than there is room for.
            return self._exchanges.take(part, 0, 1) if part.blocks and part.is_due(now) else self._only_acks(part)
        fresh = 0 if part.is_blocked or part.is_at_limit or part.blocked * 2 >= self._options.max_inflight else share
        # What blocks others is let in even when there is no room: else none would ever be made.
        due = max(share, 1) if part.blocks else share
        if not fresh and not (due and part.is_due(now)):
            return self._only_acks(part)
        return self._exchanges.take(part, fresh, due)

    def _only_acks(self, part: Partition) -> Step | None:
        return self._exchanges.take(part, 0, 0) if part.acks else None

    # --- waiting ------------------------------------------------------------------------------------------------

    async def _rest(self, reader: _Reader, parts: Sequence[Partition]) -> None:
        """Nothing to say: wait for news, for room, for something that falls due, or to be woken."""
        now = self._instance.clock.monotonic()
        cold = [] if self._room() <= 0 else [part for part in parts if self._may_take(part, now) and part.page is None]
        patience = self._patience(parts, now)
        # One that was refused is asked by itself: a wait for many fails with any of them.
        cold = [part for part in cold if not (part.is_blocked or part.is_at_limit or part.failures)]
        if cold:
            await self._listen(reader, cold, patience)
        elif steps := [step for part in parts for step in self._settlements(part)]:
            await self._exchange(reader, steps)
        else:
            await self._instance.clock.wait(reader.event, patience)

    def _patience(self, parts: Sequence[Partition], now: float) -> float:
        # What is due is let in without room only where it blocks others.
        crowded = self._room() <= 0
        moments = [part.due_at for part in parts if part.due_at is not None and (part.blocks or not crowded)]
        moments += [part.ask_at for part in parts if part.ask_at > now]
        return max(min([self._options.poll_timeout, *(moment - now for moment in moments)]), 0.001)

    async def _listen(self, reader: _Reader, cold: list[Partition], patience: float) -> None:
        link = self._instance.link
        heard = cold
        if link.address.kind == "cluster":
            heard = [max(cold, key=lambda part: part.taken)]
            patience = min(patience, max(_CLUSTER_WAIT, len(cold) / _CLUSTER_RATE))
        ids = {part.stream: part.last_id for part in heard}
        reader.interrupt = Interrupt()
        reader.is_waiting = True
        try:
            for part in self._parts(reader):
                if part.has_settlements:
                    self.kick(part)
            reply = await link.wait(
                heard[0].stream, streams.xread(ids, block_ms=max(round(patience * 1000), 1)), patience, reader.interrupt
            )
        except QueueError:
            for part in heard:  # asked one by one, each tells whether it was the one
                part.hot = True
            raise
        finally:
            reader.is_waiting = False
            reader.heard_at = self._instance.clock.monotonic()
        for stream in streams.streams_of(reply):
            if (found := self._desk.partitions.get(stream)) is not None:
                found.hot = True
        if not reply or len(heard) < len(cold):
            self._poll(reader, [part for part in cold if not part.hot])

    def _poll(self, reader: _Reader, cold: list[Partition]) -> None:
        """Ask some of the others too: a wait does not tell of what was replayed, delayed, or is on another slot."""
        is_cluster = self._instance.link.address.kind == "cluster"
        now = self._instance.clock.monotonic()
        if not is_cluster and now < reader.poll_at:
            return
        reader.poll_at = now + self._options.poll_timeout
        most = len(cold) if is_cluster else _MOST_POLLS
        for part in sorted(cold, key=lambda part: part.cold_at)[:most]:
            part.hot = True

    async def _pause_after(self, error: QueueError) -> None:
        self._desk.errors += 1
        _log.warning("Redis is away, trying again: %s", error)
        await self._instance.clock.sleep(AFTER_ERROR.delay(min(self._desk.errors, 10)))

    async def _move(self, parts: Sequence[Partition]) -> None:
        """After a failure partitions may live on other nodes than before."""
        if self._instance.link.address.kind == "cluster":
            for part in parts:
                part.reader = None
                self._background.start(self._place(part), "place")


class _Reader:
    """The loop of one node: what it waits with, and how it is woken."""

    def __init__(self, home: Endpoint) -> None:
        self.home = home
        self.seen: tuple[str, Endpoint] = ("", home)
        """A partition, and the node where it was last."""
        self.opened = 0
        """How many connections that node has had."""
        self.event = asyncio.Event()
        self.interrupt = Interrupt()
        self.is_waiting = False
        self.is_flushing = False
        self.has_lingered = False
        self.turn = 0
        self.poll_at = self.heard_at = 0.0

    def wake(self) -> None:
        self.event.set()
        if self.is_waiting:
            self.interrupt.request()
