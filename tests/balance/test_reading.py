"""Reading the data of an owned stream: where it begins, what it gives, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import QueueMessage
from conquiet.balance import StreamLease
from conquiet.errors import ConfigError, QueueError, StreamNotOwnedError
from tests.balance.crew import Crew
from tests.rigs.asking import round_trips
from tests.rigs.waiting import LONG, eventually

pytestmark = pytest.mark.cluster_too


class Data:
    """A stream of data that its owner is to read."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.name = f"data:{crew.service}"

    async def write(self, *numbers: int) -> list[str]:
        return [str(await self.crew.ask("XADD", self.name, "*", "n", number)) for number in numbers]

    async def owner(self, consumer: str = "a") -> StreamLease:
        """A lease of it in the hands of somebody new."""
        member = await self.crew.join(consumer)
        await member.balancer.add_stream(self.name)
        await member.owns(self.name)
        return member.balancer.owned[self.name]


@pytest.fixture
def data(crew: Crew) -> Data:
    return Data(crew)


def numbers(messages: list[QueueMessage]) -> list[int]:
    return [int(message.fields[1]) for message in messages]


async def handed_over(crew: Crew, data: Data, consumer: str) -> StreamLease:
    """The lease of the next owner, after the last one was killed."""
    await crew.die(crew.members[-1])
    return await data.owner(consumer)


async def first_of(lease: StreamLease, count: int) -> list[QueueMessage]:
    found: list[QueueMessage] = []
    async with asyncio.timeout(LONG):
        async for message in lease.messages():
            found.append(message)
            if len(found) == count:
                break
    return found


async def test_read_gives_what_there_is_in_pages(data: Data) -> None:
    ids = await data.write(*range(5))
    lease = await data.owner()
    first = await lease.read(3)
    assert (numbers(first), [message.id for message in first]) == ([0, 1, 2], ids[:3])
    assert {message.stream for message in first} == {data.name}
    assert numbers(await lease.read(3)) == [3, 4]
    assert await lease.read(3) == []
    await data.write(5)
    assert numbers(await lease.read()) == [5]


async def test_read_waits_for_up_to_block_ms(crew: Crew, data: Data) -> None:
    lease = await data.owner()
    assert await lease.read(block_ms=1) == []
    reading = asyncio.ensure_future(lease.read(block_ms=10_000))
    await round_trips(crew.url)
    assert not reading.done()
    await data.write(7)
    assert numbers(await reading) == [7]


async def test_entries_of_any_shape_are_given_as_they_are(crew: Crew, data: Data) -> None:
    await crew.ask("XADD", data.name, "*", "a", "1", "b", "ü✓", "", "")
    await crew.ask("XADD", data.name, "*", b"\xff", b"\x00\xfe")  # type: ignore[arg-type]
    one, other = await (await data.owner()).read()
    assert one.fields == (b"a", b"1", b"b", "ü✓".encode(), b"", b"")
    assert other.fields == (b"\xff", b"\x00\xfe")


async def test_the_next_owner_goes_on_behind_the_last_commit(crew: Crew, data: Data) -> None:
    await data.write(*range(6))
    lease = await data.owner()
    messages = await lease.read()
    await lease.commit(messages[2])
    lease = await handed_over(crew, data, "b")
    assert numbers(await lease.read(2)) == [3, 4]
    await lease.commit(messages[3].id)
    lease = await handed_over(crew, data, "c")
    assert numbers(await lease.read()) == [4, 5]


async def test_what_was_not_committed_is_read_again(crew: Crew, data: Data) -> None:
    await data.write(0, 1)
    await (await data.owner()).read()
    assert numbers(await (await handed_over(crew, data, "b")).read()) == [0, 1]


async def test_a_finished_stream_that_is_added_again_begins_at_its_first_entry(crew: Crew, data: Data) -> None:
    await data.write(0, 1)
    lease = await data.owner()
    await lease.commit((await lease.read())[-1])
    await crew.members[-1].balancer.done_stream(data.name)
    await crew.members[-1].balancer.aclose()
    assert numbers(await (await data.owner("b")).read()) == [0, 1]


async def test_asking_for_the_next_message_commits_the_one_before(crew: Crew, data: Data) -> None:
    await data.write(*range(5))
    assert numbers(await first_of(await data.owner(), 3)) == [0, 1, 2]
    assert numbers(await (await handed_over(crew, data, "b")).read()) == [2, 3, 4]


@pytest.mark.slow
async def test_messages_come_page_by_page_and_then_as_they_are_written(crew: Crew, data: Data) -> None:
    for start in range(0, 250, 50):
        await asyncio.gather(*(data.write(n) for n in range(start, start + 50)))
    lease = await data.owner()
    found = await first_of(lease, 250)
    assert sorted(numbers(found)) == list(range(250))
    later = asyncio.ensure_future(first_of(lease, 2))
    await round_trips(crew.url)
    await data.write(1000)
    assert numbers(await later) == [numbers(found)[-1], 1000], "the one that was not committed comes again"


async def test_the_last_message_is_committed_while_waiting_for_more(crew: Crew, data: Data) -> None:
    [id] = await data.write(0)
    lease = await data.owner()
    reading = asyncio.ensure_future(first_of(lease, 2))
    await eventually(lambda: _is_at(crew, data, id), "the position to move")
    reading.cancel()
    await asyncio.wait([reading])


async def _is_at(crew: Crew, data: Data, id: str) -> bool:
    return bool(await crew.ask("HGET", crew.keys.positions, data.name) == id)


@pytest.mark.parametrize("how", ["release", "done", "lost", "close"])
async def test_a_reader_that_waits_ends_when_the_stream_is_gone(crew: Crew, data: Data, how: str) -> None:
    lease = await data.owner()
    balancer = crew.members[-1].balancer

    async def read() -> list[int]:
        return [int(message.fields[1]) async for message in lease.messages()]

    messages, page = asyncio.ensure_future(read()), asyncio.ensure_future(lease.read(block_ms=60_000))
    await round_trips(crew.url)
    if how == "release":
        await balancer.release_stream(data.name)
    elif how == "done":
        await balancer.done_stream(data.name)
    elif how == "close":
        await balancer.aclose()
    else:
        await crew.ask("ZADD", crew.keys.leases, 1, data.name)
        await (await crew.join("thief")).owns(data.name)
        crew.clock.advance(5)
    async with asyncio.timeout(4):  # less than a wait takes by itself
        assert await messages == []
        with pytest.raises(StreamNotOwnedError, match=data.name):
            await page
    assert not lease.owned


async def test_a_loop_over_messages_ends_without_a_commit_when_the_stream_was_lost_meanwhile(
    crew: Crew, data: Data
) -> None:
    await data.write(0, 1)
    lease = await data.owner()
    seen = []
    async for message in lease.messages():
        seen.append(message)
        await crew.members[-1].balancer.release_stream(data.name)
    assert numbers(seen) == [0]
    assert await crew.ask("HGET", crew.keys.positions, data.name) is None


async def test_a_zombie_cannot_move_the_position(crew: Crew, data: Data) -> None:
    await data.write(*range(3))
    zombie = await data.owner()
    messages = await zombie.read()
    await crew.ask("ZADD", crew.keys.leases, 1, data.name)
    heir = await crew.join("heir")
    await heir.owns(data.name)
    lease = heir.balancer.owned[data.name]
    await lease.commit(messages[0])
    with pytest.raises(StreamNotOwnedError, match=data.name):
        await zombie.commit(messages[2])
    assert await _is_at(crew, data, messages[0].id)


@pytest.mark.parametrize(
    "id", ["garbage", "$", "+", "-", "0-0-0", "1-", "-1", "1-x", " 1-1", "²-1", "99999999999999999999-0"]
)
async def test_only_an_entry_id_can_be_committed(crew: Crew, data: Data, id: str) -> None:
    await data.write(0)
    lease = await data.owner()
    with pytest.raises(ConfigError, match="message"):
        await lease.commit(id)
    assert await crew.positions() == {}


@pytest.mark.parametrize("value", [None, "", 5, b"1-1", ["1-1"], "\ud800"])
async def test_what_is_no_message_cannot_be_committed(data: Data, value: object) -> None:
    lease = await data.owner()
    with pytest.raises(ConfigError, match="message"):
        await lease.commit(value)  # type: ignore[arg-type]


async def test_a_message_of_another_stream_cannot_be_committed(data: Data) -> None:
    lease = await data.owner()
    with pytest.raises(ConfigError, match=data.name):
        await lease.commit(QueueMessage("other", "", "1-1", ()))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"count": 0}, "count"),
        ({"count": True}, "count"),
        ({"count": 1.5}, "count"),
        ({"block_ms": 0}, "block_ms"),
        ({"block_ms": "1"}, "block_ms"),
    ],
)
async def test_bad_arguments_of_read_are_refused(data: Data, arguments: dict[str, object], named: str) -> None:
    lease = await data.owner()
    with pytest.raises(ConfigError, match=rf"{named} .*not {next(iter(arguments.values()))!r}"):
        await lease.read(**arguments)  # type: ignore[arg-type]


async def test_a_key_that_is_no_stream_is_an_error_of_the_backend(crew: Crew, data: Data) -> None:
    await crew.ask("SET", data.name, "text")
    lease = await data.owner()
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await lease.read()
    assert lease.owned


@pytest.fixture(autouse=True)
async def _tidy(crew: Crew, data: Data) -> AsyncIterator[None]:
    yield
    await crew.ask("DEL", data.name)
