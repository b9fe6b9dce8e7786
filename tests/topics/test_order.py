"""In which order messages are handled, with and without failures."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conquiet import Backoff, ConfigError, Outgoing, Reject
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker, SubscribeOptions
from conquiet.wire.keys import Keys
from tests.rigs.waiting import eventually
from tests.topics.consuming import Recorder, answers, buried, finished, impatient, vanish
from tests.topics.staging import Stage

pytestmark = pytest.mark.cluster_too


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=3)
        yield broker


class Watch:
    """A handler that fails now and then, and checks at each call what must always hold."""

    def __init__(self, seed: int, order: str, failing: float = 0.3) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.firsts: defaultdict[str, list[int]] = defaultdict(list)
        self.wrong: list[str] = []
        self._random = random.Random(seed)
        self._order = order
        self._failing = failing
        self._busy: set[str] = set()
        self._open: dict[str, int] = {}

    async def __call__(self, message: Message) -> None:
        key, number = str(message.key), message.payload
        self._check(message)
        self.calls.append((key, number, message.retry_count))
        if message.retry_count == 0:
            self.firsts[key].append(number)
        self._busy.add(key)
        try:
            for _ in range(self._random.randrange(4)):
                await asyncio.sleep(0)
            self._decide(message)
        finally:
            self._busy.discard(key)

    def _check(self, message: Message) -> None:
        key = str(message.key)
        if key in self._busy:
            self.wrong.append(f"{message!r} while another of its key is handled")
        blocker = key if self._order == "block_key" else str(message.partition)
        if self._order != "unordered" and self._open.get(blocker, message.payload) != message.payload:
            self.wrong.append(f"{message!r} while {self._open[blocker]} waits for its retry")
        if self._order == "block_partition" and self._busy:
            self.wrong += [f"{message!r} while {self._busy}"] * (f"p{message.partition}" in self._busy)

    def _decide(self, message: Message) -> None:
        blocker = str(message.key) if self._order == "block_key" else str(message.partition)
        if message.retry_count < 2 and self._random.random() < self._failing:
            self._open[blocker] = message.payload
            raise RuntimeError
        self._open.pop(blocker, None)
        if self._random.random() < 0.05:
            raise Reject


def shuffled(seed: int, count: int, keys: int) -> list[Outgoing]:
    draw = random.Random(seed)
    return [Outgoing(number, key=f"k{draw.randrange(keys)}") for number in range(count)]


@pytest.mark.slow
@pytest.mark.any_server
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("order", ["unordered", "block_key", "block_partition"])
@pytest.mark.parametrize("max_inflight", [1, 20])
async def test_whatever_fails_each_key_begins_in_order_and_one_at_a_time(
    broker: Broker, seed: int, order: str, max_inflight: int
) -> None:
    sent = shuffled(seed, 120, 7)
    watch = Watch(seed, order)
    backoff = Backoff(0.002, 0.002, "full_jitter")
    options = impatient(order=order, max_inflight=max_inflight, batch_size=9, backoff=backoff)
    async with broker.subscribe("orders", group="g", handler=watch, options=options):
        for start in range(0, 120, 30):
            await broker.send_batch("orders", sent[start : start + 30])
        await finished(broker, "orders", "g")
    assert watch.wrong == []
    expected: defaultdict[str, list[int]] = defaultdict(list)
    for message in sent:
        expected[str(message.key)].append(message.payload)
    assert watch.firsts == expected
    if order != "unordered":
        settled = {key: list(dict.fromkeys(n for k, n, _ in watch.calls if k == key)) for key in expected}
        assert settled == expected


@pytest.mark.any_server
async def test_messages_of_different_keys_run_at_once_and_of_one_key_never(broker: Broker) -> None:
    """spec 3: we provide per-key order via partitioning."""
    inside: list[str] = []
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        inside.append(f"{message.key}{message.payload}")
        await gate.wait()

    await broker.send_batch("orders", [Outgoing(number, key=key, partition=0) for number in (1, 2) for key in "abc"])
    async with broker.subscribe("orders", group="g", handler=handle, options=impatient()) as subscription:
        await eventually(lambda: len(inside) == 3 and subscription.inflight == 6, "three handlers, six taken")
        assert sorted(inside) == ["a1", "b1", "c1"]
        gate.set()
        await finished(broker, "orders", "g")
    assert sorted(inside[3:]) == ["a2", "b2", "c2"]


@pytest.mark.any_server
async def test_messages_without_a_key_run_at_once(broker: Broker) -> None:
    together = asyncio.Barrier(5)

    async def handle(message: Message) -> None:
        await together.wait()

    await broker.send_batch("orders", [Outgoing(number, partition=0) for number in range(5)])
    async with broker.subscribe("orders", group="g", handler=handle, options=impatient()):
        await finished(broker, "orders", "g")


@pytest.mark.any_server
async def test_max_inflight_one_is_a_serial_worker_over_all_partitions(broker: Broker) -> None:
    """spec 3: One serial worker per owned partition to preserve order."""
    busy, most = 0, 0

    async def handle(message: Message) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.001)  # the work itself, in which another could begin
        busy -= 1

    seen = Recorder(handle)
    await broker.send_batch("orders", [Outgoing(number) for number in range(30)])
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_inflight=1)):
        await finished(broker, "orders", "g")
    assert most == 1
    for partition in range(3):
        own = [message.payload for message in seen.messages if message.partition == partition]
        assert own == sorted(own)


# --- what a parked message holds up -----------------------------------------------------------------------


def blocking(order: str, **more: Any) -> SubscribeOptions:
    return impatient(order=order, backoff=Backoff(100.0, 100.0, "fixed"), lease_ttl=10_000.0, **more)


async def fail_first(message: Message) -> None:
    if message.payload == 0 and message.retry_count == 0:
        raise RuntimeError


@pytest.mark.parametrize(
    ("order", "before"),
    [("unordered", ["a0", "b1", "a2", "b3"]), ("block_key", ["a0", "b1", "b3"]), ("block_partition", ["a0"])],
)
async def test_a_parked_message_holds_up_what_its_order_says(
    broker: Broker, clock: ManualClock, order: str, before: list[str]
) -> None:
    seen = Recorder(fail_first)
    keys = "abab"
    await broker.send_batch("orders", [Outgoing(number, key=keys[number], partition=0) for number in range(4)])
    async with broker.subscribe("orders", group="g", handler=seen, options=blocking(order)):
        await broker.send("orders", 9, key="c", partition=1)
        await eventually(lambda: 9 in seen.payloads and len(seen.messages) > len(before), "the first round")
        await answers(broker)  # one too many would be there
        got = [f"{message.key}{message.payload}" for message in seen.messages if message.partition == 0]
        assert sorted(got) == sorted(before)
        clock.advance(101.0)
        await finished(broker, "orders", "g")
    again = [f"{message.key}{message.payload}" for message in seen.messages if message.partition == 0]
    assert again[len(before)] == "a0"
    if order != "unordered":
        assert [name for name in again if name[0] == "a"] == ["a0", "a0", "a2"]


@pytest.mark.any_server
@pytest.mark.parametrize("order", ["block_key", "block_partition"])
async def test_a_dead_letter_lets_those_behind_it_go(broker: Broker, order: str) -> None:
    async def reject_first(message: Message) -> None:
        if message.payload == 0:
            raise Reject

    seen = Recorder(reject_first)
    await broker.send_batch("orders", [Outgoing(number, key="a", partition=0) for number in range(5)])
    async with broker.subscribe("orders", group="g", handler=seen, options=blocking(order)):
        await finished(broker, "orders", "g")
        await buried(broker, "orders")
    assert seen.payloads == list(range(5))


@pytest.mark.any_server
async def test_keys_that_are_held_up_leave_room_for_others(broker: Broker, clock: ManualClock) -> None:
    seen = Recorder(fail_first)
    blocked = [Outgoing(number, key="a", partition=0) for number in range(100)]
    await broker.send_batch(
        "orders", [*blocked, *[Outgoing(number, key="b", partition=1) for number in range(200, 210)]]
    )
    async with broker.subscribe("orders", group="g", handler=seen, options=blocking("block_key", max_inflight=10)):
        await eventually(lambda: seen.payloads.count(209) == 1, "the other partition")
        await eventually(lambda: _is_parked(broker), "the head to be parked")
        assert seen.payloads.count(1) == 0
        clock.advance(101.0)
        await finished(broker, "orders", "g")
    assert [message.payload for message in seen.messages if message.key == "a"] == [0, *range(100)]


async def _is_parked(broker: Broker) -> bool:
    info = await broker.admin.describe_group("orders", "g")
    return info.partitions[0].retry_depth == 1


@pytest.mark.parametrize("order", ["block_key", "block_partition"])
async def test_a_parked_head_still_blocks_after_a_takeover(broker: Broker, clock: ManualClock, order: str) -> None:
    seen = Recorder(fail_first)
    await broker.send_batch("orders", [Outgoing(number, key="a", partition=0) for number in range(30)])
    first = await broker.subscribe("orders", group="g", handler=seen, options=blocking(order)).__aenter__()
    await eventually(lambda: len(seen.messages) == 1 and first.inflight in (0, 29), "the head to be parked")
    await first.aclose()
    # More is pending behind the head than the next owner takes at a time.
    async with broker.subscribe("orders", group="g", handler=seen, options=blocking(order, max_inflight=4)) as second:
        await eventually(lambda: second.owned == {"orders": (0, 1, 2)}, "the next owner")
        await answers(broker)  # one too many would be there
        assert len(seen.messages) == 1
        clock.advance(101.0)
        await finished(broker, "orders", "g")
    assert seen.payloads == [0, *range(30)]


@pytest.mark.any_server
@pytest.mark.parametrize("order", ["unordered", "block_key", "block_partition"])
async def test_replayed_messages_of_one_key_come_back_one_at_a_time(broker: Broker, order: str) -> None:
    async def reject(message: Message) -> None:
        raise Reject

    await broker.send_batch("orders", [Outgoing(number, key="a", partition=0) for number in range(6)])
    async with broker.subscribe("orders", group="g", handler=reject, options=impatient()):
        await buried(broker, "orders", 6)
    assert await broker.admin.replay("orders") == 6
    watch = Watch(1, "unordered", failing=0.0)
    async with broker.subscribe("orders", group="g", handler=watch, options=impatient(order=order)):
        await finished(broker, "orders", "g")
    assert watch.wrong == []
    assert watch.firsts == {"a": list(range(6))}


@pytest.mark.any_server
@pytest.mark.parametrize("order", ["block_key", "block_partition"])
async def test_burying_an_entry_at_once_lets_nobody_overtake(broker: Broker, stage: Stage, order: str) -> None:
    gate, stream = asyncio.Event(), stage.instance.keys.partition("orders", 0)

    async def hold_first(message: Message) -> None:
        if message.payload == 0:
            await gate.wait()

    seen = Recorder(hold_first)
    await broker.send("orders", 0, key="a", partition=0)
    await stage.call(stream, "XADD", stream, "*", "payload", "{", "key", "a")
    await broker.send("orders", 1, key="a", partition=0)
    async with broker.subscribe("orders", group="g", handler=seen, options=blocking(order)):
        await buried(broker, "orders")
        await answers(broker)  # one too many would be there
        assert seen.payloads == [0]
        gate.set()
        await finished(broker, "orders", "g")
    assert seen.payloads == [0, 1]


@pytest.mark.any_server
async def test_order_is_kept_over_crashes_of_owners(broker: Broker, clock: ManualClock) -> None:
    seen, options = Recorder(), impatient(max_inflight=5, lease_ttl=30.0)
    sent = shuffled(1, 60, 4)
    await broker.send_batch("orders", sent)
    for crashes in range(1, 4):
        gate = asyncio.Event()
        stuck = Recorder(lambda message, gate=gate: gate.wait())  # type: ignore[misc]
        consumer = await broker.subscribe("orders", group="g", handler=stuck, options=options).__aenter__()
        await eventually(lambda stuck=stuck: len(stuck.messages) > 0, f"owner {crashes} to begin")  # type: ignore[misc]
        await vanish(consumer)
        clock.advance(31.0)
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(max_crashes=9)):
        await finished(broker, "orders", "g")
    expected: defaultdict[str, list[int]] = defaultdict(list)
    got: defaultdict[str, list[int]] = defaultdict(list)
    for one in sent:
        expected[str(one.key)].append(one.payload)
    for message in seen.messages:
        got[str(message.key)].append(message.payload)
    assert got == expected


@pytest.mark.any_server
async def test_batches_know_no_blocking_order() -> None:
    with pytest.raises(ConfigError, match="batch_handler"):
        SubscribeOptions(batch_handler=True, order="block_key")
