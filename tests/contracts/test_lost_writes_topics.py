"""Topics, groups, growth and sends that a server has confirmed and lost: said, made up for, or done anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet import Broker, LeaseLostError, Message, Outgoing, SubscribeOptions, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.topics.server.topics import FRESH
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask, pending
from tests.rigs.proxy import Proxy
from tests.rigs.rollback import Rollback
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, finished, impatient
from tests.topics.staging import hurried

pytest_plugins = ("tests.contracts.rollback_fixtures",)
pytestmark = pytest.mark.guarantee

TOPIC: Final = "orders"
GROUP: Final = "billing"
STREAM: Final = Keys().partition(TOPIC, 0)


@pytest.fixture
async def broker(rollback: Rollback, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(rollback.url, clock=clock) as broker:
        yield broker


# --- an owner that the server has forgotten ---------------------------------------------------------------------


async def test_an_owner_that_was_forgotten_settles_nothing_and_joins_again(
    broker: Broker, rollback: Rollback, clock: ManualClock
) -> None:
    """It is cut off while the server comes back and gives its partition to another; then it goes on, as it thinks."""
    await broker.create_topic(TOPIC)
    await broker.send_batch(TOPIC, [Outgoing(number) for number in range(3)])
    await rollback.keep()
    options = impatient(max_inflight=2)
    async with (
        Proxy(rollback.url) as proxy,
        Broker(proxy.url, clock=clock) as cut_off,
        cut_off.consume(TOPIC, group=GROUP, options=options) as zombie,
    ):
        stale = await zombie.next(LONG)
        assert stale is not None
        proxy.shut()
        await rollback.lose()
        proxy.lead_to(rollback.url)
        async with broker.consume(TOPIC, group=GROUP, options=options) as messages:
            fresh = await messages.next(LONG)
            assert fresh is not None
            assert (fresh.id, fresh.payload) == (stale.id, 0)
            assert fresh.epoch > stale.epoch
            before = await pending(rollback.url, STREAM, GROUP)
            assert fresh.id in before
            proxy.reopen()
            for settle in (stale.ack, stale.retry, stale.reject):
                with pytest.raises(LeaseLostError):
                    await asyncio.wait_for(settle(), LONG)
            assert set(before) <= set(await pending(rollback.url, STREAM, GROUP))
            await fresh.ack()
            for number in (1, 2):
                message = await messages.next(LONG)
                assert message is not None
                assert message.payload == number
                await message.ack()
            await finished(broker, TOPIC, GROUP)
        assert zombie.health().error is None


# --- topics and groups ------------------------------------------------------------------------------------------


async def test_a_topic_that_was_forgotten_is_unknown_within_a_second(
    broker: Broker, rollback: Rollback, clock: ManualClock
) -> None:
    """For as long a producer goes by what it knows; then it is told, and does not write to what nobody reads."""
    await rollback.keep()
    await broker.create_topic(TOPIC)
    await broker.send(TOPIC, 1)
    await rollback.lose()
    clock.advance(FRESH)
    with pytest.raises(UnknownTopicError):
        await broker.send(TOPIC, 2)
    with pytest.raises(UnknownTopicError):
        await broker.send_batch(TOPIC, [Outgoing(2)])
    with pytest.raises(UnknownTopicError):
        async with broker.consume(TOPIC, group=GROUP):
            pass
    assert await ask(rollback.url, "DBSIZE") == 0


async def test_whoever_subscribes_makes_a_topic_again_that_was_forgotten(
    broker: Broker, rollback: Rollback, clock: ManualClock
) -> None:
    seen = Recorder()
    await rollback.keep()
    await broker.create_topic(TOPIC, partitions=3)
    async with broker.subscribe(TOPIC, group=GROUP, handler=seen, options=impatient()) as subscription:
        await broker.send(TOPIC, "lost")
        await seen.saw(1)
        await rollback.lose()
        clock.advance(5)
        await eventually(lambda: is_there(broker), "the topic is there again, and its group owns all of it")
        await broker.send_batch(TOPIC, [Outgoing(number, partition=number) for number in range(3)])
        await finished(broker, TOPIC, GROUP)
        assert subscription.health().error is None
    assert sorted(seen.payloads[1:]) == [0, 1, 2]


async def is_there(broker: Broker) -> bool:
    if await broker.admin.list_topics() != [TOPIC] or await broker.admin.list_groups(TOPIC) != [GROUP]:
        return False
    group = await broker.admin.describe_group(TOPIC, GROUP)
    return len(group.partitions) == 3 and not group.unowned


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_a_group_that_was_forgotten_begins_with_the_first_message_that_is_there(
    broker: Broker, rollback: Rollback, clock: ManualClock, start: str
) -> None:
    """Also one that began with the latest: where it stood nobody knows, and this way it misses nothing."""
    seen = Recorder()
    await broker.create_topic(TOPIC)
    await broker.send(TOPIC, "kept")
    await rollback.keep()
    options = impatient(start=start)
    async with broker.subscribe(TOPIC, group=GROUP, handler=seen, options=options) as subscription:
        await broker.send(TOPIC, "lost")
        await eventually(lambda: "lost" in seen.payloads, "what comes is handled")
        await finished(broker, TOPIC, GROUP)
        before = len(seen.messages)
        await rollback.lose()
        clock.advance(5)
        await broker.send(TOPIC, "new")
        await eventually(lambda: "new" in seen.payloads, "it goes on")
        await finished(broker, TOPIC, GROUP)
        assert subscription.health().error is None
    assert seen.payloads[before:] == ["kept", "new"]


# --- growth -----------------------------------------------------------------------------------------------------


async def grown(broker: Broker, clock: ManualClock, partitions: int) -> None:
    await hurried(clock, broker.admin.grow(TOPIC, partitions=partitions))


@pytest.mark.parametrize("how_far", ["announced", "committed"])
async def test_a_growth_that_was_forgotten_can_be_done_again(
    broker: Broker, rollback: Rollback, clock: ManualClock, how_far: str
) -> None:
    """Until then the topic has the partitions of before, for all who know it: a producer learns it within a second."""
    seen = Recorder()
    await broker.create_topic(TOPIC)
    options = impatient(max_inflight=1)
    async with broker.subscribe(TOPIC, group=GROUP, handler=seen, options=options) as subscription:
        await rollback.keep()
        if how_far == "announced":
            growing = asyncio.create_task(broker.admin.grow(TOPIC, partitions=2))
            await eventually(lambda: is_announced(rollback), "it is announced")
            await rollback.lose()
            await asyncio.wait([growing], timeout=0)
            growing.cancel()
            await asyncio.gather(growing, return_exceptions=True)
        else:
            await grown(broker, clock, 2)
            await eventually(lambda: subscription.owned[TOPIC] == (0, 1), "it owns both")
            await rollback.lose()
        clock.advance(FRESH)
        assert (await broker.admin.describe_topic(TOPIC)).partitions == 1
        await broker.send_batch(TOPIC, [Outgoing(number, key=str(number)) for number in range(8)])
        await finished(broker, TOPIC, GROUP)
        assert subscription.owned[TOPIC] == (0,)
        await grown(broker, clock, 2)
        await broker.send_batch(TOPIC, [Outgoing(number, partition=number % 2) for number in range(8, 16)])
        await finished(broker, TOPIC, GROUP)
        assert subscription.health().error is None
    assert sorted(seen.payloads) == list(range(16))


async def is_announced(rollback: Rollback) -> bool:
    return bool(await ask(rollback.url, "HEXISTS", Keys().meta(TOPIC), "nextCount"))


async def test_after_a_growth_that_was_forgotten_the_next_one_keeps_the_order_of_keys(
    broker: Broker, rollback: Rollback, clock: ManualClock
) -> None:
    """What a group had finished of the one says nothing of the other, also if it saw the topic at no time between."""
    gate = asyncio.Event()

    async def wait(message: Message) -> None:
        if message.payload == "old":
            await gate.wait()

    seen = Recorder(wait)
    await broker.create_topic(TOPIC)
    async with (
        Proxy(rollback.url) as proxy,
        Broker(proxy.url, clock=clock) as cut_off,
        cut_off.subscribe(TOPIC, group=GROUP, handler=seen, options=impatient(lease_ttl=60)) as subscription,
    ):
        await broker.send(TOPIC, "first", partition=0)
        await finished(broker, TOPIC, GROUP)
        await rollback.keep()
        await grown(broker, clock, 2)
        await eventually(lambda: subscription.owned[TOPIC] == (0, 1), "it owns both")
        proxy.shut()
        await rollback.lose()
        clock.advance(FRESH)
        await broker.send(TOPIC, "old", partition=0)
        await grown(broker, clock, 2)
        await broker.send(TOPIC, "new", partition=1)
        proxy.lead_to(rollback.url)
        proxy.reopen()
        [member] = subscription._membership.members.values()
        await eventually(lambda: member._limits.get(0, "0-0") != "0-0", "the group knows how far it may read")
        await eventually(lambda: "old" in seen.payloads, "it is being handled")
        assert "new" not in seen.payloads
        gate.set()
        await finished(broker, TOPIC, GROUP)
    assert seen.payloads == ["first", "old", "new"]


# --- sending ----------------------------------------------------------------------------------------------------


async def test_a_send_that_was_forgotten_is_no_repetition_and_one_that_was_kept_is(
    broker: Broker, rollback: Rollback
) -> None:
    """So whoever is not sure sends once more, under the same ID: it is there once, or not lost."""
    await broker.create_topic(TOPIC)
    kept = await broker.send(TOPIC, "kept", message_id="a")
    await rollback.keep()
    await broker.send(TOPIC, "lost", message_id="b")
    later = await broker.send(TOPIC, "later", message_id="c", delay=60)
    await rollback.lose()
    assert await broker.send(TOPIC, "kept", message_id="a") == kept
    again = await broker.send(TOPIC, "lost", message_id="b")
    assert await broker.send(TOPIC, "lost", message_id="b") == again
    assert await broker.send(TOPIC, "later", message_id="c", delay=60) != later
    assert await ask(rollback.url, "XLEN", STREAM) == 2
    assert await ask(rollback.url, "ZCARD", Keys().delayed(STREAM)) == 1


async def test_a_subscription_that_never_lost_anything_begins_nothing_anew(broker: Broker, rollback: Rollback) -> None:
    """A server that comes back with everything: no message is handled twice."""
    seen = Recorder()
    await broker.create_topic(TOPIC)
    options = SubscribeOptions(poll_timeout=0.1, handle_signals=False)
    async with broker.subscribe(TOPIC, group=GROUP, handler=seen, options=options):
        await broker.send_batch(TOPIC, [Outgoing(number) for number in range(20)])
        await finished(broker, TOPIC, GROUP)
        await rollback.keep()
        await rollback.lose()
        await broker.send(TOPIC, 20)
        await finished(broker, TOPIC, GROUP)
    assert sorted(seen.payloads) == list(range(21))
