"""What becomes of entries that are no messages, cannot be copied, or are gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conquiet import Backoff, Outgoing
from conquiet.kit.clock import ManualClock
from conquiet.message import Message
from conquiet.topics import Broker, DeadLetterPolicy
from conquiet.wire.keys import Keys
from tests.topics.consuming import Recorder, buried, finished, impatient
from tests.topics.staging import Stage

pytestmark = [pytest.mark.cluster_too, pytest.mark.guarantee]


@pytest.fixture
async def broker(url: str, keys: Keys, clock: ManualClock) -> AsyncIterator[Broker]:
    async with Broker(url, namespace=keys.namespace, clock=clock) as broker:
        await broker.create_topic("orders", partitions=2)
        yield broker


async def fail(message: Message) -> None:
    raise ValueError("no good")


# --- what is no message ---------------------------------------------------------------------------------


STRANGE: list[dict[str, str | bytes]] = [
    {"foreign": "x", "other": "y"},
    {"payload": "{not json"},
    {"payload": "1", "headers": "[1"},
    {"payload": "1", "headers": '{"a": 1}'},
    {"payload": "1", "timestamp": "1", "headers": "[]"},
    {"payload": "1", "key": b"\xff\xfe"},
    {"payload": "1", "retryCount": "many"},
    {"payload": "1", "maxRetries": ""},
    {"payload": "1", "codec": "pickle"},
]


@pytest.mark.parametrize("order", ["unordered", "block_key", "block_partition"])
async def test_what_is_no_message_is_buried_raw_and_its_neighbours_are_handled(
    broker: Broker, stage: Stage, order: str
) -> None:
    stream = stage.instance.keys.partition("orders", 0)
    for number, fields in enumerate(STRANGE):
        await broker.send("orders", number, partition=0)
        await stage.call(stream, "XADD", stream, "*", *[word for pair in fields.items() for word in pair])
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient(order=order)):
        letters = await buried(broker, "orders", len(STRANGE))
        await finished(broker, "orders", "g")
    assert seen.payloads == list(range(len(STRANGE)))
    for letter, fields in zip(letters, STRANGE, strict=True):
        words = [word if isinstance(word, bytes) else word.encode() for pair in fields.items() for word in pair]
        assert letter.fields == tuple(words)
        assert (letter.reason, letter.attempts) == ("malformed", 0)
        assert letter.error_type == "conquiet.errors.MalformedMessageError"


@pytest.mark.any_server
async def test_a_handler_never_sees_what_is_no_message_in_a_batch(broker: Broker, stage: Stage) -> None:
    stream = stage.instance.keys.partition("orders", 0)
    await broker.send("orders", 1, partition=0)
    await stage.call(stream, "XADD", stream, "*", "payload", "{")
    await broker.send("orders", 2, partition=0)
    got: list[Any] = []

    async def handle(batch: Any) -> None:
        got.extend(message.payload for message in batch)

    async with broker.subscribe("orders", group="g", handler=handle, options=impatient(batch_handler=True)):
        await buried(broker, "orders")
        await finished(broker, "orders", "g")
    assert got == [1, 2]


# --- what cannot be copied, or is gone --------------------------------------------------------------------


def wide(count: int) -> list[str]:
    """The words of a message with so many fields, which only another program can write."""
    words = ["payload", "1", "timestamp", "1"]
    for number in range(count - 2):
        words += [f"f{number}", "x"]
    return words


@pytest.mark.any_server
@pytest.mark.parametrize("mode", ["park", "requeue"])
@pytest.mark.parametrize("delay", [0.0, 0.01])
async def test_an_entry_that_is_deleted_while_it_is_handled_and_then_fails_leaves_nothing(
    broker: Broker, stage: Stage, mode: str, delay: float
) -> None:
    """Else it would be pending for ever, and retention could remove nothing behind it."""
    stream = stage.instance.keys.partition("orders", 0)

    async def delete_and_fail(message: Message) -> None:
        if message.payload == 1:
            await stage.call(stream, "XDEL", stream, message.id)
            raise RuntimeError

    seen = Recorder(delete_and_fail)
    options = impatient(mode=mode, backoff=Backoff(delay, delay, "fixed"))
    async with broker.subscribe("orders", group="g", handler=seen, options=options):
        await broker.send_batch("orders", [Outgoing(number, partition=0) for number in range(3)])
        await seen.saw(3)
        await finished(broker, "orders", "g")
    attempts = stage.instance.keys.attempts(stream, "g")
    assert await stage.call(attempts, "EXISTS", attempts) == 0


@pytest.mark.parametrize("delay", [0.0, 0.01])
async def test_an_entry_too_wide_to_be_copied_is_tried_again_where_it_is(
    broker: Broker, stage: Stage, delay: float
) -> None:
    """A copy of it would stop every group of the partition: no script can append it."""

    async def fail_once(message: Message) -> None:
        if message.payload == 1 and message.retry_count == 0:
            raise RuntimeError

    stream = stage.instance.keys.partition("orders", 0)
    await stage.call(stream, "XADD", stream, "*", *wide(4100))
    await broker.send("orders", 2, partition=0)
    seen, other = Recorder(fail_once), Recorder()
    options = impatient(mode="requeue", backoff=Backoff(delay, delay, "fixed"))
    async with (
        broker.subscribe("orders", group="g", handler=seen, options=options),
        broker.subscribe("orders", group="other", handler=other, options=options),
    ):
        await seen.saw(3)
        await finished(broker, "orders", "g", "other")
    assert sorted(seen.payloads) == [1, 1, 2]
    assert sorted(other.payloads) == [1, 2]
    assert [message.retry_count for message in seen.messages if message.payload == 1] == [0, 1]


@pytest.mark.any_server
async def test_a_copy_too_wide_that_waits_to_be_appended_is_appended_without_its_fields(
    broker: Broker, stage: Stage
) -> None:
    """As an earlier version left it: what is appended names the entry, and stops nobody."""
    stream = stage.instance.keys.partition("orders", 0)
    delayed, items = stage.instance.keys.delayed(stream), stage.instance.keys.delayed_items(stream)
    told = ["retryCount", "1", "originalMessageId", "0/5-5", "onlyGroup", "g"]
    await stage.call(items, "HSET", items, "g/5-5", msgspec.msgpack.encode([*wide(4100), *told]))
    await stage.call(delayed, "ZADD", delayed, 1, "g/5-5")
    seen = Recorder()
    async with broker.subscribe("orders", group="g", handler=seen, options=impatient()):
        await broker.send("orders", 2, partition=0)
        [letter] = await buried(broker, "orders")
        await seen.saw(1)
    assert letter.reason == "malformed"
    assert letter.fields[2:4] == (b"originalMessageId", b"0/5-5")


@pytest.mark.any_server
async def test_a_transform_that_makes_a_letter_too_wide_costs_no_letter(broker: Broker) -> None:
    def widen(fields: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {b"%d" % number: b"x" for number in range(4100)}

    policy = DeadLetterPolicy(transform=widen)
    options = impatient(max_retries=0, dead_letter=policy)
    async with broker.subscribe("orders", group="g", handler=fail, options=options):
        await broker.send("orders", 1)
        [letter] = await buried(broker, "orders")
        await finished(broker, "orders", "g")
    assert (letter.fields, letter.error) == ((), "no good")
