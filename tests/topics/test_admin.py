"""What an operator sees and does."""

from __future__ import annotations

import datetime as dt
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.kit.entry_ids import moment
from conquiet.kit.entry_ids import order as place
from conquiet.topics.operate.admin import Admin
from conquiet.topics.options import Retention, TopicDefaults
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import LegacyTopic, Registry
from tests.topics.operating import all_keys
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


# --- topics ----------------------------------------------------------------------------------------------


async def test_topics_are_listed_by_name(stage: Stage, admin: Admin) -> None:
    assert await admin.list_topics() == []
    for name in ("b", "a.c", "a-b"):
        await stage.topic(name)
    assert await admin.list_topics() == ["a-b", "a.c", "b"]


UNKNOWN: dict[str, Callable[[Admin], Awaitable[object]]] = {
    "describe_topic": lambda admin: admin.describe_topic("nowhere"),
    "list_groups": lambda admin: admin.list_groups("nowhere"),
    "describe_group": lambda admin: admin.describe_group("nowhere", "billing"),
    "read": lambda admin: admin.read("nowhere"),
    "pending": lambda admin: admin.pending("nowhere", "billing"),
    "dead_letters": lambda admin: admin.dead_letters("nowhere"),
    "replay": lambda admin: admin.replay("nowhere"),
    "purge": lambda admin: admin.purge("nowhere"),
    "grow": lambda admin: admin.grow("nowhere", 2),
    "configure": lambda admin: admin.configure("nowhere", Retention()),
    "trim": lambda admin: admin.trim("nowhere"),
    "reset_group": lambda admin: admin.reset_group("nowhere", "billing", "earliest"),
    "delete_group": lambda admin: admin.delete_group("nowhere", "billing"),
    "delete_topic": lambda admin: admin.delete_topic("nowhere"),
}


@pytest.mark.parametrize("method", UNKNOWN)
async def test_an_unknown_topic_is_an_error_and_never_made(stage: Stage, instance: Instance, method: str) -> None:
    admin = Admin(instance, Registry(instance, TopicDefaults(partitions=2)))
    with pytest.raises(UnknownTopicError, match="'nowhere'"):
        await UNKNOWN[method](admin)
    assert await all_keys(stage) == []


def test_every_method_is_tried_with_an_unknown_topic() -> None:
    methods = {name for name in vars(Admin) if not name.startswith("_")}
    assert methods == {*UNKNOWN, "list_topics"}


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("topic", ["", "a:b", "a b", "{a}", "x" * 201, None, 5])
async def test_what_is_no_name_is_refused(admin: Admin, topic: Any) -> None:
    with pytest.raises(ConfigError, match="topic must be 1 to 200 letters"):
        await admin.describe_topic(topic)


async def test_a_topic_is_described_over_all_partitions(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=3, max_len=100)
    for partition, id in ((0, "9-1"), (0, "10-2"), (1, "10-10"), (1, "11-5")):
        stream = stage.stream(topic, partition)
        await stage.call(stream, "XADD", stream, id, "payload", "1")
    key = stage.instance.keys.delayed(stage.stream(topic, 2))
    await stage.call(key, "ZADD", key, 5, "delay/1")
    await stage.create_group(topic, "billing", partition=1)
    await stage.join(topic, "shipping")
    info = await admin.describe_topic("orders")
    assert (info.name, info.partitions, info.length) == ("orders", 3, 4)
    assert (info.first_id, info.last_id) == ("9-1", "11-5")
    assert (info.groups, info.dead_letters, info.legacy) == (2, 0, False)
    assert (info.retention, info.partitioner) == (Retention(max_len=100), "murmur2")
    assert info.created == info.updated == moment(topic.created_ms)
    assert info.created is not None
    assert abs(info.created - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=1)
    first, second, third = info.by_partition
    assert (first.index, first.stream, first.length) == (0, stage.stream(topic, 0), 2)
    assert (second.first_id, second.last_id, second.delayed) == ("10-10", "11-5", 0)
    assert (third.length, third.first_id, third.last_id, third.delayed) == (0, None, None, 1)
    assert (third.trimmed_below, third.dropped) == (None, 0)


async def test_what_retention_removed_is_told(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(max_len=3, on_full="drop")
    await stage.create_group(topic, "billing")
    ids = await stage.add(topic, 10)
    assert await admin.trim("orders") == 7
    [part] = (await admin.describe_topic("orders")).by_partition
    assert part.dropped == 7
    assert part.trimmed_below is not None
    assert place(ids[6]) < place(part.trimmed_below) <= place(ids[7])


async def test_a_topic_that_nobody_wrote_to(stage: Stage, admin: Admin) -> None:
    await stage.topic(partitions=2)
    info = await admin.describe_topic("orders")
    assert (info.length, info.first_id, info.last_id, info.groups) == (0, None, None, 0)


async def test_a_legacy_stream_is_described_too(stage: Stage, admin: Admin) -> None:
    stream = stage.instance.keys.bare("legacy")
    await stage.call(stream, "XADD", stream, "5-5", "data", "{}")
    await stage.call(stream, "XGROUP", "CREATE", stream, "billing", "0")
    for topic in ("legacy", LegacyTopic(stream)):
        info = await admin.describe_topic(topic)
        assert (info.legacy, info.partitions, info.length, info.first_id) == (True, 1, 1, "5-5")
        assert (info.created, info.updated, info.groups) == (None, None, 1)
        assert await admin.list_groups(topic) == ["billing"]
        assert (await admin.describe_group(topic, "billing")).lag == 1
    for work in (admin.grow("legacy", 2), admin.configure("legacy", Retention()), admin.delete_topic("legacy")):
        with pytest.raises(ConfigError, match="legacy stream, not a topic"):
            await work
    assert await stage.call(stream, "XLEN", stream) == 1


# --- groups ------------------------------------------------------------------------------------------------


async def test_groups_are_those_that_subscribed_and_those_that_exist(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    await stage.join(topic, "subscribed")
    await stage.create_group(topic, "foreign:reader", partition=1)
    assert await admin.list_groups("orders") == ["foreign:reader", "subscribed"]
    assert (await admin.describe_group("orders", "foreign:reader")).lag == 0
    assert (await admin.describe_group("orders", "subscribed")).consumers == 1


async def test_a_group_that_there_is_not(stage: Stage, admin: Admin) -> None:
    await stage.topic()
    for work in (
        admin.describe_group("orders", "billing"),
        admin.pending("orders", "billing"),
        admin.reset_group("orders", "billing", "latest"),
        admin.delete_group("orders", "billing"),
    ):
        with pytest.raises(ConfigError, match="topic 'orders' has no group 'billing'"):
            await work


async def test_a_group_is_described(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=3)
    now = await stage.join(topic, "billing", "worker-1#a1")
    await stage.join(topic, "billing", "worker-2#b2")
    held = await stage.acquire(topic, "billing", 1, "worker-2#b2")
    first = await stage.add(topic, 5, 1)
    ids, _ = await stage.take(held, 3)
    await stage.park(held, ids[1])
    await stage.add(topic, 2, 2)
    info = await admin.describe_group("orders", "billing")
    assert (info.topic, info.group, info.lag, info.pending, info.consumers) == ("orders", "billing", 4, 3, 2)
    assert [(member.name, member.id) for member in info.members] == [
        ("worker-1", "worker-1#a1"),
        ("worker-2", "worker-2#b2"),
    ]
    assert all(0 <= member.heartbeat_age < 15 and member.heartbeat_at >= moment(now) for member in info.members)
    assert info.unowned == (0, 2)
    part = info.partitions[1]
    assert (part.index, part.lag, part.pending, part.last_delivered_id) == (1, 2, 3, first[2])
    assert (part.owner, part.owner_id, part.retry_depth) == ("worker-2", "worker-2#b2", 1)
    assert part.epoch >= now  # at least the server's time in ms
    assert part.lease_until is not None
    assert part.lease_until - moment(now) >= dt.timedelta(seconds=15)
    assert part.heartbeat_at == info.members[1].heartbeat_at
    assert part.oldest_pending_id == first[0]
    assert part.oldest_pending_age is not None
    assert 0 <= part.oldest_pending_age < 15
    assert (info.partitions[0].owner, info.partitions[0].oldest_pending_age) == (None, None)
    clock.advance(16)
    later = await admin.describe_group("orders", "billing")
    assert (later.consumers, later.members, later.unowned) == (0, (), (0, 1, 2))
    assert (later.partitions[1].owner, later.partitions[1].epoch) == (None, part.epoch)
    assert (later.partitions[1].oldest_pending_age or 0) > 16


async def test_a_member_says_how_long_it_lives(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic()
    await stage.join(topic, "billing", about=b'{"ttl_ms": 60000}')
    clock.advance(59)
    assert (await admin.describe_group("orders", "billing")).consumers == 1
    clock.advance(2)
    assert (await admin.describe_group("orders", "billing")).consumers == 0


async def test_a_released_partition_has_no_owner(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    await stage.release(await stage.acquire(topic, "billing"))
    [part] = (await admin.describe_group("orders", "billing")).partitions
    assert (part.owner, part.owner_id, part.lease_until, part.heartbeat_at) == (None, None, None, None)
