"""Groups whose place a Spark query publishes: how they become such, and what is published."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from conquiet import ConfigError, GroupLostError, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.topics import Broker
from conquiet.topics.operate.admin import Admin
from conquiet.topics.server import external_groups
from conquiet.topics.server.external_groups import Position
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.retention import trim
from conquiet.topics.server.topics import LegacyTopic, Topic
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Call
from tests.conftest import Server
from tests.topics.adopting import GROUP, adopt, all_keys, everything, found, places, publish, stands
from tests.topics.consuming import Recorder, impatient
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


# --- becoming Spark's -------------------------------------------------------------------------------------


async def test_a_new_group_is_put_where_the_query_is(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=3)
    first, second = await stage.add(topic, 10, 0), await stage.add(topic, 5, 1)
    await adopt(stage, topic, {0: Position(first[3], 4), 1: Position("0-0", 0)})
    assert await places(stage, topic) == [first[3], "0-0", "0-0"]
    assert (await found(stage, topic)).spark_groups == {GROUP}
    meta = stage.instance.keys.meta("orders")
    assert await stage.call(meta, "HGET", meta, f"group:{GROUP}") == b"spark"
    assert await admin.list_groups("orders") == [GROUP]
    await publish(stage, topic, {1: Position(second[1], 2)})
    info = await admin.describe_group("orders", GROUP)
    assert (info.owner, info.lag, info.pending, info.consumers) == ("spark", 6 + 3, 0, 0)
    assert (info.members, info.unowned) == ((), ())
    assert [part.last_delivered_id for part in info.partitions] == [first[3], second[1], "0-0"]


async def test_a_group_of_members_says_so(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    await stage.join(topic, "billing")
    info = await admin.describe_group("orders", "billing")
    assert (info.owner, info.unowned) == ("members", (0,))


async def test_to_adopt_again_goes_by_the_new_positions(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 10, 0)
    await adopt(stage, topic, {0: Position(ids[5], 6)})
    before = await everything(stage)
    await adopt(stage, topic, {0: Position(ids[5], 6)})
    changed = {key for key, value in (await everything(stage)).items() if before.get(key) != value}
    assert changed <= {stage.instance.keys.lease(stage.stream(topic, index), GROUP) for index in range(2)}  # the time
    await adopt(stage, topic, {0: Position(ids[2], 3)})
    assert await places(stage, topic) == [ids[2], "0-0"]
    await adopt(stage, topic)
    assert await places(stage, topic) == [ids[2], "0-0"]


async def test_a_group_that_nobody_consumes_with_can_be_taken(stage: Stage, broker: Broker) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 4, 0)
    async with broker.subscribe("orders", group=GROUP, handler=(seen := Recorder()), options=impatient()):
        await seen.saw(4)
    assert await places(stage, topic) == [ids[-1], "0-0"]
    await adopt(stage, topic, {0: Position(ids[1], 2)})
    assert await places(stage, topic) == [ids[1], "0-0"]


async def test_an_adoption_that_died_on_the_way_is_completed(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    [id] = await stage.add(topic, 1, 1)
    meta = stage.instance.keys.meta("orders")
    await stage.call(meta, "HSET", meta, f"group:{GROUP}", "spark")
    with pytest.raises(GroupLostError, match="gone"):
        await publish(stage, topic, {1: Position(id, 1)})
    await adopt(stage, topic, {1: Position(id, 1)})
    assert await places(stage, topic) == ["0-0", id]
    await publish(stage, topic, {0: Position("5-0", 0)})


# --- who is refused ---------------------------------------------------------------------------------------


async def _member(stage: Stage, topic: Topic) -> None:
    await stage.join(topic, GROUP, "worker-7#a1")


async def _lease(stage: Stage, topic: Topic) -> None:
    await stage.acquire(topic, GROUP, 1, "worker-7#a1")


async def _consumer(stage: Stage, topic: Topic) -> None:
    await stage.create_group(topic, GROUP, partition=1)
    await stage.ack(topic, GROUP, *await stage.read(topic, GROUP, 2, 1), partition=1)


async def _pending(stage: Stage, topic: Topic) -> None:
    await stage.create_group(topic, GROUP, partition=1)
    await stage.read(topic, GROUP, 3, 1)


async def _parked(stage: Stage, topic: Topic) -> None:
    retry = stage.instance.keys.retry(stage.stream(topic, 1), GROUP)
    await stage.call(retry, "ZADD", retry, 5, "1-1")


USES: dict[str, tuple[Callable[[Stage, Topic], Awaitable[None]], str]] = {
    "member": (_member, "live members: worker-7"),
    "lease": (_lease, "live members: worker-7"),
    "consumer": (_consumer, "1 consumers, 0 pending"),
    "pending": (_pending, "1 consumers, 3 pending"),
    "parked": (_parked, "1 parked retries"),
}


@pytest.mark.parametrize("use", USES)
async def test_a_group_that_is_used_is_refused_and_nothing_has_changed(stage: Stage, use: str) -> None:
    topic = await stage.topic(partitions=3)
    await stage.add(topic, 5, 1)
    prepare, reason = USES[use]
    await prepare(stage, topic)
    before = await everything(stage)
    with pytest.raises(ConfigError, match=f"'{GROUP}' of topic 'orders' cannot become a Spark query's: .*{reason}.*"):
        await adopt(stage, topic, {0: Position("5-0", 0)})
    assert await everything(stage) == before


async def test_a_spark_group_that_somebody_consumes_with_is_not_moved(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 5, 0)
    await adopt(stage, topic, {0: Position(ids[0], 1)})
    await stage.read(topic, GROUP, 1)
    with pytest.raises(ConfigError, match="1 consumers, 1 pending"):
        await adopt(stage, topic, {0: Position(ids[3], 4)})
    assert (await found(stage, topic)).spark_groups == {GROUP}, "it was Spark's before"
    with pytest.raises(ConfigError, match=r"somebody consumes with it.*XGROUP DELCONSUMER"):
        await publish(stage, topic, {0: Position(ids[3], 4), 1: Position("7-7")})
    assert await places(stage, topic) == [ids[1], "7-7"], "the other partition is told"
    stream = stage.stream(topic)
    await stage.call(stream, "XGROUP", "DELCONSUMER", stream, GROUP, "reader")
    await publish(stage, topic, {0: Position(ids[3], 4)})
    assert await places(stage, topic) == [ids[3], "7-7"]


async def test_a_refusal_in_the_middle_puts_everything_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody begins to consume after it was looked into, and past the library."""
    topic = await stage.topic(partitions=3)
    ids = await stage.add(topic, 5, 0)
    await stage.add(topic, 5, 1)
    await stage.create_group(topic, GROUP, ids[1], 0)
    await stage.create_group(topic, GROUP, "0", 1)

    settle = external_groups._settle

    async def settling(instance: Instance, topic: Topic, group: str, token: str, mark: str) -> bool:
        if mark:
            await stage.read(topic, GROUP, 2, 1)
        return await settle(instance, topic, group, token, mark)

    monkeypatch.setattr(external_groups, "_settle", settling)
    with pytest.raises(ConfigError, match="1 consumers, 2 pending"):
        await adopt(stage, topic, {index: Position(ids[3], 4) for index in range(3)})
    assert (await places(stage, topic))[0] == ids[1]
    assert (await places(stage, topic))[2] is None
    assert len(await stage.pending(topic, GROUP, 1)) == 2
    looked = await found(stage, topic)
    assert (looked.spark_groups, looked.claimed_groups) == (frozenset(), frozenset())
    keys = stage.instance.keys
    assert not [key for key in await all_keys(stage) if key in (keys.groups("orders"), *_leases(stage, topic))]


def _leases(stage: Stage, topic: Topic) -> list[str]:
    return [stage.instance.keys.lease(stream, GROUP) for stream in topic.streams(stage.instance.keys)]


async def test_what_cannot_be_meant_is_refused(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    before = await everything(stage)
    for id, entries in (("5", None), ("$", None), ("5-5", -1), ("5-5", True), ("5-5", 1.5)):
        with pytest.raises(ConfigError):
            Position(id, entries)  # type: ignore[arg-type]
    for partition in (-1, 2):
        with pytest.raises(ConfigError, match="must be from 0 to 1"):
            await adopt(stage, topic, {partition: Position("5-5")})
        with pytest.raises(ConfigError, match="must be from 0 to 1"):
            await publish(stage, topic, {partition: Position("5-5")})
    with pytest.raises(ConfigError, match="group must be"):
        await adopt(stage, topic, group="a:b")
    with pytest.raises(UnknownTopicError, match="'nowhere'"):
        await adopt(stage, Topic("nowhere", 1))
    legacy = await stage.registry.fetch(LegacyTopic(stage.instance.keys.bare("old")))
    with pytest.raises(ConfigError, match="is a legacy stream"):
        await adopt(stage, legacy)
    assert await everything(stage) == before


# --- publishing -------------------------------------------------------------------------------------------


async def test_the_lag_is_right_and_needs_no_count_where_the_server_can_know(
    stage: Stage, admin: Admin, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await stage.topic(max_len=30)
    ids = await stage.add(topic, 50)
    await adopt(stage, topic, {0: Position(ids[9], 10)})
    assert (await trim(stage.instance, topic, 0)).removed == 10
    names, run = list[str](), Instance.run

    async def listening(self: Instance, key: str, call: Call) -> object:
        names.append(call.script.name)
        return await run(self, key, call)

    monkeypatch.setattr(Instance, "run", listening)
    for at in (9, 10, 30, 48, 25):
        await publish(stage, topic, {0: Position(ids[at], at + 1)})
        assert (await admin.describe_group("orders", GROUP)).lag == 49 - at
    assert ("count_after" in names) == (server.release < (7, 0))
    if server.release >= (7, 0):
        row = await stands(stage, topic)
        assert (row["entries-read"], row["lag"]) == (26, 24)


async def test_where_the_number_is_not_known_it_is_counted(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 50)
    await adopt(stage, topic, {0: Position(ids[9])})
    assert (await admin.describe_group("orders", GROUP)).lag == 40
    await publish(stage, topic, {0: Position(ids[30])})
    assert (await admin.describe_group("orders", GROUP)).lag == 19


async def test_a_group_that_is_gone_is_not_made_again(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 5, 0)
    for partition in range(2):
        await adopt(stage, topic)
        stream = stage.stream(topic, partition)
        await stage.call(stream, "XGROUP", "DESTROY", stream, GROUP)
        before = await everything(stage)
        with pytest.raises(GroupLostError, match=f"'{GROUP}' is gone from '{stream}'"):
            await publish(stage, topic, {partition: Position(ids[0], 1)})
        assert await everything(stage) == before
    await admin.delete_group("orders", GROUP)
    before = await everything(stage)
    with pytest.raises(GroupLostError):
        await publish(stage, topic, {0: Position(ids[0], 1), 1: Position(ids[0], 1)})
    assert await everything(stage) == before


async def test_a_stream_that_is_gone_is_not_made_again(stage: Stage) -> None:
    topic = await stage.topic()
    await adopt(stage, topic)
    stream = stage.stream(topic)
    await stage.call(stream, "DEL", stream)
    with pytest.raises(GroupLostError):
        await publish(stage, topic, {0: Position("5-5")})
    assert not await stage.call(stream, "EXISTS", stream)


async def test_the_group_of_somebody_else_is_not_moved(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    await adopt(stage, topic)
    await admin.delete_group("orders", GROUP)
    await stage.create_group(topic, GROUP, ids[0])
    with pytest.raises(GroupLostError, match="no Spark query's any more"):
        await publish(stage, topic, {0: Position(ids[3], 4)})
    assert await places(stage, topic) == [ids[0]]
