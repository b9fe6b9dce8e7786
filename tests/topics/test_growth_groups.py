"""Groups and the partitions that a topic gets: whatever is written there reaches every group that was there before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet.errors import QueueError, TopicFullError
from conquiet.kit.clock import ManualClock
from conquiet.kit.policy import Backoff
from conquiet.message import Message, Outgoing
from conquiet.topics import Broker, Retention
from conquiet.topics.server.external_groups import Position
from conquiet.topics.server.growth import grow
from conquiet.topics.server.retention import trim
from conquiet.topics.server.topics import Topic
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually
from tests.topics.adopting import GROUP, adopt, places, publish
from tests.topics.consuming import Recorder, finished, impatient
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too

_HOUR = Backoff(base=3600.0, cap=3600.0, kind="fixed")
OFFLINE = "offline"
"""A group that nobody serves while the topic grows."""


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


async def _found(stage: Stage, name: str = "orders") -> Topic:
    found = await stage.registry.fetch_or_none(name)
    assert found is not None
    return found


async def _subscribed(broker: Broker, group: str, topic: str = "orders", **options: Any) -> None:
    """A group that was served once and is not any more."""
    async with broker.subscribe(topic, group=group, handler=Recorder(), options=impatient(**options)):
        pass


# --- nothing is lost --------------------------------------------------------------------------------------


async def test_a_group_that_is_offline_while_the_topic_grows_misses_nothing(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=1, retention=Retention(delete_acked=True, trim_interval=0.05))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 3))
    async with broker.subscribe("orders", group="live", handler=(seen := Recorder()), options=impatient()):
        await broker.send_batch("orders", [Outgoing(number, partition=number % 3) for number in range(12)])
        await seen.saw(12)
        await finished(broker, "orders", "live")
        clock.advance(1)
        await broker.admin.trim("orders")
    assert (await broker.admin.describe_group("orders", OFFLINE)).lag == 12
    async with broker.subscribe("orders", group=OFFLINE, handler=(seen := Recorder()), options=impatient()):
        await seen.saw(12)


async def test_a_group_of_a_topic_that_was_wider_in_a_former_life_misses_nothing(
    broker: Broker, stage: Stage, clock: ManualClock
) -> None:
    """What is left of a deleted topic tells of groups that were deleted with it."""
    await broker.create_topic("orders", partitions=4)
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.delete_topic("orders"))
    clock.advance(2)
    await broker.create_topic("orders", partitions=2, retention=Retention(delete_acked=True))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 4))
    async with broker.subscribe("orders", group="live", handler=(seen := Recorder()), options=impatient()):
        await broker.send_batch("orders", [Outgoing(number, partition=number) for number in range(4)])
        await seen.saw(4)
        await finished(broker, "orders", "live")
    await broker.admin.trim("orders")
    async with broker.subscribe("orders", group=OFFLINE, handler=(seen := Recorder()), options=impatient()):
        await seen.saw(4)


async def test_a_group_that_an_old_message_holds_back_misses_nothing(broker: Broker, clock: ManualClock) -> None:
    """It may not read the new partitions before the message that waits for its retry is done."""
    await broker.create_topic("orders", partitions=1, retention=Retention(max_len=5))
    fails = True

    async def handle(message: Message) -> None:
        if message.payload == "first" and fails:
            raise ValueError("later")

    seen = Recorder(handle)
    options = impatient(backoff=_HOUR, max_retries=1, order="block_key")
    async with broker.subscribe("orders", group="billing", handler=seen, options=options):
        await broker.send("orders", "first")
        await eventually(lambda: _parked(broker), "the first is parked")
        await hurried(clock, broker.admin.grow("orders", 2))
        await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(50)])
        assert await broker.admin.trim("orders") == 0
        info = await broker.admin.describe_group("orders", "billing")
        assert (info.lag, info.partitions[1].owner) == (50, None)
        fails = False
        clock.advance(3700)
        await eventually(lambda: len(seen.messages) == 52, "all the others")
        await finished(broker, "orders", "billing")
    assert sorted(payload for payload in seen.payloads if payload != "first") == list(range(50))


async def _parked(broker: Broker) -> bool:
    return (await broker.admin.describe_group("orders", "billing")).partitions[0].retry_depth == 1


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_full_new_partition_refuses_what_a_group_has_not_read(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=1, retention=Retention(max_len=5, on_full="reject"))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 2))
    await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(5)])
    with pytest.raises(TopicFullError):
        await broker.send("orders", "one more", partition=1)


@pytest.mark.any_server
@pytest.mark.one_node
async def test_what_is_dropped_from_a_new_partition_is_counted(broker: Broker, clock: ManualClock) -> None:
    await broker.create_topic("orders", partitions=1, retention=Retention(max_len=5, on_full="drop"))
    await _subscribed(broker, OFFLINE)
    await hurried(clock, broker.admin.grow("orders", 2))
    await broker.send_batch("orders", [Outgoing(number, partition=1) for number in range(8)])
    assert (await broker.admin.describe_topic("orders")).by_partition[1].dropped == 3


# --- which groups -----------------------------------------------------------------------------------------


async def test_every_group_is_at_the_beginning_of_every_new_partition(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    for partition in range(2):
        ids = await stage.add(topic, 3, partition)
        await stage.acquire(topic, "billing", partition)
        await stage.create_group(topic, "audit", "$", partition)
        await stage.create_group(topic, "foreign", ids[1], partition)
    for group in ("billing", "audit"):
        await stage.join(topic, group)
    await adopt(stage, topic)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 4))
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 5))
    grown = await _found(stage)
    for group in ("billing", "audit", "foreign", GROUP):
        assert (await places(stage, grown, group))[2:] == ["0-0"] * 3


async def test_another_programs_group_that_reads_one_partition_is_left_alone(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=3)
    for partition in (0, 1):
        await stage.add(topic, 1, partition)
    await stage.create_group(topic, "one", partition=0)
    await stage.create_group(topic, "all", partition=0)  # but for the one that holds nothing
    await stage.create_group(topic, "all", partition=1)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 4))
    grown = await _found(stage)
    assert (await places(stage, grown, "one"))[3] is None
    assert (await places(stage, grown, "all"))[3] == "0-0"


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_name_that_is_no_text_stays_the_same(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    stream = stage.stream(topic)
    await stage.call(stream, "XGROUP", "CREATE", stream, b"\xff\xfe", "0", "MKSTREAM")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    new = stage.stream(topic, 1)
    assert [row[1] for row in await stage.call(new, "XINFO", "GROUPS", new)] == [b"\xff\xfe"]


async def test_a_name_that_was_noted_and_never_came_to_be_is_no_group(stage: Stage, clock: ManualClock) -> None:
    """Its consumer died before it was anywhere: where a new one begins is not decided yet."""
    topic = await stage.topic()
    await stage.join(topic, "billing")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    assert await places(stage, await _found(stage), "billing") == [None, None]


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_new_partition_that_is_no_stream_does_not_stop_the_others(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    await stage.acquire(topic, "billing")
    await stage.join(topic, "billing")
    bad = stage.stream(topic, 1)
    await stage.call(bad, "SET", bad, "foreign")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 3))
    assert (await _found(stage)).partitions == 3
    assert await stage.pending(topic, "billing", 2) == []


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_group_that_cannot_be_put_on_a_partition_does_not_begin(
    broker: Broker, url: str, keys: Keys, stage: Stage
) -> None:
    """It would miss what is trimmed there, and nobody would know."""
    topic = await stage.topic(partitions=2)
    user, stream = f"user-{keys.namespace}", stage.stream(topic, 0)
    allowed = [f"~{keys.namespace}:streaming:mq:{what}:*" for what in ("topic", "topics", "members", "lease")]
    await ask(url, "ACL", "SETUSER", user, "on", ">secret", "+@all", *allowed, f"~{stream}")
    try:
        limited = url.replace("redis://", f"redis://{user}:secret@")
        async with Broker(limited, namespace=keys.namespace) as other:
            with pytest.raises(QueueError, match=f"{stage.stream(topic, 1)}.*(permission|ACL)"):
                async with other.subscribe("orders", group="late", handler=Recorder(), options=impatient()):
                    pass
        # It is new still, and begins where the next one wants it to.
        assert await places(stage, topic, "late") == [None, None]
    finally:
        await ask(url, "ACL", "DELUSER", user)


# --- queries ----------------------------------------------------------------------------------------------


async def test_a_query_that_was_away_during_growth_misses_nothing(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(delete_acked=True)
    await adopt(stage, topic)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    grown = await _found(stage)
    ids = await stage.add(grown, 10, 1)
    await stage.create_group(grown, "live", partition=1)
    await stage.ack(grown, "live", *await stage.read(grown, "live", 10, 1), partition=1)
    assert (await trim(stage.instance, grown, 1)).removed == 0
    await publish(stage, grown, {1: Position(ids[4], 5)})
    assert (await trim(stage.instance, grown, 1)).removed == 5
