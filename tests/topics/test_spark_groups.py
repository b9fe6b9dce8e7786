"""Groups whose place a Spark query publishes: whose they are, who is kept out, and what operators and retention see."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest

from conquiet import ConfigError, GroupLostError, QueueError, UnknownTopicError
from conquiet.kit.clock import ManualClock
from conquiet.topics import Broker, progress
from conquiet.topics.admin import Admin
from conquiet.topics.description import live_members
from conquiet.topics.group import Member
from conquiet.topics.growth import grow
from conquiet.topics.progress import Position, adopt_group, publish_progress
from conquiet.topics.registry import LegacyTopic, Topic
from conquiet.topics.retention import trim
from conquiet.topics.site import Site
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Call, Script
from tests.conftest import Server
from tests.rigs.asking import keys_like
from tests.rigs.waiting import LONG, eventually
from tests.topics.consuming import Recorder, impatient
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too

GROUP: Final = "query"
SUBSCRIBING: Final = "is a Spark query's, and nobody can subscribe to it: choose another name, or .*delete_group"


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


async def adopt(stage: Stage, topic: Topic, positions: dict[int, Position] | None = None, group: str = GROUP) -> None:
    await adopt_group(stage.site, stage.registry, topic, group, positions or {})


async def publish(stage: Stage, topic: Topic, positions: dict[int, Position], group: str = GROUP) -> None:
    await publish_progress(stage.site, topic, group, positions)


async def found(stage: Stage, topic: Topic) -> Topic:
    looked = await stage.registry.look_up(topic.name)
    assert looked is not None
    return looked


async def places(stage: Stage, topic: Topic, group: str = GROUP) -> list[str | None]:
    """Where a group stands on each partition, if it is there."""
    return [(await stands(stage, topic, index, group)).get("last-delivered-id") for index in range(topic.partitions)]


async def stands(stage: Stage, topic: Topic, partition: int = 0, group: str = GROUP) -> dict[str, Any]:
    stream = stage.stream(topic, partition)
    if not await stage.call(stream, "EXISTS", stream):
        return {}
    for flat in await stage.call(stream, "XINFO", "GROUPS", stream):
        row = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        if row["name"] == group.encode():
            return {name: value.decode() if isinstance(value, bytes) else value for name, value in row.items()}
    return {}


async def all_keys(stage: Stage) -> list[str]:
    """Every key of the test's namespace, on whatever node."""
    nodes = [f"redis://{host}:{port}" for host, port in stage.site.link.address.seeds]
    return sorted([key for node in nodes for key in await keys_like(node, f"{stage.site.keys.namespace}:*")])


async def everything(stage: Stage) -> dict[str, Any]:
    """All that is stored: whatever changes shows."""
    state: dict[str, Any] = {}
    for key in await all_keys(stage):
        kind = await stage.call(key, "TYPE", key)
        if kind == b"hash":
            flat = await stage.call(key, "HGETALL", key)
            state[key] = dict(zip(flat[::2], flat[1::2], strict=True))
        elif kind == b"set":
            state[key] = set(await stage.call(key, "SMEMBERS", key))
        else:
            state[key] = await stage.call(key, "DUMP", key)
    return state


# --- becoming Spark's -------------------------------------------------------------------------------------


async def test_a_new_group_is_put_where_the_query_is(stage: Stage, admin: Admin) -> None:
    topic = await stage.topic(partitions=3)
    first, second = await stage.add(topic, 10, 0), await stage.add(topic, 5, 1)
    await adopt(stage, topic, {0: Position(first[3], 4), 1: Position("0-0", 0)})
    assert await places(stage, topic) == [first[3], "0-0", "0-0"]
    assert (await found(stage, topic)).spark_groups == {GROUP}
    meta = stage.site.keys.meta("orders")
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
    assert changed <= {stage.site.keys.lease(stage.stream(topic, index), GROUP) for index in range(2)}  # the time
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
    meta = stage.site.keys.meta("orders")
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
    retry = stage.site.keys.retry(stage.stream(topic, 1), GROUP)
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
    settle = progress._settle

    async def settling(site: Site, topic: Topic, group: str, token: str, mark: str) -> bool:
        if mark:
            await stage.read(topic, GROUP, 2, 1)
        return await settle(site, topic, group, token, mark)

    monkeypatch.setattr(progress, "_settle", settling)
    with pytest.raises(ConfigError, match="1 consumers, 2 pending"):
        await adopt(stage, topic, {index: Position(ids[3], 4) for index in range(3)})
    assert (await places(stage, topic))[0] == ids[1]
    assert (await places(stage, topic))[2] is None
    assert len(await stage.pending(topic, GROUP, 1)) == 2
    looked = await found(stage, topic)
    assert (looked.spark_groups, looked.claimed_groups) == (frozenset(), frozenset())
    keys = stage.site.keys
    assert not [key for key in await all_keys(stage) if key in (keys.groups("orders"), *_leases(stage, topic))]


def _leases(stage: Stage, topic: Topic) -> list[str]:
    return [stage.site.keys.lease(stream, GROUP) for stream in topic.streams(stage.site.keys)]


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
    legacy = await stage.registry.look(LegacyTopic(stage.site.keys.bare("old")))
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
    assert (await trim(stage.site, topic, 0)).removed == 10
    names, run = list[str](), Site.run

    async def listening(self: Site, key: str, call: Call) -> object:
        names.append(call.script.name)
        return await run(self, key, call)

    monkeypatch.setattr(Site, "run", listening)
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


# --- nobody subscribes to it ------------------------------------------------------------------------------


async def test_to_subscribe_is_refused_and_changes_nothing(stage: Stage, broker: Broker) -> None:
    topic = await stage.topic(partitions=2)
    await adopt(stage, topic)
    lost = stage.stream(topic, 1)
    await stage.call(lost, "XGROUP", "DESTROY", lost, GROUP)  # a subscriber would make it again
    before = await everything(stage)
    with pytest.raises(ConfigError, match=f"'{GROUP}' of topic 'orders' {SUBSCRIBING}"):
        async with broker.subscribe("orders", group=GROUP, handler=Recorder(), options=impatient()):
            pass
    with pytest.raises(ConfigError, match=SUBSCRIBING):
        async with broker.consume("orders", group=GROUP, options=impatient()):
            pass
    assert await everything(stage) == before
    await stage.add(topic, 1)
    async with broker.subscribe("orders", group="another", handler=(seen := Recorder()), options=impatient()):
        await seen.saw(1)


async def test_to_subscribe_past_the_meta_is_refused_too(stage: Stage, broker: Broker) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 3)
    await adopt(stage, topic, {0: Position(ids[0], 1)})
    assert await stage.try_acquire(topic, GROUP) == [b"SPARK"]
    with pytest.raises(ConfigError, match=SUBSCRIBING):
        async with broker.subscribe(
            broker.legacy(stage.stream(topic)), group=GROUP, handler=Recorder(), options=impatient()
        ):
            pass
    assert await places(stage, topic) == [ids[0]]


async def test_an_owner_that_comes_back_from_the_dead_is_fenced_off(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 3)
    held = await stage.acquire(topic, GROUP)
    clock.advance(16)
    await adopt(stage, topic, {0: Position(ids[1], 2)})
    assert await stage.take(held) is None
    assert await places(stage, topic) == [ids[1]]


async def test_a_member_that_finds_the_mark_ends(stage: Stage, broker: Broker) -> None:
    """It was taken for dead, and somebody has made its group a Spark query's."""
    await stage.topic()
    meta = stage.site.keys.meta("orders")
    async with broker.subscribe(
        "orders", group=GROUP, handler=Recorder(), options=impatient(lease_ttl=1.0)
    ) as subscription:
        await stage.call(meta, "HSET", meta, f"group:{GROUP}", "spark")
        async with asyncio.timeout(LONG):
            with pytest.raises(ConfigError, match=SUBSCRIBING):
                await subscription.wait()
    assert await stage.call(stage.site.keys.members("orders", GROUP), "ZCARD", _members(stage)) == 0


def _members(stage: Stage, group: str = GROUP) -> str:
    return stage.site.keys.members("orders", group)


# --- both at once -----------------------------------------------------------------------------------------


async def test_a_refused_adoption_does_not_disturb_those_who_consume(stage: Stage, broker: Broker) -> None:
    topic = await stage.topic(partitions=2)
    seen = Recorder()
    async with broker.subscribe("orders", group=GROUP, handler=seen, options=impatient(lease_ttl=1.0)) as subscription:
        for number in range(20):
            with pytest.raises(ConfigError, match="live members"):
                await adopt(stage, topic)
            await stage.add(topic, 1, number % 2)
        await seen.saw(20)
        assert subscription.health().healthy


async def test_one_who_is_a_member_already_waits_for_no_outcome(stage: Stage, broker: Broker) -> None:
    topic = await stage.topic(partitions=1)
    seen = Recorder()
    async with broker.subscribe("orders", group=GROUP, handler=seen, options=impatient(lease_ttl=1.0)) as subscription:
        await _announced(stage, seconds=3600)
        meta = stage.site.keys.meta("orders")
        await stage.call(meta, "HSET", meta, "partitionCount", 2)
        await eventually(lambda: subscription.owned["orders"] == (0, 1), "it goes on looking at its topic")
        await stage.add(topic, 1, 1)
        await seen.saw(1)


async def test_one_who_looked_before_the_adoption_and_joins_after_it_leaves(
    stage: Stage, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 5, 0)
    ensure = Member._ensure_group

    async def ensuring(self: Member, topic: Topic) -> None:
        await adopt(stage, topic, {0: Position(ids[2], 3)})
        await ensure(self, topic)

    monkeypatch.setattr(Member, "_ensure_group", ensuring)
    with pytest.raises(ConfigError, match=SUBSCRIBING):
        async with broker.subscribe("orders", group=GROUP, handler=Recorder(), options=impatient()):
            pass
    assert not await stage.call(_members(stage), "EXISTS", _members(stage))
    assert await places(stage, topic) == [ids[2], "0-0"]
    await publish(stage, topic, {0: Position(ids[3], 4), 1: Position("0-0", 0)})


@pytest.mark.parametrize("wins", ["query", "subscriber"])
async def test_one_who_joins_during_the_adoption_waits_for_its_outcome(
    stage: Stage, broker: Broker, monkeypatch: pytest.MonkeyPatch, wins: str
) -> None:
    topic = await stage.topic(partitions=2)
    ids = await stage.add(topic, 5, 0)
    look, waiting, seen = live_members, asyncio.Event(), Recorder()
    settled = progress.settled
    subscription = broker.subscribe("orders", group=GROUP, handler=seen, options=impatient())
    tasks = list[asyncio.Task[Any]]()

    async def watched(*args: Any) -> Topic:
        waiting.set()
        return await settled(*args)

    async def looking(*args: Any) -> list[str]:
        early = await look(*args)
        tasks.append(asyncio.create_task(subscription.__aenter__()))
        await waiting.wait()
        assert not tasks[0].done()
        return early if wins == "query" else await look(*args)

    monkeypatch.setattr("conquiet.topics.group.settled", watched)
    monkeypatch.setattr(progress, "live_members", looking)
    async with asyncio.timeout(LONG):
        if wins == "query":
            await adopt(stage, topic, {0: Position(ids[2], 3)})
            with pytest.raises(ConfigError, match=SUBSCRIBING):
                await tasks[0]
            assert not await stage.call(_members(stage), "EXISTS", _members(stage))
            await publish(stage, topic, {0: Position(ids[3], 4), 1: Position("0-0", 0)})
        else:
            with pytest.raises(ConfigError, match="live members"):
                await adopt(stage, topic, {0: Position(ids[2], 3)})
            await tasks[0]
            await seen.saw(5)
            await subscription.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_comes_first_one_of_both_wins(stage: Stage, broker: Broker, seed: int) -> None:
    dice = random.Random(seed)
    topic = await stage.topic(partitions=3)

    async def subscribe(group: str, turns: int) -> bool:
        for _ in range(turns):
            await stage.call(_members(stage), "PING")
        try:
            await broker.subscribe("orders", group=group, handler=Recorder(), options=impatient()).__aenter__()
        except ConfigError:
            return False
        return True

    async def become(group: str, turns: int) -> bool:
        for _ in range(turns):
            await stage.call(_members(stage), "PING")
        try:
            await adopt(stage, topic, {0: Position("5-5")}, group)
        except ConfigError:
            return False
        return True

    for number in range(12):
        group = f"g{number}"
        ahead = dice.randint(-12, 12)
        has = await asyncio.gather(subscribe(group, max(ahead, 0)), become(group, max(-ahead, 0)))
        assert sorted(has) == [False, True], (group, ahead, has)
        marked = group in (await found(stage, topic)).spark_groups
        assert marked == has[1]
        assert await stage.call(_members(stage, group), "ZCARD", _members(stage, group)) == has[0]


async def test_two_who_adopt_at_once_both_succeed(stage: Stage) -> None:
    topic = await stage.topic(partitions=3)
    await asyncio.gather(*(adopt(stage, topic, {0: Position("5-5")}) for _ in range(5)))
    assert await places(stage, topic) == ["5-5", "0-0", "0-0"]


async def _announced(stage: Stage, seconds: int = 10) -> None:
    """An adoption whose author died in the middle of it."""
    meta = stage.site.keys.meta("orders")
    call = Script.named("group_claim")([meta], stage.site.clock.offset_ms, GROUP, "token", seconds * 1000)
    assert await stage.site.run(meta, call) == b"OK"


async def test_an_announcement_counts_for_a_while_only(stage: Stage, broker: Broker, clock: ManualClock) -> None:
    topic = await stage.topic()
    await _announced(stage)
    assert (await found(stage, topic)).claimed_groups == {GROUP}
    subscription = broker.subscribe("orders", group=GROUP, handler=(seen := Recorder()), options=impatient())
    joining = asyncio.create_task(subscription.__aenter__())

    async def is_member() -> bool:
        return bool(await stage.call(_members(stage), "EXISTS", _members(stage)))

    await eventually(is_member, "the subscriber has joined")
    assert not joining.done()
    clock.advance(10)
    await joining
    await stage.add(topic, 1)
    await seen.saw(1)
    await subscription.aclose()


async def test_another_query_waits_for_it_as_well(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    await _announced(stage)
    await hurried(clock, adopt(stage, topic, {0: Position("5-5")}))
    assert await places(stage, topic) == ["5-5"]
    assert (await found(stage, topic)).claimed_groups == frozenset()


async def test_who_takes_too_long_has_changed_nothing(
    stage: Stage, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await stage.topic()
    before = await everything(stage)

    async def looking(*_: Any) -> list[str]:
        clock.advance(10)
        return []

    monkeypatch.setattr(progress, "live_members", looking)
    with pytest.raises(QueueError, match="took too long"):
        await adopt(stage, topic)
    assert await everything(stage) == before


# --- operators and retention --------------------------------------------------------------------------------


async def test_retention_keeps_what_is_not_done(stage: Stage) -> None:
    topic = await stage.topic(max_len=5)
    ids = await stage.add(topic, 20)
    await adopt(stage, topic, {0: Position("0-0", 0)})
    assert (await trim(stage.site, topic, 0)).removed == 0
    await publish(stage, topic, {0: Position(ids[7], 8)})
    assert (await trim(stage.site, topic, 0)).removed == 8
    assert await stage.ids(topic) == ids[8:]
    await publish(stage, topic, {0: Position(ids[-1], 20)})
    await trim(stage.site, topic, 0)
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
        assert (await trim(stage.site, topic, 0)).expired_groups == ()
    assert await stage.ids(topic) == ids[2:]
    clock.advance(11)
    trimmed = await trim(stage.site, topic, 0)
    assert (trimmed.removed, trimmed.expired_groups) == (13, (GROUP,))
    await publish(stage, topic, {0: Position(ids[-1], 20)})
    assert (await trim(stage.site, topic, 0)).expired_groups == ()


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
    meta = stage.site.keys.meta("orders")
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
    assert await all_keys(stage) == []
    with pytest.raises(GroupLostError):
        await publish(stage, topic, {1: Position("6-6")})
    assert await all_keys(stage) == []


async def test_a_forgotten_topic_is_made_again_with_its_spark_groups(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    await adopt(stage, topic)
    known = await found(stage, topic)
    meta = stage.site.keys.meta("orders")
    await stage.call(meta, "DEL", meta)
    assert (await stage.registry.restore(known)).spark_groups == {GROUP}
    assert (await found(stage, topic)).spark_groups == {GROUP}


# --- growth ---------------------------------------------------------------------------------------------------


async def test_growth_gives_the_group_to_the_new_partitions(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=1, max_len=1)
    await adopt(stage, topic, {0: Position("5-5")})
    await hurried(clock, grow(stage.site, stage.registry, "orders", 3))
    grown = await found(stage, topic)
    assert (grown.partitions, grown.spark_groups) == (3, frozenset({GROUP}))
    assert await places(stage, grown) == ["5-5", "0-0", "0-0"]
    ids = await stage.add(grown, 4, 2)
    assert (await trim(stage.site, grown, 2)).removed == 0, "the query has not seen them"
    await publish(stage, grown, {0: Position("6-6"), 2: Position(ids[1], 2)})
    assert await places(stage, grown) == ["6-6", "0-0", ids[1]]
    assert await stage.try_acquire(grown, GROUP, 2) == [b"SPARK"]


async def test_to_adopt_again_reaches_partitions_that_were_added(stage: Stage) -> None:
    topic = await stage.topic(partitions=1)
    await adopt(stage, topic, {0: Position("5-5")})
    meta = stage.site.keys.meta("orders")
    await stage.call(meta, "HSET", meta, "partitionCount", 3)
    grown = await found(stage, topic)
    with pytest.raises(GroupLostError):
        await publish(stage, grown, {2: Position("7-7")})
    await adopt(stage, grown, {2: Position("7-7")})
    assert await places(stage, grown) == ["5-5", "0-0", "7-7"]
