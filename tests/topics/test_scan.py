"""Reading by entry IDs: pages, counts, how a partition stands, and whether something was removed unread."""

from __future__ import annotations

import pytest

from conquiet.errors import QueueError
from conquiet.kit.clock import ManualClock
from conquiet.kit.entry_ids import BEGINNING, after, before
from conquiet.topics.options import Retention
from conquiet.topics.outside.scan import End, ends, last_up_to, pages, removed_after
from conquiet.topics.server.group import count_after
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.retention import trim
from conquiet.topics.server.topics import Topic
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from tests.conftest import Server
from tests.rigs.proxy import Proxy
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.cluster_too

LAST = (1 << 64) - 1


async def end_of(stage: Stage, topic: Topic) -> End:
    [end] = await ends(stage.instance, topic)
    return end


async def read(stage: Stage, topic: Topic, since: str, until: str, count: int) -> list[list[str]]:
    stream = stage.stream(topic)
    found = pages(stage.instance, stream, since, until, count)
    return [[id.decode() for id, _ in page] async for page in found]


# --- IDs -------------------------------------------------------------------------------------------------


@pytest.mark.one_node
@pytest.mark.parametrize(
    ("one", "next"),
    [("5-0", "5-1"), (f"5-{LAST}", "6-0"), (BEGINNING, "0-1"), ("7", "7-1")],
)
def test_the_ids_beside_an_id(one: str, next: str) -> None:
    assert after(one) == next
    assert before(next) in (one, f"{one}-0")


@pytest.mark.one_node
def test_nothing_comes_before_the_beginning() -> None:
    assert before(BEGINNING) == BEGINNING


# --- how a partition stands ------------------------------------------------------------------------------


async def test_how_partitions_stand(stage: Stage, server: Server) -> None:
    topic = await stage.topic(partitions=3)
    ids = await stage.add(topic, 5)
    lone = await stage.add(topic, 2, 2)
    stream = stage.stream(topic, 2)
    await stage.call(stream, "XDEL", stream, *lone)
    counts = server.release >= (7, 0)
    assert await ends(stage.instance, topic) == [
        End(ids[-1], ids[0], 5, 5 if counts else None, None),
        End(BEGINNING, None, 0, 0, None),
        End(lone[-1], None, 0, 2 if counts else None, None),
    ]
    assert [end.gone for end in await ends(stage.instance, topic)] == [0 if counts else None, 0, 2 if counts else None]


async def test_what_retention_removed_is_told(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    await trim(stage.instance, topic, 0, Retention(max_len=2))
    end = await end_of(stage, topic)
    assert (end.first, end.length, end.bound) == (ids[3], 2, after(ids[2]))


# --- pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 1_000])
async def test_pages_hold_all_between_two_ids(stage: Stage, count: int) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 10)
    found = await read(stage, topic, ids[1], ids[8], count)
    assert [id for page in found for id in page] == ids[2:9]
    assert all(len(page) == count for page in found[:-1])


async def test_the_first_is_excluded_and_the_last_is_not(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 3)
    assert await read(stage, topic, ids[0], ids[0], 10) == []
    assert await read(stage, topic, before(ids[0]), ids[0], 10) == [[ids[0]]]
    assert await read(stage, topic, BEGINNING, "+", 10) == [ids]


async def test_no_partition_has_no_pages(stage: Stage) -> None:
    topic = await stage.topic()
    assert await read(stage, topic, BEGINNING, "+", 10) == []


async def test_who_stops_reading_leaves_nothing_behind(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 10)
    found = pages(stage.instance, stage.stream(topic), BEGINNING, "+", 2)
    assert [id.decode() for id, _ in await anext(found)] == ids[:2]
    await found.aclose()  # type: ignore[attr-defined]
    assert await read(stage, topic, BEGINNING, "+", 10) == [ids]


@pytest.mark.one_node
async def test_a_page_whose_answer_was_lost_is_asked_for_again(stage: Stage, url: str) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 10)
    async with Proxy(url) as proxy:
        link = Connections(Address.of(proxy.url))
        was_cut = proxy.cut(b"XRANGE", skip=1)
        found = pages(Instance(link, stage.instance.keys), stage.stream(topic), BEGINNING, "+", 3)
        got = [id.decode() async for page in found for id, _ in page]
        await link.aclose()
        assert was_cut.is_set()
    assert got == ids


@pytest.mark.one_node
async def test_what_goes_on_failing_is_an_error(stage: Stage, clock: ManualClock) -> None:
    topic = await stage.topic()
    stream = stage.stream(topic)
    await stage.call(stream, "SET", stream, "no stream")
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await hurried(clock, read(stage, topic, BEGINNING, "+", 10))


@pytest.mark.one_node
async def test_what_is_no_failure_of_the_server_is_an_error_at_once(stage: Stage) -> None:
    topic = await stage.topic()
    with pytest.raises(TypeError):
        await read(stage, topic, BEGINNING, object(), 1)  # type: ignore[arg-type]


# --- counting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 49, 50, 51, 119, 120])
async def test_counting_up_to_a_number(stage: Stage, most: int) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 130)
    stream = stage.stream(topic)
    assert await count_after(stage.instance, stream, ids[9], ids[-1], most) == (most, ids[9 + most])


async def test_counting_where_there_is_less(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 60)
    stream = stage.stream(topic)
    assert await count_after(stage.instance, stream, ids[9], ids[-1], 1_000) == (50, ids[-1])
    assert await count_after(stage.instance, stream, ids[9], ids[19], 1_000) == (10, ids[19])
    assert await count_after(stage.instance, stream, ids[-1], after(ids[-1]), 5) == (0, after(ids[-1]))
    assert await count_after(stage.instance, stream, ids[0], ids[-1], 0) == (0, ids[0])


async def test_counting_in_several_goes(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 4_500)
    stream = stage.stream(topic)
    assert await count_after(stage.instance, stream, BEGINNING, ids[-1], 4_100) == (4_100, ids[4_099])
    assert await count_after(stage.instance, stream, BEGINNING, ids[-1], 9_000) == (4_500, ids[-1])


async def test_the_last_entry_up_to_an_id(stage: Stage) -> None:
    topic = await stage.topic()
    stream = stage.stream(topic)
    assert await last_up_to(stage.instance, stream, "9-9") is None
    for id in ("5-1", "7-0"):
        await stage.call(stream, "XADD", stream, id, "payload", "{}")
    asked = ["5-0", "5-1", "6-0", "7-0", "99-0"]
    assert [await last_up_to(stage.instance, stream, id) for id in asked] == [None, "5-1", "5-1", "7-0", "7-0"]


# --- whether something was removed unread ----------------------------------------------------------------


async def lost(stage: Stage, topic: Topic, since: str, read: int) -> bool:
    end = await end_of(stage, topic)
    count = removed_after(end, since, None if end.added is None else read)
    if end.added is not None:
        assert count is not None
    return count != 0


def is_cautious(server: Server, since: str, first: str) -> bool:
    """Whether an alarm may be false: nobody counts, and there are IDs in between that an entry could have had."""
    return server.release < (7, 0) and first != after(since)


async def test_nothing_was_removed(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    assert not await lost(stage, topic, before(ids[0]), 0)
    assert not await lost(stage, topic, ids[1], 2)
    assert not await lost(stage, topic, ids[-1], 5)


@pytest.mark.parametrize("by", ["retention", "XTRIM"])
async def test_what_was_read_may_be_removed(stage: Stage, server: Server, by: str) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    await remove(stage, topic, by, 2)
    assert await lost(stage, topic, ids[2], 3) is (by == "XTRIM" and is_cautious(server, ids[2], ids[3]))
    assert await lost(stage, topic, ids[0], 1)
    assert await lost(stage, topic, before(ids[0]), 0)


async def test_all_that_was_read_may_be_removed(stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    await remove(stage, topic, "retention", 0)
    assert not await lost(stage, topic, ids[-1], 5)
    await stage.add(topic, 2)
    assert not await lost(stage, topic, ids[-1], 5)
    assert await lost(stage, topic, ids[-2], 4)


async def test_a_server_that_counts_needs_no_notes(stage: Stage, server: Server) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 5)
    await remove(stage, topic, "XTRIM", 0)
    assert not await lost(stage, topic, ids[-1], 5)
    [first, _] = await stage.add(topic, 2)
    assert await lost(stage, topic, ids[-1], 5) is is_cautious(server, ids[-1], first)


@pytest.mark.parametrize("by", ["retention", "XTRIM"])
async def test_all_of_a_partition_that_was_empty_is_removed(stage: Stage, by: str) -> None:
    topic = await stage.topic()
    assert not await lost(stage, topic, BEGINNING, 0)
    await stage.add(topic, 5)
    assert not await lost(stage, topic, BEGINNING, 0)
    await remove(stage, topic, by, 0)
    assert await lost(stage, topic, BEGINNING, 0)


async def test_some_of_a_partition_that_was_empty_is_removed(stage: Stage) -> None:
    topic = await stage.topic()
    await stage.add(topic, 5)
    await remove(stage, topic, "retention", 2)
    assert await lost(stage, topic, BEGINNING, 0)


async def remove(stage: Stage, topic: Topic, by: str, leave: int) -> None:
    stream = stage.stream(topic)
    if by == "XTRIM":
        await stage.call(stream, "XTRIM", stream, "MAXLEN", leave)
    elif leave:
        await trim(stage.instance, topic, 0, Retention(max_len=leave))
    else:
        assert isinstance(stage.instance.clock, ManualClock)
        stage.instance.clock.advance(60)
        await trim(stage.instance, topic, 0, Retention(max_age=30))
    assert len(await stage.ids(topic)) == leave
