"""Repeatable writes into partitions with bounds: what is refused as a whole, dropped or trimmed."""

from __future__ import annotations

import random

import pytest

from conquiet import TopicFullError
from conquiet.kit.clock import ManualClock
from conquiet.topics.produce.once import Appended, Appender, begin
from tests.topics.repeating import BY_ID, ONCE, append, by_ids, chunk, payloads, rows
from tests.topics.staging import Stage

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]


async def test_a_full_partition_refuses_a_chunk_as_a_whole(stage: Stage) -> None:
    topic = await stage.topic(max_len=5, on_full="reject")
    await stage.create_group(topic, "billing")
    assert await append(stage.instance, topic, ONCE, [chunk(0, 1, 2, 3)]) == Appended(3)
    text = "partition 0 of topic 'orders' holds 3 unfinished entries of 5 that it may: 3 more do not fit"
    with pytest.raises(TopicFullError, match=text):
        await append(stage.instance, topic, ONCE, [chunk(0, 1, 2, 3), chunk(1, 4, 5, 6)])
    assert await payloads(stage, topic) == ["1", "2", "3"]
    await stage.ack(topic, "billing", *await stage.read(topic, "billing", 1))
    assert await append(stage.instance, topic, ONCE, [chunk(0, 1, 2, 3), chunk(1, 4, 5, 6)]) == Appended(3, 3)
    assert await payloads(stage, topic) == ["2", "3", "4", "5", "6"]


@pytest.mark.slow
@pytest.mark.any_server
async def test_finished_entries_make_room_however_large_they_are(stage: Stage) -> None:
    """More of them have to go than one call removes."""
    topic = await stage.topic(max_len=30, on_full="reject")
    await stage.create_group(topic, "billing")
    await stage.add(topic, 30, 0, b'"%s"' % (b"x" * 1_000_000))
    await stage.ack(topic, "billing", *await stage.read(topic, "billing", 29))
    assert await append(stage.instance, topic, ONCE, [chunk(0, *range(29))]) == Appended(29)
    assert (await payloads(stage, topic))[1:] == [str(number) for number in range(29)]
    with pytest.raises(TopicFullError, match="holds 30 unfinished entries"):
        await append(stage.instance, topic, ONCE, [chunk(1, 1)])


async def test_what_a_full_partition_has_can_be_repeated(stage: Stage) -> None:
    topic = await stage.topic(max_len=2, on_full="reject")
    await stage.create_group(topic, "billing")
    await append(stage.instance, topic, BY_ID, [by_ids("a", "b")])
    await stage.add(topic, 3)  # a limit that was lowered
    assert await append(stage.instance, topic, BY_ID, [by_ids("b", "a")]) == Appended(0, 2)
    assert len(await rows(stage, topic)) == 5


async def test_a_full_partition_without_groups_keeps_the_newest(stage: Stage) -> None:
    topic = await stage.topic(max_len=5, on_full="reject")
    assert await append(stage.instance, topic, ONCE, [chunk(0, *range(12)), chunk(1, 12, 13)]) == Appended(14)
    assert await payloads(stage, topic) == ["9", "10", "11", "12", "13"]
    assert await append(stage.instance, topic, ONCE, [chunk(0, *range(12))]) == Appended(0, 12)


async def test_a_group_that_nobody_serves_keeps_no_chunk_out(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(max_len=3, on_full="reject", group_expiry=100.0)
    await stage.release(await stage.acquire(topic, "gone"))
    await append(stage.instance, topic, ONCE, [chunk(0, 1, 2, 3)])
    with pytest.raises(TopicFullError):
        await append(stage.instance, topic, ONCE, [chunk(1, 4, 5)])
    clock.advance(116)  # its lease could have been held for 15 s
    assert await append(stage.instance, topic, ONCE, [chunk(1, 4, 5)]) == Appended(2)
    assert await payloads(stage, topic) == ["3", "4", "5"]


async def test_the_oldest_are_dropped(stage: Stage) -> None:
    topic = await stage.topic(max_len=4, on_full="drop")
    await stage.create_group(topic, "billing")
    assert await append(stage.instance, topic, ONCE, [chunk(0, 1, 2, 3), chunk(1, 4, 5, 6)]) == Appended(6)
    assert await payloads(stage, topic) == ["3", "4", "5", "6"]
    key = stage.instance.keys.trim(stage.stream(topic))
    assert await stage.call(key, "HGET", key, "dropped") == b"2"
    assert await append(stage.instance, topic, ONCE, [chunk(0, 1, 2, 3)]) == Appended(0, 3)


async def test_a_limit_that_only_trims_may_be_passed(stage: Stage) -> None:
    topic = await stage.topic(max_len=2)
    await stage.create_group(topic, "billing")
    assert await append(stage.instance, topic, ONCE, [chunk(0, *range(6))]) == Appended(6)
    assert len(await rows(stage, topic)) == 6


async def test_a_long_part_trims_what_is_not_kept(stage: Stage) -> None:
    topic = await stage.topic(max_len=10)
    done = await append(stage.instance, topic, ONCE, [chunk(number, *range(500)) for number in range(11)])
    assert done == Appended(5_500)
    stream = stage.stream(topic)
    assert await stage.call(stream, "XLEN", stream) < 5_500


async def test_many_short_parts_trim_as_often_as_a_long_one(stage: Stage) -> None:
    topic = await stage.topic(max_len=10)
    await begin(stage.instance, topic, ONCE)
    chance = random.Random(7)
    for part in range(60):
        appender = Appender(stage.instance, topic, ONCE, part, chance)
        await appender.put(chunk(0, *range(250)))
        assert await appender.drain() == Appended(250)
    key = stage.instance.keys.trim(stage.stream(topic))
    stream = stage.stream(topic)
    assert await stage.call(key, "HGET", key, "bound") is not None
    assert await stage.call(stream, "XLEN", stream) < 15_000
