"""Topics and groups that an operator deletes, also when the deletion is interrupted; everything on a Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

import pytest

from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.kit.clock import SYSTEM_CLOCK, ManualClock
from conquiet.message import Outgoing
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.inspect import GroupInfo
from conquiet.topics.options import BrokerOptions, Retention
from conquiet.topics.produce.producer import Producer
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.retention import trim
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.connections import Connections
from tests.rigs.waiting import eventually
from tests.topics.operating import all_keys, generation_of
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too


# --- deleting topics --------------------------------------------------------------------------------------------------


async def _full(stage: Stage) -> Topic:
    """A topic with every kind of key there is."""
    topic = await stage.topic(partitions=2, max_len=5, group_expiry=60.0)
    keys = stage.instance.keys
    await stage.join(topic, "billing")
    for partition in range(2):
        stream = stage.stream(topic, partition)
        await stage.dead(topic, "billing", 3, partition)
        held = await stage.acquire(topic, "billing", partition)
        await stage.add(topic, 4, partition)
        ids, _ = await stage.take(held)
        await stage.park(held, ids[0])
        await stage.bury(held, ids[1])
        await stage.create_group(topic, "foreign", partition=partition)
        for key in (keys.delayed(stream), keys.dedup(stream), keys.replayed_gone(stream)):
            await stage.call(key, "ZADD", key, 1, "x")
        for key in (keys.delayed_items(stream), keys.dedup_ids(stream), keys.replayed(stream)):
            await stage.call(key, "HSET", key, "x", "1")
        await trim(stage.instance, topic, partition)
    forwarded = keys.forwarded("orders")
    await stage.call(forwarded, "HSET", forwarded, "billing/0", "x")
    there = await all_keys(stage)
    for stream in topic.streams(keys):
        assert {*keys.of_partition(stream), *keys.of_group(stream, "billing")} <= set(there)
    return topic


async def test_a_deleted_topic_leaves_nothing(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    kept = await stage.topic("orders.2")
    await stage.add(kept, 1)
    keys = stage.instance.keys
    bare = f"{keys.namespace}:orders"
    await stage.call(bare, "SET", bare, "somebody else's")
    before = await all_keys(stage)
    topic = await _full(stage)
    clock.advance(16)
    await admin.delete_group("orders", "foreign")
    await hurried(clock, admin.delete_topic("orders"))
    left = set(await all_keys(stage)).difference(before)
    # The epochs, for a day, and the word to the members that the topic is gone for good.
    words = {keys.lease(stream, group) for stream in topic.streams(keys) for group in ("billing", "foreign")}
    assert left == {*words, keys.generation("orders", "billing")}
    assert all([0 < await stage.call(key, "PTTL", key) <= 86_400_000 for key in left])
    assert await admin.list_topics() == ["orders.2"]
    with pytest.raises(UnknownTopicError):
        await admin.delete_topic("orders")
    assert await stage.topic(partitions=3) != topic
    assert (await admin.describe_topic("orders")).length == 0


@pytest.mark.any_server
async def test_a_topic_that_is_made_again_and_grows_has_its_groups_on_every_partition(
    stage: Stage, admin: Admin, clock: ManualClock
) -> None:
    """What the leases remember of the topic before says nothing of its groups."""
    await stage.topic(partitions=4)
    for partition in range(4):
        await stage.acquire(Topic("orders", 4), "billing", partition)
    clock.advance(16)
    await admin.delete_group("orders", "billing")
    await hurried(clock, admin.delete_topic("orders"))
    topic = await stage.topic(partitions=2)
    await stage.join(topic, "billing")
    for partition in range(2):
        await stage.create_group(topic, "billing", partition=partition)
        await stage.add(topic, 1, partition)
    await hurried(clock, admin.grow("orders", 4))
    for partition in range(4):
        stream = stage.stream(topic, partition)
        assert len(await stage.call(stream, "XINFO", "GROUPS", stream)) == 1


async def test_a_topic_with_live_members_is_only_deleted_by_force(
    stage: Stage, admin: Admin, clock: ManualClock
) -> None:
    topic = await stage.topic()
    await stage.join(topic, "billing")
    held = await stage.acquire(topic, "billing")
    with pytest.raises(ConfigError, match="live members: worker-1"):
        await admin.delete_topic("orders")
    assert (await admin.describe_topic("orders")).groups == 1
    before = await generation_of(stage, "billing")
    await hurried(clock, admin.delete_topic("orders", force=True))
    assert await stage.take(held) is None
    # What is left tells the members that this is a deletion, and not a server that forgot everything.
    assert await generation_of(stage, "billing") > before
    keys = stage.instance.keys
    assert set(await all_keys(stage)) == {
        keys.generation("orders", "billing"),
        keys.lease(stage.stream(topic), "billing"),
    }


async def test_a_growth_that_was_never_completed_is_deleted_too(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic()
    meta = stage.instance.keys.meta("orders")
    await stage.call(meta, "HSET", meta, "nextCount", 3, "effectiveAt", 1)
    await stage.add(topic, 1, 2)
    await hurried(clock, admin.delete_topic("orders"))
    assert await all_keys(stage) == []


class Interrupted(Exception):
    """A crash after a chosen number of commands."""


def _interrupt(patch: pytest.MonkeyPatch, most: int) -> None:
    """Crash when so many commands were sent and run."""
    call_many, sent = Connections.call_many, 0

    async def crashing(self: Connections, key: str, commands: list[bytes]) -> list[object]:
        nonlocal sent
        sent += 1
        replies = await call_many(self, key, commands)
        if sent >= most:
            raise Interrupted
        return replies

    patch.setattr(Connections, "call_many", crashing)


async def _is_interrupted(work: Awaitable[None], most: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        _interrupt(patch, most)
        try:
            await work
        except Interrupted:
            return True
    return False


@pytest.mark.slow
@pytest.mark.any_server
async def test_deleting_a_topic_can_be_repeated_wherever_it_was_interrupted(
    stage: Stage, admin: Admin, clock: ManualClock
) -> None:
    for step in range(1, 200):
        await _full(stage)
        clock.advance(16)
        if not await _is_interrupted(hurried(clock, admin.delete_topic("orders")), step):
            break
        with suppress(UnknownTopicError):  # when the last command was the last one
            await hurried(clock, admin.delete_topic("orders"))
        assert [key for key in await all_keys(stage) if await stage.call(key, "PTTL", key) < 0] == []
    assert step > 20


@pytest.mark.slow
@pytest.mark.any_server
async def test_deleting_a_group_can_be_repeated_wherever_it_was_interrupted(
    stage: Stage, admin: Admin, clock: ManualClock
) -> None:
    for step in range(1, 200):
        topic = await stage.topic(f"orders{step}", 2)
        await stage.join(topic, "billing")
        for partition in range(2):
            held = await stage.acquire(topic, "billing", partition)
            ids = await stage.add(topic, 5, partition)
            await stage.take(held)
            await stage.park(held, ids[0])
            await stage.bury(held, *ids[1:4])
        clock.advance(16)
        is_done = not await _is_interrupted(admin.delete_group(topic.name, "billing"), step)
        if not is_done and await admin.list_groups(topic.name):
            await admin.delete_group(topic.name, "billing")
        assert await admin.list_groups(topic.name) == []
        assert len(await admin.dead_letters(topic.name)) == 6
        left = [key for key in await all_keys(stage) if f"{topic.name}:" in key and "billing" in key]
        assert all(":lease:" in key or key.endswith(":generation") for key in left)
        if is_done:
            break
    assert step > 15


@pytest.mark.slow
@pytest.mark.any_server
async def test_no_stream_of_a_deleted_topic_comes_back_to_life(stage: Stage) -> None:
    """Whoever sends all the time is told, before the streams go."""
    instance = Instance(stage.instance.link, stage.instance.keys, SYSTEM_CLOCK)
    await stage.topic(partitions=3)
    producer = Producer(instance, Registry(instance), BrokerOptions())

    sent = list[object]()

    async def produce() -> None:
        while True:
            sent.append(await producer.send("orders", Outgoing({})))

    producing = asyncio.create_task(produce())
    await eventually(lambda: len(sent) > 3, "messages to be sent")
    await Admin(instance, Registry(instance)).delete_topic("orders")
    with pytest.raises(UnknownTopicError):
        await producing
    assert await all_keys(stage) == []


async def test_on_a_cluster(clustered: Stage, clock: ManualClock) -> None:
    admin = Admin(clustered.instance, clustered.registry)
    topic = await clustered.topic(partitions=4)
    for partition in range(4):
        await clustered.dead(topic, "billing", 1, partition)
        await clustered.add(topic, 5, partition)
        await clustered.read(topic, "billing", 2, partition)
    info: GroupInfo = await admin.describe_group("orders", "billing")
    assert (info.lag, info.pending, info.consumers) == (12, 8, 0)
    described = await admin.describe_topic("orders")
    assert (described.length, described.groups, described.dead_letters) == (24, 1, 4)
    assert len((await admin.pending("orders", "billing")).entries) == 8
    assert await admin.trim("orders", max_len=1) == 4
    await admin.reset_group("orders", "billing", "earliest")
    assert (await admin.describe_group("orders", "billing")).lag == 20
    assert await admin.replay("orders") == 4
    await admin.configure("orders", Retention(max_len=7))
    await hurried(clock, admin.grow("orders", 6))
    await admin.delete_group("orders", "billing")
    assert await admin.list_groups("orders") == []
    await hurried(clock, admin.delete_topic("orders"))
    assert await admin.list_topics() == []
