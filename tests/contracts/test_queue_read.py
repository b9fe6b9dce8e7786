"""Reading and acknowledging (spec 1 §2, §5.4 and §5.5)."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from conquiet import ConfigError, QueueConfig, QueueError, QueueMessage
from tests.contracts.flavours import Flavour, Queue
from tests.contracts.looking import Look, recorded

NOT_POSITIVE_INTEGERS = [0, -1, -5_000, True, False, 1.0, 0.5, "100", b"100", [1]]


async def test_a_read_is_one_xreadgroup_for_what_nobody_was_given(queue: Queue, url: str) -> None:
    """spec 1 §5.4: must use XREADGROUP GROUP <group> <consumer> STREAMS <stream> >."""
    async with recorded(url) as commands:
        await queue.read(block_ms=7, count=3)
        [words] = await commands.of()
    names = queue.config
    assert words[:4] == ["XREADGROUP", "GROUP", names.consumer_group, names.consumer_name]
    assert words[4:] == ["COUNT", "3", "BLOCK", "7", "STREAMS", names.stream_key, ">"]


@pytest.mark.parametrize("block_ms", NOT_POSITIVE_INTEGERS, ids=repr)
async def test_block_ms_that_is_no_positive_integer_is_rejected_before_anything_is_sent(
    block_ms: Any, flavour: Flavour, config: QueueConfig
) -> None:
    """spec 1 §5.4: block_ms must be a positive integer; 0, which Redis takes for infinite, is rejected."""
    # Nobody listens there: had anything been sent, the error would be another.
    queue = flavour.queue("redis://127.0.0.1:1", config)
    with pytest.raises(ConfigError, match="block_ms"):
        await queue.read(block_ms=block_ms)


@pytest.mark.parametrize("count", NOT_POSITIVE_INTEGERS, ids=repr)
async def test_count_that_is_no_positive_integer_is_rejected_before_anything_is_sent(
    count: Any, flavour: Flavour, config: QueueConfig
) -> None:
    """spec 1 §5.4: count is a number of messages; Redis would take 0 for all there are."""
    queue = flavour.queue("redis://127.0.0.1:1", config)
    with pytest.raises(ConfigError, match="count"):
        await queue.read(block_ms=10, count=count)


async def test_count_is_advisory(queue: Queue) -> None:
    """spec 1 §5.4: at most count messages come, and fewer when there are fewer."""
    await queue.enqueue_many({"n": n} for n in range(5))
    assert [len(await queue.read(block_ms=20, count=3)) for _ in range(3)] == [3, 2, 0]


async def test_count_defaults_to_one(queue: Queue, look: Look) -> None:
    """spec 1 §4.1, §5.4: max_read_count is 1, and so is count."""
    await queue.enqueue_many({"n": n} for n in range(3))
    assert len(await queue.read(block_ms=50)) == 1
    assert len(await look.pending()) == 1


async def test_the_configured_block_and_count_are_the_defaults(flavour: Flavour, url: str, config: QueueConfig) -> None:
    """spec 1 §4.1: block_ms and max_read_count of the configuration are what a read uses unless told."""
    queue = await flavour.open(url, replace(config, block_ms=11, max_read_count=4))
    async with recorded(url) as commands:
        await queue.read()
        [words] = await commands.of("XREADGROUP")
        assert words[4:8] == ["COUNT", "4", "BLOCK", "11"]


async def test_the_defaults_of_the_configuration() -> None:
    """spec 1 §4.1: block_ms = 5_000, max_read_count = 1, claim_idle_ms = 60_000."""
    config = QueueConfig("stream", "group", "consumer")
    assert (config.stream_key, config.consumer_group, config.consumer_name) == ("stream", "group", "consumer")
    assert (config.block_ms, config.max_read_count, config.claim_idle_ms) == (5_000, 1, 60_000)


async def test_returned_messages_become_pending(queue: Queue, look: Look) -> None:
    """spec 1 §5.4: returned messages become pending, with the consumer that read them."""
    ids = await queue.enqueue_many({"n": n} for n in range(3))
    messages = await queue.read(block_ms=50, count=2)
    assert [message.id for message in messages] == ids[:2]
    assert [(row.id, row.consumer, row.deliveries) for row in await look.pending()] == [
        (ids[0], "consumer-1", 1),
        (ids[1], "consumer-1", 1),
    ]


async def test_the_returned_list_may_be_empty(queue: Queue, look: Look) -> None:
    """spec 1 §5.4: the returned list may be empty."""
    assert await queue.read(block_ms=5, count=10) == []
    assert await look.pending() == []


async def test_a_read_waits_for_a_message_that_comes_later(queue: Queue, look: Look) -> None:
    """spec 1 §5.4: a read blocks on the server, and gets what is added meanwhile."""
    reading = asyncio.create_task(queue.read(block_ms=60_000))
    await look.blocked()
    sent = await queue.enqueue({"n": 1})
    [message] = await asyncio.wait_for(reading, 20)
    assert (message.id, message.payload) == (sent, {"n": 1})


async def test_a_blocked_read_delays_no_other_call(queue: Queue, look: Look) -> None:
    """spec 1 §5.1: direct interaction: an acknowledgment is not queued behind a read that waits."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    reading = asyncio.create_task(queue.read(block_ms=60_000))
    await look.blocked()
    async with asyncio.timeout(20):
        await queue.ack(message)
        assert await queue.claim_stale(min_idle_ms=0) == []
        assert (await queue.backlog_stats()).pending == 0
        await queue.enqueue({"n": 2})
        await reading


async def test_a_message_tells_where_it_is_from(queue: Queue, config: QueueConfig) -> None:
    """spec 1 §5.4: what a QueueMessage is: stream, group, ID and payload of one delivery."""
    sent = await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    assert (message.stream, message.group, message.id) == (config.stream_key, config.consumer_group, sent)
    assert (message.payload, message.raw, message.delivery_count) == ({"n": 1}, b'{"n":1}', 1)


async def test_messages_come_in_the_order_of_their_ids(queue: Queue) -> None:
    """spec 1 §2.2: ordering within the sequence of entry IDs."""
    sent = await queue.enqueue_many({"n": n} for n in range(50))
    read: list[QueueMessage] = []
    while batch := await queue.read(block_ms=20, count=7):
        read += batch
    assert [message.id for message in read] == sent
    assert [message.payload["n"] for message in read] == list(range(50))


async def test_a_message_is_not_delivered_to_two_consumers_at_once(queue: Queue, rival: Queue) -> None:
    """spec 1 §2.3: a message will not be delivered concurrently to multiple consumers."""
    sent = await queue.enqueue_many({"n": n} for n in range(200))

    async def take(some: Queue) -> list[str]:
        ids: list[str] = []
        while batch := await some.read(block_ms=20, count=3):
            ids += [message.id for message in batch]
        return ids

    shares = await asyncio.gather(take(queue), take(rival), take(queue))
    assert Counter(id for share in shares for id in share) == Counter(sent)


async def test_an_unacknowledged_message_is_not_read_again(
    flavour: Flavour, url: str, config: QueueConfig, queue: Queue, look: Look
) -> None:
    """spec 1 §5.4, §9: read gives new messages only; retry is via staleness, also for the same name after a crash."""
    await queue.enqueue({"n": 1})
    await queue.read(block_ms=50)
    await queue.aclose()
    again = await flavour.open(url, config)
    assert await again.read(block_ms=5) == []
    assert len(await look.pending()) == 1


async def test_groups_are_independent(flavour: Flavour, url: str, config: QueueConfig, queue: Queue) -> None:
    """spec 1 §1.1: consumer groups: each group gets every message, and acknowledges for itself."""
    other = await flavour.open(url, replace(config, consumer_group="other"))
    sent = await queue.enqueue({"n": 1})
    [mine] = await queue.read(block_ms=50)
    await queue.ack(mine)
    [theirs] = await other.read(block_ms=50)
    assert (theirs.id, theirs.group) == (sent, "other")


# --- acknowledging -----------------------------------------------------------------------------------


async def test_ack_is_one_xack(queue: Queue, url: str, config: QueueConfig, look: Look) -> None:
    """spec 1 §5.5: ack calls XACK, and the message is pending no more."""
    await queue.enqueue_many({"n": n} for n in range(3))
    first, second, third = await queue.read(block_ms=50, count=3)
    async with recorded(url) as commands:
        await queue.ack(second)
        assert await commands.of() == [["XACK", config.stream_key, config.consumer_group, second.id]]
    assert await look.pending_ids() == [first.id, third.id]
    await queue.ack(first, third)
    assert await look.pending() == []


async def test_an_acknowledged_message_stays_in_the_stream(queue: Queue, look: Look) -> None:
    """spec 1 §1.2, §5.5: ack takes a message off the pending list; nothing is deleted."""
    sent = await queue.enqueue({"n": 1})
    await queue.ack(*await queue.read(block_ms=50))
    assert [id for id, _ in await look.entries()] == [sent]


async def test_acking_twice_is_allowed(queue: Queue) -> None:
    """spec 1 §5.5: acking an already-acked ID is allowed."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    for _ in range(3):
        await queue.ack(message)
    await queue.ack(message, message)


async def test_acking_what_was_never_pending_is_allowed(queue: Queue, config: QueueConfig, look: Look) -> None:
    """spec 1 §5.5: acking a non-pending ID is allowed: unknown, not yet delivered, or no message at all."""
    undelivered = await queue.enqueue({"n": 1})
    for id in ("1-1", undelivered):
        await queue.ack(QueueMessage(config.stream_key, config.consumer_group, id, (b"data", b"{}")))
    await queue.ack()
    [message] = await queue.read(block_ms=50)
    assert message.id == undelivered
    assert len(await look.pending()) == 1


async def test_any_consumer_may_ack(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §5.5: XACK is by group and ID; who read the message does not matter."""
    await queue.enqueue({"n": 1})
    await rival.ack(*await queue.read(block_ms=50))
    assert await look.pending() == []


async def test_errors_of_ack_propagate(queue: Queue, look: Look) -> None:
    """spec 1 §5.5: errors propagate."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    await look.redis.delete(look.stream)
    await look.redis.set(look.stream, "a string")
    with pytest.raises(QueueError, match="WRONGTYPE") as caught:
        await queue.ack(message)
    assert isinstance(caught.value.__cause__, ResponseError)


async def test_a_message_of_another_queue_is_refused_and_nothing_is_acked(queue: Queue, look: Look) -> None:
    """spec 1 §5.5: ack is for messages of this stream and group; a mistake is told, not half done."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    for stream, group in (("other", message.group), (message.stream, "other")):
        with pytest.raises(ConfigError):
            await queue.ack(message, QueueMessage(stream, group, message.id, (b"data", b"{}")))
    assert await look.pending_ids() == [message.id]


async def test_an_unacknowledged_message_stays_pending_after_close(queue: Queue, look: Look) -> None:
    """spec 1 §2.1, §6.2: no auto-ack: closing acknowledges nothing."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    async with queue:
        assert message.payload == {"n": 1}
    assert await look.pending_ids() == [message.id]
    with pytest.raises(QueueError, match="closed"):
        await queue.ack(message)
