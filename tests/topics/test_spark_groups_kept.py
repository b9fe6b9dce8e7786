"""What operators and retention make of the groups of Spark queries: keeping, deleting, growing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conquiet import ConfigError, GroupLostError
from conquiet.kit.clock import ManualClock
from conquiet.topics import Broker
from conquiet.topics.operate.admin import Admin
from conquiet.topics.server.external_groups import Position
from conquiet.topics.server.growth import grow
from conquiet.topics.server.retention import trim
from conquiet.wire.keys import Keys
from tests.topics.adopting import GROUP, adopt, everything, found, lasting, places, publish
from tests.topics.consuming import Recorder, impatient
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


# --- operators and retention --------------------------------------------------------------------------------


async def test_retention_keeps_what_is_not_done(stage: Stage) -> None:
    topic = await stage.topic(max_len=5)
    ids = await stage.add(topic, 20)
    await adopt(stage, topic, {0: Position("0-0", 0)})
    assert (await trim(stage.instance, topic, 0)).removed == 0
    await publish(stage, topic, {0: Position(ids[7], 8)})
    assert (await trim(stage.instance, topic, 0)).removed == 8
    assert await stage.ids(topic) == ids[8:]
    await publish(stage, topic, {0: Position(ids[-1], 20)})
    await trim(stage.instance, topic, 0)
    assert await stage.ids(topic) == ids[15:]


async def test_a_query_that_publishes_does_not_expire_even_where_nothing_moves(
    stage: Stage, clock: ManualClock
) -> None:
    topic = await stage.topic(max_len=5, group_expiry=100.0)
    ids = await stage.add(topic, 20)
    await adopt(stage, topic, {0: Position(ids[1], 2)})
    for _ in range(3):
        clock.advance(90)
        await publish(stage, topic, {0: Position(ids[1], 2)})
        clock.advance(90)
        assert (await trim(stage.instance, topic, 0)).expired_groups == ()
    assert await stage.ids(topic) == ids[2:]
    clock.advance(11)
    trimmed = await trim(stage.instance, topic, 0)
    assert (trimmed.removed, trimmed.expired_groups) == (13, (GROUP,))
    await publish(stage, topic, {0: Position(ids[-1], 20)})
    assert (await trim(stage.instance, topic, 0)).expired_groups == ()


async def test_a_deleted_group_can_be_anybodys(stage: Stage, admin: Admin, broker: Broker, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 5, 0)
    await adopt(stage, topic, {0: Position(ids[2], 3)})
    for _ in range(2):
        await admin.delete_group("orders", GROUP)
        assert await admin.list_groups("orders") == []
        assert (await found(stage, topic)).spark_groups == frozenset()
        assert await places(stage, topic) == [None, None]
        await adopt(stage, topic, {0: Position(ids[3], 4)})
        assert await places(stage, topic) == [ids[3], "0-0"]
        await publish(stage, topic, {0: Position(ids[3], 4), 1: Position("0-0", 0)})
    await admin.delete_group("orders", GROUP)
    clock.advance(1)
    async with broker.subscribe("orders", group=GROUP, handler=(seen := Recorder()), options=impatient()):
        await seen.saw(5)


async def test_a_deletion_that_died_on_the_way_can_be_repeated(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    meta = stage.instance.keys.meta("orders")
    await stage.call(meta, "HSET", meta, f"group:{GROUP}", "spark")
    await admin.delete_group("orders", GROUP)
    assert (await found(stage, topic)).spark_groups == frozenset()
    with pytest.raises(ConfigError, match="has no group"):
        await admin.delete_group("orders", GROUP)


async def test_a_spark_group_is_not_reset(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    await adopt(stage, topic, {0: Position("5-5")})
    before = await everything(stage)
    for force in (False, True):
        with pytest.raises(ConfigError, match=f"'{GROUP}' of topic 'orders' is a Spark query's.*checkpoint"):
            await admin.reset_group("orders", GROUP, "earliest", force=force)
    assert await everything(stage) == before


async def test_letters_of_before_are_not_given_to_it(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    await stage.dead(topic, GROUP, 2)
    await stage.dead(topic, "billing", 1)
    await adopt(stage, topic)
    with pytest.raises(ConfigError, match=f"'{GROUP}' is a Spark query's.*1 letters were replayed"):
        await admin.replay("orders")
    assert await stage.pending(topic, GROUP) == []
    assert [letter.group for letter in await admin.dead_letters("orders")] == [GROUP, GROUP]
    await publish(stage, topic, {0: Position("5-5")})


async def test_a_deleted_topic_leaves_nothing_of_it(stage: Stage, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=3)
    await stage.add(topic, 5, 1)
    await adopt(stage, topic, {1: Position("5-5")})
    await adopt(stage, topic, group="deleted")
    await admin.delete_group("orders", "deleted")
    await hurried(clock, admin.delete_topic("orders"))
    assert await lasting(stage) == []
    with pytest.raises(GroupLostError):
        await publish(stage, topic, {1: Position("6-6")})
    assert await lasting(stage) == []


async def test_a_forgotten_topic_is_made_again_with_its_spark_groups(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    await adopt(stage, topic)
    known = await found(stage, topic)
    meta = stage.instance.keys.meta("orders")
    await stage.call(meta, "DEL", meta)
    assert (await stage.registry.restore(known)).spark_groups == {GROUP}
    assert (await found(stage, topic)).spark_groups == {GROUP}


# --- growth ---------------------------------------------------------------------------------------------------


async def test_growth_gives_the_group_to_the_new_partitions(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=1, max_len=1)
    await adopt(stage, topic, {0: Position("5-5")})
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 3))
    grown = await found(stage, topic)
    assert (grown.partitions, grown.spark_groups) == (3, frozenset({GROUP}))
    assert await places(stage, grown) == ["5-5", "0-0", "0-0"]
    ids = await stage.add(grown, 4, 2)
    assert (await trim(stage.instance, grown, 2)).removed == 0, "the query has not seen them"
    await publish(stage, grown, {0: Position("6-6"), 2: Position(ids[1], 2)})
    assert await places(stage, grown) == ["6-6", "0-0", ids[1]]
    assert await stage.try_acquire(grown, GROUP, 2) == [b"SPARK"]


async def test_to_adopt_again_reaches_partitions_that_were_added(stage: Stage) -> None:
    topic = await stage.topic(partitions=1)
    await adopt(stage, topic, {0: Position("5-5")})
    meta = stage.instance.keys.meta("orders")
    await stage.call(meta, "HSET", meta, "partitionCount", 3)
    grown = await found(stage, topic)
    with pytest.raises(GroupLostError):
        await publish(stage, grown, {2: Position("7-7")})
    await adopt(stage, grown, {2: Position("7-7")})
    assert await places(stage, grown) == ["5-5", "0-0", "7-7"]
