"""Writes that may be repeated: what was written once stays written once, whatever is sent again, by whom and when."""

from __future__ import annotations

import asyncio
import random

import pytest

from conquiet import ConfigError
from conquiet.kit.clock import ManualClock
from conquiet.topics.operate.removal import delete_topic
from conquiet.topics.produce.once import Appended, Appender, Chunk, Write, begin, forget
from conquiet.topics.server.growth import grow
from tests.topics.repeating import BY_ID, DAY, HOUR, ONCE, append, by_ids, chunk, payloads, remembered, rows
from tests.topics.staging import Stage, hurried

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]

# --- by their place ---------------------------------------------------------------------------------------


async def test_an_entry_holds_what_the_row_has(stage: Stage) -> None:
    topic = await stage.topic()
    full = Chunk(0, 0, bytearray(b"70"), ['{"n":1}', "k", '{"h":"1"}', "id-1", "2"])
    assert await append(stage.instance, topic, ONCE, [full]) == Appended(2)
    first, second = await rows(stage, topic)
    assert int(first.pop("timestamp")) == int(second.pop("timestamp")) > 1_600_000_000_000
    assert first == {"payload": '{"n":1}', "key": "k", "headers": '{"h":"1"}', "messageId": "id-1"}
    assert second == {"payload": "2"}


async def test_a_part_that_is_repeated_adds_nothing(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    chunks = [chunk(0, 1, 2), chunk(1, 3), chunk(0, 4, 5, 6, partition=1)]
    assert await append(stage.instance, topic, ONCE, chunks[:2]) == Appended(3)
    assert await append(stage.instance, topic, ONCE, chunks) == Appended(3, 3)
    assert await append(stage.instance, topic, ONCE, chunks) == Appended(0, 6)
    assert [await payloads(stage, topic, partition) for partition in (0, 1)] == [["1", "2", "3"], ["4", "5", "6"]]


async def test_equal_rows_of_other_parts_chunks_batches_and_writes_are_other_rows(stage: Stage) -> None:
    topic = await stage.topic()
    for write, part, number in [
        (ONCE, 0, 0),
        (ONCE, 1, 0),
        (ONCE, 0, 1),
        (Write("export", 1), 0, 0),
        (Write("other"), 0, 0),
    ]:
        assert await append(stage.instance, topic, write, [chunk(number, 7)], part) == Appended(1)
    assert await payloads(stage, topic) == ["7"] * 5


async def test_other_rows_at_the_same_place_are_not_lost(stage: Stage) -> None:
    topic = await stage.topic()
    await append(stage.instance, topic, ONCE, [chunk(0, 1, 2)])
    assert await append(stage.instance, topic, ONCE, [chunk(0, 2, 3)]) == Appended(2, 0, differing=2)
    assert await append(stage.instance, topic, ONCE, [chunk(0, 2, 3)]) == Appended(0, 2)
    assert await payloads(stage, topic) == ["1", "2", "2", "3"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"00", ["a", "c"]), (b"00", ["a", "bc"])),
        ((b"00", ["1", "2"]), (b"00", ["2", "1"])),
        ((b"00", ["1", "2"]), (b"1", ["1", "2"])),
        ((b"1", ["1", "{}"]), (b"2", ["1", "{}"])),
        ((b"0", ["1\n2"]), (b"00", ["1", "2"])),
        ((b"0", [""]), (b"", [])),
    ],
)
def test_only_equal_rows_have_one_digest(one: tuple[bytes, list[str]], other: tuple[bytes, list[str]]) -> None:
    digests = [Chunk(0, 0, bytearray(kinds), values).packed()[1] for kinds, values in (one, other, one)]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2] == Chunk(3, 9, bytearray(one[0]), list(one[1])).packed()[1]


async def test_two_tasks_with_the_same_part_write_it_once_and_in_order(stage: Stage) -> None:
    topic = await stage.topic()
    chunks = [chunk(number, *range(number * 10, number * 10 + 10), key="k") for number in range(30)]
    ways = await asyncio.gather(*(append(stage.instance, topic, ONCE, chunks) for _ in range(3)))
    assert sum((way.rows for way in ways), 0) == 300
    assert [way.rows + way.repeated for way in ways] == [300] * 3
    assert await payloads(stage, topic) == [str(n) for n in range(300)]


# --- by their IDs -----------------------------------------------------------------------------------------


async def test_ids_may_come_in_any_order_and_with_any_part(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    assert await append(stage.instance, topic, BY_ID, [by_ids("a", "b", "a"), by_ids("c", number=1)]) == Appended(3, 1)
    again = [by_ids("c", "d", "b"), by_ids("a", "e", number=1), by_ids("a", partition=1)]
    assert await append(stage.instance, topic, BY_ID, again, part=5) == Appended(3, 3)
    assert await payloads(stage, topic) == ['"a"', '"b"', '"c"', '"d"', '"e"']
    assert [row["messageId"] for row in await rows(stage, topic)] == ["a", "b", "c", "d", "e"]


async def test_an_id_is_known_within_its_batch(stage: Stage) -> None:
    topic = await stage.topic()
    for batch in (0, 1):
        assert await append(stage.instance, topic, Write("q", batch, by_id=True), [by_ids("a", "b")]) == Appended(2)
    assert len(await rows(stage, topic)) == 4


async def test_many_tasks_with_the_same_ids_write_each_once(stage: Stage) -> None:
    topic = await stage.topic()
    names = [f"id-{n}" for n in range(200)]
    parts = []
    for seed in range(4):
        shuffled = random.Random(seed).sample(names, len(names))
        parts.append([by_ids(*shuffled[at : at + 30], number=at // 30) for at in range(0, 200, 30)])
    ways = await asyncio.gather(*(append(stage.instance, topic, BY_ID, part, at) for at, part in enumerate(parts)))
    assert sum(way.rows for way in ways) == 200
    assert sum(way.repeated for way in ways) == 600
    assert sorted(row["messageId"] for row in await rows(stage, topic)) == sorted(names)


async def test_ids_are_kept_even_where_rows_are_known_by_place(stage: Stage) -> None:
    topic = await stage.topic()
    assert await append(stage.instance, topic, ONCE, [by_ids("a", "a")]) == Appended(2)
    assert [row["messageId"] for row in await rows(stage, topic)] == ["a", "a"]


@pytest.mark.parametrize(
    ("first", "second", "how"),
    [
        (ONCE, BY_ID, "begun without IDs, and cannot be repeated with them"),
        (BY_ID, ONCE, "begun with IDs, and cannot be repeated without them"),
    ],
)
async def test_a_batch_is_repeated_as_it_was_begun(stage: Stage, first: Write, second: Write, how: str) -> None:
    topic = await stage.topic()
    await append(stage.instance, topic, first, [by_ids("a")])
    with pytest.raises(ConfigError, match=f"batch 0 of the write 'export' to topic 'orders' was {how}"):
        await begin(stage.instance, topic, second)
    changed = Write(second.name, 1, second.by_id)
    assert await append(stage.instance, topic, changed, [by_ids("a")]) == Appended(1)


# --- how long a batch can be repeated ---------------------------------------------------------------------


async def test_a_batch_can_be_repeated_for_seven_days(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    await append(stage.instance, topic, ONCE, [chunk(0, 1)])
    clock.advance(7 * DAY / 1000 - 60)
    assert await append(stage.instance, topic, ONCE, [chunk(0, 1)]) == Appended(0, 1)
    clock.advance(61)
    with pytest.raises(ConfigError, match="batch 0 of the write 'export' to topic 'orders' was begun more than 7 days"):
        await begin(stage.instance, topic, ONCE)
    # What was written is remembered for longer than that, by the server's own time.
    assert 7 * DAY < await remembered(stage, topic, ONCE) <= 8 * DAY
    assert await append(stage.instance, topic, Write("export", 1), [chunk(0, 1)]) == Appended(1)


async def test_a_batch_that_was_overtaken_cannot_be_repeated(stage: Stage) -> None:
    topic = await stage.topic()
    for batch in (3, 4, 12):
        await begin(stage.instance, topic, Write("q", batch, goes_on=True))
    with pytest.raises(
        ConfigError, match="batch 4 of the write 'q' to topic 'orders' cannot be repeated: batch 12 has"
    ):
        await begin(stage.instance, topic, Write("q", 4, goes_on=True))
    assert await begin(stage.instance, topic, Write("q", 12, goes_on=True)) == 1


async def test_growth_does_not_change_a_batch_that_has_begun(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic(partitions=2)
    assert await begin(stage.instance, topic, ONCE) == 2
    await hurried(clock, grow(stage.instance, stage.registry, "orders", 5))
    grown = await stage.registry.fetch("orders")
    assert grown.partitions == 5
    assert await begin(stage.instance, grown, ONCE) == 2
    assert await begin(stage.instance, grown, Write("export", 1)) == 5


async def test_the_batch_before_is_remembered_for_an_hour_more(stage: Stage) -> None:
    topic = await stage.topic(partitions=2)
    first, second = (Write("q", batch, goes_on=True) for batch in (0, 1))
    await append(stage.instance, topic, first, [chunk(0, 1), chunk(0, 1, partition=1)])
    assert await remembered(stage, topic, first) > 7 * DAY
    await append(stage.instance, topic, second, [chunk(0, 2)])
    assert 0 < await remembered(stage, topic, first) <= HOUR
    assert await remembered(stage, topic, second) > 7 * DAY
    # A task of it that was given up writes on for a while, and still adds nothing twice.
    late = Appender(stage.instance, topic, first, 0)
    await late.put(chunk(0, 1))
    assert await late.drain() == Appended(0, 1)


async def test_a_single_write_leaves_other_batches_alone_and_runs_out(stage: Stage) -> None:
    topic = await stage.topic()
    await append(stage.instance, topic, ONCE, [chunk(0, 1)])
    await append(stage.instance, topic, Write("export", 1), [chunk(0, 1)])
    assert await remembered(stage, topic, ONCE) > 7 * DAY
    key = stage.instance.keys.write("orders", ONCE.known_as(topic))
    assert 7 * DAY < await stage.call(key, "PTTL", key) <= 8 * DAY


async def test_the_number_of_a_query_s_batch_does_not_run_out(stage: Stage) -> None:
    topic = await stage.topic()
    query = Write("q", 1, goes_on=True)
    await begin(stage.instance, topic, query)
    key = stage.instance.keys.write("orders", query.known_as(topic))
    assert await stage.call(key, "PTTL", key) == -1


async def test_what_was_forgotten_is_remembered_for_an_hour(stage: Stage) -> None:
    topic = await stage.topic(partitions=3)
    await append(stage.instance, topic, ONCE, [chunk(0, 1), chunk(0, 2, partition=2)])
    await forget(stage.instance, topic, ONCE, 3)
    assert [0 < await remembered(stage, topic, ONCE, partition) <= HOUR for partition in (0, 2)] == [True, True]
    assert await remembered(stage, topic, ONCE, 1) == -2
    key = stage.instance.keys.write("orders", ONCE.known_as(topic))
    assert 0 < await stage.call(key, "PTTL", key) <= HOUR
    assert await append(stage.instance, topic, ONCE, [chunk(0, 1)]) == Appended(0, 1)


async def test_a_topic_that_was_made_again_has_none_of_it(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    await append(stage.instance, topic, ONCE, [chunk(0, 1)])
    await hurried(clock, delete_topic(stage.instance, stage.registry, topic))
    again = await stage.topic()
    assert await append(stage.instance, again, ONCE, [chunk(0, 1)]) == Appended(1)
