"""Consumer lag, pending entries and dead letters as an operator sees them."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pytest

from conquiet.errors import ConfigError
from conquiet.kit.entry_ids import order as place
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.pending import PendingEntry
from conquiet.topics.options import Retention
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.retention import trim
from conquiet.wire.scripts import Call
from tests.conftest import Server
from tests.rigs.asking import next_millisecond
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


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


@pytest.mark.slow
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


async def test_a_cursor_stays_good_whatever_changes(stage: Stage, admin: Admin, url: str) -> None:
    topic = await stage.topic(partitions=2)
    ids = list[str]()
    for number in range(20):
        ids += await stage.add(topic, 1, number % 2)
        await next_millisecond(url)
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


@pytest.mark.any_server
@pytest.mark.one_node
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
