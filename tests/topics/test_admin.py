"""What an operator sees and does."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.kit.clock import SYSTEM_CLOCK, ManualClock
from conquiet.kit.entry_ids import moment
from conquiet.kit.entry_ids import order as place
from conquiet.message import Outgoing
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.dead_letters import letters
from conquiet.topics.operate.inspect import GroupInfo
from conquiet.topics.operate.pending import PendingEntry
from conquiet.topics.options import BrokerOptions, Retention, TopicDefaults
from conquiet.topics.produce.producer import Producer
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.retention import trim
from conquiet.topics.server.topics import LegacyTopic, Registry, Topic
from conquiet.wire.connections import Connections
from conquiet.wire.scripts import Call
from tests.conftest import Server
from tests.rigs.asking import keys_like
from tests.rigs.waiting import eventually
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too


async def _keys(stage: Stage) -> list[str]:
    """Every key of the test's namespace, on whatever node."""
    pattern = f"{stage.instance.keys.namespace}:*"
    nodes = [f"redis://{host}:{port}" for host, port in stage.instance.link.address.seeds]
    return sorted([key for node in nodes for key in await keys_like(node, pattern)])


async def _generation(stage: Stage, group: str) -> int:
    key = stage.instance.keys.generation("orders", group)
    return int(await stage.call(key, "GET", key) or 0)


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
    assert await _keys(stage) == []


def test_every_method_is_tried_with_an_unknown_topic() -> None:
    methods = {name for name in vars(Admin) if not name.startswith("_")}
    assert methods == {*UNKNOWN, "list_topics"}


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


# --- lag ---------------------------------------------------------------------------------------------------


async def _lag(admin: Admin, group: str = "billing") -> int:
    return (await admin.describe_group("orders", group)).lag


async def test_lag_is_what_was_not_delivered(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    await stage.create_group(topic, "billing")
    assert await _lag(admin) == 0
    await stage.add(topic, 10)
    assert await _lag(admin) == 10
    await stage.read(topic, "billing", 4)
    assert await _lag(admin) == 6
    await stage.read(topic, "billing", 10)
    assert await _lag(admin) == 0


async def test_lag_where_the_group_has_not_begun(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    await stage.create_group(topic, "billing", partition=0)
    await stage.add(topic, 3, 1)
    assert await _lag(admin) == 3


async def test_lag_of_a_group_in_the_middle(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 2_500)
    for at in (0, 1, 1_499, 1_500, 2_498, 2_499):
        await stage.create_group(topic, f"g{at}", ids[at])
        assert await _lag(admin, f"g{at}") == 2_499 - at


async def test_lag_among_entries_that_were_deleted(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 20)
    await stage.create_group(topic, "billing")
    await stage.read(topic, "billing", 5)
    stream = stage.stream(topic)
    await stage.call(stream, "XDEL", stream, ids[2], ids[9], ids[19])
    assert await _lag(admin) == 13
    await stage.read(topic, "billing", 1)
    assert await _lag(admin) == 12


async def test_lag_after_unread_entries_were_dropped(stage: Stage, admin: Admin) -> None:
    """Where Redis 7 goes on counting what is gone."""
    topic = await stage.topic(max_len=10, on_full="drop")
    await stage.add(topic, 20)
    await stage.create_group(topic, "billing")
    await stage.read(topic, "billing", 5)
    await trim(stage.instance, topic, 0)
    assert await _lag(admin) == 10
    await stage.read(topic, "billing", 1)
    assert await _lag(admin) == 9


async def test_lag_needs_no_count_where_the_server_knows(
    stage: Stage, admin: Admin, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await stage.topic(max_len=30)
    await stage.add(topic, 50)
    await stage.create_group(topic, "billing")
    await stage.ack(topic, "billing", *await stage.read(topic, "billing", 25))
    assert (await trim(stage.instance, topic, 0)).removed == 20
    names, run = list[str](), Instance.run

    async def listening(self: Instance, key: str, call: Call) -> object:
        names.append(call.script.name)
        return await run(self, key, call)

    monkeypatch.setattr(Instance, "run", listening)
    assert await _lag(admin) == 25
    assert ("count_after" in names) == (server.release < (7, 0))


@pytest.mark.parametrize("seed", range(4))
async def test_lag_is_right_whatever_happened(stage: Stage, admin: Admin, seed: int) -> None:
    dice = random.Random(seed)
    topic = await stage.topic()
    await stage.create_group(topic, "billing")
    stream, delivered = stage.stream(topic), "0-0"
    for _ in range(60):
        there = await stage.ids(topic)
        action = dice.choice(("add", "read", "ack", "trim", "drop", "delete", "set"))
        if action == "add":
            await stage.add(topic, dice.randint(1, 150))
        elif action == "read" and (got := await stage.read(topic, "billing", dice.randint(1, 90))):
            delivered = got[-1]
        elif action == "ack" and (pending := await stage.pending(topic, "billing")):
            await stage.ack(topic, "billing", *pending)
        elif action == "trim":
            await trim(stage.instance, topic, 0, Retention(max_len=dice.randint(1, 200)))
        elif action == "drop" and dice.random() < 0.3:
            await trim(stage.instance, topic, 0, Retention(max_len=dice.randint(50, 200), on_full="drop"))
        elif action == "delete" and there and dice.random() < 0.2:
            await stage.call(stream, "XDEL", stream, dice.choice(there))
        elif action == "set" and there and dice.random() < 0.3:
            delivered = dice.choice(there)
            await stage.call(stream, "XGROUP", "SETID", stream, "billing", delivered)
        assert await _lag(admin) == sum(place(id) > place(delivered) for id in await stage.ids(topic))


# --- pending -------------------------------------------------------------------------------------------------


async def _all_pending(admin: Admin, count: int) -> list[PendingEntry]:
    entries, cursor = list[PendingEntry](), None
    while True:
        page = await admin.pending("orders", "billing", count, cursor)
        entries += page.entries
        cursor = page.cursor
        if cursor is None:
            return entries


@pytest.mark.parametrize("count", [1, 7, 50, 51])
async def test_pending_entries_are_merged_in_the_order_of_their_ids(stage: Stage, admin: Admin, count: int) -> None:
    topic = await stage.topic(partitions=3)
    added = list[tuple[str, int]]()
    for number in range(50):
        partition = number * 7 % 3
        stream = stage.stream(topic, partition)
        id = f"{8 + number // 4}-{1 + number % 4 // 2}"  # the same IDs in several partitions, and 9 before 10
        if number % 4 == 0 or added[-1] != (id, partition):
            await stage.call(stream, "XADD", stream, id, "payload", "1")
            added.append((id, partition))
    for partition in range(3):
        await stage.create_group(topic, "billing", partition=partition)
        await stage.read(topic, "billing", 100, partition)
    entries = await _all_pending(admin, count)
    assert [(entry.id, entry.partition) for entry in entries] == sorted(added, key=lambda one: (place(one[0]), one[1]))
    assert all(entry.id.partition == entry.partition for entry in entries)


async def test_a_pending_entry_tells_its_failures(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    held = await stage.acquire(topic, "billing", owner="worker-1#a1")
    ids = await stage.add(topic, 2)
    await stage.take(held)
    await stage.park(held, ids[0], delay=60)
    attempts = stage.instance.keys.attempts(stage.stream(topic), "billing")
    await stage.call(attempts, "HSET", attempts, f"c:{ids[1]}", 2)
    first, second = (await admin.pending("orders", "billing")).entries
    assert (first.id, first.consumer, first.consumer_id) == (ids[0], "worker-1", "worker-1#a1")
    assert (first.failures, first.crashes, first.error_type, first.deliveries) == (1, 0, "KeyError", 1)
    assert 0 <= first.idle < 15
    assert first.first_failed_at == first.last_failed_at
    assert first.last_failed_at is not None
    assert first.parked_until == first.last_failed_at + dt.timedelta(seconds=60)
    assert (second.failures, second.crashes, second.parked_until, second.error_type) == (0, 2, None, None)
    assert (second.first_failed_at, second.last_failed_at) == (None, None)


async def test_a_cursor_stays_good_whatever_changes(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    ids = list[str]()
    for number in range(20):
        ids += await stage.add(topic, 1, number % 2)
        await asyncio.sleep(0.002)
    for partition in range(2):
        await stage.create_group(topic, "billing", partition=partition)
        await stage.read(topic, "billing", 100, partition)
    page = await admin.pending("orders", "billing", 8)
    assert [entry.id for entry in page.entries] == ids[:8]
    for number in (3, 7, 8, 9):  # some that were seen, among them the last one, and the next
        await stage.ack(topic, "billing", ids[number], partition=number % 2)
    more = await stage.add(topic, 1, 0)
    await stage.read(topic, "billing", 1, 0)
    rest = await admin.pending("orders", "billing", 100, page.cursor)
    assert [entry.id for entry in rest.entries] == [*ids[10:], *more]
    assert rest.cursor is None


@pytest.mark.parametrize("cursor", ["", "5-5", "5-5/", "5-5/x", "x/0", "5-5/-1", 5, "5-5/²"])
async def test_what_is_no_cursor_is_refused(stage: Stage, admin: Admin, cursor: Any) -> None:
    await stage.create_group(await stage.topic(), "billing")
    with pytest.raises(ConfigError, match="cursor must"):
        await admin.pending("orders", "billing", cursor=cursor)
    with pytest.raises(ConfigError, match="count must be an integer of at least 1"):
        await admin.pending("orders", "billing", 0)


# --- dead letters -----------------------------------------------------------------------------------------------


async def test_dead_letters_are_listed_replayed_and_purged(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    await stage.dead(topic, "billing", 3, 0)
    await stage.dead(topic, "shipping", 2, 1)
    assert (await admin.describe_topic("orders")).dead_letters == 5
    listed = await admin.dead_letters("orders")
    assert await admin.dead_letters("orders", 2, after=listed[0].id) == listed[1:3]
    assert await admin.dead_letters("orders", group="shipping") == listed[3:]
    assert await admin.replay("orders", group="shipping") == 2
    assert await admin.purge("orders", [listed[0].id]) == 1
    assert await admin.dead_letters("orders") == listed[1:3]
    assert (await admin.describe_group("orders", "shipping")).pending == 2


@pytest.mark.any_server
async def test_letters_that_wait_in_great_number_are_all_found(stage: Stage, admin: Admin) -> None:
    """Their owner is gone, and has forwarded none of them."""
    held = await stage.acquire(await stage.topic(), "billing")
    await stage.add(held.topic, 250)
    ids, _ = await stage.take(held, 250)
    await stage.bury(held, *ids)
    await stage.release(held)
    assert [letter.original_id for letter in await admin.dead_letters("orders", 1000)] == ids


# --- changing -----------------------------------------------------------------------------------------------------


async def test_growing(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    await stage.topic(partitions=2)
    info = await hurried(clock, admin.grow("orders", 4))
    assert (info.partitions, len(info.by_partition)) == (4, 4)


async def test_configuring(stage: Stage, admin: Admin, registry: Registry, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    assert (await registry.fresh("orders")).retention == Retention()
    clock.advance(5)
    info = await admin.configure("orders", retention=Retention(max_age=60.0))
    assert info.retention == Retention(max_age=60.0)
    assert info.updated is not None
    assert info.created == moment(topic.created_ms)
    assert info.updated >= moment(topic.created_ms + 5_000)
    assert (await registry.fresh("orders")).retention == Retention(max_age=60.0)
    with pytest.raises(ConfigError, match="must be a Retention"):
        await admin.configure("orders", {"max_len": 5})  # type: ignore[arg-type]


async def test_trimming_by_the_topics_own_rules_or_others(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2, max_len=20, on_full="drop", delete_acked=True)
    for partition in range(2):
        await stage.create_group(topic, "billing", partition=partition)
        await stage.add(topic, 30, partition)
        await stage.ack(topic, "billing", *await stage.read(topic, "billing", 15, partition), partition=partition)
    assert await admin.trim("orders", max_len=25) == 10
    # Other limits are safe, whatever the topic's own allow.
    assert await admin.trim("orders", max_len=1) == 20
    clock.advance(60)
    assert await admin.trim("orders", max_age=30.0) == 0
    await stage.add(topic, 15, 0)
    assert await admin.trim("orders") == 10
    assert [part.length for part in (await admin.describe_topic("orders")).by_partition] == [20, 15]
    with pytest.raises(ConfigError, match="max_len must be an integer of at least 1, not 0"):
        await admin.trim("orders", max_len=0)


# --- setting groups back --------------------------------------------------------------------------------------------


async def _busy(stage: Stage, admin: Admin) -> tuple[Topic, list[str]]:
    """A group that has finished one of ten messages, has one parked and two in hand, and no live member."""
    topic = await stage.topic()
    held = await stage.acquire(topic, "billing")
    ids = await stage.add(topic, 10)
    await stage.take(held, 4)
    await stage.take(held, 0, ids[0])
    await stage.park(held, ids[1])
    await stage.release(held)
    assert (await admin.describe_group("orders", "billing")).pending == 3
    return topic, ids


@pytest.mark.parametrize("to", ["earliest", "latest", "time", "id"])
async def test_a_group_goes_on_from_another_place(stage: Stage, admin: Admin, to: str) -> None:
    topic, ids = await _busy(stage, admin)
    places: dict[str, Any] = {"time": moment(place(ids[0])[0]), "id": {0: ids[6]}}
    await admin.reset_group("orders", "billing", places.get(to, to))
    info = await admin.describe_group("orders", "billing")
    first = {"earliest": 0, "latest": 10, "time": 0, "id": 7}[to]
    assert (info.pending, info.lag, info.partitions[0].retry_depth) == (0, 10 - first, 0)
    held = await stage.acquire(topic, "billing")
    assert await stage.take(held) == (ids[first:], [])
    stream = stage.stream(topic)
    retry, attempts = stage.instance.keys.retry(stream, "billing"), stage.instance.keys.attempts(stream, "billing")
    assert await stage.call(retry, "EXISTS", retry, attempts) == 0


async def test_only_the_partitions_that_are_named_are_set_back(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    for partition in range(2):
        await stage.create_group(topic, "billing", partition=partition)
        await stage.add(topic, 3, partition)
        await stage.read(topic, "billing", 3, partition)
    await admin.reset_group("orders", "billing", {1: "0-0"})
    info = await admin.describe_group("orders", "billing")
    assert [(part.pending, part.lag) for part in info.partitions] == [(3, 0), (0, 3)]


async def test_a_group_can_be_set_before_it_begins(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    await stage.create_group(topic, "billing", partition=0)
    await stage.add(topic, 3, 1)
    await admin.reset_group("orders", "billing", "latest")
    assert (await admin.describe_group("orders", "billing")).lag == 0


@pytest.mark.parametrize(
    "to",
    [
        "now",
        "5-5",
        "",
        None,
        5,
        {},
        {1: "5-5"},
        {-1: "5-5"},
        {"0": "5-5"},
        {True: "5-5"},
        {0: "x"},
        dt.datetime(2024, 1, 1),
    ],
)
async def test_what_is_no_place_is_refused(stage: Stage, admin: Admin, to: Any) -> None:
    await stage.create_group(await stage.topic(), "billing")
    with pytest.raises(ConfigError):
        await admin.reset_group("orders", "billing", to, force=True)


async def test_a_group_with_live_members_is_only_set_back_by_force(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    await stage.join(topic, "billing", "worker-1#a1")
    held = await stage.acquire(topic, "billing")
    ids = await stage.add(topic, 5)
    await stage.take(held, 5)
    with pytest.raises(ConfigError, match=r"cannot reset group 'billing' .* while it has live members: worker-1"):
        await admin.reset_group("orders", "billing", "earliest")
    assert (await admin.describe_group("orders", "billing")).pending == 5
    before = await _generation(stage, "billing")
    await admin.reset_group("orders", "billing", "earliest", force=True)
    assert await _generation(stage, "billing") == before + 1
    assert await stage.take(held) is None  # fenced off
    again = await stage.acquire(topic, "billing")
    assert int(again.epoch) > int(held.epoch)
    assert await stage.take(again) == (ids, [])


async def test_an_owner_that_nobody_has_heard_of_counts_as_alive(
    stage: Stage, admin: Admin, clock: ManualClock
) -> None:
    topic = await stage.topic()
    await stage.acquire(topic, "billing", owner="worker-3#c")
    with pytest.raises(ConfigError, match="live members: worker-3"):
        await admin.delete_group("orders", "billing")
    clock.advance(16)
    await admin.delete_group("orders", "billing")


async def test_a_lost_group_resumes_where_it_was_set_to(stage: Stage, admin: Admin) -> None:
    topic, ids = await _busy(stage, admin)
    await admin.reset_group("orders", "billing", {0: ids[4]})
    lease = stage.instance.keys.lease(stage.stream(topic), "billing")
    assert await stage.call(lease, "HGET", lease, "resume") == ids[4].encode()


# --- deleting groups --------------------------------------------------------------------------------------------------


async def test_a_deleted_group_leaves_its_dead_letters_and_a_tombstone(stage: Stage, admin: Admin) -> None:
    topic, _ = await _busy(stage, admin)
    held = await stage.acquire(topic, "billing")
    id, *_ = await stage.pending(topic, "billing")
    await stage.bury(held, id)
    await stage.release(held)
    await stage.create_group(topic, "other")
    await admin.delete_group("orders", "billing")
    assert await admin.list_groups("orders") == ["other"]
    assert [letter.original_id for letter in await letters(stage.instance, topic)] == [id]
    stream, keys = stage.stream(topic), stage.instance.keys
    assert [key for key in await _keys(stage) if "billing" in key] == [keys.lease(stream, "billing")]
    lease = await stage.call(keys.lease(stream, "billing"), "HGETALL", keys.lease(stream, "billing"))
    assert sorted(lease[::2]) == [b"deleted_ms", b"epoch"]
    assert 0 < await stage.call(stream, "PTTL", keys.lease(stream, "billing")) <= 86_400_000
    trimmed = await stage.call(stream, "HKEYS", keys.trim(stream))
    assert not [field for field in trimmed if b"billing" in field]
    forwarded = keys.forwarded("orders")
    assert await stage.call(forwarded, "EXISTS", forwarded) == 0
    assert len(await stage.ids(topic)) == 10


async def test_members_of_a_deleted_group_are_refused_and_later_ones_begin_anew(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    since = await stage.join(topic, "billing", "worker-1#a1")
    held = await stage.acquire(topic, "billing", 0, since=since)
    await stage.add(topic, 3)
    with pytest.raises(ConfigError, match=r"cannot delete group 'billing' .* live members: worker-1"):
        await admin.delete_group("orders", "billing")
    before = await _generation(stage, "billing")
    await admin.delete_group("orders", "billing", force=True)
    assert await _generation(stage, "billing") > before
    generation = stage.instance.keys.generation("orders", "billing")
    assert await stage.call(generation, "PTTL", generation) > 0
    assert await stage.take(held) is None
    for partition in range(2):  # also where it never had a lease
        assert (await stage.try_acquire(topic, "billing", partition, since=since))[0] == b"DELETED"
    again = await stage.acquire(topic, "billing", 0, "worker-1#a2")
    assert int(again.epoch) > int(held.epoch)
    assert len((await stage.take(again))[0]) == 3


async def test_deleting_a_group_again_is_an_error_that_changes_nothing(stage: Stage, admin: Admin) -> None:
    await _busy(stage, admin)
    await admin.delete_group("orders", "billing")
    before = await _keys(stage)
    with pytest.raises(ConfigError, match="has no group"):
        await admin.delete_group("orders", "billing")
    assert await _keys(stage) == before


async def test_a_group_of_a_legacy_stream_can_be_deleted(stage: Stage, admin: Admin) -> None:
    stream = f"{stage.instance.keys.namespace}-legacy"
    await stage.call(stream, "XADD", stream, "5-5", "data", "{}")
    await stage.call(stream, "XGROUP", "CREATE", stream, "billing", "0")
    await admin.delete_group(LegacyTopic(stream), "billing")
    assert await admin.list_groups(LegacyTopic(stream)) == []
    assert await stage.call(stream, "XLEN", stream) == 1


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
    there = await _keys(stage)
    for stream in topic.streams(keys):
        assert {*keys.of_partition(stream), *keys.of_group(stream, "billing")} <= set(there)
    return topic


async def test_a_deleted_topic_leaves_nothing(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    kept = await stage.topic("orders.2")
    await stage.add(kept, 1)
    keys = stage.instance.keys
    bare = f"{keys.namespace}:orders"
    await stage.call(bare, "SET", bare, "somebody else's")
    before = await _keys(stage)
    topic = await _full(stage)
    clock.advance(16)
    await admin.delete_group("orders", "foreign")
    await hurried(clock, admin.delete_topic("orders"))
    left = set(await _keys(stage)).difference(before)
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
    before = await _generation(stage, "billing")
    await hurried(clock, admin.delete_topic("orders", force=True))
    assert await stage.take(held) is None
    # What is left tells the members that this is a deletion, and not a server that forgot everything.
    assert await _generation(stage, "billing") > before
    keys = stage.instance.keys
    assert set(await _keys(stage)) == {keys.generation("orders", "billing"), keys.lease(stage.stream(topic), "billing")}


async def test_a_growth_that_was_never_completed_is_deleted_too(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic()
    meta = stage.instance.keys.meta("orders")
    await stage.call(meta, "HSET", meta, "nextCount", 3, "effectiveAt", 1)
    await stage.add(topic, 1, 2)
    await hurried(clock, admin.delete_topic("orders"))
    assert await _keys(stage) == []


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
        assert [key for key in await _keys(stage) if await stage.call(key, "PTTL", key) < 0] == []
    assert step > 20


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
        left = [key for key in await _keys(stage) if f"{topic.name}:" in key and "billing" in key]
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
    assert await _keys(stage) == []


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
