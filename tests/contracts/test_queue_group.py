"""The consumer group: made at startup, once, and never again (spec 1 §5.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from redis.exceptions import ResponseError

from conquiet import QueueConfig, QueueError
from tests.contracts.flavours import Flavour, Queue
from tests.contracts.looking import Look, recorded

NEEDS_GROUP: dict[str, Callable[[Queue], Awaitable[object]]] = {
    "read": lambda queue: queue.read(block_ms=5),
    "claim_stale": lambda queue: queue.claim_stale(min_idle_ms=0),
    "backlog_stats": lambda queue: queue.backlog_stats(),
}
needs_group = pytest.mark.parametrize("operation", NEEDS_GROUP.values(), ids=NEEDS_GROUP)


async def test_the_group_is_created_at_startup_from_the_beginning_with_the_stream(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §5.2: XGROUP CREATE <stream> <group> 0-0 MKSTREAM must be attempted at startup."""
    async with recorded(url) as commands, flavour.queue(url, config):
        assert await commands.of() == [
            ["XGROUP", "CREATE", config.stream_key, config.consumer_group, "0-0", "MKSTREAM"]
        ]
    assert [group["name"] for group in await look.groups()] == [b"group"]
    assert await look.length() == 0


async def test_what_was_enqueued_before_the_group_existed_is_delivered(
    flavour: Flavour, url: str, config: QueueConfig
) -> None:
    """spec 1 §5.2: the group starts at 0-0, so that nothing in the stream is skipped."""
    queue = flavour.queue(url, config)
    sent = await queue.enqueue({"n": 1})
    await queue.open()
    assert [message.id for message in await queue.read(block_ms=50)] == [sent]


async def test_an_existing_group_is_no_error_and_stays_where_it_is(
    flavour: Flavour, url: str, config: QueueConfig, queue: Queue
) -> None:
    """spec 1 §5.2: the BUSYGROUP error must be ignored."""
    await queue.enqueue({"n": 1})
    await queue.read(block_ms=50)
    again = await flavour.open(url, replace(config, consumer_name="consumer-2"))
    assert await again.read(block_ms=5) == []


async def test_any_other_error_at_startup_propagates(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §5.2: any other error must propagate, here that the key holds no stream."""
    await look.redis.set(config.stream_key, "a string")
    queue = flavour.queue(url, config)
    for _ in range(2):
        with pytest.raises(QueueError, match="WRONGTYPE") as caught:
            await queue.open()
        assert isinstance(caught.value.__cause__, ResponseError)
    with pytest.raises(QueueError, match="WRONGTYPE"):
        async with queue:
            pytest.fail("the queue must not open")


async def test_an_unreachable_server_at_startup_propagates(flavour: Flavour, config: QueueConfig) -> None:
    """spec 1 §5.2: any other error must propagate, here that nobody listens."""
    with pytest.raises(QueueError) as caught:
        async with flavour.queue("redis://127.0.0.1:1", config):
            pytest.fail("the queue must not open")
    assert caught.value.__cause__ is not None


@needs_group
async def test_without_a_startup_the_first_call_that_needs_the_group_creates_it(
    operation: Callable[[Queue], Awaitable[object]], flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §5.2: a queue that nobody opened has its startup at the first read, claim or look at the backlog."""
    await operation(flavour.queue(url, config))
    assert [group["name"] for group in await look.groups()] == [b"group"]


async def test_enqueue_needs_no_group(flavour: Flavour, url: str, config: QueueConfig, look: Look) -> None:
    """spec 1 §5.3: enqueue adds by XADD and nothing else; a mere producer makes no group."""
    await flavour.queue(url, config).enqueue({"n": 1})
    assert await look.groups() == []


async def test_the_group_is_created_once_however_many_calls_come_first(
    flavour: Flavour, url: str, config: QueueConfig
) -> None:
    """spec 1 §5.2: creation belongs to the startup, which an object has once."""
    queue = flavour.queue(url, config)
    async with recorded(url) as commands:
        await asyncio.gather(queue.open(), queue.backlog_stats(), queue.claim_stale(), queue.read(block_ms=5))
        await queue.open()
        assert len(await commands.of("XGROUP")) == 1


@needs_group
async def test_a_destroyed_group_is_an_error_and_is_not_recreated(
    operation: Callable[[Queue], Awaitable[object]], queue: Queue, look: Look
) -> None:
    """spec 1 §5.2: group recreation is not automatic (XGROUP DESTROY)."""
    await queue.enqueue({"n": 1})
    await look.redis.xgroup_destroy(look.stream, look.group)
    for _ in range(3):
        with pytest.raises(QueueError, match="NOGROUP") as caught:
            await operation(queue)
        assert isinstance(caught.value.__cause__, ResponseError)
    assert await look.groups() == []
    assert await look.length() == 1


@needs_group
async def test_a_deleted_stream_is_an_error_and_nothing_is_recreated(
    operation: Callable[[Queue], Awaitable[object]], queue: Queue, look: Look
) -> None:
    """spec 1 §5.2: group recreation is not automatic (DEL of the stream, and a producer that goes on)."""
    await look.redis.delete(look.stream)
    with pytest.raises(QueueError):
        await operation(queue)
    assert not await look.redis.exists(look.stream)
    await queue.enqueue({"n": 1})
    await queue.open()
    with pytest.raises(QueueError, match="NOGROUP"):
        await operation(queue)
    assert await look.groups() == []


async def test_a_group_destroyed_under_a_blocked_read_is_an_error(queue: Queue, look: Look) -> None:
    """spec 1 §5.2, §8.1: a read that waits for a group that is gone says so, instead of waiting on."""
    reading = asyncio.create_task(queue.read(block_ms=60_000))
    await look.blocked()
    await look.redis.xgroup_destroy(look.stream, look.group)
    with pytest.raises(QueueError, match="NOGROUP"):
        await asyncio.wait_for(reading, 20)
    assert await look.groups() == []
