"""Stopping (spec 1 §6.3, spec 2 §5)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from conquiet import QueueConfig, QueueError, QueueMessage
from tests.contracts.flavours import Consumer, Flavour, Queue
from tests.contracts.looking import Look, recorded
from tests.rigs.waiting import eventually


class Tx:
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class Factory:
    def begin(self) -> Tx:
        return Tx()


def unexpected(message: QueueMessage, tx: Tx) -> None:
    pytest.fail("nothing may be handled")


@pytest.fixture
async def patient(flavour: Flavour, url: str, config: QueueConfig) -> Consumer:
    """A consumer that waits for a minute."""
    return flavour.consumer(await flavour.open(url, replace(config, block_ms=60_000)))


async def test_after_stop_no_read_is_sent(consumer: Consumer, queue: Queue, url: str, look: Look) -> None:
    """spec 1 §6.3, spec 2 §5.1: upon stop(), no new reads are initiated: not by next, iteration or run."""
    await queue.enqueue({"n": 1})
    consumer.stop()
    assert consumer.stopping
    async with recorded(url) as commands:
        assert await consumer.next(block_ms=60_000) is None
        assert [message async for message in consumer.iter_messages()] == []
        await consumer.run(handler=unexpected, db_factory=Factory())
        assert await commands.of() == []
    assert await look.pending() == []


async def test_stop_ends_a_blocked_next_at_once(patient: Consumer, look: Look) -> None:
    """spec 1 §6.3: stop() is not kept waiting by a read that blocks for a minute."""
    waiting = asyncio.create_task(patient.next())
    await look.blocked()
    patient.stop()
    assert await asyncio.wait_for(waiting, 20) is None


async def test_stop_ends_a_blocked_iteration_at_once(patient: Consumer, look: Look) -> None:
    """spec 2 §7: stops yielding after stop() is observed, also in the middle of a block."""

    async def collect() -> list[QueueMessage]:
        return [message async for message in patient.iter_messages()]

    collecting = asyncio.create_task(collect())
    await look.blocked()
    patient.stop()
    assert await asyncio.wait_for(collecting, 20) == []


async def test_stop_ends_a_blocked_run_at_once(patient: Consumer, look: Look) -> None:
    """spec 2 §5.1: stop() ends run() in the middle of a block."""
    running = asyncio.create_task(patient.run(handler=unexpected, db_factory=Factory()))
    await look.blocked()
    patient.stop()
    await asyncio.wait_for(running, 20)


async def test_stop_works_from_another_thread(patient: Consumer, look: Look) -> None:
    """spec 2 §5.1: an explicit stop() mechanism, for whoever wants to end the consumer."""
    waiting = asyncio.create_task(patient.next())
    await look.blocked()
    await asyncio.to_thread(patient.stop)
    assert await asyncio.wait_for(waiting, 20) is None


async def test_stop_before_the_first_connection_sends_nothing(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §6.3: a stop that comes while the read is still on its way to the server is not overlooked."""
    consumer = flavour.consumer(flavour.queue(url, config))
    before = await look.calls("xreadgroup")
    waiting = asyncio.create_task(consumer.next(block_ms=60_000))
    await asyncio.sleep(0)
    consumer.stop()
    assert await asyncio.wait_for(waiting, 20) is None
    assert await look.calls("xreadgroup") - before <= 1


async def test_stop_ends_only_its_own_consumer(patient: Consumer, flavour: Flavour, queue: Queue, look: Look) -> None:
    """spec 2 §5.1: stop() of one consumer leaves another read of the same queue waiting."""
    other = flavour.consumer(queue)
    stopped = asyncio.create_task(patient.next())
    going_on = asyncio.create_task(other.next(block_ms=60_000))
    await look.blocked(2)
    patient.stop()
    assert await asyncio.wait_for(stopped, 20) is None
    assert not other.stopping
    sent = await queue.enqueue({"n": 1})
    message = await asyncio.wait_for(going_on, 20)
    assert message is not None
    assert message.id == sent


async def test_stop_may_be_called_again(patient: Consumer, look: Look) -> None:
    """spec 2 §5.1: a second stop() is no error, and there is no way back."""
    waiting = asyncio.create_task(patient.next())
    await look.blocked()
    for _ in range(5):
        patient.stop()
    assert await asyncio.wait_for(waiting, 20) is None
    patient.stop()
    assert await patient.next() is None


async def test_in_flight_messages_remain_pending(consumer: Consumer, queue: Queue, url: str, look: Look) -> None:
    """spec 1 §6.3, spec 2 §5.1: in-flight messages remain pending; no automatic ack, no reclaim occurs."""
    sent = await queue.enqueue_many({"n": n} for n in range(3))
    async with recorded(url) as commands:
        async with consumer, aclosing(cast("Any", consumer.iter_messages())) as messages:
            await anext(messages)
            await anext(messages)
            consumer.stop()
            assert [message async for message in messages] == []
        await queue.aclose()
        assert {words[0] for words in await commands.of()} == {"XREADGROUP"}
    assert [(row.id, row.consumer) for row in await look.pending()] == [(id, "consumer-1") for id in sent[:2]]


async def test_in_flight_messages_may_be_acked_after_stop(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 1 §6.3: stop() ends the reading, not the work in hand: it can be finished and acknowledged."""
    await queue.enqueue({"n": 1})
    message = await consumer.next(block_ms=50)
    assert message is not None
    consumer.stop()
    await consumer.ack(message)
    assert await look.pending() == []


async def test_another_consumer_takes_over_what_was_in_flight(consumer: Consumer, queue: Queue, rival: Queue) -> None:
    """spec 1 §6.3, spec 2 §5.1: pending messages may be reclaimed by another consumer later."""
    sent = await queue.enqueue({"n": 1})
    assert await consumer.next(block_ms=50) is not None
    consumer.stop()
    await queue.aclose()
    assert [message.id for message in await rival.claim_stale(min_idle_ms=0)] == [sent]


async def test_a_message_given_out_in_the_moment_of_the_stop_is_delivered(
    patient: Consumer, queue: Queue, look: Look
) -> None:
    """spec 1 §6.4: must not drop messages: what Redis handed out is returned, or it was not handed out at all."""
    waiting = asyncio.create_task(patient.next())
    await look.blocked()
    adding = asyncio.create_task(queue.enqueue({"n": 1}))
    patient.stop()
    sent, message = await asyncio.wait_for(asyncio.gather(adding, waiting), 20)
    assert await look.pending_ids() == ([] if message is None else [sent])
    assert await look.drain() == ([sent] if message is None else [])


async def test_a_stop_in_the_handler_lets_its_message_be_finished(consumer: Consumer, queue: Queue, look: Look) -> None:
    """spec 2 §5.1: no new reads after stop(), but the message in hand is committed and acknowledged as ever."""
    sent = await queue.enqueue_many({"n": n} for n in range(2))
    handled: list[str] = []

    def handler(message: QueueMessage, tx: Tx) -> None:
        consumer.stop()
        handled.append(message.id)

    await asyncio.wait_for(consumer.run(handler=handler, db_factory=Factory()), 20)
    assert handled == sent[:1]
    assert await look.pending() == []
    assert await look.drain() == sent[1:]


async def test_leaving_the_block_stops(flavour: Flavour, consumer: Consumer, queue: Queue, url: str) -> None:
    """spec 2 §5.1: the end of ``with`` is a stop: a consumer that was left reads no more."""
    async with consumer:
        before = consumer.stopping
    assert (before, consumer.stopping) == (False, True)
    await queue.enqueue({"n": 1})
    async with recorded(url) as commands:
        assert await consumer.next(block_ms=5) is None
        assert await commands.of() == []


@pytest.mark.parametrize("stopped_first", [False, True], ids=["closed", "stopped and closed"])
async def test_closing_the_queue_under_a_blocked_read_ends_it(
    stopped_first: bool, flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §6.3, §8.1: a read whose queue is closed ends, stopped or as a QueueError, and leaves no connection."""
    before = await look.clients()
    for moment in range(12):
        queue = await flavour.open(url, config)
        consumer = flavour.consumer(queue)
        waiting = asyncio.create_task(consumer.next(block_ms=60_000))
        await look.blocked()
        if stopped_first:
            consumer.stop()
        for _ in range(moment):
            await asyncio.sleep(0)
        await queue.aclose()
        await eventually(waiting.done, "the read has ended")
        assert not waiting.cancelled(), "nobody cancelled the caller"
        assert waiting.exception() is None or isinstance(waiting.exception(), QueueError)

    async def only_those_before() -> bool:
        return await look.clients() <= before

    await eventually(only_those_before, "every connection of the queue is closed")
