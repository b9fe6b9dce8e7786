"""One message after another (spec 1 §6.1, §6.2 and §6.4 to §6.6; spec 2 §3 to §4 and §6 to §10)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from conquiet import ConfigError, MalformedMessageError, QueueConfig, QueueConsumer, QueueError, QueueMessage, sync
from conquiet.metrics import NAMES
from tests.contracts.flavours import Consumer, Flavour, Queue
from tests.contracts.looking import Look, recorded, sample
from tests.rigs.asking import round_trips
from tests.rigs.scraping import families
from tests.rigs.waiting import eventually


def iterating(consumer: Consumer) -> aclosing[Any]:
    """The consumer's messages, for a loop that is left early."""
    return aclosing(cast("Any", consumer.iter_messages()))


async def consume(consumer: Consumer, handled: list[QueueMessage]) -> None:
    async for message in consumer.iter_messages():
        handled.append(message)
        await consumer.ack(message)


@pytest.mark.parametrize("count", [2, 10])
def test_a_configuration_that_reads_more_than_one_is_refused(count: int, flavour: Flavour, config: QueueConfig) -> None:
    """spec 1 §4.2: max_read_count MUST be 1 when using QueueConsumer."""
    queue = flavour.queue("redis://127.0.0.1:1", replace(config, max_read_count=count))
    with pytest.raises(ConfigError, match="max_read_count"):
        flavour.consumer(queue)


@pytest.mark.parametrize("kind", [QueueConsumer, sync.QueueConsumer])
def test_a_consumer_is_over_a_queue(kind: Any) -> None:
    """spec 1 §6.1: the consumer is a loop over a RedisStreamsQueue; anything else is a mistake, told at once."""
    with pytest.raises(ConfigError, match="RedisStreamsQueue"):
        kind("redis://127.0.0.1:1")


async def test_the_consumer_has_the_queues_configuration(consumer: Consumer, config: QueueConfig) -> None:
    """spec 1 §6.1: one configuration for both."""
    assert consumer.config == config
    assert not consumer.stopping


# --- next --------------------------------------------------------------------------------------------


async def test_next_returns_one_message(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 1 §6.4, spec 2 §6.1: returns at most one message."""
    sent = await queue.enqueue_many({"n": n} for n in range(3))
    message = await consumer.next(block_ms=50)
    assert isinstance(message, QueueMessage)
    assert (message.id, message.payload) == (sent[0], {"n": 0})
    assert await look.pending_ids() == sent[:1]


async def test_next_returns_none_if_nothing_arrives(consumer: Consumer) -> None:
    """spec 1 §6.4, spec 2 §6.1: returns None if no message is available."""
    assert await consumer.next(block_ms=5) is None


async def test_next_blocks_in_redis(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 2 §6.1: must block using Redis Streams (XREADGROUP)."""
    waiting = asyncio.create_task(consumer.next(block_ms=60_000))
    await look.blocked()
    sent = await queue.enqueue({"n": 1})
    message = await asyncio.wait_for(waiting, 20)
    assert message is not None
    assert message.id == sent


async def test_next_uses_the_configured_block_unless_told(flavour: Flavour, url: str, config: QueueConfig) -> None:
    """spec 2 §6.1: if block_ms is not provided, the consumer MUST use its configured default."""
    consumer = flavour.consumer(await flavour.open(url, replace(config, block_ms=17)))
    async with recorded(url) as commands:
        await consumer.next()
        await consumer.next(None)
        await consumer.next(block_ms=9)
        words = await commands.of("XREADGROUP")
    assert [line[line.index("BLOCK") + 1] for line in words] == ["17", "17", "9"]
    assert [line[line.index("COUNT") + 1] for line in words] == ["1", "1", "1"]


@pytest.mark.parametrize("block_ms", [0, -1, True, 1.5, "5"], ids=repr)
async def test_next_rejects_what_is_no_positive_integer(block_ms: Any, consumer: Consumer, url: str) -> None:
    """spec 1 §5.4: block_ms=0 is rejected here too, before anything is sent."""
    async with recorded(url) as commands:
        with pytest.raises(ConfigError, match="block_ms"):
            await consumer.next(block_ms=block_ms)
        assert await commands.of() == []


async def test_next_propagates_redis_errors(consumer: Consumer, look: Look) -> None:
    """spec 2 §6.1: must propagate Redis errors as QueueError."""
    await look.redis.delete(look.stream)
    await look.redis.set(look.stream, "a string")
    with pytest.raises(QueueError) as caught:
        await consumer.next(block_ms=5)
    assert isinstance(caught.value.__cause__, ResponseError)


async def test_next_drops_nothing(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 1 §6.4, spec 2 §6.1: must not drop messages: each that is pending was returned, each sent one comes."""
    sent = await queue.enqueue_many({"n": n} for n in range(40))
    got: list[str] = []
    while (message := await consumer.next(block_ms=20)) is not None:
        got.append(message.id)
        assert await look.pending_ids() == got
    assert got == sent


# --- iteration ---------------------------------------------------------------------------------------


async def test_iteration_yields_messages_until_stopped(consumer: Consumer, queue: Queue) -> None:
    """spec 1 §6.5, spec 2 §7: yields messages until stopped; stops yielding after stop() is observed."""
    sent = await queue.enqueue_many({"n": n} for n in range(5))
    got: list[str] = []
    async for message in consumer.iter_messages():
        got.append(message.id)
        if len(got) == 3:
            consumer.stop()
    assert got == sent[:3]


async def test_iteration_goes_on_when_nothing_arrived_for_a_while(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 2 §7: an empty read is no end: blocks using the configured block_ms, again and again."""
    queue = await flavour.open(url, replace(config, block_ms=10))
    consumer = flavour.consumer(queue)
    handled: list[QueueMessage] = []
    before = await look.calls("xreadgroup")
    consuming = asyncio.create_task(consume(consumer, handled))

    async def empty_reads() -> bool:
        return await look.calls("xreadgroup") >= before + 3

    await eventually(empty_reads, "three reads have come back empty")
    sent = await queue.enqueue({"n": 1})
    await eventually(lambda: len(handled) == 1, "the message is handled")
    consumer.stop()
    await asyncio.wait_for(consuming, 20)
    assert [message.id for message in handled] == [sent]


async def test_an_idle_consumer_waits_in_one_read(flavour: Flavour, url: str, config: QueueConfig, look: Look) -> None:
    """spec 1 §6.4, §6.5, spec 2 §3, §7: does not spin: one XREADGROUP for the whole of its block, and no other."""
    consumer = flavour.consumer(await flavour.open(url, replace(config, block_ms=60_000)))
    async with recorded(url) as commands:
        consuming = asyncio.create_task(consume(consumer, []))
        await look.blocked()
        await round_trips(url, 20)
        reads = await commands.of("XREADGROUP")
    consumer.stop()
    await asyncio.wait_for(consuming, 20)
    assert len(reads) == 1


async def test_an_idle_consumer_reads_no_more_often_than_its_block(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §6.5, spec 2 §7: does not swallow CPU when idle, with a short block either."""
    consumer = flavour.consumer(await flavour.open(url, replace(config, block_ms=50)))
    before = await look.calls("xreadgroup")
    started = time.monotonic()
    consuming = asyncio.create_task(consume(consumer, []))

    async def some_reads() -> bool:
        return await look.calls("xreadgroup") >= before + 4

    await eventually(some_reads, "four reads")
    consumer.stop()
    await asyncio.wait_for(consuming, 20)
    reads = await look.calls("xreadgroup") - before
    # However slow the machine, each read but the last has lasted its block (with some play for timers).
    assert reads <= (time.monotonic() - started) / 0.045 + 1


async def test_iteration_holds_one_message_only(consumer: Consumer, queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §6.2, spec 2 §4: no buffering beyond one message: the others are free for other consumers."""
    sent = await queue.enqueue_many({"n": n} for n in range(4))
    async with iterating(consumer) as messages:
        first = await anext(messages)
        assert await look.pending_ids() == [first.id] == sent[:1]
        assert [message.id for message in await rival.read(block_ms=50, count=3)] == sent[1:]


async def test_an_exception_of_user_code_ends_the_loop_as_it_is(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 1 §6.2, spec 2 §4, §7: no exception handling of user code: not caught, not swallowed, not retried."""
    sent = await queue.enqueue_many({"n": n} for n in range(2))
    problem = RuntimeError("a handler failed")
    seen: list[str] = []

    async def work() -> None:
        async with iterating(consumer) as messages:
            async for message in messages:
                seen.append(message.id)
                raise problem

    with pytest.raises(RuntimeError) as caught:
        await work()
    assert caught.value is problem
    assert seen == sent[:1]
    assert [(row.id, row.deliveries) for row in await look.pending()] == [(sent[0], 1)]


async def test_iteration_propagates_redis_errors_and_has_ended(
    consumer: Consumer, url: str, queue: Queue, look: Look
) -> None:
    """spec 2 §7, §9.1: propagates all exceptions; surfaces the failure as a QueueError and stops further processing."""
    await queue.enqueue({"n": 1})
    messages: AsyncIterator[QueueMessage] = consumer.iter_messages()
    await anext(messages)
    await look.redis.xgroup_destroy(look.stream, look.group)
    with pytest.raises(QueueError, match="NOGROUP"):
        await anext(messages)
    async with recorded(url) as commands:
        with pytest.raises(StopAsyncIteration):
            await anext(messages)
        await round_trips(url)
        assert await commands.of() == []


async def test_a_malformed_message_is_delivered_like_any_other(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 1 §6.4: must not drop messages, poison included: user code decides."""
    poison = await look.add(b"wrong", b"1")
    sent = await queue.enqueue({"n": 1})
    outcomes: dict[str, object] = {}
    async for message in consumer.iter_messages():
        try:
            outcomes[message.id] = message.payload
        except MalformedMessageError as error:
            outcomes[message.id] = error.fields
        await consumer.ack(message)
        if message.id == sent:
            consumer.stop()
    assert outcomes == {poison: (b"wrong", b"1"), sent: {"n": 1}}
    assert await look.pending() == []


# --- acknowledgment and recovery ---------------------------------------------------------------------


async def test_ack_is_the_users_to_call(consumer: Consumer, queue: Queue, url: str, look: Look) -> None:
    """spec 1 §6.2, §6.6, spec 2 §4, §8: must be called explicitly; never automatic, nor after the next message."""
    sent = await queue.enqueue_many({"n": n} for n in range(3))
    async with recorded(url) as commands:
        got = [message async for message in _until_empty(consumer, 3)]
        assert await commands.of("XACK") == []
    assert await look.pending_ids() == sent
    await consumer.ack(got[1])
    assert await look.pending_ids() == [sent[0], sent[2]]


async def _until_empty(consumer: Consumer, messages: int) -> AsyncIterator[QueueMessage]:
    async with iterating(consumer) as iterator:
        for _ in range(messages):
            yield await anext(iterator)


async def test_a_message_that_is_not_acked_comes_back_by_staleness_only(
    consumer: Consumer, queue: Queue, rival: Queue
) -> None:
    """spec 1 §6.6, spec 2 §8: failure to acknowledge implies retry via staleness; the consumer itself never retries."""
    sent = await queue.enqueue({"n": 1})
    assert await consumer.next(block_ms=50) is not None
    assert await consumer.next(block_ms=5) is None
    assert [message.id for message in await rival.claim_stale(min_idle_ms=0)] == [sent]


async def test_there_is_no_timeout_on_a_delivery(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 1 §6.6, spec 2 §4: no timeout enforcement: a message may be held for days and acked then."""
    await queue.enqueue({"n": 1})
    message = await consumer.next(block_ms=50)
    assert message is not None
    await look.age([message.id], 1_000_000_000)
    assert await consumer.next(block_ms=5) is None
    assert [(row.consumer, row.deliveries) for row in await look.pending()] == [("consumer-1", 1)]
    await consumer.ack(message)
    assert await look.pending() == []


async def test_ack_propagates_redis_errors(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 2 §8: Redis failures must propagate as QueueError."""
    await queue.enqueue({"n": 1})
    message = await consumer.next(block_ms=50)
    assert message is not None
    await look.redis.delete(look.stream)
    await look.redis.set(look.stream, "a string")
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await consumer.ack(message)


async def test_the_consumer_never_claims(consumer: Consumer, queue: Queue, rival: Queue, url: str, look: Look) -> None:
    """spec 2 §4, §5.1, §10.2: no background reclaiming, not on every loop, not when idle, not on shutdown."""
    [stale] = await queue.enqueue_many([{"n": 0}])
    await rival.read(block_ms=50)
    await look.age([stale], 1_000_000_000)
    sent = await queue.enqueue({"n": 1})
    async with recorded(url) as commands, consumer:
        message = await consumer.next(block_ms=50)
        assert message is not None
        assert message.id == sent
        await consumer.ack(message)
        assert await consumer.next(block_ms=20) is None
        consumer.stop()
        used = {words[0] for words in await commands.of()}
    assert used == {"XREADGROUP", "XACK"}
    assert [(row.id, row.consumer) for row in await look.pending()] == [(stale, "consumer-2")]


async def test_new_messages_come_before_stale_ones(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 2 §10.2, §10.3: new messages > stale messages, also for those that its own name left behind."""
    left, *new = await queue.enqueue_many({"n": n} for n in range(4))
    assert await consumer.next(block_ms=50) is not None
    await look.age([left], 1_000_000_000)
    got = [await consumer.next(block_ms=50) for _ in new]
    assert [message.id for message in got if message] == new
    [recovered] = await queue.claim_stale(min_idle_ms=500_000_000)
    assert recovered.id == left


async def test_the_consumer_does_nothing_between_calls(consumer: Consumer, url: str) -> None:
    """spec 2 §2, §4: no background work, no connection health state, no liveness signals."""
    async with consumer:
        await consumer.next(block_ms=5)
        async with recorded(url) as commands:
            for _ in range(20):
                assert await commands.all() == []


async def test_the_consumer_keeps_no_memory_of_a_failure(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 2 §9.1: MUST NOT track connection state: after an error the next call is tried like the first."""
    await look.redis.delete(look.stream)
    await look.redis.set(look.stream, "a string")
    with pytest.raises(QueueError):
        await consumer.next(block_ms=5)
    assert not consumer.stopping
    await look.redis.delete(look.stream)
    await look.redis.xgroup_create(look.stream, look.group, "0-0", mkstream=True)
    sent = await queue.enqueue({"n": 1})
    message = await consumer.next(block_ms=50)
    assert message is not None
    assert message.id == sent


# --- metrics -----------------------------------------------------------------------------------------


async def test_metrics_are_the_lower_levels_and_counted_once(
    consumer: Consumer, queue: Queue, config: QueueConfig
) -> None:
    """spec 1 §6.1, spec 2 §3, §12.1: metrics via lower-level components; no gauges, no health metrics of its own."""
    await queue.enqueue({"n": 1})
    async with consumer:
        message = await consumer.next(block_ms=50)
        assert message is not None
        await consumer.ack(message)
    assert sample("conquiet_queue_messages_read_total", config.stream_key) == 1
    assert sample("conquiet_queue_messages_ack_total", config.stream_key) == 1
    assert sample("conquiet_queue_read_latency_seconds_count", config.stream_key) == 1
    assert {family.name for family in families("conquiet_queue")} == {
        name.removesuffix("_total") for name in NAMES if name.startswith("conquiet_queue")
    }
