"""While nothing can be taken, nobody asks: a consumer that waits costs neither the server nor its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Broker, Message, Outgoing, Retry, SubscribeOptions
from conquiet.kit.clock import Clock
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.asking import ask
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually
from tests.topics.consuming import stays_below

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


class CountingClock(Clock):
    """Knows how often somebody began to wait."""

    waits = 0

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        self.waits += 1
        return await super().wait(event, seconds)


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
async def broker(proxy: Proxy, keys: Keys, clock: CountingClock) -> AsyncIterator[Broker]:
    async with Broker(proxy.url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders")
        yield broker


def patient(**changes: Any) -> SubscribeOptions:
    return SubscribeOptions(handle_signals=False, drain_timeout=0.1, **changes)


@pytest.mark.parametrize("order", ["unordered", "block_key", "block_partition"])
async def test_a_backlog_behind_a_slow_handler_is_not_asked_for(broker: Broker, proxy: Proxy, order: Any) -> None:
    """More of the same key than half of ``max_inflight``: nothing is taken before the handler has ended."""
    running = asyncio.Event()

    async def handle(message: Message) -> None:
        running.set()
        await asyncio.Event().wait()

    await broker.send_batch("orders", [Outgoing(number, key="k") for number in range(50)])
    options = patient(max_inflight=10, batch_size=2, order=order)
    async with broker.subscribe("orders", group="g", handler=handle, options=options):
        await running.wait()
        before = proxy.count(b"XREAD\r\n")
        await stays_below(30, lambda: proxy.count(b"XREAD\r\n") - before, "waits for news")


async def test_a_group_that_was_deleted_once_is_not_looked_at_all_the_time(
    broker: Broker, proxy: Proxy, keys: Keys, url: str
) -> None:
    """What tells members of the deletion runs out an hour later, whoever is a member by then."""

    async def handle(message: Message) -> None: ...

    def looks() -> int:
        return proxy.count(Script.named("leases_look").sha.encode())

    async with broker.subscribe("orders", group="g", handler=handle, options=patient(lease_ttl=300.0)):
        await ask(url, "DEL", keys.generation("orders", "g"))
        before = looks()
        await eventually(lambda: looks() > before, "it is noticed")
        await stays_below(3, lambda: looks() - before, "looks at the leases")


async def test_a_retry_that_is_due_while_paused_is_not_looked_at_all_the_time(
    broker: Broker, clock: CountingClock
) -> None:
    failed = asyncio.Event()

    async def handle(message: Message) -> None:
        failed.set()
        raise Retry("not now", delay=0.1)

    async with broker.subscribe("orders", group="g", handler=handle, options=patient()) as subscription:
        await broker.send("orders", 1)
        await failed.wait()
        subscription.pause()
        before = clock.waits
        await stays_below(100, lambda: clock.waits - before, "waits")
