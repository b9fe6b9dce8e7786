"""What an operator changes: topics, and groups that are set back or deleted."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from conquiet.errors import ConfigError
from conquiet.kit.clock import ManualClock
from conquiet.kit.entry_ids import moment
from conquiet.kit.entry_ids import order as place
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.dead_letters import letters
from conquiet.topics.options import Retention
from conquiet.topics.server.topics import LegacyTopic, Registry, Topic
from tests.topics.operating import all_keys, generation_of
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too


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


@pytest.mark.parametrize("to", ["earliest", "latest", "time", "seconds", "id"])
async def test_a_group_goes_on_from_another_place(stage: Stage, admin: Admin, to: str) -> None:
    topic, ids = await _busy(stage, admin)
    places: dict[str, Any] = {"time": moment(place(ids[0])[0]), "id": {0: ids[6]}}
    places["seconds"] = place(ids[0])[0] / 1000
    await admin.reset_group("orders", "billing", places.get(to, to))
    info = await admin.describe_group("orders", "billing")
    first = {"earliest": 0, "latest": 10, "time": 0, "seconds": 0, "id": 7}[to]
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


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize(
    "to",
    [
        "now",
        "5-5",
        "",
        None,
        -5,
        True,
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
    before = await generation_of(stage, "billing")
    await admin.reset_group("orders", "billing", "earliest", force=True)
    assert await generation_of(stage, "billing") == before + 1
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
    assert [key for key in await all_keys(stage) if "billing" in key] == [keys.lease(stream, "billing")]
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
    before = await generation_of(stage, "billing")
    await admin.delete_group("orders", "billing", force=True)
    assert await generation_of(stage, "billing") > before
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
    before = await all_keys(stage)
    with pytest.raises(ConfigError, match="has no group"):
        await admin.delete_group("orders", "billing")
    assert await all_keys(stage) == before


async def test_a_group_of_a_legacy_stream_can_be_deleted(stage: Stage, admin: Admin) -> None:
    stream = f"{stage.instance.keys.namespace}-legacy"
    await stage.call(stream, "XADD", stream, "5-5", "data", "{}")
    await stage.call(stream, "XGROUP", "CREATE", stream, "billing", "0")
    await admin.delete_group(LegacyTopic(stream), "billing")
    assert await admin.list_groups(LegacyTopic(stream)) == []
    assert await stage.call(stream, "XLEN", stream) == 1
