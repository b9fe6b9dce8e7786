"""What it costs to own many streams, and how fast those of a dead consumer are taken over."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass

import psutil

from conquiet import EmbeddedRedis, StreamAdded, StreamBalancer
from conquiet.balance.ledger import Ledger
from conquiet.kit.clock import SYSTEM_CLOCK
from conquiet.kit.loopthread import on_private_loop
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import BalanceKeys
from tests.bench.clock import pin
from tests.bench.report import Row, Section

SIZES = (1_000, 5_000, 20_000)
LEASE = 15.0
BEATS = 5
SHARE = 0.25
"""The part of a core that renewals may take at the largest size."""
ORPHANS = 1_000
SHORT_LEASE = 2.0

_names = (f"bench-{number}" for number in itertools.count())


@dataclass(frozen=True)
class Renewal:
    """Holding ``count`` streams."""

    count: int
    wall: float
    """Seconds that one beat takes."""
    cpu: float
    """Seconds of the client's CPU that it takes."""
    server: float
    """And of the server's."""
    share: float
    """Of a core, by all that the client does while its streams are idle."""

    @property
    def cpu_us(self) -> float:
        return self.cpu / self.count * 1e6


async def fill(url: str, service: str, count: int) -> None:
    balancer = StreamBalancer.connect(url, service=service)
    for start in range(0, count, 200):
        await asyncio.gather(*(balancer.add_stream(f"session:{n}") for n in range(start, min(start + 200, count))))
    await balancer.aclose()


async def holding(url: str, pid: int, count: int) -> Renewal:
    """One consumer that owns so many streams, for the time of one lease."""
    server = psutil.Process(pid)
    service = next(_names)
    await fill(url, service, count)
    async with StreamBalancer.connect(
        url, service=service, lease_ttl=LEASE, max_streams=count, event_buffer=count, handle_signals=False
    ) as balancer:
        events = balancer.events()
        for _ in range(count):
            assert isinstance(await anext(events), StreamAdded)
        beats: list[tuple[float, float]] = []
        before = server.cpu_times()
        for _ in range(BEATS):
            wall, cpu = time.perf_counter(), time.process_time()
            await on_private_loop(balancer._consumer.streams._beat())
            beats.append((time.perf_counter() - wall, time.process_time() - cpu))
        after = server.cpu_times()
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(LEASE)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        assert len(balancer.owned) == count, "streams were lost to slowness"
    there = (after.user + after.system - before.user - before.system) / BEATS
    beat_wall, beat_cpu = (statistics.median(column) for column in zip(*beats, strict=True))
    return Renewal(count, beat_wall, beat_cpu, there, share)


async def takeover(url: str) -> float:
    """Seconds from the end of a dead consumer's leases until another one was told of all of its streams."""
    service = next(_names)
    await fill(url, service, ORPHANS)
    link = Connections(Address.of(url))
    dead = Ledger(link, BalanceKeys(service), "dead#1", SHORT_LEASE, SYSTEM_CLOCK)
    await dead.open()
    while (await dead.take(ORPHANS, 0, hungry=True)).given:
        pass
    ended = time.perf_counter() + SHORT_LEASE
    async with StreamBalancer.connect(
        url, service=service, lease_ttl=SHORT_LEASE, max_streams=ORPHANS, auto_claim=True, handle_signals=False
    ) as balancer:
        events = balancer.events()
        for _ in range(ORPHANS):
            assert isinstance(await anext(events), StreamAdded)
        took = time.perf_counter() - ended
    await link.aclose()
    return took


def renewal_rows(found: list[Renewal]) -> list[Row]:
    rows: list[Row] = []
    for one in found:
        server = f"{one.server / one.count * 1e6:.1f} µs of the server's CPU each"
        work = f"renewing {one.count:,} streams: {one.wall * 1e3:.0f} ms a beat, {server}"
        rows.append(Row(work, one.count / one.wall, one.cpu_us))
    first, last = found[0], found[-1]
    rate, cpu = last.count / last.wall, last.cpu_us
    text = f"holding {last.count:,} streams: {last.share:.1%} of a core, reader and sweeper included"
    allowed = f"{SHARE:.0%} of a core, `lease_ttl={LEASE:g}`"
    linear = f"a stream of {first.count:,} / one of {last.count:,}"
    return [
        *rows,
        Row(text, rate, cpu, allowed, SHARE / last.share, 1),
        Row("the cost of each stays the same", rate, cpu, linear, first.cpu_us / last.cpu_us, 0.7),
    ]


async def run() -> Section:
    async with EmbeddedRedis(unix_socket=False) as server:
        pin(server.pid, together=False)
        rows = renewal_rows([await holding(server.url, server.pid, count) for count in SIZES])
        lag = statistics.median([await takeover(server.url) for _ in range(3)])
        rows.append(Row(f"taking {ORPHANS:,} streams over, {lag:.2f} s after the leases' end", ORPHANS / lag, 0))
        return Section("balance", server.version, rows)
