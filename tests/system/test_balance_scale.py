"""A service with a million streams: no call keeps the server from the others for long."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest

from conquiet.balance.ledger import Given, Ledger
from conquiet.kit.clock import ManualClock
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys
from tests.balance.work import MOST, Done, Work, filled
from tests.conftest import Rung
from tests.rigs.servers import on_a_port

pytestmark = [pytest.mark.system, pytest.mark.any_server, pytest.mark.timeout(600)]

TTL: Final = 100_000.0
FEW: Final = 1000
TIMES: Final = 5
SLACK: Final = 15
"""How much longer a call may take among all streams than among few: what grows with them grows a thousandfold."""


class Site:
    """One service at a server of its own, with so many streams."""

    def __init__(self, url: str, service: str, count: int) -> None:
        self.clock = ManualClock()
        self.count = count
        self.ledger = Ledger(Connections(Address.of(url)), BalanceKeys(service), "ann#1", TTL, self.clock)
        self._work = Work(url)
        self.seconds: dict[str, float] = {}
        """The shortest of some calls, by what they do."""
        self.once: set[str] = set()
        """What was called once, whose time may be another process's fault."""

    async def begin(self) -> None:
        await self.ledger.open()
        await self.ledger.renew([])
        await filled(self.ledger, self.count)

    async def measure(self, name: str, ask: Callable[[], Awaitable[Any]], times: int = TIMES) -> Any:
        result: Any = None
        for _ in range(times):
            done, result = await self._work.of(ask())
            assert_bounded(name, done)
            self.seconds[name] = min(done.seconds, self.seconds.get(name, 1e9))
        self.once |= {name} if times == 1 else set()
        return result

    async def lives(self) -> None:
        """Everything that can be asked, at the worst moment for it."""
        ledger, count = self.ledger, self.count
        await self.measure("take", lambda: ledger.take(count, 0, hungry=True), 1)
        given: list[Given] = []
        while more := (await ledger.take(count, 0, hungry=True)).given:
            given += more
        # Nothing is idle for as long as a lease takes: what looks for that would look at all.
        await self.measure("recover", lambda: ledger.recover("-"))
        await self.measure("recover the middle", lambda: ledger.recover(given[len(given) // 2].entry_id))
        await self.measure("pending", lambda: ledger.pending(given[len(given) // 2].entry_id))
        await self.measure("regrant", lambda: ledger.regrant([one.entry_id for one in given[-100:]]))
        held = [(one.stream, one.epoch) for one in given[:500]]
        await self.measure("renew", lambda: ledger.renew(held))
        await self.measure("add", lambda: ledger.add("one more", {}))
        await self.measure("release", lambda: ledger.release(held[:200]), 1)
        self.clock.advance(2 * TTL)
        ledger.owner = "bob#1"
        for name, skip in (("sweep the first", 0), ("sweep the last", count - 300)):
            await self.measure(name, lambda skip=skip: ledger.sweep(0, 0, hungry=True, skip=skip))  # type: ignore[misc]
        swept = await self.measure("take over", lambda: ledger.sweep(count, 0, hungry=True))
        one = swept.given[0]
        await self.measure("move", lambda: ledger.move(one.stream, one.epoch, "5-5"))
        await self.measure("finish", lambda: ledger.finish(one.stream, one.epoch, one.entry_id), 1)
        await self.measure("claim", lambda: ledger.claim(given[-1].stream), 1)

    async def aclose(self) -> None:
        await self.ledger.link.aclose()


def assert_bounded(name: str, done: Done) -> None:
    assert done.commands <= MOST, f"{name}: {done}"


@pytest.fixture
async def site(rung: Rung) -> AsyncIterator[Callable[[str, int], Awaitable[Site]]]:
    if not rung.binary:
        pytest.skip("needs a server's binary")
    made: list[Site] = []
    async with on_a_port(rung.binary) as server:

        async def make(service: str, count: int) -> Site:
            made.append(Site(server.url, service, count))
            await made[-1].begin()
            return made[-1]

        yield make
        for one in made:
            await one.aclose()


async def test_no_call_does_more_among_a_million_streams_than_among_a_thousand(
    site: Callable[[str, int], Awaitable[Site]], scale: float, record_property: Callable[[str, object], None]
) -> None:
    few = await site("few", FEW)
    await few.lives()
    many = await site("many", max(20_000, int(1_000_000 * scale)))
    await many.lives()
    for name, seconds in many.seconds.items():
        record_property(name, f"{few.seconds[name] * 1000:.2f} ms of {FEW}, {seconds * 1000:.2f} ms of {many.count}")
        print(f"{name:20} {few.seconds[name] * 1000:8.2f} ms of {FEW} {seconds * 1000:8.2f} ms of {many.count}")
    slow = {name: (few.seconds[name], seconds) for name, seconds in many.seconds.items() if is_slower(few, many, name)}
    assert not slow


def is_slower(few: Site, many: Site, name: str) -> bool:
    return name not in many.once and many.seconds[name] > SLACK * max(few.seconds[name], 0.001)
