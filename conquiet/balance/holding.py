"""The streams of one consumer: renewed together, and given up before another consumer can have them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from conquiet.balance.lease import StreamLease
from conquiet.balance.ledger import Given, Ledger, Renewed
from conquiet.kit.holding import Holder
from conquiet.kit.retrying import Lines
from conquiet.wire.connections import Connections
from conquiet.wire.lease import Lease, renewal_timeout

__all__ = ["LATE", "Streams"]

LATE: Final = "its lease was not renewed in time"
_LOOKS: Final = 10
"""How often within a lease's time the consumer looks at its own clock."""


class Streams(Holder[StreamLease]):
    """The leases of streams. One that could not be renewed in time is given up by the local clock, before the server's
    time is up; one whose holder makes no progress is not renewed."""

    def __init__(
        self,
        ledger: Ledger,
        progress_timeout: float | None,
        lost: Callable[[StreamLease, str], None],
        beaten: Callable[[Renewed], None],
        room: Callable[[], int],
        lines: Lines,
        lease: type[StreamLease] = StreamLease,
    ) -> None:
        self._ledger = ledger
        self._progress_timeout = progress_timeout
        self._room = room
        self._lease = lease
        # A connection that has gone silent is given up in time for another try over a new one.
        hasty = Connections(ledger.link.address.answering_within(renewal_timeout(ledger.ttl)))
        self._apart = Ledger(hasty, ledger.keys, ledger.owner, ledger.ttl, ledger.clock)
        self._last = Renewed(frozenset(), 0, 0, 0)
        super().__init__(
            lambda lease: lease.stream,
            self._renew_all,
            lost,
            self._apart.link.aclose,
            ledger.ttl,
            ledger.clock,
            f"service {ledger.keys.service!r}",
            lines,
            lambda: beaten(self._last),
        )
        self.renewals = 0
        """How many leases were renewed so far."""

    async def open(self) -> None:
        """Begin to renew; the first sign of life is given now, and may take as long as any call."""
        self._last = await self._ledger.renew([], self._room())
        await super().open()

    def take(self, given: Given, asked: float) -> StreamLease:
        """Hold what was asked for at local time ``asked``; renewed from now on."""
        inner = Lease.acquired(given.stream, self._ledger.owner, given.epoch, self._ledger.ttl, asked)
        lease = self._lease(given, self._ledger, inner)
        self.add([lease], asked)
        return lease

    def drop(self, lease: StreamLease) -> bool:
        """Hold it no longer, and end its reads; whether it was held."""
        lease.end()
        return super().drop(lease)

    async def watch(self) -> None:
        """Look at the clock, for as long as this runs."""
        while True:
            await self._ledger.clock.sleep(self._ledger.ttl / _LOOKS)
            self.give_up_late()

    def give_up_late(self) -> None:
        """Lose every lease that was not renewed in time."""
        now = self._ledger.clock.monotonic()
        for lease in self.leases:
            if not lease._lease.is_safe(now):
                self.lose(lease, LATE)

    async def _renew_all(self, held: list[StreamLease]) -> Collection[StreamLease]:
        asked = self._ledger.clock.monotonic()
        if self._progress_timeout is not None:
            held = [lease for lease in held if self._gets_on(lease, asked)]
        renewed = self._last = await self._apart.renew([(one.stream, one.epoch) for one in held], self._room())
        gone = [lease for lease in held if lease.stream in renewed.lost]
        for lease in held:
            if lease.stream not in renewed.lost:
                lease.renewed(asked)
        self.renewals += len(held) - len(gone)
        return gone

    def _gets_on(self, lease: StreamLease, now: float) -> bool:
        if self._progress_timeout is None or lease.waiting:
            return True
        return now - lease.progressed_at < self._progress_timeout
