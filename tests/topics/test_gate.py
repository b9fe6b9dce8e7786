"""How far a group reads a topic that has grown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.kit.policy import Backoff
from conquiet.message import Message
from conquiet.topics import Broker
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, finished, impatient
from tests.topics.staging import hurried

pytestmark = pytest.mark.any_server


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


async def _looked_again(broker: Broker, clock: ManualClock) -> None:
    """Return once the one member of the group has looked at what it may own."""

    async def heard() -> float:
        [member] = (await broker.admin.describe_group("orders", "g")).members
        return member.heartbeat_at.timestamp()

    before = await heard()

    async def is_later() -> bool:
        return await heard() > before + 0.5

    clock.advance(1)
    await eventually(is_later, "it looks again")


class _Slow:
    """Handles at once until it is told to take its time with the messages of the first partition."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, message: Message) -> None:
        if message.partition == 0:
            await self.may.wait()


@pytest.mark.parametrize("to", ["earliest", "the old partition only"])
async def test_a_group_that_is_set_back_keeps_the_order_across_growth_again(
    broker: Broker, clock: ManualClock, to: str
) -> None:
    """Its members know that it had finished what was there before the growth; now it has not."""
    await broker.create_topic("orders", partitions=1)
    seen = Recorder(slow := _Slow())
    options = impatient(drain_timeout=1.0)
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as subscription:
        await broker.send("orders", "old")
        await hurried(clock, broker.admin.grow("orders", 2))
        await broker.send("orders", "new", partition=1)
        await seen.saw(2)
        await finished(broker, "orders", "g")
        slow.may.clear()
        await broker.admin.reset_group("orders", "g", "earliest" if to == "earliest" else {0: "0-0"}, force=True)
        await seen.saw(3)
        for _ in range(3):
            await _looked_again(broker, clock)
        if to == "earliest":
            assert subscription.owned["orders"] == (0,)
        else:  # what it owns it keeps, and takes nothing from
            await broker.send("orders", "newer", partition=1)
            await _looked_again(broker, clock)
        assert seen.payloads == ["old", "new", "old"]
        slow.may.set()
        await seen.saw(4)
        await finished(broker, "orders", "g")
    assert seen.payloads[3] == ("new" if to == "earliest" else "newer")


async def test_a_group_that_was_lost_and_begins_again_keeps_the_order_across_growth_again(
    broker: Broker, clock: ManualClock, keys: Keys, url: str
) -> None:
    await broker.create_topic("orders", partitions=1)
    seen = Recorder(slow := _Slow())
    options = impatient(on_group_lost="earliest", drain_timeout=1.0)
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as subscription:
        await broker.send("orders", "old")
        await hurried(clock, broker.admin.grow("orders", 2))
        await broker.send("orders", "new", partition=1)
        await seen.saw(2)
        await finished(broker, "orders", "g")
        slow.may.clear()
        for partition in range(2):
            stream = keys.partition("orders", partition)
            await ask(url, "XGROUP", "DESTROY", stream, "g")
        await eventually(lambda: len(seen.messages) > 2, "it begins again")
        for _ in range(3):
            await _looked_again(broker, clock)
        assert (seen.payloads, subscription.owned["orders"]) == (["old", "new", "old"], (0,))
        slow.may.set()
        await seen.saw(4)


async def test_without_order_a_message_that_waits_for_its_retry_holds_nothing_back(
    broker: Broker, clock: ManualClock
) -> None:
    """What was sent before it has begun, so whatever comes later comes in order, in whichever partition."""

    async def handle(message: Message) -> None:
        if message.payload == "bad":
            raise ValueError("later")

    await broker.create_topic("orders", partitions=1)
    hour = Backoff(base=3600.0, cap=3600.0, kind="fixed")
    seen = Recorder(handle)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(backoff=hour, order="unordered")):
        await broker.send("orders", "bad")
        await eventually(lambda: _is_parked(broker), "it waits for its retry")
        await hurried(clock, broker.admin.grow("orders", 2))
        for partition in range(2):
            await broker.send("orders", "good", partition=partition)
        await eventually(lambda: seen.payloads.count("good") == 2, "the others are handled", 2.5)


@pytest.mark.parametrize("order", ["block_key", "block_partition"])
async def test_with_order_a_message_that_waits_for_its_retry_holds_back_what_follows_in_new_partitions(
    broker: Broker, clock: ManualClock, order: str
) -> None:
    async def handle(message: Message) -> None:
        if message.payload == "first" and message.retry_count == 0:
            raise ValueError("later")

    await broker.create_topic("orders", partitions=1)
    hour = Backoff(base=3600.0, cap=3600.0, kind="fixed")
    seen = Recorder(handle)
    options = impatient(backoff=hour, order=order, lease_ttl=100_000.0)
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await broker.send("orders", "first", key="k")
        await eventually(lambda: _is_parked(broker), "it waits for its retry")
        await hurried(clock, broker.admin.grow("orders", 2))
        await broker.send("orders", "second", key="k", partition=1)
        for _ in range(3):
            await _looked_again(broker, clock)
        assert seen.payloads == ["first"]
        clock.advance(3600)
        await seen.saw(3)
    assert seen.payloads == ["first", "first", "second"]


async def _is_parked(broker: Broker) -> bool:
    return (await broker.admin.describe_group("orders", "g")).partitions[0].retry_depth == 1
