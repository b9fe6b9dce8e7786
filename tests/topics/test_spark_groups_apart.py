"""Nobody subscribes to the group of a Spark query, whoever comes first, and however close they come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from conquiet import ConfigError, QueueError
from conquiet.kit.clock import ManualClock
from conquiet.topics import Broker
from conquiet.topics.consume.member import Member
from conquiet.topics.server import external_groups
from conquiet.topics.server.external_groups import Position, settled
from conquiet.topics.server.group import live_members
from conquiet.topics.server.topics import Topic
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.waiting import LONG, eventually
from tests.topics.adopting import GROUP, adopt, everything, found, places, publish
from tests.topics.consuming import Recorder, impatient
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too

SUBSCRIBING: Final = "is a Spark query's, and nobody can subscribe to it: choose another name, or .*delete_group"


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        yield broker


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
    meta = stage.instance.keys.meta("orders")
    async with broker.subscribe(
        "orders", group=GROUP, handler=Recorder(), options=impatient(lease_ttl=1.0)
    ) as subscription:
        await stage.call(meta, "HSET", meta, f"group:{GROUP}", "spark")
        async with asyncio.timeout(LONG):
            with pytest.raises(ConfigError, match=SUBSCRIBING):
                await subscription.wait()
    assert await stage.call(stage.instance.keys.members("orders", GROUP), "ZCARD", _members(stage)) == 0


def _members(stage: Stage, group: str = GROUP) -> str:
    return stage.instance.keys.members("orders", group)


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
        meta = stage.instance.keys.meta("orders")
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

    monkeypatch.setattr("conquiet.topics.consume.member.settled", watched)
    monkeypatch.setattr(external_groups, "live_members", looking)
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
    meta = stage.instance.keys.meta("orders")
    call = Script.named("group_claim")([meta], stage.instance.clock.offset_ms, GROUP, "token", seconds * 1000)
    assert await stage.instance.run(meta, call) == b"OK"


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

    monkeypatch.setattr(external_groups, "live_members", looking)
    with pytest.raises(QueueError, match="took too long"):
        await adopt(stage, topic)
    assert await everything(stage) == before
