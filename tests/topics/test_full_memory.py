"""A server whose memory is full: what was begun is ended, what frees memory goes on, and nothing is begun or lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final

import pytest
from redis.asyncio import Redis

from conquiet import Backoff, Broker, Outgoing, QueueError, Reject, Retention
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.sync import EmbeddedRedis
from conquiet.topics.operate.admin import Admin
from conquiet.topics.produce.once import Appender, Chunk, Write, begin
from conquiet.topics.server import retention
from conquiet.topics.server.external_groups import adopt_group
from conquiet.topics.server.growth import grow
from conquiet.topics.server.instance import Instance
from conquiet.topics.server.topics import Registry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.conftest import Rung
from tests.rigs.asking import ask
from tests.rigs.servers import on_a_port_in_sync
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.topics.staging import Stage, hurried
from tests.topics.stepping import Stepped

pytestmark = pytest.mark.guarantee

ORDERS: Final = "orders"
SCRIPTS: Final = {name: Script.named(name) for name in ("takeover", "lease_renew", "lease_suspect")}


@pytest.fixture(scope="module")
def private(rung: Rung) -> Iterator[EmbeddedRedis]:
    with on_a_port_in_sync(rung.binary) as server:
        yield server


@pytest.fixture
async def own(private: EmbeddedRedis) -> AsyncIterator[EmbeddedRedis]:
    """A server that the test may fill."""
    yield private
    await empty(private)


@pytest.fixture
async def stage(own: EmbeddedRedis, keys: Keys, clock: ManualClock) -> AsyncIterator[Stage]:
    link = Connections(Address.of(own.url))
    instance = Instance(link, keys, clock)
    yield Stage(instance, Registry(instance))
    await link.aclose()


@pytest.fixture
def admin(stage: Stage) -> Admin:
    return Admin(stage.instance, stage.registry)


@pytest.fixture
async def broker(own: EmbeddedRedis, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(own.url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic(ORDERS)
        yield broker


async def fill(server: EmbeddedRedis) -> None:
    await ask(server.url, "CONFIG", "SET", "maxmemory", "1")


async def empty(server: EmbeddedRedis) -> None:
    await ask(server.url, "CONFIG", "SET", "maxmemory", "0")


async def everything(server: EmbeddedRedis, keys: Keys) -> dict[Any, Any]:
    """What every key of the test holds."""
    async with Redis.from_url(server.url) as client:
        return {name: await client.dump(name) for name in await client.keys(f"{keys.namespace}:*")}


# --- what goes on -------------------------------------------------------------------------------------------


async def test_what_was_sent_is_taken_handled_and_acknowledged(broker: Broker, own: EmbeddedRedis) -> None:
    """Also by a consumer that begins only now, to a group that is there: acknowledged messages can be removed."""
    async with broker.subscribe(ORDERS, group="g", handler=Recorder(), options=impatient()):
        pass
    await broker.send_batch(ORDERS, [Outgoing(number) for number in range(50)])
    await broker.send(ORDERS, 50, delay=0.001)
    await fill(own)
    seen = Recorder()
    async with Broker(own.url, namespace=broker.admin._instance.keys.namespace) as later:
        async with later.subscribe(ORDERS, group="g", handler=seen, options=impatient()) as subscription:
            await seen.saw(51)
            await finished(broker, ORDERS, "g")
            assert subscription.health().healthy
        info = await broker.admin.describe_group(ORDERS, "g")
        assert (info.consumers, info.unowned) == (0, (0,))  # it has left, and given the lease back


async def test_leases_are_renewed_taken_and_given_back(stage: Stage, own: EmbeddedRedis, clock: ManualClock) -> None:
    topic = await stage.topic()
    held = await stage.acquire(topic, "g", owner="a#1")
    ids = await stage.add(topic, 3)
    await stage.take(held, 3)
    await stage.join(topic, "g", "a#1")
    await fill(own)
    assert await stage.join(topic, "g", "a#1")
    clock.advance(16)
    heir = await stage.acquire(topic, "g", owner="b#2")
    assert await stage.take(held) is None
    lease, retry, attempts, _ = stage.instance.keys.of_group(stage.stream(topic), "g")
    stream = stage.stream(topic)
    call = SCRIPTS["takeover"]([lease, stream, retry, attempts], "b#2", heir.epoch, "g", "-", 10, "a#1", "", 3)
    taken = await stage.instance.run(stream, call)
    assert [(row[0].decode(), row[4]) for row in taken[2]] == [(id, b"1") for id in ids]
    for name, words in (("lease_renew", (15_000, 0)), ("lease_suspect", (ids[0],))):
        assert await stage.instance.run(stream, SCRIPTS[name]([lease], "b#2", heir.epoch, *words)) == 1
    await stage.take(heir, 0, *ids)
    await stage.release(heir)


async def test_what_frees_memory_goes_on(stage: Stage, own: EmbeddedRedis, admin: Admin, clock: ManualClock) -> None:
    topic = await stage.topic(max_len=2, group_expiry=3600.0)
    await stage.dead(topic, "g", 2)
    held = await stage.acquire(topic, "g")
    await stage.add(topic, 8)
    ids, _ = await stage.take(held, 8)
    await stage.bury(held, ids[0])
    await stage.take(held, 0, *ids[1:])
    await stage.release(held)
    await stage.create_group(topic, "other")
    await fill(own)
    assert await admin.purge(ORDERS) == 3  # one was still on its way
    await admin.reset_group(ORDERS, "other", "latest")
    await admin.delete_group(ORDERS, "other")
    assert (await retention.trim(stage.instance, topic, 0)).removed == 8
    await admin.configure(ORDERS, Retention(max_len=1))
    assert await admin.trim(ORDERS) == 1
    await hurried(clock, admin.delete_topic(ORDERS))
    assert await admin.list_topics() == []


@pytest.mark.parametrize("when", ["before the consumer", "while it is there"])
async def test_a_growth_that_was_announced_is_completed(
    broker: Broker, own: EmbeddedRedis, stage: Stage, clock: ManualClock, when: str
) -> None:
    """Until then no group may take what is new, and nothing that is taken could make room."""
    topic = await stage.registry.fetch(ORDERS)
    await adopt_group(stage.instance, stage.registry, topic, "query", {})
    async with broker.subscribe(ORDERS, group="g", handler=Recorder(), options=impatient()):
        pass
    await broker.send_batch(ORDERS, [Outgoing(number) for number in range(50)])

    async def announce() -> None:
        work = Stepped(stage.instance, lambda instance, registry: grow(instance, registry, ORDERS, 3))
        while (await stage.registry.fetch(ORDERS)).next_count is None:
            assert await work.step()
        await work.die()
        await fill(own)
        clock.advance(10)

    if when == "before the consumer":
        await announce()

    async def has_grown() -> bool:
        return (await stage.registry.fetch(ORDERS)).partitions == 3

    gate = asyncio.Event()
    seen = Recorder(lambda message: _passed(gate))
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=impatient(max_inflight=5)):
        if when == "while it is there":
            await announce()
        await eventually(has_grown, "the growth to be completed")
        gate.set()
        await seen.saw(50)
        await finished(broker, ORDERS, "g")
    for stream in (stage.stream(topic, 1), stage.stream(topic, 2)):
        assert {row[1] for row in await stage.call(stream, "XINFO", "GROUPS", stream)} == {b"g", b"query"}


async def _passed(gate: asyncio.Event) -> None:
    await gate.wait()


# --- what does not ------------------------------------------------------------------------------------------

Attempt = Callable[[Broker], Awaitable[Any]]
SENDS: Final[dict[str, Attempt]] = {
    "plain": lambda broker: broker.send(ORDERS, 1),
    "batch": lambda broker: broker.send_batch(ORDERS, [Outgoing(1), Outgoing(2)]),
    "with an ID": lambda broker: broker.send(ORDERS, 1, message_id="new"),
    "delayed": lambda broker: broker.send(ORDERS, 1, delay=60.0),
    "new topic": lambda broker: broker.create_topic("another"),
    "replay": lambda broker: broker.admin.replay(ORDERS),
}


@pytest.mark.parametrize("what", SENDS)
async def test_what_needs_memory_is_refused_with_a_word_about_it_and_changes_nothing(
    broker: Broker, own: EmbeddedRedis, stage: Stage, clock: ManualClock, what: str
) -> None:
    for number in range(3):
        await broker.send(ORDERS, number, message_id=f"m{number}")
    await stage.dead(await stage.registry.fetch(ORDERS), "g", 1)
    clock.advance(601)  # message IDs are out of their window, and would be cleared away
    await fill(own)
    before = await everything(own, stage.instance.keys)
    with pytest.raises(QueueError, match="memory"):
        await SENDS[what](broker)
    assert await everything(own, stage.instance.keys) == before
    await empty(own)
    await SENDS[what](broker)


async def test_rows_are_refused_too(stage: Stage, own: EmbeddedRedis) -> None:
    topic = await stage.topic()
    for batch in range(2):
        write = Write("w", batch, goes_on=True)
        await begin(stage.instance, topic, write)
        if batch:
            await fill(own)
        appender = Appender(stage.instance, topic, write, 0)
        try:
            await appender.put(Chunk(0, 0, bytearray(b"0"), ["1"]))
            if not batch:
                await appender.drain()
                continue
            before = await everything(own, stage.instance.keys)
            with pytest.raises(QueueError, match="memory"):
                await hurried(stage.instance.clock, appender.drain())  # type: ignore[arg-type]
            assert await everything(own, stage.instance.keys) == before
        finally:
            await appender.aclose()
    assert len(await stage.ids(topic)) == 1


async def fail(message: Message) -> None:
    raise ValueError


async def reject(message: Message) -> None:
    raise Reject("no")


@pytest.mark.parametrize(
    ("handler", "mode", "order"),
    [
        (fail, "park", "unordered"),
        (fail, "park", "block_key"),
        (fail, "requeue", "unordered"),
        (reject, "park", "unordered"),
        (reject, "park", "block_key"),
    ],
)
async def test_a_failure_that_cannot_be_written_takes_up_its_room_until_it_can(
    broker: Broker, own: EmbeddedRedis, handler: Callable[[Message], Awaitable[None]], mode: str, order: str
) -> None:
    """Nothing is lost, nothing is handled again, and no more is taken than may be in flight."""
    async with broker.subscribe(ORDERS, group="g", handler=Recorder(), options=impatient()):
        pass
    ids = await broker.send_batch(ORDERS, [Outgoing(number) for number in range(20)])
    await fill(own)
    seen = Recorder(handler)
    later = Backoff(1000.0, 1000.0, "fixed")
    options = impatient(max_inflight=5, mode=mode, order=order, backoff=later, lease_ttl=1000.0)
    async with broker.subscribe(ORDERS, group="g", handler=seen, options=options):
        await eventually(lambda: len(seen.messages) >= 5, "as many as may be in flight")
        stream = broker.admin._instance.keys.partition(ORDERS, 0)
        refused = await refusals(own)
        await eventually_more(own, refused)  # it is tried again and again
        assert len(seen.messages) == 5
        assert (await ask(own.url, "XPENDING", stream, "g"))["pending"] == 5
        await empty(own)
        await eventually(lambda: len(seen.messages) == 20, "the others")
        if handler is reject:
            assert len(await buried(broker, ORDERS, 20)) == 20
    assert [message.id for message in seen.messages] == ids
    assert {message.retry_count for message in seen.messages} == {0}


async def refusals(server: EmbeddedRedis) -> int:
    """How often a script was called."""
    return int((await ask(server.url, "INFO", "commandstats"))["cmdstat_evalsha"]["calls"])


async def eventually_more(server: EmbeddedRedis, than: int) -> None:
    async def are() -> bool:
        return await refusals(server) > than + 3

    await eventually(are, "more tries")
