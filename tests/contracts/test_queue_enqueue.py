"""Writing: the format of entries, IDs, and no second try (spec 1 §3 and §5.3)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import OutOfMemoryError

from conquiet import PayloadError, QueueConfig, QueueError
from tests.contracts.flavours import Flavour, Queue
from tests.contracts.looking import Look, proxied, recorded

PAYLOAD: dict[str, Any] = {
    "text": 'Grüße, 世界 \U0001f680 "quoted" \\ \n \x00',
    "whole": -(2**63),
    "large": 2**64 - 1,
    "real": 0.1,
    "flag": True,
    "nothing": None,
    "list": [1, [2, {"three": 3.0}]],
    "": {},
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # every text that UTF-8 has a form for
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


async def test_an_entry_has_exactly_one_field_named_data_that_is_json_in_utf8(queue: Queue, look: Look) -> None:
    """spec 1 §3.1: exactly one field, named "data", its value a UTF-8 encoded JSON string; no other fields."""
    await queue.enqueue(PAYLOAD)
    await queue.enqueue_many([PAYLOAD, {}])
    stored = [fields for _, fields in await look.entries()]
    assert [list(fields) for fields in stored] == [[b"data"]] * 3
    assert [json.loads(fields[b"data"].decode("utf-8")) for fields in stored] == [PAYLOAD, PAYLOAD, {}]


async def test_an_entry_is_added_by_one_plain_xadd(flavour: Flavour, url: str, config: QueueConfig) -> None:
    """spec 1 §3.1: XADD mystream * data "<json>"; nothing else is sent, and nothing is trimmed by the way."""
    queue = flavour.queue(url, config)
    async with recorded(url) as commands:
        await queue.enqueue({"n": 1})
        assert await commands.of() == [["XADD", config.stream_key, "*", "data", '{"n":1}']]


async def test_enqueue_returns_the_entry_id(queue: Queue, look: Look) -> None:
    """spec 1 §5.3: enqueue returns the entry's ID, as a string."""
    ids = [await queue.enqueue({"n": n}) for n in range(3)]
    assert ids == [id for id, _ in await look.entries()]


async def test_concurrent_enqueues_each_get_their_own_id(queue: Queue) -> None:
    """spec 1 §5.3: the ID that a call returns is that of its own entry, whoever else is writing."""
    ids = await asyncio.gather(*(queue.enqueue({"n": n}) for n in range(60)))
    messages = await queue.read(block_ms=50, count=100)
    assert {message.id: message.payload["n"] for message in messages} == dict(zip(ids, range(60), strict=True))


async def test_enqueue_many_returns_all_ids_in_the_order_of_the_payloads(queue: Queue, look: Look) -> None:
    """spec 1 §5.3: of many entries too, each gets its ID back, and they stand in the stream as they were given."""
    ids = await queue.enqueue_many({"n": n} for n in range(1_201))
    entries = await look.entries()
    assert ids == [id for id, _ in entries]
    assert [json.loads(fields[b"data"])["n"] for _, fields in entries] == list(range(1_201))
    assert await queue.enqueue_many([]) == []


async def test_a_refused_enqueue_is_not_tried_again(queue: Queue, url: str, look: Look) -> None:
    """spec 1 §5.3: no retries, after an error reply."""
    await look.redis.delete(look.stream)
    await look.redis.set(look.stream, "a string")
    async with recorded(url) as commands:
        with pytest.raises(QueueError, match="WRONGTYPE"):
            await queue.enqueue({"n": 1})
        assert len(await commands.of("XADD")) == 1


async def test_an_enqueue_whose_answer_is_lost_is_not_tried_again(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §5.3, §8.1: no retries, after a lost connection: one call leaves one entry at most."""
    async with proxied(url) as proxy:
        queue = await flavour.open(proxy.url, config)
        cut = proxy.cut(b"XADD")
        with pytest.raises(QueueError) as caught:
            await queue.enqueue({"n": 1})
        assert caught.value.__cause__ is not None
        assert cut.is_set()
        assert proxy.count(b"XADD") == 1
        assert await look.length() == 1
        await queue.aclose()


async def test_a_torn_enqueue_many_says_which_entries_are_known_to_be_written(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §5.3, §8.1: a failure half way through many is an error that hides nothing of what was done."""
    async with proxied(url) as proxy:
        queue = await flavour.open(proxy.url, config)
        proxy.cut(b"XADD", skip=500)
        with pytest.raises(QueueError) as caught:
            await queue.enqueue_many({"n": n} for n in range(1_200))
        await queue.aclose()
    known = caught.value.entry_ids
    written = [id for id, _ in await look.entries()]
    assert len(known) == 1_200
    assert list(known[:500]) == written[:500]
    assert set(known[500:]) == {None}


async def test_a_refused_enqueue_many_says_which_entries_were_written(
    flavour: Flavour, url: str, config: QueueConfig, look: Look
) -> None:
    """spec 1 §8.1: an error reply among many is an error, with each confirmed ID in its place."""
    async with proxied(url) as proxy:
        queue = await flavour.open(proxy.url, config)
        proxy.refuse(b'"n":1}', b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
        with pytest.raises(QueueError, match="maxmemory") as caught:
            await queue.enqueue_many({"n": n} for n in range(3))
        await queue.aclose()
    assert isinstance(caught.value.__cause__, OutOfMemoryError)
    first, last = [id for id, _ in await look.entries()]
    assert caught.value.entry_ids == (first, None, last)


@pytest.mark.parametrize("payload", [[1], "text", b"bytes", None, 7, (("a", 1),)], ids=repr)
async def test_a_payload_that_is_no_dict_is_refused(payload: Any, queue: Queue, look: Look) -> None:
    """spec 1 §3.2: JSON must decode into Dict[str, Any], so only a dict is sent."""
    with pytest.raises(PayloadError) as caught:
        await queue.enqueue(payload)
    assert caught.value.path == "$"
    assert await look.length() == 0


@pytest.mark.parametrize(
    "value", [b"binary", bytearray(b"binary"), memoryview(b"binary")], ids=["bytes", "array", "view"]
)
async def test_binary_data_is_refused(value: object, queue: Queue, look: Look) -> None:
    """spec 1 §3.2: binary data is not supported."""
    with pytest.raises(PayloadError) as caught:
        await queue.enqueue({"a": [0, {"b": value}]})
    assert caught.value.path == "$.a[1].b"
    assert await look.length() == 0


@pytest.mark.slow
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.dictionaries(st.text(), JSON, max_size=5), min_size=1, max_size=5))
async def test_what_was_sent_comes_back_equal(payloads: list[dict[str, Any]], queue: Queue) -> None:
    """spec 1 §3.2: whatever JSON can carry arrives unchanged: values, their types and their order."""
    ids = [await queue.enqueue(payloads[0]), *await queue.enqueue_many(payloads[1:])]
    messages = await queue.read(block_ms=1_000, count=10)
    assert [message.id for message in messages] == ids
    # repr tells -0.0 from 0.0, and 1 from True and 1.0
    assert [repr(message.payload) for message in messages] == [repr(payload) for payload in payloads]
    await queue.ack(*messages)
