"""Who owns what while consumers come and go and topics grow, and that nobody owns anything twice."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from conquiet import Outgoing
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker, Subscription
from conquiet.wire.keys import Keys
from tests.rigs.clocks import next_beat
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, answers, finished, hands_over, impatient, vanish
from tests.topics.staging import hurried

pytestmark = [pytest.mark.cluster_too, pytest.mark.slow]


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=8)
        yield broker


def owned(consumer: Subscription) -> tuple[int, ...]:
    return consumer.owned["orders"]


async def shared(consumers: Iterable[Subscription], loads: list[int], partitions: int = 8) -> None:
    """Return once each partition has one owner, and the loads are as given."""
    own = list(consumers)

    def is_so() -> bool:
        held = sorted(partition for consumer in own for partition in owned(consumer))
        return held == list(range(partitions)) and sorted(len(owned(consumer)) for consumer in own) == sorted(loads)

    await eventually(is_so, f"loads of {loads}, not {[owned(consumer) for consumer in own]}")


class Owners:
    """Handlers that notice when two consumers handle messages of one partition at once."""

    def __init__(self) -> None:
        self._inside: defaultdict[int, list[str]] = defaultdict(list)
        self.overlaps: list[str] = []
        self.seen: Counter[Any] = Counter()
        self.firsts: defaultdict[str, list[int]] = defaultdict(list)

    def handler(self, name: str) -> Recorder:
        async def handle(message: Message) -> None:
            inside = self._inside[message.partition]
            inside.append(name)
            if set(inside) != {name}:
                self.overlaps.append(f"{message!r}: {inside}")
            self.seen[message.payload] += 1
            self.firsts[str(message.key)].append(message.payload)
            await asyncio.sleep(0.001)  # the work itself, in which another could begin
            inside.remove(name)

        return Recorder(handle)

    async def have_seen(self, count: int) -> None:
        """Return once so many were handled."""
        await eventually(lambda: self.seen.total() >= count, f"{count} handled")


# --- fair and cooperative -------------------------------------------------------------------------------


@pytest.mark.any_server
async def test_consumers_that_join_and_leave_share_fairly_and_at_once(broker: Broker) -> None:
    async with AsyncExitStack() as stack:
        members: list[Subscription] = []
        for loads in ([8], [4, 4], [3, 3, 2], [2, 2, 2, 2]):
            subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=impatient())
            members.append(await stack.enter_async_context(subscription))
            await shared(members, loads)
        for loads in ([3, 3, 2], [4, 4], [8]):
            await members.pop(0).aclose()
            await shared(members, loads)


@pytest.mark.any_server
async def test_who_stays_keeps_what_it_has(broker: Broker) -> None:
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as one:
        before = set(owned(one))
        async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as other:
            await shared([one, other], [4, 4])
            assert set(owned(one)) < before
            kept = set(owned(one))
        await shared([one], [8])
        assert kept < set(owned(one))


@pytest.mark.any_server
async def test_nobody_owns_more_than_it_wants(broker: Broker) -> None:
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient(max_partitions=1)) as one:
        await eventually(lambda: len(owned(one)) == 1, "one partition")
        info = await broker.admin.describe_group("orders", "g")
        assert len(info.unowned) == 7
        async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as other:
            await shared([one, other], [1, 7])


@pytest.mark.any_server
async def test_pinned_consumers_own_their_partitions_alone(broker: Broker) -> None:
    async with AsyncExitStack() as stack:
        for remainder in (0, 1):
            options = impatient(partition_modulo=2, partition_remainder=remainder)
            subscription = broker.subscribe("orders", group="g", handler=Recorder(), options=options)
            own = await stack.enter_async_context(subscription)
            assert owned(own) == tuple(range(remainder, 8, 2))


@pytest.mark.any_server
async def test_groups_share_nothing_with_each_other(broker: Broker) -> None:
    async with (
        broker.subscribe("orders", group="one", handler=Recorder(), options=impatient()) as one,
        broker.subscribe("orders", group="two", handler=Recorder(), options=impatient()) as two,
    ):
        assert owned(one) == owned(two) == tuple(range(8))


async def test_a_hand_over_waits_for_what_is_being_handled(broker: Broker) -> None:
    gate = asyncio.Event()
    held = Recorder(lambda message: _after(gate))
    await broker.send_batch("orders", [Outgoing(number, partition=number) for number in range(8)])
    async with broker.subscribe("orders", group="g", handler=held, options=impatient()) as one:
        await held.saw(8)
        seen = Recorder()
        async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as other:
            await eventually(lambda: hands_over(one), "it notices the other")
            await answers(broker)
            assert (len(owned(one)), owned(other)) == (8, ())
            gate.set()
            await shared([one, other], [4, 4])
            await finished(broker, "orders", "g")
    assert seen.messages == []


async def _after(gate: asyncio.Event) -> None:
    await gate.wait()


@pytest.mark.any_server
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_handled_by_two_or_twice_while_consumers_come_and_go(broker: Broker, seed: int) -> None:
    draw, owners = random.Random(seed), Owners()
    sent = [Outgoing(number, key=f"k{draw.randrange(16)}") for number in range(400)]
    members: list[Subscription] = []
    for step in range(8):
        if len(members) < 2 or (draw.random() < 0.6 and len(members) < 4):
            handler = owners.handler(f"c{step}")
            subscription = broker.subscribe("orders", group="g", handler=handler, options=impatient(max_inflight=8))
            members.append(await subscription.__aenter__())
        else:
            await members.pop(draw.randrange(len(members))).aclose()
        await broker.send_batch("orders", sent[step * 50 : step * 50 + 50])
        await owners.have_seen(step * 40)
    await finished(broker, "orders", "g")
    for member in members:
        await member.aclose()
    assert owners.overlaps == []
    assert owners.seen == Counter(range(400))
    for key, numbers in owners.firsts.items():
        assert numbers == [one.payload for one in sent if one.key == key]


# --- leases ---------------------------------------------------------------------------------------------


async def passed(clock: ManualClock, seconds: float, hearts: int = 1) -> None:
    """Let time pass in steps that leave those who live time to renew."""
    end = clock.monotonic() + seconds
    while clock.monotonic() < end:
        clock.advance(await next_beat(clock, hearts))
    await next_beat(clock, hearts)


@pytest.mark.any_server
async def test_a_handler_much_slower_than_the_lease_is_not_doubled(broker: Broker, clock: ManualClock) -> None:
    gate, one, other = asyncio.Event(), Recorder(), Recorder()
    held = Recorder(lambda message: _after(gate))
    options = impatient()
    async with broker.subscribe("orders", group="g", handler=held, options=options) as owner:
        await broker.send("orders", 1, partition=0)
        await held.saw(1)
        async with broker.subscribe("orders", group="g", handler=other, options=options):
            await passed(clock, 4 * options.lease_ttl, hearts=2)
            await answers(broker)
            assert 0 in owned(owner)
            gate.set()
            await finished(broker, "orders", "g")
    assert (len(held.messages), one.messages, other.messages) == (1, [], [])


@pytest.mark.any_server
async def test_a_handler_that_blocks_the_loop_keeps_its_lease(broker: Broker, url: str, keys: Keys) -> None:
    begun, ended, others = threading.Event(), threading.Event(), Recorder()

    async def contend() -> None:
        """On another thread, hence another loop: take partition 0 as soon as it is to be had."""
        options = impatient(lease_ttl=0.6, partition_modulo=8, partition_remainder=0)
        async with (
            Broker(url, namespace=keys.namespace) as rival,
            rival.subscribe("orders", group="g", handler=others, options=options),
        ):
            await eventually(ended.is_set, "the blocked one to be done")

    def block(seconds: float) -> None:
        begun.set()
        time.sleep(seconds)  # what a handler may do to its loop

    async def handle(message: Message) -> None:
        block(1.8)  # the loop, for three times the lease

    seen = Recorder(handle)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=0.6)):
        rivalry = asyncio.get_running_loop().run_in_executor(None, lambda: begun.wait(LONG) and asyncio.run(contend()))
        await broker.send("orders", 1, partition=0)
        await finished(broker, "orders", "g")
        ended.set()
        await rivalry
    await seen.saw(1)
    assert others.messages == []


@pytest.mark.any_server
async def test_what_a_vanished_consumer_owned_goes_to_the_others(broker: Broker, clock: ManualClock) -> None:
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as one:
        other = await broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()).__aenter__()
        await shared([one, other], [4, 4])
        await vanish(other)
        await passed(clock, 1.2 * impatient().lease_ttl)
        await shared([one], [8])


# --- growth ---------------------------------------------------------------------------------------------


async def grow(broker: Broker, clock: ManualClock, partitions: int) -> None:
    await hurried(clock, broker.admin.grow("orders", partitions))


async def test_a_running_subscription_notices_growth_and_keeps_the_order(broker: Broker, clock: ManualClock) -> None:
    seen = Recorder()
    sent: list[Outgoing] = []
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        for step in range(6):
            batch = [Outgoing(step * 40 + number, key=f"k{number % 20}") for number in range(40)]
            sent += batch
            await broker.send_batch("orders", batch)
            if step == 2:
                await grow(broker, clock, 12)
        await finished(broker, "orders", "g")
        await shared([subscription], [12], 12)
    assert max(message.partition for message in seen.messages) >= 8
    for key in {str(one.key) for one in sent}:
        expected = [one.payload for one in sent if one.key == key]
        assert [message.payload for message in seen.messages if message.key == key] == expected


@pytest.mark.any_server
@pytest.mark.parametrize("in_order", [True, False])
async def test_new_partitions_wait_for_the_old_ones_if_asked_to(
    broker: Broker, clock: ManualClock, in_order: bool
) -> None:
    gate = asyncio.Event()
    seen = Recorder(lambda message: _after(gate) if message.payload == "old" else _nothing())
    options = impatient(order_across_growth=in_order)
    others, careless = Recorder(), impatient(order_across_growth=False)
    async with (
        broker.subscribe("orders", group="g", handler=seen, options=options) as subscription,
        broker.subscribe("orders", group="others", handler=others, options=careless),
    ):
        await broker.send("orders", "old", partition=0)
        await seen.saw(1)
        await grow(broker, clock, 10)
        await broker.send("orders", "new", partition=9)
        if in_order:
            await others.saw(2)
            await answers(broker)
            assert (seen.payloads, owned(subscription)) == (["old"], tuple(range(8)))
        else:
            await seen.saw(2)
        gate.set()
        await finished(broker, "orders", "g")
        await shared([subscription], [10], 10)
    assert seen.payloads == ["old", "new"]


async def _nothing() -> None:
    pass


@pytest.mark.any_server
async def test_a_group_that_was_away_during_growth_misses_nothing(broker: Broker, clock: ManualClock) -> None:
    options = impatient(start="latest")
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=options):
        pass
    await grow(broker, clock, 10)
    await broker.send_batch("orders", [Outgoing(number, partition=number) for number in range(10)])
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await finished(broker, "orders", "g")
    assert sorted(seen.payloads) == list(range(10))
