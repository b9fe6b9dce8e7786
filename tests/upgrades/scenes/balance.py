"""A service whose streams are owned, released, finished, lost, or not given to anybody yet; and entries set aside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from conquiet import StreamBalancer
from conquiet.wire.keys import BalanceKeys
from tests.balance.crew import Member, entry
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually

SERVICE = "ingest"
KEYS = BalanceKeys(SERVICE)
OWNED = 120.0
"""Seconds of the lease on the stream whose owner is at work."""


def _consumer(url: str, name: str, **options: Any) -> StreamBalancer:
    given = {"service": SERVICE, "handle_signals": False, "sweep_interval": 0.1}
    return StreamBalancer(url, consumer=name, **{**given, **options})


async def _fill(url: str, stream: str) -> list[str]:
    return [await ask(url, "XADD", stream, "*", "data", f'{{"n":{n}}}') for n in range(5)]


@asynccontextmanager
async def balance(url: str) -> AsyncIterator[dict[str, Any]]:
    """Play it."""
    producer = _consumer(url, "producer")
    ids = {name: await _fill(url, name) for name in ("session:owned", "session:lost", "session:released")}
    entries: dict[str, str] = {}
    await ask(url, "XADD", KEYS.input, "*", "lbs-input", "no json")

    async def owner_of(name: str, consumer: str, **options: Any) -> Member:
        """A consumer that owns just this stream, and has read some of it."""
        entries[name] = await producer.add_stream(name, {"tenant": "a", "name": name})
        member = Member(_consumer(url, consumer, max_streams=1, **options))
        await member.balancer.open()
        await member.owns(name)
        if name in ids:
            lease = member.balancer.owned[name]
            await lease.commit((await lease.read(count=2))[-1])
        return member

    finished = await owner_of("session:finished", "pod-0")
    epochs = {"session:finished": finished.balancer.owned["session:finished"].epoch}
    await finished.balancer.done_stream("session:finished")
    await finished.balancer.aclose()

    owned = await owner_of("session:owned", "pod-1", lease_ttl=OWNED)
    lost = await owner_of("session:lost", "pod-2", lease_ttl=0.5)
    released = await owner_of("session:released", "pod-3")
    for member in (owned, lost, released):
        epochs |= {name: lease.epoch for name, lease in member.balancer.owned.items()}
    await released.balancer.aclose()
    await lost.vanish()

    async def has_run_out() -> bool:
        until = float(await ask(url, "ZSCORE", KEYS.leases, "session:lost"))
        seconds, _ = await ask(url, "TIME")
        return int(seconds) * 1000 > until

    await eventually(has_run_out, "the lost one's lease to run out")
    await producer.add_stream("session:new", {"tenant": "b"})
    await ask(url, "XADD", KEYS.input, "*", "lbs-input", entry("session:foreign", {"n": 1}))
    yield {"entries": entries, "epochs": epochs, "ids": ids}
    await owned.balancer.aclose()
    await producer.aclose()
