"""How much a subscription takes, and what holds it back."""

from __future__ import annotations

import asyncio

import pytest

from conquiet import Backoff, Outgoing
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, answers, finished, impatient
from tests.topics.subscribing import Gate, broker, numbered, pending

__all__ = ["broker"]

pytestmark = pytest.mark.cluster_too


@pytest.mark.parametrize("limit", [1, 7])
async def test_what_is_taken_and_unsettled_never_exceeds_max_inflight(broker: Broker, limit: int) -> None:
    """Counted while all handlers stand still: the nodes of a Cluster are asked one after the other."""
    rounds = [asyncio.Event() for _ in range(6)]
    counts: list[int] = []
    entered = 0

    async def look(message: Message) -> None:
        nonlocal entered
        mine = rounds[entered // limit]
        entered += 1
        if entered % limit == 0:
            counts.append(await pending(broker))
            mine.set()
        await mine.wait()

    await broker.send_batch("orders", [Outgoing(number, key=f"k{number}") for number in range(6 * limit)])
    async with broker.subscribe("orders", group="g", handler=look, options=impatient(max_inflight=limit)):
        await finished(broker, "orders", "g")
    assert counts == [limit] * 6


async def test_buffered_messages_count_as_in_flight(broker: Broker) -> None:
    gate = Gate()
    await broker.send_batch("orders", numbered(30, key="the same"))
    async with broker.subscribe("orders", group="g", handler=gate, options=impatient(max_inflight=8)) as subscription:
        await gate.holds(1)
        await eventually(lambda: subscription.inflight == 8, "all the room to be taken")
        assert await pending(broker) == 8
        gate.opened.set()
        await finished(broker, "orders", "g")
        await eventually(lambda: subscription.inflight == 0, "nothing in flight")


async def test_parked_messages_do_not_count_as_in_flight(broker: Broker, clock: ManualClock) -> None:
    async def fail_early(message: Message) -> None:
        if message.payload < 10 and message.retry_count == 0:
            raise RuntimeError

    seen = Recorder(fail_early)
    options = impatient(max_inflight=2, backoff=Backoff(60.0, 60.0, "fixed"))
    await broker.send_batch("orders", numbered(20))
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as subscription:
        await seen.saw(20)
        await eventually(lambda: subscription.inflight == 0, "all to be parked or acked")
        assert await pending(broker) == 10
        clock.advance(5.0)
        clock.advance(56.0)
        await finished(broker, "orders", "g")
    assert len(seen.messages) == 30


@pytest.mark.any_server
async def test_a_slow_handler_holds_back_what_is_taken(broker: Broker) -> None:
    gate = Gate()
    await broker.send_batch("orders", numbered(50))
    async with broker.subscribe("orders", group="g", handler=gate, options=impatient(max_inflight=10)):
        await gate.holds(10)
        info = await broker.admin.describe_group("orders", "g")
        assert (info.pending, info.lag) == (10, 40)
        gate.opened.set()
        await finished(broker, "orders", "g")
    assert gate.entered == 50


@pytest.mark.any_server
async def test_a_full_partition_does_not_starve_the_other(broker: Broker) -> None:
    gates = {0: asyncio.Event(), 1: asyncio.Event()}
    gates[1].set()
    seen = Recorder(lambda message: _wait(gates[message.partition]))
    await broker.send_batch("orders", [Outgoing(number, key="a", partition=0) for number in range(50)])
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_inflight=100)):
        await broker.send_batch("orders", numbered(5, partition=1))
        await eventually(lambda: sum(one.partition for one in seen.messages) == 5, "the other partition")
        gates[0].set()
        await finished(broker, "orders", "g")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_paused_subscription_takes_nothing_and_keeps_its_partitions(broker: Broker) -> None:
    gate = Gate()
    async with broker.subscribe("orders", group="g", handler=gate, options=impatient()) as subscription:
        await broker.send("orders", 0)
        await gate.holds(1)
        subscription.pause()
        await eventually(lambda: subscription.paused, "the pause")
        await broker.send_batch("orders", numbered(5))
        gate.opened.set()
        await eventually(lambda: subscription.inflight == 0, "what was taken to be finished")
        await answers(broker)  # what must not come would be there
        info = await broker.admin.describe_group("orders", "g")
        assert (info.lag, info.pending, gate.entered) == (5, 0, 1)
        assert (subscription.owned, subscription.health().paused) == ({"orders": (0, 1)}, True)
        subscription.resume()
        await finished(broker, "orders", "g")
    assert gate.entered == 6
