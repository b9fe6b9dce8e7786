"""A stop while the server does not answer: what it says within a second still counts, and nothing waits for longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest

from conquiet import QueueConfig, QueueConsumer, RedisStreamsQueue
from conquiet.wire.interrupt import Interrupt
from tests.contracts.looking import Look
from tests.rigs.proxy import Proxy
from tests.rigs.waiting import LONG, eventually, turns

pytestmark = pytest.mark.any_server

BLOCK_MS: Final = 60_000
REFUSED: Final = b"-NOPERM this user has no permissions to run the 'client|unblock' command\r\n"


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def queue(proxy: Proxy, config: QueueConfig) -> AsyncIterator[RedisStreamsQueue]:
    async with RedisStreamsQueue.connect(proxy.url, config) as queue:
        yield queue


@pytest.fixture
def consumer(queue: RedisStreamsQueue) -> QueueConsumer:
    return QueueConsumer(queue, handle_signals=False)


async def test_a_message_that_comes_late_is_delivered(
    consumer: QueueConsumer, queue: RedisStreamsQueue, proxy: Proxy, look: Look
) -> None:
    sent = await queue.enqueue({"n": 1})
    hold = proxy.hold(b"XREADGROUP")
    reading = asyncio.ensure_future(consumer.next(BLOCK_MS))
    await asyncio.wait_for(hold.caught.wait(), LONG)
    consumer.stop()
    await asyncio.wait([reading], timeout=0.2)
    assert not reading.done(), "the server answers: what it says about the read is waited for"
    hold.release()
    message = await asyncio.wait_for(reading, LONG)
    assert message is not None
    assert message.id == sent


@pytest.mark.slow
async def test_a_message_that_does_not_come_stays_pending_and_the_queue_works_on(
    consumer: QueueConsumer, queue: RedisStreamsQueue, proxy: Proxy, look: Look
) -> None:
    sent = await queue.enqueue({"n": 1})
    hold = proxy.hold(b"XREADGROUP", once=True)
    reading = asyncio.ensure_future(consumer.next(BLOCK_MS))
    await asyncio.wait_for(hold.caught.wait(), LONG)
    consumer.stop()
    assert await asyncio.wait_for(reading, LONG) is None
    assert await look.pending_ids() == [sent]
    assert await queue.read(block_ms=1) == [], "the next read has an answer of its own"
    assert [message.id for message in await queue.claim_stale(min_idle_ms=0)] == [sent]


@pytest.mark.slow
async def test_a_server_that_refuses_to_wake_a_read_is_waited_for(
    consumer: QueueConsumer, queue: RedisStreamsQueue, proxy: Proxy, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.refuse(b"UNBLOCK", REFUSED, times=2)  # also when it is asked whether that is allowed
    reading = asyncio.ensure_future(consumer.next(BLOCK_MS))
    await look.blocked()
    consumer.stop()
    await eventually(lambda: "cannot wake" in caplog.text, "it is told so")
    await asyncio.wait([reading], timeout=1.3)
    assert not reading.done()
    sent = await queue.enqueue({"n": 1})
    message = await asyncio.wait_for(reading, LONG)
    assert message is not None
    assert message.id == sent


async def test_the_end_of_other_work_at_a_request() -> None:
    interrupt, never = Interrupt(), asyncio.Event()

    async def late() -> None:
        await turns()

    async def fails() -> None:
        raise TimeoutError("of its own")

    asyncio.get_running_loop().call_later(0.05, interrupt.request)
    assert not await asyncio.wait_for(interrupt.ends(never.wait), LONG)
    assert not await asyncio.wait_for(interrupt.ends(never.wait), LONG), "requested before"
    assert await asyncio.wait_for(interrupt.ends(late, within=LONG), LONG)
    with pytest.raises(TimeoutError, match="of its own"):
        await Interrupt().ends(fails)
