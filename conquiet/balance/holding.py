"""The streams of one consumer: all renewed by one loop, and given up before anybody else can have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Final

from conquiet.balance.lease import StreamLease
from conquiet.balance.ledger import Given, Ledger, Renewed
from conquiet.kit.keepalive import Keepalive
from conquiet.kit.loopthread import on_private_loop
from conquiet.wire.lease import Lease
from conquiet.wire.link import Link

__all__ = ["LATE", "Holding"]

_log = logging.getLogger("conquiet.balance")
LATE: Final = "its lease was not renewed in time"
_LOOKS: Final = 10
"""How often within a lease's time the holder looks at its own clock."""


class Holding:
    """Keeps leases alive, on the private loop and over connections of its own.

    A lease that could not be renewed in time is given up by the local clock, before the server's time is up.
    """

    def __init__(
        self,
        ledger: Ledger,
        progress_timeout: float | None,
        lost: Callable[[StreamLease, str], None],
        beaten: Callable[[Renewed], None],
        room: Callable[[], int],
        lease: type[StreamLease] = StreamLease,
    ) -> None:
        self._ledger = ledger
        self._progress_timeout = progress_timeout
        self._lost = lost
        self._beaten = beaten
        self._room = room
        self._lease = lease
        self._held: dict[str, tuple[StreamLease, Lease]] = {}
        self._ending: set[StreamLease] = set()
        self._apart = Ledger(Link(ledger.link.address), ledger.keys, ledger.owner, ledger.ttl, ledger.clock)
        self._keepalive = Keepalive(self._beat, ledger.ttl / 3, ledger.clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.renewals = 0
        """How many leases were renewed so far."""

    async def open(self) -> None:
        """Begin to renew; the first sign of life is given now."""
        self._loop = asyncio.get_running_loop()
        await on_private_loop(self._beat())
        await self._keepalive.start()

    async def aclose(self) -> None:
        """Renew nothing more."""
        await self._keepalive.aclose()
        await on_private_loop(self._apart.link.aclose())

    def __len__(self) -> int:
        return len(self._held)

    def leases(self) -> list[StreamLease]:
        """All that are held."""
        return [lease for lease, _ in self._held.values()]

    def get(self, stream: str) -> StreamLease | None:
        """The lease of a stream, if it is held."""
        found = self._held.get(stream)
        return None if found is None else found[0]

    def add(self, given: Given, asked: float) -> StreamLease:
        """Hold what was asked for at local time ``asked``; renewed from now on."""
        inner = Lease.acquired(given.stream, self._ledger.owner, given.epoch, self._ledger.ttl, asked)
        lease = self._lease(given, self._ledger, inner)
        self._held[given.stream] = (lease, inner)
        return lease

    def drop(self, lease: StreamLease) -> bool:
        """Hold it no longer; whether it was."""
        lease.end()
        if self.get(lease.stream) is not lease:
            return False
        del self._held[lease.stream]
        return True

    @contextmanager
    def ending(self, lease: StreamLease) -> Generator[None]:
        """Within the block it is being finished or released: neither renewed, nor lost by what the server says."""
        self._ending.add(lease)
        try:
            yield
        finally:
            self._ending.discard(lease)

    def give_up_late(self) -> None:
        """Lose every lease that was not renewed in time."""
        now = self._ledger.clock.monotonic()
        late = [lease for lease, inner in self._held.values() if not inner.is_safe(now)]
        for lease in late:
            self._lose(lease, LATE)

    async def watch(self) -> None:
        """Look at the clock, for as long as this runs."""
        while True:
            await self._ledger.clock.sleep(self._ledger.ttl / _LOOKS)
            self.give_up_late()

    def _lose(self, lease: StreamLease, reason: str) -> None:
        if lease not in self._ending and self.drop(lease):
            self._lost(lease, reason)

    # --- on the private loop --------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        asked = self._ledger.clock.monotonic()
        held = [pair for pair in list(self._held.values()) if self._gets_on(pair[0], asked)]
        renewed = await self._apart.renew([(lease.stream, lease.epoch) for lease, _ in held], self._room())
        gone: list[StreamLease] = []
        for lease, inner in held:
            if lease.stream in renewed.lost:
                gone.append(lease)
            else:
                inner.renewed(1, asked)
        self.renewals += len(held) - len(gone)
        assert self._loop is not None
        with suppress(RuntimeError):  # that loop has been closed, and all is over
            self._loop.call_soon_threadsafe(self._after_beat, gone, renewed)

    def _gets_on(self, lease: StreamLease, now: float) -> bool:
        if lease in self._ending:
            return False
        if self._progress_timeout is None or lease.waiting:
            return True
        return now - lease.progressed_at < self._progress_timeout

    def _after_beat(self, gone: Iterable[StreamLease], renewed: Renewed) -> None:
        for lease in gone:
            self._lose(lease, "another consumer has it")
        self._beaten(renewed)
