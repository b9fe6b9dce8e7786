"""What the queue does not do, how it fails, and what it counts (spec 1 §1.2, §5.1, §7 and §8)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Histogram
from redis.exceptions import RedisError

from conquiet import EmbeddedRedis, QueueConfig, QueueError, QueueMessage
from tests.contracts.flavours import Flavour, Queue
from tests.contracts.looking import Look, proxied, recorded, sample
from tests.rigs.scraping import families

READ = "conquiet_queue_messages_read_total"
ACKED = "conquiet_queue_messages_ack_total"
CLAIMED = "conquiet_queue_messages_claimed_total"
LATENCY = "conquiet_queue_read_latency_seconds_count"


class _Tx:
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class _Factory:
    def begin(self) -> _Tx:
        return _Tx()


async def test_nothing_is_trimmed_deleted_cleaned_up_or_moved_elsewhere(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §1.2: no dead letters, no XGROUP DELCONSUMER, no XTRIM, and nothing else than the stream is touched."""
    async with recorded(url) as commands:
        async with flavour.queue(url, config) as queue:
            await look.add(b"wrong", b"poison")
            await queue.enqueue_many({"n": n} for n in range(20))
            messages = await queue.read(block_ms=50, count=10)
            await queue.ack(*messages[:5])
            await queue.claim_stale(min_idle_ms=0)
            await queue.backlog_stats()
            consumer = flavour.consumer(queue)
            async with consumer:
                first = await consumer.next(block_ms=50)
                assert first is not None
                await consumer.ack(first)
                handled: list[QueueMessage] = []

                def handler(message: QueueMessage, tx: _Tx) -> None:
                    handled.append(message)
                    if len(handled) == 3:
                        consumer.stop()

                await consumer.run(handler=handler, db_factory=_Factory())
        seen = await commands.of()
    used = {words[0] for words in seen}
    assert used == {"XGROUP", "XADD", "XREADGROUP", "XACK", "XPENDING", "XCLAIM", "XLEN", "XINFO"}
    assert {words[1] for words in seen if words[0] == "XGROUP"} == {"CREATE"}
    assert not {"MAXLEN", "MINID", "NOMKSTREAM"} & {word for words in seen if words[0] == "XADD" for word in words}
    assert all(config.stream_key in words for words in seen)
    assert await look.length() == 21
    assert await look.redis.keys(f"*{config.stream_key[2:]}*") == [config.stream_key.encode()]
    assert len(await look.redis.xinfo_consumers(look.stream, look.group)) == 1


async def test_a_message_that_always_fails_is_never_given_up(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §1.2, §2.1: no dead letters: however often a message came back, it comes back again."""
    sent = await queue.enqueue({"n": 1})
    await queue.read(block_ms=50)
    for attempt in range(30):
        [message] = await (rival, queue)[attempt % 2].claim_stale(min_idle_ms=0)
        assert message.id == sent
    assert [(row.id, row.deliveries) for row in await look.pending()] == [(sent, 31)]


async def test_there_is_no_back_pressure(queue: Queue, look: Look) -> None:
    """spec 1 §1.2: no backpressure or rate limiting: a producer is not slowed by what nobody reads."""
    await queue.enqueue_many({"n": n} for n in range(5_000))
    assert await look.length() == 5_000


async def test_the_queue_does_nothing_between_calls(queue: Queue, url: str) -> None:
    """spec 1 §5.1: no looping, no background work: an open queue that nobody calls sends nothing."""
    await queue.read(block_ms=5)
    async with recorded(url) as commands:
        for _ in range(20):
            assert await commands.all() == []


async def test_the_queue_buffers_nothing(queue: Queue, look: Look) -> None:
    """spec 1 §5.1: no message buffering: what is pending is exactly what was returned."""
    await queue.enqueue_many({"n": n} for n in range(10))
    returned: list[str] = []
    for count in (1, 3, 2):
        returned += [message.id for message in await queue.read(block_ms=50, count=count)]
        assert await look.pending_ids() == returned


async def test_names_may_hold_anything_that_utf8_carries(flavour: Flavour, url: str) -> None:
    """spec 1 §4.1: stream, group and consumer are strings; no character of theirs is special on the way."""
    strange = ' späß\r\n"{x}"\0*$5\r\n世界\U0001f680'
    token = os.urandom(4).hex()
    queue = await flavour.open(url, QueueConfig(f"{token}{strange}", f"group{strange}", f"consumer{strange}"))
    sent = await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    assert (message.id, message.stream, message.group) == (sent, f"{token}{strange}", f"group{strange}")
    assert (await queue.backlog_stats()).pending_by_consumer == {f"consumer{strange}": 1}
    assert len(await queue.claim_stale(min_idle_ms=0)) == 1
    await queue.ack(message)
    assert (await queue.backlog_stats()).pending == 0


# --- errors ------------------------------------------------------------------------------------------


def _operations(flavour: Flavour, queue: Queue, message: QueueMessage) -> dict[str, Callable[[], Awaitable[object]]]:
    async def iterate() -> None:
        async for _ in flavour.consumer(queue).iter_messages():
            pytest.fail("there is nothing to iterate over")

    def handler(message: QueueMessage, tx: _Tx) -> None:
        pytest.fail("there is nothing to handle")

    return {
        "enqueue": lambda: queue.enqueue({"n": 1}),
        "enqueue_many": lambda: queue.enqueue_many([{"n": 1}]),
        "read": lambda: queue.read(block_ms=50),
        "ack": lambda: queue.ack(message),
        "claim_stale": lambda: queue.claim_stale(min_idle_ms=0),
        "backlog_stats": lambda: queue.backlog_stats(),
        "next": lambda: flavour.consumer(queue).next(block_ms=50),
        "consumer.ack": lambda: flavour.consumer(queue).ack(message),
        "iter_messages": iterate,
        "run": lambda: flavour.consumer(queue).run(handler=handler, db_factory=_Factory()),
    }


async def test_a_dead_server_is_a_queue_error_in_every_operation(
    flavour: Flavour, mortal: EmbeddedRedis, config: QueueConfig
) -> None:
    """spec 1 §8.1, spec 2 §9.1: Redis errors propagate as QueueError, from read, ack, claim and all the others."""
    queue = await flavour.open(mortal.url, config)
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=1_000)
    os.kill(mortal.pid, signal.SIGKILL)
    for name, operation in _operations(flavour, queue, message).items():
        with pytest.raises(QueueError) as caught:
            await asyncio.wait_for(operation(), 20)
        assert isinstance(caught.value.__cause__, RedisError | OSError), name
        assert str(caught.value), name


async def test_a_server_that_dies_under_a_blocked_read_is_a_queue_error_at_once(
    flavour: Flavour, mortal: EmbeddedRedis, config: QueueConfig
) -> None:
    """spec 1 §8.1: connection issues are the caller's to know, not to wait for."""
    queue = await flavour.open(mortal.url, config)
    look = Look(mortal.url, config)
    reading = asyncio.create_task(queue.read(block_ms=60_000))
    await look.blocked()
    await look.aclose()
    os.kill(mortal.pid, signal.SIGKILL)
    with pytest.raises(QueueError) as caught:
        await asyncio.wait_for(reading, 20)
    assert isinstance(caught.value.__cause__, RedisError | OSError)


@pytest.mark.parametrize("command", ["XADD", "XREADGROUP", "XACK", "XPENDING", "XCLAIM"])
async def test_nothing_is_sent_again_after_a_lost_answer(
    command: str, flavour: Flavour, url: str, config: QueueConfig
) -> None:
    """spec 1 §8.1: no retries are performed internally, whatever the command; the next call is a new start."""
    async with proxied(url) as proxy:
        queue = await flavour.open(proxy.url, config)
        await queue.enqueue({"n": 1})
        [message] = await queue.read(block_ms=1_000)
        operations: dict[str, Callable[[], Awaitable[Any]]] = {
            "XADD": lambda: queue.enqueue({"n": 2}),
            "XREADGROUP": lambda: queue.read(block_ms=50),
            "XACK": lambda: queue.ack(message),
            "XPENDING": lambda: queue.claim_stale(min_idle_ms=0),
            "XCLAIM": lambda: queue.claim_stale(min_idle_ms=0),
        }
        before = proxy.count(command.encode())
        proxy.cut(command.encode())
        with pytest.raises(QueueError):
            await operations[command]()
        assert proxy.count(command.encode()) == before + 1
        await operations[command]()
        await queue.aclose()


# --- metrics -----------------------------------------------------------------------------------------


def _exposed(stream: str) -> set[str]:
    return {
        line.name
        for family in REGISTRY.collect()
        for line in family.samples
        if line.name.startswith("conquiet") and line.labels.get("stream") == stream
    }


async def test_the_four_metrics_have_exactly_their_names_and_one_label(queue: Queue, config: QueueConfig) -> None:
    """spec 1 §7: messages_read_total, messages_ack_total, messages_claimed_total, read_latency_seconds {stream}."""
    await queue.read(block_ms=5)
    exposed = {name for name in _exposed(config.stream_key) if not name.endswith("_created")}
    latency = "conquiet_queue_read_latency_seconds"
    assert exposed == {READ, ACKED, CLAIMED, f"{latency}_count", f"{latency}_sum", f"{latency}_bucket"}
    for family in families("conquiet_queue"):
        for line in family.samples:
            assert set(line.labels) - {"le"} == {"stream"}


async def test_the_metrics_count_what_redis_answered(queue: Queue, rival: Queue, config: QueueConfig) -> None:
    """spec 1 §7: messages read, acknowledged and claimed, and how long reads took, by stream."""
    stream = config.stream_key
    await queue.enqueue_many({"n": n} for n in range(5))
    messages = await queue.read(block_ms=50, count=4)
    await queue.read(block_ms=50, count=4)
    await queue.read(block_ms=5)
    assert (sample(READ, stream), sample(LATENCY, stream)) == (5, 3)
    await queue.ack(*messages[:3])
    await queue.ack(messages[0])
    assert sample(ACKED, stream) == 3
    await rival.claim_stale(min_idle_ms=0)
    assert sample(CLAIMED, stream) == 2
    assert sample("conquiet_queue_read_latency_seconds_sum", stream) > 0


async def test_the_metrics_are_emitted_only_on_success(queue: Queue, config: QueueConfig, look: Look) -> None:
    """spec 1 §7: be emitted only on successful Redis calls."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    names = (READ, ACKED, CLAIMED, LATENCY)
    before = [sample(name, config.stream_key) for name in names]
    await look.redis.delete(look.stream)
    await look.redis.set(look.stream, "a string")
    for call in (queue.read(block_ms=5), queue.ack(message), queue.claim_stale(min_idle_ms=0)):
        with pytest.raises(QueueError):
            await call
    assert [sample(name, config.stream_key) for name in names] == before == [1, 0, 0, 1]


async def test_failing_metrics_harm_no_call(queue: Queue, monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    """spec 1 §7: never raise exceptions."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("metrics are broken")

    monkeypatch.setattr(Counter, "inc", fail)
    monkeypatch.setattr(Histogram, "observe", fail)
    sent = await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    [claimed] = await queue.claim_stale(min_idle_ms=0)
    assert (message.id, claimed.id) == (sent, sent)
    await queue.ack(message)
    assert await look.pending() == []
