"""Input that cannot be meant: refused by name before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from conquiet import ConfigError, ConquietError, PayloadError, QueueConfig, QueueConsumer, RedisStreamsQueue
from tests.contracts.looking import Look, recorded

pytestmark = pytest.mark.any_server


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


BAD_PAYLOADS: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], "$"),
    "no dict but bytes": (b"{}", "$"),
    "NaN": ({"a": math.nan}, "$.a"),
    "infinity inside": ({"a": [{"b": -math.inf}]}, "$.a[0].b"),
    "bytes": ({"a": b"x"}, "$.a"),
    "70 digits": ({"a": 10**70}, "$.a"),
    "a lone surrogate": ({"a": "\udc00"}, "$.a"),
    "a key that is no string": ({1: 2}, "$"),
    "10,000 deep": (nested(10_000), "$.a.a.a"),
}
bad_payloads = pytest.mark.parametrize(("payload", "path"), BAD_PAYLOADS.values(), ids=BAD_PAYLOADS)


@bad_payloads
async def test_a_bad_payload_is_not_sent(payload: Any, path: str, queue: RedisStreamsQueue, look: Look) -> None:
    async with recorded(look.url) as commands:
        with pytest.raises(PayloadError) as caught:
            await queue.enqueue(payload)
        assert await commands.of() == []
    assert caught.value.path.startswith(path)
    assert await look.length() == 0


@bad_payloads
async def test_one_bad_payload_among_many_keeps_all_from_being_sent(
    payload: Any, path: str, queue: RedisStreamsQueue, look: Look
) -> None:
    many = [{"n": n} for n in range(2_000)]
    many[1_234] = payload
    async with recorded(look.url) as commands:
        with pytest.raises(PayloadError) as caught:
            await queue.enqueue_many(many)
        assert await commands.of() == []
    assert caught.value.path.startswith(f"payloads[1234]: {path}")
    assert await look.length() == 0


async def test_payloads_that_end_in_an_error_are_not_sent(queue: RedisStreamsQueue, look: Look) -> None:
    def payloads() -> Iterator[dict[str, Any]]:
        yield {"n": 1}
        raise LookupError("the source dried up")

    with pytest.raises(LookupError, match="the source dried up"):
        await queue.enqueue_many(payloads())
    assert await look.length() == 0


@pytest.mark.slow
async def test_a_payload_of_five_megabytes_comes_back_equal(queue: RedisStreamsQueue) -> None:
    payload = {"text": "Grüße 世界 " * 250_000, "rows": [{"id": n, "x": n / 7} for n in range(50_000)]}
    sent = await queue.enqueue(payload)
    many = await queue.enqueue_many([payload, {"n": 1}, payload])
    messages = await queue.read(block_ms=1_000, count=10)
    assert [message.id for message in messages] == [sent, *many]
    assert len(messages[0].raw) > 5_000_000
    assert [message.payload for message in messages] == [payload, payload, {"n": 1}, payload]
    await queue.ack(*messages)


@pytest.mark.parametrize("block_ms", [0, -1, True, False, 2.0, "5", math.inf], ids=repr)
async def test_a_bad_block_is_not_sent(block_ms: Any, queue: RedisStreamsQueue, look: Look) -> None:
    await queue.enqueue({"n": 1})
    async with recorded(look.url) as commands:
        for call in (queue.read(block_ms=block_ms), QueueConsumer(queue).next(block_ms=block_ms)):
            with pytest.raises(ConfigError, match="block_ms must be an integer of at least 1"):
                await call
        assert await commands.of() == []
    assert await look.pending() == []


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "5"], ids=repr)
async def test_a_bad_count_is_not_sent(count: Any, queue: RedisStreamsQueue, look: Look) -> None:
    await queue.enqueue({"n": 1})
    async with recorded(look.url) as commands:
        for call in (queue.read(block_ms=5, count=count), queue.claim_stale(min_idle_ms=0, count=count)):
            with pytest.raises(ConfigError, match="count must be an integer of at least 1"):
                await call
        assert await commands.of() == []
    assert await look.pending() == []


@pytest.mark.parametrize("name", ["", None, 7, b"bytes", "\ud800", ["a"]], ids=ascii)
@pytest.mark.parametrize("setting", ["stream_key", "consumer_group", "consumer_name"])
def test_a_bad_name_is_refused(setting: str, name: Any) -> None:
    names: dict[str, Any] = {"stream_key": "s", "consumer_group": "g", "consumer_name": "c", setting: name}
    with pytest.raises(ConfigError, match=f"{setting} must be"):
        QueueConfig(**names)


@pytest.mark.parametrize("config", [None, {"stream_key": "s"}, "s"], ids=repr)
def test_a_configuration_of_another_kind_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="QueueConfig"):
        RedisStreamsQueue("redis://127.0.0.1:1", config)


@pytest.mark.parametrize("number", [2**63, 10**30])
async def test_numbers_that_redis_cannot_hold_are_its_error_and_nothing_else(
    number: int, queue: RedisStreamsQueue, look: Look
) -> None:
    """Not an OverflowError from somewhere inside, and no read that never ends."""
    await queue.enqueue({"n": 1})
    for call in (
        queue.read(block_ms=number),
        queue.read(block_ms=5, count=number),
    ):
        with pytest.raises(ConquietError):
            await call
    assert await queue.claim_stale(min_idle_ms=number) == []
    assert await queue.claim_stale(min_idle_ms=0, count=number) == []
    assert await look.pending() == []
