"""What a consumer costs while nothing can move: calls and lines in the log are few, and it goes on afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from conquiet import Broker, Message, Outgoing, Retry, SubscribeOptions
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.asking import comes_to_rest
from tests.rigs.troubles import TROUBLES, Crowded, costs_little, heal
from tests.rigs.waiting import eventually

TAKE: Final = Script.named("take").sha.encode()

pytestmark = [pytest.mark.any_server, pytest.mark.slow]


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Crowded]:
    async with Crowded(url) as proxy:
        yield proxy


@pytest.fixture
async def broker(proxy: Crowded, keys: Keys) -> AsyncIterator[Broker]:
    async with Broker(proxy.url, namespace=keys.namespace) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


@pytest.fixture
async def outside(url: str, keys: Keys) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace) as broker:
        yield broker


def options(**changes: Any) -> SubscribeOptions:
    return SubscribeOptions(handle_signals=False, drain_timeout=0.1, **changes)


@pytest.mark.parametrize("trouble", [name for name in TROUBLES if name != "XREADGROUP is denied"])
async def test_a_server_that_lets_nothing_move_is_asked_little(
    trouble: str, proxy: Crowded, broker: Broker, outside: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "conquiet")
    seen: list[Any] = []

    async def handle(message: Message) -> None:
        seen.append(message.payload)

    async with broker.subscribe("orders", group="g", handler=handle, options=options()):
        await outside.send("orders", 1, partition=0)
        await eventually(lambda: len(seen) == 1, "the first one")
        await eventually(lambda: proxy.count(b"XREAD\r\n") > 1, "it waits")
        TROUBLES[trouble](proxy)
        if trouble not in ("nothing is answered", "nothing happens"):
            await proxy.disconnect()  # whatever waits has to begin anew
        await costs_little(proxy, caplog)
        heal(proxy)
        if trouble == "nothing is answered":
            await proxy.disconnect()
        await outside.send("orders", 2, partition=1)
        await eventually(lambda: 2 in seen, "it goes on")


@pytest.mark.parametrize("stuck", ["paused", "blocked key", "blocked partition", "full", "behind a key"])
async def test_a_consumer_that_may_take_nothing_asks_little(
    stuck: str, proxy: Crowded, broker: Broker, outside: Broker, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """There is a backlog in both partitions, and for as long as it cannot be taken nobody asks for it."""
    gate, begun, parked = asyncio.Event(), asyncio.Event(), False

    async def handle(message: Message) -> None:
        nonlocal parked
        begun.set()
        if stuck in ("full", "behind a key"):
            await gate.wait()
        elif not parked and stuck != "paused":
            parked = True
            raise Retry("later", delay=5.0)

    key = None if stuck == "full" else "k"
    order: Any = {"blocked key": "block_key", "blocked partition": "block_partition"}.get(stuck, "unordered")
    given = options(max_inflight=10, batch_size=4, order=order)
    async with broker.subscribe("orders", group="g", handler=handle, options=given) as subscription:
        if stuck == "paused":
            subscription.pause()
        await outside.send_batch("orders", [Outgoing(n, key=key, partition=0) for n in range(100)])
        if stuck != "paused":
            await begun.wait()
            await comes_to_rest(url, lambda: proxy.count(TAKE), "what can be taken")
        await costs_little(proxy, caplog)
        gate.set()
        subscription.resume()

        async def is_done() -> bool:
            found = await outside.admin.describe_group("orders", "g")
            return found.lag == 0 and found.pending == 0

        await eventually(is_done, "it goes on")
