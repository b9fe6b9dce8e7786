"""Groups that are made, deleted and reset at every single moment of a growth."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from conquiet.kit.clock import ManualClock
from conquiet.topics import Broker
from conquiet.topics.operate.admin import Admin
from conquiet.topics.operate.removal import delete_group, reset_group
from conquiet.topics.server.external_groups import adopt_group
from conquiet.topics.server.group import found_group
from conquiet.topics.server.growth import finish_growth, grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.keys import Keys
from tests.topics.adopting import GROUP, adopt, places
from tests.topics.consuming import Recorder, impatient
from tests.topics.staging import Stage, hurried
from tests.topics.stepping import Stepped

pytestmark = [pytest.mark.cluster_too, pytest.mark.slow]

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


async def _planned(stage: Stage, clock: ManualClock, topic: Topic, partitions: int = 4) -> Topic:
    """A growth that has taken effect, and that nobody has completed."""
    work = Stepped(stage.instance, lambda instance, registry: grow(instance, registry, topic.name, partitions))
    while (found := await _found(stage, topic.name)).next_count is None:
        assert await work.step()
    await work.die()
    clock.advance(2.5)
    return found


async def _grow(stage: Stage, clock: ManualClock, topic: Topic) -> Topic:
    """From 2 to 4 partitions, at once."""
    await finish_growth(stage.instance, stage.registry, await _planned(stage, clock, topic))
    return await _found(stage, topic.name)


def _finishing(stage: Stage, planned: Topic) -> Stepped:
    return Stepped(stage.instance, lambda instance, registry: finish_growth(instance, registry, planned))


Try = Callable[[Topic, int], Awaitable[bool]]
"""Something that is tried with a topic of two partitions, with an interruption after so many calls to the server;
whether that came after the last of them."""
MAKING: dict[str, Callable[[Stage, Broker, Topic], Awaitable[Any]]] = {
    "earliest": lambda stage, broker, topic: _subscribed(broker, "late", topic.name),
    "latest": lambda stage, broker, topic: _subscribed(broker, "late", topic.name, start="latest"),
    "spark": lambda stage, broker, topic: adopt(stage, topic, group="late"),
}


async def _at_every_moment(stage: Stage, attempt: Try) -> None:
    """Try it with an interruption at each moment that there is."""
    at = 1
    while not await attempt(await stage.topic(f"orders-{at}", 2), at):
        at += 1
    assert at > 4


async def _steps(work: Stepped, count: int) -> bool:
    """Let it make so many calls; whether it needs fewer."""
    for _ in range(count):
        if not await work.step():
            return True
    return False


@pytest.mark.slow
@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("what", MAKING)
async def test_a_group_that_is_made_at_any_moment_of_a_growth_is_everywhere(
    stage: Stage, broker: Broker, clock: ManualClock, what: str
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        work = _finishing(stage, await _planned(stage, clock, topic))
        is_over = await _steps(work, at)
        await MAKING[what](stage, broker, topic)
        await work.finish()
        grown = await _found(stage, topic.name)
        assert grown.partitions == 4
        assert await places(stage, grown, "late") == ["0-0"] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("start", ["0-0", "$", "spark"])
async def test_a_group_is_everywhere_at_whatever_moment_of_its_making_the_topic_grows(
    stage: Stage, clock: ManualClock, start: str
) -> None:
    """What is written to a new partition before the group is there has come after it was asked for."""

    async def attempt(topic: Topic, at: int) -> bool:
        spark = start == "spark"
        work = Stepped(
            stage.instance, lambda instance, registry: _make(instance, registry, topic, spark=spark, start=start)
        )
        is_over = await _steps(work, at)
        grown = await _grow(stage, clock, topic)
        await stage.add(grown, 1, 3)
        await work.finish()
        assert await places(stage, grown) == ["0-0"] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


async def _make(instance: Instance, registry: Registry, topic: Topic, *, spark: bool, start: str = "0-0") -> None:
    if spark:
        await adopt_group(instance, registry, topic, GROUP, {})
    else:
        await found_group(instance, registry, topic, GROUP, start)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("spark", [False, True])
async def test_a_group_that_is_deleted_at_any_moment_of_a_growth_stays_away(
    stage: Stage, clock: ManualClock, spark: bool
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        await _make(stage.instance, stage.registry, topic, spark=spark)
        work = _finishing(stage, await _planned(stage, clock, topic))
        is_over = await _steps(work, at)
        await delete_group(stage.instance, stage.registry, topic, GROUP)
        await work.finish()
        assert await places(stage, await _found(stage, topic.name)) == [None] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("spark", [False, True])
async def test_a_group_stays_away_at_whatever_moment_of_its_deletion_the_topic_grows(
    stage: Stage, clock: ManualClock, spark: bool
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        await _make(stage.instance, stage.registry, topic, spark=spark)
        found = await _found(stage, topic.name)
        work = Stepped(stage.instance, lambda instance, registry: delete_group(instance, registry, found, GROUP))
        is_over = await _steps(work, at)
        grown = await _grow(stage, clock, topic)
        await work.finish()
        assert await places(stage, grown) == [None] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("to", ["earliest", "latest"])
async def test_a_reset_at_whatever_moment_of_a_growth_reaches_every_partition(
    stage: Stage, clock: ManualClock, to: Any
) -> None:
    """What was written before a reset to the end is behind it, also in a partition that was added during it."""

    async def attempt(topic: Topic, at: int) -> bool:
        await _make(stage.instance, stage.registry, topic, spark=False)
        work = Stepped(stage.instance, lambda instance, registry: reset_group(instance, registry, topic, GROUP, to))
        is_over = await _steps(work, at)
        grown = await _grow(stage, clock, topic)
        last = (await stage.add(grown, 2, 3))[-1]
        await stage.read(grown, GROUP, 1, 3)
        if await work.finish() > 1:  # else it only had to tell the members
            assert (await places(stage, grown))[3] == {"earliest": "0-0", "latest": last}[to], at
            assert await stage.pending(grown, GROUP, 3) == []
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_growth_that_dies_at_whatever_moment_is_completed_with_all_groups(
    stage: Stage, broker: Broker, clock: ManualClock
) -> None:
    async def attempt(topic: Topic, at: int) -> bool:
        await found_group(stage.instance, stage.registry, topic, OFFLINE, "0-0")
        await adopt(stage, topic)
        work = _finishing(stage, await _planned(stage, clock, topic))
        is_over = await _steps(work, at)
        await work.die()
        # A producer does, whose send has waited.
        clock.advance(5)
        await broker.send(topic.name, at, partition=0)
        grown = await _found(stage, topic.name)
        assert (grown.partitions, grown.next_count) == (4, None)
        for group in (OFFLINE, GROUP):
            assert await places(stage, grown, group) == ["0-0"] * 4, at
        return is_over

    await _at_every_moment(stage, attempt)


@pytest.mark.any_server
@pytest.mark.one_node
async def test_a_topic_that_was_deleted_during_its_growth_gets_no_streams(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    await _make(stage.instance, stage.registry, topic, spark=False)
    planned = await _planned(stage, clock, topic)
    await hurried(clock, Admin(stage.instance, stage.registry).delete_topic("orders", force=True))
    await finish_growth(stage.instance, stage.registry, planned)
    made = [stage.stream(topic, partition) for partition in range(4)]
    assert [await stage.call(key, "EXISTS", key) for key in made] == [0] * 4
