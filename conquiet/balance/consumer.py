"""One consumer: what it owns, what it finds, what it tells, and how it shares."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from conquiet.balance.ending import Ends
from conquiet.balance.event_buffer import EventBuffer
from conquiet.balance.events import StreamAdded, StreamDisowned, StreamExpired, StreamTerminated
from conquiet.balance.holding import LATE, Streams
from conquiet.balance.lease import StreamLease
from conquiet.balance.ledger import Given, Late, Ledger, Renewed, Swept
from conquiet.balance.options import BalanceOptions
from conquiet.balance.running import Runner
from conquiet.balance.strays import Strays
from conquiet.balance.watch import Watch
from conquiet.errors import AlreadyClaimedError, ConfigError, QueueError, StreamNotOwnedError
from conquiet.kit.holding import TAKEN
from conquiet.kit.retrying import Lines
from conquiet.kit.service import Background
from conquiet.metrics import LeaseEnd, balance_metrics
from conquiet.wire.expiry import Expiry

__all__ = ["Consumer"]

_log = logging.getLogger("conquiet.balance")


class Consumer:
    """Puts the parts together: the ledger, the leases, the loops that look for streams, and the events."""

    def __init__(self, ledger: Ledger, options: BalanceOptions, lease: type[StreamLease]) -> None:
        self._ledger = ledger
        self._options = options
        self._service = options.service
        self.lines = Lines(_log)
        self.streams = Streams(
            ledger, options.progress_timeout, self._lost, self._beaten, self._offer, self.lines, lease
        )
        self.strays = Strays(ledger, self, lambda: self._watch.hurry())
        self._watch = Watch(ledger, self, self.strays, options.sweep, self.lines)
        self.event_buffer = EventBuffer(options.event_buffer, self.owns, self._watch.freed)
        self.metrics = balance_metrics(options.service, options.name)
        self.runner: Runner | None = None
        self._background = Background()
        self._renewals = 0
        self._giving = False
        self._leaving: list[StreamLease] = []
        """What is being given to others."""
        self._ends = Ends()
        self._is_over = False
        self._is_recovering = True
        """Whether it has not looked yet for all that was lost before it began."""

    # --- life -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin to look for streams, and to keep what is found."""
        await self._ledger.open()
        await self.streams.open()
        for work in (self._watch.read(), self._watch.sweep(), self.streams.watch()):
            self._background.start(work, "balance")
        if self._options.keyspace_hint is not None:
            enable = self._options.keyspace_hint == "enable"
            hint = Expiry(self._ledger.link, self._ledger.keys.mutex, self._watch.hurry, enable=enable)
            self._background.start(hint.listen(), "hint")

    async def drain(self, was_open: bool) -> None:
        """Look for nothing more, let handlers end, release everything, and leave."""
        self._is_over = True
        await self._background.aclose()
        leases = self._drop_all()
        if self.runner is not None:
            await self.runner.aclose()
        if was_open:
            await self._leave(leases)

    async def close(self) -> None:
        """Hold nothing more, and part with all connections."""
        self._is_over = True
        self._drop_all()
        await asyncio.gather(self._background.aclose(), self.streams.aclose(), self._ledger.link.aclose())

    def _drop_all(self) -> list[StreamLease]:
        leases = [*self.streams.leases, *self._leaving]
        self._leaving.clear()
        for lease in leases:
            self.streams.drop(lease)
        return leases

    async def _leave(self, leases: list[StreamLease]) -> None:
        strays = await self._strays_of(leases)
        leases += self._drop_all()  # a claim was under way
        held = [(lease.stream, lease.epoch) for lease in leases] + [(given.stream, given.epoch) for given in strays]
        try:
            done = await self._ledger.release(held, leaving=True)
        except QueueError as error:
            _log.warning("cannot release %d streams, their leases run out: %s", len(held), error)
        else:
            self.metrics.ended("released", sum(done[: len(leases)]))
        self.metrics.owned(0)

    async def _strays_of(self, leases: list[StreamLease]) -> list[Given]:
        try:
            return await self.strays.all({lease.entry_id for lease in leases})
        except QueueError as error:
            _log.warning("cannot look for streams that it was not told of, their leases run out: %s", error)
            return []

    def terminate(self, reason: str) -> None:
        """Tell the last event."""
        self.event_buffer.put(StreamTerminated(reason))

    def run(self, runner: Runner) -> None:
        """Take over what others have left from now on."""
        self.runner = runner
        self._watch.hurry()

    # --- at the user's wish -----------------------------------------------------------------------------------

    async def claim(self, stream: str) -> StreamLease:
        """Own a stream without an owner."""
        async with self.strays.asking(stream):
            if self._is_over:
                raise ConfigError("the balancer was closed meanwhile")
            asked = self._ledger.clock.monotonic()
            try:
                given = await self._ledger.claim(stream, self._epoch(stream))
            except AlreadyClaimedError:
                self.metrics.claimed(refused=True)
                raise
            self.metrics.claimed(refused=False)
            lease = self._adopt(given, asked)
        if self.runner is not None:
            self.runner.start(lease)
        return lease

    def mine(self, stream: str) -> StreamLease | None:
        """The lease of a stream that it owns, or whose end was asked for and not answered."""
        return self.streams.get(stream) or self._ends.get(stream)

    async def finish(self, lease: StreamLease) -> None:
        """Be done with a stream."""
        is_again = self._ends.of(lease) == "finished"
        with self.streams.ending(lease):
            try:
                with self._ends.asking(lease, "finished"):
                    await self._ledger.finish(lease.stream, lease.epoch, lease.entry_id, again=is_again)
            except StreamNotOwnedError:
                if self.streams.drop(lease):
                    self._lost(lease, TAKEN)
                raise
            if self.streams.drop(lease):
                self._gone("finished")

    def late(self, lease: StreamLease) -> None:
        """Give a stream up that was not renewed in time."""
        self.streams.lose(lease, LATE)

    async def release(self, lease: StreamLease) -> None:
        """Give a stream back."""
        is_again = self._ends.of(lease) == "released"
        with self.streams.ending(lease):
            with self._ends.asking(lease, "released"):
                [done] = await self._ledger.release([(lease.stream, lease.epoch)])
            released = done or is_again  # if it is not there to be given back any more, it was
            if self.streams.drop(lease):
                self._gone("released" if released else "lost")
        if not released:
            raise StreamNotOwnedError(f"stream {lease.stream!r} is another consumer's already")

    # --- what the loops find ------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more streams it can own now."""
        return min(self._options.max_streams - len(self.streams), self.event_buffer.room)

    @property
    def held(self) -> int:
        """How many streams it owns."""
        return len(self.streams)

    @property
    def known(self) -> set[str]:
        """The IDs of the entries of all streams that it knows to own, those included that it is giving to others."""
        return {lease.entry_id for lease in (*self.streams.leases, *self._leaving)}

    @property
    def told(self) -> list[StreamLease]:
        """The streams that it owns and of which no event is to come."""
        return [lease for lease in self.streams.leases if not self.event_buffer.will_tell(lease.stream, lease.epoch)]

    @property
    def takes_over(self) -> bool:
        """Whether it takes what others have left without being asked."""
        return self._options.auto_claim or self.runner is not None or self._is_recovering

    def owns(self, stream: str, epoch: int) -> bool:
        """Whether it owns a stream in this epoch, as far as it knows."""
        lease = self.streams.get(stream)
        return lease is not None and lease.epoch == epoch

    def found(self, given: Given, asked: float) -> None:
        """Own a stream, and tell."""
        self._adopt(given, asked)
        self.event_buffer.put(StreamAdded(given.stream, given.info, given.epoch, given.entry_id))

    def missing(self, late: Late) -> bool:
        """Tell of a stream without an owner, unless it will be taken over without being asked; whether that is done.

        While too many events wait, it is not.
        """
        if not self.takes_over:
            if not self.event_buffer.room:
                return False
            self.event_buffer.put(StreamExpired(late.stream, late.info, late.epoch, late.owner.partition("#")[0]))
        return True

    def set_aside(self, count: int) -> None:
        """Count what was no stream."""
        if count:
            _log.warning("service %r: %d entries were set aside", self._service, count)
            self.metrics.set_aside(count)

    def swept(self, swept: Swept) -> None:
        """Count what was found without an owner."""
        self._is_recovering = False
        if swept.lag_ms >= 0:
            self.metrics.swept(swept.lag_ms / 1000)

    def _adopt(self, given: Given, asked: float) -> StreamLease:
        before = self.streams.get(given.stream)
        if before is not None and self.streams.drop(before):
            self._lost(before, "it was lost for a while")
        self.metrics.acquired(1, int(bool(given.before)))
        lease = self.streams.take(given, asked)
        self.metrics.owned(len(self.streams))
        return lease

    def _epoch(self, stream: str) -> int | None:
        """In which it knows to own a stream, if it does."""
        mine = [lease.epoch for lease in self._leaving if lease.stream == stream]
        held = self.streams.get(stream)
        return held.epoch if held is not None else mine[0] if mine else None

    def _lost(self, lease: StreamLease, reason: str) -> None:
        how = self._ends.of(lease)
        if how is not None and reason != LATE:
            self._gone(how)  # as it was asked to; only the answer did not come
            return
        self._ends.forget(lease)
        _log.warning("service %r: stream %r is lost: %s", self._service, lease.stream, reason)
        self._gone("lost")
        self.event_buffer.put(StreamDisowned(lease.stream, lease.info, lease.epoch, reason))

    def _gone(self, how: LeaseEnd) -> None:
        self.metrics.ended(how, 1)
        self.metrics.owned(len(self.streams))
        self._watch.freed()

    # --- sharing ------------------------------------------------------------------------------------------------

    def _offer(self) -> int:
        """How many more streams of others it would take over."""
        return self.room if self._options.auto_claim or self.runner is not None else 0

    def _beaten(self, renewed: Renewed) -> None:
        if renewed.lost:
            self.strays.doubt()  # a server that lost its last writes may have it for the owner in an epoch before
        self.metrics.renewed(self.streams.renewals - self._renewals)
        self._renewals = self.streams.renewals
        wanted = self._options.rebalance
        shares = self.runner is not None if wanted is None else wanted
        surplus = len(self.streams) - math.ceil(renewed.total / max(renewed.alive, 1))
        many = min(math.ceil(surplus / 2), renewed.room)
        if shares and many > 0 and not self._giving:
            self._giving = True
            self._background.start(self._give_away(self.streams.leases[-many:]), "share")

    async def _give_away(self, leases: Iterable[StreamLease]) -> None:
        try:
            for lease in leases:
                if not self.streams.drop(lease):
                    continue
                self._leaving.append(lease)
                self.event_buffer.put(StreamDisowned(lease.stream, lease.info, lease.epoch, "given to others"))
                if self.runner is not None:
                    await self.runner.stop(lease)
                await self._ledger.release([(lease.stream, lease.epoch)])
                self._leaving.remove(lease)
                self._gone("released")
        except QueueError as error:
            self.lines.warn("cannot give streams away, trying again", error)
            self.strays.doubt(*(lease.stream for lease in self._leaving))
            self._leaving.clear()
        finally:
            self._giving = False
