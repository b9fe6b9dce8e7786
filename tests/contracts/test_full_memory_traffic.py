"""Producers and consumers of every room go through a time in which the server's memory is full.

What was accepted is handled once, meanwhile or afterwards; what could not be accepted was refused with word of it; who
owns something keeps it, and can give it up; and who comes meanwhile to what is there can work.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pytest

from conquiet import (
    Broker,
    Job,
    JobQueue,
    JobState,
    QueueConfig,
    QueueConsumer,
    QueueError,
    RedisStore,
    RedisStreamsQueue,
    StreamLease,
)
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.sync import EmbeddedRedis
from conquiet.topics.server.external_groups import Position, adopt_group
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import JobKeys, Keys
from tests.balance.crew import Crew
from tests.conftest import CONTRACT_LADDER, Rung
from tests.jobs.working import Gate, queue_in, working
from tests.rigs.asking import ask, pending
from tests.rigs.filling import empty, fill
from tests.rigs.servers import on_a_port_in_sync
from tests.rigs.sizing import IS_FULL
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, impatient
from tests.topics.staging import Stage, hurried

pytestmark = pytest.mark.guarantee

RUNGS = [rung for rung in CONTRACT_LADDER if rung.binary][None if IS_FULL else -1 :]
MANY: Final = 200 if IS_FULL else 40
"""Messages that are accepted before, and again after, the memory is full."""
TTL: Final = 15.0
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


@pytest.fixture
def keys() -> Keys:
    return Keys(f"t{secrets.token_hex(6)}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def stage(own: EmbeddedRedis, keys: Keys, clock: ManualClock) -> AsyncIterator[Stage]:
    link = Connections(Address.of(own.url))
    instance = Instance(link, keys, clock)
    yield Stage(instance, Registry(instance))
    await link.aclose()


# --- traffic ------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What is sent and handled in one room."""

    send: Callable[[int], Awaitable[Any]]
    handled: Counter[int]
    accepted: list[int] = field(default_factory=list)
    is_drained_when_full: bool = True
    """Whether what was accepted is handled also as long as memory is full."""
    _next: int = 0

    async def accept(self, count: int) -> None:
        for _ in range(count):
            self._next += 1
            await self.send(self._next)
            self.accepted.append(self._next)

    async def refuse(self, count: int) -> None:
        for _ in range(count):
            self._next += 1
            with pytest.raises(QueueError, match="maxmemory"):
                await self.send(self._next)

    async def are_all_handled(self) -> bool:
        return set(self.handled) >= set(self.accepted)


@asynccontextmanager
async def of_queue(url: str, clock: ManualClock) -> AsyncIterator[Traffic]:
    handled: Counter[int] = Counter()
    config = QueueConfig(f"q:{secrets.token_hex(6)}", "group", "consumer", block_ms=100)

    async def consume(consumer: QueueConsumer) -> None:
        async for message in consumer.iter_messages():
            handled[message.payload["n"]] += 1
            await consumer.ack(message)

    async with RedisStreamsQueue.connect(url, config) as queue:
        async with QueueConsumer(queue, handle_signals=False) as consumer:
            task = asyncio.create_task(consume(consumer))
            yield Traffic(lambda number: queue.enqueue({"n": number}), handled)
            consumer.stop()
            await task
        assert await pending(url, config.stream_key, config.consumer_group) == []


@asynccontextmanager
async def of_topics(url: str, clock: ManualClock) -> AsyncIterator[Traffic]:
    handled: Counter[int] = Counter()

    async def handle(message: Message) -> None:
        handled[message.payload] += 1

    async with Broker(url, namespace=f"t{secrets.token_hex(6)}", clock=clock) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        async with broker.subscribe(ORDERS, group="g", handler=handle, options=impatient()):
            yield Traffic(lambda number: broker.send(ORDERS, number, key=str(number)), handled)


@asynccontextmanager
async def of_balance(url: str, clock: ManualClock) -> AsyncIterator[Traffic]:
    handled: Counter[int] = Counter()

    async def handle(stream: str, lease: StreamLease) -> None:
        handled[int(stream)] += 1

    crew = Crew(url, clock)
    members = [await crew.running(name, handle) for name in ("a", "b")]
    yield Traffic(lambda number: members[0].balancer.add_stream(str(number)), handled)
    await crew.aclose()


@asynccontextmanager
async def of_jobs(url: str, clock: ManualClock) -> AsyncIterator[Traffic]:
    handled: Counter[int] = Counter()

    async def handle(job: Job) -> None:
        handled[job.payload] += 1

    async with RedisStore(url, clock=clock) as store:
        queue = queue_in(store)
        async with working(queue, handle, concurrency=4):
            yield Traffic(queue.enqueue, handled, is_drained_when_full=False)
        assert (await queue.counts())[JobState.IN_FLIGHT] == 0


Room: TypeAlias = Callable[[str, ManualClock], AbstractAsyncContextManager[Traffic]]


@pytest.mark.parametrize("room", [of_queue, of_topics, of_balance, of_jobs], ids=lambda room: room.__name__[3:])
async def test_all_that_was_accepted_is_handled_once_and_all_goes_on_when_there_is_room(
    room: Room, own: EmbeddedRedis, clock: ManualClock
) -> None:
    async with room(own.url, clock) as traffic:
        await traffic.accept(MANY)
        await fill(own.url)
        await traffic.refuse(10)
        if traffic.is_drained_when_full:
            await eventually(traffic.are_all_handled, "what was accepted to be handled while memory is full")
        await empty(own.url)

        async def is_done() -> bool:
            clock.advance(0.2)  # whoever was refused waits before it asks again
            return await traffic.are_all_handled()

        await eventually(is_done, "what was accepted to be handled")
        await traffic.accept(MANY)
        await eventually(is_done, "the others")
    assert traffic.handled == Counter(traffic.accepted)


# --- who owns something -----------------------------------------------------------------------------------------


async def _outlive(clock: ManualClock, until: Callable[[], Awaitable[list[int]]]) -> None:
    """Let the time of two leases pass, and each be renewed in between."""
    for _ in range(6):
        before = await until()
        clock.advance(TTL / 3 + 0.5)

        async def are_renewed(before: list[int] = before) -> bool:
            return all(now > then for now, then in zip(await until(), before, strict=True))

        await eventually(are_renewed, "a renewal of each lease")


async def test_partitions_stay_with_their_owners_however_long_memory_is_full(
    own: EmbeddedRedis, stage: Stage, clock: ManualClock
) -> None:
    keys, options = stage.instance.keys, impatient(lease_ttl=TTL)
    leases = [keys.lease(keys.partition(ORDERS, index), "g") for index in range(2)]

    async def owners() -> list[Any]:
        return [await ask(own.url, "HMGET", lease, "owner", "epoch") for lease in leases]

    async def until() -> list[int]:
        return [int(await ask(own.url, "HGET", lease, "until_ms")) for lease in leases]

    async def are_shared() -> bool:
        return len({owner for owner, _ in await owners() if owner}) == 2

    async with Broker(own.url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        one, other = (broker.subscribe(ORDERS, group="g", handler=Recorder(), options=options) for _ in range(2))
        async with one, other:
            await eventually(are_shared, "one partition each")
            before = await owners()
            await fill(own.url)
            await _outlive(clock, until)
            assert await owners() == before


async def test_a_job_stays_with_its_worker_however_long_memory_is_full(own: EmbeddedRedis, clock: ManualClock) -> None:
    gate = Gate()
    async with RedisStore(own.url, clock=clock) as store:
        queue = JobQueue(store, f"w-{secrets.token_hex(6)}", lease_ttl=TTL)
        id, leases = await queue.enqueue("long"), JobKeys(queue.name, "").leases

        async def until() -> list[int]:
            return [int(await ask(own.url, "ZSCORE", leases, id))]

        async with working(queue, gate):
            await gate.entered(1)
            await fill(own.url)
            await _outlive(clock, until)
            gate.open()
            job = await queue.wait(id, 30)
    assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_a_partition_is_handed_over_at_once_while_memory_is_full(
    own: EmbeddedRedis, keys: Keys, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever joined looks again when it is told to, and not only when its time for that has come."""
    options = impatient(lease_ttl=3000.0)  # its time for that comes with the heartbeat, a thousand seconds later
    async with Broker(own.url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        async with broker.subscribe(ORDERS, group="g", handler=Recorder(), options=options) as first:
            await eventually(lambda: first.owned == {ORDERS: (0, 1)}, "both partitions")
            await fill(own.url)
            with caplog.at_level(logging.WARNING):
                async with broker.subscribe(ORDERS, group="g", handler=Recorder(), options=options) as second:
                    await eventually(lambda: len(second.owned[ORDERS]) == len(first.owned[ORDERS]) == 1, "one each")
    assert "hand partition" not in caplog.text


# --- who comes meanwhile ----------------------------------------------------------------------------------------


async def test_a_queue_whose_group_is_there_is_read_and_acknowledged_while_memory_is_full(own: EmbeddedRedis) -> None:
    config = QueueConfig(f"q:{secrets.token_hex(6)}", "group", "consumer", block_ms=100)
    async with RedisStreamsQueue.connect(own.url, config) as queue:
        await queue.enqueue({"n": 1})
    await fill(own.url)
    async with RedisStreamsQueue.connect(own.url, config) as queue:
        await queue.ack(*await queue.read())
        assert await pending(own.url, config.stream_key, config.consumer_group) == []
        with pytest.raises(QueueError, match="maxmemory"):
            await queue.enqueue({"n": 2})


async def test_a_queue_whose_group_is_not_there_cannot_be_opened_while_memory_is_full(own: EmbeddedRedis) -> None:
    config = QueueConfig(f"q:{secrets.token_hex(6)}", "group", "consumer", block_ms=100)
    await fill(own.url)
    with pytest.raises(QueueError, match="maxmemory"):
        async with RedisStreamsQueue.connect(own.url, config):
            pass


async def test_a_topic_that_is_there_can_be_created_again_while_memory_is_full(own: EmbeddedRedis, keys: Keys) -> None:
    """As whoever starts does that wants to be sure of it."""
    async with Broker(own.url, namespace=keys.namespace) as broker:
        await broker.create_topic(ORDERS, partitions=2)
        await fill(own.url)
        await broker.create_topic(ORDERS, partitions=2)


async def test_a_spark_query_goes_on_with_its_group_while_memory_is_full(own: EmbeddedRedis, stage: Stage) -> None:
    topic = await stage.topic()
    ids = await stage.add(topic, 2)
    await adopt_group(stage.instance, stage.registry, topic, "query", {0: Position(ids[0])})
    await fill(own.url)
    await adopt_group(stage.instance, stage.registry, topic, "query", {0: Position(ids[1])})
    [row] = await stage.call(stage.stream(topic), "XINFO", "GROUPS", stage.stream(topic))
    assert ids[1].encode() in row


async def test_a_topic_that_is_not_listed_yet_can_be_deleted_while_memory_is_full(
    own: EmbeddedRedis, stage: Stage, clock: ManualClock
) -> None:
    """As one whose growth was completed when there was no room for its name on the list."""
    topic = await stage.topic(partitions=2)
    await stage.add(topic, 2, 1)
    listed = stage.instance.keys.partitions(ORDERS)
    await stage.call(listed, "SREM", listed, stage.stream(topic, 1))
    await fill(own.url)
    async with Broker(own.url, namespace=stage.instance.keys.namespace, clock=clock) as broker:
        await hurried(clock, broker.admin.delete_topic(ORDERS))
    assert await ask(own.url, "EXISTS", stage.stream(topic, 0), stage.stream(topic, 1), listed) == 0
