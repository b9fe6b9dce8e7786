"""Groups, topics and whole servers that go away under a subscription, and partitions that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import GroupLostError, Outgoing, Retention, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker, Subscription
from conquiet.wire.keys import Keys
from tests.conftest import Rung
from tests.rigs.asking import ask, keys_like, next_millisecond
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, answers, finished, impatient
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


@pytest.fixture
def stream(keys: Keys) -> str:
    return keys.partition("orders", 0)


async def ends_with(subscription: Subscription, error: type[Exception], match: str) -> None:
    async with asyncio.timeout(LONG):
        with pytest.raises(error, match=match):
            await subscription.wait()
    health = subscription.health()
    assert not health.healthy
    assert health.error is not None


# --- a group that somebody destroyed ----------------------------------------------------------------------


async def test_a_subscription_whose_group_was_destroyed_ends(broker: Broker, stage: Stage, stream: str) -> None:
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        await broker.send("orders", 1, partition=0)
        await finished(broker, "orders", "g")
        await stage.call(stream, "XGROUP", "DESTROY", stream, "g")
        await ends_with(subscription, GroupLostError, "'g' is gone")
    await seen.saw(1)


@pytest.mark.any_server
async def test_pulling_from_a_destroyed_group_raises(broker: Broker, stage: Stage, stream: str) -> None:
    async with broker.consume("orders", group="g", options=impatient()) as messages:
        await broker.send("orders", 1, partition=0)
        message = await messages.next(LONG)
        assert message is not None
        await message.ack()
        await stage.call(stream, "XGROUP", "DESTROY", stream, "g")
        with pytest.raises(GroupLostError):
            await messages.next(LONG)


@pytest.mark.parametrize(
    ("on_group_lost", "again"), [("earliest", ["a", "b", "c", "new"]), ("resume", ["c", "new"]), ("latest", ["new"])]
)
async def test_a_destroyed_group_can_go_on_where_it_is_told_to(
    broker: Broker, stage: Stage, stream: str, on_group_lost: str, again: list[str]
) -> None:
    gate = asyncio.Event()

    async def hold(message: Message) -> None:
        if message.payload == "c" and not gate.is_set():
            await gate.wait()

    seen, options = Recorder(hold), impatient(on_group_lost=on_group_lost)
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as subscription:
        await broker.send_batch("orders", [Outgoing(letter, partition=0) for letter in "ab"])
        await finished(broker, "orders", "g")
        await broker.send("orders", "c", partition=0)
        await seen.saw(3)
        epoch = seen.messages[0].epoch
        await stage.call(stream, "XGROUP", "DESTROY", stream, "g")
        await eventually(lambda: _has_group(stage, stream), "the group to be made again")
        gate.set()
        await broker.send("orders", "new", partition=0)
        await finished(broker, "orders", "g")
        assert subscription.health().healthy
    assert sorted(seen.payloads[3:]) == sorted(again)
    assert seen.messages[-1].epoch > epoch


async def _has_group(stage: Stage, stream: str) -> bool:
    return bool(await stage.call(stream, "XINFO", "GROUPS", stream))


async def test_a_stream_that_vanished_is_begun_anew(broker: Broker, stage: Stage, stream: str) -> None:
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        await broker.send("orders", 1, partition=0)
        await finished(broker, "orders", "g")
        await stage.call(stream, "DEL", stream)
        await eventually(lambda: _exists(stage, stream), "the stream to be made again")
        await broker.send("orders", 2, partition=0)
        await seen.saw(2)
        assert subscription.health().error is None


async def _exists(stage: Stage, key: str) -> bool:
    return bool(await stage.call(key, "EXISTS", key))


# --- on purpose -------------------------------------------------------------------------------------------


async def test_deleting_a_group_ends_its_subscriptions(broker: Broker, stage: Stage, stream: str) -> None:
    other = Recorder()
    async with (
        broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as one,
        broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as two,
        broker.subscribe("orders", group="other", handler=other, options=impatient()),
    ):
        await broker.send("orders", 1)
        await finished(broker, "orders", "g", "other")
        await broker.admin.delete_group("orders", "g", force=True)
        await ends_with(one, GroupLostError, "was deleted")
        await ends_with(two, GroupLostError, "was deleted")
        await broker.send("orders", 2)
        await other.saw(2)
    assert await broker.admin.list_groups("orders") == ["other"]


@pytest.mark.any_server
async def test_a_deleted_group_can_begin_again(broker: Broker, url: str) -> None:
    await broker.send("orders", 1)
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        await finished(broker, "orders", "g")
        await broker.admin.delete_group("orders", "g", force=True)
        await ends_with(subscription, GroupLostError, "was deleted")
    await next_millisecond(url)  # than that of the deletion
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await seen.saw(1)


async def test_deleting_a_topic_ends_its_subscriptions_and_leaves_nothing(
    broker: Broker, clock: ManualClock, url: str, keys: Keys
) -> None:
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        await broker.send_batch("orders", [Outgoing(number) for number in range(4)])
        await finished(broker, "orders", "g")
        deleting = asyncio.create_task(broker.admin.delete_topic("orders", force=True))
        await ends_with(subscription, UnknownTopicError, "was deleted")
        clock.advance(2.0)
        await deleting
    assert await broker.admin.list_topics() == []
    left = await keys_like(url, f"{keys.namespace}:*")
    assert [key for key in left if await ask(url, "PTTL", key) < 0] == []
    with pytest.raises(UnknownTopicError):
        await broker.send("orders", 1)


@pytest.mark.any_server
async def test_other_topics_of_the_subscription_end_with_the_deleted_one(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("refunds")
    options = impatient()
    async with broker.subscribe(["orders", "refunds"], group="g", handler=Recorder(), options=options) as subscription:
        deleting = asyncio.create_task(broker.admin.delete_topic("refunds", force=True))
        await ends_with(subscription, UnknownTopicError, "refunds")
        clock.advance(2.0)
        await deleting
    assert (await broker.admin.describe_group("orders", "g")).unowned == (0, 1)


# --- a server that forgot everything ----------------------------------------------------------------------


@pytest.mark.parametrize("is_sent_at_once", [False, True])
async def test_after_a_flush_the_subscription_goes_on(rung: Rung, is_sent_at_once: bool) -> None:
    if not rung.binary:
        pytest.skip("needs a server of its own")
    async with (
        on_a_port(rung.binary) as redis,
        Broker(redis.url) as broker,
    ):
        await broker.create_topic("orders", partitions=2)
        seen = Recorder()
        async with broker.subscribe(
            "orders", group="g", handler=seen, options=impatient(lease_ttl=3.0)
        ) as subscription:
            await broker.send_batch("orders", [Outgoing(number, partition=number % 2) for number in range(4)])
            await finished(broker, "orders", "g")
            await ask(redis.url, "FLUSHALL")
            if not is_sent_at_once:
                await eventually(lambda: _is_back(broker), "the topic and its groups to be made again")
            await broker.send("orders", "new", partition=1)  # by what the producer still knows of the topic
            await eventually(lambda: "new" in seen.payloads, "what was sent after the flush")
            assert subscription.health().error is None
        assert await broker.admin.list_topics() == ["orders"]
        assert (await broker.admin.describe_topic("orders")).partitions == 2


@pytest.mark.any_server
async def test_after_a_flush_the_group_is_on_every_partition_whoever_takes_it(rung: Rung) -> None:
    """Nobody can take the second one: what is sent there is kept for the group all the same."""
    if not rung.binary:
        pytest.skip("needs a server of its own")
    async with on_a_port(rung.binary) as redis, Broker(redis.url) as broker:
        await broker.create_topic("orders", partitions=2, retention=Retention(max_len=1))
        options = impatient(lease_ttl=3.0, max_partitions=1)
        async with broker.subscribe("orders", group="g", handler=Recorder(), options=options):
            await ask(redis.url, "FLUSHALL")
            await eventually(lambda: _are_places(broker), "the group is everywhere")
            await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(5)])
            assert await broker.admin.trim("orders") == 0


async def _are_places(broker: Broker) -> bool:
    if await broker.admin.list_topics() != ["orders"] or await broker.admin.list_groups("orders") != ["g"]:
        return False
    parts = (await broker.admin.describe_group("orders", "g")).partitions
    return all(part.last_delivered_id is not None for part in parts)


async def _is_back(broker: Broker) -> bool:
    if await broker.admin.list_topics() != ["orders"] or await broker.admin.list_groups("orders") != ["g"]:
        return False
    return (await broker.admin.describe_group("orders", "g")).unowned == ()


# --- one bad partition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "while"])
async def test_one_bad_partition_never_stops_the_others(broker: Broker, stage: Stage, keys: Keys, when: str) -> None:
    bad, seen = keys.partition("orders", 1), Recorder()
    if when == "before":
        await stage.call(bad, "SET", bad, "foreign")
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as subscription:
        if when == "while":
            await broker.send("orders", 0, partition=1)
            await finished(broker, "orders", "g")
            await stage.call(bad, "SET", bad, "foreign")
        before = len(seen.messages)
        for number in range(1, 6):
            await broker.send("orders", number, partition=0)
            await eventually(lambda number=number: number in seen.payloads, f"message {number}")  # type: ignore[misc]
            await answers(broker, 5)  # what is wrong with the other one shows by then
        assert len(seen.messages) == before + 5
        await stage.call(bad, "DEL", bad)
        await eventually(lambda: _exists(stage, bad), "the partition to be made again")
        await broker.send("orders", "cured", partition=1)
        await eventually(lambda: "cured" in seen.payloads, "the cured one")
        assert subscription.health().error is None
