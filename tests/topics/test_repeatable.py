"""Writes that may be repeated: what was written once stays written once, whatever is sent again, by whom and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from conquiet import ConfigError, QueueError, TopicFullError
from conquiet.kit.clock import ManualClock
from conquiet.topics.operate.removal import delete_topic
from conquiet.topics.options import Retention
from conquiet.topics.produce.once import Appended, Appender, Chunk, Write, begin, finish, forget, outcome
from conquiet.topics.server.growth import grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry, Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.rigs.proxy import Proxy
from tests.topics.staging import Stage, hurried

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]

HOUR: Final = 3_600_000
DAY: Final = 24 * HOUR
ONCE: Final = Write("export")
BY_ID: Final = Write("export", by_id=True)


def chunk(number: int, *payloads: object, partition: int = 0, ids: Sequence[str] = (), key: str | None = None) -> Chunk:
    """Rows that have a payload each, an ID each if ``ids`` are given, and one key for all."""
    made = Chunk(partition, number)
    for at, payload in enumerate(payloads):
        values = [str(payload)]
        kind = 48
        if key is not None:
            values.append(key)
            kind += 1
        if ids:
            values.append(ids[at])
            kind += 4
        made.kinds.append(kind)
        made.values += values
    return made


def by_ids(*ids: str, number: int = 0, partition: int = 0) -> Chunk:
    """Rows whose payloads are their IDs."""
    return chunk(number, *(f'"{id}"' for id in ids), partition=partition, ids=ids)


async def append(instance: Instance, topic: Topic, write: Write, chunks: Iterable[Chunk], part: int = 0) -> Appended:
    """Write one part, as one task does."""
    await begin(instance, topic, write)
    appender = Appender(instance, topic, write, part, random.Random(1))
    try:
        for made in chunks:
            await appender.put(made)
        return await appender.drain()
    finally:
        await appender.aclose()


async def rows(stage: Stage, topic: Topic, partition: int = 0) -> list[dict[str, str]]:
    """What is in a partition, as the fields of its entries."""
    stream = stage.stream(topic, partition)
    found = []
    for _, fields in await stage.call(stream, "XRANGE", stream, "-", "+"):
        words = [word.decode() for word in fields]
        found.append(dict(zip(words[::2], words[1::2], strict=True)))
    return found


async def payloads(stage: Stage, topic: Topic, partition: int = 0) -> list[str]:
    return [row["payload"] for row in await rows(stage, topic, partition)]


async def remembered(stage: Stage, topic: Topic, write: Write, partition: int = 0) -> int:
    """For how many milliseconds a partition knows yet what the batch has written; -2 if it does not."""
    stream = stage.stream(topic, partition)
    return int(
        await stage.call(stream, "PTTL", stage.instance.keys.written(stream, write.known_as(topic), write.batch))
    )


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
    first = replace(ONCE, goes_on=True)
    await append(stage.instance, topic, first, [chunk(0, 1)])
    clock.advance(7 * DAY / 1000 - 60)
    assert await append(stage.instance, topic, first, [chunk(0, 1)]) == Appended(0, 1)
    clock.advance(61)
    with pytest.raises(ConfigError, match="batch 0 of the write 'export' to topic 'orders' was begun more than 7 days"):
        await begin(stage.instance, topic, first)
    # What was written is remembered for longer than that, by the server's own time.
    assert 7 * DAY < await remembered(stage, topic, first) <= 8 * DAY
    assert await append(stage.instance, topic, Write("export", 1), [chunk(0, 1)]) == Appended(1)


async def test_an_older_batch_goes_on_if_rows_may_be_there_twice(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    first = replace(ONCE, goes_on=True)
    await append(stage.instance, topic, first, [chunk(0, 1)])
    clock.advance(9 * DAY / 1000)
    with pytest.raises(ConfigError, match="acceptDuplicates=true goes on with it, and may write rows again"):
        await begin(stage.instance, topic, first)
    late = replace(first, is_late=True)
    assert await append(stage.instance, topic, late, [chunk(0, 1), chunk(1, 2)]) == Appended(1, 1)
    assert await begin(stage.instance, topic, first) == 1  # its time begins anew
    with pytest.raises(ConfigError, match="cannot be repeated with them"):
        await begin(stage.instance, topic, replace(late, by_id=True))


@pytest.mark.parametrize("size", [0, 31, 32, 300, 70_000])
async def test_payloads_of_bytes_are_written_as_they_are(stage: Stage, size: int) -> None:
    topic = await stage.topic()
    payload = bytes(n % 256 for n in range(size))
    made = Chunk(0, 0)
    for key in ("a", "b"):
        made.kinds.append(49)
        made.values += [payload, key]
    assert await append(stage.instance, topic, ONCE, [made]) == Appended(2)
    stream = stage.stream(topic, 0)
    found = await stage.call(stream, "XRANGE", stream, "-", "+")
    assert [(fields[1], fields[5]) for _, fields in found] == [(payload, b"a"), (payload, b"b")]


async def test_what_a_batch_has_written_is_told_once_it_is_finished(stage: Stage) -> None:
    topic = await stage.topic()
    assert await outcome(stage.instance, topic, ONCE) is None
    await append(stage.instance, topic, ONCE, [chunk(0, 1)])
    assert await outcome(stage.instance, topic, ONCE) is None
    await finish(stage.instance, topic, ONCE, 5, 2)
    assert await outcome(stage.instance, topic, ONCE) == (5, 2)
    await begin(stage.instance, topic, replace(ONCE, batch=1))
    assert await outcome(stage.instance, topic, replace(ONCE, batch=1)) is None


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
    assert 0.9 * DAY < await remembered(stage, topic, ONCE) <= DAY  # only the tasks of one run can bring it again
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


# --- retention --------------------------------------------------------------------------------------------


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


# --- a way that breaks ------------------------------------------------------------------------------------


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def far(proxy: Proxy, keys: Keys, clock: ManualClock) -> AsyncIterator[Instance]:
    """The same place, reached through the proxy, where the scripts are known already."""
    link = Connections(Address.of(proxy.url))
    instance = Instance(link, keys, clock)
    topic = await Registry(instance).create("warm", 1, Retention())
    await append(instance, topic, ONCE, [chunk(0, 1)])
    yield instance
    await link.aclose()


@pytest.mark.one_node
@pytest.mark.parametrize("by_id", [False, True])
async def test_an_answer_that_is_lost_adds_nothing_twice(
    stage: Stage, far: Instance, proxy: Proxy, clock: ManualClock, by_id: bool
) -> None:
    topic = await stage.topic(partitions=2)
    write, made = Write("export", by_id=by_id), []
    for number in range(12):
        names = [f"{number}-{at}" for at in range(5)]
        made.append(by_ids(*names, number=number // 2, partition=number % 2))
    lost = [proxy.cut(stage.stream(topic, at % 2).encode(), skip=skip) for at, skip in enumerate((0, 1, 2, 5))]
    done = await hurried(clock, append(far, topic, write, made))
    assert all(cut.is_set() for cut in lost)
    assert done.rows + done.repeated == 60
    assert done.repeated >= 5
    assert done.differing == 0
    for partition in (0, 1):
        wanted = [f'"{number}-{at}"' for number in range(partition, 12, 2) for at in range(5)]
        assert await payloads(stage, topic, partition) == wanted


@pytest.mark.one_node
async def test_a_server_that_stays_away_is_told_of(
    stage: Stage, far: Instance, proxy: Proxy, clock: ManualClock
) -> None:
    topic = await stage.topic(partitions=2)
    await begin(far, topic, ONCE)
    appender = Appender(far, topic, ONCE, 0)
    await appender.put(chunk(0, 1))
    await appender.drain()
    proxy.shut()
    before = proxy.accepted

    async def go_on() -> None:
        for number in range(1, 10):
            await appender.put(chunk(number, number))

    with pytest.raises(QueueError, match=f"at 127.0.0.1:{proxy.port}: "):
        await hurried(clock, go_on())
    assert proxy.accepted - before == 7  # and one try on the connection that it had
    # It has failed, and does nothing more.
    for refused in (appender.put(chunk(0, 1, partition=1)), appender.drain()):
        with pytest.raises(QueueError):
            await refused
    await appender.aclose()
    proxy.reopen()
    assert await append(far, topic, ONCE, [chunk(0, 1), chunk(1, 1)]) == Appended(1, 1)


@pytest.mark.one_node
async def test_one_chunk_of_a_partition_is_under_way_and_few_wait(stage: Stage, far: Instance, proxy: Proxy) -> None:
    topic = await stage.topic(partitions=2)
    await begin(far, topic, ONCE)
    appender = Appender(far, topic, ONCE, 0)
    hold = proxy.hold(stage.stream(topic, 0).encode())
    for number in range(4):
        await appender.put(chunk(number, f'"row-{number}"'))
    await hold.caught.wait()
    fifth = asyncio.create_task(appender.put(chunk(4, '"row-4"')))
    await appender.put(chunk(0, '"beside"', partition=1))
    assert proxy.count(b'"row-0"') == 1
    assert proxy.count(b'"row-1"') == 0
    assert not fifth.done()
    hold.release()
    await fifth
    assert await appender.drain() == Appended(6)
    assert await payloads(stage, topic) == [f'"row-{number}"' for number in range(5)]


@pytest.mark.one_node
async def test_closing_gives_up_what_waits(stage: Stage, far: Instance, proxy: Proxy) -> None:
    topic = await stage.topic()
    await begin(far, topic, ONCE)
    appender = Appender(far, topic, ONCE, 0)
    hold = proxy.hold(stage.stream(topic).encode())
    for number in range(3):
        await appender.put(chunk(number, number))
    await hold.caught.wait()
    await appender.aclose()
    hold.release()
    assert await payloads(stage, topic) == ["0"]
    done: Any = await append(stage.instance, topic, ONCE, [chunk(number, number) for number in range(3)])
    assert done == Appended(2, 1)
