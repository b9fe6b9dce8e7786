"""The server's memory fills up in the middle of what takes several commands, before each of them in turn.

What was begun is completed, or is refused with word of how far it came and completed when it is repeated; nothing is
lost, and nothing is done twice.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pytest

from conquiet import (
    Broker,
    JobQueue,
    Outgoing,
    QueueConfig,
    QueueError,
    RedisStore,
    RedisStreamsQueue,
    Retention,
    UnknownTopicError,
)
from conquiet.jobs import chunks
from conquiet.kit.clock import ManualClock
from conquiet.sync import EmbeddedRedis
from conquiet.topics.produce.once import Appender, Chunk, Write, begin
from conquiet.topics.server.dead_letters import forward
from conquiet.topics.server.external_groups import Position, adopt_group
from conquiet.topics.server.group import found_group
from conquiet.topics.server.growth import grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from tests.conftest import CONTRACT_LADDER, Rung
from tests.rigs.asking import ask, entries, keys_like
from tests.rigs.filling import Filling, empty
from tests.rigs.servers import on_a_port_in_sync
from tests.rigs.sizing import IS_FULL
from tests.topics.staging import Stage, hurried

RUNGS = [rung for rung in CONTRACT_LADDER if rung.binary][None if IS_FULL else -1 :]
STEP: Final = 1 if IS_FULL else 2
"""Of the commands of an operation, every how manieth finds the memory full first."""
ORDERS: Final = "orders"


@pytest.fixture(scope="module", params=RUNGS, ids=[rung.name for rung in RUNGS])
def private(request: pytest.FixtureRequest) -> Iterator[EmbeddedRedis]:
    rung: Rung = request.param
    with on_a_port_in_sync(rung.binary) as server:
        yield server


@pytest.fixture
async def own(private: EmbeddedRedis) -> AsyncIterator[EmbeddedRedis]:
    """A server that the test may fill."""
    yield private
    await empty(private.url)


# --- many at once: what was written is known ---------------------------------------------------------------------


async def filling_up(own: EmbeddedRedis, work: Callable[[Filling], Awaitable[bool]]) -> None:
    """Do ``work`` again and again, each time with one more command before memory is full, until nothing is refused."""
    after, was_refused = 0, False
    while True:
        await empty(own.url)
        async with Filling(own.url, after=after) as proxy:
            if await work(proxy):
                assert proxy.refused == []
                break
            assert proxy.refused != []
            was_refused = True
        after += 1
    assert was_refused


async def outcome(work: Awaitable[Any]) -> Any:
    """What ``work`` gives, or the error by which it is refused."""
    try:
        return await work
    except QueueError as error:
        return error


async def test_enqueue_many_tells_what_was_written(own: EmbeddedRedis) -> None:
    async def work(proxy: Filling) -> bool:
        config = QueueConfig(f"q:{secrets.token_hex(4)}", "g", "c")
        queue = RedisStreamsQueue.connect(proxy.url, config)
        told = await outcome(queue.enqueue_many([{"n": number} for number in range(5)]))
        await queue.aclose()
        if not isinstance(told, QueueError):
            return True
        assert "maxmemory" in str(told)
        known = [id for id in told.entry_ids if id is not None]
        assert told.entry_ids == (*known, *[None] * (5 - len(known)))
        assert list(await entries(own.url, config.stream_key)) == known
        return False

    await filling_up(own, work)


@pytest.mark.parametrize("has_ids", [False, True], ids=["plain", "with IDs"])
async def test_a_batch_of_messages_tells_what_was_written(own: EmbeddedRedis, has_ids: bool) -> None:
    messages = [Outgoing(at, key=str(at), message_id=f"m{at}" if has_ids else None) for at in range(6)]

    async def work(proxy: Filling) -> bool:
        namespace = f"t{secrets.token_hex(4)}"
        await empty(own.url)
        async with Broker(own.url, namespace=namespace) as owner:
            await owner.create_topic(ORDERS, partitions=2)
        async with Broker(proxy.url, namespace=namespace) as broker:
            told = await outcome(broker.send_batch(ORDERS, messages))
        assert not isinstance(told, QueueError) or "maxmemory" in str(told)
        written = told.entry_ids if isinstance(told, QueueError) else told
        streams = [Keys(namespace).partition(ORDERS, number) for number in range(2)]
        found = [(partition, id) for partition in range(2) for id in await _ids(own, streams[partition])]
        assert len(written) == 6
        assert Counter(found) == Counter((id.partition, str(id)) for id in written if id is not None)
        return None not in written

    await filling_up(own, work)


async def _ids(own: EmbeddedRedis, stream: str) -> list[str]:
    return [id for id, _ in await ask(own.url, "XRANGE", stream, "-", "+")]


async def test_many_jobs_are_added_in_whole_parts_and_it_is_told_which(
    own: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MOST", 2)

    async def work(proxy: Filling) -> bool:
        async with RedisStore(proxy.url, namespace=f"t{secrets.token_hex(4)}") as store:
            queue = JobQueue(store, "emails")
            told = await outcome(queue.enqueue_many(range(5)))
            if not isinstance(told, QueueError):
                return True
            assert "memory is full" in str(told)
            known = [id for id in told.entry_ids if id is not None]
            assert len(known) % 2 == 0
            assert sum((await queue.counts()).values()) == len(known)
            return False

    await filling_up(own, work)


# --- operations: what was begun is completed ----------------------------------------------------------------------


@dataclass
class Place:
    """A topic that only one try of an operation has; behind a proxy, and past it."""

    own: EmbeddedRedis
    keys: Keys
    clock: ManualClock

    def stage(self, url: str = "") -> Stage:
        instance = Instance(Connections(Address.of(url or self.own.url)), self.keys, self.clock)
        return Stage(instance, Registry(instance))

    def broker(self, url: str = "") -> Broker:
        return Broker(url or self.own.url, namespace=self.keys.namespace, clock=self.clock)


Step: TypeAlias = Callable[[Place, Stage], Awaitable[None]]


@dataclass(frozen=True)
class Operation:
    """What is there before, what is done, and what holds when it is done, at once or by repeating it."""

    prepare: Step
    do: Step
    check: Step
    may_be_refused: bool = True


async def _letters(place: Place, stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.dead(topic, "g", 3)
    await stage.call(stage.stream(topic), "XDEL", stage.stream(topic), ids[0])  # of this one a copy has to be made


async def _replay(place: Place, stage: Stage) -> None:
    async with Broker(stage.instance.link.address, namespace=place.keys.namespace, clock=place.clock) as broker:
        await broker.admin.replay(ORDERS)


async def _all_given_back_once(place: Place, stage: Stage) -> None:
    topic = await stage.registry.fetch(ORDERS)
    held = await stage.acquire(topic, "g")
    fresh, due = await stage.take(held)
    assert (len(fresh), len(due)) == (1, 2)  # the copy, and those whose entries are there
    assert await stage.call("x", "XLEN", place.keys.dead_letters(ORDERS)) == 0


async def _outbox(place: Place, stage: Stage) -> None:
    topic = await stage.topic()
    held = await stage.acquire(topic, "g")
    await stage.add(topic, 5)
    ids, _ = await stage.take(held, 5)
    await stage.bury(held, *ids)


async def _forward(place: Place, stage: Stage) -> None:
    assert await forward(stage.instance, await stage.registry.fetch(ORDERS), 0, "g", 3) == 3
    assert await forward(stage.instance, await stage.registry.fetch(ORDERS), 0, "g") == 2


async def _all_forwarded(place: Place, stage: Stage) -> None:
    assert await stage.call("x", "XLEN", place.keys.dead_letters(ORDERS)) == 5


async def _groups(place: Place, stage: Stage) -> None:
    topic = await stage.topic()
    await stage.join(topic, "g")
    await stage.release(await stage.acquire(topic, "g"))
    await adopt_group(stage.instance, stage.registry, topic, "query", {})
    await stage.add(topic, 3)


async def _grow(place: Place, stage: Stage) -> None:
    if (await stage.registry.fetch(ORDERS)).partitions == 1:
        await hurried(place.clock, grow(stage.instance, stage.registry, ORDERS, 3))


async def _has_grown_with_all_groups(place: Place, stage: Stage) -> None:
    topic = await stage.registry.fetch(ORDERS)
    assert (topic.partitions, topic.next_count) == (3, None)
    for partition in range(3):
        stream = stage.stream(topic, partition)
        assert {row[1] for row in await stage.call(stream, "XINFO", "GROUPS", stream)} == {b"g", b"query"}


async def _plain_topic(place: Place, stage: Stage) -> None:
    await stage.add(await stage.topic(partitions=2), 3)


async def _adopt(place: Place, stage: Stage) -> None:
    topic = await stage.registry.fetch(ORDERS)
    await adopt_group(stage.instance, stage.registry, topic, "query", {0: Position("1-1")})


async def _is_adopted(place: Place, stage: Stage) -> None:
    topic = await stage.registry.fetch(ORDERS)
    assert topic.spark_groups == {"query"}
    assert topic.claimed_groups == set()
    for partition in range(2):
        stream = stage.stream(topic, partition)
        assert [row[1] for row in await stage.call(stream, "XINFO", "GROUPS", stream)] == [b"query"]


async def _delete(place: Place, stage: Stage) -> None:
    async with Broker(stage.instance.link.address, namespace=place.keys.namespace, clock=place.clock) as broker:
        await broker.admin.delete_group(ORDERS, "g", force=True)
        await broker.admin.reset_group(ORDERS, "other", "latest")
        await hurried(place.clock, broker.admin.delete_topic(ORDERS, force=True))


async def _to_be_deleted(place: Place, stage: Stage) -> None:
    await _outbox(place, stage)
    topic = await stage.registry.fetch(ORDERS)
    await stage.join(topic, "g")
    await stage.create_group(topic, "other")


async def _is_deleted(place: Place, stage: Stage) -> None:
    with pytest.raises(UnknownTopicError):
        await stage.registry.fetch(ORDERS)
    left = await keys_like(place.own.url, f"{place.keys.namespace}:*")
    assert all(":lease:" in key or key.endswith(":generation") for key in left), left  # these run out


async def _write(place: Place, stage: Stage) -> None:
    topic, write = await stage.registry.fetch(ORDERS), Write("w")
    await begin(stage.instance, topic, write)
    appender = Appender(stage.instance, topic, write, 0)
    try:
        for number in range(3):
            await appender.put(Chunk(1, number, bytearray(b"0"), [str(number)]))
        await hurried(place.clock, appender.drain())
    finally:
        await appender.aclose()


async def _all_written_once(place: Place, stage: Stage) -> None:
    assert len(await stage.ids(await stage.registry.fetch(ORDERS), 1)) == 3


async def _found(place: Place, stage: Stage) -> None:
    await found_group(stage.instance, stage.registry, await stage.registry.fetch(ORDERS), "g", "0-0")


async def _is_found(place: Place, stage: Stage) -> None:
    for stream in (await stage.registry.fetch(ORDERS)).streams(place.keys):
        assert [row[1] for row in await stage.call(stream, "XINFO", "GROUPS", stream)] == [b"g"]


async def _nothing(place: Place, stage: Stage) -> None:
    pass


async def _create(place: Place, stage: Stage) -> None:
    await stage.registry.create(ORDERS, 2, Retention())


async def _is_there(place: Place, stage: Stage) -> None:
    assert (await stage.registry.fetch(ORDERS)).partitions == 2
    assert await stage.registry.names() == [ORDERS]


OPERATIONS: Final = {
    "replay": Operation(_letters, _replay, _all_given_back_once),
    "forward": Operation(_outbox, _forward, _all_forwarded, may_be_refused=False),
    "grow": Operation(_groups, _grow, _has_grown_with_all_groups),
    "adopt": Operation(_plain_topic, _adopt, _is_adopted),
    "delete": Operation(_to_be_deleted, _delete, _is_deleted, may_be_refused=False),
    "write rows": Operation(_plain_topic, _write, _all_written_once),
    "make a group": Operation(_plain_topic, _found, _is_found),
    "create": Operation(_nothing, _create, _is_there),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_what_was_begun_is_completed_when_there_is_room_again(name: str, own: EmbeddedRedis) -> None:
    operation, after, refused = OPERATIONS[name], 0, 0
    while True:
        place = Place(own, Keys(f"t{secrets.token_hex(6)}"), ManualClock())
        stage = place.stage()
        await operation.prepare(place, stage)
        async with Filling(own.url, after=after) as proxy:
            through = place.stage(proxy.url)
            error = await outcome(operation.do(place, through))
            await through.instance.link.aclose()
            assert error is None or "maxmemory" in str(error)
            assert error is None or operation.may_be_refused, proxy.refused
            refused += error is not None
            is_last = proxy.commands <= after
        await empty(own.url)
        stage.registry.forget(ORDERS)
        if operation.may_be_refused:
            await operation.do(place, stage)  # whether it was refused or not, it can be repeated
        stage.registry.forget(ORDERS)
        await operation.check(place, stage)
        await stage.instance.link.aclose()
        if is_last:
            break
        after += STEP
    assert (refused > 0) == operation.may_be_refused
