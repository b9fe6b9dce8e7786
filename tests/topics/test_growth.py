"""More partitions, announced and completed, whoever dies on the way."""

from __future__ import annotations

import asyncio

import pytest

from conquiet.errors import ConfigError, UnknownTopicError
from conquiet.kit.clock import SYSTEM_CLOCK, ManualClock
from conquiet.kit.entry_ids import order as place
from conquiet.message import Outgoing
from conquiet.topics.format.partitioner import HashPartitioner
from conquiet.topics.options import BrokerOptions, Retention
from conquiet.topics.produce.producer import Producer
from conquiet.topics.server import growth
from conquiet.topics.server.growth import finish_growth, grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Growth, Registry, Topic
from conquiet.wire.streams import entries_of
from tests.rigs.waiting import eventually
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too


async def _look(stage: Stage, topic: Topic) -> Topic:
    found = await stage.registry.fetch_or_none(topic.name)
    assert found is not None
    return found


async def _planned(stage: Stage, topic: Topic, partitions: int) -> Topic:
    """A growth whose planner died before it took effect."""
    task = asyncio.create_task(grow(stage.instance, stage.registry, topic.name, partitions))

    async def is_planned() -> bool:
        return (await _look(stage, topic)).next_count == partitions

    await eventually(is_planned, "the growth is planned")
    task.cancel()
    return await _look(stage, topic)


async def test_growth_is_announced_before_it_takes_effect(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    planned = await _planned(stage, topic, 5)
    assert (planned.partitions, planned.next_count, planned.version) == (2, 5, 1)
    # Producers go by what they know for one second, so all of them hear of it before.
    assert 1.0 < planned.switch_at - clock.monotonic() <= 1.5


async def test_who_creates_a_topic_that_is_growing_hears_of_it(stage: Stage, clock: ManualClock) -> None:
    planned = await _planned(stage, await stage.topic(partitions=2), 5)
    again = await stage.topic(partitions=2)
    assert again.next_count == 5
    assert abs(again.switch_at - planned.switch_at) < 1.0


async def test_growth_notes_where_the_old_partitions_ended(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=3)
    first = await stage.add(topic, 5, 0)
    second = await stage.add(topic, 2, 1)
    stream = stage.stream(topic, 1)
    await stage.call(stream, "XDEL", stream, second[-1])  # an ID that was given counts, not one that is left
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 4))
    grown = await _look(stage, topic)
    assert grown.growth == (Growth(3, 4, (first[-1], second[-1], "0-0")),)
    assert (grown.partitions, grown.next_count, grown.version) == (4, None, 2)
    assert grown.updated_ms > topic.updated_ms
    assert grown.created_ms == topic.created_ms
    key = stage.instance.keys.partitions("orders")
    assert await stage.call(key, "SCARD", key) == 4
    third = await stage.add(grown, 1, 3)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 6))
    again = await _look(stage, topic)
    assert again.growth == (*grown.growth, Growth(4, 6, (first[-1], second[-1], "0-0", third[-1])))


@pytest.mark.any_server
@pytest.mark.one_node
@pytest.mark.parametrize("partitions", [0, -1, True, "4", 2.0, None])
async def test_what_is_no_number_of_partitions_is_refused(stage: Stage, partitions: object) -> None:
    await stage.topic(partitions=2)
    with pytest.raises(ConfigError, match="partitions must be an integer of at least 1"):
        await grow(stage.instance, stage.registry, "orders", partitions)  # type: ignore[arg-type]


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_topic_never_shrinks(stage: Stage, partitions: int) -> None:
    topic = await stage.topic(partitions=2)
    with pytest.raises(ConfigError, match=f"must be more than the 2 that 'orders' has, not {partitions}"):
        await grow(stage.instance, stage.registry, "orders", partitions)
    assert await _look(stage, topic) == topic


async def test_a_topic_that_there_is_not_cannot_grow(stage: Stage) -> None:
    with pytest.raises(UnknownTopicError):
        await grow(stage.instance, stage.registry, "orders", 2)
    assert await stage.registry.fetch_or_none("orders") is None


async def test_another_growth_has_to_wait(stage: Stage) -> None:
    topic = await stage.topic()
    await _planned(stage, topic, 3)
    with pytest.raises(ConfigError, match="growing to 3 partitions, and cannot to 4"):
        await grow(stage.instance, stage.registry, "orders", 4)


async def test_a_growth_whose_planner_died_is_completed_by_a_member(stage: Stage, clock: ManualClock) -> None:
    planned = await _planned(stage, await stage.topic(), 3)
    clock.advance(1.5 + growth.OVERDUE)
    await finish_growth(stage.instance, stage.registry, planned)
    assert (await _look(stage, planned)).partitions == 3


async def test_a_growth_whose_planner_died_is_completed_by_asking_again(stage: Stage, clock: ManualClock) -> None:
    planned = await _planned(stage, await stage.topic(), 3)
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 3))
    assert (await _look(stage, planned)).partitions == 3


async def test_many_complete_a_growth_at_once(stage: Stage, clock: ManualClock) -> None:
    planned = await _planned(stage, await stage.topic(), 3)
    clock.advance(3)
    work = [finish_growth(stage.instance, stage.registry, planned) for _ in range(5)]
    await asyncio.gather(*work)
    await finish_growth(stage.instance, stage.registry, planned)
    grown = await _look(stage, planned)
    assert (grown.partitions, len(grown.growth), grown.version) == (3, 1, 2)


async def test_completing_what_was_not_planned_changes_nothing(stage: Stage) -> None:
    topic = await stage.topic()
    await finish_growth(stage.instance, stage.registry, topic)
    assert await _look(stage, topic) == topic


async def test_members_are_asked_to_look_again(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    await stage.join(topic, "billing")
    generation = stage.instance.keys.generation("orders", "billing")
    before = int(await stage.call(generation, "GET", generation))
    groups = stage.instance.keys.groups("orders")
    await stage.call(groups, "SADD", groups, "idle")
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 2))
    assert int(await stage.call(generation, "GET", generation)) == before + 2  # when it is planned, and when it is done
    nobody = stage.instance.keys.generation("orders", "idle")
    assert await stage.call(nobody, "EXISTS", nobody) == 0


@pytest.mark.slow
@pytest.mark.any_server
async def test_no_key_goes_back_to_an_old_partition(stage: Stage) -> None:
    """Producers that know the topic send all the time; after the noted ends each key is where it belongs."""
    instance = Instance(stage.instance.link, stage.instance.keys, SYSTEM_CLOCK)
    topic = await Registry(instance).create("orders", 2, Retention())
    keys, sending = [f"customer-{number}" for number in range(20)], True
    sent: list[int] = []

    async def produce() -> None:
        producer = Producer(instance, Registry(instance), BrokerOptions())
        while sending:
            await producer.send_batch("orders", [Outgoing(number, key) for number, key in enumerate(keys)])
            sent.append(len(keys))
            await asyncio.sleep(0.01)  # a steady stream, and no flood

    producers = [asyncio.create_task(produce()) for _ in range(3)]
    await eventually(lambda: len(sent) >= 15, "messages before the growth")
    await grow(instance, Registry(instance), "orders", 5)
    before = len(sent)
    await eventually(lambda: len(sent) >= before + 15, "messages after it")
    sending = False
    await asyncio.gather(*producers)
    [step] = (await _look(stage, topic)).growth
    route = HashPartitioner()
    for partition in range(5):
        stream = stage.stream(topic, partition)
        for id, fields in entries_of(await stage.call(stream, "XRANGE", stream, "-", "+")):
            key = fields[fields.index(b"key") + 1].decode()
            if partition >= 2 or place(id.decode()) > place(step.ends[partition]):
                assert route(key, 5) == partition
            else:
                assert partition in (route(key, 2), route(key, 5))


async def test_on_a_cluster(clustered: Stage, clock: ManualClock) -> None:
    topic = await clustered.topic(partitions=2)
    ids = [(await clustered.add(topic, 1, partition))[0] for partition in range(2)]
    await hurried(clock, grow(clustered.instance, clustered.registry, "orders", 6))
    assert (await _look(clustered, topic)).growth == (Growth(2, 6, tuple(ids)),)
