"""Leaving, whatever the way: nothing stays owned that nobody works on, and nothing is given away that somebody does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import anyio
import pytest

from conquiet import Broker, Message, Messages, Subscription
from conquiet.kit.clock import ManualClock
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.freezing import Side, freezer
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, impatient, vanish

pytestmark = pytest.mark.any_server


@pytest.fixture
async def broker(url: str, keys: Keys) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace) as broker:
        await broker.create_topic("orders")
        yield broker


class Gate:
    """A handler that waits to be let go, and knows whether it is inside."""

    def __init__(self) -> None:
        self.inside = 0
        self.opened = asyncio.Event()

    async def __call__(self, message: Message) -> None:
        self.inside += 1
        try:
            await self.opened.wait()
        finally:
            self.inside -= 1

    async def holds(self, count: int) -> None:
        await eventually(lambda: self.inside == count, f"{count} handlers inside")


async def is_owned(broker: Broker) -> bool:
    return (await broker.admin.describe_group("orders", "g")).unowned == ()


@pytest.mark.parametrize("way", ["subscribe", "consume"])
async def test_a_consumer_whose_scope_is_cancelled_gives_its_partitions_up(broker: Broker, way: str) -> None:
    """An anyio scope cancels again and again, until the block is left: so do task groups and ``move_on_after``."""
    consumer: Subscription | Messages = broker.consume("orders", group="g", options=impatient())
    if way == "subscribe":
        consumer = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
    try:
        with anyio.CancelScope() as scope:
            async with consumer:
                assert await is_owned(broker)
                scope.cancel()
                await consumer.wait()
        assert scope.cancelled_caught
        found = await broker.admin.describe_group("orders", "g")
        assert (found.members, found.unowned) == ((), (0,))
    finally:
        await vanish(consumer)


@pytest.mark.parametrize("side", ["before", "after"])
async def test_what_a_consumer_is_about_to_take_is_given_up_too(
    url: str, keys: Keys, broker: Broker, side: Side
) -> None:
    """It leaves while it takes a partition: whether it has got it is not known before the answer comes."""
    async with freezer(url) as proxy, Broker(proxy.url, namespace=keys.namespace) as mine, AsyncExitStack() as first:
        await first.enter_async_context(broker.consume("orders", group="g", options=impatient()))
        second = await mine.consume("orders", group="g", options=impatient()).__aenter__()
        proxy.keep("partition_acquire", side)
        await first.aclose()
        await proxy.kept()
        leaving = asyncio.create_task(second.aclose())
        await asyncio.sleep(0)
        proxy.release_soon()
        await leaving
    found = await broker.admin.describe_group("orders", "g")
    assert (found.members, found.unowned) == ((), (0,))


@pytest.mark.slow
async def test_a_consumer_whose_loop_has_ended_is_not_kept_alive(url: str, keys: Keys, broker: Broker) -> None:
    """As of a script or a notebook that never leaves the block."""
    clock, left = ManualClock(), list[Messages]()

    async def forgetful() -> None:
        mine = Broker(url, namespace=keys.namespace, clock=clock)
        left.append(await mine.consume("orders", group="g", options=impatient(lease_ttl=LONG)).__aenter__())
        await mine._instance.link.aclose()  # Python warns of connections that a loop leaves behind

    async def until() -> str:
        return str(await ask(url, "HGET", keys.lease(keys.partition("orders", 0), "g"), "until_ms"))

    await asyncio.to_thread(asyncio.run, forgetful())
    try:
        before = await until()
        clock.advance(LONG / 2)

        async def is_renewed() -> bool:
            return await until() != before

        with suppress(AssertionError):
            await eventually(is_renewed, "a renewal", 2.0)
        assert not await is_renewed()
    finally:
        await left[0]._membership.leases.aclose()


async def test_what_is_being_handled_is_not_given_away_when_leaving_is_cancelled(broker: Broker) -> None:
    gate, options = Gate(), impatient(drain_timeout=1.0)
    subscription = await broker.subscribe("orders", group="g", handler=gate, options=options).__aenter__()
    try:
        await broker.send("orders", 1, key="k")
        await gate.holds(1)
        leaving = asyncio.create_task(subscription.aclose())
        await eventually(lambda: not subscription.health().healthy, "it leaves, and waits for its handler")
        leaving.cancel()
        await asyncio.wait([leaving])
        kept = await is_owned(broker)
        assert kept or not gate.inside
    finally:
        gate.opened.set()
        await gate.holds(0)
        await vanish(subscription)


async def test_a_broker_leaves_with_all_its_consumers_at_once(url: str, keys: Keys, broker: Broker) -> None:
    gate, groups = Gate(), ("g", "h", "i")
    async with Broker(url, namespace=keys.namespace) as many, AsyncExitStack() as stack:
        consumers = [many.subscribe("orders", group=group, handler=gate, options=impatient()) for group in groups]
        for consumer in consumers:
            await stack.enter_async_context(consumer)
        stack.callback(gate.opened.set)
        await broker.send("orders", 1)
        await gate.holds(len(groups))
        leaving = asyncio.create_task(many.aclose())
        stack.push_async_callback(asyncio.wait, [leaving])
        stack.callback(gate.opened.set)
        await eventually(lambda: not any(one.health().healthy for one in consumers), "all of them to leave", 1.0)


async def test_leaving_is_bounded_while_the_server_is_frozen(url: str, keys: Keys, broker: Broker) -> None:
    options = impatient(drain_timeout=0.1)
    async with Proxy(url) as proxy, Broker(proxy.url, namespace=keys.namespace) as cut_off:
        consumer = await cut_off.consume("orders", group="g", options=options).__aenter__()
        hold = proxy.hold(b"")
        leaving = asyncio.create_task(consumer.aclose())
        is_over = await asyncio.wait([leaving], timeout=1.5)
        hold.release()
        async with asyncio.timeout(LONG):
            await leaving
        assert is_over[0], "it still waits after fifteen drain times"


async def test_what_a_thread_still_works_on_is_not_given_away(url: str, keys: Keys, broker: Broker) -> None:
    """It cannot be cancelled: nobody else may begin with it before its lease has run out."""
    inside, go_on = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        inside.set()
        go_on.wait(LONG)

    await broker.create_topic("plain", partitions=2)
    await broker.send("plain", 1, partition=0)
    options = impatient(drain_timeout=0.1, lease_ttl=LONG)
    try:
        async with broker.subscribe("plain", group="g", handler=handle, options=options) as subscription:
            await asyncio.to_thread(inside.wait, LONG)
        found = await broker.admin.describe_group("plain", "g")
        assert (found.members, found.unowned) == ((), (1,))
        assert subscription.owned == {"plain": ()}
    finally:
        go_on.set()
