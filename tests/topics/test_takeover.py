"""What the next owner finds of one that is gone: with or without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conquiet import Backoff, Outgoing
from conquiet.kit.clock import ManualClock
from conquiet.message import EntryId, Message
from conquiet.topics import Broker
from conquiet.wire.keys import Keys
from conquiet.wire.scripts import Script
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, answers, buried, counted, finished, impatient, vanish
from tests.topics.staging import Stage

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders")
        yield broker


@pytest.fixture
def stream(keys: Keys) -> str:
    return keys.partition("orders", 0)


async def numbered(broker: Broker, count: int, **more: str) -> list[EntryId]:
    return await broker.send_batch("orders", [Outgoing(number, **more) for number in range(count)])  # type: ignore[arg-type]


async def leave_pending(stage: Stage, stream: str, count: int, crashes: int = 0, owner: str = "dead#1") -> None:
    """An owner took entries and died: they are pending under its name, and its lease has run out."""
    keys = stage.instance.keys
    lease, attempts = keys.lease(stream, "g"), keys.attempts(stream, "g")
    await stage.call(stream, "XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
    reply = await stage.call(stream, "XREADGROUP", "GROUP", "g", owner, "COUNT", count, "STREAMS", stream, ">")
    await stage.call(lease, "HSET", lease, "owner", owner, "epoch", 1, "until_ms", 1)
    for id, _ in reply[0][1]:
        if crashes:
            await stage.call(attempts, "HSET", attempts, f"c:{id.decode()}", crashes)


async def consumers(stage: Stage, stream: str) -> list[str]:
    rows = await stage.call(stream, "XINFO", "CONSUMERS", stream, "g")
    return [row[row.index(b"name") + 1].decode() for row in rows]


async def stuck(message: Message) -> None:
    await asyncio.Event().wait()


# --- in order -------------------------------------------------------------------------------------------


async def test_the_next_owner_gets_what_is_pending_in_order_and_then_what_is_new(
    broker: Broker, clock: ManualClock
) -> None:
    """spec 3: on owner death (no renew), leases expire, others acquire and resume."""
    held = Recorder(stuck)
    ids = await numbered(broker, 20, key="k")
    first = await broker.subscribe("orders", group="g", handler=held, options=impatient(max_inflight=12)).__aenter__()
    await eventually(lambda: first.inflight == 12, "twelve to be taken")
    await vanish(first)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()) as second:
        await answers(broker)  # the lease has not run out: nothing may happen
        assert (second.owned, seen.messages) == ({"orders": ()}, [])
        clock.advance(16.0)
        await finished(broker, "orders", "g")
    assert [message.id for message in seen.messages] == ids
    assert {message.retry_count for message in seen.messages} == {0}


@pytest.mark.any_server
async def test_a_long_pending_list_is_taken_over_page_by_page(broker: Broker, stage: Stage, stream: str) -> None:
    ids = await numbered(broker, 1300, key="k")
    await leave_pending(stage, stream, 1250)
    seen = Recorder()
    options = impatient(max_inflight=2000, batch_size=1000)
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await finished(broker, "orders", "g")
    assert [message.id for message in seen.messages] == ids


@pytest.mark.any_server
@pytest.mark.parametrize("max_inflight", [1, 3])
async def test_a_takeover_respects_max_inflight(broker: Broker, stage: Stage, stream: str, max_inflight: int) -> None:
    ids = await numbered(broker, 20)
    await leave_pending(stage, stream, 15)
    most, inside = 0, 0

    async def count(message: Message) -> None:
        nonlocal most, inside
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1

    seen = Recorder(count)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_inflight=max_inflight)) as own:
        await eventually(lambda: own.inflight <= max_inflight, "no more than allowed")
        await finished(broker, "orders", "g")
    assert [message.id for message in seen.messages] == ids
    assert most <= max_inflight


async def test_parked_entries_stay_parked_until_they_are_due(
    broker: Broker, clock: ManualClock, stage: Stage, stream: str
) -> None:
    async def fail_once(message: Message) -> None:
        if message.retry_count == 0:
            raise RuntimeError

    seen, options = Recorder(fail_once), impatient(backoff=Backoff(100.0, 100.0, "fixed"), lease_ttl=50.0)
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as first:
        await numbered(broker, 3)
        await seen.saw(3)
        await eventually(lambda: first.inflight == 0, "all to be parked")
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as second:
        await eventually(lambda: second.owned == {"orders": (0,)}, "the next owner")
        await answers(broker)  # one too many would be there
        assert len(seen.messages) == 3
        clock.advance(49.0)
        clock.advance(52.0)
        await finished(broker, "orders", "g")
    assert [message.retry_count for message in seen.messages] == [0] * 3 + [1] * 3
    attempts = stage.instance.keys.attempts(stream, "g")
    assert await stage.call(attempts, "HGETALL", attempts) == []


async def test_a_restarted_consumer_of_the_same_name_takes_over_from_itself(
    broker: Broker, clock: ManualClock, stage: Stage, stream: str
) -> None:
    options = impatient(consumer="worker-1")
    ids = await numbered(broker, 3, key="k")
    held = Recorder(stuck)
    first = await broker.subscribe("orders", group="g", handler=held, options=options).__aenter__()
    await held.saw(1)
    await vanish(first)
    clock.advance(16.0)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=options) as second:
        assert first.consumer != second.consumer
        assert first.consumer.split("#")[0] == second.consumer.split("#")[0] == "worker-1"
        await finished(broker, "orders", "g")
        assert await consumers(stage, stream) == [second.consumer]
    assert [message.id for message in seen.messages] == ids


async def test_names_without_pending_entries_are_removed_and_foreign_ones_left(
    broker: Broker, stage: Stage, stream: str
) -> None:
    await numbered(broker, 1)
    await leave_pending(stage, stream, 1)
    for name in ("gone#2", "gone#3", "foreign"):
        await stage.call(stream, "XGROUP", "CREATECONSUMER", stream, "g", name)
    async with broker.subscribe("orders", group="g", handler=Recorder(), options=impatient()) as subscription:
        await finished(broker, "orders", "g")
        assert set(await consumers(stage, stream)) == {subscription.consumer, "foreign"}
    assert await consumers(stage, stream) == ["foreign"]


async def test_pending_ids_whose_entry_is_gone_are_acknowledged_and_counted(
    broker: Broker, stage: Stage, stream: str
) -> None:
    ids = await numbered(broker, 6)
    await leave_pending(stage, stream, 6)
    await stage.call(stream, "XDEL", stream, ids[0], ids[2], ids[5])
    before = counted("ghosts", topic="orders", group="g")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await finished(broker, "orders", "g")
    assert [message.id for message in seen.messages] == [ids[1], ids[3], ids[4]]
    assert counted("ghosts", topic="orders", group="g") - before == 3


async def test_a_parked_entry_that_is_deleted_is_acknowledged_when_due(
    broker: Broker, clock: ManualClock, stage: Stage, stream: str
) -> None:
    async def fail(message: Message) -> None:
        raise RuntimeError

    before = counted("ghosts", topic="orders", group="g")
    options = impatient(backoff=Backoff(5.0, 5.0, "fixed"))
    async with broker.subscribe("orders", group="g", handler=fail, options=options) as subscription:
        [id] = await numbered(broker, 1)
        retry = stage.instance.keys.retry(stream, "g")
        await eventually(lambda: _is_one(stage, retry), "the entry to be parked")
        await eventually(lambda: subscription.inflight == 0, "nothing in flight")
        await stage.call(stream, "XDEL", stream, id)
        clock.advance(6.0)
        await finished(broker, "orders", "g")
    assert counted("ghosts", topic="orders", group="g") - before == 1


async def _is_one(stage: Stage, key: str) -> bool:
    return bool(await stage.call(key, "ZCARD", key) == 1)


# --- crash loops ----------------------------------------------------------------------------------------


async def test_an_entry_that_kills_its_owners_becomes_a_dead_letter(
    broker: Broker, clock: ManualClock, stage: Stage, stream: str
) -> None:
    ids = await numbered(broker, 3)

    async def deadly(message: Message) -> None:
        if message.payload == 1:
            await stuck(message)

    handled: list[int] = []
    for _ in range(5):
        seen = Recorder(deadly)
        consumer = await broker.subscribe("orders", group="g", handler=seen, options=impatient()).__aenter__()
        await eventually(lambda seen=seen: 1 in seen.payloads, "the deadly one")  # type: ignore[misc]
        handled += seen.payloads
        await vanish(consumer)
        clock.advance(16.0)
    async with broker.subscribe("orders", group="g", handler=Recorder(deadly), options=impatient()):
        [letter] = await buried(broker, "orders")
        await finished(broker, "orders", "g")
    assert (letter.original_id, letter.reason, letter.crashes) == (ids[1], "crash loop", 5)
    assert handled.count(1) == 5
    attempts = stage.instance.keys.attempts(stream, "g")
    assert await stage.call(attempts, "HGETALL", attempts) == []


@pytest.mark.any_server
async def test_a_clean_stop_is_no_crash(broker: Broker, stage: Stage, stream: str) -> None:
    await numbered(broker, 2, key="k")
    for _ in range(6):
        held = Recorder(stuck)
        async with broker.subscribe("orders", group="g", handler=held, options=impatient(drain_timeout=0.01)):
            await held.saw(1)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await finished(broker, "orders", "g")
    assert seen.payloads == [0, 1]


@pytest.mark.any_server
async def test_suspects_run_one_at_a_time_and_only_the_running_one_is_counted(
    broker: Broker, clock: ManualClock, stage: Stage, stream: str
) -> None:
    ids = await numbered(broker, 4)
    await leave_pending(stage, stream, 4, crashes=2)
    held = Recorder(stuck)
    first = await broker.subscribe("orders", group="g", handler=held, options=impatient()).__aenter__()
    await held.saw(1)
    lease, attempts = stage.instance.keys.lease(stream, "g"), stage.instance.keys.attempts(stream, "g")
    assert await stage.call(lease, "HGET", lease, "running") == ids[0].encode()
    await answers(broker)  # one too many would be there
    await held.saw(1)
    await vanish(first)
    clock.advance(16.0)
    seen = Recorder(stuck)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(drain_timeout=0.01)):
        await seen.saw(1)
        counts = await stage.call(attempts, "HMGET", attempts, *[f"c:{id}" for id in ids])
        assert [int(count) for count in counts] == [4, 3, 3, 3]


@pytest.mark.any_server
async def test_suspects_that_turn_out_well_clear_the_way_for_the_rest(
    broker: Broker, stage: Stage, stream: str
) -> None:
    ids = await numbered(broker, 10)
    await leave_pending(stage, stream, 4, crashes=2)
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await finished(broker, "orders", "g")
        lease, attempts = stage.instance.keys.lease(stream, "g"), stage.instance.keys.attempts(stream, "g")
        await eventually(lambda: _is_unset(stage, lease), "no suspect to be noted")
    assert [message.id for message in seen.messages] == ids
    assert await stage.call(attempts, "HGETALL", attempts) == []


async def _is_unset(stage: Stage, lease: str) -> bool:
    return bool(await stage.call(lease, "HGET", lease, "running") is None)


@pytest.mark.any_server
async def test_a_suspect_whose_partition_is_lost_does_not_hold_up_those_of_others(
    broker: Broker, stage: Stage, keys: Keys
) -> None:
    await broker.create_topic("twin", partitions=2)
    for partition in (0, 1):
        await broker.send("twin", partition, partition=partition)
        await leave_pending(stage, keys.partition("twin", partition), 1, crashes=3)
    seen = Recorder(stuck)
    options = impatient(drain_timeout=0.01, lease_ttl=0.9)
    async with broker.subscribe("twin", group="g", handler=seen, options=options):
        await seen.saw(1)
        lost = keys.lease(keys.partition("twin", seen.messages[0].partition), "g")
        await stage.call(lost, "HSET", lost, "owner", "other#1", "epoch", 9, "until_ms", 10**14)
        await eventually(lambda: len(seen.messages) == 2, "the suspect of the other partition")
    assert sorted(seen.payloads) == [0, 1]


# --- who still believes to own --------------------------------------------------------------------------


async def test_an_owner_that_was_replaced_changes_nothing_any_more(
    broker: Broker, clock: ManualClock, stage: Stage, stream: str
) -> None:
    gate = asyncio.Event()
    before = counted("fenced", topic="orders", group="g")
    late = Recorder(lambda message: _after(gate))
    async with broker.subscribe("orders", group="g", handler=late, options=impatient()) as owner:
        [id] = await numbered(broker, 1)
        await late.saw(1)
        lease = stage.instance.keys.lease(stream, "g")
        await stage.call(lease, "HSET", lease, "owner", "other#1", "epoch", 99, "until_ms", 10**14)
        gate.set()
        await eventually(lambda: owner.owned == {"orders": ()}, "the owner to notice")
        assert [row[0].decode() for row in await stage.call(stream, "XPENDING", stream, "g", "-", "+", 9)] == [id]
        await broker.send("orders", "new")
        await answers(broker)  # one too many would be there
        await late.saw(1)
    assert await stage.call(lease, "HMGET", lease, "owner", "epoch") == [b"other#1", b"99"]
    assert counted("fenced", topic="orders", group="g") > before


@pytest.mark.any_server
@pytest.mark.one_node
async def test_what_was_not_written_before_the_lease_was_lost_is_counted(
    broker: Broker, url: str, keys: Keys, stage: Stage, stream: str
) -> None:
    gate, before = asyncio.Event(), counted("fenced", topic="orders", group="g", operation="ack")
    seen = Recorder(lambda message: _after(gate))
    async with (
        Proxy(url) as proxy,
        Broker(proxy.url, namespace=keys.namespace) as through,
        through.subscribe("orders", group="g", handler=seen, options=impatient(lease_ttl=0.9)) as owner,
    ):
        await numbered(broker, 1)
        await seen.saw(1)
        proxy.refuse(Script.named("take").sha.encode(), b"-LOADING not now\r\n", times=1_000_000)
        gate.set()
        mine = owner._worker.partitions[stream].partition
        await eventually(lambda: mine.failures > 0, "the acknowledgement does not get through")
        lease = keys.lease(stream, "g")
        await stage.call(lease, "HSET", lease, "owner", "other#1", "epoch", 99, "until_ms", 10**14)
        await eventually(lambda: owner.owned == {"orders": ()}, "the owner to notice")
    assert counted("fenced", topic="orders", group="g", operation="ack") == before + 1


@pytest.mark.any_server
@pytest.mark.one_node
async def test_an_owner_takes_up_what_is_pending_again_after_a_failover(
    broker: Broker, url: str, keys: Keys, stage: Stage, stream: str
) -> None:
    """The new master never heard of its last acknowledgements: to it they are pending, and nobody else's."""
    seen = Recorder()
    async with (
        Proxy(url) as proxy,
        Broker(proxy.url, namespace=keys.namespace) as through,
        through.subscribe("orders", group="g", handler=seen, options=impatient()) as owner,
    ):
        [id] = await numbered(broker, 1)
        await finished(broker, "orders", "g")
        await stage.call(stream, "XCLAIM", stream, "g", owner.consumer, 0, id, "FORCE", "JUSTID")
        await proxy.disconnect()
        await finished(broker, "orders", "g")
    assert [message.id for message in seen.messages] == [id, id]


async def _after(gate: asyncio.Event) -> None:
    await gate.wait()
